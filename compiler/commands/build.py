"""Commands that make or change engines: compile, migrate.

Each imports what it needs when it runs, so that help and errors come at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from dsc.compiler.commands.path import PATH
from dsc.runtime.errors import DscError


@click.command(name="compile")
@click.option("--recipe", required=True, help="A YAML file, or the bare name of a packaged recipe such as r1-wint4.")
@click.option("--model", help="A checkpoint folder or Hugging Face name, instead of the recipe's model.")
@click.option("--output", type=PATH, help="Engine folder to write. Default: ./<recipe>.engine")
@click.option("--target", help="Compile for another target than the recipe's.")
@click.option("--ranks", type=int, help="Compile for this number of tensor ranks instead of the recipe's.")
@click.option("--dump", type=PATH, help="Write the graph's text after each pass that changed it into this folder.")
@click.option(
    "--download", is_flag=True, help="Fetch the checkpoint from Hugging Face when it is not here (resumable)."
)
@click.option(
    "--weights",
    type=click.Choice(["checkpoint", "random"]),
    default="checkpoint",
    show_default=True,
    help="random: made up, from config.json alone, for plans and benchmarks.",
)
@click.option("--layers", type=int, help="Random weights: keep this many decoder layers, dense ones first.")
@click.option("--mtp", is_flag=True, help="Random weights: keep the MTP layer of a model cut by --layers.")
@click.option("--max-ram", help="Memory to keep to, such as 2GB. Default: a quarter of the machine.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def compile_(
    recipe: str,
    model: str | None,
    output: Path | None,
    target: str | None,
    ranks: int | None,
    dump: Path | None,
    download: bool,
    weights: str,
    layers: int | None,
    mtp: bool,
    max_ram: str | None,
    as_json: bool,
) -> None:
    """Build an engine from a checkpoint.

    A build that was cut short is gone on with.
    """
    from dsc.compiler.build import RandomWeights, compile_engine
    from dsc.compiler.progress import Progress
    from dsc.compiler.ram import parse_bytes
    from dsc.compiler.recipe import load_recipe

    random = RandomWeights(layers, mtp) if weights == "random" else None
    if random is None and (layers is not None or mtp):
        raise DscError("--layers and --mtp cut a model of random weights", try_="--weights random")
    loaded = load_recipe(recipe).override(target, ranks)
    with Progress(quiet=as_json) as progress:
        built = compile_engine(
            loaded,
            model=model,
            output=output,
            dump=dump,
            download=download,
            random=random,
            max_ram=None if max_ram is None else parse_bytes(max_ram),
            progress=progress,
        )
    click.echo(json.dumps(built.to_json(), indent=2) if as_json else built.text())


@click.command()
@click.argument("engine", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
def migrate(engine: Path, as_json: bool) -> None:
    """Bring an engine of an older schema version to this one.

    Without its checkpoint, in place, after hashing every file.
    """
    from dsc.compiler.progress import Progress
    from dsc.runtime.migrate import migrate as run

    with Progress(quiet=as_json) as progress:
        done = run(engine, lambda nbytes: progress.step("hashes", nbytes), progress.advance)
    click.echo(json.dumps(done.to_json(), indent=2) if as_json else done.text())
