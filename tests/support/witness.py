"""What code does to the world: files it changes, programs it starts, code it loads from a folder. By Python's audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime")  # fmt: skip
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pickle.find_class",
          "socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "webbrowser.open")  # fmt: skip
_active: list[tuple[str, str, list[str]]] = []
_hooked: list[bool] = []


@contextmanager
def witness(source: Path, output: Path | None = None) -> Iterator[list[str]]:
    """A list of what should not have happened; empty where all is well.

    source  a folder of which no code may be run
    output  the only folder in which anything may be changed; None: nowhere
    """
    if not _hooked:  # a hook stays for good
        sys.addaudithook(_heard)
        _hooked.append(True)
    deeds: list[str] = []
    _active.append((os.path.realpath(source), os.path.realpath(output) if output else "\0", deeds))
    try:
        yield deeds
    finally:
        _active.pop()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    source, output, deeds = _active[-1]
    if event in _NEVER:
        deeds.append(f"{event} {arguments!r}")
    elif event == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITES)
        if writes and isinstance(path, str | bytes | os.PathLike) and not _inside(path, output):
            deeds.append(f"wrote {path!r}")
    elif event in _CHANGES:
        paths = arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # named from an open folder
            paths = (os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), os.fsdecode(arguments[0])),)
        deeds += [f"{event} {path!r}" for path in paths if not isinstance(path, int) and not _inside(path, output)]
    elif event == "exec" and _of_file(arguments[0], source):
        deeds.append(f"ran {arguments[0].co_filename}")
    elif event == "import" and isinstance(arguments[1], str) and _inside(arguments[1], source):
        deeds.append(f"imported {arguments[1]}")


def _of_file(code: Any, folder: str) -> bool:
    name = getattr(code, "co_filename", "<unknown>")
    return not name.startswith("<") and _inside(name, folder)


def _inside(path: Any, folder: str) -> bool:
    name = os.fsdecode(path)
    if "\0" in name or not os.path.isabs(name):
        name = os.path.join(os.getcwd(), name.replace("\0", ""))
    # Without following the last part: that is what is changed. Not realpath of all, which would be heard here again.
    return os.path.normpath(name).startswith(folder.rstrip("/") + "/") or os.path.normpath(name) == folder
