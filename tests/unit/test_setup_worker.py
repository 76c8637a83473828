"""What a local raylet runs for each worker does what Ray's own does, where Fleet needs it, and leaves the rest to Ray's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext

from fleet.app.cluster import setup_worker

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('A'), os.environ.get('B'), os.environ.get('C')]))"
RAYS = Path(sys.modules[RuntimeEnvContext.__module__].__file__ or "").parents[1] / "workers" / "setup_worker.py"


def started(script: str, context: dict[str, Any], tmp_path: Path) -> Any:
    show = tmp_path / "show.py"
    show.write_text(SHOW)
    words = [str(show), "--node-ip=127.0.0.1", "two words", "--language=PYTHON"]
    command = [sys.executable, script, *words, f"--serialized-runtime-env-context={RuntimeEnvContext(**context).serialize()}"]
    environment = {**os.environ, "BASE": "/base", setup_worker.RAYS: str(RAYS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"env_vars": {"A": "1", "B": "${BASE}/b:$BASE", "C": "${A}${NOT_THERE}"}},
        {"py_executable": f"{sys.executable} -I -S", "env_vars": {"A": "with 'quotes' and $"}},
        {"command_prefix": ["A=prefixed"]},
    ],
    ids=["nothing", "variables", "executable", "left to Ray"],
)
def test_it_starts_what_rays_own_starts(context: dict[str, Any], tmp_path: Path) -> None:
    assert started(setup_worker.__file__, context, tmp_path) == started(str(RAYS), context, tmp_path)


def test_other_languages_and_containers_are_for_rays_own() -> None:
    context = json.dumps({"override_worker_entrypoint": "/elsewhere/default_worker.py"})
    assert setup_worker.worker([f"{setup_worker.CONTEXT}{context}", "--language=PYTHON"], {}) is None
    assert setup_worker.worker(["--language=JAVA"], {}) is None


def test_it_imports_nothing_of_rays() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert not {'ray', 'fleet', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-I", "-c", code, setup_worker.__file__], check=True, timeout=60)
