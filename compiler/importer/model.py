"""Import a model: one graph of standard ONNX ops for `main`, one for `mtp`, from its numbers alone.

float32, one sequence of T tokens, no cache; logits of R chosen rows. Weights are expressions of the checkpoint's tensors,
so nothing is read here. onnxruntime runs the graphs as they are: they witness for every fused one.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from dsc.compiler.importer.attention import RopeTables, attention
from dsc.compiler.importer.builder import Builder, SourceLookup
from dsc.compiler.importer.mlp import feed_forward
from dsc.compiler.ir.graph import Graph, GraphInfo
from dsc.compiler.ir.weight import ONNX_DTYPES
from dsc.compiler.tables import rope_table
from dsc.runtime.errors import raise_all
from dsc.runtime.spec import ModelSpec


def import_main(spec: ModelSpec, source: SourceLookup, context_tokens: int) -> Graph:
    """The main model: tokens[T] positions[T] logit_rows[R] int32 -> logits[R, V], hidden[T, D] after the final norm.

    source          the stored dtype and shape of a tensor by its name (`Checkpoint.source`)
    context_tokens  rows of the rope tables; positions are below it
    raises          DscError naming every stored tensor whose shape does not fit the spec
    """
    build, rope = _begin("main", spec, source, context_tokens, tuple(range(spec.num_layers)))
    x = _embed(build, "embed_tokens")
    for layer in range(spec.num_layers):
        x = _decoder_layer(build, layer, x, rope)
    hidden = build.norm("norm", x, "model.norm.weight")
    _head(build, "", hidden)
    build.graph.add_output(hidden, "hidden")
    return _finish(build)


def import_mtp(spec: ModelSpec, source: SourceLookup, context_tokens: int) -> Graph:
    """The MTP layer: tokens[T] (each the successor of its row's token), hidden[T, D] (the main model's rows, after its
    final norm), positions[T] (of those rows), logit_rows[R] -> logits[R, V], hidden.out[T, D] after shared_head.norm.

    Its embeddings and head are the main model's. Arguments and errors as in `import_main`. The output is not called
    `hidden` because a name means one tensor in a graph.
    """
    assert spec.num_mtp_layers == 1, spec.num_mtp_layers
    layer = spec.num_layers
    build, rope = _begin("mtp", spec, source, context_tokens, (layer,))
    hidden = build.graph.add_input("hidden", "float32", ("T", spec.hidden_size))
    tensor = f"model.layers.{layer}"
    embedding = build.norm("mtp.enorm", _embed(build, "mtp.embed_tokens"), f"{tensor}.enorm.weight")
    previous = build.norm("mtp.hnorm", hidden, f"{tensor}.hnorm.weight")
    both = build.op("Concat", "mtp.concat", [embedding, previous], ("T", 2 * spec.hidden_size), axis=1)
    eh_proj = build.weight(f"{tensor}.eh_proj.weight", (spec.hidden_size, 2 * spec.hidden_size), "eh_proj")
    x = _decoder_layer(build, layer, build.linear("mtp.eh_proj", both, eh_proj), rope)
    normed = build.norm("mtp.norm", x, f"{tensor}.shared_head.norm.weight")
    _head(build, "mtp.", normed)
    build.graph.add_output(normed, "hidden.out")
    return _finish(build)


def _begin(
    name: str, spec: ModelSpec, source: SourceLookup, context_tokens: int, layers: tuple[int, ...]
) -> tuple[Builder, RopeTables]:
    graph = Graph(name, GraphInfo(spec, name, layers=layers))
    build = Builder(graph, spec, source)
    graph.add_input("tokens", "int32", ("T",))
    positions = graph.add_input("positions", "int32", ("T",))
    graph.add_input("logit_rows", "int32", ("R",))
    wide = build.op("Cast", "positions.int64", [positions], ("T",), "int64", to=ONNX_DTYPES["int64"])
    rows = build.op("Unsqueeze", "positions.row", [wide, build.ints(0)], (1, "T"), "int64")
    cos, sin = (
        build.make_weight(f"rope.{part}", lambda part=part: rope_table(spec, context_tokens, part), "exact")  # type: ignore[misc]
        for part in ("cos", "sin")
    )
    return build, RopeTables(cos, sin, rows)


def _finish(build: Builder) -> Graph:
    raise_all("the checkpoint does not fit its config.json", build.faults)
    return build.graph


def _embed(build: Builder, name: str) -> gs.Variable:
    tokens = build.graph.input("tokens")
    return build.op("Gather", name, [_embedding_table(build), tokens], ("T", build.spec.hidden_size), axis=0)


def _embedding_table(build: Builder) -> gs.Constant:
    spec = build.spec
    return build.weight("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size), "embeddings")


def _head(build: Builder, prefix: str, hidden: gs.Variable) -> None:
    """logits of the chosen rows; tied embeddings are one tensor, of the class `embeddings`."""
    spec = build.spec
    rows = build.graph.input("logit_rows")
    chosen = build.op("Gather", f"{prefix}lm_head.rows", [hidden, rows], ("R", spec.hidden_size), axis=0)
    if spec.tie_word_embeddings:
        table = _embedding_table(build)
    else:
        table = build.weight("lm_head.weight", (spec.vocab_size, spec.hidden_size), "lm_head")
    build.graph.add_output(build.linear(f"{prefix}lm_head", chosen, table), "logits")


def _decoder_layer(build: Builder, layer: int, x: gs.Variable, rope: RopeTables) -> gs.Variable:
    """x + attention(norm(x)), then the same with the feed-forward half."""
    node, tensor = f"layers.{layer}", f"model.layers.{layer}"
    normed = build.norm(f"{node}.input_layernorm", x, f"{tensor}.input_layernorm.weight")
    x = build.op("Add", f"{node}.attention_sum", [x, attention(build, layer, normed, rope)], x.shape)
    normed = build.norm(f"{node}.post_attention_layernorm", x, f"{tensor}.post_attention_layernorm.weight")
    return build.op("Add", f"{node}.mlp_sum", [x, feed_forward(build, layer, normed)], x.shape)
