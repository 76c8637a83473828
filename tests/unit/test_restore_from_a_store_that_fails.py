"""A rank that is to begin from a checkpoint in a store that fails: it waits for one that may be back, and ends for one that will not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.rank.membership.membership import Membership
from actors.rank.membership.process_group import GroupBroken
from fleet.errors import PASSING
from fleet.protocol.moves import Load
from fleet.protocol.types import Member, StateId, View
from storage.backends.files import StoreError

VIEW = View(3, (Member(0, 0),), ((0, 8),), 0, (), StateId(1, 7), "there:1", "step-7")


def load(error: OSError) -> None:
    def fail(checkpoint: str) -> None:
        raise error

    membership: Any = SimpleNamespace(
        _served=SimpleNamespace(reset=lambda: None), _recorder=SimpleNamespace(switch=lambda code: None), _parts=SimpleNamespace(load=fail)
    )
    Membership._load(cast("Membership", membership), Load(VIEW))


@pytest.mark.parametrize("cause", PASSING)
def test_a_store_that_is_away_breaks_the_view_and_no_rank(cause: str) -> None:
    with pytest.raises(GroupBroken, match="cannot be read"):
        load(StoreError("s3://bucket/runs", cause, "no answer"))


@pytest.mark.parametrize("error", [StoreError("s3://bucket/runs", "credentials", "403"), FileNotFoundError("7")], ids=["refused", "gone"])
def test_what_no_waiting_mends_ends_the_rank(error: OSError) -> None:
    with pytest.raises(type(error)):
        load(error)
