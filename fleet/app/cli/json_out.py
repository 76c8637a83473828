"""``--json`` of the commands that answer a question: a file, or the standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[str, typer.Option("--json", help="Write the answer as JSON to this file; - for stdout.")]


def write_json(data: dict[str, Any], json_: str) -> None:
    """To the file ``json_``, to stdout where that is -, nowhere where it is empty."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n" if json_ else ""
    if json_ == "-":
        sys.stdout.write(text)
    elif json_:
        Path(json_).write_text(text)
