"""A local raylet starts this script for each worker, in the place of ``ray/_private/workers/setup_worker.py``.

Ray's script imports Ray to set variables and to start another program: a second of one core, right after a rank was lost. Fleet's workers
ask for variables and an executable. This script handles those with the standard library alone, and hands all else over to Ray's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
RAYS = "FLEET_RAY_SETUP_WORKER"
"""Variable that names Ray's own script."""


def worker(arguments: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """(command, environment) of the worker that the raylet's ``arguments`` describe; None: Ray's script has to start it."""
    values = {prefix: text[len(prefix) :] for prefix in (CONTEXT, LANGUAGE) for text in arguments if text.startswith(prefix)}
    context = json.loads(values.get(CONTEXT) or "{}")
    known = {"env_vars", "py_executable"}
    if values.get(LANGUAGE, "PYTHON") != "PYTHON" or any(value for key, value in context.items() if key not in known):
        return None
    found = dict(environment)
    for name, text in (context.get("env_vars") or {}).items():
        found[name] = _expanded(text, found)
    rest = [text for text in arguments if not text.startswith((CONTEXT, LANGUAGE))]
    return [*shlex.split(context.get("py_executable") or sys.executable), *rest], found


def _expanded(text: str, environment: dict[str, str]) -> str:
    """As Ray does it: a variable that is not set becomes empty in braces, and stays as it is without them."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: environment.get(m[1] or m[2], "" if m[1] else m[0]), text)


def main() -> None:
    """Become the worker that the command line describes, or Ray's own script."""
    found = worker(sys.argv[1:], dict(os.environ))
    if found is None:
        os.execv(sys.executable, [sys.executable, os.environ[RAYS], *sys.argv[1:]])
    command, environment = found
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
