"""One suite for every way in which ranks exchange: gloo, NCCL as it was recorded to fail, and NCCL itself where there is a GPU."""

from __future__ import annotations

import pytest

from tests.contract.communicators import CASES, PLACES, Case, Place
from tests.support.programs import hardware


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_communicator(place: Place, case: Case) -> None:
    hardware(place.missing)
    with place.opened():
        case(place)
