"""Planned weights are those of the graphs, and their bytes those of the table in models.md: from config.json alone."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines import ROOT, TINY_R1
from support.families import ABSENT, make_checkpoint
from support.packed import pack_checkpoint

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.emit import gather
from dsc.compiler.graphs import make_graphs
from dsc.compiler.ir.weight import Quantize
from dsc.compiler.model_shapes import KNOWN
from dsc.compiler.packing import declared
from dsc.compiler.planning.plan import make_plan
from dsc.compiler.planning.weights import planned_weights, source_bytes
from dsc.compiler.recipe import Recipe, load_recipe, parse_recipe
from dsc.compiler.tensor_names import TensorNames

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# What all DeepSeek rows of the table share.
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840, "rope_theta": 10000, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
V2 = {
    **LATENT, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "scoring_func": "softmax", "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = {
    **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "quantization_config": FP8,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
CONFIGS = {
    "v2-lite": {
        **V2, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "v2": {
        **V2, "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "q_lora_rank": 1536,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
    },
    "v3": V3,
    "k2": {
        **V3, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "vocab_size": 163840,
        "rope_theta": 50000, "rope_scaling": {**V3["rope_scaling"], "factor": 32, "beta_fast": 1, "beta_slow": 1},
    },
}  # fmt: skip
EVERYWHERE = "default: {format: wint4, groups: [128, 64, 32]}\n      eh_proj: {format: wint4, group: 128}"
EXPERTS = "experts: {format: wint4, group: 128}\n      default: {format: fp8}"
GB = 10**9
# Model -> GB released, GB by the formats of the recipe, cache bytes a token: the table of sizes in models.md.
SIZES = {
    "v3": (685, {EVERYWHERE: 355, EXPERTS: 362}, 70272),
    "v2-lite": (31.4, {EVERYWHERE: 8.7}, 31104),
    "v2": (471, {EVERYWHERE: 123}, 69120),
    "k2": (1029, {EVERYWHERE: 533, EXPERTS: 537}, 70272),
}


def recipe_of(mtp: bool, formats: str, context: int = 4096) -> Recipe:
    return parse_recipe(recipe_text(mtp, formats, context), "table.yaml", "table").override(ranks=1)


def recipe_text(mtp: bool, formats: str, context: int) -> str:
    lines = (ROOT / "recipes" / "r1-wint4.yaml").read_text().split("  - quantize_weights:")[0]
    lines = lines.replace("context_tokens: 32768", f"context_tokens: {context}")
    if not mtp:
        lines = lines.replace("{enabled: true, drafts: 1}", "{enabled: false, drafts: 0}")
        lines = lines.replace("  - fuse_mtp_input\n", "")
    return f"{lines}  - quantize_weights:\n      {formats}\n  - plan_memory\n"


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[request.param]))
    return path


@pytest.mark.parametrize(("config", "model"), [(name, name) for name in SIZES], indirect=["config"])
def test_the_table_of_sizes(config: Path, model: str) -> None:
    released, formats, token_bytes = SIZES[model]
    for choice, size in formats.items():
        plan = make_plan(recipe_of(model == "v3", choice), str(config))
        assert plan.weight_bytes == pytest.approx(size * GB, rel=0.01), (choice, plan.weight_bytes)
        assert plan.source.bytes == pytest.approx(released * GB, rel=0.01)
        assert plan.token_bytes["main"] == token_bytes
        assert plan.source.read_from == "config.json"


def test_known_models_are_those_of_the_table() -> None:
    plan = make_plan(load_recipe("r1-wint4"))
    assert plan.weight_bytes == pytest.approx(362 * GB, rel=0.01)
    assert plan.source.bytes == pytest.approx(688_586_727_753, rel=1e-4)  # total_size of the released index
    assert {"deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V2-Lite"} <= KNOWN.keys()


# Model -> recipe (None: 4 bits everywhere), GB of its engine: those of the table.
COMMANDS = {"v3": ("r1-wint4", 362), "k2": ("kimi-k2-wint4", 537), "v2-lite": (None, 8.7)}


def run_plan(*arguments: str) -> tuple[dict, float]:
    """What `dsc plan ARGUMENTS --json` says in a process of its own, without torch, and its processor seconds."""
    code = (
        "import sys; from dsc.compiler.cli import main\n"
        "try: main(['plan', *sys.argv[1:], '--json'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_r1_by_its_name_takes_under_a_second_and_no_torch() -> None:
    """The packaged recipe alone: the shape comes with dsc."""
    data, seconds = run_plan("r1-wint4")
    assert data["model"] == "deepseek-ai/DeepSeek-R1"
    assert data["weight_bytes"] == pytest.approx(362 * GB, rel=0.01)
    assert data["source"]["bytes"] == pytest.approx(685 * GB, rel=0.01)
    assert data["source"]["read_from"] == "config.json that comes with dsc"
    assert seconds < 1.0


@pytest.mark.parametrize("place", ["config.json", "folder", "folder with index"])
@pytest.mark.parametrize("name", COMMANDS)
def test_it_takes_under_a_second_and_no_torch(name: str, place: str, tmp_path: Path) -> None:
    """The whole command, rates included, in processor time: others may use the machine."""
    recipe, size = COMMANDS[name]
    if recipe is None:
        recipe = str(tmp_path / "everywhere.yaml")
        Path(recipe).write_text(
            recipe_text(False, EVERYWHERE, 4096).replace("tensor: 8, expert: 8", "tensor: 1, expert: 1")
        )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    if place == "folder with index":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index_of(path)))
    data, seconds = run_plan(recipe, "--model", str(path if place == "config.json" else tmp_path))
    assert data["weight_bytes"] == pytest.approx(size * GB, rel=0.01)
    assert data["source"]["bytes"] == pytest.approx(SIZES[name][0] * GB, rel=0.01)
    assert data["source"]["read_from"] == ("config.json and index" if "index" in place else "config.json")
    limit = 1.5 if "index" in place else 1.0  # seconds; an index of a terabyte is 70,000 names, 13 MB of JSON
    assert seconds < limit


def index_of(config: Path) -> dict[str, object]:
    """The index of a released checkpoint: every name, all in one file that is not here."""
    spec = read_config(config.parent)
    names = TensorNames(spec)
    names.floats("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    names.floats("model.norm", spec.hidden_size)
    names.floats("lm_head", spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        names.decoder_layer(layer)
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        names.mtp_layer(layer, "lm_head.weight")
    return {
        "metadata": {"total_size": source_bytes(spec)},
        "weight_map": dict.fromkeys(names.found, "model-00001-of-00001.safetensors"),
    }


FAMILIES = ("v2-lite", "v2", "r1", "v3.1", "k2", "faults")
SMALL = {
    "r1-wint4": ("tiny-r1", "r1", "v3.1", "faults"),
    "r1-fp8": ("r1", "v3.1", "faults"),
    "r1-wint4-a800": ("r1", "faults"),
    "kimi-k2-wint4": ("k2", "v2", "faults"),
    "v2-lite-wint4": ("v2-lite", "v2", "k2", "faults"),
    "tiny-r1-fp32": ("tiny-r1", "faults"),
    "tiny-r1-bf16": ("tiny-r1",),
    "tiny-r1-wint4": ("tiny-r1", "r1", "faults"),
    "tiny-r1-wint8": ("tiny-r1",),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in FAMILIES}
    return {**made, "tiny-r1": TINY_R1}


@pytest.mark.parametrize(("name", "family"), [(name, family) for name, found in SMALL.items() for family in found])
def test_weights_are_those_of_the_graphs(name: str, family: str, checkpoints: dict[str, Path]) -> None:
    """Every weight: name, class, format and bytes, in models with odd widths and formats too."""
    check_weights(checkpoints[family], load_recipe(name).override("cpu", 1))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("kimi-k2-wint4", ["re:.*self_attn.*", "re:.*shared_experts.*"]),
        ("r1-fp8", ["re:.*kv_a_proj.*"]),
        ("r1-wint4", []),
    ],
)
def test_weights_of_packed_sources_too(name: str, kept: list[str], tmp_path: Path) -> None:
    """Also where q and kv_a are two weights, because one of them is packed."""
    source = make_checkpoint(tmp_path / "source", "faults", quantization_config=ABSENT)
    packs = declared((), kept)
    made = pack_checkpoint(
        tmp_path / "model", source, "compressed-tensors", group=32, packs=packs, config={"ignore": kept}
    )
    check_weights(made.folder, load_recipe(name).override("cpu", 1))


def test_kimi_k2_thinking_from_its_config(tmp_path: Path) -> None:
    """Experts of 4 bits in groups of 32, with scales in bfloat16; the rest in bfloat16."""
    scheme = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }}  # fmt: skip
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    packed = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["k2"], "quantization_config": packed}))
    plan = make_plan(load_recipe("kimi-k2-wint4"), str(tmp_path / "config.json"))
    modules = 60 * 384 * 3
    experts = modules * (2048 * 7168 * (0.5 + 2 / 32) + 16)  # codes, scales, weight_shape
    attention = 61 * (1536 * 7168 + 64 * 192 * 1536 + 576 * 7168 + 64 * 256 * 512 + 7168 * 64 * 128)
    others = 60 * (3 * 2048 * 7168 + 384 * 7168) + 3 * 18432 * 7168 + 2 * 163840 * 7168
    assert plan.source.bytes == pytest.approx(experts + 2 * (attention + others), rel=1e-5)
    assert plan.weight_bytes == pytest.approx(537 * GB, rel=0.01)
    told = "experts: symmetric 4-bit codes in groups of 32 are rounded again for wint4:128; groups of 32 keep them"
    assert told in plan.notes
    smaller = recipe_of(False, "experts: {format: wint4, group: 32}\n      default: {format: fp8}")
    assert not [note for note in make_plan(smaller, str(tmp_path / "config.json")).notes if "rounded again" in note]


def check_weights(folder: Path, recipe: Recipe) -> None:
    """Planned weights are those of the graphs."""
    checkpoint = Checkpoint.open(folder, read_config(folder), mtp=recipe.mtp.enabled)
    stored: dict[str, tuple[str, str, int]] = {}
    for tensor, values in gather(make_graphs(recipe, checkpoint)[0]).items():
        expression = values.expression
        quantized = isinstance(expression, Quantize)
        weight = re.sub(r"\.(packed|scales)$", ".weight", tensor) if quantized else tensor
        before = stored.get(weight, ("", "", 0))[2]
        kind = expression.format if quantized else expression.dtype
        stored[weight] = (values.weight_class, kind, before + expression.nbytes)
    planned = {}
    for item in planned_weights(checkpoint.spec, recipe):
        assert item.nbytes % item.count == 0
        for layer in item.layers or (0,):
            planned[item.name.format(layer)] = (item.weight_class, item.format_name, item.nbytes // item.count)
    assert planned == stored


@pytest.mark.parametrize("family", FAMILIES)
def test_source_bytes_are_those_of_the_files(family: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoints[family]
    checkpoint = Checkpoint.open(folder, read_config(folder))
    assert source_bytes(checkpoint.spec) == sum(checkpoint.info(name).nbytes for name in checkpoint.names())
