"""Parity of chunks: bits that can be made again, steps in parts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from actors.rank.fsdp.bits import bits_of, pieces_of, xor
from actors.rank.fsdp.parity import ParityEngine, ParityResharding, StreamedParityEngine, check_stepped
from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import TrackedState
from actors.rank.step.flats import ALL
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.chunked import ELEMENTWISE, ChunkedOptimizer
from actors.rank.zero1.pieces import PARAMETER, Piece
from actors.rank.zero1.resharding import exchange_claims
from chaos.settings import ChaosSettings
from fleet.app import plans
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.chunks import Claim, Kin
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings
from policies.placement import ranges
from tests.unit.test_fsdp_engine import tracked, trained
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, START, STEPS, train

CPU = torch.device("cpu")


def pieces(seed: int, length: int = 100) -> list[Piece]:
    values = torch.randn(2, length, generator=torch.Generator().manual_seed(seed))
    return [Piece(3, 64, 64 + length, {PARAMETER: values[0], "step": torch.tensor(float(seed)), "exp_avg": values[1].bfloat16()})]


def same(one: list[Piece], other: list[Piece]) -> bool:
    keys = [list(piece.values) for piece in one] == [list(piece.values) for piece in other]
    equal = all(
        torch.equal(mine.values[key], theirs.values[key]) for mine, theirs in zip(one, other, strict=True) for key in mine.values
    )  # fmt: skip
    return keys and equal and [piece[:3] for piece in one] == [piece[:3] for piece in other]


def test_any_one_of_several_is_made_of_the_others_and_their_parity() -> None:
    """Whatever their lengths."""
    rows = [pieces(1, 100), pieces(2, 7), [], pieces(4, 1000)]
    parity = torch.zeros(0, dtype=torch.uint8)
    for row in rows:
        parity = xor(parity, bits_of(row))
    for missing, row in enumerate(rows):
        made = parity.clone()
        for number, other in enumerate(rows):
            made = xor(made, bits_of(other)) if number != missing else made
        assert same(pieces_of(made, CPU), row)


def test_what_does_not_fit_together_is_no_chunk() -> None:
    parity = xor(bits_of(pieces(1)), bits_of(pieces(2)))
    with pytest.raises(ProtocolError, match="no chunk"):
        pieces_of(xor(parity, bits_of(pieces(3))), CPU)


def test_the_same_pieces_have_the_same_bits_whatever_was_in_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tensors there is room, which says nothing and counts."""
    found = []
    for value in (0, 7):
        monkeypatch.setattr(torch, "empty", lambda *size, value=value, **named: torch.full(size, value, **named))
        found.append(bits_of(pieces(1, 3)))
    assert torch.equal(*found)


def test_a_claim_comes_as_it_was_told() -> None:
    kin = (Kin(7, 12, (1, 4, 9), 1, 30, 5), Kin(5, 12, tuple(range(12)), 0, 30))
    told = Claim(StateId(1, 31), True, 0.5, False, 9, ((12, 4), (24, 3)), kin)

    def rank(group: Group) -> list[Claim]:
        return exchange_claims(group, told if group.rank else Claim(None))

    assert with_groups(2, rank) == [[Claim(None), told]] * 2


# ---- steps in parts ----------------------------------------------------------------------------------------------------------------------


def stepped(kind: type[torch.optim.Optimizer], *, in_parts: bool, **options: Any) -> list[torch.Tensor]:
    """Two groups, two flat buffers, three steps; the groups' parameters, moments and counters behind them."""
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(length)) for length in (2048, 1000, 3000)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}]
    optimizer = kind(groups, lr=0.01, **options)  # type: ignore[call-arg]
    chunks = ChunkedOptimizer(optimizer, parameters, [(0, 0), (1, 0), (1, 1024)], [2048, 4096])
    for step in range(3):
        torch.manual_seed(step)
        chunks.point([torch.randn(2048), torch.randn(4096)], ALL)
        if in_parts:
            for flats, probes in (([], True), ([0], False), ([1], False)):
                chunks.narrow(flats, probes=probes)
                optimizer.step()
            chunks.widen()
        else:
            optimizer.step()
    states = [optimizer.state[one] for group in optimizer.param_groups for one in group["params"]]
    return [*parameters, *(value for each in states for value in each.values() if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_an_optimizer_that_steps_in_parts_has_the_bits_of_one_that_does_not(kind: type[torch.optim.Optimizer]) -> None:
    for options in ({}, {"foreach": True}):
        parts, whole = stepped(kind, in_parts=True, **options), stepped(kind, in_parts=False, **options)
        assert len(parts) == len(whole) and all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_step_for_somebody_else_is_that_step_and_changes_nothing_here(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(2048)), nn.Parameter(torch.randn(2048))]
    optimizer = kind([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.02}], lr=0.01)  # type: ignore[call-arg]
    chunks = ChunkedOptimizer(optimizer, parameters, [(0, 0), (0, 2048)], [4096])
    for step in range(3):
        torch.manual_seed(step)
        gradient = torch.randn(4096)
        before, options = chunks.alike(0, 1024, 4096), chunks.options()
        before = [piece._replace(values={PARAMETER: chunks.view(*piece[:3]).clone(), **piece.values}) for piece in before]
        chunks.point([gradient], ALL)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does
        after = chunks.alike(0, 1024, 4096)
        after = [piece._replace(values={PARAMETER: chunks.view(*piece[:3]), **piece.values}) for piece in after]
        found = chunks.step_apart(before, [gradient[piece.lo : piece.hi] for piece in before], ALL, options)
        assert same(found, after)
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (step + 1)
        assert all(one is parameter for one, parameter in zip(chunks.parameters, parameters, strict=True))


# ---- ranks -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained("none", 1, tmp_path_factory.mktemp("whole"))[0][0]


@pytest.mark.parametrize(
    ("kind", "size", "parity"), [(ParityEngine, 1, 1), (ParityEngine, 4, 3), (ParityEngine, 5, 1), (StreamedParityEngine, 3, 2)]
)
def test_the_bits_are_those_of_whole_replicas_and_parity_is_a_part(
    kind: type[ParityEngine], size: int, parity: int, tmp_path: Path, whole: str
) -> None:  # fmt: skip
    """Each rank has its chunk of the parameters, and in host memory a part of so much of them, and of their moments."""
    sync = "shard" if kind is StreamedParityEngine else "step"
    settings = RunSettings(world=size, shards=SHARDS, optimizer_sharding="fsdp", gradient_sync=sync, parity=parity)

    def rank(group: Group) -> tuple[str, int, int, int]:
        state, units = tracked()
        engine = kind(state, settings, Recorder(tmp_path / f"{group.rank}", 0), 0.5, units, "127.0.0.1")
        members = tuple(Member(slot, 0) for slot in range(size))
        view = View(1, members, ranges(SHARDS, size), 0, tuple(range(1, size)), START, "")
        protocol = cast(Any, SimpleNamespace(process=SimpleNamespace(node="node"), receiving=lambda: None))
        if group.rank == 0:
            engine.begin(START)
        assert ParityResharding(engine, protocol, 0, lambda factor: None, parity=parity).exchange(group, view) == START
        engine.seat(group, view, group.rank, START, True)
        assert train(engine, state) == list(range(STEPS))
        assert engine.kept is not None
        assert not engine.kept.before and not engine.kept.means and engine.kept.step == STEPS
        weights = sum(each.nbytes for each in engine.weights)
        found = engine.digest(STEPS), weights, engine.chunks.state_bytes, engine.parity_bytes
        group.all_gather(torch.empty(group.size, 1), torch.zeros(1))
        engine.close()
        return found

    found = with_groups(size, rank)
    assert {each[0] for each in found} == {whole}
    longest = max(weights + state_bytes for _, weights, state_bytes, _ in found)
    others = min(parity, size - 1)
    most = (longest + 3 * 3 * 1024 * 4) / others + 3 * 4096 if size > 1 else 0
    assert all(kept <= most for *_, kept in found)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parity": -1}, "Choose 1 to 15"),
        ({"parity": 16}, "Choose 1 to 15"),
        ({"optimizer_sharding": "none"}, 'Set optimizer_sharding to "fsdp"'),
        ({"optimizer_sharding": "zero1"}, 'Set optimizer_sharding to "fsdp"'),
        ({"replica_size": 2}, "Set replica_size to 1"),
        ({"optimizer_copies": 2}, "Leave optimizer_copies"),
        ({"optimizer_copies": 0}, "Leave optimizer_copies"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match="parity") as refused:
        RunSettings(**{"world": 4, "optimizer_sharding": "fsdp", "parity": 3, **changes})
    assert reason in str(refused.value)


def test_more_parity_than_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use --parity 2 or fewer"):
        plans.check(RunSettings(world=3, optimizer_sharding="fsdp", parity=3), ChaosSettings())
    plans.check(RunSettings(world=4, optimizer_sharding="fsdp", parity=3), ChaosSettings())


def test_what_steps_in_one_go_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check_stepped(TrackedState(model=model, optimizer=optimizer))
    with pytest.raises(ConfigError, match="GradScaler"):
        check_stepped(TrackedState(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu")))
    optimizer.register_step_post_hook(lambda *arguments: None)
    with pytest.raises(ConfigError, match="hooks"):
        check_stepped(TrackedState(model=model, optimizer=optimizer))
