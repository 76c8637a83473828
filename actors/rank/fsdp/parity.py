"""Models in chunks that have parity in the place of copies (``parity``). See :mod:`fleet.protocol.parity` and docs/decisions/0054.

A chunk has one owner, and nobody guards it. What its family needs to make it again, should the owner be lost, travels with each step: its
mean gradient before the step is decided, so that a decided step can be taken for whoever is lost in it, and what the step has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from actors.rank.fsdp.bits import give, pieces_of, take, xor
from actors.rank.fsdp.engine import FsdpEngine
from actors.rank.fsdp.kept import Kept
from actors.rank.fsdp.streamed import StreamedEngine
from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.state.tracked import TrackedState
from actors.rank.step.outcome import Outcome
from actors.rank.zero1.pieces import Piece
from actors.rank.zero1.resharding import Resharding
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.chunks import KIN_MOST, Chunk, Claim
from fleet.protocol.domains import Place
from fleet.protocol.member import Offer
from fleet.protocol.parity import Revival, broken_families, families, family_of, revivals
from fleet.protocol.types import StateId
from fleet.settings.run import RunSettings

WAY_OUT = "Use --parameter-copies in the place of --parity."


def check_stepped(state: TrackedState) -> None:
    """Raises ConfigError for what cannot be stepped one flat buffer after another."""
    for name, one in state.objects.items():
        if isinstance(one, torch.amp.GradScaler):
            raise ConfigError("parity", name, "a GradScaler takes a step in one go, and with parity it is taken in parts", WAY_OUT)
    for name, optimizer in state.optimizers.items():
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise ConfigError("parity", name, "it has hooks around its steps, which would be called for each part of one", WAY_OUT)


class ParityEngine(FsdpEngine):
    """A :class:`FsdpEngine` that keeps parity for its family. See the module.

    Attributes:
        kept: what it keeps in its view; None before the first.
        beside: what was made for views that did not come about, as chunks are kept beside.
    """

    def __init__(self, state: TrackedState, *arguments: Any) -> None:
        check_stepped(state)
        self.kept: Kept | None = None
        self.beside: list[Kept] = []
        self._options: list[dict[str, Any]] = []
        self._present = 0  # in the step that was taken last, the parameters that had a gradient
        self._alone = False
        super().__init__(state, *arguments)

    # ---- where this rank stands ----------------------------------------------------------------------------------------------------------

    def claim(self, node: int) -> Claim:
        found = super().claim(node)
        if found.state is None:
            return found
        held = [*([self.kept] if self.kept is not None else []), *([] if self.ready else self.beside)]
        return replace(found, kin=tuple(one.kin for one in held))

    def begin(self, state: StateId) -> None:
        super().begin(state)
        self.kept, self.beside = None, []

    def lose(self) -> None:
        super().lose()
        self.kept, self.beside = None, []

    def keep(self, kept: Kept) -> None:
        """The chunks that it is of are here."""
        self.kept, self.beside = kept, []

    def keep_beside(self, kept: Kept) -> None:
        """Somebody may have gone on to its view, and this rank has its chunks beside its own."""
        self.beside = [kept, *self.beside][: KIN_MOST - 1]

    def kept_in(self, generation: int) -> Kept:
        return next(one for one in (self.kept, *self.beside) if one is not None and one.generation == generation)

    @property
    def parity_bytes(self) -> int:
        """Host memory of the parity that this rank keeps."""
        return 0 if self.kept is None else self.kept.bytes

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def reduce(self, offer: Offer, *, early: bool = False) -> Outcome:
        if self.kept is not None and self.kept.behind:
            raise GroupBroken(self.kept.behind, self._group.generation)
        return super().reduce(offer, early=early)

    def _before_ready(self) -> None:
        super()._before_ready()
        assert self.kept is not None
        self.kept.note_means(self._group, self._gradients.mean_flats)

    def _clip(self, norm: float) -> None:
        """Each part of a step clips a copy of its own: what the family may need is as it was noted."""

    def _take_step(self) -> None:
        assert self.kept is not None
        self._options, self._present = self.chunks.options(), self._gradients.mean_present
        self.beside = []
        try:
            self._step_part([], probes=True)
            self.kept.take_step(None if self._alone else self._group, self._gradients.mean_flats, lambda flat: self._step_part([flat]))
        finally:
            self.chunks.widen()

    def _step_part(self, flats: Sequence[int], *, probes: bool = False) -> None:
        stretches = self.chunks.narrow(flats, probes=probes)
        for one in stretches:
            one.grad = None if one.grad is None else self._clipped(one.grad)
        self._optimizer.step()
        for one in stretches:
            one.grad = None

    def _clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor if self.factor < 1.0 else gradient.clone()

    def advance(self, factor: float) -> None:
        self._alone = True
        try:
            super().advance(factor)
        finally:
            self._alone = False

    def step_for(self, pieces: Sequence[Piece], gradients: Sequence[torch.Tensor]) -> list[Piece]:
        """The pieces of a lost rank behind the step that this one has taken last."""
        return self.chunks.step_apart(pieces, [self._clipped(gradient) for gradient in gradients], self._present, self._options)


class StreamedParityEngine(ParityEngine, StreamedEngine):
    """The same where gradients leave in the backward."""


class ParityResharding(Resharding):
    """A :class:`Resharding` that makes what was lost of parity, and new parity for the new view, before anybody drops what it had.

    Args:
        parity: members of a family beside one of them, see :func:`fleet.protocol.parity.families`.
    """

    _engine: ParityEngine

    def __init__(self, *arguments: Any, parity: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parity = parity
        self._next: Kept | None = None

    # ---- what was lost -------------------------------------------------------------------------------------------------------------------

    def _revivals(self, claims: Sequence[Claim], target: StateId) -> Sequence[Revival]:
        return revivals(claims, target, self._engine.chunks.extents)

    def _revive(self, group: Group, made: Sequence[Revival]) -> None:
        for one in made:
            if group.rank == one.keeper:
                self._make(group, one)
            elif any(rank == group.rank for rank, _ in one.givers):
                self._give(group, one)

    def _why_lost(self, claims: Sequence[Claim], target: StateId) -> str:
        broken = [missing for _, missing in broken_families(claims, target)]
        told = "; ".join(f"ranks {', '.join(map(str, missing))} of one family" for missing in broken)
        return f", and parity makes up for one rank of a family: lost are {told}" if told else ""

    def _give(self, group: Group, one: Revival) -> None:
        kept = self._engine.kept_in(one.generation)
        for bits, mean in kept.gift(one.place, one.taken).values():
            give(group, bits, one.keeper)
            give(group, mean, one.keeper)

    def _make(self, group: Group, one: Revival) -> None:
        """The stripe of the lost rank is what parity has and the others do not. It counts from now on, beside this rank's chunks."""
        kept = self._engine.kept_in(one.generation)
        pieces: list[Piece] = []
        for number, flat in enumerate(kept.flats):
            steps = one.taken is not None and number >= one.taken
            bits, mean = kept.sums[flat].clone(), kept.logs[flat].clone() if steps else torch.zeros(0, dtype=torch.uint8, device="cpu")
            for giver, _ in one.givers:
                bits, mean = xor(bits, take(group, giver)), xor(mean, take(group, giver))
            found = self._read(group, bits)
            pieces += self._engine.step_for(found, self._means(flat, one.stripe, found, mean)) if steps else found
        self._engine.chunks.keep_beside((one.stripe,), pieces)

    def _read(self, group: Group, bits: torch.Tensor) -> list[Piece]:
        try:
            return pieces_of(bits, self._engine.device)
        except ProtocolError as error:
            self._engine.kept = None  # then all find that the stripe is lost
            self._protocol.receiving()
            raise GroupBroken(str(error), group.generation) from error

    def _means(self, flat: int, made: Chunk, pieces: Sequence[Piece], mean: torch.Tensor) -> list[torch.Tensor]:
        lo, hi = self._engine.chunks.span(flat, made)
        kind = self._engine.chunks.kind(flat)
        whole = mean[: (hi - lo) * kind.itemsize].view(kind).to(self._engine.device)
        return [whole[piece.lo - lo : piece.hi - lo] for piece in pieces]

    # ---- the new view --------------------------------------------------------------------------------------------------------------------

    def _stay(self, there: Sequence[Claim], wanted: Sequence[tuple[Chunk, ...]]) -> bool:
        return False  # who keeps whose parity may be another, and of a step that somebody was lost in not all have all

    def _prepare(self, group: Group, target: StateId, places: Sequence[Place], pieces: Sequence[Piece]) -> None:
        members = family_of(families(places, self._parity), group.rank)
        chunks = self._engine.chunks
        self._next = Kept(group.generation, group.size, members, group.rank, target.step, chunks)
        self._next.begin(group, pieces)

    def _keep(self, wanted: tuple[Chunk, ...], pieces: list[Piece]) -> None:
        super()._keep(wanted, pieces)
        if self._next is not None and self._engine.claim(0).state is not None:
            self._engine.keep_beside(self._next)

    def _adopted(self) -> None:
        assert self._next is not None
        self._engine.keep(self._next)


def engine_of(settings: RunSettings) -> type[FsdpEngine]:
    """The engine of a model in chunks."""
    if settings.parity:
        return StreamedParityEngine if settings.gradient_sync == "shard" else ParityEngine
    return StreamedEngine if settings.gradient_sync == "shard" else FsdpEngine
