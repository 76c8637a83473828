"""Digests of what all ranks hold: they see each bit, whatever the layout, in turns that keep to their budget."""

from __future__ import annotations

import pytest
import torch

from actors.rank.state.tracked import TrackedState
from actors.rank.verify.replicas import MOST_PARTS, SAMPLES, DigestShare, Replicas, StatesDiffer, _device_sum, digest
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import StateId
from tests.support import trains


def here(step: int) -> StateId:
    return StateId(0, step)


def tracked(steps: int = 2) -> TrackedState:
    torch.manual_seed(0)
    model, optimizer, scheduler = trains.build(16)
    for _ in range(steps):
        model(torch.ones(4, trains.FEATURES)).sum().backward()
        optimizer.step()
        scheduler.step()
    return TrackedState(model=model, optimizer=optimizer, scheduler=scheduler)


def looked(state: TrackedState, step: int = 1) -> list[float]:
    replicas = Replicas(state, 0.01)
    replicas.join(1, here(step), False)
    return replicas.look(here(step))


def copied(state: TrackedState) -> TrackedState:
    other = tracked(0)
    skeleton, tensors = state.flatten()
    other.load(skeleton, [tensor.clone() for tensor in tensors])
    return other


def test_a_copy_is_alike_whatever_it_grew_from() -> None:
    state = tracked()
    assert looked(copied(state)) == looked(state)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_each_tensor_of_the_state_is_in_the_digest(what: str) -> None:
    state = tracked()
    before = looked(state)
    tensors = [t for t in (state.objects[what].state_dict() if what == "model" else _moments(state)).values() if t.numel()]
    for tensor in tensors:
        memory = tensor.reshape(-1).view(torch.uint8)
        memory[-1] ^= 1
        assert looked(state) != before
        memory[-1] ^= 1
    assert looked(state) == before


def _moments(state: TrackedState) -> dict[str, torch.Tensor]:
    states = state.objects["optimizer"].state_dict()["state"]
    return {f"{index}.{name}": value for index, values in states.items() for name, value in values.items()}


def test_what_is_no_tensor_is_compared_when_a_view_begins() -> None:
    state, other = tracked(), tracked()
    other.objects["scheduler"].last_epoch += 1
    assert looked(state) != looked(other)


def test_the_quick_way_gives_the_same() -> None:
    replicas = Replicas(tracked(), 0.01)
    replicas.join(1, here(1), False)
    replicas.look(here(1))
    assert replicas._arrays is not None
    assert replicas._digest(0, replicas._bytes) == digest(replicas._memory, 0, replicas._bytes)


def test_layout_does_not_matter() -> None:
    plain = torch.arange(24.0).view(2, 3, 4)
    assert digest([plain.permute(0, 2, 1).contiguous().permute(0, 2, 1)], 0, 96) == digest([plain], 0, 96)


@pytest.mark.parametrize("size", [1, 7, 4096, 4099, 9000])
def test_the_sum_of_a_device_sees_each_flipped_bit(size: int) -> None:
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)[3:]  # its address is no multiple of 8
    before = int(_device_sum(data))
    for place in {0, size // 2, size - 1}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert int(_device_sum(data)) != before
            data[place] ^= 1 << bit


def test_parts_take_turns_and_cover_all() -> None:
    state = tracked()
    replicas = Replicas(state, 0.01)
    replicas.join(1, here(1), False)
    replicas.look(here(1))
    replicas._replica_check.cut(4)
    before = [replicas.look(here(step)) for step in range(5, 9)]
    state.objects["model"].state_dict()["0.weight"][0, 0] += 1
    changed = [was != replicas.look(here(step)) for step, was in enumerate(before, start=5)]
    assert sum(changed) == 1


def test_differing_digests_raise_and_what_was_said_stays() -> None:
    replicas = Replicas(tracked(), 0.01)
    replicas.join(7, here(1), False)
    mine = replicas.look(here(1))
    with pytest.raises(StatesDiffer):
        replicas.compare([mine, [1.0, 1.0, mine[2] + 1], mine])
    said = replicas.testimony
    assert said is not None
    assert (said.what, said.generation, said.state) == ("weights", 7, here(1))
    replicas.compare([mine, mine])
    assert replicas.testimony is None


def test_a_newcomer_has_no_say_in_its_first_step_and_one_from_then_on() -> None:
    """Its peers had looked up what there is in the step in which it could not: before the optimizer had a state, say."""
    states = [tracked(), tracked()]
    states[0].objects["optimizer"].state.clear()
    pair = [Replicas(state, 0.01) for state in states]
    for number, replicas in enumerate(pair):
        replicas.join(1, here(125), number == 1)
    rows = [pair[0].look(here(125)), pair[1].abstain()]
    for replicas in pair:
        replicas.compare(rows)
        assert replicas.testimony is None
    states[0].objects["optimizer"].load_state_dict(states[1].objects["optimizer"].state_dict())
    for step in (126, 127, 128, 129):
        mine, newcomers = (replicas.look(here(step)) for replicas in pair)
        assert mine[1:] == newcomers[1:]
        for replicas in pair:
            replicas.compare([mine, newcomers])


def test_a_newcomer_sees_that_the_others_differ() -> None:
    replicas = Replicas(tracked(), 0.01)
    replicas.join(1, here(1), True)
    with pytest.raises(StatesDiffer):
        replicas.compare([[1.0, 1.0, 5.0], replicas.abstain(), [1.0, 1.0, 6.0]])
    assert replicas.testimony is None


def test_ranks_agree_on_the_parts_and_do_not_compare_different_ones() -> None:
    replicas = Replicas(tracked(), 0.01)
    replicas.join(1, here(1), False)
    mine = replicas.look(here(1))
    replicas.compare([mine, [4.0, 1.0, mine[2]]])
    later = replicas.look(here(2))
    assert later[1] == 4.0
    replicas.compare([later, [4.0, 1.0, later[2] + 1]])


def test_a_digest_that_takes_too_long_is_cut() -> None:
    replicas = Replicas(tracked(), 1e-9)
    replicas.join(1, here(0), False)
    parts = [replicas.look(here(step))[0] for step in range(SAMPLES + 1)]
    assert parts[0] == 1
    assert parts[-1] == MOST_PARTS


def test_the_typical_digest_keeps_within_the_budget() -> None:
    """And not the quickest: the budget is of the time that digests take, not of what they could take."""
    share = DigestShare(0.01)
    share._steps_s.extend([1.0] * SAMPLES)
    share._costs_s.extend([0.004] * (SAMPLES // 2 - 1) + [0.012] * (SAMPLES // 2 + 1))
    assert share.divided(1, MOST_PARTS, None) == 2


def test_off_costs_nothing() -> None:
    replicas = Replicas(tracked(), 0.0)
    replicas.join(1, here(1), False)
    assert replicas.width == 0
    replicas.compare([[], []])


def test_cleared_is_one_step_after_the_oldest_comparison() -> None:
    check = ReplicaCheck()
    check.join(1, here(0), receiver=True)
    check.cut(2)
    assert not check.witness
    cleared = []
    for step in range(4):
        check.enter(here(step), "same")
        assert not check.differ(["same", "same"])
        cleared.append(check.cleared.step)
    assert cleared == [0, 1, 2, 3]
    assert check.witness
    check.enter(here(4), "mine")
    assert check.differ(["mine", "same"])
    assert check.open is not None
    assert check.open.cleared == here(3)
    check.join(2, here(4), receiver=False)
    assert check.witness
    assert check.open is None


def test_a_learning_rate_that_the_loop_body_sets_is_compared_when_all_have_set_it() -> None:
    """One rank was in the body when the view began, another was not yet."""
    early, late = tracked(), tracked()
    pair = [Replicas(state, 0.01) for state in (early, late)]
    for state, replicas in zip((early, late), pair, strict=True):
        if state is early:
            state.objects["optimizer"].param_groups[0]["lr"] = 0.5
        replicas.join(1, here(1), False)
        state.objects["optimizer"].param_groups[0]["lr"] = 0.5
    assert pair[0].look(here(1)) == pair[1].look(here(1))
