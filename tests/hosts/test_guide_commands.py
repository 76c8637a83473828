"""Walks docs/cluster.md, and what docs/guide.md says of clusters, on a cluster of hosts: typed on its head, as it stands there.

What stands for the reader's own there is replaced: the head's address, that of its dashboard, and the store's.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.support.blocks import Block, blocks_of
from tests.support.host_store import HostStore, write
from tests.support.hosts import HOME, Host
from tests.support.ray_hosts import RayHosts
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)

PAGE, GUIDE = "docs/cluster.md", "docs/guide.md"
ON_HOSTS = "walk: hosts: "
IN_THE_GUIDE = "walk: not run: tests/hosts/test_guide_commands.py does it"
HEAD, DASHBOARD, STORE = "10.0.0.1:6379", "http://10.0.0.1:8265", "s3://bucket/runs"
ON_THE_HEAD = f"{HOME}/.fleet/runs"
LIMIT_S = 420.0
LEFT = "ls -d /dev/shm/fleet-* 2>/dev/null || true"


class Reader:
    """Somebody with a shell on the head, in a folder of the name ``folder``. ``said`` is all that the commands have printed."""

    def __init__(self, cluster: RayHosts, store: HostStore, folder: str) -> None:
        self.cluster, self.store, self.said = cluster, store, ""
        self.head: Host = cluster.head.host
        self.folder = f"/srv/{folder}"
        self.head.run(["mkdir", self.folder])
        self.type("fleet init train.py")

    def type(self, line: str, code: int = 0) -> str:
        """One command, to its end."""
        command = ["sh", "-c", self.replaced(line)]
        done = self.head.run(command, LIMIT_S, check=False, cwd=self.folder, env={"OMP_NUM_THREADS": "1"})
        said = done.stdout + done.stderr
        self.said += said
        assert done.returncode == code, f"{line}\n{said}"
        return said

    def follow(self, block: Block) -> None:
        """Do what the block's marker says. Fails for a block without one that is known."""
        act = block.marker.removeprefix(ON_HOSTS)
        if act == "python":
            write(self.head, f"{self.folder}/block.py", self.replaced(block.text))
            self.type("python block.py")
        elif match := re.fullmatch(r"run(?: to (\d+))?", act):
            *others, last = block.commands
            for line in others:
                self.type(line)
            self.type(last, int(match[1] or 0))
        else:
            raise AssertionError(f"{block}: nobody knows how to {act!r}")

    def replaced(self, text: str) -> str:
        """``text`` with the addresses of this cluster and its store."""
        head = self.cluster.head
        for shown, real in ((DASHBOARD, head.dashboard_url), (HEAD, head.address), (STORE, self.store.url("runs"))):
            text = text.replace(shown, real)
        return text

    def left(self) -> dict[str, str]:
        """Host -> folders of runs in its memory."""
        found = {host.hostname: host.run(["sh", "-c", LEFT]).stdout.strip() for host in self.cluster.hosts}
        return {name: folders for name, folders in found.items() if folders}


def test_the_page_about_clusters_leads_where_it_says(ray_hosts: RayHosts, store: HostStore) -> None:
    reader = Reader(ray_hosts, store, "page")
    blocks = [block for block in blocks_of(PAGE) if block.marker.startswith(ON_HOSTS)]
    for block in blocks:
        if any("fleet stop" in line for line in block.commands):
            until(lambda: steps(reader, "long") > 0, "the run trains that is to be stopped", LIMIT_S, tick_s=2.0)
        reader.follow(block)
    assert "4 nodes, 6 slots" in reader.said and reader.head.run(["ls", f"{reader.folder}/state.pt"]).stdout
    names = ("first", "submitted", "launched", "long")
    assert [ended(reader, name) for name in names] == ["completed", "completed", "completed", "stopped"]
    assert any(key.endswith("saved/model.pt") for key in store.keys("runs/first/")), "what run.save wrote"
    assert reader.left() == {}


def test_what_the_guide_says_of_clusters_holds(ray_hosts: RayHosts, store: HostStore) -> None:
    reader = Reader(ray_hosts, store, "guide")
    blocks = [block for block in blocks_of(GUIDE) if block.marker == IN_THE_GUIDE]
    assert blocks
    for block in blocks:
        for line in block.commands:
            reader.type(line)
    assert [ended(reader, name) for name in ("far", "away")] == ["completed", "completed"]
    assert reader.left() == {}


def steps(reader: Reader, name: str) -> int:
    """How many steps the run's journal on the head has; 0 before there is one."""
    done = reader.head.run(["fleet", "report", name, "--json", "--storage", ON_THE_HEAD], LIMIT_S, check=False)
    return int(json.loads(done.stdout)["steps"]) if done.returncode == 0 else 0


def ended(reader: Reader, name: str) -> str:
    """How the run's journal on the head says that it has ended."""
    said = reader.head.run(["fleet", "report", name, "--json", "--storage", ON_THE_HEAD], LIMIT_S).stdout
    return str(json.loads(said)["status"])
