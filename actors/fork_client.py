"""Ray starts this program in place of a worker's Python. It asks the node's fork server for a process with all imports done.

It runs by its path, with the standard library alone (``python -I -S``), so that it starts quickly. Without a server it becomes the worker
itself, with the usual slow start. It stays while the worker lives, as Ray watches the process that it started.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys

PATH_VARIABLE = "FLEET_FORK_SERVER"
ANSWER_LIMIT_S = 60.0
LENGTH = struct.Struct("<I")


def ask(path: str, arguments: list[str], environment: dict[str, str], streams: list[int]) -> tuple[int, int]:
    """Have the server at ``path`` run the script ``arguments[0]`` with the rest as arguments.

    Returns the pid of the process, and a descriptor: closing the descriptor kills the process.

    The first three ``streams`` become those of the process. Raises OSError when there is no working server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(ANSWER_LIMIT_S)
        stream.connect(path)
        _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            raise ConnectionError(f"{path} is served by user {user}")
        request = json.dumps({"arguments": arguments, "environment": environment, "directory": os.getcwd()}).encode()
        socket.send_fds(stream, [LENGTH.pack(len(request))], streams)
        stream.sendall(request)
        answer = stream.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(answer) < LENGTH.size:
            raise ConnectionError("the fork server hung up")
        return int(LENGTH.unpack(answer)[0]), stream.detach()


def main() -> None:
    arguments = sys.argv[1:]
    try:
        path = os.environ[PATH_VARIABLE].format(raylet=os.environ.get("RAY_RAYLET_PID", ""))
        pid, _ = ask(path, arguments, dict(os.environ), [0, 1, 2])  # the descriptor stays open while this process lives
    except (OSError, KeyError):
        os.execv(sys.executable, [sys.executable, *arguments])
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # the worker has ended already, and is not started again
    select.select([pidfd], [], [])


if __name__ == "__main__":
    main()
