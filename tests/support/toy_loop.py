"""A language model of a few lines behind the real loop: its caches hold tokens, so every misplaced row shows.

The main model's hidden row is a running hash of the tokens up to there, its logits a function of that hash. The MTP model
reads its whole cache back and asserts that hidden rows and successor tokens are those of one text. So blocks, slots,
positions, chunks, preemption, shared prefixes and drafts are checked on every step, without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from dsc.runtime.batch import Batch, BatchBuilder
from dsc.runtime.cache import LatentCache
from dsc.runtime.executor import Executor
from dsc.runtime.loop import Loop
from dsc.runtime.program import Operand, Program, ProgramNode
from dsc.runtime.proposer import MtpProposer
from dsc.runtime.request import Request
from dsc.runtime.sampler import Sampler
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.scheduler import Scheduler
from dsc.runtime.weights import Weights

VOCAB = 40
END = 1
_MODULUS = 1_000_003  # hidden rows are float32, which holds such integers exactly


def step_hash(before: int, token: int) -> int:
    return (before * 31 + token * 7919 + 17) % _MODULUS


def text_hash(tokens: Sequence[int]) -> int:
    """The main model's hidden value after these tokens."""
    value = 0
    for token in tokens:
        value = step_hash(value, token)
    return value


def logits_of(value: int) -> np.ndarray:
    """Logits [VOCAB] after a text of this hash; no two are equal."""
    ids = np.arange(VOCAB, dtype=np.int64)
    return ((value * (2 * ids + 1) * 2654435761 + ids * 40503) % 8191 / 1000 + ids * 1e-5).astype(np.float32)


def greedy_text(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says greedily, computed without any of the runtime."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(text_hash(tokens)).argmax()))
    return tokens[len(prompt) :]


class ToyMain:
    """Caches each token, and reads the text back through the block table."""

    def __init__(self, block_tokens: int, broken_after: int | None = None) -> None:
        self.block_tokens, self.broken_after = block_tokens, broken_after
        self.phases: list[str] = []
        self.cache: np.ndarray = np.zeros(0)

    def run(self, batch: Batch, phase: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        slots = batch.slots.numpy()
        self.cache[slots // self.block_tokens, slots % self.block_tokens, 0] = batch.tokens.numpy()
        hidden = np.zeros((len(batch.tokens), 1), np.float32)
        for b, length, first, end in sequences(batch):
            assert end - first <= length
            assert batch.positions[first:end].tolist() == list(range(length - (end - first), length))
            text = self.cache[batch.block_table[b].numpy()].reshape(-1, self.cache.shape[-1])[:length, 0].tolist()
            for row in range(first, end):
                hidden[row] = text_hash(text[: length - (end - row) + 1])
        logits = np.stack([logits_of(int(hidden[row, 0])) for row in batch.logit_rows.tolist()])
        if self.broken_after is not None:
            for i, row in enumerate(batch.logit_rows.tolist()):
                if batch.tokens[row] == self.broken_after:
                    logits[i, 3] = np.nan
        return torch.from_numpy(logits), torch.from_numpy(hidden)


class ToyMtp:
    """Caches successor and hidden value of each position; its draft is right unless the hash divides by wrong_every."""

    def __init__(self, block_tokens: int, wrong_every: int = 0) -> None:
        self.block_tokens, self.wrong_every = block_tokens, wrong_every
        self.cache: np.ndarray = np.zeros(0)

    def run(self, batch: Batch, phase: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.hidden is not None
        slots, given = batch.slots.numpy(), batch.hidden.numpy()[:, 0].astype(np.int64)
        rows = np.stack([batch.tokens.numpy(), given], -1)
        self.cache[slots // self.block_tokens, slots % self.block_tokens] = rows
        hidden = np.zeros((len(slots), 1), np.float32)
        wanted = batch.logit_rows.tolist()
        for b, length, first, end in sequences(batch):
            past = self.cache[batch.block_table[b].numpy()].reshape(-1, 2)[:length].tolist()
            for row in range(first, end):
                position = length - (end - row)
                hidden[row] = step_hash(past[position][1], past[position][0])
                if row not in wanted:
                    continue
                for before, after in pairwise(past[: position + 1]):
                    assert after[1] == step_hash(before[1], before[0]), f"stale MTP rows before {position}: {past}"
        logits = [logits_of(int(hidden[row, 0])) for row in wanted]
        for row, one in zip(wanted, logits, strict=True):
            if self.wrong_every and int(hidden[row, 0]) % self.wrong_every == 0:
                one[int(one.argmin())] = 100.0
        return torch.from_numpy(np.stack(logits)), torch.from_numpy(hidden)


def sequences(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(index, length, first row, end row) of each sequence."""
    starts, lengths = batch.query_starts.tolist(), batch.sequence_lengths.tolist()
    return [(b, lengths[b], starts[b], starts[b + 1]) for b in range(len(lengths))]


def sample_program(rows: int, vocab: int = VOCAB) -> Program:
    """The `sample` graph as the compiler lowers it."""
    types = {
        "logits": ("float32", ("R", vocab)), "temperature": ("float32", ("R",)), "top_p": ("float32", ("R",)),
        "top_k": ("int32", ("R",)), "min_p": ("float32", ("R",)), "seeds": ("int64", ("R",)),
        "positions": ("int32", ("R",)), "token_mask": ("int32", ("R", -(-vocab // 32))), "drafts": ("int32", ("R",)),
        "tokens": ("int32", ("R",)), "accepted": ("int32", ("R",)), "logprobs": ("float32", ("R",)),
    }  # fmt: skip
    sizes = {"float32": 4, "int32": 4, "int64": 8}
    outputs = ("tokens", "accepted", "logprobs")
    operands = {}
    for name, (dtype, shape) in types.items():
        count = rows * (shape[1] if len(shape) > 1 else 1)
        operands[name] = Operand(dtype, shape, "output" if name in outputs else "input", sizes[dtype] * count)
    inputs = tuple(name for name in types if name not in outputs)
    node = ProgramNode("sample", "Sample", inputs, outputs)
    return Program("sample", "0" * 64, {"R": rows}, inputs, outputs, operands, (node,))


class ToyEngine:
    """The real loop, scheduler, sampler, cache and proposer around the toy models."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_tokens: int = 4,
        batch_tokens: int = 16,
        sequences: int = 4,
        drafts: int = 0,
        wrong_every: int = 0,
        prefix_reuse: bool = True,
        broken_after: int | None = None,
    ) -> None:
        self.drafts = drafts
        sizes = {"cache.0": block_tokens * 8, "cache.1": block_tokens * 16}
        self.cache = LatentCache.allocate(sizes, block_tokens, num_blocks)
        self.main, self.mtp = ToyMain(block_tokens, broken_after), ToyMtp(block_tokens, wrong_every)
        for model, name, width in ((self.main, "cache.0", 1), (self.mtp, "cache.1", 2)):
            model.cache = self.cache.tensors[name].view(torch.int64).view(-1, block_tokens, width).numpy()
        self.scheduler = Scheduler(self.cache.pool, block_tokens, batch_tokens, sequences, prefix_reuse)
        program = sample_program(batch_tokens)
        self.loop = Loop(
            self.main,
            Sampler(Executor(program, None, shared=Weights(None)), VOCAB, batch_tokens),
            MtpProposer(self.mtp, batch_tokens, sequences, block_tokens) if drafts else None,
            self.cache,
            self.scheduler,
            BatchBuilder(batch_tokens, sequences, block_tokens),
        )

    def request(self, prompt: Sequence[int], max_new: int = 12, decode=None, **options) -> Request:
        params = SamplingParams(temperature=0.0).with_options(options)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {END})
        drafts = self.drafts if params.drafts is None else params.drafts
        return Request(prompt, params, max_new, ends, decode, drafts)

    def run(self, requests: Sequence[Request]) -> list[Request]:
        for request in requests:
            self.loop.submit(request)
        for request in requests:
            while not request.finished:
                self.loop.drive(request)
        return list(requests)

    def say(self, prompts: Sequence[Sequence[int]], **options) -> list[list[int]]:
        """Generated tokens of each prompt."""
        done = self.run([self.request(prompt, **options) for prompt in prompts])
        assert all(r.finish_reason in ("length", "stop") for r in done), [r.error for r in done]
        return [r.tokens[len(r.prompt) :] for r in done]
