"""Bits flip in the chunks of a sharded state. The rank itself finds it, leaves, and the run ends with the bits of one without flips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rank.rank_injector import RankInjector
from fleet.protocol.operations import START, Operation
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost
from fleet.protocol.types import Process
from fleet.settings.run import CheckpointSettings, VerifySettings
from tests.fault.test_bad_luck import of, settings, survived, train_through
from tests.fault.test_fsdp import CUT
from tests.support import trains
from tests.support.undisturbed import Undisturbed

EACH_STEP = VerifySettings(replicas=1.0)
"""Digests may take as long as a step, so no step goes without."""


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    return undisturbed(lambda folder: settings(folder, world=2, options=CUT))


def flips_in_a_shard(run: Any) -> None:
    """Slot 1 flips bits of what the option ``what`` says in a shard of step 10, once."""

    def inject(run: Any, step: Any) -> None:
        if run.slot == 1 and step.number == 10 and trains.once(run, "flip"):
            order = Operation("f", run.options["what"], START, Process("", 0, 0), seed=int(run.options["seed"]))
            assert RankInjector(run._train_step).operate(order) is None

    trains._loop(run, in_shard=inject)


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("what", ["flip_weight", "flip_optimizer"])
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_it_costs_the_rank_and_no_step(sharding: str, what: str, world: int, seed: int, tmp_path: Path, truth: str) -> None:
    options = {**CUT, "what": what, "seed": str(seed)}
    chosen = settings(tmp_path, world=world, optimizer_sharding=sharding, options=options, verify=EACH_STEP)
    outcome, records, digest = train_through(flips_in_a_shard, chosen, tmp_path)
    survived(outcome, records, digest, truth)
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1 and "silent corruption" in str(lost.cause)
    assert not of(HistoryBegun, records)


def flips_within_the_commit(run: Any) -> None:
    """Slot 1 flips a bit of its optimizer's state between its digests of step 10 and the step itself, once.

    It is a high bit of the largest element: the step rounds away what a low bit of a small one was.
    """

    def inject(run: Any, step: Any) -> None:
        train, says = run._train_step, run._train_step.verify.say_in_vote
        if run.slot != 1 or step.number != 10 or not trains.once(run, "flip"):
            return

        def then(*given: Any, **named: Any) -> Any:
            said = says(*given, **named)
            moment = train.layout.kept.chunks.moments[0].view(-1)
            moment[moment.abs().argmax()].view(torch.int32).bitwise_xor_(1 << 20)
            del train.verify.say_in_vote
            return said

        train.verify.say_in_vote = then

    trains._loop(run, in_shard=inject)


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_a_flip_within_the_commit_takes_all_back_and_the_step_taken_again_names_its_rank(sharding: str, tmp_path: Path, truth: str) -> None:
    save = CheckpointSettings(policy="fixed", interval_s=0.3)
    options = {**CUT, "pause_s": "0.1"}
    chosen = settings(tmp_path, world=3, optimizer_sharding=sharding, options=options, checkpoint=save, verify=EACH_STEP)
    outcome, records, digest = train_through(flips_within_the_commit, chosen, tmp_path)
    assert outcome.status == "completed" and digest == truth, outcome
    assert [one.action for one in of(DecisionMade, records) if one.policy == "corruption"] == ["retry", "go_back", "evict"]
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1 and "silent corruption" in str(lost.cause)
    assert len(of(HistoryBegun, records)) == 1
