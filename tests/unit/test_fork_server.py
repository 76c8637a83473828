"""Workers that are forked off a process with all imports, through a client that stands in their place."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.fork_client import LENGTH
from actors.fork_server import ForkServer, exit_status, runtime_env, socket_path, start_zygote
from actors.hosts import IMPORTED_ONCE
from fleet.host import processes
from tests.support.waiting import until

BOUND_S = 60.0
RAYLET = "4711"
CLUSTER, NODE = "of-these-tests", "3"

SCRIPT = """
import json, os, sys
seen = {"arguments": sys.argv[1:], "variable": os.environ["SPECIAL"], "directory": os.getcwd(), "path": sys.path[0]}
print(json.dumps({**seen, "pid": os.getpid(), "imported": "colorsys" in sys.modules}), flush=True)
sys.stdin.read()
"""


FIRST_STEPS = """
import importlib, sys
from actors.fork_server import ALWAYS, why_not
from actors.hosts import IMPORTED
for name in (*ALWAYS, *IMPORTED):
    importlib.import_module(name)
print(why_not())
known = set(sys.modules)
import torch
from actors.worker import rank_main
from fleet.protocol.types import StateId
from storage.checkpoint.parts import Parts
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2)).sum().backward()
optimizer.step()
Parts("file://" + sys.argv[1]).write(StateId(0, 1), 0, 0, 1, list(enumerate(model.parameters())))
print(*(name for name in set(sys.modules) - known if not name.startswith("torch.utils")))
"""


@pytest.fixture
def zygote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """That of a cluster, of which this process is on one node."""
    path, cluster = tmp_path / "zygote.sock", {processes.CLUSTER_VARIABLE: CLUSTER}
    with start_zygote(("colorsys",), {}, path, {**os.environ, **cluster, **processes.NOT_YET}) as process:
        for name, value in {**cluster, processes.NODE_VARIABLE: NODE, processes.ZYGOTE_VARIABLE: str(path)}.items():
            monkeypatch.setenv(name, value)
        yield process
        process.kill()


@pytest.fixture(params=["started", "forked off a zygote"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    monkeypatch.setattr("actors.fork_server.ALWAYS", ())
    if request.param != "started":
        request.getfixturevalue("zygote")
    server = ForkServer(tmp_path, {}, ("colorsys", "no_such_module"))
    yield server
    server.close()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """What Ray does to start a worker."""
    (folder / "worker.py").write_text(SCRIPT)
    environment = runtime_env(folder, {"SPECIAL": "one two"})
    command = f"exec {environment['py_executable']} {shlex.join([str(folder / 'worker.py'), *arguments])}"
    variables = {**os.environ, "RAY_RAYLET_PID": RAYLET, **environment["env_vars"]}
    return subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, cwd=folder, text=True, start_new_session=True
    )


def received(client: subprocess.Popen[str]) -> dict[str, Any]:
    assert client.stdout is not None
    found: dict[str, Any] = json.loads(client.stdout.readline())
    return found


def forks_and_has_imported(server: ForkServer, folder: Path) -> tuple[bool, bool]:
    """Of a worker that ``server`` is asked for; the server is closed then."""
    try:
        with start(folder) as client:
            seen = received(client)
            client.communicate("", timeout=BOUND_S)
            return seen["pid"] != client.pid, seen["imported"]
    finally:
        server.close()


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], BOUND_S)[0])


@pytest.mark.usefixtures("server")
def test_a_worker_is_as_if_it_had_been_started_and_has_the_imports(tmp_path: Path) -> None:
    with start(tmp_path, "--one", "a b") as client:
        seen = received(client)
        expected = {"arguments": ["--one", "a b"], "variable": "one two", "directory": str(tmp_path), "path": str(tmp_path)}
        assert seen == {**expected, "pid": seen["pid"], "imported": True}
        assert seen["pid"] != client.pid
        client.communicate("", timeout=BOUND_S)
    assert client.returncode == 0
    until(lambda: exit_status(tmp_path, seen["pid"]) is not None, "it is known how the worker ended")
    assert exit_status(tmp_path, seen["pid"]) == 0


@pytest.mark.usefixtures("server")
def test_a_worker_and_its_client_end_together(tmp_path: Path) -> None:
    with start(tmp_path) as first, start(tmp_path) as second:
        pids = [received(first)["pid"], received(second)["pid"]]
        pidfd = os.pidfd_open(pids[0])
        first.kill()
        assert ended(pidfd)
        os.close(pidfd)
        os.kill(pids[1], signal.SIGKILL)
        second.wait(BOUND_S)
        until(lambda: exit_status(tmp_path, pids[1]) is not None, "it is known how the worker ended")
        assert exit_status(tmp_path, pids[1]) == -signal.SIGKILL
        assert exit_status(tmp_path, 1) is None


@pytest.mark.usefixtures("zygote")
def test_what_is_forked_off_a_zygote_is_of_the_node_that_asked_and_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    monkeypatch.setattr("actors.fork_server.ALWAYS", ())
    server = ForkServer(tmp_path, {processes.JOB_VARIABLE: "01000000"}, ("json",))
    with start(tmp_path) as client:
        seen = received(client)
        assert seen["imported"], "the zygote has imported it, and the server was not asked to"
        shown = psutil.Process(seen["pid"]).environ()
        assert (shown[processes.JOB_VARIABLE], shown[processes.RAYLET_VARIABLE]) == ("01000000", RAYLET)
        of_node, of_cluster = processes.find(CLUSTER, NODE), processes.find(CLUSTER)
        assert {seen["pid"], client.pid} < set(of_node) < set(of_cluster)
        assert len(of_cluster) == len(of_node) + 1, "the zygote is of no node"
        pidfd = os.pidfd_open(seen["pid"])
        server.close()
        assert ended(pidfd)
        os.close(pidfd)
        client.wait(BOUND_S)
    assert processes.find(CLUSTER, NODE) == []


def test_a_zygote_that_is_gone_is_as_none_and_it_goes_with_its_owner(
    zygote: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    monkeypatch.setattr("actors.fork_server.ALWAYS", ())
    assert zygote.stdin is not None
    zygote.stdin.close()
    zygote.wait(BOUND_S)
    assert forks_and_has_imported(ForkServer(tmp_path, {}, ("colorsys",)), tmp_path) == (True, True)


def test_what_is_imported_once_does_not_import_ray() -> None:
    """Ray reads which job and which node a process is of when it is imported."""
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('ray' in sys.modules)"
    command = [sys.executable, "-c", program, *IMPORTED_ONCE]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=BOUND_S).stdout == "False\n"


def test_a_worker_that_has_ended_already_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have reaped it before its client looks."""
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    with subprocess.Popen(["true"]) as gone, socket.socket(socket.AF_UNIX) as server:
        gone.wait(BOUND_S)
        server.bind(socket_path(tmp_path).format(raylet=RAYLET))
        server.listen()
        with start(tmp_path) as client:
            connection, _ = server.accept()
            connection.sendall(LENGTH.pack(gone.pid))
            client.wait(BOUND_S)
            connection.close()  # and with it the client's streams, which it was sent
            assert client.communicate("", timeout=BOUND_S)[0] == ""


def test_without_a_server_it_starts_as_ever(tmp_path: Path) -> None:
    with start(tmp_path) as client:
        seen = received(client)
        assert seen["pid"] == client.pid
        assert not seen["imported"]
        client.communicate("", timeout=BOUND_S)


def test_a_server_that_fails_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    monkeypatch.setattr("actors.fork_server.ALWAYS", ())
    (tmp_path / "starts_a_thread.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    server = ForkServer(tmp_path, {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}, ("starts_a_thread",))
    try:
        with start(tmp_path) as client:
            assert received(client)["pid"] == client.pid
            client.communicate("", timeout=BOUND_S)
    finally:
        server.close()


@pytest.mark.parametrize(("imports", "done"), [(["import no_such_module", "from colorsys import ONE_THIRD"], True),
                                             (["import colorsys", "import starts_a_thread"], False)])  # fmt: skip
def test_what_a_script_imports_is_done_ahead_unless_nobody_can_be_forked_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: list[str], done: bool
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", RAYLET)
    monkeypatch.setattr("actors.fork_server.ALWAYS", ())
    (tmp_path / "starts_a_thread.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    assert forks_and_has_imported(ForkServer(tmp_path, path, ("json",), imports), tmp_path) == (True, done)


def test_a_rank_imports_hardly_anything_until_it_has_taken_a_step_and_saved_its_part(tmp_path: Path) -> None:
    """Four ranks compute while a fifth starts, and what is imported on each node once takes nothing from them."""
    command = [sys.executable, "-c", FIRST_STEPS, str(tmp_path)]
    unfit, imported = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=BOUND_S).stdout.splitlines()
    assert unfit == ""
    assert set(imported.split()) <= {"fsspec.implementations.chained", "torch.profiler._cupti_monitor"}
