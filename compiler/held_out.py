"""The text that tiny-r1 never saw in training: documentation and sources of six modules that every Python has.

Engines are judged on it: nats per token, KL and top-1 agreement. Its bytes depend on the Python that runs.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

# examples/train_tiny_r1.py keeps the documentation and the source of each out of its corpus.
MODULES = ("argparse", "fractions", "heapq", "sched", "statistics", "textwrap")


def held_out_text() -> list[str]:
    """The documents: each module's docstring, then its source."""
    texts = []
    for name in MODULES:
        module = importlib.import_module(name)
        texts += [inspect.getdoc(module) or "", inspect.getsource(module)]
    return texts


def held_out_tokens(tokenizer: Path, bos: int, eos: int) -> list[int]:
    """The documents as one stream of token ids, each between `bos` and `eos`; `tokenizer` is a tokenizer.json."""
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch(held_out_text(), add_special_tokens=False)
    return [token for document in encoded for token in (bos, *document.ids, eos)]


def held_out_windows(tokenizer: Path, bos: int, eos: int, count: int, length: int = 512) -> list[list[int]]:
    """The first `count` runs of `length` tokens of the stream, side by side: 8 x 512 is the usual measure."""
    tokens = held_out_tokens(tokenizer, bos, eos)
    assert count * length <= len(tokens), (count, length, len(tokens))
    return [tokens[i * length : (i + 1) * length] for i in range(count)]
