"""torchft with HSDP, for `mesh`: groups of ranks among which FSDP2 keeps a model in chunks, and torchft's public `Manager` between groups.

A group gathers and reduce-scatters among its members over gloo. The chunks of the gradients go through FSDP2's ``set_all_reduce_hook`` into
`Manager.allreduce`, as in torchft's own `fsdp_test.py`. Each rank of a group meets the rank of its number in the other groups. The times of
lighthouse and Manager are those of :mod:`benchmarks.peers.torchft_alone`. More choices are in torchft's favour:

- A supervisor restarts a group when one of its members ends, as torchelastic does, but at once: the others would wait for the lost one. It
  kills them, so that none of their heartbeats or open connections makes the other group wait.
- Ranks are forked off a process that has imported all, as Fleet's are in `mesh`: a start costs no imports.
- Each start of a group has a store of its own in the supervisor: no member finds the address of a Manager that is gone.
- A group takes each rank's chunks from the other group as plain tensors, from memory, by torchft's own HTTP transport. These chunks are the
  optimizer's, which stay in place while the forward gathers them.
- The quorum is found beside the forward, which is torchft's default. With ``use_async_quorum=False`` all train again a step sooner, with
  fewer samples lost, but stalls were longer in trials.
- Gradients are not clipped, which costs Fleet an exchange in each step.

Ranks write to no store, as in Fleet's part: groups that end together begin anew, and have not survived.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from benchmarks.device_ranks import SEED, SETTLED_STEPS, Text, recoveries
from benchmarks.harness import left_out
from benchmarks.mesh_ranks import cut
from benchmarks.peers.common import (
    Commit,
    EventLog,
    Kill,
    Line,
    LoggedRun,
    Settings,
    median_step_s,
    not_installed,
    rank_environment,
    samples_lost,
    steady_steps,
    wait_until,
)
from benchmarks.peers.torchft_alone import GLOO_TIMEOUT, keep, light, limits, note_exit, record
from fleet.simulation.rng import stream

NAME = "torchft_hsdp"
GROUPS = GROUP = 2
WORLD = GROUPS * GROUP
FULL_S, AFTER_STEPS = 60.0, 2
"""Seconds within which all ranks have to train, and steps after a kill that has been survived."""
CALL = "import sys; from benchmarks.peers import torchft_hsdp; torchft_hsdp.supervise(*sys.argv[1:])"


# ---- ranks -------------------------------------------------------------------------------------------------------------------------------


def supervise(workdir: str, given_json: str) -> None:
    """Process of the supervisor: lighthouse, stores, and groups that are started again. Ends on SIGTERM."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "error"}
    lighthouse = light("[::]:0")
    keep(Supervisor(Path(workdir), json.loads(given_json), lighthouse.address()))


class Supervisor:
    """Keeps all groups going."""

    def __init__(self, workdir: Path, given: Mapping[str, str], lighthouse: str) -> None:
        self._workdir, self._options, self._lighthouse = workdir, dict(given), lighthouse
        self._forked = get_context("forkserver")
        self._forked.set_forkserver_preload([__name__, "torchft", "torch._dynamo"])
        self._stores: list[dist.TCPStore] = []
        self._groups: dict[int, list[BaseProcess]] = {}

    def watch(self) -> None:
        for group in range(GROUPS):
            self._start(group)
        while True:
            ended = connection.wait([one.sentinel for ranks in self._groups.values() for one in ranks])
            for group in [group for group, ranks in self._groups.items() if any(one.sentinel in ended for one in ranks)]:
                self._end(group)
                self._start(group)

    def _start(self, group: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)  # others may still meet at an earlier one
        given = (str(self._workdir), self._options, self._lighthouse, store.port, group)
        self._groups[group] = [self._forked.Process(target=train_rank, args=(*given, rank), daemon=True) for rank in range(GROUP)]
        for one in self._groups[group]:
            one.start()

    def _end(self, group: int) -> None:
        for rank, one in enumerate(self._groups[group]):
            if one.exitcode is not None:
                note_exit(self._workdir, group * GROUP + rank, one.exitcode)
            one.kill()
        for one in self._groups[group]:
            one.join()

    def end(self) -> None:
        for group in self._groups:
            self._end(group)


def train_rank(workdir: str, given: Mapping[str, str], lighthouse: str, port: int, group: int, rank: int) -> None:
    """Process of a rank: a training loop as torchft's users write it, with a line in the event log for each step."""
    from torchft import Manager, ProcessGroupGloo

    _to_a_file(Path(workdir) / f"rank-{group * GROUP + rank}.txt")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=GROUP)
    model, optimizer = cut(given, init_device_mesh("cpu", (GROUP,)))
    state = Chunks(optimizer)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=state.load,
        state_dict=state.held,
        min_replica_size=1,
        replica_id=f"group_{group}",
        rank=rank,
        world_size=GROUP,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=lighthouse,
        **limits(),
    )
    _between_groups(model, manager)
    log, data = EventLog(Path(workdir) / "events", group * GROUP + rank), Text()
    samples, pause_s = int(given["samples"]), float(given["pause_s"])
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        first = (manager.current_step() * WORLD + group * GROUP + rank) * samples
        model.train()(default_collate([data[number] for number in range(first, first + samples)])).backward()
        taking_part = manager.is_participating()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        record(log, manager, committed, taking_part, samples, GROUP)
        time.sleep(pause_s)


def _to_a_file(path: Path) -> None:
    """Write all output of this process to a file from now on."""
    with path.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    logging.basicConfig(level=logging.WARNING)


def _between_groups(model: torch.nn.Module, manager: Any) -> None:
    """Sum the gradients of each unit of FSDP2 over the groups, behind its reduce-scatter. The Manager takes errors: the step fails."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: manager.allreduce(gradient).wait())


class Chunks:
    """A rank's part of parameters and of AdamW's state, as plain tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._state = optimizer.state
        self._parameters: list[torch.nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]

    def held(self) -> dict[str, Any]:
        """The tensors themselves: the Manager lets no step change them while they are sent."""
        known = [self._state[one] for one in self._parameters if one in self._state]
        state = [{key: _local(value) for key, value in one.items()} for one in known]
        return {"parameters": [_local(one) for one in self._parameters], "state": state}

    def load(self, found: Mapping[str, Any]) -> None:
        """Load the part of another rank with the same cut. Before the first step, AdamW has no state."""
        with torch.no_grad():
            for one, taken in zip(self._parameters, found["parameters"], strict=True):
                _local(one).copy_(taken)
        for one, state in zip(self._parameters, found["state"], strict=bool(found["state"])):
            self._state[one] = {key: _as(one, value) for key, value in state.items()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's state, cut like it; AdamW's count of steps has no dimensions."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride())


# ---- the run through kills ---------------------------------------------------------------------------------------------------------------


def measure(given: Mapping[str, str], count: int, pause_s: float, folder: Path) -> dict[str, Any]:
    """Figures, samples and notes of ``count`` kills, one member after the other, of a model as ``given``; a note where torchft cannot
    run."""
    missing = not_installed("torch", "torchft")
    if missing is not None:
        return {"settings": {}, "figures": {}, "samples": {}, "notes": [left_out(NAME, missing)]}
    command = [sys.executable, "-c", CALL, str(folder), json.dumps({**given, "pause_s": str(pause_s)})]
    run = LoggedRun(folder, Settings(world=WORLD), command, rank_environment())
    try:
        kills = _inject(run, count, pause_s)
        _full(run, kills)
    finally:
        run.stop()
    return _reported(run.commits(), run.lost_lines(), kills, WORLD * int(given["samples"]), errors(folder))


def _full(run: LoggedRun, kills: Sequence[Kill]) -> bool:
    """Wait until all ranks have trained for a few steps since the last kill; False: they did not in time."""
    since_s = kills[-1].t_s if kills else 0.0
    return wait_until(lambda: steady_steps(run, since_s, WORLD) >= SETTLED_STEPS, run, FULL_S)


def _inject(run: LoggedRun, count: int, pause_s: float) -> list[Kill]:
    """Kill ranks at random moments, as in Fleet's part. Raises RuntimeError when not all train at first."""
    draw, kills = stream(SEED, "device kills"), list[Kill]()
    while len(kills) < count and _full(run, kills):
        time.sleep(draw.random() * pause_s)
        kills.append(run.inject("kill", draw.choice(sorted(run.ranks()))))
    if not kills:
        raise RuntimeError(f"not all trained within {FULL_S:.0f} s: {run.failed() or 'still running'}")
    return kills


def survived(commits: Sequence[Commit], kill: Kill) -> bool:
    """Whether a member of another group, which trained at the kill, committed steps after it: else the state is lost."""
    before = [commit for commit in commits if commit.t_s <= kill.t_s][-1]
    others = {pid for slot, pid in before.members.items() if slot // GROUP != kill.slot // GROUP}
    return sum(commit.t_s > kill.t_s and bool(others & set(commit.members.values())) for commit in commits) >= AFTER_STEPS


def lost(commits: Sequence[Commit], kills: Sequence[Kill], batch: int) -> int:
    """Samples, since the first kill, of steps that were committed without a group, and of undone steps. Samples of a failed step are
    computed again in the next attempt, so that they cost time."""
    short = sum(batch - commit.samples for commit in commits if commit.t_s > kills[0].t_s)
    return short + samples_lost(commits, (), kills[0].t_s, float("inf"))


def errors(folder: Path) -> list[str]:
    """The ranks' errors with their counts, without addresses and advice."""
    lines = [line for path in sorted(folder.glob("rank-*.txt")) for line in path.read_text(errors="replace").splitlines()]
    raised = [re.sub(r"\[[^]]*\](:\d+)?", "", line).partition(". ")[0] for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return [f"{times} times {line}" for line, times in Counter(raised).items()]


def _reported(commits: Sequence[Commit], beside: Sequence[Line], kills: Sequence[Kill], batch: int, seen: Sequence[str]) -> dict[str, Any]:
    found = recoveries(commits, kills, WORLD)
    samples = {key.replace("fleet", f"{NAME}_kill"): values for key, values in found.items() if values}
    figures = {
        f"{NAME}_kills": len(kills),
        f"{NAME}_survived_ratio": statistics.fmean(survived(commits, kill) for kill in kills),
        **{f"{key}_median": statistics.median(values) for key, values in samples.items()},
        f"{NAME}_steps_lost_total": len({(line.epoch, line.step) for line in beside if line.kind == "drop" and line.t_s > kills[0].t_s}),
        f"{NAME}_samples_lost_total": lost(commits, kills, batch),
    }
    never = [left_out(f"{NAME}_kill_{key}", "not once") for key in ("stall_s", "full_again_s") if f"{NAME}_kill_{key}" not in samples]
    return {
        "settings": {},
        "figures": figures,
        "samples": samples,
        "notes": [f"{NAME}: median step {median_step_s(commits):.3f} s; {'; '.join(seen) or 'no error was reported'}", *never],
    }
