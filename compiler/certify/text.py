"""The text an engine is judged on, as windows of tokens: the held-out text, or a user's file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from dsc.compiler.held_out import held_out_tokens
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import Text
from dsc.runtime.errors import DscError
from dsc.runtime.tokenizer import Tokenizer

HELD_OUT = "held-out text of dsc"
WINDOWS, WINDOW_TOKENS = 8, 512


def read_windows(
    folder: EngineFolder, file: Path | None, count: int = WINDOWS, length: int = WINDOW_TOKENS
) -> tuple[list[list[int]], Text]:
    """Up to `count` windows of `length` tokens, shorter where the engine's step or context is; the last may be shorter.

    file    UTF-8 text; None: documentation and sources that every Python has
    raises  DscError for a file that cannot be read, no tokenizer, or a text of less than two tokens
    """
    limits, spec = folder.manifest.limits, folder.spec
    length = min(length, limits.batch_tokens, limits.context_tokens)
    tokenizer = Tokenizer(folder.tokenizer_dir)
    if file is None:
        ends = [token for token in (spec.bos_token_id, *spec.eos_token_ids) if token is not None] or [0]
        tokens, name = held_out_tokens(folder.tokenizer_dir / "tokenizer.json", ends[0], ends[-1]), HELD_OUT
    else:
        try:
            tokens, name = tokenizer.encode(file.read_text(encoding="utf-8")), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise DscError("the text cannot be read as UTF-8", where=str(file), got=str(error)) from error
    windows = [tokens[start : start + length] for start in range(0, min(len(tokens), count * length), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise DscError("the text is too short", where=name, wanted="2 tokens", got=f"{len(tokens)}")
    largest = max(map(max, windows))
    if largest >= spec.vocab_size:
        got = f"token {largest}, and the model has {spec.vocab_size}"
        raise DscError("the tokenizer is not the model's", where=str(folder.tokenizer_dir), got=got)
    ids = np.asarray([token for window in windows for token in window], np.int32)
    text = Text(name, hashlib.sha256(ids.tobytes()).hexdigest(), len(windows), len(ids))
    return windows, text
