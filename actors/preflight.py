"""Measures a node before it trains: products, memory and network of this machine, and figures of its GPUs' driver."""

from __future__ import annotations

import csv
import multiprocessing
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from actors.rank.membership.process_group import Forming, StoreServer
from fleet.errors import FleetError
from fleet.host import secret
from fleet.ledger.health import MeasuredFigure

MATMUL_SIZE = {"cpu": 512, "cuda": 4096}
REPEATS = 5
MEMORY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
GATHER_BYTES = 16 << 20
GATHER_LIMIT_S = 60.0
PATTERNS = (0x55, 0xAA)
QUERIES = {
    "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected", ""),
    "remapped_rows.pending": ("remapped_pending", ""),
    "remapped_rows.failure": ("remapped_failed", ""),
    "clocks_event_reasons.hw_slowdown": ("throttled", ""),
    "temperature.gpu": ("temperature", "C"),
}
"""Fields of ``nvidia-smi --query-gpu`` -> (name of the figure, unit)."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")


def measure(fatal_xids: Iterable[int], devices: list[str] | None = None, gather: bool = True) -> list[MeasuredFigure]:
    """All figures of this machine. ``devices``: torch names; by default the host and each GPU. Some seconds."""
    found: list[MeasuredFigure] = []
    for device in devices if devices is not None else ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]:
        found += [*_matmul(device), *_memory(device)]
    return [*found, *(_gather() if gather else []), *_driver(), *_xids(_kernel_log(), frozenset(fatal_xids))]


def _where(device: str) -> str:
    return socket.gethostname() if device == "cpu" else f"{socket.gethostname()} {device}"


def _seconds(device: str, work: Callable[[], Any]) -> float:
    """The time of the quickest of ``REPEATS`` runs."""
    best = float("inf")
    for _ in range(REPEATS):
        _settle(device)
        begin_s = time.perf_counter()
        work()
        _settle(device)
        best = min(best, time.perf_counter() - begin_s)
    return best


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _matmul(device: str) -> list[MeasuredFigure]:
    """FLOP/s of a product, and how many repetitions differ in a bit. Its factors are whole numbers, so it is exact in any order."""
    size = MATMUL_SIZE[device.partition(":")[0]]
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-8, 8, (size, size), generator=generator).float() for _ in range(2))
    there = left.to(device), right.to(device)
    truth = (left.to(torch.int64) @ right.to(torch.int64)).float() if size <= 512 else None
    first = there[0] @ there[1]
    wrong = 0 if truth is None or torch.equal(first.cpu(), truth) else 1
    wrong += sum(not torch.equal(there[0] @ there[1], first) for _ in range(REPEATS))
    seconds = _seconds(device, lambda: there[0] @ there[1])
    return [
        MeasuredFigure("matmul", _where(device), 2 * size**3 / seconds, "FLOP/s"),
        MeasuredFigure("matmul_wrong", _where(device), wrong),
    ]


def _memory(device: str) -> list[MeasuredFigure]:
    """Bytes read and written a second by a copy, and how many bytes are wrong after writes of a pattern and its inverse."""
    size = MEMORY_BYTES[device.partition(":")[0]]
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    wrong = 0
    for pattern in PATTERNS:
        source.fill_(pattern)
        target.copy_(source)
        wrong += int((target != pattern).sum())
    seconds = _seconds(device, lambda: target.copy_(source))
    return [MeasuredFigure("memory", _where(device), 2 * size / seconds, "B/s"), MeasuredFigure("memory_wrong", _where(device), wrong)]


def _gather() -> list[MeasuredFigure]:
    """Two processes of this machine all-gather over gloo. Raises FleetError when they do not end in time."""
    context = multiprocessing.get_context("spawn")
    store, answers = StoreServer("127.0.0.1"), context.SimpleQueue()
    pair = [context.Process(target=secret.holding, args=(secret.held(), _gather_rank, rank, store.address, answers)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(GATHER_LIMIT_S)
    ended = all(process.exitcode == 0 for process in pair)
    for process in pair:
        process.kill()
        process.join()
    store.close()
    if not ended:
        raise FleetError(f"two processes of this machine could not all-gather within {GATHER_LIMIT_S:g} s")
    seconds, wrong = (list(column) for column in zip(*(answers.get() for _ in pair), strict=True))
    where = socket.gethostname()
    return [MeasuredFigure("gather", where, GATHER_BYTES / max(seconds), "B/s"), MeasuredFigure("gather_wrong", where, sum(wrong))]


def _gather_rank(rank: int, store: str, answers: Any) -> None:
    forming = Forming(
        store=store, generation=1, rank=rank, size=2, device=torch.device("cpu"), timeout_s=GATHER_LIMIT_S, operation_s=GATHER_LIMIT_S,
        host="127.0.0.1",
    )  # fmt: skip
    group = forming.wait()
    mine, all_of_them = torch.full((GATHER_BYTES,), rank + 1, dtype=torch.uint8), torch.zeros(2, GATHER_BYTES, dtype=torch.uint8)
    seconds = _seconds("cpu", lambda: group.all_gather(all_of_them, mine))
    wrong = sum(int((all_of_them[peer] != peer + 1).sum()) for peer in range(2))
    group.close()
    answers.put((seconds, wrong))


def _driver() -> list[MeasuredFigure]:
    """NVML's figures of each GPU, from ``nvidia-smi``; none without that program. Fields that a GPU does not have are left out."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, f"--query-gpu=index,{','.join(QUERIES)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    return read_driver(answer.stdout, socket.gethostname()) if answer.returncode == 0 else []


def read_driver(text: str, host: str) -> list[MeasuredFigure]:
    """``nvidia-smi``'s lines as figures: ``Active`` and ``Yes`` are 1."""
    words = {"Active": 1.0, "Yes": 1.0, "Not Active": 0.0, "No": 0.0}
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        for (name, unit), value in zip(QUERIES.values(), row[1:], strict=False):
            known = words.get(value, float(value) if value.replace(".", "", 1).isdigit() else None)
            if known is not None:
                found.append(MeasuredFigure(name, f"{host} cuda:{row[0]}", known, unit))
    return found


def _kernel_log() -> str:
    """The kernel's messages; empty where this user may not read them."""
    program = shutil.which("dmesg")
    if program is None:
        return ""
    answer = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout if answer.returncode == 0 else ""


def _xids(log: str, fatal: frozenset[int]) -> list[MeasuredFigure]:
    """How many XIDs of each GPU are in the kernel's log, by bus address; XIDs that end processes are counted separately."""
    counts: dict[tuple[str, str], int] = {}
    for bus, number in XID.findall(log):
        key = ("xid_fatal" if int(number) in fatal else "xid", f"{socket.gethostname()} {bus}")
        counts[key] = counts.get(key, 0) + 1
    return [MeasuredFigure(name, where, count) for (name, where), count in sorted(counts.items())]
