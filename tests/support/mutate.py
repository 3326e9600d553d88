"""Damage for fuzzing: one change or a few to a file's bytes, or to the values of its JSON, from a given source of chance."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

# What readers have stumbled over before: extremes of numbers, names that are paths, text that no encoding has.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 63, 10**30, -(10**30), 0.5, 1e300, -0.0, "", "0", "T", "T-1", "T//0",
    "1" * 500, "(" * 50, "..", "../x", "/etc/passwd", "a\0b", "\ud800", "\x1b[2J", "x" * 300, [], {}, [[]], [0], ["x"],
    {"": ""}, {"kind": "kernel"},
)  # fmt: skip
WORDS = (
    b"!!python/object/apply:os.system [true]", b"&a ", b"*a", b"<<: ", b"---\n", b"\x00", b"\xff", b"\xed\xa0\x80", b"NaN", b"1e999",
    b"{", b"}", b"[", b"]", b'"', b":", b",", b"\n", b"  ", b"- ", b"? ", b"0x10", b"1_0", b"9" * 5000, b"null", b"#", b"%",
)  # fmt: skip


def mutate(content: bytes, random: Random, is_json: bool) -> bytes:
    """Changed content. JSON that still is JSON has values of it changed, three times of four."""
    if is_json and random.random() < 0.75:
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            return _bytes(content, random)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            data = _value(data, random)
        return json.dumps(data).encode()
    return _bytes(content, random)


def mutate_header(content: bytes, random: Random) -> bytes:
    """A safetensors file whose header is changed, most often with the length that belongs to it."""
    length = int.from_bytes(content[:8], "little")
    header = mutate(content[8 : 8 + length], random, is_json=True)
    size = len(header) if random.random() < 0.9 else random.choice((0, 1, length, 1 << 32, (1 << 64) - 1))
    return (
        _bytes(content, random)
        if random.random() < 0.1
        else size.to_bytes(8, "little") + header + content[8 + length :]
    )


def _bytes(content: bytes, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 2, 4))):
        a, b = sorted(random.randint(0, len(content)) for _ in range(2))
        b = min(b, a + random.choice((1, 4, 64, len(content))))
        way = random.randrange(5)
        if way == 0 and content:
            a = min(a, len(content) - 1)
            content = content[:a] + bytes([content[a] ^ 1 << random.randrange(8)]) + content[a + 1 :]
        elif way == 1:
            content = content[:a] + content[b:]
        elif way == 2:
            content = content[:b] + content[a:]
        elif way == 3:
            content = content[:a] + random.choice(WORDS) + content[a:]
        else:
            content = content[:a] + random.choice(WORDS) + content[b:]
    return content


def _value(data: Any, random: Random) -> Any:
    """The same with one value put elsewhere, replaced, taken away or given another name."""
    data = copy.deepcopy(data)
    parent, key = _place(data, random)
    if parent is None:
        return random.choice(VALUES)
    way = random.randrange(6)
    if way == 0:
        del parent[key]
    elif way == 1:
        other, at = _place(data, random)
        if other is not None:
            parent[key] = copy.deepcopy(other[at])
    elif way == 2 and isinstance(parent[key], int) and not isinstance(parent[key], bool):
        parent[key] += random.choice((-64, -2, -1, 1, 2, 64))
    elif way == 3 and isinstance(parent, dict):
        name = random.choice([value for value in VALUES if isinstance(value, str)])
        parent[name] = parent[key] if random.random() < 0.5 else parent.pop(key)
    elif way == 4 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[key] = copy.deepcopy(random.choice(VALUES))
    return data


def _place(data: Any, random: Random) -> tuple[Any, Any]:
    """A container inside the data and a key of it; None where there is none."""
    parent, key = None, None
    while isinstance(data, dict | list) and data:
        parent = data
        key = random.choice(list(data)) if isinstance(data, dict) else random.randrange(len(data))
        data = data[key]
        if random.random() < 0.2:
            break
    return parent, key
