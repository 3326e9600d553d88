"""Ranks find each other: who is let in, and how they talk."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch

from dsc.runtime.errors import DscError
from dsc.runtime.ranks import meeting
from dsc.runtime.ranks.channel import Channel, encode
from dsc.runtime.ranks.launch import Launch

BUILD = meeting.Build("hash", "0.1.0", "2.0")


def test_a_second_process_of_a_rank_is_refused() -> None:
    store = meeting.home_store()
    door = meeting.Door(store, Launch(0, 3, 0, 3))
    told: list[str] = []

    def come() -> None:
        with pytest.raises(DscError) as error:
            meeting.knock(meeting.home_store_at(store.port), Launch(1, 3, 1, 3), BUILD, "there")
        told.append(error.value.got)

    threads = [threading.Thread(target=come) for _ in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(DscError, match=r"a second process is rank 1\n  wanted  ranks 1 to 2, one process each"):
        door.welcome(BUILD, {}, "here")
    for thread in threads:
        thread.join()
    assert sorted(text.split()[0] for text in told) == ["here:", "rank"]


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\0" * 6 + b"\xff\xff", b"", struct.pack("!Q", 60000) + b"[" * 60000,
    *(struct.pack("!Q", len(text)) + text for text in (
        b"3", b"[1, 2, 3]", b'["hello", {}, []]', b'["hello", {"rank": "1", "build": {}}, []]',
        b'["hello", {"rank": 1, "build": {"engine": 1}}, []]', b'["hello", {}, [["float32", [1000000000000]]]]',
        b'["hello", {}, [["no dtype", [1]]]]', b"\xff\xfe",
    )),
]  # fmt: skip


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say; one who says nothing, or that slowly, keeps nobody waiting for long."""
    monkeypatch.setattr(meeting, "_HELLO_SECONDS", 0.5)
    store = meeting.home_store()
    door = meeting.Door(store, Launch(0, 2, 0, 2))
    port = int(store.get("leader").decode().split()[1])
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(len(STRANGE) + 1)]
    for stranger, words in zip(strangers, STRANGE, strict=False):
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
    drip = threading.Thread(target=_drip, args=(strangers[-1],))
    drip.start()
    come = threading.Thread(
        target=lambda: meeting.knock(meeting.home_store_at(store.port), Launch(1, 2, 1, 2), BUILD, "")
    )
    come.start()
    began = time.monotonic()
    found = door.welcome(BUILD, {}, "here")
    assert time.monotonic() - began < 5
    assert list(found) == [1]
    come.join()
    drip.join()
    for end in (*strangers, *found.values()):
        end.close()


def _drip(stranger: socket.socket) -> None:
    with suppress(OSError):  # it is shown out
        for byte in [*struct.pack("!Q", 100), *b"x" * 100]:
            stranger.sendall(bytes([byte]))
            time.sleep(0.2)


def test_no_other_machine_reaches_the_store_of_ranks_on_one() -> None:
    store = meeting.home_store()
    there = {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == store.port
    }
    assert there == {"127.0.0.1"}


def test_messages_arrive_as_they_were_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Channel(socket.create_connection(server.getsockname()))
        receiver = Channel(server.accept()[0])
    tensors = [torch.randn(3, 5).bfloat16(), torch.arange(4)[::2], torch.zeros(0, 7), torch.tensor(True)]
    sender.send(encode("kind", {"text": "\udc80 ü", "numbers": [1, 2.5]}, tensors))
    message = receiver.receive()
    assert message is not None
    assert (message.kind, message.body) == ("kind", {"text": "\udc80 ü", "numbers": [1, 2.5]})
    for got, sent in zip(message.tensors, tensors, strict=True):
        assert got.dtype is sent.dtype
        assert torch.equal(got, sent)
    sender.send(b"\0" * 7 + b"\2no")
    assert receiver.receive() is None
    sender.close()
    assert receiver.receive() is None
    receiver.close()
