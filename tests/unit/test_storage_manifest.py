from __future__ import annotations

import json
import pickle
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.protocol.types import Part, StateId
from storage.checkpoint.manifest import (
    CheckpointDamaged,
    Manifest,
    check_parts,
    checkpoint_id,
    decode_manifest,
    encode_manifest,
    parse_checkpoint_id,
    safe_name,
)

PART = Part("__0_0.distcp", 7, "ab" * 32, (0, 2), "[[0],[2]]")
OTHER = Part("__1_0.distcp", 9, "cd" * 32, (1,), "[[1]]")
MANIFEST = Manifest("c", StateId(1, 20), (PART, OTHER), '{"anything": "at all"}', "some-run", (Part(".metadata", 4, "ef" * 32, ()),))

numbers = st.tuples(st.integers(0, 999_999), st.integers(0, 10**12 - 1), st.integers(0, 10**8 - 1))


@settings(max_examples=50, derandomize=True)
@given(first=numbers, second=numbers)
def test_ids_sort_as_text_like_lineage_step_generation(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    one, two = (checkpoint_id(StateId(history, step), generation) for history, step, generation in (first, second))
    assert (one < two) == (first < second)
    assert parse_checkpoint_id(one) == (StateId(*first[:2]), first[2])


@pytest.mark.parametrize(("history", "step", "generation"), [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (10**6, 0, 0), (0, 10**12, 0)])
def test_ids_that_would_break_the_order_are_refused(history: int, step: int, generation: int) -> None:
    with pytest.raises(ValueError, match=f"step {step}"):
        checkpoint_id(StateId(history, step), generation)


def test_other_texts_are_no_ids() -> None:
    with pytest.raises(ValueError, match="yesterday"):
        parse_checkpoint_id("yesterday")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a b", "a\n"])
def test_names_stay_in_their_directory(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        safe_name(name)


def test_manifest_round_trip() -> None:
    assert decode_manifest("c", encode_manifest(MANIFEST)) == MANIFEST
    assert MANIFEST.bytes == 20


def test_damage_to_any_byte_is_noticed_or_changes_nothing() -> None:
    data = encode_manifest(MANIFEST)
    survived = 0
    for place in range(len(data)):
        altered = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with suppress(CheckpointDamaged):
            assert decode_manifest("c", altered) == MANIFEST, f"byte {place}"
            survived += 1
    assert survived == 0, "no single bit of this layout is without meaning"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"null", encode_manifest(MANIFEST)[:-20]])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match="checkpoint c: the manifest"):
        decode_manifest("c", data)


def test_manifest_of_another_checkpoint_or_version_is_refused() -> None:
    with pytest.raises(CheckpointDamaged, match="is that of c"):
        decode_manifest("d", encode_manifest(MANIFEST))
    for version in (99, 1):
        other = json.dumps(json.loads(encode_manifest(MANIFEST)) | {"version": version}).encode()
        with pytest.raises(CheckpointDamaged, match=f"format version {version}, this Fleet reads 2: use the Fleet that wrote it"):
            decode_manifest("c", other)


def test_a_manifest_of_another_run_is_refused_where_a_run_is_named() -> None:
    data = encode_manifest(MANIFEST)
    assert decode_manifest("c", data, "some-run") == decode_manifest("c", data)
    with pytest.raises(CheckpointDamaged, match="is that of run 'some-run', not of 'another'"):
        decode_manifest("c", data, "another")


@pytest.mark.parametrize(
    ("parts", "says"),
    [((), "no parts"), ((PART, PART), "file __0_0.distcp"), ((PART, Part("x", 1, "", (3,))), "tensor 1 is in no part")],
)
def test_parts_that_do_not_fit_together(parts: tuple[Part, ...], says: str) -> None:
    with pytest.raises(CheckpointDamaged, match=says):
        check_parts("c", parts)


def test_the_error_survives_pickling_and_is_an_oserror() -> None:
    error = pickle.loads(pickle.dumps(CheckpointDamaged("checkpoint c: part x is missing")))
    assert isinstance(error, OSError)
    assert str(error) == "checkpoint c: part x is missing"
