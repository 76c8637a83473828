"""``fleet cluster up`` and ``down``, ``fleet status``: pages and metrics of all runs of a folder, as a service on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from dashboards.identities import NAME, named_tokens
from fleet.app.cli import attach as cli_attach
from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.looked_at import check_there, looked_at
from fleet.app.cli.queue import Submissions, note_path, queue_of, running
from fleet.app.cli.watch import PRIVATE, PerRank, Port, access_to, check_listens, read_token_path, serving, until_a_signal
from fleet.app.cluster.cluster_room import ClusterRoom
from fleet.errors import ConfigError, FleetError, RunFailed
from fleet.host.processes import calling
from fleet.host.whole_files import write_whole
from fleet.protocol.queueing import OTHERS, Rules
from fleet.settings.fields import seconds
from fleet.settings.per_rank import room
from storage.backends.urls import redact

console = cli_print.Terminal(stderr=True)
START_S = 60.0
STOP_S = 20.0


def up(
    storage: Storage = RUNS,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback ask every reader for the token.")] = "127.0.0.1",
    port: Port = 8700,
    with_prometheus: Annotated[bool, typer.Option("--with-prometheus", help="Start the Prometheus of this machine beside it.")] = False,
    prometheus_port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of that Prometheus; 0: a free one.")] = 9090,
    slots: Annotated[int, typer.Option(help="Ranks that queued runs may have at once, all together; 0: four for each core.")] = 0,
    address: Annotated[str, typer.Option(help="Queue runs on this Ray cluster: auto, or HOST:PORT; empty: on this machine.")] = "",
    quota: Annotated[
        list[str] | None, typer.Option(help="TEAM=SLOTS that its runs may have at once; *: any other team. Repeatable.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="TOML file of tokens with names and teams; its owner alone may read it.")] = "",
    preempt: Annotated[
        bool | None,
        typer.Option(
            "--preempt/--no-preempt",
            help="Runs of lower priority give way. Default: with --address, --quota or --tokens.",
            show_default=False,
        ),
    ] = None,
    ageing: Annotated[str, typer.Option(help="A run that waits so long counts as one priority higher, e.g. 15m; 0: never.")] = "15m",
    ray_targets: Annotated[str, typer.Option(help="Ray's service-discovery file; empty: where Ray puts it.")] = "",
    per_rank: PerRank = False,
    runbook: Annotated[str, typer.Option(help="URL or path of the runbook that alerts link to; empty: docs/runbook.md.")] = "",
) -> None:
    """Serve pages and metrics of all runs until `fleet cluster down`, start submitted runs, and configure Prometheus."""
    from storage.backends.trial import check_folder

    if "://" in storage:
        way_out = "Name a folder here; a run keeps its checkpoints elsewhere by fleet run --storage URL."
        raise ConfigError("--storage", redact(storage), "the service keeps its own files in a folder, and this is a URL", way_out)
    root = Path(storage).absolute()
    if (note := running(root)) is not None:
        raise ConfigError("--storage", storage, f"already up at {note['url']}", "Use fleet status, or fleet cluster down.")
    if slots < 0:
        raise ConfigError("--slots", slots, "must not be below 0")
    if slots and address:
        raise ConfigError("--slots", slots, "runs go to a cluster, which has what its nodes have", "Leave it out.")
    shared = bool(address or quota or tokens)
    queue = {
        "slots": slots or 4 * (os.cpu_count() or 1), "address": address, "quotas": _quotas(quota or ()),
        "ageing_s": seconds(ageing, "--ageing"), "preempts": shared if preempt is None else preempt,
        "tokens": str(Path(tokens).absolute()) if tokens else "",
    }  # fmt: skip
    _check_queue(queue)
    settings = {
        "root": str(root), "queue": queue, "host": host, "port": port, "ray_targets": ray_targets or None,
        "prometheus_port": prometheus_port if with_prometheus else None, "per_rank": per_rank, "runbook": runbook,
    }  # fmt: skip
    check_folder(root)
    access_to(root, host)
    check_listens(host, port)
    note_path(root).unlink(missing_ok=True)
    log = root / PRIVATE / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            calling("fleet.app.cli.up", "serve", json.dumps(settings)),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    deadline_s = time.monotonic() + START_S
    while running(root) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            said = log.read_text(errors="replace").strip().splitlines()
            raise RunFailed(f"fleet cluster up did not come up: {said[-1] if said else 'it said nothing'} (more in {log})")
        time.sleep(0.05)
    _report_status(root)


def serve() -> None:
    """The service itself: runs until it is told to stop. Each refusal is a line of its log."""
    try:
        _serve(json.loads(sys.argv[1]))
    except FleetError as error:
        sys.exit(str(error))


def _serve(settings: dict[str, Any]) -> None:
    root = Path(settings["root"])
    with until_a_signal(), ExitStack() as stack:
        chosen = settings["queue"]
        named = named_tokens(Path(chosen["tokens"])) if chosen["tokens"] else ()
        watch = stack.enter_context(serving(root, settings["host"], settings["port"], settings["per_rank"], named))
        watch.server.queue = _submissions(stack, root, chosen)
        note = {"pid": os.getpid(), "url": watch.server.url, "host": settings["host"]}
        note["prometheus"] = _prometheus(stack, root, watch.server.url, settings)
        write_whole(note_path(root), json.dumps(note))
        stack.callback(note_path(root).unlink, missing_ok=True)
        threading.Event().wait()


def _submissions(stack: ExitStack, root: Path, chosen: Mapping[str, Any]) -> Submissions:
    """The queue, on this machine or on a cluster that was there before."""
    rules, address = _rules(chosen), chosen["address"]
    if not address:
        return Submissions(stack.enter_context(queue_of(root, chosen["slots"], rules)), root, rules)
    room = stack.enter_context(ClusterRoom(address))
    queue = stack.enter_context(queue_of(root, 0, rules, room, address))
    return Submissions(queue, root, rules, address, room.shape)


def _rules(chosen: Mapping[str, Any]) -> Rules:
    return Rules(quotas=chosen["quotas"], preempts=chosen["preempts"], ageing_s=chosen["ageing_s"])


def _quotas(texts: Sequence[str]) -> dict[str, int]:
    """Of ``TEAM=SLOTS`` each. Raises ConfigError."""
    found: dict[str, int] = {}
    for text in texts:
        team, _, slots = text.rpartition("=")
        if not (team == OTHERS or NAME.fullmatch(team)) or not re.fullmatch(r"-?[0-9]{1,9}", slots):
            raise ConfigError("--quota", text, "is not TEAM=SLOTS", "Write e.g. --quota vision=16, or '*=4' for each other team.")
        if team in found:
            raise ConfigError("--quota", text, f"team {team} has {found[team]} already", "Give each team once.")
        found[team] = int(slots)
    return found


def _check_queue(chosen: Mapping[str, Any]) -> None:
    """Refuse what can never be, before anything is started. Raises ConfigError."""
    if chosen["tokens"]:
        named_tokens(Path(chosen["tokens"]))
    rules = _rules(chosen)
    most = chosen["slots"]
    if chosen["address"]:
        with ClusterRoom(chosen["address"]) as there:
            most = sum(room(node.resources, there.shape) for node in there.most())
    for team, slots in rules.quotas.items():
        if slots > most:
            reason = f"there are {most} slots in all, so that this can never be met"
            raise ConfigError("--quota", f"{team}={slots}", reason, f"Give {most} at most, or none where the team may have all.")


def _prometheus(stack: ExitStack, root: Path, url: str, settings: dict[str, Any]) -> str | None:
    """Its configuration, and where it runs, if it does. Without it the service goes on, with one warning."""
    from dashboards.metrics.files import write_prometheus
    from dashboards.metrics.prometheus import Prometheus
    from dashboards.metrics.rules import RUNBOOK

    folder = root / PRIVATE / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    configuration = write_prometheus(
        folder, urlsplit(url).netloc, settings["ray_targets"], settings["runbook"] or RUNBOOK, read_token_path(root, settings["host"])
    )
    if settings["prometheus_port"] is None:
        return None
    try:
        return stack.enter_context(Prometheus(folder, configuration, port=settings["prometheus_port"])).url
    except (ConfigError, RunFailed) as error:
        console.print(f"goes on without Prometheus: {error}")
        return None


def _report_status(root: Path) -> None:
    note = running(root)
    if note is None:
        raise ConfigError("--storage", str(root), "nothing is up for this folder", "Start it with fleet cluster up.")
    token = (root / PRIVATE / "token").read_text().strip()
    console.print(f"up, process {note['pid']}: [bold]{note['url']}/#token={token}[/]")
    if (read_token := read_token_path(root, note["host"])) is not None:
        console.print(f"only to look: {note['url']}/#token={read_token.read_text().strip()}")
    console.print(f"metrics {note['url']}/metrics; configuration for Prometheus in {root / PRIVATE / 'prometheus'}")
    log = (root / PRIVATE / "up.log").read_text(errors="replace").strip()
    console.print(f"Prometheus {note['prometheus']}" if note["prometheus"] else log or "Prometheus is not started: --with-prometheus")


def status(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under --storage: list its ranks instead.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="With RUN: print JSON instead of a table.")] = False,
    storage: Storage = RUNS,
    address: Annotated[str, typer.Option(help="List the runs of this Ray cluster instead: auto, or HOST:PORT.")] = "",
) -> None:
    """Show the service of this folder; or the ranks of RUN with their processes; or the runs of a cluster."""
    if name and address:
        raise ConfigError("--address", address, f"RUN = {name} is given, too", "Leave one of them out.")
    if json_ and not name:
        raise ConfigError("--json", "given", "it is about the ranks of a run, and none is named", "Name a run, or leave it out.")
    if name:
        _list_ranks(name, Path(storage), json_)
    elif address:
        cli_attach.print_runs(address)
    else:
        _report_status(Path(storage).absolute())


def _list_ranks(name: str, root: Path, json_: bool) -> None:
    """Of each slot of a run: who fills it, where, and as which process there."""
    from fleet.host.follow import Follower

    folder = looked_at(name, str(root))
    follower = Follower(folder / "journal.jsonl").read()
    check_there(folder)
    found = follower.slots()
    if json_:
        ranks = [dataclasses.asdict(one) for one in found]
        cli_print.write(json.dumps({"run": follower.started.run if follower.started is not None else "", "ranks": ranks}, indent=2))
        return
    rows = [(str(one.member), one.state, str(one.pid or ""), one.node[:12], one.cause) for one in found]
    cli_print.write(*cli_print.table(("rank", "state", "process", "node", "why it was lost"), rows))


def down(storage: Storage = RUNS) -> None:
    """Stop the service of this folder, and its Prometheus. Runs go on."""
    root = Path(storage).absolute()
    note = running(root)
    if note is None:
        raise ConfigError("--storage", storage, "nothing is up for this folder")
    os.kill(note["pid"], signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    while running(root) is not None:
        if time.monotonic() > deadline_s:
            raise RunFailed(f"process {note['pid']} did not stop within {STOP_S:g} s")
        time.sleep(0.05)
    console.print("down")
