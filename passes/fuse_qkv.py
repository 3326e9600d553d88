"""Fuse the front of an MLA layer into one plugin op: projections, latent norms, rope of the key, append to the cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsc.compiler.ir.graph import (
    Graph,
    GraphInfo,
    Node,
    Tensor,
    constant,
    expression_of,
    op_name,
    weight,
    weight_class_of,
)
from dsc.compiler.ir.match import Match, Mismatch, attribute, describe, match
from dsc.compiler.ir.pattern import ANY, Any, C, P, W
from dsc.compiler.ir.readers import readers
from dsc.compiler.ir.rewrite import Pass, Report
from dsc.compiler.ir.weight import ONNX_DTYPES, Cast, Concat, Dequantize, DequantizePacked, Expression
from dsc.runtime.spec import ModelSpec


class Front:
    """The pattern: three results of one x. It begins at the latent's norm, the only norm of a part of a projection."""

    def __init__(self, spec: ModelSpec) -> None:
        x, latent, rope = Any("x"), spec.kv_lora_rank, spec.qk_rope_head_dim
        self.kv_a = P("Gemm", x, W("kv_a"), transB=1)
        self.split = P("Split", self.kv_a, C((latent, rope), "widths"), axis=1)
        self.latent = P("RMSNormalization", self.split[0], W("kv_norm"), axis=-1, epsilon=ANY)

        position = P("Cast", Any("positions"), to=ONNX_DTYPES["int64"], shared=True)
        rows = P("Unsqueeze", position, C([0]), shared=True)
        one_head = P("Reshape", self.split[1], C([1, 1, -1, rope]))
        self.k_rope = P("RotaryEmbedding", one_head, W("cos"), W("sin"), rows, interleaved=1)

        self.q = P("Gemm", x, W("q"), transB=1)
        if spec.q_lora_rank is not None:
            self.q = P("RMSNormalization", self.q, W("q_norm"), axis=-1, epsilon=ANY)


@dataclass(frozen=True)
class FuseQkv(Pass):
    """q_a and its norm (or q_proj), kv_a, the latent's norm, rope of the key -> dsc.Qkv, which also writes the cache.

    Its results: q [T, q_lora] (or the queries [T, H (nope + rope)]), latent [T, latent], k_rope [T, rope], the cache. The
    two projections become one weight, q's rows first, where both are stored in one scheme and, in fp8, q's rows end at a
    block's border, so that codes and scales concatenate as they are; elsewhere they stay apart and the report says why.
    Takes the inputs `slots` and `cache.{layer}`; adds the output `cache.{layer}.out`.
    """

    takes = ("RotaryEmbedding",)

    def expected(self, info: GraphInfo) -> int:
        return info.num_layers

    def run(self, graph: Graph) -> Report:
        report = Report()
        front = Front(graph.info.spec)
        for node in graph.find("RMSNormalization"):
            begun = match(front.latent, node, graph, closed=False)
            if isinstance(begun, Mismatch):
                if begun.near:
                    report.decline(begun.node, begun.reason, begun.wanted, begun.got)
                continue
            site = _complete(graph, front, begun, report)
            if site is not None:
                _rewrite(graph, front, site, report)
        if len(report.changed) + len(report.declined) < self.expected(graph.info):
            _decline_lone_keys(graph, front, report)
        return report


def _complete(graph: Graph, front: Front, begun: Match, report: Report) -> Match | None:
    """Continue a match of the latent with the key's rope and the queries of the same x; None where that fails."""
    key, x = begun.matched[front.split].outputs[1], begun["x"]
    site = _continue(graph, front.k_rope, key, readers(key, "RotaryEmbedding"), begun, report, closed=False)
    if site is None:
        return None
    if site["positions"] is not graph.input("positions"):
        got = describe(site["positions"])
        report.decline(site.root, "the key is not rotated by the step's positions", "input positions", got)
        return None
    queries = [node for node in readers(x, "Gemm") if node is not begun.matched[front.kv_a]]
    if front.q.op != "Gemm":
        queries = [norm for node in queries for norm in readers(node.outputs[0], front.q.op)]
    site = _continue(graph, front.q, x, queries, site, report, closed=True)
    if site is None or front.q.op == "Gemm":
        return site
    epsilons = [attribute(site.matched[norm], "epsilon") for norm in (front.q, front.latent)]
    if epsilons[0] != epsilons[1]:
        got = f"{epsilons[0]} and {epsilons[1]}"
        report.decline(site.root, "the norms of q and of the latent have different epsilons", "one epsilon", got)
        return None
    return site


def _continue(
    graph: Graph, pattern: P, tensor: Tensor, roots: Sequence[Node], begun: Match, report: Report, closed: bool
) -> Match | None:
    """The one of `roots`, which follow `tensor`, that matches; or, in the report, why the first of them does not."""
    results = [match(pattern, root, graph, given=begun, closed=closed) for root in roots]
    for result in results:
        if isinstance(result, Match):
            return result
    if results:
        nearest = results[0]
        assert isinstance(nearest, Mismatch)
        report.decline(nearest.node, nearest.reason, nearest.wanted, nearest.got)
    else:
        report.decline(begun.roots[0], f"nothing else of the site reads {tensor.name}", str(pattern), _readers(tensor))
    return None


def _readers(tensor: Tensor) -> str:
    return ", ".join(f"{op_name(node)} {node.name}" for node in tensor.outputs) or "no reader"


def _decline_lone_keys(graph: Graph, front: Front, report: Report) -> None:
    """Tell of layers whose latent looks like nothing known, by the key of one head that is rotated there all the same."""
    for node in graph.find("RotaryEmbedding"):
        if node.inputs[0].shape[1] != 1:
            continue
        key = match(front.k_rope, node, graph, closed=False)
        if isinstance(key, Mismatch):
            report.decline(key.node, key.reason, key.wanted, key.got)
        else:
            split = key.matched[front.split]
            report.decline(split, "the latent is not read by its norm", "RMSNormalization", _readers(split.outputs[0]))


def _rewrite(graph: Graph, front: Front, site: Match, report: Report) -> None:
    found = re.search(r"layers\.(\d+)\.self_attn\.", str(site["kv_a"].name))
    if found is None:
        report.decline(
            site.root, "the layer is not told by the weight's name", "layers.{i}.self_attn.", site["kv_a"].name
        )
        return
    name, layer, info, spec = f"layers.{found[1]}.self_attn.qkv", found[1], graph.info, graph.info.spec
    cache = graph.input(f"cache.{layer}")
    apart = _kept_apart(expression_of(site["q"]), expression_of(site["kv_a"]))
    inputs = {
        "x": site["x"],
        "w": site["q"]
        if apart
        else _joint_weight(site["q"], site["kv_a"], f"model.layers.{layer}.self_attn.qkv_proj.weight"),
        "w_kv": site["kv_a"] if apart else None,
        "q_norm": site.tensors.get("q_norm"),
        **{slot: site[slot] for slot in ("kv_norm", "cos", "sin", "positions")},
        "slots": graph.input("slots"),
        "cache": cache,
    }
    attributes = {
        "q_width": int(site["q"].shape[0]),
        "q_lora": spec.q_lora_rank or 0,
        "heads": spec.num_heads,
        "nope": spec.qk_nope_head_dim,
        "latent": spec.kv_lora_rank,
        "rope": spec.qk_rope_head_dim,
        "epsilon": attribute(site.matched[front.latent], "epsilon"),
        "cache_dtype": info.cache_dtype,
        "block_tokens": info.block_tokens,
        "block_bytes": int(cache.shape[1]),
        "joint": 0 if apart else 1,
        "w_format": "fp32",
        "w_kv_format": "fp32",
    }
    q, latent, k_rope = (site.matched[root].outputs[0] for root in (front.q, front.latent, front.k_rope))
    graph.remove(site.nodes)
    outputs = {"q": q, "latent": latent, "cache_out": f"cache.{layer}.out"}
    node = graph.plugin("Qkv", inputs, attributes, name, outputs)
    # The reader of the rotated key still wants it as one head of one sequence.
    view = constant(f"{name}.k_rope_shape", [1, 1, -1, spec.qk_rope_head_dim], "int64")
    graph.add("Reshape", [node.outputs[2], view], [k_rope], f"{name}.k_rope_view")
    graph.add_output(node.outputs[3])
    report.change(node, f"two weights: {apart}" if apart else "")
    if apart:
        graph.info = replace(info, apart=info.apart + 1)
        report.notice(node, f"q and kv_a stay two weights: {apart}")


def _joint_weight(q: Tensor, kv: Tensor, name: str) -> Tensor:
    return weight(name, Concat((expression_of(q), expression_of(kv))), weight_class_of(kv))


def _kept_apart(q: Expression, kv: Expression) -> str:
    """Why two weights do not concatenate as stored, or ""."""
    schemes = _scheme(q), _scheme(kv)
    if schemes[0] != schemes[1]:
        return f"q is stored as {schemes[0]} and kv_a as {schemes[1]}"
    if isinstance(q, Dequantize) and q.shape[0] % q.block[0]:
        return f"q has {q.shape[0]} rows, which do not fill blocks of {q.block[0]}"
    return ""


def _scheme(expression: Expression) -> str:
    if isinstance(expression, Dequantize):
        return f"{expression.x.dtype} in blocks of {expression.block[0]} x {expression.block[1]}"
    if isinstance(expression, DequantizePacked):
        packing = expression.packing
        return f"{packing.bits}-bit codes in {f'groups of {packing.group}' if packing.group else 'rows'}"
    return expression.x.dtype if isinstance(expression, Cast) else expression.dtype
