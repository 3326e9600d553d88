"""Commands that run engines: generate, bench, doctor.

Each imports what it needs when it runs, so that help and errors come at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dsc.compiler.commands.path import PATH
from dsc.runtime.errors import DscError


@click.command()
@click.argument("engine", type=PATH)
@click.option(
    "--prompt", "prompts", multiple=True, help="Text to continue; repeat for a batch. Default: standard input."
)
@click.option("--chat", is_flag=True, help="Put each prompt through the chat template as a user's message.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, help="0 is greedy. This and the next two default to the model's own.")
@click.option("--top-p", type=float, help="Draw from the likeliest tokens that make up this probability.")
@click.option("--top-k", type=int, help="Draw from this many of the likeliest tokens; 0: all.")
@click.option("--min-p", type=float, help="Leave out tokens less likely than this part of the likeliest.")
@click.option("--seed", type=int, help="The same seed gives the same text. Default: another each time.")
@click.option("--stop", multiple=True, help="End at this text; repeat for several.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-text token.")
@click.option("--drafts", type=int, help="Tokens to draft ahead with the MTP layer. Default: the engine's.")
@click.option("--device", help="cpu or cuda. Default: the engine's target.")
@click.option(
    "--cache-tokens", type=int, help="Tokens the cache holds. Default: as many as the limits ask or memory has."
)
@click.option("--gpu-memory", type=float, help="GB of the GPU's memory to take in all, weights and cache.")
@click.option("--json", "as_json", is_flag=True, help="Token ids, text and finish reason as JSON.")
def generate(
    engine: Path,
    prompts: tuple[str, ...],
    chat: bool,
    device: str | None,
    cache_tokens: int | None,
    gpu_memory: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text with an engine; one prompt is shown as it comes."""
    from dsc import runtime

    options["stop"] = list(options["stop"])
    texts = list(prompts) or ([] if _follows(engine) else [_read_prompt()])
    loaded = runtime.load(engine, device, cache_tokens=cache_tokens, gpu_memory=_gigabytes(gpu_memory))
    click.echo(loaded.load_text(), err=True)
    asked = [[{"role": "user", "content": text}] if chat else text for text in texts]
    if len(texts) == 1 and not as_json:
        stream = loaded.stream(asked[0], **options)  # refuses before anything is printed
        click.echo("" if chat else texts[0], nl=False)
        for piece in stream:
            click.echo(piece, nl=False)
        click.echo()
        return
    outputs = loaded.generate(asked, **options)
    if as_json:
        rows = [
            {"prompt": text, "text": out.text, "token_ids": out.token_ids, "finish_reason": out.finish_reason}
            for text, out in zip(texts, outputs, strict=True)
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for text, out in zip(texts, outputs, strict=True):
        click.echo(f"{'' if chat else text}{out.text}\n[{out.finish_reason}, {len(out.token_ids)} tokens]\n")


def _follows(engine: Path) -> bool:
    """Whether torchrun made this process a rank that another one gives prompts."""
    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.ranks.launch import find_launch

    launch = find_launch()
    return launch is not None and launch.rank > 0 and EngineFolder.open(engine).manifest.ranks > 1


def _read_prompt() -> str:
    """A prompt from standard input, as it is."""
    if sys.stdin.isatty():
        click.echo("prompt, then Ctrl-D:", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DscError("standard input is not UTF-8 text", got=str(error)) from error


@click.command()
@click.argument("engine", type=PATH)
@click.option(
    "--batch",
    help="Sequences of a decode step and prompts of a prefill, as 1,16,64. Default: 1 to 256 as far as the engine goes.",
)
@click.option("--context", help="Tokens of each sequence, as 2048,4096. Default: 2048 to 8192 as far as it goes.")
@click.option(
    "--steps", type=click.IntRange(1), default=16, show_default=True, help="Decode steps to take the median of."
)
@click.option("--no-prefill", is_flag=True, help="Decode only.")
@click.option("--nodes", is_flag=True, help="Also time every kind of node by itself.")
@click.option("--plot", type=PATH, help="Write a PNG of rate against batch, with the floor (needs matplotlib).")
@click.option("--device", help="cpu or cuda. Default: the engine's target.")
@click.option("--gpu-memory", type=float, help="GB of the GPU's memory to take in all, weights and cache.")
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON.")
def bench(
    engine: Path,
    batch: str | None,
    context: str | None,
    steps: int,
    no_prefill: bool,
    nodes: bool,
    plot: Path | None,
    device: str | None,
    gpu_memory: float | None,
    as_json: bool,
) -> None:
    """Measure an engine against the least time its steps can take."""
    from dsc.runtime.bench import run_bench
    from dsc.runtime.bench_tables import show

    data = run_bench(
        engine,
        batches=_numbers("--batch", batch),
        contexts=_numbers("--context", context),
        steps=steps,
        prefill=not no_prefill,
        nodes=nodes,
        device=device,
        gpu_memory=_gigabytes(gpu_memory),
    )
    if plot is not None:
        from dsc.runtime.bench_plot import plot as write_plot

        write_plot(data, plot)
    if as_json:
        click.echo(json.dumps(data, indent=2))
    else:
        show(data)


@click.command()
@click.argument("folder", type=PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="All facts as JSON.")
def doctor(folder: Path | None, as_json: bool) -> None:
    """Tell what this machine has for running engines.

    FOLDER: whose disk to read, or an engine to judge.
    """
    from dsc.runtime.doctor import check_folder, examine, report

    check_folder(folder)
    data = examine(folder)
    click.echo(json.dumps(data, indent=2) if as_json else "\n".join(report(data)))


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers from 1 on, by commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise DscError(f"{option} is no list of numbers", wanted="1,16,64", got=text)
    return sorted({int(part) for part in parts})


def _gigabytes(number: float | None) -> float | None:
    return None if number is None else number * 1e9
