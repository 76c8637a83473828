"""What `mesh` says of torchft's groups: the arithmetic on logs, and the state that one group takes from another."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from actors.rank.fsdp.taken import mesh_of_one
from benchmarks.mesh_ranks import Shape, cut
from benchmarks.peers.common import Commit, Kill
from benchmarks.peers.torchft_hsdp import Chunks, errors, lost, survived

BATCH = 4
BOTH = {0: 10, 1: 11, 2: 12, 3: 13}
SECOND = {2: 12, 3: 13}
KILL = Kill(2.5, 1, 11)


def commits(*members: dict[int, int], first: int = 1) -> list[Commit]:
    """One a second."""
    return [Commit(float(at), first + at - 1, len(one), 1, dict(one)) for at, one in enumerate(members, start=1)]


def test_a_kill_is_survived_where_the_other_groups_ranks_go_on() -> None:
    anew = {slot: pid + 100 for slot, pid in BOTH.items()}
    assert survived(commits(BOTH, BOTH, SECOND, SECOND | {0: 110, 1: 111}), KILL)
    assert not survived(commits(BOTH, BOTH, SECOND), KILL)  # one more step may be the one that was in flight
    assert not survived(commits(BOTH, BOTH, anew, anew, anew), KILL)
    assert not survived(commits(BOTH, BOTH, {0: 10}, {0: 10}, {0: 10}), KILL)


def test_steps_without_a_group_and_steps_undone_are_lost() -> None:
    run = commits(BOTH, BOTH, SECOND, SECOND, BOTH)
    assert lost(run, [KILL], BATCH) == 2 * 2
    begun_again = [*commits(BOTH, BOTH), *(Commit(3.0 + at, 1 + at, BATCH, 2, dict(BOTH)) for at in range(3))]
    assert lost(begun_again, [KILL], BATCH) == 2 * BATCH


def test_errors_are_told_without_addresses(tmp_path: Path) -> None:
    said = "[x] quorum\nTraceback:\n  RuntimeError: quoted\nRuntimeError: [/a/pair.cc:5] Read error [127.0.0.1]:{}: Reset. Check it\n"
    for rank in range(2):
        (tmp_path / f"rank-{rank}.txt").write_text(said.format(4000 + rank))
    assert errors(tmp_path) == ["2 times RuntimeError:  Read error : Reset"]


def test_who_took_the_state_goes_on_as_the_one_who_gave_it() -> None:
    reported, mesh = Shape(64, 2, 1).options(), mesh_of_one(torch.device("cpu"))
    text = torch.arange(65).unsqueeze(0)
    giving, taking = cut(reported, mesh), cut(reported, mesh)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model.eval()(text).backward()
        optimizer.step()

    taker = Chunks(taking[1])
    taker.load(copy.deepcopy(Chunks(giving[1]).held()))  # before the first step
    step(*giving)
    step(*giving)
    assert not _alike(giving[0], taking[0])
    taker.load(copy.deepcopy(Chunks(giving[1]).held()))
    assert _alike(giving[0], taking[0])
    step(*giving)
    step(*taking)
    assert _alike(giving[0], taking[0])


def _alike(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(one.parameters(), other.parameters(), strict=True))  # type: ignore[attr-defined]
