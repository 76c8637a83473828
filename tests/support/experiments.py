"""``make experiments``: the experiments that are shipped, on hosts of this machine, and what each came to.

``python -m tests.support.experiments [NAME ...] [--json FILE]``. Five hosts: a head with a store, and two racks of two. What needs no
hosts of its own starts its cluster on the head's. Root is needed. It ends with 1 unless every one is held.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.host_runs import FOLDER
from tests.support.host_store import HostStore
from tests.support.hosts import ROOT, Hosts
from tests.support.ray_hosts import TwoRacks

LIMIT_S = 900.0
SHIPPED = ROOT / "experiments"
VERDICTS = "verdicts.json"


def carried_out(name: str, cluster: TwoRacks, store: HostStore) -> dict[str, Any]:
    """The experiment ``name``, typed on the head as a user does. Raises RuntimeError when it gives no verdict."""
    head = cluster.head.host
    environment = {"FLEET_ADDRESS": cluster.head.address, "FLEET_STORAGE": store.url("runs")}
    head.run(["sh", "-c", f"mkdir -p {FOLDER} && cd {FOLDER} && rm -f {VERDICTS} && ln -sfn {ROOT}/examples examples"])
    command = ["fleet", "experiment", "run", str(SHIPPED / f"{name}.json"), "--json", VERDICTS]
    done = head.run(command, LIMIT_S, check=False, cwd=FOLDER, env=environment)
    print(f"$ fleet experiment run experiments/{name}.json\n{done.stdout}{done.stderr if done.returncode else ''}", flush=True)
    written = head.run(["cat", VERDICTS], check=False, cwd=FOLDER).stdout
    if not written:
        raise RuntimeError(f"{name} ended with {done.returncode} and gave no verdict: {done.stderr[-2000:]}")
    verdict: dict[str, Any] = json.loads(written)
    return verdict | {"name": name}


def row(verdict: dict[str, Any]) -> str:
    """One line of what came of it: how many probes were held, and the figures that they gave."""
    probes = verdict["probes"]
    held = sum(probe["verdict"] == "held" for probe in probes)
    figures = [f"{probe['probe']} {probe['value']:.3g}" for probe in probes if isinstance(probe["value"], float)]
    return f"{verdict['name']}: {held} of {len(probes)} probes held; {', '.join(figures)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in SHIPPED.glob("*.json")))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    with Hosts(5) as hosts:
        store = HostStore(hosts[0])
        cluster = TwoRacks(hosts, prepare=store.admit)
        verdicts = []
        for name in asked.names:
            verdicts.append(carried_out(name, cluster, store))
            cluster.restore()
    print("\n".join(row(verdict) for verdict in verdicts))
    if asked.json:
        asked.json.write_text(json.dumps(verdicts, indent=1) + "\n")
    return int(any(verdict["exit_code"] for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
