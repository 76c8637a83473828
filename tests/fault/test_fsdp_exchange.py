"""What ranks give each other in a step, counted in real ranks as it leaves them, beside the laws of it: byte for byte."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from actors.rank.fsdp.exchange import Sender
from actors.rank.fsdp.serving import PeerFetcher
from actors.rank.membership.process_group import Group
from actors.rank.tags import Tag
from fleet.laws.exchange import gathered_bytes, summed_bytes
from fleet.settings.run import CheckpointSettings, Timeouts
from tests.fault.test_bad_luck import settings, train_through

INNER, WIDTH, LAYERS, OUT, STEPS, COUNTED = 192, 256, 3, 64, 4, 2
"""All are whole blocks of elements for 2, 3 and 4 ranks, so that their chunks are even."""
BLOCKS_BYTES, AROUND_BYTES = LAYERS * 2 * INNER * WIDTH * 4, INNER * OUT * 4
NONE = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=3600.0)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((INNER,), index / 64)


def tapped(counted: Counter[str]) -> None:
    """From now on ``counted`` has what this process gathers and sends for sums."""

    def tap(owner: type, name: str, count: Callable[..., None]) -> None:
        untapped = getattr(owner, name)

        def counting(self: Any, *given: Any, **named: Any) -> Any:
            found = untapped(self, *given, **named)
            count(found, *given)
            return found

        setattr(owner, name, counting)

    def gathered(missing: list[int], state: Any, stretches: Any) -> None:
        counted["gathered"] += sum(wanted.into.nbytes for number, (_, wanted) in enumerate(stretches) if number not in missing)

    def contributed(_: None, address: Any, request: Any, elements: torch.Tensor) -> None:
        counted["summed"] += elements.nbytes

    def started(_: Any, sends: Any, receives: Any, tag: int = Tag.PLAIN) -> None:
        kind = "summed" if tag >= Tag.BUCKETS else "gathered"
        counted[kind] += sum(each.nbytes for each, _ in sends) if kind == "summed" or tag == Tag.PARAMETERS else 0

    tap(PeerFetcher, "fetch", gathered)
    tap(Sender, "send", contributed)
    tap(Group, "start", started)


def gives(run: Any) -> None:
    """Notes what went out in one step."""
    units = [nn.Sequential(nn.Linear(INNER, WIDTH, bias=False), nn.Linear(WIDTH, INNER, bias=False)) for _ in range(LAYERS)]
    model = nn.Sequential(*units, nn.Linear(INNER, OUT, bias=False))
    for each in (*model[:-1], model):
        fully_shard(each, mesh=run.mesh)
    counted: Counter[str] = Counter()
    tapped(counted)
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in run.steps(state, total=STEPS):
        before = Counter(counted)
        for batch in step.batches(Data(), batch_size=run.shards):
            step.backward(model(batch).square().mean())
        step.commit()
        if step.number == COUNTED:
            found = {name: counted[name] - before[name] for name in ("gathered", "summed")}
            Path(run.options["flags"], f"given-{run.slot}").write_text(json.dumps(found))


@pytest.mark.parametrize(("world", "copies", "shards", "group"), [(2, 0, 2, 1), (3, 1, 3, 1), (3, 1, 6, 1), (4, 1, 4, 2)])
def test_ranks_of_a_sharded_model_give_what_the_laws_say(world: int, copies: int, shards: int, group: int, tmp_path: Path) -> None:
    found = given(tmp_path, world, shards, optimizer_sharding="fsdp", optimizer_copies=copies, replica_size=group)
    each = shards // world
    gathers = gathered_bytes(BLOCKS_BYTES, world, copies, 2 * each) + gathered_bytes(AROUND_BYTES, world, copies, each)
    sums = summed_bytes(BLOCKS_BYTES + AROUND_BYTES, world, copies, each, 1 + (each > 1))
    assert found == {"gathered": round(world * gathers), "summed": round(world * sums)}


@pytest.mark.parametrize(("world", "copies", "sharding"), [(3, 2, "none"), (3, 1, "zero1"), (4, 1, "zero1")])
def test_ranks_with_all_parameters_give_what_the_laws_say(world: int, copies: int, sharding: str, tmp_path: Path) -> None:
    """Without chunks each rank has the whole sum, as if it guarded all others'."""
    chosen = {"optimizer_copies": copies} if sharding == "zero1" else {}
    found = given(tmp_path, world, world, optimizer_sharding=sharding, **chosen)
    whole = BLOCKS_BYTES + AROUND_BYTES
    sums, back = summed_bytes(whole, world, copies), gathered_bytes(whole, world, copies, 1)
    assert found == {"gathered": round(world * back), "summed": round(world * sums)}


def given(folder: Path, world: int, shards: int, **changes: Any) -> dict[str, int]:
    """By all ranks together, in a step."""
    chosen = dataclasses.replace(settings(folder, world=world, **changes), shards=shards, timeouts=Timeouts(), checkpoint=NONE)
    outcome, _, _ = train_through(gives, chosen, folder)
    assert outcome.status == "completed", outcome.reason
    found = [json.loads(path.read_text()) for path in folder.rglob("given-*")]
    assert len(found) == world
    return {name: sum(one[name] for one in found) for name in ("gathered", "summed")}
