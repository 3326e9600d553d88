"""DeepSeek-V2-Lite's real shape, decoded by dsc and by transformers with torch.compile, in one run.

    python benchmarks/peer_transformers.py [--folder /dev/shm] [--batch 1,64,256] [--context 4096] [--layers 27]
        [--implementations sdpa] [--recipe v2-lite-wint4] [--peer-only]

All have the same weights: a bfloat16 checkpoint (31 GB) of the numbers that --weights random draws, which transformers loads
and dsc compiles by the recipe, and by the same recipe in bfloat16 throughout. First the logits of one text are compared.
A decode step of the engines is as `dsc bench` measures it; of transformers the whole model under torch.compile (CUDA
graphs: mode reduce-overhead) over a static cache filled with random values, greedy token included. What cannot be measured
says why.
"""

from __future__ import annotations

import argparse
import gc
import importlib.resources
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from dsc import runtime
from dsc.compiler.model_shapes import KNOWN
from dsc.compiler.random_checkpoint import RandomCheckpoint
from dsc.runtime.batch import Batch, Segment

MODEL = "deepseek-ai/DeepSeek-V2-Lite-Chat"
SHARD_BYTES = 2 << 30
TEXT_TOKENS = 256
STEPS = 12
DSC = (sys.executable, "-m", "dsc.compiler.cli")


def write_shard(folder: Path, number: int, names: list[str], layers: int) -> None:
    """One file of the checkpoint."""
    torch.set_num_threads(1)
    random = random_checkpoint(layers)
    tensors = {name: random.read(name).to(torch.bfloat16) for name in names}
    save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})


def random_checkpoint(layers: int) -> RandomCheckpoint:
    """What `dsc compile --weights random --layers` reads."""
    return RandomCheckpoint.open(MODEL, layers=layers, mtp=False)


def write_checkpoint(folder: Path, layers: int) -> None:
    """A Hugging Face checkpoint of what `--weights random` draws."""
    random = random_checkpoint(layers)
    config = json.loads((random.folder / KNOWN[MODEL]).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    shards: list[list[str]] = [[]]
    held = 0
    for name in random.names():
        held += random.info(name).nbytes
        if held > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
    numbers = range(1, len(shards) + 1)
    weight_map = {
        name: f"model-{n:05d}.safetensors" for n, names in zip(numbers, shards, strict=True) for name in names
    }
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(write_shard, repeat(folder), numbers, shards, repeat(layers)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def start_builds(folder: Path, recipe: str) -> dict[str, subprocess.Popen[bytes]]:
    """Compile the recipe, and the same in bfloat16 throughout, beside everything else."""
    text = (importlib.resources.files("dsc.recipes") / f"{recipe}.yaml").read_text()
    begin, end = text.index("  - quantize_weights:"), text.index("  - plan_memory")
    (folder / "bf16.yaml").write_text(text[:begin] + text[end:])
    builds = {}
    for name, source in ((recipe, recipe), ("bf16", str(folder / "bf16.yaml"))):
        command = [*DSC, "compile", "--recipe", source, "--model", str(folder / "checkpoint"), "--ranks", "1"]
        command += ["--output", str(folder / f"{name}.engine")]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // 4, 1))}
        builds[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    return builds


def engine_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Float32 [tokens, vocabulary] of a prefill."""
    engine = runtime.load(folder)
    size = engine.manifest.kv_cache.block_tokens
    segment = Segment(tokens, 0, list(range(-(-len(tokens) // size))), logits=len(tokens))
    return engine.forward(Batch.of([segment], size)).float().cpu()


def compare(logits: torch.Tensor, want: torch.Tensor) -> str:
    """Relative error and agreement of the choices."""
    error = float((logits - want).norm() / want.norm())
    top_1 = float((logits.argmax(-1) == want.argmax(-1)).float().mean())
    return f"logits off by {error:.4f} of their norm, top-1 {top_1:.1%}"


def bench(engine: Path, batches: list[int], context: int) -> list[dict[str, Any]]:
    """Decode points of `dsc bench`."""
    command = [*DSC, "bench", str(engine), "--no-prefill", "--json", "--context", str(context)]
    done = subprocess.run(
        [*command, "--batch", ",".join(map(str, batches))], stdout=subprocess.PIPE, text=True, check=True
    )
    points: list[dict[str, Any]] = json.loads(done.stdout)["decode"]
    return points


class Peer:
    """The model in transformers, its forward pass compiled."""

    def __init__(self, folder: Path, implementation: str, device: str) -> None:
        """implementation   of attention, and with a plus of the experts: sdpa, eager+batched_mm"""
        from transformers import AutoModelForCausalLM

        self.device = device
        attention, _, experts = implementation.partition("+")
        self.model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            experts_implementation=experts or "grouped_mm",
            device_map=device if device == "cuda" else None,  # which needs accelerate
        ).eval()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 [tokens, vocabulary]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens], device=self.device)).logits[0].float().cpu()

    def milliseconds(self, batch: int, context: int, ready: Callable[[], None]) -> float:
        """Median of a decode step of `batch` sequences, the last token of `context`.

        ready   is called after compiling, before what is timed
        """
        from transformers import StaticCache

        torch._dynamo.reset()
        cache = StaticCache(config=self.model.config, max_cache_len=context + STEPS + 8)
        token = torch.randint(0, self.model.config.vocab_size, (batch, 1), device=self.device)
        forward = torch.compile(self.model.forward, mode="reduce-overhead" if self.device == "cuda" else None)
        with torch.inference_mode():
            self.model(token, past_key_values=cache, use_cache=True)  # makes the cache's memory
            for layer in cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
                layer.cumulative_length.fill_(context - 1)
            times = []
            for step in range(STEPS):
                if step == STEPS // 2:
                    ready()
                self._wait()
                begin = time.perf_counter()
                logits = forward(token, past_key_values=cache, use_cache=True).logits
                token = logits[:, -1].argmax(-1, keepdim=True).clone()
                self._wait()
                times.append(time.perf_counter() - begin)
        return statistics.median(times[STEPS // 2 :]) * 1e3

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", default="/dev/shm", help="where 75 GB are put in a folder of their own, and deleted"
    )
    parser.add_argument("--batch", default="1,64,256")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--implementations", default="sdpa", help="transformers': sdpa,eager+batched_mm,flex_attention")
    parser.add_argument("--peer-only", action="store_true", help="without engines, to choose an implementation")
    parser.add_argument("--recipe", default="v2-lite-wint4")
    parser.add_argument("--device", default="cuda", help="of transformers; cpu is for trying this program out")
    options = parser.parse_args()
    folder, begin = Path(tempfile.mkdtemp(dir=options.folder)), time.monotonic()
    batches = [int(b) for b in options.batch.split(",")]
    rows: dict[str, dict[int, str]] = {}

    def note(line: str, batch: int, found: str) -> None:
        rows.setdefault(line, {})[batch] = found
        print(f"{time.monotonic() - begin:.0f} s: {line}, batch {batch}: {found}", flush=True)

    def built() -> None:
        if any(build.wait() for build in builds.values()):
            raise SystemExit("an engine was not built")

    builds: dict[str, subprocess.Popen[bytes]] = {}
    text = torch.randint(0, 100_000, (TEXT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    want = torch.empty(0)
    try:
        write_checkpoint(folder / "checkpoint", options.layers)
        print(f"{time.monotonic() - begin:.0f} s: checkpoint written", flush=True)
        if not options.peer_only:
            builds.update(start_builds(folder, options.recipe))
        for tried in options.implementations.split(","):
            line, peer = f"transformers, bfloat16, {tried}", Peer(folder / "checkpoint", tried, options.device)
            want = peer.logits(text)
            for batch in batches:
                try:
                    note(line, batch, f"{peer.milliseconds(batch, options.context, built):.3f}")
                except Exception as error:  # noqa: BLE001
                    note(line, batch, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
                    torch.cuda.empty_cache()
            del peer
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        for name in builds:
            print(f"dsc, {name}: {compare(engine_logits(folder / f'{name}.engine', text), want)}", flush=True)
            torch.cuda.empty_cache()
            print(f"{torch.cuda.mem_get_info()[0] / 1e9:.0f} GB of the GPU free", flush=True)
            for point in bench(folder / f"{name}.engine", batches, options.context):
                note(f"dsc, {name}", point["batch"], f"{point['seconds'] * 1e3:.3f}")
    finally:
        for build in builds.values():
            build.kill()
        shutil.rmtree(folder)
    table = Table("ms a decode step", *(f"batch {batch}" for batch in batches))
    for line, row in rows.items():
        table.add_row(line, *(row.get(batch, "") for batch in batches))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
