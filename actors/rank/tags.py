"""Under which tag messages travel between the ranks of a view, and what they are.

The n-th message under a tag is taken by the n-th receive under it, whoever that is for. So what is asked for long before it comes has a
tag of its own, and nobody else may use it.
"""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """What travels under each tag: one kind of message has one tag, but for the gradients."""

    PLAIN = 0
    """One at a time, each waited for: a new group's first word, which state is on its way, what each rank knows of a whole one."""

    SIDE = 1 << 24
    """The few numbers that each rank sends beside its gradients."""

    HELD = SIDE + 1
    """Which shards of the step at hand each rank has computed or has promised, when a view begins."""

    READY = SIDE + 2
    """Before the step of a sharded optimizer: that a rank has its sums, whether they are finite, and how large they are."""

    PARAMETERS = SIDE + 3
    """Parameters that their owners have updated."""

    CLAIM = SIDE + 4
    """Who holds which chunks of a sharded state."""

    PIECES = SIDE + 5
    """Chunks of a sharded state that go to other ranks, and the word that all have theirs."""

    PARTIALS = SIDE + 6
    """Partial sums of a slice of the gradient, to whoever adds it up again."""

    SUM = SIDE + 7
    """The sum of that slice as its owner has it, to its checker."""

    VERDICT = SIDE + 8
    """Whether each checker found another sum."""

    GATHERED = SIDE + 9
    """Representations of shards that the loss of other shards needs."""

    CARRIED = SIDE + 10
    """What shards carry to the next step."""

    STATE = 1 << 25
    """The state that a donor gives: its plan, its chunks, their sums."""

    BUCKETS = 1 << 26
    """Gradients: three tags a bucket from here on, see the functions below."""


def bucket_there(number: int) -> int:
    """The tag of what goes to who adds it up, of a bucket."""
    return Tag.BUCKETS + 3 * number


def bucket_back(number: int) -> int:
    """The tag of what comes back of it."""
    return Tag.BUCKETS + 3 * number + 1


def bucket_gathered(number: int) -> int:
    """The tag of what goes to who combines it for its host, of a bucket that is summed in two levels."""
    return Tag.BUCKETS + 3 * number + 2
