"""The table of layouts: each row names a class that is there, and says whether ranks keep parts."""

from __future__ import annotations

from typing import cast

import pytest

from actors.rank.step.layout import StateLayout, layout_of
from fleet.errors import ConfigError
from fleet.protocol.layouts import LAYOUTS
from fleet.settings.run import RunSettings


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_names_a_layout(name: str) -> None:
    kind = cast(type[StateLayout], layout_of(name))
    assert issubclass(kind, StateLayout)
    assert bool(kind.fixed) == bool(RunSettings(optimizer_sharding=name).spread), "chunks are cut by what trains at first"


def test_what_is_no_row_is_refused_with_all_that_are() -> None:
    with pytest.raises(ConfigError, match=r"none \(each rank keeps all .*zero1 \(.*fsdp \("):
        RunSettings(optimizer_sharding="zero3")
