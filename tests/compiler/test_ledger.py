"""The ledger: every source tensor is consumed, derived from or dropped by a rule; anything else is an error."""

import json

import pytest
import torch
from support.families import FAMILIES, change_tensors, make_checkpoint

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.importer.model import import_main, import_mtp
from dsc.compiler.ir.graph import expression_of
from dsc.compiler.ir.weight import Cast, Concat, Dequantize, Expression, Quantize, Reshape, Source, Stack
from dsc.compiler.ledger import make_ledger
from dsc.runtime.errors import DscError

EMBED, HEAD = "model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"


def open_(folder, **options) -> Checkpoint:
    return Checkpoint.open(folder, read_config(folder), **options)


def weights(checkpoint: Checkpoint) -> dict[str, Expression]:
    """The weight expressions of the imported graphs."""
    spec = checkpoint.spec
    graphs = [import_main(spec, checkpoint.source, 64)]
    if spec.num_mtp_layers:
        graphs.append(import_mtp(spec, checkpoint.source, 64))
    return {name: expression_of(constant) for graph in graphs for name, constant in graph.weights().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_imported_graphs_account_for_every_tensor(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    checkpoint = open_(folder)
    data = json.loads(json.dumps(make_ledger(checkpoint, weights(checkpoint)).to_json()))
    assert sum(part["count"] for part in data.values()) == len(checkpoint.names())
    assert sum(part["bytes"] for part in data.values()) == sum(checkpoint.info(n).nbytes for n in checkpoint.names())
    dropped = [name for names in data["dropped"]["tensors"].values() for name in names]
    assert sorted([*data["consumed"]["tensors"], *data["derived"]["tensors"], *dropped]) == checkpoint.names()
    # Dequantized to float32 an FP8 weight is derived; bfloat16 and float32 come through whole.
    fp8 = [name for name in checkpoint.names() if name.endswith("_scale_inv")]
    assert set(fp8) <= set(data["derived"]["tensors"])
    assert "model.norm.weight" in data["consumed"]["tensors"]
    copies = sorted(name for name, _ in checkpoint.copies())
    assert data["dropped"]["tensors"] == ({"copy of the main model's tensor": copies} if copies else {})


def test_consumed_or_derived_by_what_happens_to_the_values(tmp_path):
    """Passed through whole, or computed with: codes of an FP8 weight, and a bfloat16 one."""
    checkpoint = open_(make_checkpoint(tmp_path, "r1"), mtp=False)
    codes, head = "model.layers.0.mlp.down_proj.weight", "lm_head.weight"
    scales = f"{codes}_scale_inv"
    fp8 = Dequantize(checkpoint.source(codes), checkpoint.source(scales), (128, 128))
    floats = Cast(checkpoint.source(head), "float32")
    cases: list[tuple[str, Expression, str]] = [
        (codes, Quantize(Concat((fp8, fp8)), "fp8", "data"), "consumed"),
        (scales, Quantize(Concat((fp8, fp8)), "fp8", "scales"), "consumed"),
        (codes, fp8, "derived"),
        (codes, Quantize(fp8, "bf16", "data"), "derived"),
        (codes, Quantize(fp8, "wint8", "data"), "derived"),
        (scales, Quantize(Stack((fp8,)), "wint4:128", "scales"), "derived"),
        (head, floats, "consumed"),
        (head, Reshape(Quantize(floats, "bf16", "data"), (512 * 256,)), "consumed"),
        (head, Quantize(floats, "fp32", "data"), "consumed"),
        (head, Quantize(floats, "fp8", "data"), "derived"),
    ]
    for name, expression, state in cases:
        others = plain(checkpoint, skip=[source.name for source in expression.sources()])
        ledger = make_ledger(checkpoint, {**others, "this": expression})
        found = {entry.name: entry.state for entry in ledger.entries}
        assert found[name] == state, expression


def plain(checkpoint: Checkpoint, skip=()) -> dict[str, Expression]:
    """Every expected tensor read as it is."""
    return {name: checkpoint.source(name) for name in checkpoint.names() if name not in {*checkpoint.dropped, *skip}}


def test_mtp_off_drops_its_layer_by_rule(tmp_path):
    checkpoint = open_(make_checkpoint(tmp_path, "faults"), mtp=False)
    data = make_ledger(checkpoint, weights(checkpoint)).to_json()
    assert list(data["dropped"]["tensors"]) == ["MTP layer: off in the recipe"]
    names = data["dropped"]["tensors"]["MTP layer: off in the recipe"]
    assert names == [name for name in checkpoint.names() if name.startswith("model.layers.4.")]


def test_a_tensor_that_nothing_reads_is_an_error(tmp_path):
    checkpoint = open_(make_checkpoint(tmp_path, "faults"))
    read = weights(checkpoint)
    del read["model.layers.2.mlp.shared_experts.up_proj.weight"]
    with pytest.raises(DscError, match="2 tensors are read by no graph and dropped by no rule") as caught:
        make_ledger(checkpoint, read)
    assert "model.layers.2.mlp.shared_experts.up_proj.weight_scale_inv" in str(caught.value)


def test_a_read_of_a_tensor_that_is_not_stored_is_an_error(tmp_path):
    checkpoint = open_(make_checkpoint(tmp_path, "faults"))
    ghost = Source("model.layers.9.norm.weight", "float32", (4,))
    with pytest.raises(DscError, match="1 tensors are read and not stored") as caught:
        make_ledger(checkpoint, {**weights(checkpoint), "ghost": ghost})
    assert "model.layers.9.norm.weight" in str(caught.value)


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_an_mtp_copy_of_other_bytes_is_told(tmp_path, name, monkeypatch):
    monkeypatch.setattr("dsc.compiler.ledger.PIECE_BYTES", 10_000)  # several pieces
    folder = make_checkpoint(tmp_path, "faults")

    def change(tensors):
        tensors[name][[7, 514]] += 1

    change_tensors(folder, change)
    checkpoint = open_(folder)
    with pytest.raises(DscError) as caught:
        make_ledger(checkpoint, weights(checkpoint))
    assert caught.value.what.startswith(f"{name} is not a copy of ")
    assert caught.value.got == "2 of 515 rows differ"
    assert caught.value.try_ == "mtp: {enabled: false} in the recipe"


def test_a_copy_that_differs_in_the_sign_of_zero_or_in_nan_bits_differs(tmp_path):
    """Bytes are compared, not values: NaN equals itself, -0 is not 0."""
    folder = make_checkpoint(tmp_path, "faults")

    def change(tensors):
        for name in (EMBED, "model.embed_tokens.weight"):
            tensors[name][0, 0] = float("nan")
            tensors[name][1, 0] = 0.0
        tensors[EMBED][1, 0] = -0.0

    change_tensors(folder, change)
    checkpoint = open_(folder)
    with pytest.raises(DscError, match="1 of 515 rows differ"):
        make_ledger(checkpoint, weights(checkpoint))


def test_tied_head_stored(tmp_path):
    folder = make_checkpoint(tmp_path, "v2-lite", tie_word_embeddings=True)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    checkpoint = open_(folder)
    data = make_ledger(checkpoint, weights(checkpoint)).to_json()
    assert data["dropped"]["tensors"] == {"copy of the tied embeddings": ["lm_head.weight"]}
    change_tensors(folder, lambda t: t.update({"lm_head.weight": torch.ones_like(t["lm_head.weight"])}))
    checkpoint = open_(folder)
    with pytest.raises(DscError, match="tie_word_embeddings is true") as caught:
        make_ledger(checkpoint, weights(checkpoint))
    assert "tie_word_embeddings: false" in caught.value.try_
