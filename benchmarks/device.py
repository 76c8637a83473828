"""`device`: checks on a GPU: ranks that are killed, NCCL that is aborted, snapshots of a state there, and the device's own clock.

One CUDA device is enough, and Ray is not needed. :mod:`benchmarks.device_ranks`, :mod:`benchmarks.device_nccl` and
:mod:`benchmarks.device_snapshot` say which parts are real. Without a GPU nothing is measured, and no result is written; the smoke form then
runs the ranks alone, on the host's tensors.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import device_nccl, device_ranks, harness
from benchmarks.device_ranks import Sizes
from benchmarks.harness import Form, left_out, on_the_way

NOT_RUN, FAILED = "not run: no CUDA device", "failed:"


def measure(form: Form) -> dict[str, Any]:
    """Measure ranks on one GPU through kills with a twin, aborts of NCCL at world 1, snapshots, and CUDA events beside the clock."""
    there = torch.cuda.is_available()
    sizes = form.of(Sizes(4, 20, 450, 0.1, 256, 4), Sizes(4, 10, 250, 0.1, 256, 4), Sizes(2, 1, 60, 0.25, 64, 1))
    device = "cuda" if there else "cpu"
    work: dict[tuple[str, ...], Callable[[], dict[str, Any]]] = {
        ("fleet", "twin", "alone"): lambda: _ranks(sizes, device),
        ("cut",): lambda: _cut(replace(sizes, kills=sizes.kills // 2 or 1, cut=True), device),
    }
    if there:
        work[("nccl",)] = lambda: _nccl(form.of(6, 4, 1))
        work[("snapshot",)] = lambda: _snapshot(form.of(21, 21, 1), form.of(8, 5, 1))
    parts = [_part(names, work[names]) for names in on_the_way("device", work, ", ".join)]
    notes = [note for part in parts for note in part["notes"]] + (_gpu() if there else [])
    notes += [] if there else [left_out(what, NOT_RUN) for what in ("nccl", "snapshot", "events")]
    figures = {name: value for part in parts for name, value in part["figures"].items()}
    samples = {name: values for part in parts for name, values in part["samples"].items()}
    settings = {"device": torch.cuda.get_device_name() if there else "cpu", **vars(sizes)}
    return {"settings": settings, "figures": figures, "samples": samples, "notes": notes}


def _part(names: Sequence[str], do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``do``, or a note that it failed: results of other parts, which took minutes, are kept."""
    try:
        part = do()
    except Exception as error:  # noqa: BLE001 - the result and the exit code tell it
        traceback.print_exc()
        notes = [left_out(name, f"{FAILED} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") for name in names]
        part = {"figures": {}, "samples": {}, "notes": notes}
    print(json.dumps(part["figures"]), file=sys.stderr, flush=True)  # they stay when this program is stopped
    return part


def _ranks(sizes: Sizes, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        return device_ranks.measure(sizes, device, Path(folder))


def _cut(sizes: Sizes, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="device-cut-") as folder:
        return device_ranks.measure_cut(sizes, device, Path(folder))


def _nccl(rounds: int) -> dict[str, Any]:
    found = device_nccl.measure(rounds)
    figures = {f"{name}_median": statistics.median(values) for name, values in found["samples"].items()}
    if found["held"]:
        figures["nccl_held_ratio"] = statistics.fmean(found["held"])
    return {"figures": figures, "samples": found["samples"], "notes": found["notes"]}


def _snapshot(blocks: int, rounds: int) -> dict[str, Any]:
    from benchmarks import device_snapshot  # imported here: ranks, which are forked off this process, do not need it

    return device_snapshot.measure(blocks, rounds)


def _gpu() -> list[str]:
    """The GPU and the libraries of the figures, as notes."""
    found = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    size = f"{found.total_memory / 2**30:.0f} GiB"
    return [f"on one {found.name}, {size}, with CUDA {torch.version.cuda} and NCCL {nccl}; Ray was not there"]


def _as_rank() -> None:
    """Let torch ask the driver's library for GPUs: a process that has asked CUDA itself cannot fork any more."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    harness.as_rank("benchmarks.device")


def main() -> None:
    """Run the benchmark in the environment of a rank."""
    _as_rank()
    if not torch.cuda.is_available() and "--smoke" not in sys.argv:
        print(NOT_RUN)
        return
    result = harness.run("device", measure)
    if any(FAILED in note for note in result["notes"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
