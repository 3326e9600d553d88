"""The training script: its model is the architecture that transformers runs, and what it writes is a checkpoint as released."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.families import dequantized_tensors, make_checkpoint, read_tensors
from support.oracle import Oracle

from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.config import read_config
from dsc.compiler.held_out import MODULES, held_out_windows

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import tiny_r1_model  # noqa: E402
import train_tiny_r1  # noqa: E402


def worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative error of a token's row."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize("family", ["r1", "faults"])
def test_the_trained_model_is_the_one_that_is_written(tmp_path, family):
    """Logits of the training model == transformers on its export, once its weights are those that the export stands for."""
    like = make_checkpoint(tmp_path / "like", family)
    torch.manual_seed(1)
    model = tiny_r1_model.TinyR1(read_config(like), context_tokens=64).eval()
    for router in model.routers():
        router.e_score_correction_bias.normal_(std=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.ndim > 1 else torch.rand_like(parameter) + 0.5
    tokenizer = train_tiny_r1.train_tokenizer(["def f(x): return x"], read_config(like).vocab_size)
    train_tiny_r1.export(model, tmp_path / "out", like, tokenizer)
    written = dequantized_tensors(tmp_path / "out")
    for name, tensor in tiny_r1_model.checkpoint_tensors(model):
        tensor.copy_(written[name])

    tokens = torch.randint(0, read_config(like).vocab_size, (30,)).tolist()
    oracle = Oracle(tmp_path / "out", tmp_path / "float32")
    wanted, hidden = oracle.main(tokens[:28])
    drafted, _ = oracle.mtp(tokens[1:29], hidden)
    with torch.no_grad():
        main, mtp = model(torch.tensor([tokens]))
    assert wanted.std() > 0.1  # no rows of zeros
    assert worst_row(main[0], wanted) < 1e-4
    assert worst_row(mtp[0], drafted) < 1e-4


def test_a_few_steps_from_text_to_checkpoint(tmp_path):
    """The whole script at toy size, on documents of its own; held-out modules do not reach the training text."""
    library, docs = tmp_path / "library", tmp_path / "docs"
    (library / "test").mkdir(parents=True)
    docs.mkdir()
    text = "".join(f"def f{i}(x, y):\n    return x + {i} * y\n" for i in range(300))
    (library / "one.py").write_text(text)
    (library / "heapq.py").write_text(text.replace("return", "yield"))
    (library / "test" / "skipped.py").write_text("never read")
    (docs / "two.rst").write_text("Two\n===\n\nSome words of documentation.\n" * 20)
    (docs / "heapq.rst.txt").write_text("a held-out page\n" * 40)
    corpus = train_tiny_r1.make_corpus(docs, library, 515)
    trained, held_out = (corpus.tokenizer.decode(s.tolist()) for s in (corpus.train, corpus.held_out))
    assert "return x + 7" in trained
    assert "words of documentation" in trained
    assert all(word not in trained for word in ("yield", "held-out page", "never read"))
    assert "yield" in held_out
    assert "held-out page" in held_out

    like = make_checkpoint(tmp_path / "like", "faults")
    arguments = ["--library", str(library), "--docs", str(docs), "--like", str(like)]
    sizes = ["--steps", "3", "--batch", "2", "--length", "16"]
    result = CliRunner().invoke(train_tiny_r1.main, [str(tmp_path / "out"), *arguments, *sizes], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "held out" in result.output
    checkpoint = Checkpoint.open(tmp_path / "out", read_config(tmp_path / "out"))
    assert len(checkpoint.files()) == 2
    assert checkpoint.spec == read_config(like)
    biases = [v for n, v in read_tensors(tmp_path / "out").items() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 4
    assert all(bias.dtype == torch.float32 and bias.abs().max() > 0 for bias in biases)


def test_training_lowers_the_loss(tmp_path):
    """Forty steps on one repeated sentence."""
    spec = read_config(make_checkpoint(tmp_path, "faults", num_hidden_layers=2, n_routed_experts=8))
    stream = torch.arange(8).repeat(200)
    corpus = train_tiny_r1.Corpus(stream, stream, None)
    said: list[str] = []
    schedule = train_tiny_r1.Schedule(steps=40, batch=2, length=16)
    model = train_tiny_r1.train(spec, corpus, schedule, "cpu", said.append)
    with torch.no_grad():
        main, mtp, _ = train_tiny_r1.losses(model, stream[:18].unsqueeze(0), "cpu")
    assert main < 3.0  # ln 515 = 6.24 untrained
    assert mtp < 4.0
    assert len(said) == 2


def test_held_out_windows_are_side_by_side():
    tokenizer = EXAMPLES / "tiny-r1" / "tokenizer.json"
    windows = held_out_windows(tokenizer, 0, 1, count=24)
    assert [len(window) for window in windows] == [512] * 24
    assert windows[0][0] == 0
    first, second = held_out_windows(tokenizer, 0, 1, count=2, length=100)
    assert windows[0][:200] == [*first, *second]
    assert set(MODULES) == {"statistics", "argparse", "heapq", "fractions", "sched", "textwrap"}
