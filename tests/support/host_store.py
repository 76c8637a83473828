"""An object store on one of the hosts of a test, which all of them reach: SeaweedFS, with credentials where AWS tools look for them."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

from tests.support.hosts import LIMIT_S, Host
from tests.support.seaweed import PORTS, identities, server_command, weed
from tests.support.waiting import until

FIRST_PORT = 21_000
"""Neither Ray nor the kernel gives these to others."""
FOLDER = Path("/srv/seaweed")
BUCKET = "fleet"
S3_PORT = FIRST_PORT + PORTS.index("s3.port")

_READY = """
from botocore.config import Config
from botocore.session import get_session
config = Config(connect_timeout=2, read_timeout=20, retries={{"total_max_attempts": 1}})
client = get_session().create_client("s3", config=config)
if {bucket!r} not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
    client.create_bucket(Bucket={bucket!r})
client.put_object(Bucket={bucket!r}, Key="ready", Body=b"yes")
"""
_LIST = """
from botocore.session import get_session
pages = get_session().create_client("s3").get_paginator("list_objects_v2").paginate(Bucket={bucket!r}, Prefix={prefix!r})
print("\\n".join(each["Key"] for page in pages for each in page.get("Contents", [])))
"""


class HostStore:
    """A server on ``host``; it ends with that. :meth:`admit` gives a host what ``s3://`` needs there, and :meth:`banish` takes it away."""

    def __init__(self, host: Host) -> None:
        self._host, self._key, self._secret = host, f"key{secrets.token_hex(6)}", secrets.token_hex(16)
        ports = {name: FIRST_PORT + number for number, name in enumerate(PORTS)}
        program = Path(host.python).with_name(weed().name)
        config = FOLDER / "s3.json"
        write(host, str(config), identities(self._key, self._secret))
        command = server_command(program, FOLDER, config, ports, host.address)
        self._process = host.popen(command, cwd=str(FOLDER), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.admit(host)
        until(self._ready, "SeaweedFS serves S3 on a host", LIMIT_S * 2, tick_s=0.5)

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"http://{self._host.address}:{S3_PORT}"

    @property
    def credentials(self) -> dict[str, str]:
        """As variables of the environment, for who is not admitted."""
        return {"AWS_ACCESS_KEY_ID": self._key, "AWS_SECRET_ACCESS_KEY": self._secret}

    def admit(self, host: Host) -> None:
        """Write endpoint and credentials where every library of AWS finds them."""
        write(host, ".aws/config", f"[default]\nregion = us-east-1\nendpoint_url = {self.endpoint}\ns3 =\n  addressing_style = path\n")
        write(host, ".aws/credentials", f"[default]\naws_access_key_id = {self._key}\naws_secret_access_key = {self._secret}\n")

    def banish(self, host: Host) -> None:
        """Whoever is started on ``host`` from now on has no credentials, and those who have read them keep them."""
        host.run(["rm", "-r", ".aws"])

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def keys(self, prefix: str) -> list[str]:
        """Names of the objects under a prefix."""
        return self._host.run([self._host.python, "-c", _LIST.format(bucket=BUCKET, prefix=prefix)]).stdout.split()

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"weed ended with {self._process.returncode} on {self._host.hostname}")
        return self._host.run([self._host.python, "-c", _READY.format(bucket=BUCKET)], check=False).returncode == 0


def write(host: Host, path: str, text: str) -> None:
    """A file on a host, readable by its user alone; a path without a root is one of the home folder."""
    command = 'umask 077 && mkdir -p "$(dirname "$1")" && cat >"$1"'
    process = host.popen(["sh", "-c", command, "sh", path], stdin=subprocess.PIPE, text=True)
    process.communicate(text, timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"{host.hostname}: {path} could not be written")
