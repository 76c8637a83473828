"""What the rules have parsed is as large as all other objects of a test session together, and each collection of garbage walks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tidy import rules


@pytest.fixture(scope="module", autouse=True)
def parsed_for_this_module() -> Iterator[None]:
    yield
    rules.parsed.cache_clear()
    rules.nodes.cache_clear()
