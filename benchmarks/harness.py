"""One shape for all benchmarks: ``python -m benchmarks.NAME [--quick | --smoke] [--json FILE]`` prints a table and may write it as JSON.

All forms are the same code with other sizes. ``--smoke`` is for CI: it shows that a benchmark runs, and its figures say nothing of speed.
On its way each benchmark prints on standard error its current piece and the time left: :func:`on_the_way`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from actors.rank.environment import RANK_ENVIRONMENT

Result = dict[str, Any]
T = TypeVar("T")
VERSIONS_OF = ("torch", "ray", "torchft", "torchft-nightly", "nvidia-resiliency-ext", "mlsysim", "simpy", "numpy")


class Form(StrEnum):
    """How much a benchmark measures."""

    FULL = "full"
    QUICK = "quick"
    SMOKE = "smoke"

    def of(self, full: T, quick: T, smoke: T) -> T:
        """The size that belongs to this form."""
        return {Form.FULL: full, Form.QUICK: quick, Form.SMOKE: smoke}[self]


SMOKE_NOTE = "smoke form: the smallest sizes, once; it shows that the benchmark runs, and its figures say nothing of speed"


def left_out(what: str, why: str) -> str:
    """The note for figures with ``what`` in their names, which a result does not have."""
    return f"{what} left out: {why}"


def on_the_way(name: str, items: Iterable[T], said: Callable[[T], str] = str, now_s: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """The ``items`` of a benchmark's work, one by one. Before each, a line on standard error has its number, the count, and its words.

    From the second item on, the line also has the seconds so far, and an estimate of those left.

    Args:
        name: of the benchmark.
        said: an item in a few words.
        now_s: the clock, in seconds.
    """
    work, begin_s = list(items), now_s()
    for number, item in enumerate(work):
        took_s = now_s() - begin_s
        times = f" ({took_s:.0f} s so far, some {took_s / number * (len(work) - number):.0f} s left)" if number else ""
        print(f"{name}: {number + 1} of {len(work)}: {said(item)}{times}", file=sys.stderr, flush=True)
        yield item


@dataclass(frozen=True)
class Part:
    """A part of a benchmark.

    Attributes:
        work: name of each piece -> the function that does it.
        summarize: makes settings, figures, samples and notes of the pieces' results, by their names.
    """

    work: Mapping[str, Callable[[], Any]]
    summarize: Callable[[dict[str, Any]], Mapping[str, Any]]


def one_piece(what: str, do: Callable[[], Mapping[str, Any]]) -> Part:
    """A part that is one piece."""
    return Part({what: do}, lambda found: found[what])


class PartsFailedError(Exception):
    """Parts of a benchmark failed.

    Attributes:
        measured: the results of the other parts as one, with a note for each part that failed.
    """

    def __init__(self, message: str, measured: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.measured = measured


def in_parts(name: str, parts: Sequence[Part]) -> dict[str, Any]:
    """Do all pieces of all parts, one after the other, and return their results as one.

    Raises:
        PartsFailedError: a piece failed. Its traceback is on standard error, the rest of its part was left out, other parts were done.
    """
    found: list[dict[str, Any]] = [{} for _ in parts]
    failed: dict[int, str] = {}
    pieces = [(number, what, do) for number, part in enumerate(parts) for what, do in part.work.items()]
    for number, what, do in on_the_way(name, pieces, said=lambda piece: piece[1]):
        if number in failed:
            continue
        try:
            found[number][what] = do()
        except Exception as error:  # noqa: BLE001 - raised below, when the other parts are done
            traceback.print_exc()
            failed[number] = f"a part failed at {what!r} and has no figures: {type(error).__name__}: {error}"
    measured = together(
        part.summarize(given) for number, (part, given) in enumerate(zip(parts, found, strict=True)) if number not in failed
    )
    if failed:
        measured["notes"] += failed.values()
        raise PartsFailedError(f"benchmark {name}: {'; '.join(failed.values())}", measured)
    return measured


def machine() -> Result:
    """Cores that this process may use, the name of the processor, and bytes of memory."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def stolen() -> tuple[int, int]:
    """(ticks that the hypervisor gave to others, all ticks) of this machine's processors since it started; zeros where not known."""
    lines = Path("/proc/stat").read_text().splitlines() if Path("/proc/stat").exists() else []
    ticks = [int(word) for word in lines[0].split()[1:9]] if lines else [0] * 8
    return ticks[7], sum(ticks)


def stolen_note(before: tuple[int, int], after: tuple[int, int]) -> list[str]:
    """A note for a machine that is shared with others: its wall-clock times depend on them."""
    share = (after[0] - before[0]) / max(1, after[1] - before[1])
    return [f"others on the same host took {share:.0%} of this machine's processor time meanwhile"] if share >= 0.01 else []


def versions() -> dict[str, str]:
    """Versions of Python, and of the compared packages that are installed."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_rank(module: str) -> None:
    """Start this process again in a rank's environment, which counts only from the start. ``module``: as in ``python -m``."""
    if any(os.environ.get(name) != value for name, value in RANK_ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **RANK_ENVIRONMENT})


def complete(name: str, measured: Mapping[str, Any]) -> Result:
    """``settings``, ``figures``, ``samples`` and ``notes`` of a benchmark, with the machine and the versions."""
    parts = {"settings": {}, "figures": {}, "samples": {}, "notes": []}
    unknown = set(measured) - set(parts)
    if unknown:
        raise ValueError(f"benchmark {name} gives {sorted(unknown)}; the shape is {sorted(parts)}")
    return {"benchmark": name, "machine": machine(), "versions": versions(), **parts, **measured}


def together(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several measures as one."""
    whole: dict[str, Any] = {"settings": {}, "figures": {}, "samples": {}, "notes": []}
    for part in parts:
        for name in ("settings", "figures", "samples"):
            whole[name] |= part[name]
        whole["notes"] += part["notes"]
    return whole


def show(result: Result) -> None:
    table = Table(title=f"{result['benchmark']} ({result['machine']['cores']} cores, {result['machine']['cpu']})")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in result["figures"].items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", markup=False)


def run(name: str, measure: Callable[[Form], Mapping[str, Any]], argv: list[str] | None = None) -> Result:
    """The command line of benchmark ``name``; ``measure(form)`` does the work. Where a part failed, it writes the results of the others."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=measure.__doc__)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--quick", dest="form", action="store_const", const=Form.QUICK, help="fewer repetitions; ends within 5 minutes")
    forms.add_argument("--smoke", dest="form", action="store_const", const=Form.SMOKE, help="the smallest sizes, once; ends in seconds")
    parser.set_defaults(form=Form.FULL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(argv)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    before = stolen()
    failed: PartsFailedError | None = None
    try:
        measured = measure(options.form)
    except PartsFailedError as error:
        failed, measured = error, error.measured
    result = complete(name, measured)
    result["settings"] = {"form": options.form, **result["settings"]}
    smoke = [SMOKE_NOTE] if options.form == Form.SMOKE else []
    result["notes"] = [*result["notes"], *smoke, *stolen_note(before, stolen())]
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if failed is not None:
        raise failed
    return result
