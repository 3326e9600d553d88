"""What `dsc plan` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsc.compiler.planning.capacity import MEMORY_SHARE, Fit, Settings
from dsc.compiler.planning.gpus import find_gpu
from dsc.compiler.planning.plan import Plan, limits_to_try
from dsc.compiler.planning.rates import Prediction
from dsc.runtime.inspect_tables import PIPE_COLUMNS, make_table, size_text
from dsc.runtime.manifest import Serving

SHOWN_WAYS = 12


def show(plan: Plan, console: Console | None = None) -> None:
    """Print a plan."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS)
    console.print(_facts(plan))
    console.print(_weights(plan))
    if plan.fits:
        console.print(_gpus(plan))
        console.print(_contexts(plan.fits))
    for rates in plan.rates:
        if rates.decode:
            console.print(_rates(rates, plan.recipe.parallel.num_ranks))
    for note in (*plan.notes, *_rate_notes(plan.rates)):
        console.print(f"note: {escape(note)}", highlight=False)
    for line in _tries(plan):
        console.print(f"try: {escape(line)}", highlight=False, soft_wrap=True)


def _facts(plan: Plan) -> Table:
    recipe, stages = plan.recipe, plan.stages
    parallel, limits = recipe.parallel, recipe.limits
    ranks = [f"{size_text(stage.weight_bytes)}" for stage in stages]
    per_token = " + ".join(f"{size:,} {name}" for name, size in plan.token_bytes.items())
    ways = [f"tensor {way.tensor} expert {way.expert}" for way in plan.ways]
    more = f", {len(ways) - SHOWN_WAYS} more" if len(ways) > SHOWN_WAYS else ""
    rows = [
        ("recipe", f"{recipe.name} of {recipe.model}, target {recipe.target}"),
        ("read from", plan.source.read_from),
        ("checkpoint", size_text(plan.source.bytes)),
        ("engine weights", size_text(plan.weight_bytes)),
        ("ranks", f"{parallel.num_ranks}: tensor {parallel.tensor}, expert {parallel.expert}, pipeline {parallel.pipeline}"),
        ("weights of a rank", ", ".join(ranks) + (" by stage" if len(stages) > 1 else "")),
        (f"{plan.mesh.num_ranks} ranks a stage as", ", ".join(ways[:SHOWN_WAYS]) + more),
        ("cache a token", f"{sum(plan.token_bytes.values()):,} bytes = {per_token}, {recipe.kv_cache.dtype}"),
        ("limits", f"{limits.batch_tokens:,} tokens a step, {limits.sequences} sequences, context {limits.context_tokens:,}"),
        ("serves with", _serving(plan)),
        ("build", f"reads {size_text(plan.build.read_bytes)}, needs {size_text(plan.build.disk_bytes)} of disk, about {size_text(plan.build.ram_bytes)} of memory"),
        ("", f"about {_time(plan.build.seconds)} of conversion on {plan.build.cores} cores, by measured rates, where disks keep up"),
    ]  # fmt: skip
    return make_table(f"plan of {recipe.name}", ("", ""), rows, header=False)


def _serving(plan: Plan) -> str:
    found = plan.serving
    if found is None:
        return "what its server is told: nothing is suggested for this target, or it does not fit"
    return f"{_settings(found)}, kept in the engine for {find_gpu(found.gpu).title}"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _weights(plan: Plan) -> Table:
    classes = [stage.bytes_by_class for stage in plan.stages]
    shown: set[str] = set()
    rows = []
    for total in plan.weights:
        first = total.weight_class not in shown
        shown.add(total.weight_class)
        rank = max(held.get(total.weight_class, 0) for held in classes)
        rows.append(
            (
                total.weight_class,
                total.format,
                f"{total.count:,}",
                size_text(total.bytes),
                size_text(rank) if first else "",
            )
        )
    return make_table("weights", ("class", "format", "weights", "engine", "fullest rank"), rows, right=(2, 3, 4))


def _gpus(plan: Plan) -> Table:
    rows = [
        (
            item.gpu.title,
            "fits" if item.fits else "no",
            size_text(item.usable_bytes),
            size_text(item.weight_bytes),
            size_text(item.step_bytes),
            size_text(item.cache_bytes),
            f"{item.cache_tokens:,}",
            _settings(item.serving) if item.serving else item.reasons[0],
        )
        for item in plan.fits
    ]
    columns = ("GPU", "", "usable", "weights", "step", "cache", "tokens", "serves with, or why not")
    ranks, tokens = plan.recipe.parallel.num_ranks, plan.fits[0].sequence_tokens
    title = f"{ranks} x GPU, {MEMORY_SHARE:.0%} of its memory, sequences of {tokens:,} tokens"
    return make_table(title, columns, rows, right=(2, 3, 4, 5, 6))


def _settings(found: Settings | Serving) -> str:
    return f"{found.sequences} sequences, {found.cache_blocks:,} cache blocks, {found.batch_tokens:,} tokens a step"


def _tries(plan: Plan) -> list[str]:
    """Limits that would serve better than the recipe's, GPUs that the same are best for together."""
    gpus: dict[str, list[str]] = defaultdict(list)
    for item in plan.fits:
        if item.better is not None:
            limits = limits_to_try(plan.recipe, item)
            text = f"in the recipe {limits}, which serves better with {item.better.cache_blocks:,} cache blocks"
            gpus[text].append(item.gpu.title)
    return [f"{text} on {', '.join(names)}" for text, names in gpus.items()]


def _rates(rates: Prediction, ranks: int) -> Table:
    rows = [
        (
            "decode",
            f"{rate.batch} of {rate.context:,}",
            f"{rate.seconds * 1e3:.2f}",
            f"{rate.tokens_per_s:,.0f}",
            f"{1 / rate.seconds:,.0f}",
        )
        for rate in rates.decode
    ]
    if rates.prefill:
        prefill = rates.prefill
        prompts = f"{prefill.prompts} of {prefill.tokens:,}"
        rows.append(("prefill", prompts, f"{prefill.seconds * 1e3:.1f}", f"{prefill.tokens_per_s:,.0f}", ""))
    columns = ("", "sequences", "ms", "tokens/s", "tokens/s each")
    title = f"predicted on {ranks} x {rates.gpu}, from kernels measured on {', '.join(rates.measured)}"
    return make_table(title, columns, rows, right=(1, 2, 3, 4))


def _rate_notes(rates: Sequence[Prediction]) -> list[str]:
    """What rates leave out, and why GPUs have none: those of one reason together."""
    notes = dict.fromkeys(note for item in rates for note in item.notes)
    for why in dict.fromkeys(item.why for item in rates if item.why):
        gpus = ", ".join(item.gpu for item in rates if item.why == why)
        notes[f"no rates are predicted for {gpus}: {why}"] = None
    return list(notes)


def _contexts(fits: Sequence[Fit]) -> Table:
    contexts = list(fits[0].sequences_at)
    rows = [(item.gpu.title, *(f"{item.sequences_at[tokens]:,}" for tokens in contexts)) for item in fits]
    columns = ("GPU", *(f"{tokens:,}" for tokens in contexts))
    return make_table("sequences at once, by their tokens", columns, rows, right=range(1, len(contexts) + 1))
