"""The command line: what it prints, and that every user's mistake ends in one message and exit code 2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.builds import dsc, refusal, start
from support.engines import TINY_R1, compile_tiny

from dsc import runtime
from dsc.compiler.cli import main
from dsc.compiler.ir.rewrite import pass_names

COMMANDS = list(main.commands)
GREEDY = ("--temperature", "0", "--max-tokens", "6")
LOADED = "the cache holds 32,768 tokens\n"  # 16 sequences of 2048


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny("tiny-r1-wint4", tmp_path_factory.mktemp("cli"))


# -- help


def test_help_lists_every_command_with_its_whole_sentence() -> None:
    lines = dsc("--help").stdout.splitlines()
    listed = [line.split(maxsplit=1) for line in lines[lines.index("Commands:") + 1 :]]
    assert [name for name, _ in listed] == COMMANDS
    assert all(sentence.endswith(".") and "..." not in sentence for _, sentence in listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does(command: str) -> None:
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Option) and parameter.name != "help":
            assert parameter.help or parameter.show_default, f"{command} {parameter.opts[0]}"
    for flag in ("-h", "--help"):
        assert dsc(command, flag).stdout.startswith(f"Usage: main {command} ")


def test_help_comes_at_once() -> None:
    """Without torch, onnx and whatever else takes seconds."""
    code = (
        "import sys; from dsc.compiler.cli import main\n"
        "main(['compile', '--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'onnx', 'numpy', 'rich', 'yaml')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


# -- what each command prints


def test_compile_prints_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, by bare name, without --model: the output is ./<recipe>.engine."""
    monkeypatch.chdir(tmp_path)
    told = dsc("compile", "--recipe", "tiny-r1-wint4", "--dump", "dump").stdout.splitlines()
    assert told[0].endswith("sites found in 14 passes")
    found, _, expected = told[0].split()[:3]
    assert found == expected
    assert told[-1].endswith(f"dsc inspect {tmp_path}/tiny-r1-wint4.engine")
    assert (tmp_path / "tiny-r1-wint4.engine" / "manifest.json").is_file()
    dumped = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert dumped[0] == "00-as_given.main.decode.txt"
    assert dumped[-1] == "14-plan_memory.mtp.prefill.txt"
    data = json.loads(dsc("compile", "--recipe", "tiny-r1-wint4", "--json").stdout)
    assert data["folder"] == str(tmp_path / "tiny-r1-wint4.engine")
    assert data["fusions"]["fuse_qkv"] == [10, 10]
    assert data["notes"] == []


def test_inspect_as_tables_and_as_data(engine: Path) -> None:
    data = json.loads(dsc("inspect", engine, "--json").stdout)
    assert data["fusion"]
    assert json.loads(dsc("inspect", engine, "--json", "--fusion").stdout) == {
        key: data[key] for key in ("engine", "fusion", "declined")
    }
    assert "memory plan" in dsc("inspect", engine).stdout
    assert "memory plan" not in dsc("inspect", engine, "--fusion").stdout
    assert "layer 4 in mtp.decode" in dsc("inspect", engine, "--layer", "4").stdout
    assert dsc("inspect", engine, "--fusion", "--verify").stdout.endswith("every file matches the manifest\n")


def test_generate_prints_the_prompt_and_its_text(engine: Path) -> None:
    loaded = runtime.load(engine)
    first, second = loaded.generate(["def ", "class "], max_tokens=6, temperature=0)
    assert dsc("generate", engine, "--prompt", "def ", *GREEDY).stdout == f"def {first.text}\n"
    assert dsc("generate", engine, *GREEDY, stdin="def ").stdout == f"def {first.text}\n"
    both = dsc("generate", engine, "--prompt", "def ", "--prompt", "class ", *GREEDY).stdout
    assert both == f"def {first.text}\n[length, 6 tokens]\n\nclass {second.text}\n[length, 6 tokens]\n\n"
    (row,) = json.loads(dsc("generate", engine, "--prompt", "def ", "--json", *GREEDY).stdout)
    assert row == {"prompt": "def ", "text": first.text, "token_ids": first.token_ids, "finish_reason": "length"}
    stop = first.text[3]
    cut = dsc("generate", engine, "--prompt", "def ", "--stop", stop, *GREEDY).stdout
    assert cut == f"def {first.text[: first.text.index(stop)]}\n"


def test_generate_tells_what_loading_came_to(engine: Path) -> None:
    for form in ((), ("--json",), ("--prompt", "class ")):
        assert dsc("generate", engine, "--prompt", "def ", *form, *GREEDY).stderr == LOADED
    small = dsc("generate", engine, "--prompt", "def ", "--cache-tokens", "200", *GREEDY)
    assert small.stderr == "the cache holds 256 tokens\n"  # whole blocks of 64


def test_generate_chat_prints_the_answer_only(engine: Path) -> None:
    loaded = runtime.load(engine)
    (answer,) = loaded.generate([[{"role": "user", "content": "Hello"}]], max_tokens=6, temperature=0)
    assert dsc("generate", engine, "--prompt", "Hello", "--chat", *GREEDY).stdout == f"{answer.text}\n"
    (row,) = json.loads(dsc("generate", engine, "--prompt", "Hello", "--chat", "--json", *GREEDY).stdout)
    assert (row["prompt"], row["token_ids"]) == ("Hello", answer.token_ids)


def test_seeds_and_drafts(engine: Path) -> None:
    draws = ("--prompt", "def ", "--temperature", "0.9", "--max-tokens", "12", "--ignore-eos")
    texts = [dsc("generate", engine, *draws, "--seed", seed, "--drafts", d).stdout for seed, d in ("71", "70", "81")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", pass_names())
def test_passes_and_their_manuals(name: str) -> None:
    assert name in dsc("passes").stdout
    manual = dsc("passes", name).stdout
    assert manual.startswith(name)
    assert len(manual.splitlines()) > 2


# -- a user's mistakes

NOT_BUILT = "is not built yet"
MISTAKES = {
    # compile
    ("compile",): "Missing option '--recipe'",
    ("compile", "--recipe", "r1-wnt4"): "try     r1-wint4",
    ("compile", "--recipe", ""): "no such recipe",
    ("compile", "--recipe", "."): "no such recipe",
    ("compile", "--recipe", "no/where.yaml"): "no such recipe",
    ("compile", "--recipe", "tiny-r1-wint4", "--model", "no/where/at/all"): "no model at no/where/at/all",
    ("compile", "--recipe", "tiny-r1-wint4", "--model", "."): "config.json: not found",
    ("compile", "--recipe", "tiny-r1-wint4", "--target", "gpu"): "unknown target gpu",
    ("compile", "--recipe", "tiny-r1-wint4", "--target", "tensorrt"): NOT_BUILT,
    ("compile", "--recipe", "tiny-r1-wint4", "--ranks", "0"): "at least one rank",
    ("compile", "--recipe", "tiny-r1-wint4", "--ranks", "many"): "not a valid integer",
    ("compile", "--recipe", "tiny-r1-wint4", "--ranks", "2"): "not in whole groups of 128",
    ("compile", "--recipe", "tiny-r1-wint4", "--layers", "2"): "--weights random",
    ("compile", "--recip", "x"): "--recipe",
    # inspect
    ("inspect",): "Missing argument",
    ("inspect", "nowhere"): "nowhere: no such engine",
    ("inspect", "ENGINE", "--layer", "9"): "the engine has no layer 9",
    ("inspect", "ENGINE", "--layer", "-1"): "the engine has no layer -1",
    ("inspect", "ENGINE", "--layer", "1", "--fusion"): "show different things",
    # generate
    ("generate", "nowhere", "--prompt", "x"): "nowhere: no such engine",
    ("generate", "ENGINE", "--prompt", ""): "the prompt is empty",
    ("generate", "ENGINE"): "the prompt is empty",
    ("generate", "ENGINE", "--prompt", "x", "--prompt", ""): "prompt 1: the prompt is empty",
    ("generate", "ENGINE", "--prompt", "x" * 9000): "longer than the engine's context",
    ("generate", "ENGINE", "--prompt", "x", "--max-tokens", "0"): "max_tokens",
    ("generate", "ENGINE", "--prompt", "x", "--temperature", "-1"): "temperature",
    ("generate", "ENGINE", "--prompt", "x", "--temperature", "nan"): "temperature",
    ("generate", "ENGINE", "--prompt", "x", "--top-p", "0"): "top_p",
    ("generate", "ENGINE", "--prompt", "x", "--top-k", "-2"): "top_k",
    ("generate", "ENGINE", "--prompt", "x", "--min-p", "1.5"): "min_p",
    ("generate", "ENGINE", "--prompt", "x", "--seed", "-5"): "seed",
    ("generate", "ENGINE", "--prompt", "x", "--stop", ""): "stop",
    ("generate", "ENGINE", "--prompt", "x", "--drafts", "7"): "drafts",
    ("generate", "ENGINE", "--prompt", "x", "--device", "cuda"): "cannot run on cuda",
    ("generate", "ENGINE", "--prompt", "x", "--device", "abacus"): "cannot run on abacus",
    # passes, plugins, opt
    ("passes", "fuze_qkv"): "try     fuse_qkv",
    ("plugins", "Qvk"): "try     Qkv",
    ("opt", "nowhere", "fuse_qkv"): "nowhere: no such file",
    ("opt", "GRAPH", "fuze_qkv"): "try     fuse_qkv",
    ("opt", "GRAPH", "set_dtype:activations"): "is no option of set_dtype",
    ("opt", "GRAPH", "set_dtype:activation=bf16"): "try     activations",
    ("opt", "GRAPH", "set_dtype:activations=fp7"): "unknown dtype",
    ("opt", "GRAPH", "set_dtype:activations={"): "is not YAML",
    ("opt", "GRAPH", "fuse_qkv", "--config", "nowhere"): "config.json: not found",
    ("opt", "GRAPH", "fuse_qkv", "--phase", "third"): "prefill",
    ("opt", "WEIGHTS", "fuse_qkv"): "this is not a graph",
    ("opt", "RECIPE", "fuse_qkv"): "this is not a graph",
    ("opt", ".", "fuse_qkv"): "no such file",
    ("frobnicate",): "No such command",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_ends_in_one_message(
    arguments: tuple[str, ...], engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.txt").write_text("g (float[T, 8] x) => (float[T, 8] y) { y = Sigmoid(x) }")
    paths = {
        "ENGINE": str(engine),
        "GRAPH": "graph.txt",
        "WEIGHTS": str(engine / "weights" / "rank0-00001.safetensors"),
        "RECIPE": str(TINY_R1 / "config.json"),
    }
    text = refusal(*(paths.get(argument, argument) for argument in arguments), stdin="")
    assert MISTAKES[arguments] in text
    assert len(text.splitlines()) < 12
    assert {path.name for path in tmp_path.iterdir()} == {"graph.txt"}


def test_the_model_that_is_not_here_is_one_error_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huggingface_hub.constants", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{name}.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.chdir(tmp_path)
    text = refusal("compile", "--recipe", "r1-wint4", "--target", "cpu", "--ranks", "1")
    assert "hf download deepseek-ai/DeepSeek-R1" in text
    assert "688,600,000,000 bytes" in text


def test_recipes_tell_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((TINY_R1.parents[1] / "recipes" / "tiny-r1-wint4.yaml").read_text().replace("fuse_qkv", "fuse_kqv"))
    assert f"{path}:14: unknown pass fuse_kqv" in refusal("compile", "--recipe", path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in refusal("compile", "--recipe", path)


def test_a_recipes_model_may_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (TINY_R1.parents[1] / "recipes" / "tiny-r1-wint4.yaml").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model").symlink_to(TINY_R1)
    (tmp_path / "mine" / "own.yaml").write_text(text.replace("model: examples/tiny-r1", "model: model"))
    monkeypatch.chdir(tmp_path)
    assert dsc("compile", "--recipe", "mine/own.yaml").exit_code == 0
    assert (tmp_path / "own.engine").is_dir()


def test_bytes_that_are_no_text(engine: Path) -> None:
    assert "standard input is not UTF-8 text" in refusal("generate", engine, stdin=b"\xff\xfe")
    assert "UTF-8" in refusal("generate", engine, "--prompt", "caf\udce9")


# -- readers that leave, and Ctrl-C


@pytest.mark.parametrize("arguments", [("inspect", "ENGINE"), ("inspect", "ENGINE", "--json"), ("plugins",)])
def test_a_reader_that_leaves_is_no_fault(arguments: tuple[str, ...], engine: Path, tmp_path: Path) -> None:
    process = start(*(engine if argument == "ENGINE" else argument for argument in arguments), cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(60)


def test_a_reader_of_a_stream_leaves(engine: Path, tmp_path: Path) -> None:
    command = ("generate", engine, "--prompt", "def ", "--temperature", "0", "--max-tokens", "1500", "--ignore-eos")
    process = start(*command, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(6).startswith(b"def ")
    process.stdout.close()
    assert process.stderr.read() == LOADED.encode()
    process.stderr.close()
    process.wait(60)


def test_ctrl_c_ends_a_text_without_a_traceback(engine: Path, tmp_path: Path) -> None:
    command = ("generate", engine, "--prompt", "def ", "--temperature", "0", "--max-tokens", "1500", "--ignore-eos")
    process = start(*command, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.read(6).startswith(b"def ")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert stderr.decode().removeprefix(LOADED).strip() == "Aborted!"
