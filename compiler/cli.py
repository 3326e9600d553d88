"""The `dsc` command: its commands in the order that help lists them, and what a mistake ends in."""

from __future__ import annotations

from typing import Any

import click

from dsc.compiler.commands import build, graph, judge, look, run
from dsc.runtime.errors import DscError


class Commands(click.Group):
    """A group that lists commands in the order they are written and turns a user's mistake into exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DscError as error:
            fault = error
        except BrokenPipeError:
            raise  # the reader of our output left: click ends quietly
        except OSError as error:  # a folder that cannot be written, a disk that is full: not our code's fault
            fault = DscError(error.strerror or str(error), where=str(error.filename or ""))
        click.echo(fault.text(), err=True)
        return ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsc", message="dsc %(version)s")
def main() -> None:
    """Compile DeepSeek checkpoints ahead of time, look into the engines, run them."""


for _command in (
    build.compile_,
    judge.plan,
    judge.verify,
    look.inspect,
    look.diff,
    look.explain,
    build.migrate,
    look.report,
    run.generate,
    run.bench,
    run.doctor,
    graph.passes,
    graph.plugins,
    graph.opt,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
