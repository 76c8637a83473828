"""What a soak draws, and when a round is wrong."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos.arrivals import as_trace, load_trace
from chaos.soak import CATALOGUE_SHARE, kinds_for, round_of
from fleet.app import soak as soaking
from fleet.app.result import Result
from fleet.app.soak import Round, Soak, soak
from fleet.errors import ConfigError, RunFailed
from fleet.protocol.fault_kinds import KINDS, Performer

WORLD: dict[str, Any] = {"mtbf_s": 5.0, "duration_s": 20_000.0, "world": 5, "nodes": 3}


def test_a_round_is_drawn_from_seed_and_number_alone_and_can_be_traced() -> None:
    kinds = kinds_for(None, hosts=True, verified=True)
    one = round_of(7, 3, kinds, **WORLD)
    assert one == round_of(7, 3, kinds, **WORLD) != round_of(7, 4, kinds, **WORLD)
    assert load_trace(as_trace(one)) == one
    assert 0.9 < len(one) / 4000 < 1.1
    assert {fault.kind for fault in one} >= {kind.name for kind in kinds if not kind.components}
    for fault in one:
        for parameter in KINDS[fault.kind].parameters:
            assert parameter.holds(getattr(fault, parameter.name))


def test_the_catalogue_has_its_share_at_its_rates() -> None:
    count = Counter(fault.kind for fault in round_of(1, 0, kinds_for(None, hosts=False, verified=False), **WORLD))
    known = {name: number for name, number in count.items() if KINDS[name].components}
    assert abs(sum(known.values()) / count.total() - CATALOGUE_SHARE) < 0.03
    assert known["kill_rank"] == max(known.values())


def test_what_cannot_be_done_or_seen_is_not_drawn() -> None:
    here = kinds_for(None, hosts=False, verified=False)
    assert not any(kind.performer in (None, Performer.LINKS) or kind.whole_rack for kind in here)
    more = {kind.name for kind in kinds_for(None, hosts=False, verified=True)} - {kind.name for kind in here}
    assert more == {"flip_gradient", "flip_activation"}
    assert [kind.name for kind in kinds_for(("hang",), hosts=False, verified=False)] == ["hang"]
    for name, words in (("meteor", "meteor"), ("partition", "several hosts"), ("lemon_node", "share one machine")):
        with pytest.raises(ConfigError, match=words):
            kinds_for((name,), hosts=False, verified=False)


# ---- rounds ------------------------------------------------------------------------------------------------------------------------------


class Runs:
    """In place of runs: each is as the next of ``reported`` says."""

    def __init__(self, folder: Path, *reported: dict[str, Any]) -> None:
        self.folder, self.reported, self.chaos = folder, list(reported), list[Any]()

    def launch(self, train: Any, *, chaos: Any, **settings: Any) -> Result:
        self.chaos.append(chaos)
        if "raises" in self.reported[0]:
            raise self.reported.pop(0)["raises"]
        folder = self.folder / f"run-{len(self.chaos)}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "journal.jsonl").write_text("{}\n")
        (folder / "checkpoints" / "large").write_text("x")
        same = {"name": folder.name, "status": "completed", "reason": "r", "folder": folder, "store": "", "digest": "d", "steps": 3}
        same |= {
            "store": "file:///none",
            "goodput": 0.9,
            "wall_s": 1.0,
            "saved_step": None,
            "median_step_s": None,
            "faults": 4,
            "ranks_lost": 0,
            "views": 1,
        }
        same |= {"rolled_back_steps": 0, "loss": None, "checks": {"bits": "ok"}, "report": {"training_goodput": 0.8}}
        return Result(**(same | self.reported.pop(0)))


def carried_out(runs: Runs, monkeypatch: pytest.MonkeyPatch, rounds: int) -> tuple[Round, ...]:
    script = runs.folder / "train.py"
    script.write_text("def train(run):\n    pass\n")
    monkeypatch.setattr(soaking.launching, "launch", runs.launch)
    said = list[Round]()
    found = soak(Soak(script=str(script), seed=5, folder=runs.folder / "kept"), lambda: len(said) < rounds, said.append)
    assert list(found) == said
    return found


def test_rounds_go_on_while_all_is_well_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path, {}, {}, {}, {})
    rounds = carried_out(runs, monkeypatch, 3)
    assert [(one.number, one.executed, one.wrong) for one in rounds] == [(number, 4, "") for number in range(3)]
    assert runs.chaos[0] == "off" and len({chaos["trace"] for chaos in runs.chaos[1:]}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"digest": "other"}, "its bits are not those"),
        ({"status": "failed", "reason": "no rank is left"}, "ended as failed: no rank is left"),
        ({"checks": {"bits": "ok", "commits_exact": "violated"}}, "check commits_exact is violated"),
    ],
)
def test_the_first_wrong_round_is_the_last_and_all_about_it_is_kept(
    wrong: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path, {}, {}, wrong, {})
    rounds = carried_out(runs, monkeypatch, 9)
    assert len(rounds) == 2 and why in rounds[-1].wrong
    with tarfile.open(rounds[-1].kept) as archive:
        assert {Path(name).name for name in archive.getnames()} >= {"journal.jsonl", "faults.csv", "soak.json"}
        assert not any("large" in name for name in archive.getnames())
        reported = json.load(archive.extractfile("soak-5-1/soak.json"))  # type: ignore[arg-type]
        assert (reported["seed"], reported["round"]) == (5, 1) and why in reported["wrong"]
        assert archive.extractfile("soak-5-1/faults.csv").read().decode() == runs.chaos[-1]["trace"]  # type: ignore[union-attr]


def test_a_run_that_fails_without_faults_is_no_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="without faults has not completed"):
        carried_out(Runs(tmp_path, {"status": "failed"}), monkeypatch, 3)
    with pytest.raises(ConfigError, match="--mtbf"):
        Soak(script="s.py", mtbf_s=0.0)


def test_a_run_that_ends_in_an_exception_is_wrong_and_its_faults_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Runs(tmp_path, {}, {"raises": RunFailed("no node's agent came up")})
    [only] = carried_out(runs, monkeypatch, 9)
    assert only.wrong == "RunFailed: no node's agent came up"
    with tarfile.open(only.kept) as archive:
        assert archive.extractfile("soak-5-0/faults.csv").read().decode() == runs.chaos[-1]["trace"]  # type: ignore[union-attr]
