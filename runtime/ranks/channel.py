"""Messages between the leader and one other rank: JSON, and tensors as their bytes."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

_LENGTH = struct.Struct("!Q")
_MOST = 1 << 32  # bytes of a message's head
_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a machine that is gone is noticed in 90 s


@dataclass(frozen=True)
class Message:
    """`kind` says what it is about; `body` has what belongs to it."""

    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[torch.Tensor, ...] = ()


def encode(kind: str, body: dict[str, Any] | None = None, tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """A message as it is sent."""
    types = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    head = json.dumps([kind, body or {}, types]).encode()
    parts = [_LENGTH.pack(len(head)), head]
    parts += [tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join(parts)


class Channel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises OSError when the other end is gone."""
        with self._sending:
            self._socket.sendall(message)

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone, or has sent what is none."""
        try:
            kind, body, types = self._head(_MOST, None)
            tensors = tuple(self._tensor(*type_) for type_ in types)
        except (OSError, EOFError, ValueError):
            return None
        return Message(kind, body, tensors)

    def receive_from_anybody(self, most: int, seconds: float) -> Message | None:
        """A message without tensors from who may be nobody of ours; None where it is longer than `most` bytes, is not here
        whole after `seconds`, or is none."""
        try:
            kind, body, types = self._head(most, time.monotonic() + seconds)
        except (OSError, EOFError, ValueError, RecursionError):
            return None
        finally:
            self._socket.settimeout(None)
        return None if types else Message(kind, body)

    def close(self) -> None:
        """Nothing is sent or received any more; whoever waits in `receive` gets None."""
        with suppress(OSError):  # where the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def address(self) -> str:
        """By which the other end reaches this machine."""
        return str(self._socket.getsockname()[0])

    def _head(self, most: int, until: float | None) -> tuple[str, dict[str, Any], list[Any]]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        if length > most:
            raise ValueError(length)
        head = json.loads(self._read(length, until))
        if not (isinstance(head, list) and list(map(type, head)) == [str, dict, list]):
            raise ValueError(head)
        return head[0], head[1], head[2]

    def _read(self, count: int, until: float | None = None) -> bytearray:
        """So many bytes; raises TimeoutError where they are not here by `until`, of time.monotonic()."""
        found = bytearray(count)
        at = memoryview(found)
        while at:
            if until is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
            read = self._socket.recv_into(at)
            if not read:
                raise EOFError
            at = at[read:]
        return found

    def _tensor(self, dtype: str, shape: list[int]) -> torch.Tensor:
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        if empty.numel():
            at = empty.view(-1).view(torch.uint8)
            at.copy_(torch.frombuffer(self._read(empty.nbytes), dtype=torch.uint8))
        return empty
