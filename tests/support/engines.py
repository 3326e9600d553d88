"""Engines for tests: compiled once a session from examples/tiny-r1 or from random checkpoints of each family."""

from __future__ import annotations

from pathlib import Path

import torch

from dsc import runtime
from dsc.compiler.build import compile_engine
from dsc.compiler.recipe import Recipe, load_recipe, parse_recipe
from dsc.runtime.batch import Batch, Segment
from dsc.runtime.engine import Engine

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "examples" / "tiny-r1"


def fp32_recipe(mtp: bool) -> Recipe:
    """tiny-r1-fp32, with or without the MTP layer."""
    text = (ROOT / "recipes" / "tiny-r1-fp32.yaml").read_text()
    if not mtp:
        text = text.replace("{enabled: true, drafts: 1}", "{enabled: false, drafts: 0}")
        text = text.replace("  - fuse_mtp_input\n", "")
    return parse_recipe(text, where="tiny-r1-fp32.yaml", name="fp32")


def compile_tiny(recipe: str, folder: Path) -> Path:
    """examples/tiny-r1 as a packaged recipe has it; returns the engine's folder."""
    return compile_engine(load_recipe(recipe), model=str(TINY_R1), output=folder / f"{recipe}.engine").folder


def compile_tiny_gpu(recipe: str, folder: Path) -> Path:
    """examples/tiny-r1 as a packaged recipe has it, for Hopper GPUs; returns the engine's folder."""
    loaded = load_recipe(recipe).override("sm_90a")
    return compile_engine(loaded, model=str(TINY_R1), output=folder / f"{recipe}-sm_90a.engine").folder


def gpu_engine(recipe: str, folder: Path) -> Engine:
    """As `compile_tiny_gpu`, loaded."""
    return runtime.load(compile_tiny_gpu(recipe, folder))


def load_fp32(checkpoint: Path, folder: Path, mtp: bool) -> Engine:
    """An engine of a checkpoint in float32."""
    built = compile_engine(fp32_recipe(mtp), model=str(checkpoint), output=folder / f"{checkpoint.name}-fp32.engine")
    return runtime.load(built.folder)


class Sequences:
    """Sequences of an engine driven by hand: each step says how many tokens of each are computed.

    Blocks are handed out in a shuffled order, so that nothing works because blocks happen to follow each other.
    """

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        self.engine, self.texts = engine, texts
        self.block_tokens = engine.manifest.kv_cache.block_tokens
        self.done = [0] * len(texts)
        order = torch.randperm(engine.cache.pool.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.blocks = [[order.pop() for _ in range(-(-len(t) // self.block_tokens))] for t in texts]

    def step(self, counts: list[int], phase: str = "") -> list[torch.Tensor]:
        """Compute the next `counts` tokens of each sequence; logits of all of them, by sequence."""
        segments = [
            Segment(text[start : start + count], start, blocks, logits=count)
            for text, start, count, blocks in zip(self.texts, self.done, counts, self.blocks, strict=True)
            if count
        ]
        logits = self.engine.forward(Batch.of(segments, self.block_tokens), phase=phase)
        self.done = [start + count for start, count in zip(self.done, counts, strict=True)]
        return list(logits.clone().split(counts))


def prompt_tokens(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token sequences."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (count, length), generator=generator).tolist()
