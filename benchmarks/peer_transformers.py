"""DeepSeek-V2-Lite's real shape, decoded by dsc and by transformers with torch.compile, in one run.

    python benchmarks/peer_transformers.py [--folder /dev/shm] [--batch 1,64,256] [--context 4096] [--layers 27]
        [--attention sdpa] [--recipe v2-lite-wint4]

Both have random weights N(0, 0.02), embeddings N(0, 1): transformers a bfloat16 checkpoint drawn here (31 GB), dsc engines
of the recipe, and of the same recipe in bfloat16 throughout, built with --weights random. A decode step of the engines is
as `dsc bench` measures it; of transformers the whole model under torch.compile (CUDA graphs: mode reduce-overhead) over a
static cache filled with random latents, greedy token included. What cannot be measured says why.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from dsc.compiler.model_shapes import KNOWN, first_layers, read_shape
from dsc.compiler.tensor_names import expected_tensors

MODEL = "deepseek-ai/DeepSeek-V2-Lite-Chat"
SHARD_BYTES = 4 << 30
DEVIATION, EMBEDDING_DEVIATION = 0.02, 1.0
STEPS = 12
DSC = (sys.executable, "-m", "dsc.compiler.cli")


def write_checkpoint(folder: Path, layers: int, device: str) -> None:
    """A Hugging Face checkpoint of random bfloat16 weights; norms are 1."""
    spec, known = read_shape(MODEL)
    config = json.loads((known / KNOWN[MODEL]).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    if layers < spec.num_layers:
        spec = first_layers(spec, layers)
    for name, expected in expected_tensors(spec).items():
        deviation = EMBEDDING_DEVIATION if "embed_tokens" in name else DEVIATION
        made = torch.randn(expected.shape, device=device, dtype=torch.bfloat16).mul_(deviation)
        shard[name] = (made if len(expected.shape) > 1 else torch.ones_like(made)).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def start_builds(folder: Path, recipe: str, layers: int) -> dict[str, subprocess.Popen[bytes]]:
    """Compile the recipe, and the same in bfloat16 throughout, beside everything else."""
    text = (importlib.resources.files("dsc.recipes") / f"{recipe}.yaml").read_text()
    begin, end = text.index("  - quantize_weights:"), text.index("  - plan_memory")
    (folder / "bf16.yaml").write_text(text[:begin] + text[end:])
    builds = {}
    for name, source in ((recipe, recipe), ("bf16", str(folder / "bf16.yaml"))):
        command = [*DSC, "compile", "--recipe", source, "--weights", "random", "--layers", str(layers), "--ranks", "1"]
        command += ["--output", str(folder / f"{name}.engine")]
        builds[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    return builds


def bench(engine: Path, batches: list[int], context: int) -> list[dict[str, Any]]:
    """Decode points of `dsc bench`."""
    command = [*DSC, "bench", str(engine), "--no-prefill", "--json", "--context", str(context)]
    done = subprocess.run(
        [*command, "--batch", ",".join(map(str, batches))], capture_output=True, text=True, check=True
    )
    points: list[dict[str, Any]] = json.loads(done.stdout)["decode"]
    return points


class Peer:
    """The model in transformers, its forward pass compiled."""

    def __init__(self, folder: Path, attention: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            device_map=device if device == "cuda" else None,  # which needs accelerate
        ).eval()

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
    parser.add_argument("--attention", default="sdpa", help="transformers' implementations, as sdpa,eager")
    parser.add_argument("--recipe", default="v2-lite-wint4")
    parser.add_argument("--device", default="cuda", help="of transformers; cpu is for trying this program out")
    options = parser.parse_args()
    folder, begin = Path(tempfile.mkdtemp(dir=options.folder)), time.monotonic()
    batches = [int(b) for b in options.batch.split(",")]
    rows: dict[str, dict[int, str]] = {}

    def note(line: str, batch: int, found: str) -> None:
        rows.setdefault(line, {})[batch] = found
        print(f"{time.monotonic() - begin:.0f} s: {line}, batch {batch}: {found}", flush=True)

    builds = start_builds(folder, options.recipe, options.layers)

    def built() -> None:
        if any(build.wait() for build in builds.values()):
            raise SystemExit("an engine was not built")

    try:
        write_checkpoint(folder / "checkpoint", options.layers, options.device)
        for attention in options.attention.split(","):
            line, peer = f"transformers, bfloat16, {attention}", Peer(folder / "checkpoint", attention, options.device)
            for batch in batches:
                try:
                    note(line, batch, f"{peer.milliseconds(batch, options.context, built):.3f}")
                except torch.OutOfMemoryError:
                    note(line, batch, "out of memory")
            del peer
            torch.cuda.empty_cache()
        for name in builds:
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
