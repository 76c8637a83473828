"""The places in the code of a rank at which tests let it die: a name that is changed there is changed here."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.support.moments import MOMENTS


@pytest.mark.parametrize("name", MOMENTS)
def test_the_method_is_there(name: str) -> None:
    module, _, path = MOMENTS[name].method.partition(":")
    kind, method = path.split(".")
    assert callable(getattr(getattr(import_module(module), kind), method))
