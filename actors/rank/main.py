"""A rank process from its first line to its last. This module does not import Ray."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch

from actors.rank.current import within
from actors.rank.data.sampling import seed_all
from actors.rank.home import Home
from actors.rank.loop import Run
from actors.rank.membership.client import Client
from actors.rank.membership.lifeline import Lifeline, lifeline_path
from actors.rank.membership.process_group import StoreServer, warm_up
from actors.rank.state.saving import PartsPort
from actors.rank.telemetry.logs import RankLog
from actors.rank.telemetry.recorder import Recorder, ring_path
from actors.rank.telemetry.stacks import Stacks, stacks_path
from fleet.errors import Fenced, LoopError, RunOver
from fleet.host import secret, tls
from fleet.host.clock import now_us
from fleet.host.linux import use_one_arena
from fleet.host.rank_logs import log_path
from fleet.protocol.events import OutputDropped, Raised
from fleet.settings.run import HANGUP_S, RunSettings

OURS = (str(Path(__file__).parents[1]), os.sep + "ray" + os.sep)
LAST_WORDS_S = 10.0


def run_rank(
    train: Callable[[Run], None],
    settings: RunSettings,
    slot: int,
    node: str,
    folder: Path,
    host: str,
    parts: PartsPort,
    agent_path: str,
    home: Home | None = None,
    logs: Path | None = None,
) -> None:
    """Run ``train`` as one rank of a run. Returns when the run is over for this rank; leaves the process when it must not go on.

    Args:
        folder: the folder of this node's rings, which its agent reads, and of the run's secret.
        home: where the run's files belong.
        host: the address at which peers reach this process.
        logs: the folder for a file with this process's output; None: its output goes where it went before.
    """
    use_one_arena()
    secret.hold(secret.read(folder))
    tls.hold(settings.tls)
    token = uuid4().hex
    recorder = Recorder(ring_path(folder, token), now_us())
    torch.set_num_threads(settings.threads_per_rank)
    seed_all(settings.seed)
    store = StoreServer(host)
    client = Client(slot, token, node, agent_path, store.address, recorder, HANGUP_S)
    lifeline = Lifeline(lifeline_path(folder, node), token)
    stacks = Stacks(stacks_path(folder, token))
    client.on_inspect = stacks.write
    printed: RankLog | None = None
    try:
        client.start(settings.timeouts.start_s)
        if logs is not None:
            printed = RankLog(log_path(logs, client.protocol.member))
            client.on_beat, client.on_rehearsal = printed.limit, printed.rehearse
            printed.on_dropped = lambda dropped_bytes, why: client.say(OutputDropped(client.protocol.member, dropped_bytes, why))
        warm_up()
        run = Run(client, recorder, parts, settings, host, home)
        if home is not None and home.work is not None:
            os.chdir(home.work)
        with within(run):
            train(run)
        run.close()
    except RunOver:
        client.wait(lambda: client.protocol.released)
    except Fenced as error:
        _leave(f"fleet: slot {slot}: {error}")
    except BaseException as error:  # noqa: BLE001 - the rank reports any error to the coordinator
        _report(client, recorder, error)
    finally:
        stacks.close()
        lifeline.close()
        if printed is not None:
            printed.close()
        client.close()
        store.close()


def _report(client: Client, recorder: Recorder, error: BaseException) -> None:
    """Report the error of the user's code to the coordinator, and wait for its answer: the run is over, or this process is replaced."""
    protocol = client.protocol
    if protocol.released is not None:
        return
    if protocol.incarnation is None:
        _leave(f"fleet: slot {protocol.slot} could not join: {error!r}")
    where = recorder.where()
    mistake = isinstance(error, LoopError)
    message = str(error) if mistake else f"{type(error).__name__}: {error}"
    client.say(Raised(protocol.member, where.step, where.shard, message, user_traceback(error), mistake))
    try:
        client.wait(lambda: protocol.released, LAST_WORDS_S)
    except Fenced:
        _leave("fleet: replaced after an exception")
    if protocol.released is None:
        _leave(f"fleet: slot {protocol.slot} raised and was not heard")


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames of Fleet and Ray, and without torch's where Fleet refused a call."""
    trace = traceback.TracebackException.from_exception(error)
    ours = (*OURS, os.sep + "torch" + os.sep) if isinstance(error, LoopError) else OURS
    theirs = [frame for frame in trace.stack if not any(part in frame.filename for part in ours)]
    if theirs:
        trace.stack = traceback.StackSummary.from_list(theirs)
    return "".join(trace.format())


def _leave(message: str) -> None:
    """End the process at once: it may not touch files and memory that its replacement now owns."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)
