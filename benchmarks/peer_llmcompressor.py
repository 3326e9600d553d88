"""The same checkpoint through llm-compressor's model-free path, for comparison only. In an environment of its own:

python -m venv peer; peer/bin/pip install llmcompressor; peer/bin/python benchmarks/peer_llmcompressor.py CHECKPOINT OUTPUT wint4|wint8|fp8

FP8 blocks are dequantized to bfloat16 and rounded to nearest: W4A16 in groups of 128, W8A16 a row; fp8 again in blocks of 128x128.
"""

from __future__ import annotations

import sys

from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer  # type: ignore[import-not-found]
from llmcompressor import model_free_ptq  # type: ignore[import-not-found]

SCHEMES = {"wint4": "W4A16", "wint8": "W8A16", "fp8": "FP8_BLOCK"}
LINEAR = (r"re:.*_proj$", r"re:.*kv_a_proj_with_mqa$")
KEPT = ("lm_head", "model.embed_tokens", r"re:.*mlp\.gate$")


def main() -> None:
    """Quantize; one shard at a time, since a worker takes 10 GB for a shard of 4.3 GB."""
    model, output, format_ = sys.argv[1:]
    converter = FP8BlockDequantizer(targets=LINEAR)
    model_free_ptq(
        model, output, scheme=SCHEMES[format_], ignore=KEPT, max_workers=1, device="cpu", converter=converter
    )


if __name__ == "__main__":
    main()
