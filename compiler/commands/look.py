"""Commands that look into engines: inspect, diff, explain, report.

Each imports what it needs when it runs, so that help and errors come at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dsc.compiler.commands.path import PATH
from dsc.runtime.errors import DscError


@click.command()
@click.argument("engine", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--layer", type=int, help="One layer, node by node.")
@click.option("--fusion", is_flag=True, help="Only the fusion report.")
@click.option(
    "--kernels", is_flag=True, help="Every GPU kernel: what it uses, what launches it, how often a step does."
)
@click.option("--verify", is_flag=True, help="Also hash every file and compare with the manifest.")
def inspect(engine: Path, as_json: bool, layer: int | None, fusion: bool, kernels: bool, verify: bool) -> None:
    """Show what was fused, what was quantized, and why."""
    from dsc.runtime import inspect as view
    from dsc.runtime.artifact import EngineFolder

    asked = [
        name for name, given in (("--fusion", fusion), ("--kernels", kernels), ("--layer", layer is not None)) if given
    ]
    if len(asked) > 1:
        raise DscError(f"{' and '.join(asked)} show different things", try_="one of them")
    folder = EngineFolder.open(engine)
    if verify:
        folder.verify_hashes()
    if as_json:
        data = view.describe(folder, layer=layer)
        if fusion:
            data = {key: data[key] for key in ("engine", "fusion", "declined")}
        if kernels:
            data = {key: data[key] for key in ("engine", "kernels", "steps")}
        click.echo(json.dumps(data, indent=2))
    elif kernels:
        view.show_kernels(folder)
    else:
        view.show(folder, layer=layer, fusion=fusion)
    if verify and not as_json:
        click.echo("every file matches the manifest")


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Every difference, as JSON.")
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Tell two engines apart.

    By model, recipe, fusions and every weight's largest change. Exit code 0: the same, 1: not.
    """
    from dsc.runtime import diff as compare
    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.diff_tables import show

    found = compare.diff(EngineFolder.open(a), EngineFolder.open(b))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)
    sys.exit(0 if found["same"] else 1)


@click.command()
@click.argument("engine", type=PATH)
@click.argument("name", metavar="TENSOR|NODE")
@click.option("--json", "as_json", is_flag=True, help="Everything known of it, as JSON.")
def explain(engine: Path, name: str, as_json: bool) -> None:
    """Tell where a tensor or node comes from.

    And what was done to it and why, its error and its kernel.
    """
    from dsc.runtime.artifact import EngineFolder
    from dsc.runtime.explain import explain as look
    from dsc.runtime.explain_text import text

    found = look(EngineFolder.open(engine), name)
    click.echo(json.dumps(found, indent=2) if as_json else text(found))


@click.command()
@click.argument("engine", type=PATH)
@click.option("--html", is_flag=False, flag_value="", metavar="[FILE]", help="The file. Default: ./<engine>.html")
def report(engine: Path, html: str | None) -> None:
    """Write an engine's report as one page of HTML.

    Self-contained: fusions, bytes, errors, memory plan.
    """
    from dsc.compiler.report_page import report_page
    from dsc.runtime.artifact import EngineFolder

    page = report_page(EngineFolder.open(engine))
    file = Path(html or f"{engine.resolve().name.removesuffix('.engine')}.html")
    file.write_text(page, encoding="utf-8")
    click.echo(str(file))
