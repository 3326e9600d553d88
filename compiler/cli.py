"""The `dsc` command. Each command imports what it needs when it runs, so that help and errors come at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dsc.runtime.errors import DscError

PATH = click.Path(path_type=Path)  # what is there is judged by the code that reads it, which says more than click


class Commands(click.Group):
    """A group that lists commands in the order they are written and turns a user's mistake into exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DscError as error:
            fault = error
        except BrokenPipeError:
            raise  # the reader of our output left: click ends quietly
        except OSError as error:  # a folder that cannot be written, a disk that is full: not our code's fault
            fault = DscError(error.strerror or str(error), where=str(error.filename or ""))
        click.echo(fault.text(), err=True)
        return ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsc", message="dsc %(version)s")
def main() -> None:
    """Compile DeepSeek checkpoints ahead of time, look into the engines, run them."""


@main.command(name="compile")
@click.option("--recipe", required=True, help="A YAML file, or the bare name of a packaged recipe such as r1-wint4.")
@click.option("--model", help="A checkpoint folder or Hugging Face name, instead of the recipe's model.")
@click.option("--output", type=PATH, help="Engine folder to write. Default: ./<recipe>.engine")
@click.option("--target", help="Compile for another target than the recipe's.")
@click.option("--ranks", type=int, help="Compile for this number of tensor ranks instead of the recipe's.")
@click.option("--dump", type=PATH, help="Write the graph's text after each pass that changed it into this folder.")
@click.option(
    "--download", is_flag=True, help="Fetch the checkpoint from Hugging Face when it is not here (resumable)."
)
@click.option(
    "--weights",
    type=click.Choice(["checkpoint", "random"]),
    default="checkpoint",
    show_default=True,
    help="random: made up, from config.json alone, for plans and benchmarks.",
)
@click.option("--layers", type=int, help="Random weights: keep this many decoder layers, dense ones first.")
@click.option("--mtp", is_flag=True, help="Random weights: keep the MTP layer of a model cut by --layers.")
@click.option("--max-ram", help="Memory to keep to, such as 2GB. Default: a quarter of the machine.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def compile_(
    recipe: str,
    model: str | None,
    output: Path | None,
    target: str | None,
    ranks: int | None,
    dump: Path | None,
    download: bool,
    weights: str,
    layers: int | None,
    mtp: bool,
    max_ram: str | None,
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    A build that was cut short is gone on with.
    """
    from dsc.compiler.build import RandomWeights, compile_engine
    from dsc.compiler.progress import Progress
    from dsc.compiler.ram import parse_bytes
    from dsc.compiler.recipe import load_recipe

    random = RandomWeights(layers, mtp) if weights == "random" else None
    if random is None and (layers is not None or mtp):
        raise DscError("--layers and --mtp cut a model of random weights", try_="--weights random")
    loaded = load_recipe(recipe).override(target, ranks)
    with Progress(quiet=as_json) as progress:
        built = compile_engine(
            loaded,
            model=model,
            output=output,
            dump=dump,
            download=download,
            random=random,
            max_ram=None if max_ram is None else parse_bytes(max_ram),
            progress=progress,
        )
    click.echo(json.dumps(built.to_json(), indent=2) if as_json else built.text())


@main.command()
@click.argument("recipe")
@click.option("--model", help="A config.json, a folder that has one, or a known model's name. Default: the recipe's.")
@click.option("--target", help="Plan for another target than the recipe's.")
@click.option("--ranks", type=int, help="Plan for this number of tensor ranks instead of the recipe's.")
@click.option(
    "--gpu", "gpus", multiple=True, help="h200, h100, a800, ...; repeat for several. Default: all of the target."
)
@click.option("--sequence-tokens", type=int, help="What a sequence holds on average, for suggested settings.  [4096]")
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def plan(
    recipe: str,
    model: str | None,
    target: str | None,
    ranks: int | None,
    gpus: tuple[str, ...],
    sequence_tokens: int | None,
    as_json: bool,
) -> None:
    """Tell what an engine will be, before any download. Exit code 1: it does not fit on a GPU that --gpu names."""
    from dsc.compiler.planning.plan import make_plan
    from dsc.compiler.recipe import load_recipe

    made = make_plan(load_recipe(recipe).override(target, ranks), model, gpus, sequence_tokens)
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=2))
    else:
        from dsc.compiler.planning.tables import show

        show(made)
    if gpus and not all(item.fits for item in made.fits):
        sys.exit(1)


@main.command()
@click.argument("engine", type=PATH)
@click.option("--against", help="The checkpoint, a folder or a Hugging Face name. Default: the model of the recipe.")
@click.option("--text", type=PATH, help="A text to judge by. Default: documentation that every Python has.")
@click.option("--windows", type=click.IntRange(1), default=8, show_default=True, help="Pieces of the text.")
@click.option("--window-tokens", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a piece.")
@click.option("--device", help="Take the logits from the engine loaded there as a whole. Default: layer by layer here.")
@click.option("--max-kl", type=float, help="Fail above this KL, in nats a token.")
@click.option("--json", "as_json", is_flag=True, help="The certificate as JSON.")
def verify(
    engine: Path,
    against: str | None,
    text: Path | None,
    windows: int,
    window_tokens: int,
    device: str | None,
    max_kl: float | None,
    as_json: bool,
) -> None:
    """Compare an engine with the unquantized model.

    The result is kept in the engine as its numerics certificate.
    """
    from dsc.compiler.certify.certify import check_budget, verify_engine
    from dsc.compiler.certify.tables import show
    from dsc.compiler.progress import Progress

    with Progress(quiet=as_json) as progress:
        certificate = verify_engine(
            engine, against, text, windows=windows, window_tokens=window_tokens, device=device, progress=progress
        )
    if as_json:
        click.echo(json.dumps(certificate.to_json(), indent=2))
    else:
        show(certificate)
    check_budget(certificate, {} if max_kl is None else {"max_kl": max_kl}, str(engine))


@main.command()
@click.argument("engine", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--layer", type=int, help="One layer, node by node.")
@click.option("--fusion", is_flag=True, help="Only the fusion report.")
@click.option(
    "--kernels", is_flag=True, help="Every GPU kernel: what it uses, what launches it, how often a step does."
)
@click.option("--verify", is_flag=True, help="Also hash every file and compare with the manifest.")
def inspect(engine: Path, as_json: bool, layer: int | None, fusion: bool, kernels: bool, verify: bool) -> None:
    """Show what was fused, what was quantized, and why."""
    from dsc.runtime import inspect as view
    from dsc.runtime.artifact import EngineFolder

    asked = [
        name for name, given in (("--fusion", fusion), ("--kernels", kernels), ("--layer", layer is not None)) if given
    ]
    if len(asked) > 1:
        raise DscError(f"{' and '.join(asked)} show different things", try_="one of them")
    folder = EngineFolder.open(engine)
    if verify:
        folder.verify_hashes()
    if as_json:
        data = view.describe(folder, layer=layer)
        if fusion:
            data = {key: data[key] for key in ("engine", "fusion", "declined")}
        if kernels:
            data = {key: data[key] for key in ("engine", "kernels", "steps")}
        click.echo(json.dumps(data, indent=2))
    elif kernels:
        view.show_kernels(folder)
    else:
        view.show(folder, layer=layer, fusion=fusion)
    if verify and not as_json:
        click.echo("every file matches the manifest")


@main.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Every difference, as JSON.")
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Tell two engines apart.

    By model, recipe, fusions and every weight's largest change. Exit code 0: the same, 1: not.
    """
    from dsc.runtime import diff as compare
    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.diff_tables import show

    found = compare.diff(EngineFolder.open(a), EngineFolder.open(b))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)
    sys.exit(0 if found["same"] else 1)


@main.command()
@click.argument("engine", type=PATH)
@click.argument("name", metavar="TENSOR|NODE")
@click.option("--json", "as_json", is_flag=True, help="Everything known of it, as JSON.")
def explain(engine: Path, name: str, as_json: bool) -> None:
    """Tell where a tensor or node comes from.

    And what was done to it and why, its error and its kernel.
    """
    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.explain import explain as look
    from dsc.runtime.explain_text import text

    found = look(EngineFolder.open(engine), name)
    click.echo(json.dumps(found, indent=2) if as_json else text(found))


@main.command()
@click.argument("engine", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
def migrate(engine: Path, as_json: bool) -> None:
    """Bring an engine of an older schema version to this one.

    Without its checkpoint, in place, after hashing every file.
    """
    from dsc.compiler.progress import Progress
    from dsc.runtime.migrate import migrate as run

    with Progress(quiet=as_json) as progress:
        done = run(engine, lambda nbytes: progress.step("hashes", nbytes), progress.advance)
    click.echo(json.dumps(done.to_json(), indent=2) if as_json else done.text())


@main.command()
@click.argument("engine", type=PATH)
@click.option("--html", is_flag=False, flag_value="", metavar="[FILE]", help="The file. Default: ./<engine>.html")
def report(engine: Path, html: str | None) -> None:
    """Write an engine's report as one page of HTML.

    Self-contained: fusions, bytes, errors, memory plan.
    """
    from dsc.compiler.report_page import report_page
    from dsc.runtime.artifact import EngineFolder

    page = report_page(EngineFolder.open(engine))
    file = Path(html or f"{engine.resolve().name.removesuffix('.engine')}.html")
    file.write_text(page, encoding="utf-8")
    click.echo(str(file))


@main.command()
@click.argument("engine", type=PATH)
@click.option(
    "--prompt", "prompts", multiple=True, help="Text to continue; repeat for a batch. Default: standard input."
)
@click.option("--chat", is_flag=True, help="Put each prompt through the chat template as a user's message.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, help="0 is greedy. This and the next two default to the model's own.")
@click.option("--top-p", type=float, help="Draw from the likeliest tokens that make up this probability.")
@click.option("--top-k", type=int, help="Draw from this many of the likeliest tokens; 0: all.")
@click.option("--min-p", type=float, help="Leave out tokens less likely than this part of the likeliest.")
@click.option("--seed", type=int, help="The same seed gives the same text. Default: another each time.")
@click.option("--stop", multiple=True, help="End at this text; repeat for several.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-text token.")
@click.option("--drafts", type=int, help="Tokens to draft ahead with the MTP layer. Default: the engine's.")
@click.option("--device", help="cpu or cuda. Default: the engine's target.")
@click.option(
    "--cache-tokens", type=int, help="Tokens the cache holds. Default: as many as the limits ask or memory has."
)
@click.option("--gpu-memory", type=float, help="GB of the GPU's memory to take in all, weights and cache.")
@click.option("--json", "as_json", is_flag=True, help="Token ids, text and finish reason as JSON.")
def generate(
    engine: Path,
    prompts: tuple[str, ...],
    chat: bool,
    device: str | None,
    cache_tokens: int | None,
    gpu_memory: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text with an engine; one prompt is shown as it comes."""
    from dsc import runtime

    options["stop"] = list(options["stop"])
    texts = list(prompts) or [_read_prompt()]
    loaded = runtime.load(engine, device, cache_tokens=cache_tokens, gpu_memory=_gigabytes(gpu_memory))
    click.echo(loaded.load_text(), err=True)
    asked = [[{"role": "user", "content": text}] if chat else text for text in texts]
    if len(texts) == 1 and not as_json:
        stream = loaded.stream(asked[0], **options)  # refuses before anything is printed
        click.echo("" if chat else texts[0], nl=False)
        for piece in stream:
            click.echo(piece, nl=False)
        click.echo()
        return
    outputs = loaded.generate(asked, **options)
    if as_json:
        rows = [
            {"prompt": text, "text": out.text, "token_ids": out.token_ids, "finish_reason": out.finish_reason}
            for text, out in zip(texts, outputs, strict=True)
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for text, out in zip(texts, outputs, strict=True):
        click.echo(f"{'' if chat else text}{out.text}\n[{out.finish_reason}, {len(out.token_ids)} tokens]\n")


def _read_prompt() -> str:
    """A prompt from standard input, as it is."""
    if sys.stdin.isatty():
        click.echo("prompt, then Ctrl-D:", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DscError("standard input is not UTF-8 text", got=str(error)) from error


@main.command()
@click.argument("engine", type=PATH)
@click.option(
    "--batch",
    help="Sequences of a decode step, as 1,16,64; prefill takes as many prompts at once as fill the largest step. Default: 1 to 256 as far as the engine goes.",
)
@click.option("--context", help="Tokens of each sequence, as 2048,4096. Default: 2048 to 8192 as far as it goes.")
@click.option(
    "--steps", type=click.IntRange(1), default=16, show_default=True, help="Decode steps to take the median of."
)
@click.option("--no-prefill", is_flag=True, help="Decode only.")
@click.option("--nodes", is_flag=True, help="Also time every kind of node by itself.")
@click.option("--plot", type=PATH, help="Write a PNG of rate against batch, with the floor (needs matplotlib).")
@click.option("--device", help="cpu or cuda. Default: the engine's target.")
@click.option("--gpu-memory", type=float, help="GB of the GPU's memory to take in all, weights and cache.")
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON.")
def bench(
    engine: Path,
    batch: str | None,
    context: str | None,
    steps: int,
    no_prefill: bool,
    nodes: bool,
    plot: Path | None,
    device: str | None,
    gpu_memory: float | None,
    as_json: bool,
) -> None:
    """Measure an engine against the least time its steps can take."""
    from dsc.runtime.bench import run_bench
    from dsc.runtime.bench_tables import show

    data = run_bench(
        engine,
        batches=_numbers("--batch", batch),
        contexts=_numbers("--context", context),
        steps=steps,
        prefill=not no_prefill,
        nodes=nodes,
        device=device,
        gpu_memory=_gigabytes(gpu_memory),
    )
    if plot is not None:
        from dsc.runtime.bench_plot import plot as write_plot

        write_plot(data, plot)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        show(data)


@main.command()
@click.argument("folder", type=PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="All facts as JSON.")
def doctor(folder: Path | None, as_json: bool) -> None:
    """Tell what this machine has for running engines.

    FOLDER: whose disk to read, or an engine to judge.
    """
    from dsc.runtime.doctor import check_folder, examine, report

    check_folder(folder)
    data = examine(folder)
    click.echo(json.dumps(data, indent=2) if as_json else "\n".join(report(data)))


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers from 1 on, by commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise DscError(f"{option} is no list of numbers", wanted="1,16,64", got=text)
    return sorted({int(part) for part in parts})


def _gigabytes(number: float | None) -> float | None:
    return None if number is None else number * 1e9


@main.command()
@click.argument("name", required=False)
def passes(name: str | None) -> None:
    """List the passes a recipe may name, or show one's manual."""
    from dsc.compiler.listing import pass_lines, pass_manual

    click.echo(pass_manual(name) if name else "\n".join(pass_lines()))


@main.command()
@click.argument("op", required=False)
def plugins(op: str | None) -> None:
    """List the plugin ops, or show one op's manual."""
    from dsc.compiler.listing import plugin_lines, plugin_manual

    click.echo(plugin_manual(op) if op else "\n".join(plugin_lines()))


@main.command()
@click.argument("graph", type=PATH)
@click.argument("pass_names", nargs=-1, metavar="PASS...")
@click.option("--config", type=PATH, help="config.json of the model; default: tiny-r1's facts.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), default="prefill", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of the graph's text.")
def opt(graph: Path, pass_names: tuple[str, ...], config: Path | None, phase: str, as_json: bool) -> None:
    """Run passes on a textual graph and print it.

    An option goes behind its pass: set_dtype:activations=bf16.
    """
    from dsc.compiler.opt import run_opt

    text, report = run_opt(graph, pass_names, config=config, phase=phase)
    click.echo(json.dumps(report, indent=2) if as_json else text)


if __name__ == "__main__":
    main()
