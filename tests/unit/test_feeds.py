"""The runs of a folder: which are followed, for how long, and what of them is scraped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboards import feeds as module
from dashboards.feeds import ASKED_S, FRESH_S, MAX_OPEN, SILENT_FOR_S, RunFeeds
from dashboards.metrics.table import PER_RANK_UP_TO
from fleet.host.clock import unix_time_s
from fleet.host.follow import SILENT_S, Follower
from fleet.protocol.journal import encode_line
from tests.golden.journals import Story, one_loss


def write(root: Path, name: str, story: Story) -> Path:
    path = root / name / "journal.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, story.records)))
    return path


def aged(root: Path, name: str, story: Story, age_s: float) -> Path:
    path = write(root, name, story)
    os.utime(path, (unix_time_s() - age_s,) * 2)
    return path


def opened(feeds: RunFeeds, name: str) -> module.RunFeed:
    feed = feeds.get(name)
    assert feed is not None
    return feed


def test_a_run_is_scraped_once_its_journal_was_read_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, "long", one_loss())
    feeds = RunFeeds(tmp_path)  # not entered: the test reads for it, so that it can look between two pieces
    assert feeds.fresh() == []
    feed = feeds.get("long")
    assert feed is not None
    pieces = 0
    while feed.follower.poll(limit_bytes=200):
        pieces += 1
        assert feed.follower.summary() is not None
        assert feeds.fresh() == []
    assert pieces > 5
    [summary] = feeds.fresh()
    assert summary.commits_total == 60


@pytest.mark.parametrize("damage", [b"nonsense\n", b'["Spans",[0,7]]\n'])
def test_a_damaged_run_is_scraped_as_far_as_it_is_good(damage: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, "bad", one_loss())
    path.write_bytes(path.read_bytes() + damage)
    feeds = RunFeeds(tmp_path)
    feed = feeds.get("bad")
    assert feed is not None
    while not feed.follower.damage:
        assert not feed.follower.caught_up
        feed.follower.poll(limit_bytes=200)
    assert [summary.commits_total for summary in feeds.fresh()] == [60]


def test_a_follower_of_a_run_that_begins_has_nothing_to_catch_up_with(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "new" / "journal.jsonl")
    follower.poll()
    write(tmp_path, "new", one_loss())
    feeds = RunFeeds(tmp_path)
    feeds.adopt("new", follower)
    follower.poll(limit_bytes=200)
    assert [summary.run for summary in feeds.fresh()] == ["story"]


def test_all_runs_that_go_on_are_scraped_and_none_is_read_twice(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(MAX_OPEN + 5)]
    for name in names:
        write(tmp_path, name, one_loss())
    feeds = RunFeeds(tmp_path)
    feeds.fresh()
    followers = [opened(feeds, name).follower.read() for name in names]
    assert len(feeds.fresh()) == len(names)
    assert [opened(feeds, name).follower for name in names] == followers


def test_of_runs_that_nobody_needs_the_one_asked_for_first_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"run-{number}" for number in range(MAX_OPEN + 3)]
    for name in names:
        aged(tmp_path, name, one_loss(), 2 * FRESH_S)
    write(tmp_path, names[0], one_loss())  # goes on
    feeds = RunFeeds(tmp_path)
    feeds_of = {name: opened(feeds, name) for name in names[:MAX_OPEN]}
    for feed in feeds_of.values():
        feed.follower.read()
    adopted = Follower(tmp_path / names[1] / "journal.jsonl")
    feeds.adopt(names[1], adopted)
    monkeypatch.setattr(module, "unix_time_s", lambda: unix_time_s() + ASKED_S + 1)
    feeds_of[names[2]].body()  # a page streams it, and asks for no other
    for name in names[MAX_OPEN:]:
        opened(feeds, name)
    assert list(feeds._open) == [*names[:3], *names[6:]]
    assert opened(feeds, names[2]) is feeds_of[names[2]]
    assert opened(feeds, names[1]).follower is adopted


def test_what_was_asked_for_within_a_minute_is_kept_even_beyond_the_limit(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(MAX_OPEN + 3)]
    for name in names:
        aged(tmp_path, name, one_loss(), 2 * FRESH_S)
    feeds = RunFeeds(tmp_path)
    found = [opened(feeds, name) for name in names]
    assert [opened(feeds, name) for name in names] == found


def statuses(root: Path) -> list[str]:
    feeds = RunFeeds(root)
    feeds.fresh()
    for feed in feeds._open.values():
        feed.follower.read()
    return [summary.status for summary in feeds.fresh()]


def killed() -> Story:
    story = one_loss()
    story.records.pop()
    return story


@pytest.mark.parametrize(
    ("age_s", "status"),
    [(0.0, "running"), (2 * SILENT_S, "silent"), (2 * FRESH_S, "silent"), (SILENT_FOR_S - 60, "silent"), (SILENT_FOR_S + 60, None)],
)
def test_a_run_that_fell_silent_without_an_end_is_scraped_for_a_day(age_s: float, status: str | None, tmp_path: Path) -> None:
    aged(tmp_path, "killed", killed(), age_s)
    assert statuses(tmp_path) == [status] * (status is not None)


@pytest.mark.parametrize(("age_s", "scraped"), [(0.0, 1), (2 * SILENT_S, 1), (2 * FRESH_S, 0)])
def test_a_run_that_ended_is_scraped_for_ten_minutes(age_s: float, scraped: int, tmp_path: Path) -> None:
    aged(tmp_path, "over", one_loss(), age_s)
    assert statuses(tmp_path) == ["completed"] * scraped


def test_a_run_that_is_resumed_after_its_end_is_scraped_again(tmp_path: Path) -> None:
    aged(tmp_path, "again", one_loss(), 2 * FRESH_S)
    feeds = RunFeeds(tmp_path)
    assert feeds.fresh() == []
    story = one_loss()
    story.resumed(8_000)
    aged(tmp_path, "again", story, FRESH_S + 60)
    feeds.fresh()
    opened(feeds, "again").follower.read()
    assert [summary.status for summary in feeds.fresh()] == ["silent"]


@pytest.mark.parametrize(("world", "per_rank", "series"), [(8, False, 24), (PER_RANK_UP_TO + 1, False, 0), (PER_RANK_UP_TO + 1, True, 771)])
def test_ranks_of_a_large_run_are_scraped_where_that_was_asked_for(world: int, per_rank: bool, series: int, tmp_path: Path) -> None:
    write(tmp_path, "large", Story(world=world))
    feeds = RunFeeds(tmp_path, per_rank)
    opened(feeds, "large").follower.read()
    [family] = [each for each in feeds.collector().collect() if each.name == "fleet_slot_seconds"]
    assert len(family.samples) == series
