"""For `device`: several ranks on one GPU, or on the host where there is none, trained through kills without Ray.

The coordinator with its decision core and journal, an agent for each of two nodes, and the ranks are real. Ranks are processes with the
protocol, the process group and transfers of the state. They keep copies in the other node's memory and durable checkpoints, all over
sockets of this machine. Ray is not there: coordinator and agents live in one process, which also replaces killed processes, as Ray Train
would. All ranks share one GPU, so they exchange by gloo over pinned host memory. A kill is SIGKILL to a rank, by its pid.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from actors.rank.fsdp.taken import mesh_of_one
from benchmarks.peers.common import Commit, EventLog, Kill, Timeline, full_again, median_step_s, samples_lost, stall_s
from benchmarks.peers.fleet_run import generous
from fleet.ledger.goodput import Ledger
from fleet.machine.candidates import spares_inside
from fleet.machine.roster import RankPhase
from fleet.protocol.events import StepsTimed
from fleet.protocol.levels import STORE
from fleet.protocol.records import REFORM, RESTORE, CheckpointRecord, ProcessLost, ProcessUp, Spans
from fleet.protocol.types import Member
from fleet.settings.run import CheckpointSettings, RunSettings, Timeouts
from fleet.simulation.rng import derive_seed, stream
from tests.support.plain import FORKED, PRELOADED, PlainFleet

SEED, SHARDS, BATCH, CONTEXT, HEADS, BYTES = 7, 8, 64, 64, 4, 256
SETTLED_STEPS = 3
"""Steps at full world before the next kill."""
REPLACED_S, RUN_S = 120.0, 1200.0
STORE_S, PEERS_S = 5.0, 3.0
"""Seconds between durable checkpoints, and between copies in the other node's memory."""
WARM_STEPS = 10

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run. While ranks are killed, each step waits ``pause_s``, so that steps are left for all ``kills``. With ``cut``,
    ``fully_shard`` cuts the model: ranks hold chunks in the run with kills, and the whole model in the run without."""

    world: int
    kills: int
    steps: int
    pause_s: float
    width: int
    layers: int
    cut: bool = False


class Text(torch.utils.data.Dataset[Tensor]):
    """Sample ``i`` is a pure function of ``i``: bytes in which each follows from the one before, but for some noise."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        draw = torch.Generator().manual_seed(derive_seed(SEED, "text", index))
        steps = torch.randint(3, (CONTEXT + 1,), generator=draw)
        return (index + steps.cumsum(0)) % BYTES


class Block(nn.Module):
    """Attention and two linear layers, with dropout: the device's random numbers, too, have to be the same in both runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.after(x)))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss."""
        found = self.blocks(self.token(text[:, :-1]) + self.place.weight)
        return nn.functional.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())


class Walls:
    """Writes for each committed step the time of its shards by the clock. They are timed only in runs without kills: to wait for the device
    after each shard takes time itself."""

    def __init__(self, folder: Path, slot: int, device: torch.device, timed: bool) -> None:
        self._file = (folder / f"walls-{slot}").open("a", buffering=1) if timed else None
        self._device, self._spent_s = device, 0.0

    @contextmanager
    def shard(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        if self._file is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._spent_s += time.perf_counter() - begin_s

    def step(self, number: int, committed: bool) -> None:
        if self._file is not None and committed:
            self._file.write(f"{number} {self._spent_s * 1e3}\n")
        self._spent_s = 0.0


def train(run: Any) -> None:
    """A user's train function. It asks for torch's deterministic kernels: Fleet sums in a fixed order, and cannot mend a kernel."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    options, folder = run.options, Path(run.options["folder"])
    device = torch.device(options["device"])
    model = Transformer(int(options["width"]), int(options["layers"])).to(device)
    for part in (*(one for one in model.modules() if isinstance(one, Block)), model) if options["cut"] else ():
        fully_shard(part, mesh=mesh_of_one(device))
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    log, calm = EventLog(folder / "events", run.slot), folder / "calm"
    walls = Walls(folder, run.slot, device, timed=options["pause_s"] == "0")
    for step in run.steps(state, total=int(options["steps"]), clip_norm=1.0):
        for text in step.batches(Text(), batch_size=BATCH):
            with walls.shard():
                step.backward(model.train()(text.to(device)))
        if options["pause_s"] != "0" and not calm.exists():
            time.sleep(float(options["pause_s"]))
        committed = step.commit()
        walls.step(step.number, committed)
        if committed:
            log.write(step.number, BATCH, "commit", run.generation)


class Fleet(PlainFleet):
    """Also keeps the agents' reports of steps: (slot, step) -> milliseconds of the shards, by the device's own events."""

    def __init__(self, settings: RunSettings, folder: Path, trains: Callable[[Any], None]) -> None:
        super().__init__(trains, settings, folder)
        self.timed_ms: dict[tuple[int, int], float] = {}

    async def start_coordinator(self, port: int) -> int:
        listening = await super().start_coordinator(port)
        machine = self.coordinator.machine
        handle = machine.handle

        def observed(event: Any, now_s: float) -> Any:
            if isinstance(event, StepsTimed):
                self._note(event)
            return handle(event, now_s)

        machine.handle = observed  # type: ignore[method-assign]
        return listening

    def _note(self, report: StepsTimed) -> None:
        for rank in report.ranks:
            for step, us in zip(rank.steps, rank.compute_us, strict=True):
                self.timed_ms[rank.member.slot, step] = us / 1e3

    def joined(self) -> dict[int, int]:
        """Slot -> pid of the ranks that compute shards."""
        return {member.slot: process.pid for member, process, joined in self.census() if joined}

    def whole(self, without: set[int]) -> bool:
        """Whether the world is full, without a process of ``without``, and all spares are ready: in the view, where they keep a part."""
        joined, machine = self.joined().values(), self.coordinator.machine.state
        ranks, waits = machine.roster.in_order(), self.settings.group > 1
        if machine.view is None or len(machine.view.spares) < spares_inside(machine):
            return False
        # A spare waits for its coordinate, and builds its model then.
        ready = [rank for rank in ranks if rank.phase is not RankPhase.STARTING or (waits and not rank.member.coordinate)]
        return len(joined) == self.settings.world and not without & set(joined) and len(ready) == self.settings.slots


@dataclass
class Ran:
    """The end of one run, and its ranks' logs."""

    status: str
    digest: str
    kills: list[Kill]
    records: list[Any]
    timeline: Timeline
    timed_ms: dict[tuple[int, int], float]
    walls_ms: dict[tuple[int, int], float]


def settings_of(sizes: Sizes, world: int, kills: int, device: str, folder: Path) -> RunSettings:
    """Settings of a run on ``world`` ranks. Kills come from outside and are unknown to the run, so its budgets have to leave room for
    them."""
    pause = str(sizes.pause_s) if kills else "0"
    given = {"device": device, "folder": str(folder), "steps": str(sizes.steps), "pause_s": pause}
    shape = {"width": str(sizes.width), "layers": str(sizes.layers), "cut": "yes" if sizes.cut else ""}
    copies = CheckpointSettings(policy="fixed", interval_s=STORE_S, peer_interval_s=PEERS_S)
    return RunSettings(
        world=world, nodes=2, shards=SHARDS, seed=SEED, options=given | shape, budgets=generous(), checkpoint=copies, timeouts=Timeouts(),
        optimizer_sharding="fsdp" if sizes.cut and kills else "none",
    )  # fmt: skip


def run(sizes: Sizes, world: int, kills: int, device: str, folder: Path) -> Ran:
    """Train to the end, through ``kills``. Raises TimeoutError when the run, or a replacement, takes too long."""
    return through(settings_of(sizes, world, kills, device, folder), folder, train, kills, sizes.pause_s)


def through(settings: RunSettings, folder: Path, trains: Callable[[Any], None], kills: int, pause_s: float) -> Ran:
    """Train with any train function, of this or of a preloaded module, through kills; see :func:`run`."""
    FORKED.set_forkserver_preload([*PRELOADED, __name__])
    folder.mkdir()
    with Fleet(settings, folder, trains) as fleet:
        killed = _kill(fleet, kills, pause_s)
        (folder / "calm").touch()
        outcome = fleet.wait(RUN_S)
        ended = fleet.coordinator.machine.state.ending.record
        digest = ended.digest if ended is not None else ""
        return Ran(outcome.status, digest, killed, fleet.records(), Timeline(folder / "events"), fleet.timed_ms, _walls(folder))


def _kill(fleet: Fleet, kills: int, pause_s: float) -> list[Kill]:
    """Kill training ranks at random moments until the run is over, each after the last one was replaced."""
    draw, killed = stream(SEED, "device kills"), list[Kill]()
    while _whole_again(fleet, killed) and len(killed) < kills:
        time.sleep(draw.random() * pause_s)
        slot, pid = draw.choice(sorted(fleet.joined().items()))
        killed.append(Kill(time.monotonic(), slot, pid))
        os.kill(pid, signal.SIGKILL)
    return killed


def _whole_again(fleet: Fleet, killed: Sequence[Kill]) -> bool:
    """Wait until the full world has trained for a few steps; False: the run was over before that."""
    dead = {kill.pid for kill in killed}
    fleet.wait_for(lambda: fleet.ended.done() or fleet.whole(dead), REPLACED_S)
    since = fleet.step
    fleet.wait_for(lambda: fleet.ended.done() or fleet.step >= since + SETTLED_STEPS, REPLACED_S)
    return not fleet.ended.done()


def _walls(folder: Path) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for path in folder.glob("walls-*"):
        for line in path.read_text().splitlines():
            step, wall_ms = line.split()
            found[int(path.name.partition("-")[2]), int(step)] = float(wall_ms)
    return found


def recoveries(commits: Sequence[Commit], kills: Sequence[Kill], world: int) -> Samples:
    """Samples of each kill: the gap between commits around it, less the median step until the last kill; and when all trained again."""
    step_s = median_step_s([commit for commit in commits if commit.t_s <= kills[-1].t_s])
    stalls = [stall_s(commits, kill.t_s, step_s) for kill in kills]
    whole = [(full_again(commits, kill, world), kill) for kill in kills]
    return {
        "fleet_stall_s": [stall for stall in stalls if stall is not None],
        "fleet_full_again_s": [commits[index].t_s - kill.t_s for index, kill in whole if index is not None],
    }


def changes_s(records: Sequence[Any], commits: Sequence[Commit], kills: Sequence[Kill]) -> list[float]:
    """Seconds that each change of view took the rank that came to it last. The others wait for that rank, which ends its shard first."""
    spans, found = [record for record in records if isinstance(record, Spans)], []
    for kill in kills:
        until_s, took_s = min((commit.t_s for commit in commits if commit.t_s > kill.t_s), default=kill.t_s), Counter[Member]()
        for span in spans:
            at_us = span.start_us
            for lasts_us, code in zip(span.durations_us, span.codes, strict=True):
                if code in (REFORM, RESTORE):
                    took_s[span.member] += max(0.0, min(until_s, (at_us + lasts_us) / 1e6) - max(kill.t_s, at_us / 1e6))
                at_us += lasts_us
        found += [min(each for each in took_s.values() if each)] if any(took_s.values()) else []
    return found


def noticed_s(records: Sequence[Any], kills: Sequence[Kill]) -> list[float]:
    """Seconds from each kill until its node's agent knew. Kills have their times from the run's clock."""
    pids = {record.member: record.process.pid for record in records if isinstance(record, ProcessUp)}
    lost_s = {pids[record.member]: record.at_s for record in records if isinstance(record, ProcessLost)}
    return [lost_s[kill.pid] - kill.t_s for kill in kills if kill.pid in lost_s]


def figures(injected: Ran, twins: dict[str, Ran], commits: Sequence[Commit], samples: Samples) -> dict[str, float]:
    """Figures of the run through kills. A kill was survived when at least two steps were committed after it."""
    survived = [sum(commit.t_s > kill.t_s for commit in commits) >= 2 for kill in injected.kills]
    durable = [one for one in injected.records if isinstance(one, CheckpointRecord) and one.phase == "durable"]
    counted = Ledger().apply_all(injected.records).summary().samples
    if counted is None:
        raise ValueError("the journal has no record of the run's data")
    alike = [injected.status == "completed" and injected.digest == twin.digest != "" for twin in twins.values()]
    return {
        "fleet_kills": len(injected.kills),
        "fleet_survived_ratio": statistics.fmean(survived),
        "fleet_bit_identical_ratio": statistics.fmean(alike),
        "fleet_stall_s_median": statistics.median(samples["fleet_stall_s"]),
        "fleet_stall_s_max": max(samples["fleet_stall_s"]),
        "fleet_noticed_s_median": statistics.median(samples["fleet_noticed_s"]),
        "fleet_full_again_s_median": statistics.median(samples["fleet_full_again_s"]),
        "fleet_samples_lost_total": samples_lost(commits, injected.timeline.lost_lines, 0.0, float("inf")),
        "fleet_ledger_samples_lost_total": counted.skipped + counted.repeated + counted.taken_back,
        "fleet_durable_checkpoints": sum(one.level == STORE for one in durable),
        "fleet_peer_checkpoints": sum(one.level != STORE for one in durable),
        **{f"{name}_step_ms_median": median_step_s(twin.timeline.commits()) * 1e3 for name, twin in twins.items()},
    }


def events_against_walls(alone: Ran, samples: Samples) -> dict[str, float]:
    """Milliseconds of a step's shards by the device's events, as agents reported them, beside the clock's, for a rank with all shards."""
    both = [(ms, alone.walls_ms[at]) for at, ms in sorted(alone.timed_ms.items()) if at[1] >= WARM_STEPS and at in alone.walls_ms]
    samples["fleet_events_step_ms"], samples["fleet_events_wall_ms"] = ([pair[side] for pair in both] for side in (0, 1))
    return {
        "fleet_events_step_ms_median": statistics.median(samples["fleet_events_step_ms"]),
        "fleet_events_wall_ms_median": statistics.median(samples["fleet_events_wall_ms"]),
        "fleet_events_over_wall_ratio": statistics.median(ms / wall_ms for ms, wall_ms in both),
    }


def measure_cut(sizes: Sizes, device: str, folder: Path) -> dict[str, Any]:
    """Measure a model in chunks through kills, beside a single rank that has the whole model."""
    injected, whole = run(sizes, sizes.world, sizes.kills, device, folder / "struck"), run(sizes, 1, 0, device, folder / "whole")
    commits = injected.timeline.commits()
    samples = {name.replace("fleet_", "fleet_cut_"): values for name, values in recoveries(commits, injected.kills, sizes.world).items()}
    stalls = samples["fleet_cut_stall_s"]
    note = f"cut: {injected.status} with {injected.digest[:16]}, whole on one rank: {whole.status} with {whole.digest[:16]}"
    return {
        "figures": {
            "fleet_cut_kills": len(injected.kills),
            "fleet_cut_bit_identical": float(injected.status == "completed" and injected.digest == whole.digest != ""),
            "fleet_cut_stall_s_median": statistics.median(stalls) if stalls else float("nan"),
            "fleet_cut_samples_lost_total": samples_lost(commits, injected.timeline.lost_lines, 0.0, float("inf")),
        },
        "samples": samples,
        "notes": [note],
    }


def measure(sizes: Sizes, device: str, folder: Path) -> dict[str, Any]:
    """The run through kills, its twin of the same world, and one of a single rank: figures, samples, notes."""
    injected = run(sizes, sizes.world, sizes.kills, device, folder / "struck")
    twins = {"twin": run(sizes, sizes.world, 0, device, folder / "twin"), "alone": run(sizes, 1, 0, device, folder / "alone")}
    commits = injected.timeline.commits()
    samples = recoveries(commits, injected.kills, sizes.world) | {"fleet_noticed_s": noticed_s(injected.records, injected.kills)}
    found = figures(injected, twins, commits, samples)
    if device == "cuda":
        found |= events_against_walls(twins["alone"], samples)
    parameters = sum(one.numel() for one in Transformer(sizes.width, sizes.layers).parameters())
    ends = ", ".join(f"{name} {one.status} with {one.digest[:16]}" for name, one in {"struck": injected, **twins}.items())
    note = f"{sizes.world} processes on one {device} device, {sizes.steps} steps of a transformer of {parameters:,} parameters: {ends}"
    return {"figures": found, "samples": samples, "notes": [note]}
