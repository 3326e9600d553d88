"""From an imported graph to the graphs that are compiled: a copy per phase with the step's inputs, and the sample graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.weight import DTYPE_BYTES
from dsc.runtime.spec import ModelSpec

# Inputs every phase graph has besides those of the imported one: name -> dimension letters. All int32.
STEP_INPUTS: Mapping[str, tuple[str, ...]] = {
    "slots": ("T",),
    "query_starts": ("B1",),
    "sequence_lengths": ("B",),
    "block_table": ("B", "P"),
}
# Inputs of the sample graph besides logits: name -> dtype. One value a logit row.
ROW_INPUTS: Mapping[str, str] = {
    "temperature": "float32",
    "top_p": "float32",
    "top_k": "int32",
    "min_p": "float32",
    "seeds": "int64",
    "positions": "int32",
}


@dataclass(frozen=True)
class StepLimits:
    """The largest step of an engine, in tokens, sequences and logit rows, and how its cache is cut."""

    batch_tokens: int
    sequences: int
    context_tokens: int
    drafts: int
    logit_rows: int
    cache_dtype: str
    block_tokens: int

    def bounds(self, phase: str) -> dict[str, int]:
        """Largest value of each letter in a phase; a decode step has at most 1 + drafts tokens a sequence."""
        queries = 1 + self.drafts if phase == "decode" else self.batch_tokens
        tokens = min(self.batch_tokens, self.sequences * queries)
        blocks = -(-self.context_tokens // self.block_tokens)
        return {
            "T": tokens,
            "B": self.sequences,
            "B1": self.sequences + 1,
            "Q": min(queries, tokens),
            "P": blocks,
            "R": min(tokens, self.logit_rows),
            "N": self.sequences * blocks,
        }


def phase_graphs(imported: Graph, limits: StepLimits) -> list[Graph]:
    """`main` -> `main.prefill` and `main.decode`, each with the step's inputs and one cache per layer."""
    return [_phase_graph(imported, phase, limits) for phase in ("prefill", "decode")]


def _phase_graph(imported: Graph, phase: str, limits: StepLimits) -> Graph:
    graph = imported.copy(
        f"{imported.name}.{phase}",
        phase=phase,
        bounds=limits.bounds(phase),
        cache_dtype=limits.cache_dtype,
        block_tokens=limits.block_tokens,
    )
    for name, shape in STEP_INPUTS.items():
        graph.add_input(name, "int32", shape)
    for layer in graph.info.layers:
        graph.add_input(f"cache.{layer}", "uint8", ("N", block_bytes(graph.info)))
    return graph


def block_bytes(info: GraphInfo) -> int:
    """Bytes of one layer's cache block: block_tokens rows of the latent and the rotated key."""
    return info.block_tokens * info.spec.cache_width * DTYPE_BYTES[info.cache_dtype]


def sample_graph(spec: ModelSpec, limits: StepLimits) -> Graph:
    """One dsc.Sample node: logits and each row's sampling parameters to tokens, accepted drafts and log-probabilities."""
    graph = Graph("sample", GraphInfo(spec=spec, model="sample", bounds=limits.bounds("prefill")))
    inputs = {"logits": graph.add_input("logits", "float32", ("R", spec.vocab_size))}
    for name, dtype in ROW_INPUTS.items():
        inputs[name] = graph.add_input(name, dtype, ("R",))
    inputs["token_mask"] = graph.add_input("token_mask", "int32", ("R", -(-spec.vocab_size // 32)))
    inputs["drafts"] = graph.add_input("drafts", "int32", ("R",))
    names = ("tokens", "accepted", "logprobs")
    node = graph.plugin("Sample", inputs, {}, "sample", {name: name for name in names})
    for output in node.outputs:
        graph.add_output(output)
    return graph


def advance_graph(spec: ModelSpec, limits: StepLimits) -> Graph:
    """One dsc.Advance node: a decode step's inputs become the next one's, on the device."""
    graph = Graph("advance", GraphInfo(spec=spec, model="advance", bounds=limits.bounds("decode")))
    rows = ("chosen", "tokens", "positions", "slots", "sequence_lengths", "places")
    inputs = {name: graph.add_input(name, "int32", ("B",)) for name in rows}
    inputs["block_table"] = graph.add_input("block_table", "int32", ("B", "P"))
    node = graph.plugin("Advance", inputs, {"block_tokens": limits.block_tokens}, "advance", {})
    for output in node.outputs:
        graph.add_output(output)
    return graph
