"""One run, one record: processes that race for a run, in any interleaving of what they ask of its store."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.protocol import holding
from fleet.protocol.holding import Holder, RunClaim, SaveEntry, Stamp, TakenOver

RUNS = 200
KILLED = "killed"
MOST_STEPS = 3_000


def holder(pid: int) -> Holder:
    return Holder("host", pid, 1, "boot", "space", "", "2026-01-01 00:00:00 UTC", str(pid))


class World:
    """A store of which each operation happens at once, and a clock that goes on while somebody waits."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.now_s = 0.0
        self.alive: set[int] = set()
        self.seen: set[int] = set()
        self.put_by: list[tuple[int, int]] = []
        """(epoch of the manifest, the newest epoch that was held when it was put)."""
        self.holds: dict[int, int] = {}
        """Epoch -> process."""

    def answer(self, ask: holding.Ask, epoch: int) -> Any:
        match ask:
            case holding.Names():
                return list(self.files)
            case holding.Read(name=name):
                return self.files.get(name)
            case holding.Create(name=name, data=data):
                return self.files.setdefault(name, data) is data
            case holding.Note(name=name, data=data):
                self.files[name] = data
            case holding.Remove(name=name):
                self.files.pop(name, None)
            case holding.Empty(checkpoint=checkpoint):
                self.manifests.setdefault(checkpoint, b"")
            case holding.Put(checkpoint=checkpoint):
                return self._put(checkpoint, epoch)
            case holding.AskLives(holder=who):
                return who.pid in self.alive if who.pid in self.seen else None
            case holding.Pause():
                self.now_s += 1.0
                return self.now_s
        return None

    def _put(self, checkpoint: str, epoch: int) -> bool:
        if checkpoint in self.manifests:
            return False
        self.manifests[checkpoint] = str(epoch).encode()
        self.put_by.append((epoch, max(self.holds)))
        return True


class Process:
    """Takes the run and saves, until it is killed, refused or fenced."""

    def __init__(self, world: World, pid: int, take: bool) -> None:
        self.world, self.pid, self.epoch, self.ended, self.saved = world, pid, -1, "", 0
        self.steps = 0
        world.alive.add(pid)
        self._steps = self._live(take)
        self._ask: holding.Ask | None = next(self._steps)

    def _live(self, take: bool) -> Generator[holding.Ask, Any, None]:
        seen = yield from holding.watching(take)
        tenure = yield from holding.claiming(holder(self.pid), seen)
        assert tenure.epoch not in self.world.holds, "two processes have the same epoch"
        self.epoch, self.world.holds[tenure.epoch] = tenure.epoch, self.pid
        saves = holding.Saves(tenure)
        for number in range(6):
            yield from holding.renewing(tenure, Stamp(number))
            yield from saves.saving(f"{self.pid}-{number}")
            self.saved += 1
            if number == 2:
                saves = holding.Saves(tenure)  # its coordinator was started again
        yield from holding.renewing(tenure, Stamp(99, over=True))

    def step(self) -> None:
        assert self._ask is not None
        self.steps += 1
        assert self.steps < MOST_STEPS, f"process {self.pid} comes to no end: {self._ask}"
        try:
            self._ask = self._steps.send(self.world.answer(self._ask, self.epoch))
        except (holding.RunHeld, TakenOver) as error:
            self._end(type(error).__name__)
        except StopIteration:
            self._end("done")

    def kill(self) -> None:
        self._end(KILLED)

    def _end(self, how: str) -> None:
        self.ended, self._ask = how, None
        self.world.alive.discard(self.pid)


@settings(max_examples=RUNS)
@given(data=st.data())
def test_no_interleaving_has_two_holders_or_a_save_of_one_that_was_followed(data: st.DataObject) -> None:
    """Takers that wait, takers that do not, holders that are killed in between, and processes that others can or cannot see."""
    world = World()
    processes: list[Process] = []
    waiting = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=5))
    while waiting or any(not each.ended for each in processes):
        live = [each for each in processes if not each.ended]
        choices = ["step"] * 12 * bool(live) + ["begin"] * bool(waiting) + ["kill"] * bool(live)
        match data.draw(st.sampled_from(choices)):
            case "begin":
                take, visible = waiting.pop()
                pid = len(processes)
                world.seen |= {pid} if visible else set()
                processes.append(Process(world, pid, take))
            case "kill":
                data.draw(st.sampled_from(live)).kill()
            case _:
                one = data.draw(st.sampled_from(live))
                for _ in range(data.draw(st.sampled_from([1, 1, 2, 3, 5, 40]))):
                    one.step() if not one.ended else None
    assert [epoch for epoch, newest in world.put_by if epoch != newest] == [], "a holder that was followed has saved"
    last = max(holding.numbers_in(world.files), default=-1)
    claims = [entry for name, raw in world.files.items() if name.isdecimal() and isinstance(entry := holding.decode(raw), RunClaim)]
    assert len({claim.epoch for claim in claims if claim.number != last}) >= len({claim.epoch for claim in claims}) - 1
    assert sum(isinstance(holding.decode(raw), SaveEntry) for raw in world.files.values()) <= len(processes) * (2 * holding.KEPT + 1)


def test_three_that_race_for_a_run_whose_holder_was_killed_are_one_holder_and_two_that_are_refused() -> None:
    """None of them can see the others' processes: each waits for the stamp, and all see at the same moment that it is stale."""
    world = World()
    first = Process(world, 0, take=False)
    while first.saved < 2:
        first.step()
    first.kill()
    three = [Process(world, pid, take=False) for pid in (1, 2, 3)]
    while any(not each.ended for each in three):
        for each in three:
            each.step() if not each.ended else None
    assert sorted(each.ended for each in three) == ["RunHeld", "RunHeld", "done"]
    assert world.now_s >= holding.STALE_S


def test_a_holder_whose_stamp_moves_is_not_followed_but_at_once_where_that_is_asked_for() -> None:
    world = World()
    first, second, third = Process(world, 0, take=False), Process(world, 1, take=False), Process(world, 2, take=True)
    while not second.ended:
        first.step()
        second.step()
    assert (second.ended, second.epoch) == ("RunHeld", -1)
    while third.epoch < 0:
        third.step()
    before = dict(world.manifests)
    while not first.ended:
        first.step()
    assert first.ended == "TakenOver" and {k: v for k, v in world.manifests.items() if v} == {k: v for k, v in before.items() if v}
