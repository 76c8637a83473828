"""The runs of a folder: which are followed, for how long, and what of them is scraped."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.feeds import Feeds
from fleet.follow import Follower
from fleet.journal import encode_line
from tests.golden.journals import Story, one_loss


def write(root: Path, name: str, story: Story) -> Path:
    path = root / name / "journal.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, story.records)))
    return path


def test_a_run_is_scraped_once_its_journal_was_read_to_the_end(tmp_path: Path) -> None:
    write(tmp_path, "long", one_loss())
    feeds = Feeds(tmp_path)  # not entered: the test reads for it, so that it can look between two pieces
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
    feeds = Feeds(tmp_path)
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
    feeds = Feeds(tmp_path)
    feeds.adopt("new", follower)
    follower.poll(limit_bytes=200)
    assert [summary.run for summary in feeds.fresh()] == ["story"]
