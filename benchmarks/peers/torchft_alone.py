"""torchft by itself: a lighthouse, one replica group of one rank for each slot, and a supervisor that starts a dead rank again at once.

It follows torchft's public `train_ddp.py`: `Manager` with `min_replica_size=1`, its `Optimizer`, `ProcessGroupGloo(timeout=5 s)`. All
choices here are in its favour:

- Gradients go through the public `Manager.allreduce`, all in one buffer. With torchft 0.2.0's own `DistributedDataParallel`, a peer's death
  during `wait()` trips `assert fut._fut` in its hook (ddp.py:76), which ends survivors, too. ``BENCH_TORCHFT_DDP=1`` shows that.
- The stores through which replicas meet live in the supervisor, as torchelastic's agent store does, so that they outlive a killed rank.
- Heartbeats come every 25 ms, and a rank is dead after ``HEARTBEAT_TIMEOUT_MS`` (defaults: 100 ms and 5 s).
- The lighthouse looks every 10 ms (default 100 ms). It waits ``JOIN_TIMEOUT_MS`` at most (default 60 s) for ranks that beat but have not
  joined. A replacement builds everything before it makes its Manager, so none beats for long before it joins. The shorter of the two
  time-outs is most of a stall. With shorter ones, late ranks are left out of a quorum and have to take state again.
- The quorum may take 60 s, because a quorum that times out ends the process.
- The first participant writes a checkpoint every ``checkpoint_steps``, as for stock Ray, for the loss of all ranks.
- A survivor that crashes is started again like a killed one.

Newer torchft (0.3, the nightly) also takes PyTorch's own groups, of PyTorch 2.14. ``BENCH_TORCHFT_NATIVE=1`` runs `recovery` that way; all
slots' groups then meet in one more store of the supervisor. Otherwise the loop is the same for both versions.

A replacement is a fresh process, as under torchelastic. torchft's own spares (`WorldSizeMode.FIXED_WITH_SPARES`) compute every step and
stay out of the sum. ``BENCH_TORCHFT_SPARES=1`` runs `storm` that way.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.common import EventLog, LoggedRun, Settings, not_installed, rank_environment

HEARTBEAT_INTERVAL = timedelta(milliseconds=25)
HEARTBEAT_TIMEOUT_MS = int(os.environ.get("BENCH_TORCHFT_HEARTBEAT_TIMEOUT_MS", "150"))
QUORUM_TICK_MS = 10
LIGHTHOUSE_PORT = 29510
"""Port of the lighthouse on several hosts."""
JOIN_TIMEOUT_MS = int(os.environ.get("BENCH_TORCHFT_JOIN_TIMEOUT_MS", "100"))
LIGHTHOUSE = {
    "min_replicas": 1,
    "join_timeout_ms": JOIN_TIMEOUT_MS,
    "quorum_tick_ms": QUORUM_TICK_MS,
    "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS,
}
TIMEOUT = timedelta(seconds=10)
QUORUM_TIMEOUT = timedelta(seconds=60)
GLOO_TIMEOUT = timedelta(seconds=5)
COMMON_PORT, OF_ALL = "BENCH_TORCHFT_COMMON_PORT", -1
CALL = "import sys; from benchmarks.peers import torchft_alone; torchft_alone.{}(*sys.argv[1:])"


class TorchftAlone:
    name = "torchft"
    extra_faults: tuple[str, ...] = ()
    hang_timeout_s = 0.0

    def missing(self) -> str | None:
        return not_installed("torch", "torchft")

    def start(self, workdir: Path, settings: Settings) -> LoggedRun:
        command = [sys.executable, "-c", CALL.format("supervise"), str(workdir), settings.to_json()]
        return LoggedRun(workdir, settings, command, rank_environment())


SYSTEM = TorchftAlone()


def supervise(workdir: str, settings_json: str) -> None:
    """Process of the supervisor: lighthouse, stores, and ranks that are started again as soon as they end. Ends on SIGTERM."""
    settings = Settings.from_json(settings_json)
    lighthouse = light("[::]:0")
    slots = range(settings.world + spare_groups(settings))
    keep(Supervisor(Path(workdir), settings, lighthouse.address(), slots))


def light(bind: str) -> Any:
    """A lighthouse, which lives as long as the returned object."""
    from torchft.coordination import LighthouseServer

    return LighthouseServer(bind=bind, **LIGHTHOUSE)


class Keeper(Protocol):
    """Keeps ranks going."""

    def watch(self) -> None: ...

    def end(self) -> None: ...


def keep(supervisor: Keeper) -> None:
    """Let the supervisor watch until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        supervisor.watch()
    finally:
        supervisor.end()


class Supervisor:
    """Keeps the ranks of ``slots`` going; their stores are at ``address``."""

    def __init__(self, workdir: Path, settings: Settings, lighthouse: str, slots: Iterable[int], address: str = "127.0.0.1") -> None:
        self._workdir, self._settings, self._lighthouse = workdir, settings, lighthouse
        self._slots, self._address = slots, address
        self._stores: dict[int, Any] = {}
        self._ranks: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}

    def watch(self) -> None:
        for slot in self._slots:
            self._start(slot)
        while True:
            pid, status = os.waitpid(-1, 0)
            slot, _ = self._ranks.pop(pid)
            note_exit(self._workdir, slot, os.waitstatus_to_exitcode(status))
            self._start(slot)

    def _store(self, of: int) -> int:
        """Port of the store of a slot, or of all."""
        from torch.distributed import TCPStore

        if of not in self._stores:
            self._stores[of] = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return int(self._stores[of].port)

    def _start(self, slot: int) -> None:
        environment = {
            **os.environ,
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._store(slot)),
            COMMON_PORT: str(self._store(OF_ALL)),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
            "RUST_LOG": "error",
        }
        command = [sys.executable, "-c", CALL.format("train_rank"), str(self._workdir), self._settings.to_json(), str(slot)]
        with (self._workdir / f"rank-{slot}.txt").open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._ranks[process.pid] = (slot, process)

    def end(self) -> None:
        for _, process in self._ranks.values():
            process.kill()
        for _, process in self._ranks.values():
            process.wait()


def note_exit(workdir: Path, slot: int, code: int | None) -> None:
    """Write a line for a rank that ended, with its exit code."""
    with (workdir / "exits.txt").open("a") as exits:
        exits.write(f"{time.monotonic():.6f} {slot} {code}\n")


def light_the_head(address: str) -> None:
    """Process on the head of several hosts: the lighthouse, until SIGTERM."""
    held = light(f"{address}:{LIGHTHOUSE_PORT}")
    signal.sigwait([signal.SIGTERM])
    del held


def supervise_host(workdir: str, settings_json: str, head: str, address: str, slots: str) -> None:
    """Process on each other host, at ``address``: its ranks, whose ``slots`` are a list in JSON. Ends on SIGTERM."""
    Path(workdir).mkdir(parents=True, exist_ok=True)
    lighthouse = f"http://{head}:{LIGHTHOUSE_PORT}"
    keep(Supervisor(Path(workdir), Settings.from_json(settings_json), lighthouse, json.loads(slots), address))


def limits() -> dict[str, Any]:
    """The times of a Manager."""
    return {"timeout": TIMEOUT, "quorum_timeout": QUORUM_TIMEOUT, "connect_timeout": TIMEOUT, "heartbeat_interval": HEARTBEAT_INTERVAL}


def spare_groups(settings: Settings) -> int:
    return settings.spares if os.environ.get("BENCH_TORCHFT_SPARES") == "1" else 0


def train_rank(workdir: str, settings_json: str, slot_text: str) -> None:
    """Process of a rank: torchft's public training loop on the common workload, with a line in the event log for each step."""
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    from benchmarks.peers.workload import backward_share, build, share_of

    wrapped = os.environ.get("BENCH_TORCHFT_DDP") == "1"

    class RecordingManager(Manager):  # the optimizer wrapper does not hand on whether a step was committed
        committed = False

        def should_commit(self, timeout: timedelta | None = None) -> bool:
            self.committed = super().should_commit(timeout)
            return self.committed

    logging.basicConfig(level=logging.WARNING)
    slot, settings, checkpoint = int(slot_text), Settings.from_json(settings_json), Path(workdir) / "checkpoint.pt"
    model, adamw = build(settings)
    saved = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    log = EventLog(Path(workdir) / "events", slot)
    spares = spare_groups(settings)
    manager = RecordingManager(
        pg=native(slot) if os.environ.get("BENCH_TORCHFT_NATIVE") == "1" else ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=settings.world if spares else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
        replica_id=f"group_{slot}",
        rank=0,
        world_size=1,
        **limits(),
    )
    if saved is not None:
        load_state_dict(saved["user"])
        manager.load_state_dict(saved["manager"])
    ddp = DistributedDataParallel(manager, model) if wrapped else model
    optimizer = Optimizer(manager, adamw)
    while True:
        optimizer.zero_grad()
        backward_share(
            ddp, settings, manager.current_step(), share_of(settings, slot % settings.world), getattr(ddp, "no_sync", nullcontext)
        )
        if not wrapped:
            _average_gradients(manager, model)
        taking_part = manager.is_participating()
        optimizer.step()
        if taking_part or not manager.committed or not spares:
            record(log, manager, manager.committed, taking_part, settings.rank_samples)
        step = manager.current_step()
        if manager.committed and step % settings.checkpoint_steps == 0 and manager.participating_rank() == 0:
            torch.save({"user": state_dict(), "manager": manager.state_dict()}, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)


def native(slot: int) -> Any:
    """PyTorch's own group between replicas. Its first rank has to be another one in each."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ[COMMON_PORT]), is_master=False, wait_for_workers=False)
    group = dist.ProcessGroup(store, slot, slot + 1)
    gloo = dist.ProcessGroupGloo(store, slot, slot + 1, GLOO_TIMEOUT, enable_reconfigure=True)  # type: ignore[call-arg]
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def _average_gradients(manager: Any, model: Any) -> None:
    import torch

    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def record(log: EventLog, manager: Any, committed: bool, taking_part: bool, samples: int, ranks: int = 1) -> None:
    """Write the line of a step, in which each of a group's ``ranks`` had ``samples``. A rank that takes state is not ``taking_part``."""
    quorum = manager._quorum_id  # torchft has no public name for it; read only
    if not committed:
        log.write(manager.current_step() + 1, samples, "drop", quorum)
    elif taking_part:
        log.write(manager.current_step(), manager.num_participants() * ranks * samples, "commit", quorum)
    else:
        log.write(manager.current_step(), samples, "unused", quorum)
