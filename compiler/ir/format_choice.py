"""How a recipe names a storage format, `{format: wint4, groups: [128, 64]}`, and which format a weight of some width gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsc.plugins.formats import GROUPS, KINDS, Format
from dsc.runtime.errors import DscError, nearest

# Options of each format beside `format` itself.
_OPTIONS = {"wint4": ("group", "groups"), "fp8": ("block",)}
FP8_BLOCK = [128, 128]


@dataclass(frozen=True)
class FormatChoice:
    """A format as a recipe names it. Groups of wint4 are tried in order: a width gets the first that divides it."""

    kind: str
    groups: tuple[int, ...] = ()

    def format_of(self, width: int, plain: Format, ue8m0: bool) -> tuple[Format, str]:
        """The format of a weight with `width` columns, and why it is not the first choice, or "".

        plain   what a weight gets that no group divides
        ue8m0   whether fp8 takes powers of two for the scales of activations
        """
        if self.kind != "wint4":
            return Format(self.kind, ue8m0=ue8m0 and self.kind == "fp8"), ""
        tried: list[int] = []
        for group in self.groups:
            if width % group == 0:
                return Format("wint4", group), _why(width, tried)
            tried.append(group)
        return plain, _why(width, tried)


def _why(width: int, tried: Sequence[int]) -> str:
    return f"{width} is not a multiple of {' or '.join(map(str, tried))}" if tried else ""


def read_choice(owner: str, entry: Any) -> tuple[FormatChoice | None, list[DscError]]:
    """The format of a recipe's entry, and all that is wrong with it. `owner` is named in errors."""
    if not isinstance(entry, Mapping) or "format" not in entry:
        wanted = "{format: " + " | ".join(KINDS) + ", ...}"
        return None, [DscError(f"{owner} names no format", wanted=wanted, got=str(entry))]
    kind = entry["format"]
    if kind not in KINDS:
        try_ = "{format: wint4, group: 128}" if str(kind).startswith("wint4") else nearest(str(kind), KINDS)
        return None, [DscError(f"{owner} has no format {kind}", wanted=", ".join(KINDS), got=str(kind), try_=try_)]
    known = _OPTIONS.get(kind, ())
    faults = [
        DscError(
            f"{owner}: format {kind} has no option {option}",
            wanted=", ".join(known) or "no options",
            got=f"{option}: {entry[option]}",
            try_=nearest(str(option), known),
        )
        for option in entry
        if option != "format" and option not in known
    ]
    if kind == "fp8" and entry.get("block", FP8_BLOCK) != FP8_BLOCK:
        faults.append(DscError(f"{owner} cannot use this block", wanted=f"block: {FP8_BLOCK}", got=str(entry["block"])))
    groups = _groups(owner, entry, faults) if kind == "wint4" else ()
    return FormatChoice(kind, groups), faults


def _groups(owner: str, entry: Mapping[str, Any], faults: list[DscError]) -> tuple[int, ...]:
    """The groups to try, largest first."""
    wanted = f"group: one of {', '.join(map(str, GROUPS))}; or groups: a list of them, largest first"
    if ("group" in entry) == ("groups" in entry):
        both = "group and groups" if "group" in entry else "neither group nor groups"
        faults.append(DscError(f"{owner} needs one group or a list", wanted=wanted, got=both, try_="group: 128"))
        return ()
    groups = entry["groups"] if "groups" in entry else [entry["group"]]
    if not isinstance(groups, list | tuple) or not groups or any(group not in GROUPS for group in groups):
        faults.append(DscError(f"{owner} cannot use group {groups}", wanted=wanted, got=str(groups), try_="group: 128"))
        return ()
    if list(groups) != sorted(set(groups), reverse=True):
        faults.append(DscError(f"{owner} lists its groups in no order", wanted=wanted, got=str(list(groups))))
    return tuple(groups)
