"""A run's post-mortem is one page that those read who were not there; and moments stand in UTC, on one time base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.host.journal import JournalWriter
from fleet.ledger.post_mortem import post_mortem
from fleet.ledger.report import build_report
from fleet.ledger.story import why
from fleet.ledger.utc import clock, iso, stamp, with_utc
from fleet.protocol.causes import Evicted, NoHeartbeat, ProcessEnded
from fleet.protocol.records import FaultRecord, LossExplained, ProcessLost
from fleet.protocol.types import Fault
from tests.golden.journals import Story, one_loss


def test_the_page_has_when_what_it_cost_why_what_was_decided_and_what_to_do() -> None:
    story = one_loss()
    page = post_mortem(build_report(story.records), story.records)
    heads = [line for line in page.splitlines() if line.startswith("#")]
    assert heads == [
        "# Post-mortem: story", "## Impact", "## Timeline", "## Causes", "## Decisions, by rule", "## What to do",
    ]  # fmt: skip
    assert "- **From**: 2023-11-14 22:13:20 UTC\n- **To**: 2023-11-14 22:13:27 UTC" in page
    assert "| loss-1.0 | 22:13:22Z | loss | 1.0 | killed by SIGKILL |" in page
    assert "| goodput | " in page and "1. **" in page


def test_text_of_the_journal_ends_no_cell() -> None:
    story = one_loss()
    lost = next(record for record in story.records if isinstance(record, ProcessLost))
    story.records.append(type(lost)(lost.member, "a | b\n# c", None, 1, 5, -1, "", at_s=lost.at_s, event=99))
    page = post_mortem(build_report(story.records), story.records)
    assert "a \\| b # c" in page


def test_the_command_writes_it(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl")
    for record in one_loss().records:
        writer.append(record)
    writer.close()
    answer = CliRunner().invoke(app, ["report", str(tmp_path), "--post-mortem", str(tmp_path / "page.md")])
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "page.md").read_text().startswith("# Post-mortem: ")


def test_a_fault_that_was_kept_from_its_target_stands_when_that_was() -> None:
    """The time of its plan counts from another start."""
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    fault = Fault("gpu-1", 3.0, "gpu", "kill_rank", slot=0)
    at_s = story.records[0].at_s + 5.0  # type: ignore[attr-defined]
    story.records += [FaultRecord(fault, "planned", (), at_s=at_s - 4.0), FaultRecord(fault, "suppressed", (), "nobody is left", at_s=at_s)]
    (item,) = build_report(story.records).summary.incidents
    assert item.at_s == at_s


def test_each_moment_of_the_json_has_its_utc_beside_it() -> None:
    report = json.loads(build_report(one_loss().records).to_json())
    assert (report["started_utc"], report["until_utc"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:13:27.340Z")

    def moments(value: object) -> list[dict[str, object]]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        own = [value] if isinstance(value, dict) and value.get("at_s") is not None else []
        return own + [found for each in inner for found in moments(each)]

    found = moments(report)
    assert found and all("at_utc" in each for each in found)


@pytest.mark.parametrize(
    ("unix_s", "words"),
    [(1.7e9, "2023-11-14 22:13:20 UTC"), (951_782_400.0, "2000-02-29 00:00:00 UTC"), (1_709_164_799.999, "2024-02-28 23:59:59 UTC")],
)
def test_stamps(unix_s: float, words: str) -> None:
    assert stamp(unix_s) == words
    assert clock(unix_s) == f"{words[11:19]}Z" and clock(unix_s, day=True) == f"{words[5:19]}Z"
    assert iso(unix_s).startswith(words[:10] + "T" + words[11:19])


def test_what_is_no_moment_stays() -> None:
    assert with_utc({"a": [{"at_s": None}, {"at_s": 1.0, "took_s": 2.0}]}, 1.7e9) == {
        "a": [{"at_s": None}, {"at_s": 1.0, "at_utc": "2023-11-14T22:13:21.000Z", "took_s": 2.0}]
    }


def test_an_eviction_is_told_by_its_rule_and_not_as_the_kill_that_carried_it_out() -> None:
    records = list(one_loss().records)
    place, lost = next((place, record) for place, record in enumerate(records) if isinstance(record, ProcessLost))
    records[place] = replace(lost, fault=None, cause=Evicted(NoHeartbeat(25.4)))
    records.append(LossExplained(lost.member, ProcessEnded(-9), at_s=lost.at_s + 0.1))
    report = build_report(records)
    (item,) = [each for each in report.summary.incidents if each.members]
    assert item.causes == (str(Evicted(NoHeartbeat(25.4))),)
    assert report.to_dict()["losses"][0]["cause"] == item.causes[0]
    assert str(item.causes[0]) in str(why(records, str(lost.member)))
