"""One process on each node that has done the imports of ranks, and forks workers.

A new worker spends 3 seconds of CPU on imports, beside ranks that compute. A forked worker has them, and shares their memory. Ray starts
workers with the executable of their runtime environment, which is :mod:`actors.fork_client` here.

The server only imports and forks: a process with threads, or with a GPU in use, cannot be forked. (Threads of memory pools and of BLAS are
no obstacle: their libraries handle forks, as DataLoaders fork, too.)

The nodes of a local cluster share one machine. Most imports are made once, in a process that the cluster starts with itself (its zygote).
The servers of all nodes and runs are forked off the zygote. It does not import Ray: at its import, Ray reads which job and node the process
belongs to.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from actors import fork_client
from actors.fork_client import LENGTH
from fleet.host import processes
from fleet.host.lines import user_of
from fleet.host.linux import die_with_parent
from fleet.host.whole_files import write_whole
from fleet.host.wire import checked

log = logging.getLogger("fleet.fork_server")

ALWAYS = ("ray", "actors.trainer")
SERVE = "serve"
"""In place of a worker's script: the forked process is a server itself."""
REQUEST_LIMIT_S = 10.0
CALL_FILE = "fork-client"
LARGEST_REQUEST_BYTES = 8 << 20
"""Limit of a request: a command line and an environment."""


def socket_path(folder: Path) -> str:
    """The socket of a node's server: a template, as nodes of one host share ``folder``."""
    return str(folder / "fork-{raylet}.sock")


def exit_status(folder: Path, pid: int) -> int | None:
    """The exit status of a process forked off the server in ``folder``: its status, or the signal's number as a negative one.

    None while that is unknown.
    """
    with contextlib.suppress(FileNotFoundError):
        return int(_exit_path(folder, pid).read_text())
    return None


def _exit_path(folder: Path, pid: int) -> Path:
    return folder / f"exit-{pid}"


def runtime_env(folder: Path, variables: dict[str, str], same_paths: bool = True) -> dict[str, Any]:
    """The runtime environment of workers that are forked off their node's server, where there is one.

    Without ``same_paths`` each node may have Python and Fleet in other places. Its agent writes the client's command line into ``folder``,
    where a shell reads it. A node without an agent starts workers as Ray does.
    """
    client = _call() if same_paths else f"$(cat {folder / CALL_FILE} 2>/dev/null || echo python3)"
    return {"py_executable": client, "env_vars": {**variables, fork_client.PATH_VARIABLE: socket_path(folder)}}


def _call() -> str:
    return f"{sys.executable} -I -S {fork_client.__file__}"


def write_call(folder: Path) -> None:
    """Write the client's command line on this node, for :func:`runtime_env`."""
    write_whole(folder / CALL_FILE, _call())


class ForkServer:
    """The owner's handle of the server's process, which ends with the owner.

    Args:
        folder: the folder of its socket.
        variables: of its environment; libraries read theirs when they are imported.
        modules: further modules to import besides those of all ranks. A missing module is no error here; the train function will raise.
        imports: import statements of the user's script, which it also carries out, unless the process could then not be forked.
    """

    def __init__(self, folder: Path, variables: dict[str, str], modules: Iterable[str], imports: Iterable[str] = ()) -> None:
        environment = {**os.environ, **variables}
        path = Path(socket_path(folder).format(raylet=environment.get(processes.RAYLET_VARIABLE, "")))
        path.unlink(missing_ok=True)
        arguments = [",".join((*ALWAYS, *modules)), str(folder), "\n".join(imports)]
        with _listening_at(path) as listening:  # clients wait until the imports are done
            self._process = _forked(listening, arguments, environment) or _started(listening, arguments, environment)

    def close(self) -> None:
        """End the server, and with it all forked processes."""
        self._process.kill()
        self._process.wait()


@dataclass
class _Forked:
    """A server that was forked off the zygote."""

    pidfd: int
    line: int
    """The zygote holds the other end, and kills the server when this one is closed."""

    def kill(self) -> None:
        os.close(self.line)

    def wait(self) -> None:
        select.select([self.pidfd], [], [])
        os.close(self.pidfd)


def _listening_at(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def _forked(listening: socket.socket, arguments: list[str], environment: dict[str, str]) -> _Forked | None:
    """A server forked off the zygote; None where there is no zygote that answers."""
    if not (zygote := environment.get(processes.ZYGOTE_VARIABLE)):
        return None
    with open(os.devnull, "rb") as nothing:
        try:
            pid, line = fork_client.ask(zygote, [SERVE, *arguments], environment, [nothing.fileno(), 1, 2, listening.fileno()])
            return _Forked(os.pidfd_open(pid), line)
        except OSError as error:
            log.info("The zygote of this cluster does not answer, so this server imports all: %s", error)
            return None


def _started(listening: socket.socket, arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = processes.calling(__name__, "main", str(listening.fileno()), *arguments)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[listening.fileno()], start_new_session=True)


def start_zygote(
    modules: Iterable[str], variables: Mapping[str, str], path: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process that forks servers for all nodes of a local cluster, at ``path``.

    It ends when its standard input is closed. Its output goes to a file beside ``path``.
    """
    with _listening_at(path) as listening, open(path.with_suffix(".log"), "wb") as printed:
        command = processes.calling(__name__, "zygote", str(listening.fileno()), ",".join(modules))
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=printed, stderr=printed, env={**environment, **variables},
            pass_fds=[listening.fileno()], start_new_session=True,
        )  # fmt: skip


def import_all(names: Iterable[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.info("%s could not be imported ahead of time: %s", name, error)


def carry_out(imports: Iterable[str]) -> str:
    """Carry out import statements of the user's script. Errors are left to the script. Returns why this process cannot be forked, or ""."""
    threads = _threads()
    for statement in imports:
        try:
            exec(statement, {})
        except Exception as error:  # noqa: BLE001 - the script raises it again, where its user sees it
            log.info("%s was not possible ahead of time: %s", statement, error)
    more = _threads() - threads
    return why_not() or (f"an import of the script's started {more} threads" if more > 0 else "")


def _threads() -> int:
    """The number of this process's threads, also those unknown to Python."""
    return len(os.listdir("/proc/self/task"))


def why_not() -> str:
    """Why this process cannot be forked; empty if it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import began to use the GPU"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"an import started threads: {', '.join(others)}" if others else ""


class _Server:
    """Forks a process for each client that asks. With ``folder`` it writes the exit status of each there."""

    def __init__(self, listening: socket.socket, folder: Path | None) -> None:
        self._listening, self._folder = listening, folder
        self._ready = selectors.DefaultSelector()
        self._ready.register(listening, selectors.EVENT_READ, self._accept)
        if folder is None:
            self._ready.register(sys.stdin, selectors.EVENT_READ, lambda _: os._exit(0))

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._ready.select():
                key.data(key.fileobj)

    def _accept(self, _: Any) -> None:
        stream = self._listening.accept()[0]
        stream.settimeout(REQUEST_LIMIT_S)
        try:
            request, streams = _read(stream)
        except (OSError, ValueError) as error:
            log.warning("A request could not be read: %s", error)
            stream.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become(request, streams, stream)
        if self._folder is not None:
            _exit_path(self._folder, pid).unlink(missing_ok=True)  # left by an earlier process with this pid
        for number in streams:
            os.close(number)
        with contextlib.suppress(OSError):  # the client is gone, which the next event shows
            stream.sendall(LENGTH.pack(pid))
        self._watch(pid, stream)

    def _watch(self, pid: int, stream: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)

        def over(_: Any) -> None:
            _, status = os.waitpid(pid, 0)
            if self._folder is not None:
                with contextlib.suppress(OSError):  # the run is over, and its folder is removed
                    write_whole(_exit_path(self._folder, pid), str(os.waitstatus_to_exitcode(status)))
            self._ready.unregister(pidfd)
            os.close(pidfd)
            if stream.fileno() >= 0:
                self._ready.unregister(stream)
                stream.close()

        def abandoned(_: Any) -> None:
            if stream.fileno() < 0:  # its worker ended at the same moment
                return
            self._ready.unregister(stream)
            stream.close()
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

        self._ready.register(pidfd, selectors.EVENT_READ, over)
        self._ready.register(stream, selectors.EVENT_READ, abandoned)

    def _become(self, request: dict[str, Any], streams: list[int], stream: socket.socket) -> NoReturn:
        """In the new process: become the worker that the client asked for. It never returns."""
        code = 1
        try:
            self._ready.close()
            self._listening.close()
            stream.close()
            die_with_parent()
            _take_over(request, streams[:3])
            if request["arguments"][0] == SERVE:
                _serve(streams[3], *request["arguments"][1:])
            runpy.run_path(request["arguments"][0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - reported as by the interpreter, before the process ends
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _read(stream: socket.socket) -> tuple[dict[str, Any], list[int]]:
    pid, user = user_of(stream)
    if user != os.geteuid():
        raise ConnectionError(f"process {pid} belongs to user {user}")
    head, streams, _, _ = socket.recv_fds(stream, LENGTH.size, 4)
    if len(head) < LENGTH.size:
        raise ConnectionError("the client hung up")
    data = stream.recv(checked(LENGTH.unpack(head)[0], LARGEST_REQUEST_BYTES), socket.MSG_WAITALL)
    return json.loads(data), list(streams)


def _take_over(request: dict[str, Any], streams: list[int]) -> None:
    for number, into in zip(streams, (0, 1, 2), strict=True):
        os.dup2(number, into)
        os.close(number)
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    processes.bear_marks(os.environ)
    os.chdir(request["directory"])
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as in Python's run of a script
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[1:1] = added
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def main() -> None:
    """Run a server that was not forked: its arguments are those of :func:`_serve`."""
    _serve(int(sys.argv[1]), *sys.argv[2:])


def _serve(number: int, modules: str, folder: str, imports: str) -> NoReturn:
    """Import ``modules``, carry out ``imports``, and fork for each client of the listening socket ``number``."""
    if not die_with_parent():
        sys.exit("the fork server could not be bound to its owner's life")
    _import_or_exit(modules)
    if reason := carry_out(imports.splitlines()):
        print(f"fleet: each worker carries out the script's imports itself: {reason}", file=sys.stderr, flush=True)
        os.set_inheritable(number, True)
        again = processes.calling("actors.fork_server", "main", str(number), modules, folder, "")
        os.execv(again[0], again)
    _fork_for_all(number, Path(folder))


def zygote() -> None:
    """See :func:`start_zygote`."""
    _import_or_exit(sys.argv[2])
    if "ray" in sys.modules:
        sys.exit("servers are not forked: an import imports Ray, which would then take each forked process for this one")
    _fork_for_all(int(sys.argv[1]), None)


def _import_or_exit(modules: str) -> None:
    import_all(modules.split(","))
    if reason := why_not():
        sys.exit(f"workers are not forked: {reason}")


def _fork_for_all(number: int, folder: Path | None) -> NoReturn:
    gc.collect()
    gc.freeze()  # present objects stay in memory that all workers share
    _Server(socket.socket(fileno=number), folder).serve()
