"""The state on its way, in a thread: whoever waits for it learns how it ended."""

from __future__ import annotations

import pytest

from actors.rank.membership.membership import Transfer
from actors.rank.membership.process_group import GroupBroken
from fleet.errors import ConfigError


def test_it_is_there_once_it_is_joined() -> None:
    done: list[str] = []
    transfer = Transfer(lambda: done.append("carried"), "test")
    transfer.join()
    assert done == ["carried"]


@pytest.mark.parametrize("error", [GroupBroken("the donor is gone"), ConfigError("track", ["model"], "another state")])
def test_an_error_is_that_of_whoever_waits(error: Exception) -> None:
    def carry() -> None:
        raise error

    with pytest.raises(type(error), match="the donor is gone|another state"):
        Transfer(carry, "test").join()
