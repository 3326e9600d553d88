"""DeepSeek-V2-Lite's real shape, decoded by dsc and by transformers with torch.compile: one run, one set of random weights.

    python benchmarks/peer_transformers.py [--folder /dev/shm/v2-lite] [--engines /tmp] [--batch 1,64,256] [--context 4096] [--layers 27]
        [--attention sdpa] [--recipe v2-lite-wint4] [--seconds 400]

Writes a checkpoint of N(0, 0.02) bfloat16 weights (31 GB; embeddings N(0, 1)) into the folder, compiles engines of it with
the recipe and with the same recipe in bfloat16 throughout, and measures decode steps: `dsc bench` for the engines; for
transformers the whole model under torch.compile (CUDA graphs: mode reduce-overhead) over a static cache, filled with
random latents, greedy token included. A transformers line without a figure says why. Deletes nothing it did not make.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def start_builds(folder: Path, engines: Path, recipe: str) -> dict[str, subprocess.Popen[bytes]]:
    """Compile the recipe, and the same in bfloat16 throughout, beside everything else."""
    text = (importlib.resources.files("dsc.recipes") / f"{recipe}.yaml").read_text()
    begin = text.index("  - quantize_weights:")
    end = text.index("  - plan_memory")
    (folder / "bf16.yaml").write_text(text[:begin] + text[end:])
    builds = {}
    for name, source in ((recipe, recipe), ("bf16", str(folder / "bf16.yaml"))):
        command = [sys.executable, "-m", "dsc.compiler.cli", "compile", "--recipe", source, "--model", str(folder)]
        command += ["--ranks", "1", "--max-ram", "16GB", "--output", str(engines / f"{name}.engine")]
        builds[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    return builds


def engine_milliseconds(engine: Path, batches: list[int], context: int, device: str | None) -> dict[int, float]:
    """Of a decode step, as `dsc bench` measures it."""
    command = [sys.executable, "-m", "dsc.compiler.cli", "bench", str(engine), "--no-prefill", "--json"]
    command += ["--batch", ",".join(map(str, batches)), "--context", str(context)]
    command += ["--device", device] if device else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {point["batch"]: point["seconds"] * 1e3 for point in json.loads(done.stdout)["decode"]}


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

    def milliseconds(self, batch: int, context: int) -> float:
        """Median of a decode step of `batch` sequences, the last token of `context`."""
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
            for _ in range(STEPS):
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
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/v2-lite"))
    parser.add_argument("--engines", help="where engines are put. Default: the system's folder for such")
    parser.add_argument("--batch", default="1,64,256")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--attention", default="sdpa", help="transformers' implementations, as sdpa,eager")
    parser.add_argument("--recipe", default="v2-lite-wint4")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no measurement of transformers after these"
    )
    options = parser.parse_args()
    begin, batches = time.monotonic(), [int(b) for b in options.batch.split(",")]
    rows: dict[str, dict[int, str]] = {}

    def note(line: str, found: dict[int, str]) -> None:
        rows.setdefault(line, {}).update(found)
        print(f"{time.monotonic() - begin:.0f} s: {line}: {found}", flush=True)

    engines = Path(tempfile.mkdtemp(dir=options.engines))
    write_checkpoint(options.folder, options.layers, options.device)
    print(f"{time.monotonic() - begin:.0f} s: checkpoint written", flush=True)
    builds = start_builds(options.folder, engines, options.recipe)
    try:
        for attention in options.attention.split(","):
            peer = Peer(options.folder, attention, options.device)
            if any(build.wait() for build in builds.values()):
                raise SystemExit("an engine was not built")
            for batch in batches:
                if time.monotonic() - begin > options.seconds:
                    note(f"transformers, {attention}", {batch: "not run"})
                    continue
                try:
                    note(f"transformers, {attention}", {batch: f"{peer.milliseconds(batch, options.context):.3f}"})
                except torch.OutOfMemoryError:
                    note(f"transformers, {attention}", {batch: "out of memory"})
            del peer
            torch.cuda.empty_cache()
        for name in builds:
            device = None if options.device == "cuda" else options.device
            found = engine_milliseconds(engines / f"{name}.engine", batches, options.context, device)
            note(f"dsc, {name}", {batch: f"{ms:.3f}" for batch, ms in found.items()})
    finally:
        for build in builds.values():
            build.kill()
        shutil.rmtree(options.folder)
        shutil.rmtree(engines)
    table = Table("ms a decode step", *(f"batch {batch}" for batch in batches))
    for line, row in rows.items():
        table.add_row(line, *(row.get(batch, "") for batch in batches))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
