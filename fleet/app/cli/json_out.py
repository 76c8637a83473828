"""``--json`` of the commands that answer a question: a file, or the standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Json = Annotated[str, typer.Option("--json", help="Write the answer as JSON to this file; - or no file for stdout.")]


class JsonCommand(TyperCommand):
    """A command whose ``--json`` needs no file where none can be meant: at the end, or before another option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command.parse_args``. Typer has no options whose value may be left out."""
        return super().parse_args(ctx, with_stdout(args))


def with_stdout(args: Sequence[str]) -> list[str]:
    """``args`` with - after each bare ``--json``."""
    found: list[str] = []
    for place, word in enumerate(args):
        found.append(word)
        following = args[place + 1] if place + 1 < len(args) else "--"
        if word == "--json" and following.startswith("-") and following != "-":
            found.append("-")
    return found


def write_json(data: dict[str, Any], json_: str) -> None:
    """To the file ``json_``, to stdout where that is -, nowhere where it is empty."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n" if json_ else ""
    if json_ == "-":
        sys.stdout.write(text)
    elif json_:
        Path(json_).write_text(text)
