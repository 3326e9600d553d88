"""Files that somebody else wrote, damaged at random: read or refused with a message, nothing run, nothing written elsewhere.

`make soak` does the same for longer, guided by what an input reaches (tests/soak/fuzz.py).
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.builds import dsc, refusal
from support.families import make_checkpoint
from support.fuzz_targets import TARGETS, Target
from support.witness import witness

from dsc.compiler.tokenizer_check import READ
from dsc.runtime import certificate
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.errors import DscError

EXAMPLES = 60


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[Path, Target]:
    folder = Path(tempfile.mkdtemp(prefix=request.param, dir=request.getfixturevalue("tmp_path_factory").getbasetemp()))
    return folder, TARGETS[request.param](folder)


def test_seeds_are_sound(target: tuple[Path, Target]) -> None:
    """Else damage to them would prove nothing."""
    for seed in target[1].seeds:
        target[1].read(seed)


# No shrinking: the source of chance is one number, and a smaller one is no smaller file.
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(number=st.integers(0, 2**32), times=st.integers(1, 3))
def test_damaged_files_are_read_or_refused(target: tuple[Path, Target], number: int, times: int) -> None:
    folder, fuzzed = target
    random = Random(number)
    content = random.choice(fuzzed.seeds)
    for _ in range(times):
        content = fuzzed.mutate(content, random)
    with witness(folder, folder) as deeds:
        fuzzed.try_(content)
    assert deeds == []


# -- what fuzzing found, and what it is not likely to hit on


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("recipe", b"? [a]\n: b\n", "a key is a list or a mapping"),
        ("recipe", b"model: !!python/object/apply:os.system ['touch x']\n", "anchors, aliases and tags are not read"),
        ("recipe", b"model: &a x\ntarget: *a\n", "anchors, aliases and tags are not read"),
        ("recipe", b"[" * 100_000, "the file nests too deeply"),
        ("recipe", b"".join(b" " * i + b"a:\n" for i in range(30)), "the file nests too deeply"),
        ("recipe", b"#" * 1_000_001, "the file is too long"),
        ("config", b"[" * 100_000, "is not valid JSON"),
        ("config", b'{"a": 1e999}', "1e999 is no number that can be kept"),
        ("manifest", b'{"schema_version": 1, "a": [-1e999]}', "-1e999 is no number that can be kept"),
        ("index", b'{"weight_map": {"a": "../a.safetensors"}}', "wanted  a .safetensors file beside the index"),
        ("index", b'{"weight_map": {"a": "%s.safetensors"}}' % (b"x" * 300), "cannot be read"),
        ("index", b'{"weight_map": {"a": "\\u001b[2J.safetensors"}}', "\\x1b[2J.safetensors: is missing"),
        ("index", b'{"weight_map": {"a": "\\ud800.safetensors"}}', "\\ud800.safetensors: is missing"),
        ("chat_template", b'{"chat_template": "{{ 1 / 0 }}"}', "division by zero"),
        ("chat_template", b'{"chat_template": [{"name": 5}]}', "chat_template is no template"),
        ("chat_template", b'{"chat_template": 5}', "chat_template is no template"),
    ],
)
def test_what_was_found_is_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DscError) as caught:
        TARGETS[name](tmp_path).read(content)
    assert told in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_number_of_layers_that_no_model_has_is_refused(tmp_path: Path) -> None:
    """Every tensor of every layer is named: a billion layers would fill the memory before anything is said."""
    target = TARGETS["config"](tmp_path)
    seed = target.seeds[0].decode()
    for key, value in (("num_hidden_layers", 10**9), ("n_routed_experts", 10**6)):
        with pytest.raises(DscError, match=f"{key} is {value}, wanted .* at most"):
            target.read(json.dumps({**json.loads(seed), key: value}).encode())


# -- code in a checkpoint


class _Deed:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self.file, "done"))


@pytest.fixture
def armed(tmp_path: Path) -> Path:
    """A checkpoint with everything in it that has ever been run: each piece writes tmp_path/done-..."""
    folder = make_checkpoint(tmp_path / "armed", "v3", num_hidden_layers=2)

    def deed(name: str) -> str:
        return f"open({str(tmp_path / f'done-{name}')!r}, 'w').close()\n"

    for name in (
        "configuration_deepseek",
        "modeling_deepseek",
        "tokenization_deepseek",
        "sitecustomize",
        "conftest",
        "torch",
        "tokenizers",
        "dsc",
    ):
        (folder / f"{name}.py").write_text(deed(name))
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "optimizer.pth"):
        (folder / name).write_bytes(pickle.dumps(_Deed(tmp_path / f"done-{name}")))
    (folder / "setup.py").write_text(deed("setup"))
    (folder / "chat_template.jinja").write_text(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch done-jinja') }}"
    )
    return folder


def test_no_code_of_a_checkpoint_is_run(armed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From planning to generating, standing in its folder as people do; auto_map names the modules, as in every release."""
    assert "modeling_deepseek" in (armed / "config.json").read_text()
    monkeypatch.chdir(armed)
    before = sorted(path.name for path in armed.iterdir())
    engine = tmp_path / "out" / "x.engine"
    with witness(armed, engine.parent) as deeds:
        assert dsc("plan", "tiny-r1-wint8", "--model", armed).exit_code == 0
        assert dsc("compile", "--recipe", "tiny-r1-wint8", "--model", armed, "--output", engine).exit_code == 0
        assert dsc("inspect", engine, "--verify").exit_code == 0
        assert dsc("generate", engine, "--prompt", "x", "--max-tokens", "2").exit_code == 0
        assert "the chat template refuses the messages" in refusal("generate", engine, "--chat", "--prompt", "x")
    reader = f"{[*READ, str(armed / 'tokenizer.json')]}"  # our own process, which imports nothing from here
    assert [reader in deed for deed in deeds] == [True], deeds
    assert sorted(path.name for path in armed.iterdir()) == before
    assert not list(tmp_path.glob("done-*"))


def test_weights_that_are_only_pickles_are_refused(armed: Path, tmp_path: Path) -> None:
    for path in armed.glob("*.safetensors*"):
        path.unlink()
    with witness(armed) as deeds:
        text = refusal("compile", "--recipe", "tiny-r1-wint8", "--model", armed, "--output", tmp_path / "x.engine")
    assert "the weights are pickle files, which can run code when they are read" in text
    assert deeds == []
    assert not list(tmp_path.glob("done-*"))


def test_nothing_is_written_through_links_of_an_engine(tmp_path: Path) -> None:
    """An engine is somebody else's too: what is measured of it stays in it."""
    target = TARGETS["certificate"](tmp_path)
    engine, elsewhere = tmp_path / "x.engine", tmp_path / "elsewhere"
    elsewhere.mkdir()
    measured = certificate.read(EngineFolder.open(engine))
    assert measured is not None
    (elsewhere / "thesis").write_text("words")
    (engine / "local" / "certificate.json.partial").symlink_to(elsewhere / "thesis")
    (engine / "local" / "certificate.json").unlink()
    (engine / "local" / "certificate.json").symlink_to(elsewhere / "thesis")
    assert measured.write(engine).read_bytes() == target.seeds[0]
    shutil.rmtree(engine / "local")
    (engine / "local").symlink_to(elsewhere)
    with pytest.raises(DscError, match="local: leads out of the engine"):
        measured.write(engine)
    assert [path.name for path in elsewhere.iterdir()] == ["thesis"]
    assert (elsewhere / "thesis").read_text() == "words"


def test_the_witness_sees(tmp_path: Path) -> None:
    """Were it blind, the tests above would pass whatever happened."""
    inside, outside = tmp_path / "in", tmp_path / "outside"
    inside.mkdir()
    (inside / "module.py").write_text("x = 1\n")
    with witness(inside, inside) as deeds:
        (inside / "allowed").write_text("")
        outside.write_text("")
        outside.rename(tmp_path / "elsewhere")
        pickle.loads(pickle.dumps(_Deed(inside / "pickled")))
        exec(compile((inside / "module.py").read_text(), str(inside / "module.py"), "exec"), {})
    text = "\n".join(deeds)
    for deed in (f"wrote {str(outside)!r}", "os.rename", "pickle.find_class", f"ran {inside / 'module.py'}"):
        assert deed in text, (deed, text)
    assert "allowed" not in text
