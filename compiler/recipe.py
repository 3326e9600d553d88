"""Recipes: YAML files that name a model, a target and the passes in the order they run. Flat, complete, strictly read."""

from __future__ import annotations

import importlib.resources
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dsc.compiler.ir.rewrite import Pass, find_pass
from dsc.compiler.planning.gpus import GPUS, gpus_of
from dsc.compiler.targets import TARGETS
from dsc.compiler.yaml_fields import Fields, Parse, boolean, choice, integer, integers, listing, number, read_yaml, text
from dsc.runtime.errors import DscError, nearest, raise_all
from dsc.runtime.manifest import Limits, Parallel

CACHE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class KvCache:
    """The latent cache: its dtype (torch's name) and the tokens of one block."""

    dtype: str
    block_tokens: int


@dataclass(frozen=True)
class Mtp:
    """Whether the MTP layer is compiled, how many tokens it drafts, and its own weight formats (else the main model's)."""

    enabled: bool
    drafts: int
    weights: dict[str, Any] | None = None


@dataclass(frozen=True)
class Allowance:
    """Sites of a pass that may be missed, and why: the only way round the contract."""

    count: int
    reason: str


@dataclass(frozen=True)
class PassEntry:
    """One line of `passes`: the pass with its options, ready to run."""

    name: str
    options: dict[str, Any]
    line: int
    instance: Pass


@dataclass(frozen=True)
class Recipe:
    """A recipe as read. `name` is the file's name without its ending; `where` is how errors name the file.

    allow_kernels  kernels of a GPU target that may spill or miss their tensor-core instruction, by name, and why
    gpu            which GPU of the target the engine's serving defaults are for; None: the target's first
    """

    name: str
    where: str
    model: str
    target: str
    parallel: Parallel
    limits: Limits
    decode_buckets: tuple[int, ...]
    kv_cache: KvCache
    mtp: Mtp
    passes: tuple[PassEntry, ...]
    allow: dict[str, Allowance]
    verify: dict[str, float] | None = None
    allow_kernels: dict[str, str] = field(default_factory=dict)
    gpu: str | None = None

    def override(self, target: str | None = None, ranks: int | None = None) -> Recipe:
        """The same recipe for another target, or on `ranks` tensor ranks (1: everything on one)."""
        recipe = self
        if target is not None:
            if target not in TARGETS:
                raise DscError(f"unknown target {target}", wanted=", ".join(TARGETS), try_=nearest(target, TARGETS))
            recipe = replace(recipe, target=target, gpu=recipe.gpu if target == recipe.target else None)
        if ranks is not None:
            if ranks < 1:
                raise DscError("a build needs at least one rank", wanted="--ranks 1 or more", got=str(ranks))
            recipe = replace(recipe, parallel=Parallel(ranks, ranks, 1))
        return recipe

    def to_json(self) -> dict[str, Any]:
        """The recipe as resolved, for the manifest; nothing in it depends on where the file lay."""
        data = asdict(replace(self, passes=()))
        data["passes"] = [{entry.name: entry.options} for entry in self.passes]
        del data["where"]
        return data


def recipe_from_json(data: dict[str, Any], where: str) -> Recipe:
    """The recipe of a manifest, as `Recipe.to_json` wrote it. Raises DscError for what this version does not know."""
    try:
        passes = [next(iter(entry.items())) for entry in data["passes"]]
        recipe = Recipe(
            name=data["name"],
            where=where,
            model=data["model"],
            target=data["target"],
            parallel=Parallel(**data["parallel"]),
            limits=Limits(**data["limits"]),
            decode_buckets=tuple(data["decode_buckets"]),
            kv_cache=KvCache(**data["kv_cache"]),
            mtp=Mtp(**data["mtp"]),
            passes=tuple(PassEntry(name, options, 0, make_pass(name, options)) for name, options in passes),
            allow={name: Allowance(**entry) for name, entry in data["allow"].items()},
            verify=data["verify"],
            allow_kernels=data.get("allow_kernels", {}),  # engines of before have none
            gpu=data.get("gpu"),
        )
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise DscError("its recipe is not one that this version reads", where=where, got=repr(error)) from error
    return _with_mtp_formats(recipe) if recipe.mtp.weights else recipe


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with dsc, sorted."""
    files = importlib.resources.files("dsc.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe from a file, or a packaged one by its bare name (`r1-wint4` or `r1-wint4.yaml`).

    Raises DscError with file, line and the nearest known key; all faults of the file at once.
    """
    path = Path(name)
    if path.is_file():
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DscError("the recipe cannot be read as UTF-8 text", where=name, got=str(error)) from error
        return parse_recipe(content, where=name, name=path.stem)
    bare = name.removesuffix(".yaml")
    known = packaged_recipes()
    if "/" not in name and bare in known:
        file = importlib.resources.files("dsc.recipes") / f"{bare}.yaml"
        return parse_recipe(file.read_text(encoding="utf-8"), where=f"recipes/{bare}.yaml", name=bare)
    raise DscError(
        "no such recipe",
        where=name,
        wanted=f"a file, or one of {', '.join(known)}",
        try_=nearest(bare.rsplit("/", 1)[-1], known),
    )


def parse_recipe(content: str, where: str, name: str) -> Recipe:
    """Read a recipe's text. `where` is named in errors, `name` becomes the engine's default name."""
    faults: list[DscError] = []
    top = Fields(read_yaml(content, where), where, faults)
    recipe = Recipe(
        name=name,
        where=where,
        model=top.take("model", text),
        target=top.take("target", choice(tuple(TARGETS))),
        parallel=_nested(top, "parallel", Parallel, dict.fromkeys(("tensor", "expert", "pipeline"), integer(1))),
        limits=_nested(
            top, "limits", Limits, dict.fromkeys(("batch_tokens", "sequences", "context_tokens"), integer(1))
        ),
        decode_buckets=top.take("decode_buckets", integers),
        kv_cache=_kv_cache(top),
        mtp=_nested(top, "mtp", Mtp, {"enabled": boolean, "drafts": integer(0), "weights": _free_mapping}),
        passes=_passes(top),
        allow=_allow(top),
        verify=top.take("verify", lambda node: _verify(node, where, faults), default=None),
        allow_kernels=_allow_kernels(top),
        gpu=top.take("gpu", choice(tuple(GPUS)), default=None),
    )
    top.finish()
    if recipe.mtp and recipe.mtp.weights:
        try:
            recipe = _with_mtp_formats(recipe)
        except DscError as error:
            top.fault(top.take("mtp", lambda node: int(node.start_mark.line) + 1), error)
    if not faults:
        _check_together(recipe, faults)
    raise_all(where, faults)
    return recipe


def _with_mtp_formats(recipe: Recipe) -> Recipe:
    """Tell quantize_weights the formats of the MTP layer, so that they are checked like all others. Raises DscError."""
    entries = tuple(
        replace(entry, instance=make_pass(entry.name, {**entry.options, "mtp": recipe.mtp.weights}))
        if entry.name == "quantize_weights"
        else entry
        for entry in recipe.passes
    )
    return replace(recipe, passes=entries)


def _nested(top: Fields, key: str, type_: type, parsers: dict[str, Parse]) -> Any:
    """A mapping of fixed keys into a dataclass; keys whose field has a default may be missing."""
    inner = top.mapping(key)
    if inner is None:
        return None
    optional = {f.name for f in fields(type_) if f.default is not MISSING}
    values = {
        name: inner.take(name, parse, default=None) if name in optional else inner.take(name, parse)
        for name, parse in parsers.items()
    }
    inner.finish()
    return type_(**values)


def _kv_cache(top: Fields) -> Any:
    cache = _nested(top, "kv_cache", KvCache, {"dtype": choice(tuple(CACHE_DTYPES)), "block_tokens": integer(1)})
    return cache and replace(cache, dtype=CACHE_DTYPES.get(cache.dtype, ""))


def _free_mapping(node: Any) -> dict[str, Any]:
    value = read_value(node)
    if not isinstance(value, dict):
        raise ValueError(f"a mapping|{value!r}")
    return value


def read_value(node: Any) -> Any:
    """Plain data of a YAML node."""
    from yaml import SafeLoader

    loader = SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _verify(node: Any, where: str, faults: list[DscError]) -> dict[str, float]:
    inner = Fields(node, where, faults)
    budgets = {"max_kl": inner.take("max_kl", number)}
    inner.finish()
    return budgets


def _passes(top: Fields) -> tuple[PassEntry, ...]:
    entries = []
    for node in top.take("passes", listing) or ():
        line = node.start_mark.line + 1
        try:
            entries.append(_pass_entry(read_value(node), line))
        except DscError as error:
            top.fault(line, error)
    return tuple(entries)


def _pass_entry(value: Any, line: int) -> PassEntry:
    if isinstance(value, str):
        return PassEntry(value, {}, line, make_pass(value, {}))
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), dict):
        ((name, options),) = value.items()
        return PassEntry(name, options, line, make_pass(name, options))
    raise DscError("not a pass", wanted="a name, or one name with a mapping of its options", got=repr(value))


def make_pass(name: str, options: dict[str, Any]) -> Pass:
    """A pass by its name with its options; DscError names an unknown pass or option and the nearest known one."""
    type_ = find_pass(name)
    known = [field.name for field in fields(type_)]
    unknown = [option for option in options if option not in known]
    faults = [
        DscError(
            f"{name} has no option {option}",
            wanted=", ".join(known) or "no options",
            got=str(option),
            try_=nearest(str(option), known),
        )
        for option in unknown
    ]
    raise_all(name, faults)
    return type_(**options)


def _allow(top: Fields) -> dict[str, Allowance]:
    inner = top.mapping("allow", optional=True)
    allowed: dict[str, Allowance] = {}
    for name in inner.keys() if inner else ():
        assert inner is not None
        entry = _nested(inner, name, Allowance, {"count": integer(1), "reason": text})
        if entry is not None:
            allowed[name] = entry
    return allowed


def _allow_kernels(top: Fields) -> dict[str, str]:
    inner = top.mapping("allow_kernels", optional=True)
    return {name: inner.take(name, text) for name in inner.keys()} if inner else {}  # noqa: SIM118 - not a dict


def _check_together(recipe: Recipe, faults: list[DscError]) -> None:
    """Facts that span several keys."""

    def fault(what: str, wanted: str, got: str, try_: str = "") -> None:
        faults.append(DscError(what, where=recipe.where, wanted=wanted, got=got, try_=try_))

    buckets = recipe.decode_buckets
    if list(buckets) != sorted(set(buckets)):
        fault("decode_buckets are not ascending", "each once, smallest first", str(list(buckets)))
    elif buckets and buckets[-1] > recipe.limits.sequences:
        got = f"{buckets[-1]} above limits.sequences {recipe.limits.sequences}"
        fault("a decode bucket is larger than the sequences of a step", "no bucket above limits.sequences", got)
    if recipe.limits.sequences > recipe.limits.batch_tokens:
        got = f"sequences {recipe.limits.sequences}, batch_tokens {recipe.limits.batch_tokens}"
        fault("limits.sequences exceeds limits.batch_tokens", "a token of every sequence fits into one step", got)
    if recipe.mtp.enabled and not recipe.mtp.drafts:
        fault("mtp is enabled with no drafts", "drafts: 1 or more, or enabled: false", "drafts: 0")
    if not recipe.mtp.enabled and recipe.mtp.drafts:
        fault("mtp is off but drafts tokens", "enabled: true, or drafts: 0", f"drafts: {recipe.mtp.drafts}")
    if recipe.gpu and GPUS[recipe.gpu].target != recipe.target:
        known = ", ".join(gpu.name for gpu in gpus_of(recipe.target)) or "no gpu"
        fault("the GPU does not run engines for the target", f"gpu: {known}", f"{recipe.gpu}, target {recipe.target}")
    names = [entry.name for entry in recipe.passes]
    if recipe.mtp.weights and "quantize_weights" not in names:
        fault("mtp.weights names formats, and no pass stores weights in them", "quantize_weights in passes", "none")
    if "quantize_norms" in names and "quantize_weights" not in names[: names.index("quantize_norms")]:
        got = ", ".join(names)
        fault(
            "quantize_norms goes by the formats of weights, which are not chosen yet", "quantize_weights before it", got
        )
    if "shard" in names:
        before = [n for n in ("quantize_weights", "quantize_norms") if n in names[names.index("shard") :]]
        after = [n for n in ("plan_memory",) if n in names[: names.index("shard")]]
        if before or after:
            wanted = " and ".join([f"{n} before it" for n in before] + [f"{n} after it" for n in after])
            fault("shard cuts weights as they are stored, and changes what has its place", wanted, ", ".join(names))
    for name in sorted({n for n in names if names.count(n) > 1}):
        lines = ", ".join(str(e.line) for e in recipe.passes if e.name == name)
        fault(f"pass {name} is listed twice", "each pass once", f"lines {lines}")
    for name in recipe.allow:
        if name not in names:
            fault(f"allow names {name}, which does not run", "a pass of this recipe", name, nearest(name, names))
