"""No sentence of the project is hard to read; see :mod:`tests.tidy.prose`."""

from __future__ import annotations

import pytest

from tests.tidy.prose import files, findings, judged

ALLOWED: dict[str, int] = {}
"""Path -> sentences that stay, each with its reason in a comment."""


def test_no_sentence_is_vague_or_long() -> None:
    found = [each for path in files() for each in findings(path)]
    by_path = {path: [each for each in found if each.path == path] for path in {each.path for each in found}}
    beyond = {path: each for path, each in by_path.items() if len(each) > ALLOWED.get(path, 0)}
    assert not beyond, "\n".join(f"{one.path}:{one.line}: {one.why}: {one.sentence}" for each in beyond.values() for one in each)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Who is cut off does not step.", "vague"),
        ("What a rank has computed is kept.", "vague"),
        ("A rank waits, and nobody misses it.", "'nobody'"),
        ("The memory of whoever asks is read.", "'whoever'"),
        ("The stamp stands still unless who holds the run is well.", "'unless who'"),
        (f"A rank steps {'and steps ' * 12}again.", "28 words"),
        ("It is short: Who is cut off does not step.", "vague"),
    ],
)
def test_a_sentence_is_found(text: str, why: str) -> None:
    assert [found for found, _ in judged(text)] == [why]


@pytest.mark.parametrize(
    "text", ["What does a kill cost?", "A rank that loses its majority stops stepping.", "Call `who` and ``nobody(x)``."]
)
def test_a_plain_sentence_is_not(text: str) -> None:
    assert list(judged(text)) == []
