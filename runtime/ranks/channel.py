"""Messages between the leader and one other rank: JSON, and tensors as their bytes."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

_LENGTH = struct.Struct("!Q")


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
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            kind, body, types = json.loads(self._read(length))
            tensors = tuple(self._tensor(*type_) for type_ in types)
        except (OSError, EOFError, ValueError):
            return None
        return Message(kind, body, tensors)

    def close(self) -> None:
        """Nothing is sent or received any more; whoever waits in `receive` gets None."""
        with suppress(OSError):  # where the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def address(self) -> str:
        """By which the other end reaches this machine."""
        return str(self._socket.getsockname()[0])

    def set_timeout(self, seconds: float | None) -> None:
        """How long to wait for bytes; a message that takes longer counts as the other end gone."""
        self._socket.settimeout(seconds)

    def _read(self, count: int) -> bytearray:
        found = bytearray(count)
        at = memoryview(found)
        while at:
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
