"""From ``commit()`` to ``optimizer.step()``: which calls of ours a gradient goes through, traced in a step of three ranks.

The way is what stands on the stack where a bucket is sent, where it is added up, where the sum is judged, and where the optimizer steps.
With fsdp gradients leave in the backward: there it is where ``commit()`` waits for them, where it takes their means, and where ranks vote.
``python -m tests.unit.test_way_of_a_step`` draws it anew in ``docs/step.md``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.rank.fsdp.exchange import Sender, Sums
from actors.rank.fsdp.layout import FsdpLayout
from actors.rank.fsdp.taken import mesh_of_one
from actors.rank.home import Home
from actors.rank.loop import Run
from actors.rank.membership.client import Client
from actors.rank.membership.process_group import Group
from actors.rank.membership.store import StoreServer
from actors.rank.state.saving import PartsPort
from actors.rank.step.layout import StateLayout
from actors.rank.step.reduction import Reducer
from actors.rank.step.step import Step
from actors.rank.tags import Tag, bucket_back, bucket_there
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.kept import KeptChunks
from fleet.host.clock import now_us
from fleet.protocol.events import Event, Ready
from fleet.protocol.instructions import Publish, Welcome
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings
from policies.placement import ranges
from tests.support.trains import Numbers, build, cut_of

ROOT = Path(__file__).parents[2]
PAGE, END = ROOT / "docs" / "step.md", "<!-- end -->"
WHOLE, FSDP = "none", "fsdp"
RANKS, SHARDS, BOUND_S = 3, 8, 120.0
BACKGROUND = "Group.in_background"
MOST_FILES, MOST_CALLS, MOST_MORE = 8, 10, 3
REDRAWN = "python -m tests.unit.test_way_of_a_step"
UNDRAWN = {"fleet/protocol/rank_machine.py", "fleet/protocol/vote.py"}
"""They decide, and have returned before what they have decided is carried out."""

Place = tuple[str, str]
"""(file, name of the function)."""


class Way:
    """Calls of one rank's, as (who calls, who is called), in the order in which they were first seen."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Place, Place], None] = {}
        self._on = threading.Event()
        self._thread = 0

    def begin(self) -> None:
        """From here on, and of the loop in this thread."""
        self._thread = threading.get_ident()
        self._on.set()

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def end(self, end: Place) -> None:
        """Nothing behind it belongs to the way."""
        self.come_to(end)
        self._on.clear()

    def come_to(self, end: Place) -> None:
        """All calls that have led to ``end``."""
        if not self._on.is_set():
            return
        place = end
        for above in _ours(sys._getframe(1)):
            self.calls.setdefault((above, place))
            place = above

    @property
    def files(self) -> set[str]:
        """Of all that is called or calls."""
        return {file for call in self.calls for file, _ in call if file}

    def drawn(self) -> str:
        """As a tree."""
        [root] = {above for above, _ in self.calls} - {below for _, below in self.calls}
        lines: list[str] = []

        def draw(place: Place, depth: int) -> None:
            lines.append(f"{'    ' * depth + place[1]:<48}{place[0].removeprefix('actors/rank/')}".rstrip())
            for above, below in self.calls:
                if above == place:
                    draw(below, depth + 1)

        draw(root, 0)
        return "\n".join(lines) + "\n"


def _ours(frame: FrameType | None) -> Iterator[Place]:
    """From the inside out, up to the commit. What runs in the background was handed over there, and its thread's own frames say nothing."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.parts[len(ROOT.parts)] in ("actors", "fleet"):
            place = str(file.relative_to(ROOT)), frame.f_code.co_qualname
            if threading.current_thread().name.startswith("fleet-group-") and place[0].startswith("actors/rank/membership/"):
                yield "actors/rank/membership/process_group.py", BACKGROUND
                return
            yield place
            if place[1] == Step.commit.__qualname__:
                return
        frame = frame.f_back


@contextmanager
def watched(way: Way) -> Iterator[None]:
    """Of view rank 0."""
    patch = pytest.MonkeyPatch()
    buckets = {bucket_there(number) for number in range(64)} | {bucket_back(number) for number in range(64)}

    def mark(kind: type, name: str, mine: Callable[..., bool]) -> None:
        original = getattr(kind, name)
        place = str(Path(original.__code__.co_filename).relative_to(ROOT)), original.__qualname__

        def marked(self: Any, *given: Any, **more: Any) -> Any:
            if mine(self, *given, **more):
                way.come_to((place[0], BACKGROUND) if name == "in_background" else place)
            return original(self, *given, **more)

        patch.setattr(kind, name, marked)

    mark(Group, "start", lambda group, sends, receives, tag=0: group.rank == 0 and tag in buckets)
    mark(Group, "in_background", lambda group, call: group.rank == 0)
    mark(Group, "all_gather", lambda group, out, inp, tag=0: group.rank == 0 and tag == Tag.READY)
    mark(Reducer, "add_up", lambda reducer, *given: reducer._group.rank == 0)
    mark(StateLayout, "word", lambda layout: layout.group.rank == 0)
    mark(KeptChunks, "word", lambda kept, group: group.rank == 0)
    mark(Sender, "flush", lambda sender: way.is_of_this_thread)
    mark(Sums, "means", lambda sums, divisor=1.0: way.is_of_this_thread)
    try:
        yield
    finally:
        patch.undo()


def taken(slot: int, view: View, settings: RunSettings, folder: Path, way: Way, built: Any, over: threading.Barrier) -> float:
    """One rank of a run without a coordinator takes one step: its loss."""
    recorder, ready = Recorder(folder / f"ring-{slot}", now_us()), threading.Event()
    client = Client(slot, f"token-{slot}", "node", str(folder / "nobody"), "nowhere:1", recorder)

    def say(*events: Event) -> None:
        with client.lock:
            said, client.protocol.outbox = [*client.protocol.outbox, *events], []
        if any(isinstance(event, Ready) for event in said):
            ready.set()

    def receive(message: Any) -> None:
        with client.lock:
            client.on_messages([message])
            client.changed.notify_all()

    client.say = say  # type: ignore[method-assign]
    home = Home(folder, is_twin=True, work=folder)
    run = Run(client, recorder, cast(PartsPort, SimpleNamespace()), settings, "127.0.0.1", home)
    receive(Welcome(slot, f"token-{slot}", 0))

    def publish() -> None:
        ready.wait(BOUND_S)
        receive(Publish(view))

    threading.Thread(target=publish, daemon=True).start()
    model, optimizer, _ = built
    if slot == 0:
        optimizer.register_step_pre_hook(lambda *given: way.end(("", "optimizer.step")))
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=2):
        for x, y in step.batches(Numbers(), batch_size=4 * SHARDS):
            step.backward((model(x) - y).square().mean())
        if slot == 0 and not run._loop.rehearsing:
            way.begin()
        if step.commit():
            break
    over.wait(BOUND_S)
    assert run._train_step is not None
    if isinstance(layout := run._train_step.layout, FsdpLayout):
        layout.close()
    for group in run._membership._groups.values():
        assert isinstance(group, Group)
        group.close()
    return step.loss


def _built(sharding: str) -> Any:
    mesh = SimpleNamespace(mesh=mesh_of_one(torch.device("cpu")), options={})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build(norm="layer", cut=cut_of(mesh) if sharding == FSDP else None)


def traced(sharding: str, folder: Path) -> tuple[Way, Sequence[float]]:
    """The way of rank 0, and what all ranks have come to."""
    way, store = Way(), StoreServer("127.0.0.1")
    view = View(1, tuple(Member(slot, 0) for slot in range(RANKS)), ranges(SHARDS, RANKS), 0, (), StateId(0, 0), store.address)
    settings = RunSettings(world=RANKS, shards=SHARDS, optimizer_sharding=sharding)
    folder.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have it: then there is another thread for what travels
    try:
        with watched(way), ThreadPoolExecutor(RANKS) as pool:
            over = threading.Barrier(RANKS)
            built = [_built(sharding) for _ in range(RANKS)]  # one after the other, as the ranks share the random generators
            done = pool.map(lambda slot: taken(slot, view, settings, folder, way, built[slot], over), range(RANKS), timeout=BOUND_S)
            return way, list(done)
    finally:
        torch.set_num_threads(threads)
        store.close()


def begin(sharding: str) -> str:
    """The line before what the page has of a layout."""
    return f"<!-- generated by tests/unit/test_way_of_a_step.py: {sharding} -->\n"


def on(page: str, sharding: str) -> str:
    start = page.index(begin(sharding)) + len(begin(sharding))
    return page[start : page.index(END, start)]


def drawn(way: Way) -> str:
    """As the page has it."""
    return f"```text\n{way.drawn()}```\n"


def drawn_beside(way: Way, other: Way) -> str:
    """With the files that are not on the other way."""
    return f"{drawn(way)}\nFiles that are not on the way above: {', '.join(f'`{file}`' for file in sorted(way.files - other.files))}.\n"


def test_a_gradient_goes_through_few_files_and_calls(tmp_path: Path) -> None:
    way, losses = traced(WHOLE, tmp_path)
    assert len(set(losses)) == 1
    assert len([call for call in way.calls if call[1][0]]) <= MOST_CALLS, way.drawn()
    assert len(way.files | UNDRAWN) <= MOST_FILES, way.files
    assert on(PAGE.read_text(), WHOLE) == drawn(way), REDRAWN


def test_parameters_that_are_spread_take_three_files_more(tmp_path: Path) -> None:
    (whole, _), (spread, losses) = (traced(sharding, tmp_path / sharding) for sharding in (WHOLE, FSDP))
    assert len(set(losses)) == 1
    assert len(spread.files - whole.files) <= MOST_MORE, spread.drawn()
    assert on(PAGE.read_text(), FSDP) == drawn_beside(spread, whole), REDRAWN


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        (found, _), (more, _) = (traced(sharding, Path(scratch) / sharding) for sharding in (WHOLE, FSDP))
    page = PAGE.read_text()
    for sharding, text in ((WHOLE, drawn(found)), (FSDP, drawn_beside(more, found))):
        page = page.replace(begin(sharding) + on(page, sharding), begin(sharding) + text)
    PAGE.write_text(page)
