"""Commands for those who write passes: passes, plugins, opt.

Each imports what it needs when it runs, so that help and errors come at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from dsc.compiler.commands.path import PATH


@click.command()
@click.argument("name", required=False)
def passes(name: str | None) -> None:
    """List the passes a recipe may name, or show one's manual."""
    from dsc.compiler.listing import pass_lines, pass_manual

    click.echo(pass_manual(name) if name else "\n".join(pass_lines()))


@click.command()
@click.argument("op", required=False)
def plugins(op: str | None) -> None:
    """List the plugin ops, or show one op's manual."""
    from dsc.compiler.listing import plugin_lines, plugin_manual

    click.echo(plugin_manual(op) if op else "\n".join(plugin_lines()))


@click.command()
@click.argument("graph", type=PATH)
@click.argument("pass_names", nargs=-1, metavar="PASS...")
@click.option("--config", type=PATH, help="config.json of the model; default: tiny-r1's facts.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), default="prefill", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of the graph's text.")
def opt(graph: Path, pass_names: tuple[str, ...], config: Path | None, phase: str, as_json: bool) -> None:
    """Run passes on a textual graph and print it.

    An option goes behind its pass: set_dtype:activations=bf16.
    """
    from dsc.compiler.opt import run_opt

    text, report = run_opt(graph, pass_names, config=config, phase=phase)
    click.echo(json.dumps(report, indent=2) if as_json else text)
