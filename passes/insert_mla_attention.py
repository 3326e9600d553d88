"""Insert the plugin op that attends over the latent cache, in place of keys, values and attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsc.compiler.ir.graph import Graph, GraphInfo, Node, op_name, operand
from dsc.compiler.ir.match import Match, Mismatch, attribute, describe, match
from dsc.compiler.ir.pattern import ANY, Any, C, P, W
from dsc.compiler.ir.readers import readers
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec

# What can be asked of each phase; those in the second list are known and not built.
MODES = {"prefill": (("expanded", "absorbed"), ("sage",)), "decode": (("absorbed", "expanded"), ("sage",))}
SCALE_TOLERANCE = 1e-6  # an attribute passes through float32


class Back:
    """The pattern: from q, the latent and the rotated key to the heads' outputs [T, H v]."""

    def __init__(self, spec: ModelSpec) -> None:
        heads, nope, rope, v = spec.num_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim

        def view(x: Any | P, width: int) -> P:  # [T, H width] -> [1, T, H, width]
            return P("Reshape", x, C([1, -1, heads, width]))

        def by_head(x: P) -> P:
            return P("Transpose", x, perm=[0, 2, 1, 3])

        positions = P("Cast", Any("positions"), to=ONNX_DTYPES["int64"], shared=True)
        rows = P("Unsqueeze", positions, C([0]), shared=True)

        self.q = view(Any("q"), nope + rope)
        q = P("Split", by_head(self.q), C([nope, rope], "widths of q"), axis=3)
        q_rope = P("RotaryEmbedding", q[1], W("cos"), W("sin"), rows, interleaved=1)
        query = P("Concat", q[0], q_rope, axis=3)

        expanded = P("Gemm", Any("latent"), W("kv_b"), transB=1)
        kv = P("Split", by_head(view(expanded, nope + v)), C([nope, v], "widths of kv"), axis=3)
        self.k_rope = P("Reshape", Any("k_rope"), C([1, 1, -1, rope]))
        key = P("Concat", kv[0], P("Expand", self.k_rope, C([1, heads, 1, 1])), axis=3)

        self.attention = P("Attention", query, key, kv[1], is_causal=1, scale=ANY)
        self.output = P("Reshape", by_head(self.attention), C([-1, heads * v]))


@dataclass(frozen=True)
class InsertMlaAttention(Pass):
    """kv_b, rope of the queries, keys, values and attention -> dsc.MlaAttention over the cache that dsc.Qkv wrote.

    prefill, decode   how the op computes in each phase: `expanded` re-expands the cached latents through kv_b, `absorbed`
                      puts kv_b into the queries and the outputs
    """

    takes = ("Attention", "RotaryEmbedding")

    prefill: str = "expanded"
    decode: str = "absorbed"

    def __post_init__(self) -> None:
        for phase, (built, planned) in MODES.items():
            mode = getattr(self, phase)
            if mode in built:
                continue
            state = "is not built yet" if mode in planned else "is unknown"
            raise DscError(f"insert_mla_attention: {phase}: {mode} {state}", wanted=" or ".join(built), got=str(mode))

    def expected(self, info: GraphInfo) -> int:
        return info.num_layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        back = Back(graph.info.spec)
        for node in graph.find("Attention"):
            outputs = readers(node.outputs[0], "Reshape")
            if not outputs:
                report.decline(node, "nobody flattens the heads", str(back.output.op), _who_reads(node))
                continue
            site = match(back.output, outputs[0], graph)
            if isinstance(site, Mismatch):
                report.decline(site.node, site.reason, site.wanted, site.got)
            elif _agrees(graph, back, site, report):
                self._rewrite(graph, back, site, report)
        return report

    def _rewrite(self, graph: Graph, back: Back, site: Match, report: Report) -> None:
        info, spec = graph.info, graph.info.spec
        attention, qkv = site.matched[back.attention], site.node("latent")
        mode = {"prefill": self.prefill, "decode": self.decode}[info.phase]
        inputs = {
            **{slot: site[slot] for slot in ("q", "kv_b", "cos", "sin", "positions", "latent", "k_rope")},
            **{slot: graph.input(slot) for slot in ("query_starts", "sequence_lengths", "block_table")},
            "cache": qkv.outputs[3],
        }
        attributes = {
            "heads": spec.num_heads,
            "nope": spec.qk_nope_head_dim,
            "rope": spec.qk_rope_head_dim,
            "v": spec.v_head_dim,
            "latent_dim": spec.kv_lora_rank,
            "scale": attribute(attention, "scale"),
            "mode": mode,
            **{key: qkv.attrs[key] for key in ("cache_dtype", "block_tokens", "block_bytes")},
            "kv_b_format": "fp32",
        }
        name, output = str(attention.name), site.root.outputs[0]
        graph.remove(site.nodes)
        report.change(graph.plugin("MlaAttention", inputs, attributes, name, {"o": output}), mode)


def _agrees(graph: Graph, back: Back, site: Match, report: Report) -> bool:
    """Whether latent and key come from one dsc.Qkv that rotated as the queries are, and the scale is the model's."""
    attention, q, k_rope = site.matched[back.attention], site["q"], site["k_rope"]
    if len(q.shape) != 2:
        report.decline(
            site.matched[back.q], "the queries are cut into heads twice", "q [T, H (nope + rope)]", describe(q)
        )
        return False
    qkv = site.node("latent") if site["latent"].inputs else None
    if qkv is None or op_name(qkv) != "dsc.Qkv":
        report.decline(attention, "the latent is not a dsc.Qkv's", "fuse_qkv to run before", describe(site["latent"]))
        return False
    if k_rope is not qkv.outputs[2]:
        reason, wanted = "the key's rotated part is not the latent's", f"k_rope of dsc.Qkv {qkv.name}"
        report.decline(site.matched[back.k_rope], reason, wanted, describe(k_rope))
        return False
    for slot in ("cos", "sin", "positions"):
        made = operand(qkv, slot)
        assert made is not None, slot
        if made.name != site[slot].name:
            reason = f"queries and keys rotate by different {slot}"
            report.decline(attention, reason, describe(made), describe(site[slot]))
            return False
    scale, wanted_scale = attribute(attention, "scale"), graph.info.spec.softmax_scale
    if not math.isclose(scale, wanted_scale, rel_tol=SCALE_TOLERANCE):
        report.decline(attention, "the softmax scale is not the model's", f"{wanted_scale:.6g}", f"{scale:.6g}")
        return False
    return True


def _who_reads(node: Node) -> str:
    return ", ".join(f"{op_name(reader)} {reader.name}" for reader in node.outputs[0].outputs) or "no reader"
