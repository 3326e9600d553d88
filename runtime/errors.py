"""Errors that speak to a user: where and what, then wanted, got, try.

A leaf: imports nothing but the standard library, so every package may raise these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class DscError(Exception):
    """A user's mistake, or a file that cannot be used. The command line prints it and exits with 2, without a traceback.

    what     one sentence: what is wrong
    where    a file with its line, a tensor, a node, or "" (printed before `what`)
    details  further labelled lines, for example ("weight", "model.norm.weight bfloat16 [7168]")
    wanted, got, try_  values, never the source text of a condition; omitted when ""
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        details: Sequence[tuple[str, str]] = (),
        wanted: str = "",
        got: str = "",
        try_: str = "",
    ) -> None:
        self.what, self.where, self.details = what, where, tuple(details)
        self.wanted, self.got, self.try_ = wanted, got, try_
        super().__init__(self.text())

    def text(self) -> str:
        """The message as printed: a headline, then one indented line per part, labels aligned."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        parts = [*self.details, ("wanted", self.wanted), ("got", self.got), ("try", self.try_)]
        parts = [(label, value) for label, value in parts if value]
        width = max((len(label) for label, _ in parts), default=0)
        lines = [f"  {label.ljust(width)}  {value}" for label, value in parts]
        return printable("\n".join([head, *lines]))


class DscErrors(DscError):  # noqa: N818 - several errors
    """All faults found in one file or one step, told at once."""

    def __init__(self, what: str, errors: Iterable[DscError]) -> None:
        self.errors = tuple(errors)
        super().__init__(what)

    def text(self) -> str:
        return printable("\n".join([self.what, *(error.text() for error in self.errors)]))


def printable(text: str) -> str:
    """A text of somebody else's names and values as it can be shown: what would move a terminal's cursor, or has no UTF-8,
    as an escape. Line ends stay.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def raise_all(what: str, errors: Sequence[DscError]) -> None:
    """Raise nothing, the single error, or all of them under one headline."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DscErrors(f"{what}: {len(errors)} faults", errors)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name`, or "" when none is close; for `try` lines."""
    from difflib import get_close_matches

    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else ""
