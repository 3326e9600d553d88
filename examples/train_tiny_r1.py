"""Train tiny-r1 and write it as DeepSeek releases R1: FP8 128x128 blocks, sharded safetensors, MTP layer.

    python examples/train_tiny_r1.py build/tiny-r1 --docs Python-3.11/Doc

The text is Python's documentation (the reStructuredText of CPython's Doc folder, or the _sources of a built one) and standard
library, without the modules of `dsc.compiler.held_out`. The architecture is that of the checkpoint given by --like.
On one H200 the 1700 steps of examples/tiny-r1 took 75 seconds; on a CPU give fewer --steps and a smaller --batch.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from tiny_r1_model import TinyR1, checkpoint_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy

from dsc.compiler.config import read_config
from dsc.compiler.held_out import MODULES
from dsc.compiler.quantize import quantize
from dsc.compiler.tensor_names import SCALE_SUFFIX, expected_tensors
from dsc.plugins.formats import parse_format
from dsc.runtime.spec import ModelSpec

LIKE = Path(__file__).resolve().parent / "tiny-r1"
SPECIAL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
)  # fmt: skip
NOT_TRAINED_ON = ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__")
DOCS_WEIGHT = 2  # the documentation is read twice, the sources once
SHARDS = 2
MTP_LOSS_WEIGHT = 0.3
BALANCE_STEP = 0.001
WARMUP_STEPS, PEAK_RATE, LAST_RATE = 200, 2e-3, 1e-4
REPORT_STEPS = 250


# -- text


@dataclass(frozen=True)
class Corpus:
    """Token streams, documents between begin and end of sentence, and their tokenizer."""

    train: Tensor
    held_out: Tensor
    tokenizer: Tokenizer


def make_corpus(docs: Path | None, library: Path, vocab_size: int) -> Corpus:
    """Read the files, train a byte-level BPE on what is not held out, encode all."""
    doc_files = sorted([*docs.rglob("*.rst"), *docs.rglob("*.rst.txt")]) if docs else []
    sources = [p for p in sorted(library.rglob("*.py")) if not set(p.relative_to(library).parts) & set(NOT_TRAINED_ON)]
    train_docs, held_docs = _read(doc_files)
    train_code, held_code = _read(sources)
    tokenizer = train_tokenizer([*train_docs, *train_code], vocab_size)
    documents = [*train_docs * DOCS_WEIGHT, *train_code]
    random.Random(0).shuffle(documents)
    return Corpus(encode(tokenizer, documents), encode(tokenizer, [*held_docs, *held_code]), tokenizer)


def _read(files: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Texts to train on, and held-out ones."""
    texts: tuple[list[str], list[str]] = ([], [])
    for file in files:
        texts[file.name.split(".")[0] in MODULES].append(file.read_text(errors="ignore"))
    return texts


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that splits digits, its special tokens those of R1."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Tensor:
    """One stream of token ids, int64."""
    encoded = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    return torch.tensor([token for document in encoded for token in (0, *document.ids, 1)])


# -- training


@dataclass(frozen=True)
class Schedule:
    """How long and how much at once."""

    steps: int
    batch: int
    length: int

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to the last rate."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / WARMUP_STEPS) * (LAST_RATE + (PEAK_RATE - LAST_RATE) * cosine)


def train(spec: ModelSpec, corpus: Corpus, schedule: Schedule, device: str, say: Callable[[str], None]) -> TinyR1:
    """A trained model, on the CPU."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = TinyR1(spec, schedule.length).to(device)
    forward = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(_decay_matrices(model), betas=(0.9, 0.95))
    streams = corpus.train.to(device), corpus.held_out.to(device)
    start = time.monotonic()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        main, draft, _ = losses(forward, windows(streams[0], schedule.batch, schedule.length), device)
        (main + MTP_LOSS_WEIGHT * draft).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step < 0.9 * schedule.steps:  # the last tenth trains for choices that stand still
            for router in model.routers():
                router.balance(BALANCE_STEP)
        if step % REPORT_STEPS == 0 or step == schedule.steps - 1:
            held_out = evaluate_held_out(model, streams[1], schedule, device)
            load = model.routers()[0].load
            say(
                f"step {step}  loss {main:.3f} mtp {draft:.3f}  held out {held_out[0]:.3f} mtp {held_out[1]:.3f} "
                f"top-1 {held_out[2]:.3f}  load {load.min():.3f}-{load.max():.3f}  {time.monotonic() - start:.0f} s"
            )
    return model.cpu().eval()


def windows(stream: Tensor, count: int, length: int) -> Tensor:
    """Random runs of `length` tokens and the two that follow, [count, length + 2]."""
    starts = torch.randint(0, len(stream) - length - 2, (count,), device=stream.device)
    return stream[starts[:, None] + torch.arange(length + 2, device=stream.device)]


def losses(
    model: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats per token of the main model and of the MTP layer, and the latter's top-1 agreement with the text."""
    with torch.autocast(device, torch.bfloat16):
        logits, drafts = model(tokens)
    main = cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
    draft = cross_entropy(drafts.flatten(0, 1), tokens[:, 2:].flatten())
    return main, draft, (drafts.argmax(-1) == tokens[:, 2:]).float().mean()


@torch.no_grad()
def evaluate_held_out(model: TinyR1, stream: Tensor, schedule: Schedule, device: str, rounds: int = 4) -> list[float]:
    """The means of `losses` over random windows of the held-out stream."""
    model.eval()
    found = [losses(model, windows(stream, schedule.batch, schedule.length), device) for _ in range(rounds)]
    model.train()
    return [sum(float(values[i]) for values in found) / rounds for i in range(3)]


def _decay_matrices(model: TinyR1) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


# -- the release


def export(model: TinyR1, folder: Path, like: Path, tokenizer: Tokenizer) -> None:
    """Write the checkpoint: weights, index, tokenizer, and the JSON files of `like`, whose architecture it has."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = stored_tensors(model)
    total, done = sum(t.nbytes for t in tensors.values()), 0
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    for name, value in tensors.items():
        shards[min(done * SHARDS // total, SHARDS - 1)][name] = value
        done += value.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(like / file, folder / file)


def stored_tensors(model: TinyR1) -> dict[str, Tensor]:
    """Every tensor in the dtype the release has: FP8 codes with scales, bfloat16, float32 router biases."""
    expected, fp8 = expected_tensors(model.spec), parse_format("fp8")
    stored: dict[str, Tensor] = {}
    for name, value in checkpoint_tensors(model):
        if f"{name}{SCALE_SUFFIX}" in expected:
            parts = quantize(value.float(), fp8).parts
            stored[name], stored[f"{name}{SCALE_SUFFIX}"] = parts["data"], parts["scales"]
        else:
            keep = name.endswith(".e_score_correction_bias")
            stored[name] = value.to(torch.float32 if keep else torch.bfloat16, copy=True).contiguous()
    assert stored.keys() == expected.keys(), sorted(stored.keys() ^ expected.keys())
    return stored


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--docs", type=click.Path(exists=True, path_type=Path), help="Documentation sources; none: code alone.")
@click.option(
    "--library",
    type=click.Path(exists=True, path_type=Path),
    default=lambda: sysconfig.get_path("stdlib"),
    help="A standard library; the running Python's unless given.",
)
@click.option(
    "--like", type=click.Path(exists=True, path_type=Path), default=LIKE, help="A checkpoint of the architecture."
)
@click.option("--steps", default=1700, show_default=True)
@click.option("--batch", default=64, show_default=True, help="Sequences per step.")
@click.option("--length", default=512, show_default=True, help="Tokens per sequence.")
def main(out: Path, docs: Path | None, library: Path, like: Path, steps: int, batch: int, length: int) -> None:
    spec = read_config(like)
    corpus = make_corpus(docs, library, spec.vocab_size)
    click.echo(f"{len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = train(spec, corpus, Schedule(steps, batch, length), device, click.echo)
    export(model, out, like, corpus.tokenizer)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
