"""Commands that say what an engine will be, or whether it is what it should be: plan, verify.

Each imports what it needs when it runs, so that help and errors come at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dsc.compiler.commands.path import PATH


@click.command()
@click.argument("recipe")
@click.option("--model", help="A config.json, a folder that has one, or a known model's name. Default: the recipe's.")
@click.option("--target", help="Plan for another target than the recipe's.")
@click.option("--ranks", type=int, help="Plan for this number of tensor ranks instead of the recipe's.")
@click.option(
    "--gpu", "gpus", multiple=True, help="h200, h100, a800, ...; repeat for several. Default: all of the target."
)
@click.option("--sequence-tokens", type=int, help="What a sequence holds on average, for suggested settings.  [4096]")
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def plan(
    recipe: str,
    model: str | None,
    target: str | None,
    ranks: int | None,
    gpus: tuple[str, ...],
    sequence_tokens: int | None,
    as_json: bool,
) -> None:
    """Tell what an engine will be, before any download. Exit code 1: it does not fit on a GPU that --gpu names."""
    from dsc.compiler.planning.plan import make_plan
    from dsc.compiler.recipe import load_recipe

    made = make_plan(load_recipe(recipe).override(target, ranks), model, gpus, sequence_tokens)
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=2))
    else:
        from dsc.compiler.planning.tables import show

        show(made)
    if gpus and not all(item.fits for item in made.fits):
        sys.exit(1)


@click.command()
@click.argument("engine", type=PATH)
@click.option("--against", help="The checkpoint, a folder or a Hugging Face name. Default: the model of the recipe.")
@click.option("--text", type=PATH, help="A text to judge by. Default: documentation that every Python has.")
@click.option("--windows", type=click.IntRange(1), default=8, show_default=True, help="Pieces of the text.")
@click.option("--window-tokens", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a piece.")
@click.option("--device", help="Where engine and unquantized model are run, layer by layer: cuda, cuda:1, cpu.  [cpu]")
@click.option("--max-kl", type=float, help="Fail above this KL, in nats a token.")
@click.option("--json", "as_json", is_flag=True, help="The certificate as JSON.")
def verify(
    engine: Path,
    against: str | None,
    text: Path | None,
    windows: int,
    window_tokens: int,
    device: str | None,
    max_kl: float | None,
    as_json: bool,
) -> None:
    """Compare an engine with the unquantized model.

    The result is kept in the engine as its numerics certificate.
    """
    from dsc.compiler.certify.certify import check_budget, verify_engine
    from dsc.compiler.certify.tables import show
    from dsc.compiler.progress import Progress

    with Progress(quiet=as_json) as progress:
        certificate = verify_engine(
            engine, against, text, windows=windows, window_tokens=window_tokens, device=device, progress=progress
        )
    if as_json:
        click.echo(json.dumps(certificate.to_json(), indent=2))
    else:
        show(certificate)
    check_budget(certificate, {} if max_kl is None else {"max_kl": max_kl}, str(engine))
