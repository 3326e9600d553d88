"""The imported graphs mean what transformers and the plain MTP layer compute, and say all they must about their weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import ABSENT, TOKENIZER, change_tensors, make_checkpoint, read_tensors
from support.oracle import OnnxGraph, Oracle, sources, worst_row_error

from dsc.compiler import tables
from dsc.compiler.config import read_config
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import Graph, expression_of, weight_class_of
from dsc.compiler.ir.verify import verify
from dsc.compiler.ir.weight import Cast, Dequantize, Source, Stack
from dsc.runtime.errors import DscError
from dsc.runtime.spec import Yarn

TOLERANCE = 1e-4  # worst row, relative; float32 against float32 gives about 2e-6
CONTEXT = 1024
NUM_TOKENS = 150

# Kinds of model beside the families themselves: each an override that changes the graph's shape.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "v2-lite": ("v2-lite", {}),
    "v2": ("v2", {}),
    "v3": ("v3", {}),
    "k2": ("k2", {}),
    "tied": ("v3", {"tie_word_embeddings": True, "num_nextn_predict_layers": 0}),
    "no-yarn": ("v3", {"rope_scaling": ABSENT, "num_nextn_predict_layers": 0}),
    "q_proj-sigmoid": ("v3", {"q_lora_rank": None, "num_nextn_predict_layers": 0}),
    "bf16": ("r1", {"quantization_config": ABSENT}),
    "partial-blocks": ("faults", {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(model: str) -> Path:
        if model == "tiny-r1":
            return TOKENIZER
        family, overrides = MODELS[model]
        return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **overrides)

    return make


def tokens_of(folder: Path) -> list[int]:
    vocab = read_config(folder).vocab_size
    return torch.randint(0, vocab, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def main_graph(folder: Path) -> Graph:
    return import_main(read_config(folder), sources(folder), CONTEXT)


@pytest.mark.parametrize("model", ["tiny-r1", *MODELS])
def test_onnxruntime_agrees_with_transformers(model: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint(model)
    tokens, rows = tokens_of(folder), list(range(NUM_TOKENS))
    logits, hidden = Oracle(folder, tmp_path).main(tokens)
    graph = main_graph(folder)
    verify(graph)
    got = OnnxGraph(graph, folder).run(tokens=tokens, positions=rows, logit_rows=rows)
    assert worst_row_error(got["logits"], logits) < TOLERANCE
    assert worst_row_error(got["hidden"], hidden) < TOLERANCE


@pytest.mark.parametrize("model", ["tiny-r1", "v3", "bf16", "partial-blocks"])
def test_mtp_graph_agrees_with_plain_mtp_layer(model: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint(model)
    tokens, rows = tokens_of(folder), list(range(NUM_TOKENS - 1))
    oracle = Oracle(folder, tmp_path)
    hidden = oracle.main(tokens)[1][:-1]
    logits, after = oracle.mtp(tokens[1:], hidden)
    graph = import_mtp(read_config(folder), sources(folder), CONTEXT)
    verify(graph)
    got = OnnxGraph(graph, folder).run(tokens=tokens[1:], positions=rows, logit_rows=rows, hidden=hidden)
    assert worst_row_error(got["logits"], logits) < TOLERANCE
    assert worst_row_error(got["hidden.out"], after) < TOLERANCE


def test_logits_are_those_of_the_rows_asked_for(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("v2-lite")
    tokens = tokens_of(folder)
    session = OnnxGraph(main_graph(folder), folder)
    whole = session.run(tokens=tokens, positions=range(NUM_TOKENS), logit_rows=range(NUM_TOKENS))["logits"]
    some = session.run(tokens=tokens, positions=range(NUM_TOKENS), logit_rows=[7, 0, 7])["logits"]
    torch.testing.assert_close(some, whole[[7, 0, 7]], rtol=1e-5, atol=1e-5)


def test_rotation_depends_on_distance_only(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("v3")
    tokens = tokens_of(folder)[:40]
    session = OnnxGraph(main_graph(folder), folder)
    near = session.run(tokens=tokens, positions=range(40), logit_rows=range(40))["logits"]
    far = session.run(tokens=tokens, positions=range(900, 940), logit_rows=range(40))["logits"]
    spread = session.run(tokens=tokens, positions=range(0, 80, 2), logit_rows=range(40))["logits"]
    assert worst_row_error(far, near) < TOLERANCE
    assert worst_row_error(spread, near) > 100 * TOLERANCE


def test_weights_are_expressions_of_stored_tensors(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("v3")
    weights = main_graph(folder).weights()
    block = (128, 128)
    prefix = "model.layers.1"
    kv_a = expression_of(weights[f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"])
    name = f"{prefix}.self_attn.kv_a_proj_with_mqa.weight"
    codes = Source(name, "float8_e4m3fn", (576, 256))
    assert kv_a == Dequantize(codes, Source(f"{name}_scale_inv", "float32", (5, 2)), block)
    norm = f"{prefix}.input_layernorm.weight"
    assert expression_of(weights[norm]) == Cast(Source(norm, "bfloat16", (256,)), "float32")
    bias = f"{prefix}.mlp.gate.e_score_correction_bias"
    assert expression_of(weights[bias]) == Source(bias, "float32", (16,))
    down = expression_of(weights[f"{prefix}.mlp.experts.down_proj.weight"])
    assert isinstance(down, Stack)
    assert down.shape == (16, 256, 128)
    assert [next(part.sources()).name for part in down.parts] == [
        f"{prefix}.mlp.experts.{expert}.down_proj.weight" for expert in range(16)
    ]


def test_every_stored_tensor_is_read_once(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("v3")
    spec, stored = read_config(folder), sources(folder)
    main, mtp = import_main(spec, stored, CONTEXT).weights(), import_mtp(spec, stored, CONTEXT).weights()
    shared = {"model.embed_tokens.weight", "lm_head.weight", "rope.cos", "rope.sin"}
    assert main.keys() & mtp.keys() == shared
    assert all(expression_of(main[name]) == expression_of(mtp[name]) for name in shared)
    read = [source.name for weight in {**main, **mtp}.values() for source in expression_of(weight).sources()]
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert sorted(read) == sorted(read_tensors(folder).keys() - copies)


def test_weight_classes(checkpoint: Callable[[str], Path]) -> None:
    weights = main_graph(checkpoint("v3")).weights()
    found = {name.removeprefix("model."): weight_class_of(w) for name, w in weights.items() if ".2." not in name}
    assert found == {
        "embed_tokens.weight": "embeddings",
        "norm.weight": "exact",
        "lm_head.weight": "lm_head",
        "rope.cos": "exact",
        "rope.sin": "exact",
        **{f"layers.0.mlp.{part}_proj.weight": "dense_mlp" for part in ("gate", "up", "down")},
        **{f"layers.1.mlp.experts.{part}_proj.weight": "experts" for part in ("gate", "up", "down")},
        **{f"layers.1.mlp.shared_experts.{part}_proj.weight": "shared_experts" for part in ("gate", "up", "down")},
        **{f"layers.1.mlp.gate.{part}": "exact" for part in ("weight", "e_score_correction_bias")},
        **{
            f"layers.{layer}.self_attn.{part}.weight": weight_class
            for layer in (0, 1)
            for part, weight_class in {
                "q_a_proj": "attention",
                "q_a_layernorm": "exact",
                "q_b_proj": "attention",
                "kv_a_proj_with_mqa": "attention",
                "kv_a_layernorm": "exact",
                "kv_b_proj": "kv_b",
                "o_proj": "attention",
            }.items()
        },
        **{
            f"layers.{layer}.{norm}_layernorm.weight": "exact"
            for layer in (0, 1)
            for norm in ("input", "post_attention")
        },
    }


def test_tied_embeddings_are_one_weight(checkpoint: Callable[[str], Path]) -> None:
    graph = main_graph(checkpoint("tied"))
    assert "lm_head.weight" not in graph.weights()
    table = graph.weights()["model.embed_tokens.weight"]
    assert [node.name for node in table.outputs] == ["embed_tokens", "lm_head"]


def test_shapes_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    def break_two(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:255].clone()
        scales = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
        tensors[scales] = tensors[scales][:4].clone()

    folder = make_checkpoint(tmp_path / "v3", "v3")
    change_tensors(folder, break_two)
    with pytest.raises(DscError) as error:
        main_graph(folder)
    assert str(error.value) == (
        "the checkpoint does not fit its config.json: 2 faults\n"
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv does not fit config.json\n"
        "  wanted  float32 [5, 2]\n"
        "  got     float32 [4, 2]\n"
        "model.norm.weight does not fit config.json\n"
        "  wanted  bfloat16 [256]\n"
        "  got     bfloat16 [255]"
    )


# -- tables


def test_sines_and_cosines_are_as_exact_as_float64() -> None:
    angles = np.concatenate([np.linspace(0, 2e5, 100_003), np.arange(2000) * (np.pi / 4)])
    sine, cosine = tables.sin_cos(angles)
    assert abs(sine - np.sin(angles)).max() < 3e-16
    assert abs(cosine - np.cos(angles)).max() < 3e-16


def test_yarn_stretches_slow_pairs_only() -> None:
    yarn = Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    plain, stretched = tables.rope_frequencies(64, 1e4, None), tables.rope_frequencies(64, 1e4, yarn)
    ratio = stretched / plain
    assert (ratio[:11] == 1).all()  # low = floor(10.2)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-15)  # high = ceil(22.5)
    assert (np.diff(ratio[10:24]) < 0).all()


def test_magnitude_is_the_ratio_of_both_mscales(checkpoint: Callable[[str], Path]) -> None:
    yarn = (40.0, 4096, 32.0, 1.0, 1.0, 0.707)
    scaled, plain = (tables.rope_cos(8, 64, 1e4, y) for y in (yarn, (*yarn[:4], 1.0, 1.0)))
    ratio = (0.1 * np.log(40) + 1) / (0.0707 * np.log(40) + 1)
    np.testing.assert_allclose(scaled, plain * ratio, rtol=1e-6)
    assert scaled.dtype == np.float32
