"""``fleet plan`` of ranks that keep a state as Fleet does: memory and exchange are the laws', and what cannot be is refused."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from fleet.app.cli import main as cli
from fleet.errors import ConfigError
from fleet.laws.exchange import exposed_exchange, gathered_bytes, summed_bytes
from fleet.laws.memory import chunked_state, replicated_state
from fleet.laws.models import model
from fleet.planning.inputs import PlanInput
from fleet.planning.kept import copies_of, units_of
from fleet.planning.plan import make_plan, notes
from tests.support.model_shapes import shape_parameters

SHARDED = {"model": "llama3-8b", "gpus": 64, "optimizer_sharding": "fsdp"}
WHOLE_BYTES = model("llama3-8b").parameters * 4.0
SMALL = {"model": "llama3-8b", "gpus": 64, "hardware": "mi325x"}


@pytest.mark.parametrize(
    ("asked", "copies"),
    [
        ({}, 1),
        ({"optimizer_copies": 3}, 3),
        ({"optimizer_copies": 0}, 0),
        ({"replica_size": 8}, 7),  # one in each of the other groups
        ({"replica_size": 32, "optimizer_copies": 2}, 2),
    ],
)
def test_memory_of_chunks_is_the_laws(asked: dict[str, Any], copies: int) -> None:
    step = make_plan(PlanInput(**(SHARDED | asked)), levers=False).step
    units = units_of(PlanInput(**SHARDED))
    law = chunked_state(WHOLE_BYTES, 64, copies, 2, units.at_once * 2.0, max(units.layer, units.around) * 4.0)
    assert (step.memory.weights, step.memory.gradients, step.memory.optimizer, step.memory.gathered) == pytest.approx(
        (law.weights, law.gradients, law.optimizer, law.gathered)
    )
    assert step.memory.total_bytes == pytest.approx(law.total_bytes + step.memory.activations)
    assert step.fits and (step.mapping.tensor, step.mapping.pipeline, step.mapping.data) == (1, 1, 64)


def test_three_of_the_largest_units_are_gathered_at_once() -> None:
    units, shape = units_of(PlanInput(**SHARDED)), model("llama3-8b")
    assert units.layer * units.layers + units.around == pytest.approx(shape.parameters)
    assert units.around == pytest.approx(2 * 128_256 * 4096)
    assert units.layer == pytest.approx((shape_parameters(shape) - units.around) / 32, rel=0.01)
    assert units.at_once == units.around + 2 * units.layer


@pytest.mark.parametrize(("sharding", "spread"), [("none", False), ("zero1", True)])
def test_memory_of_whole_parameters_is_the_laws(sharding: str, spread: bool) -> None:
    step = make_plan(PlanInput(**SMALL, optimizer_sharding=sharding), levers=False).step
    law = replicated_state(WHOLE_BYTES, 64, 1, 2, spread=spread)
    assert step.memory.total_bytes == pytest.approx(law.total_bytes + step.memory.activations)
    whole = gathered_bytes(WHOLE_BYTES, 64, 1, 1) / 50e9 + 2 * 5e-6  # from the owners, once a step
    assert step.gather_s == pytest.approx(whole if spread else 0.0)


def test_the_exchange_is_the_laws() -> None:
    """At a rate that was seen, 32 layers and what is around them, two shards a rank."""
    asked = PlanInput(**SHARDED, exchange_bytes_per_s=2e9, batch_tokens=2 * 64 * 8192)
    step, units, around = make_plan(asked, levers=False).step, units_of(asked), units_of(asked).around
    assert step.micro_batches == 2
    law = exposed_exchange(
        forward_bytes=gathered_bytes(8.03e9 * 2, 64, 1, 2),
        backward_bytes=gathered_bytes(units.layer * 32 * 2, 64, 1, 2),
        sum_bytes=summed_bytes(8.03e9 * 4, 64, 1, 2, 2),
        last_bytes=summed_bytes(around * 4, 64, 1, 1, 2),
        bytes_per_s=2e9,
        latency_s=5e-6,
        forward_s=step.compute_s * (1 / 3 if step.recompute == "selective" else 1 / 4),
        backward_s=step.compute_s * (2 / 3 if step.recompute == "selective" else 3 / 4),
        units=64,
        shards=2,
        leave=True,
    )
    assert (step.gather_s, step.data_s, step.hidden_s) == pytest.approx((law.gathers_s, law.sums_s, law.hidden_s))
    assert step.hidden_s > 0 and sum(step.shares.values()) == pytest.approx(1.0)


def test_a_group_within_a_node_gathers_on_its_links() -> None:
    grouped, spread = (make_plan(PlanInput(**SHARDED, replica_size=size), levers=False).step for size in (8, 1))
    assert grouped.gather_s < spread.gather_s / 8
    assert grouped.data_s < spread.data_s, "gathers leave the link between nodes to the sums"
    assert grouped.memory.weights == pytest.approx(spread.memory.weights * 4)  # an eighth, where it was two 64ths


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_sharding": "fsdq"}, ("optimizer_sharding", "Did you mean fsdp")),
        ({"optimizer_sharding": "zero1", "replica_size": 8}, ("replica_size", "zero1")),
        ({"replica_size": 24}, ("replica_size", "64 GPUs", "gpus = 48")),
        ({"optimizer_copies": 4}, ("optimizer_copies", "0 to 3")),
        ({"tp": 2}, ("tp", "fsdp", "nearest valid value is 1")),
        ({"pp": 2}, ("pp", "whole model", "nearest valid value is 1")),
    ],
)
def test_what_fleet_refuses_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        PlanInput(**(SHARDED | changes))
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"optimizer_sharding": "none", "model": "llama3-8b", "gpus": 64},
        {"optimizer_sharding": "zero1", "model": "llama3-8b", "gpus": 64},
        {"optimizer_sharding": "fsdp", "replica_size": 8, "model": "llama3-70b", "gpus": 512},
    ],
)
def test_what_does_not_fit_is_told_how_to_keep_it(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not fit") as refused:
        make_plan(PlanInput(**asked), levers=False)
    advised = dict(re.findall(r"(\w+) = (\w+)", refused.value.way_out.partition("; or ")[2]))
    found = {name: int(value) if value.isdigit() else value for name, value in advised.items()}
    assert found and make_plan(PlanInput(**(asked | found)), levers=False).step.fits, refused.value.way_out


def test_without_a_copy_every_fault_needs_a_checkpoint() -> None:
    none, one = (make_plan(PlanInput(**SHARDED, optimizer_copies=copies), levers=False) for copies in (0, 1))
    assert "replicas" not in {tier.name for tier in none.faults.tiers} and "replicas" in {tier.name for tier in one.faults.tiers}
    assert any("No copies" in said for said in notes(none)) and not any("No copies" in said for said in notes(one))
    assert copies_of(PlanInput(**SHARDED, optimizer_copies=0, replica_size=8), 64) == 7  # other groups are copies


def test_the_command_says_how_the_state_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "llama3-8b", "--gpus", "64", "--optimizer-sharding", "fsdp", "--replica-size", "8"]
    said = {}
    for output in ((), ("--json", "-")):
        monkeypatch.setattr(sys, "argv", ["fleet", "plan", *given, "--optimizer-copies", "2", *output])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        said[output] = capsys.readouterr().out
    words = " ".join(said[()].split())
    assert "groups of 8" in words and "memory.chunked_state" in words
    step = json.loads(said["--json", "-"])["step"]
    assert "test_fsdp_memory" in step["laws"]["memory.chunked_state"] and "0018" in step["laws"]["exchange.exposed_exchange"]
    assert step["memory"]["gathered"] > 0 and step["gather_s"] > 0
