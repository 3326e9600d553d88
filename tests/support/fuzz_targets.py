"""Every reader of a file that somebody else may have written, as a function of the file's bytes. A DscError is an answer.

A target is made with a folder of its own, into which it puts its file; what it raises besides DscError is a finding, and so is
a message that cannot be printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from dsc.compiler.config import MAX_EXPERTS, MAX_LAYERS, read_config
from dsc.compiler.journal import Journal
from dsc.compiler.recipe import load_recipe, recipe_from_json
from dsc.compiler.safetensors_file import read_header
from dsc.compiler.shards import INDEX, find_shards
from dsc.compiler.tensor_names import expected_tensors
from dsc.runtime import certificate, codec
from dsc.runtime.artifact import EngineFolder, looks_like_engine
from dsc.runtime.certificate import Acceptance, Certificate, EndToEnd, LayerErrors, RowErrors, Stored, Text
from dsc.runtime.errors import DscError, raise_all
from dsc.runtime.executor import Executor
from dsc.runtime.expressions import DEVICE_CONSTANTS, evaluate, parse_guard
from dsc.runtime.inspect import describe
from dsc.runtime.manifest import FileEntry
from dsc.runtime.migrate import migrate
from dsc.runtime.program import Program
from dsc.runtime.steps import sizes_of
from dsc.runtime.tokenizer import Tokenizer
from support.engines import ROOT, TINY_R1
from support.mutate import mutate, mutate_header
from support.packed import METHODS, quantization_config
from support.small_engine import make_small_engine

PROGRAM = "program/main.decode.rank0.json"


@dataclass(frozen=True)
class Target:
    """seeds are sound files; `read` reads one; `mutate` changes one."""

    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    mutate: Callable[[bytes, Random], bytes]

    def try_(self, content: bytes) -> None:
        """Read; a refusal must be a message that can be shown."""
        try:
            self.read(content)
        except DscError as error:
            text = error.text()
            text.encode("utf-8")
            assert all(letter.isprintable() or letter == "\n" for letter in text), ascii(text)


def _json(content: bytes, random: Random) -> bytes:
    return mutate(content, random, is_json=True)


def _text(content: bytes, random: Random) -> bytes:
    return mutate(content, random, is_json=False)


def recipe(folder: Path) -> Target:
    file = folder / "recipe.yaml"

    def read(content: bytes) -> object:
        file.write_bytes(content)
        return load_recipe(str(file)).to_json()

    return Target(tuple(path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml"))), read, _text)


def config(folder: Path) -> Target:
    """config.json, and the names of the tensors that a model of that shape has: as many as it says, so it must not say any number."""

    def read(content: bytes) -> object:
        (folder / "config.json").write_bytes(content)
        spec = read_config(folder)
        assert spec.num_layers * spec.num_experts <= MAX_LAYERS * MAX_EXPERTS
        return len(expected_tensors(spec)) if spec.num_layers * spec.num_experts <= 1000 else 0

    known = sorted((ROOT / "compiler" / "known_models").glob("*.json"))
    tiny = json.loads((TINY_R1 / "config.json").read_text())
    packed = [{**tiny, "quantization_config": quantization_config(name, 4, 32, False)} for name in METHODS]
    packed[-1]["quantization_config"]["ignore"] = ["lm_head", "re:.*self_attn.*"]
    seeds = [path.read_bytes() for path in (TINY_R1 / "config.json", *known)]
    return Target((*seeds, *(json.dumps(config).encode() for config in packed)), read, _json)


def generation(folder: Path) -> Target:
    (folder / "config.json").write_bytes((TINY_R1 / "config.json").read_bytes())

    def read(content: bytes) -> object:
        (folder / "generation_config.json").write_bytes(content)
        return read_config(folder)

    return Target((b'{"bos_token_id": 0, "eos_token_id": [1, 2], "temperature": 0.6}',), read, _json)


def header(folder: Path) -> Target:
    file = folder / "model.safetensors"

    def read(content: bytes) -> object:
        file.write_bytes(content)
        raise_all("the shard", find_shards(folder).faults)
        return read_header(file)

    return Target((_shard(),), read, mutate_header)


def _shard() -> bytes:
    tensors = {
        "a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]},
        "b.weight": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [16, 19]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [19, 23]},
        "__metadata__": {"format": "pt"},
    }
    content = json.dumps(tensors).encode()
    return len(content).to_bytes(8, "little") + content + bytes(23)


def index(folder: Path) -> Target:
    (folder / "model-00001-of-00001.safetensors").write_bytes(_shard())

    def read(content: bytes) -> object:
        (folder / INDEX).write_bytes(content)
        found = find_shards(folder)
        raise_all("the index", found.faults)
        return found

    map_ = dict.fromkeys(("a", "b.weight", "c"), "model-00001-of-00001.safetensors")
    return Target((json.dumps({"metadata": {"total_size": 5}, "weight_map": map_}).encode(),), read, _json)


def manifest(folder: Path) -> Target:
    """Opened, hashed, looked at; its recipe read; and migrated where it says that it is of another version."""
    engine = make_small_engine(folder / "x.engine")
    file = engine / "manifest.json"
    sound = file.read_bytes()
    old = json.loads(sound)
    del old["serving"]

    def read(content: bytes) -> object:
        file.write_bytes(content)
        looks_like_engine(engine)
        migrate(engine)
        found = EngineFolder.open(engine)
        try:
            found.verify_hashes()
            recipe_from_json(found.manifest.recipe, str(file))
            return describe(found)
        finally:
            found.close()

    return Target((sound, json.dumps({**old, "schema_version": 1}).encode()), read, _json)


def program(folder: Path) -> Target:
    """A launch table: read, tied to its graph and weights, its sizes evaluated, its nodes bound."""
    engine = EngineFolder.open(make_small_engine(folder / "x.engine"))
    file = engine.path / PROGRAM
    seeds = (file.read_bytes(), codec.dump_json(_gpu_program(engine).to_json()))

    def read(content: bytes) -> object:
        import hashlib

        file.write_bytes(content)
        entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        engine.manifest.files[PROGRAM] = entry
        found = engine.program("main.decode")
        _launch(found)
        return Executor(found, engine)

    return Target(seeds, read, _json)


def _gpu_program(engine: EngineFolder) -> Program:
    """The small engine's program with a step of every kind in it."""
    from dsc.runtime.steps import Copy, Fill, Gemm, Kernel, Matrix, Null, Pointer, Repeat, Scalar, TensorMap, Variant

    found = engine.program("main.decode")
    node = found.nodes[2]
    x, y, w = Pointer(node.inputs[0]), Pointer(node.outputs[0], "T*4"), Pointer(node.inputs[1])
    tma = TensorMap(node.inputs[0], "float32", dims=(64, "T"), strides=(256,), box=(4, 64), swizzle=16)
    arguments = (y, Scalar("i32", "ceil_div(T,64)"), Scalar("f32", 0.5), Null(), tma)
    steps = (
        Kernel("kernels/a.cubin", "k", ("min(T, SMS*2)", 1, 1), (128, 1, 1), arguments, (2, 1, 1), 1024, True),
        Repeat("ceil_div(T,2)", (Copy(x, y, 8), Repeat(2, (Fill(Pointer(node.outputs[0], "I+J"), 1),), "J"))),
        Gemm(Matrix(x, "float32", 4), Matrix(w, "float32", 4, True), Matrix(y, "float32", 4), "T", 4, 4),
        Gemm(
            *(Matrix(at, "float8_e4m3fn", 512, at is w) for at in (x, w)),
            Matrix(y, "bfloat16", 16),
            "ceil_div(T,4)*4",
            16,
            512,
            a_scales=x,
            b_scales=w,
        ),
    )
    with_steps = replace(node, variants=(Variant(steps, "T <= 64"), Variant(())))
    return replace(found, nodes=(*found.nodes[:2], with_steps, *found.nodes[3:]))


def _launch(found: Program) -> None:
    """What binding evaluates, at the bounds of all letters and at 1; a program that was accepted has values there or none."""
    for values in (found.letters, dict.fromkeys(found.letters, 1)):
        values = {**values, **dict.fromkeys(DEVICE_CONSTANTS, 132), "I": 0, "J": 1}
        for node in found.nodes:
            for variant in node.variants:
                if parse_guard(variant.guard).holds(values):
                    for step in variant.steps:
                        for _, size in sizes_of(step):
                            evaluate(size, values)


def journal(folder: Path) -> Target:
    """A damaged journal is not believed; what is believed can be gone on with."""
    file, identity = folder / ".journal", {"the recipe": "abc"}
    before = Journal(file, identity)
    before.begin()
    from dsc.compiler.quantize import Errors

    before.add_job(0, Errors())
    before.add_file("weights/a", "0" * 64, {"a": "1" * 64})
    before.synced(before.mark())
    before.add_job(1, Errors())
    before.close()
    sound = file.read_bytes()

    def read(content: bytes) -> object:
        file.write_bytes(content)
        found = Journal(file, identity)
        for number, errors in found.jobs.items():
            assert type(number) is int
            assert isinstance(errors, Errors)
        for location, (digest, tensors) in found.files.items():
            assert all(isinstance(text, str) for text in (location, digest, *tensors, *tensors.values()))
        ", ".join(found.differs)
        found.begin()
        found.close()
        return Journal(file, identity).jobs == found.jobs

    def lines(content: bytes, random: Random) -> bytes:
        parts = content.splitlines(keepends=True) or [b""]
        at = random.randrange(len(parts))
        return b"".join((*parts[:at], _json(parts[at], random) + random.choice((b"\n", b"\n", b"")), *parts[at + 1 :]))

    return Target((sound,), read, lines)


def certificate_(folder: Path) -> Target:
    engine = EngineFolder.open(make_small_engine(folder / "x.engine"))
    rows = RowErrors(0.1, 0.2, 0.9, 0.8, 0, 3.0)
    sound = Certificate(
        certificate.SCHEMA_VERSION, engine.content_hash, "x", "cpu", Text("t", "0" * 64, 1, 2), Stored(1, 2, 0, 0),
        (LayerErrors("main", 0, rows, rows),), EndToEnd(2, 1.0, 1.0, 0.1, 0.2, 0.9, 0), Acceptance(2, 0.5, 0.5),
    )  # fmt: skip
    file = sound.write(engine.path)

    def read(content: bytes) -> object:
        from io import StringIO

        from rich.console import Console

        from dsc.compiler.certify.tables import show

        file.write_bytes(content)
        found = certificate.read(engine)
        assert found is not None
        show(found, Console(file=StringIO()))
        return found.to_json()

    return Target((file.read_bytes(),), read, _json)


def chat(folder: Path) -> Target:
    """tokenizer_config.json with a chat template: code of the checkpoint's, which must stay in its sandbox."""
    (folder / "tokenizer.json").write_bytes((TINY_R1 / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}{{ m['role'] }}: {{ m.content | tojson }}{% endfor %}{{ bos_token }}"
    words: dict[str, Any] = {"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    seeds = [
        {**words, "chat_template": template},
        {**words, "chat_template": [{"name": "default", "template": template}]},
    ]

    def read(content: bytes) -> object:
        (folder / "tokenizer_config.json").write_bytes(content)
        return Tokenizer(folder).encode_chat([{"role": "user", "content": "hello"}])

    return Target(tuple(json.dumps(seed).encode() for seed in seeds), read, _json)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "recipe": recipe,
    "config": config,
    "generation_config": generation,
    "header": header,
    "index": index,
    "manifest": manifest,
    "program": program,
    "journal": journal,
    "certificate": certificate_,
    "chat_template": chat,
}
