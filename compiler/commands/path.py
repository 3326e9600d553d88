"""How commands take paths."""

from __future__ import annotations

from pathlib import Path

import click

PATH = click.Path(path_type=Path)  # what is there is judged by the code that reads it, which says more than click
