"""The tags of messages between the ranks of a view.

The n-th receive under a tag takes the n-th message under it. So a message that is asked for long before it comes has a tag of its own,
which no other message may use.
"""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """One kind of message has one tag, except the gradients."""

    PLAIN = 0
    """Single messages, each waited for: a new group's first message, which state is on its way, each rank's facts about whole states."""

    SIDE = 1 << 24
    """The few numbers that each rank sends beside its gradients."""

    HELD = SIDE + 1
    """Which shards of the step at hand each rank has computed or has promised, when a view begins."""

    READY = SIDE + 2
    """Before the step of a sharded optimizer: that a rank has its sums, whether they are finite, and how large they are."""

    PARAMETERS = SIDE + 3
    """Parameters that their owners have updated."""

    CLAIM = SIDE + 4
    """Which rank holds which chunks of a sharded state."""

    PIECES = SIDE + 5
    """Chunks of a sharded state that go to other ranks, and the message that all have theirs."""

    PARTIALS = SIDE + 6
    """Partial sums of a slice of the gradient, to the rank that adds it up again."""

    SUM = SIDE + 7
    """The sum of that slice as its owner has it, to its checker."""

    VERDICT = SIDE + 8
    """Whether each checker found another sum."""

    GATHERED = SIDE + 9
    """Representations of shards that the loss of other shards needs."""

    CARRIED = SIDE + 10
    """The state that shards carry to the next step."""

    SLICES = SIDE + 11
    """Slices of chunks that move beside the steps."""

    MOVED = SIDE + 12
    """The sums of slices that are in place, and not yet in the cut."""

    TOGETHER = SIDE + 13
    """Collectives of the ranks that compute a shard together, in a group of their own."""

    STATE = 1 << 25
    """The state that a donor gives: its plan, its chunks, their sums."""

    BUCKETS = 1 << 26
    """Gradients: three tags a bucket from here on, see the functions below."""

    STAGES = 3 << 25
    """Between the stages of a model: two tags a shard from here on."""


def bucket_there(number: int) -> int:
    """The tag of a bucket's partial sums, to the rank that adds them up."""
    return Tag.BUCKETS + 3 * number


def bucket_back(number: int) -> int:
    """The tag of a bucket's sums, back from that rank."""
    return Tag.BUCKETS + 3 * number + 1


def bucket_gathered(number: int) -> int:
    """The tag of a bucket's partial sums in two levels, to the rank that combines them for its host."""
    return Tag.BUCKETS + 3 * number + 2


def stage_head(shard: int) -> int:
    """The tag of the shapes of a shard's activations, and of the weight of its loss on the way back."""
    return Tag.STAGES + 2 * shard


def stage_body(shard: int) -> int:
    """The tag of a shard's activations, and of their gradients on the way back."""
    return Tag.STAGES + 2 * shard + 1
