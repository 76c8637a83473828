"""`scrape`: the cost of being watched.

- scrape: summary and exposition of a run of 100,000 ranks, and of 10,000 with series of their own; the memory beside the fold.
- view change: time from the loss of a rank to the view without it, in real runs of four ranks, with and without scrapes.
- pages: 200 pages are open on a run that goes on. How long after a commit is written do they show it?
- open: a journal of 10 million recorded events (1 million with --quick), from its first byte and from the snapshot beside it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import requests
from prometheus_client import CollectorRegistry, generate_latest

from actors.rank.script_loading import load_train
from benchmarks import harness
from benchmarks.fold import STEP_CODES, STEP_US, write_journal
from benchmarks.harness import Form, left_out, on_the_way
from chaos.arrivals import save_trace
from chaos.settings import ChaosSettings
from dashboards.access import LOOPBACK, Access, Audit
from dashboards.feeds import RunFeeds
from dashboards.metrics.table import RunsCollector
from dashboards.server import WatchServer
from fleet.app import plans, recipes
from fleet.app.cluster.local import LocalCluster
from fleet.host.follow import Follower
from fleet.host.journal import JournalWriter, read_journal
from fleet.ledger.goodput import Ledger
from fleet.protocol.records import VERSION, Committed, ProcessLost, Record, RunStarted, Spans, ViewPublished
from fleet.protocol.types import Fault, Member, StateId, View
from fleet.settings.run import RunSettings

SCRAPERS = 4
FOR_EVER = aiohttp.ClientTimeout(total=None)
STEPS_PER_S = 22
"""Most steps a second of the scraped run."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts. Scraped runs have ``ranks`` ranks, or ``ranks_with_series`` with series of their own.

    Pages show ``commits`` commits with ``commit_gap_s`` between them. ``events`` are those of the opened journal. A real run trains by
    ``first_kill_s``, and is whole again ``kill_gap_s`` after a kill."""

    repetitions: int
    ranks: int
    ranks_with_series: int
    pages: int
    commits: int
    commit_gap_s: float
    events: int
    world: int
    kills: int
    first_kill_s: float
    kill_gap_s: float

    def run(self) -> RunSettings:
        """Settings of each real run, with the steps that fit until its last kill is over."""
        steps = int(STEPS_PER_S * (self.first_kill_s + self.kill_gap_s * self.kills))
        return RunSettings(world=self.world, shards=16, options={"steps": str(steps)})


FULL = Sizes(7, 100_000, 10_000, 200, 5, 2.0, 10_000_000, 4, 12, 8.0, 4.0)
QUICK = replace(FULL, repetitions=3, events=1_000_000, kills=5)
SMOKE = Sizes(1, 1_000, 100, 3, 1, 0.0, 20_000, 2, 1, 0.5, 4.0)


def measure(form: Form) -> dict[str, Any]:
    """Measure scrapes, pages and long journals, and whether a run notices."""
    sizes = form.of(FULL, QUICK, SMOKE)
    watchers = {"quiet": None, "scraped": _scrape, "paged": functools.partial(_look, pages=sizes.pages)}
    watched = form.of(tuple(watchers), tuple(watchers), ("scraped",))
    real = [f"a real run, {name}" for name in watched]
    way = on_the_way("scrape", ["many ranks", "series of each rank", "pages", "a long journal", *real])
    next(way)
    many = _scrapes(sizes.ranks, False, sizes.repetitions)
    next(way)
    per_rank = _scrapes(sizes.ranks_with_series, True, sizes.repetitions)
    next(way)
    pages = _pages(sizes)
    next(way)
    opened = _opened(sizes.events)
    samples = {"fleet_scrape_100k_ranks_s": many[0], "fleet_scrape_10k_per_rank_s": per_rank[0], "fleet_page_update_s": pages}
    with recipes.local_cluster(sizes.run()) as cluster:
        for name, _ in zip(watched, way, strict=True):
            samples[f"fleet_view_change_ms_{name}"] = _view_changes(cluster, sizes, watchers[name])
    figures = {name: statistics.median(values) for name, values in samples.items()}
    figures["fleet_page_update_s_max"] = max(pages)
    figures |= {"fleet_scrape_peak_bytes": float(max(many[1], per_rank[1])), **opened}
    size = f"{sizes.events:,} events ({FULL.events:,} in the full form), 100 a record"
    notes = [
        f"medians; the scrapers never pause; they, or the {sizes.pages} pages, run on idle cores beside the ranks",
        f"opened: a journal of {size}, and again from the snapshot of the first time",
        *(left_out(f"_ms_{name}", f"the {form} form has one real run") for name in watchers if name not in watched),
    ]
    return {"settings": {**vars(sizes), "scrapers": SCRAPERS}, "figures": figures, "samples": samples, "notes": notes}


def peak_of(work: Callable[[], object]) -> int:
    """Peak bytes of resident memory during ``work``, beyond those before it. Linux."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# ---- scrapes -----------------------------------------------------------------------------------------------------------------------------


def _large(world: int) -> Ledger:
    """A run of ``world`` ranks, twenty steps old."""
    members = tuple(Member(slot, 0) for slot in range(world))
    view = View(1, members, tuple((slot, slot + 1) for slot in range(world)), 0, (), StateId(0, 0), "127.0.0.1:1")
    records: list[Record] = [RunStarted(VERSION, "large", 0.0, 0.0, world, 0, world, "{}"), ViewPublished(view, 0.0, "start", False, ())]
    ledger = Ledger().apply_all(records)
    for member in members:
        ledger.apply(Spans(member, 1, 0, 0, 0, STEP_US * 20, STEP_CODES * 20))
    for step in range(1, 21):
        ledger.apply(Committed(StateId(0, step), step * sum(STEP_US) / 1e6))
    return ledger


def _scrapes(world: int, per_rank: bool, repetitions: int) -> tuple[list[float], int]:
    """Seconds of each scrape, and the bytes of one beside the fold."""
    ledger = _large(world)
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: [ledger.summary()], per_rank))
    peak = peak_of(lambda: generate_latest(registry))
    taken = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        text = generate_latest(registry)
        taken.append(time.perf_counter() - begin)
    if text.count(b"fleet_slot_seconds{") != (3 * world if per_rank else 0):
        raise AssertionError("the scrape lacks a series")
    return taken, peak


# ---- pages -------------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _server(root: Path) -> Iterator[WatchServer]:
    with RunFeeds(root) as feeds, WatchServer(feeds, Access("w" * 32, None, LOOPBACK), Audit(root / "audit")) as server:
        yield server


def _pages(sizes: Sizes) -> list[float]:
    """For each open page, the longest time from a commit's flush to the state that shows it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / "run" / "journal.jsonl"
        write_journal(path, 50_000, 100)
        text = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(text[:-1]))  # without its end: it goes on
        newest = max(record.state.step for record in read_journal(path) if isinstance(record, Committed))
        with _server(root) as server, closing(JournalWriter(path)) as writer:
            return asyncio.run(_update(server.url, writer, newest, sizes))


async def _update(url: str, writer: JournalWriter, newest: int, sizes: Sizes) -> list[float]:
    at_s: dict[int, float] = {}
    ready = asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**22) as session:
        pages = [asyncio.create_task(_page(session, url, ready, at_s, newest, newest + sizes.commits)) for _ in range(sizes.pages)]
        for _ in pages:
            await ready.acquire()
        for step in range(newest + 1, newest + sizes.commits + 1):
            writer.append(Committed(StateId(0, step), 1e6 + step))
            writer.flush()
            at_s[step] = time.perf_counter()
            await asyncio.sleep(sizes.commit_gap_s)
        return [await page for page in pages]


async def _page(
    session: aiohttp.ClientSession, url: str, ready: asyncio.Semaphore, at_s: dict[int, float], newest: int, last: int
) -> float:  # fmt: skip
    """The longest time from a commit to its state on one page."""
    worst, seen = 0.0, newest
    async with session.get(f"{url}/api/runs/run/events") as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            steps = json.loads(line[6:])["now"]["steps"]
            if steps == seen == newest:
                ready.release()
            worst = max([worst, *(time.perf_counter() - at_s[step] for step in range(seen + 1, steps + 1))])
            seen = max(seen, steps)
            if seen == last:
                return worst
    raise AssertionError("the stream ended")


# ---- long journals -----------------------------------------------------------------------------------------------------------------------


def _opened(events: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, events, 100)
        begin = time.perf_counter()
        peak = peak_of(lambda: Follower(path).read())
        first_s = time.perf_counter() - begin
        begin = time.perf_counter()
        follower = Follower(path)
        summary = follower.read().summary()
        again_s = time.perf_counter() - begin
        if summary is None or not summary.closes:
            raise AssertionError("the ledger does not close")
    return {"fleet_open_first_s": first_s, "fleet_open_again_s": again_s, "fleet_open_peak_bytes": float(peak)}


# ---- does a run notice? ------------------------------------------------------------------------------------------------------------------


def _view_changes(cluster: LocalCluster, sizes: Sizes, watching: Callable[[str], None] | None = None) -> list[float]:
    """Milliseconds from each loss to the view without the lost rank, in one real run. Meanwhile a process calls ``watching`` with the
    server's URL."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        faults = [
            Fault(f"kill-{number}", sizes.first_kill_s + sizes.kill_gap_s * number, "gpu", "kill_rank", slot=number % sizes.world)
            for number in range(sizes.kills)
        ]
        save_trace(faults, root / "trace.csv")
        script = str(Path(__file__).parents[1] / "examples" / "digits.py")
        chaos = ChaosSettings(trace=str(root / "trace.csv"))
        plan = plans.RunPlan(name="run", folder=root / "run", settings=sizes.run(), train=load_train(script), script=script, chaos=chaos)
        with _server(root) as server, _elsewhere(watching, server.url):
            result = recipes.LiveRun(plan, cluster).execute()
        if result.status != "completed":
            raise AssertionError(f"the run {result.status}: {result.reason}")
        return changes_ms(list(read_journal(plan.journal, spans=False)))


def changes_ms(records: list[Record]) -> list[float]:
    """Milliseconds from each loss of a rank in a view to the first view with the loss as its cause."""
    lost_s = {str(r.member): r.at_s for r in records if isinstance(r, ProcessLost) and r.generation >= 0}
    found = []
    for record in records:
        if isinstance(record, ViewPublished) and not record.graceful:
            found += [1e3 * (record.at_s - lost_s.pop(cause)) for cause in record.causes if cause in lost_s]
    return found


@contextmanager
def _elsewhere(work: Callable[[str], None] | None, url: str) -> Iterator[None]:
    """Repeat ``work`` in a process of its own meanwhile. As if on another machine, it only takes time that the run leaves idle."""
    if work is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=work, args=(url,), daemon=True)
    process.start()
    try:
        yield
        if not process.is_alive():
            raise AssertionError("the watching process has ended")
    finally:
        process.kill()
        process.join()


def _be_elsewhere() -> None:
    """Give the core to any other process that wants it, at once."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _scrape(url: str) -> None:
    """Scrape with several scrapers, without pause."""
    _be_elsewhere()
    with ThreadPoolExecutor(SCRAPERS) as pool:
        for done in [pool.submit(_scrape_for_ever, f"{url}/metrics") for _ in range(SCRAPERS)]:
            done.result()


def _scrape_for_ever(url: str) -> None:
    with requests.Session() as session:
        while True:
            session.get(url, timeout=60).raise_for_status()


def _look(url: str, pages: int) -> None:
    """Open many pages on the run as soon as it exists."""
    _be_elsewhere()
    asyncio.run(_look_for_ever(url, pages))


async def _look_for_ever(url: str, pages: int) -> None:
    async def page(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{url}/api/runs/run/events") as answer:
                async for _ in answer.content:
                    pass
            await asyncio.sleep(0.5)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**22, timeout=FOR_EVER) as session:
        await asyncio.gather(*[page(session) for _ in range(pages)])


if __name__ == "__main__":
    harness.run("scrape", measure)
