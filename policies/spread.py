"""Which of the ranks that stand by takes a lost rank's place: one whose failure domain has fewest members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.protocol.domains import Crowd, Place, place_of
from fleet.protocol.types import Candidate


def promoted(waiting: Iterable[Candidate], members: Sequence[Candidate], room: int) -> list[Candidate]:
    """Up to ``room`` of ``waiting``, one after the other: of the widest domain that has fewest ``members``, down to the node; then by slot.

    Without members there is nothing to be apart from, and they come by slot.
    """
    left = sorted(waiting, key=lambda candidate: candidate.member)
    if not members:
        return left[: max(0, room)]
    crowd, chosen = Crowd(map(_place, members)), list[Candidate]()
    while left and len(chosen) < room:
        best = min(left, key=lambda candidate: crowd.of(_place(candidate)))
        left.remove(best)
        chosen.append(best)
        crowd.add(_place(best))
    return chosen


def _place(candidate: Candidate) -> Place:
    return place_of(candidate.domain, candidate.node)
