"""The parts of a step that change the state: its optimizers, their schedulers and the scaler; and the norm to which it clips gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors.rank.state.tracked import TrackedState
from actors.rank.step import bits
from fleet.errors import ConfigError, LoopError

ClipNorm = float | Mapping[torch.optim.Optimizer, float] | None
"""The norm to which a step's gradient is clipped: of the whole gradient, or by optimizer, of its gradient."""

NONE = 'Or set optimizer_sharding = "none".'

NAMED_WITHIN = 100
"""Steps. If none of the run's first ones takes a tracked optimizer, the loop has a mistake, unless all its parameters are frozen."""


class Clipped(NamedTuple):
    """Gradients of these ``optimizers``, as bits, are clipped together, to this ``norm``."""

    optimizers: int
    norm: float


class Update:
    """The update of one rank's state.

    Args:
        clip_norm: the norm to which a step clips its gradient; None: it does not clip.
        spread: the state is spread over ranks, so all gradients of a step are clipped, or skipped, together.

    Attributes:
        optimizers: all tracked ones, in order, with their ``names``. Sets of optimizers are bits.
        owners: by ``id`` of a parameter, the number of its optimizer, where there are several. A parameter of none has the last number plus
            one.
        asked: the optimizers that the loop body has named for the current step.
        taken: the optimizers that all ranks step in it.
        plateaus: schedulers that a figure steps. ``judged``: that figure for the current step; None: they are not stepped in it.
        rate: the learning rate of the first group in the step that was taken last.
    """

    def __init__(self, state: TrackedState, clip_norm: ClipNorm, *, spread: bool = False) -> None:
        objects = state.objects.values()
        self.optimizers: list[Any] = list(state.optimizers.values())
        self.names = list(state.optimizers)
        if not self.optimizers:
            raise ConfigError("track", sorted(state.objects), "none of its objects is an optimizer", "Track the optimizer, too.")
        schedulers = [one for one in objects if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
        self.plateaus = [one for one in schedulers if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)]
        self.schedulers = [one for one in schedulers if one not in self.plateaus]
        self.judged: float | None = None
        self.scaler = next((one for one in objects if isinstance(one, torch.amp.GradScaler)), None)
        self.asked = self.taken = self.all = (1 << len(self.optimizers)) - 1
        self.rate, self._spread = math.nan, spread
        self.owners = self._owned(state) if len(self.optimizers) > 1 else {}
        self._clip_norm = self._checked(clip_norm)
        self._begun: int | None = None  # the first step that this process has taken
        self._named = 0

    # ---- tracked objects -----------------------------------------------------------------------------------------------------------------

    def _owned(self, state: TrackedState) -> dict[int, int]:
        found: dict[int, int] = {}
        for number, (name, optimizer) in enumerate(state.optimizers.items()):
            for one in (one for group in optimizer.param_groups for one in group["params"]):
                if found.setdefault(id(one), number) != number:
                    both = f"a parameter of shape {tuple(one.shape)} is also in {self.names[found[id(one)]]}"
                    raise ConfigError(name, type(optimizer).__name__, both, "Give each parameter to one optimizer.")
        if self._spread and self.scaler is not None:
            reason = "with a state that is spread over ranks it is the scaler of one optimizer"
            raise ConfigError("track", sorted(self.names), reason, f"Train in bfloat16, without a scaler. {NONE}")
        for name, tracked in state.objects.items():
            if isinstance(tracked, torch.optim.lr_scheduler.LRScheduler) and self._number(tracked.optimizer) is None:
                raise ConfigError(name, type(tracked).__name__, "its optimizer is not tracked", "Track that, too.")
        others = (one for module in state.modules.values() for one in module.parameters())
        return {id(one): len(self.optimizers) for one in others} | found

    def _number(self, optimizer: object) -> int | None:
        return next((number for number, one in enumerate(self.optimizers) if one is optimizer), None)

    def _checked(self, clip_norm: ClipNorm) -> ClipNorm:
        for one in clip_norm if isinstance(clip_norm, Mapping) else ():
            if self._number(one) is None:
                reason = "this optimizer is not tracked"
                raise ConfigError("clip_norm", type(one).__name__, reason, f"Name tracked ones: {', '.join(self.names)}.")
        return clip_norm

    @property
    def several(self) -> bool:
        """There are several optimizers, so a step may take some of them."""
        return len(self.optimizers) > 1

    # ---- which ones a step takes ---------------------------------------------------------------------------------------------------------

    def of(self, optimizers: Sequence[Any]) -> int:
        """These optimizers as bits; none named: all. Raises LoopError: one is not tracked."""
        found = 0
        for one in optimizers:
            number = self._number(one)
            if number is None:
                tracked = ", ".join(self.names)
                raise LoopError(f"step.commit({type(one).__name__}): that is no tracked optimizer. Name one of run.track's: {tracked}.")
            found |= 1 << number
        found = found or self.all
        if self._spread and isinstance(self._clip_norm, Mapping) and found & (found - 1):
            reason = f"{self.words(found)} take one step, and with a state that is spread over ranks it is clipped as a whole"
            raise ConfigError("clip_norm", "of each optimizer", reason, f"Give one number for all. {NONE}")
        return found

    @property
    def width(self) -> int:
        """How many numbers each rank sends for its choice of optimizers: 0 where there is one."""
        return bits.width(len(self.optimizers)) if self.several else 0

    def said(self, *, early: bool) -> list[float]:
        """The numbers to send with the gradients. ``early``: this rank's loop body has not come to the step yet."""
        return bits.numbers_of(0 if early else self.asked, len(self.optimizers))[: self.width]

    def agree(self, said: Sequence[Sequence[float]]) -> None:
        """Set ``taken`` from the numbers of all ranks. Raises LoopError: ranks take different optimizers."""
        if not self.several:
            return
        named = {rank: found for rank, row in enumerate(said) if (found := bits.any_of([row]))}
        self.taken = next(iter(named.values()))
        other = next((rank for rank, found in named.items() if found != self.taken), None)
        if other is not None:
            first, taken = next(iter(named)), f"{self.words(self.taken)} and rank {other} {self.words(named[other])}"
            raise LoopError(f"step.commit(): rank {first} takes {taken}. All ranks take the same step: choose by step.number.")

    def words(self, taken: int) -> str:
        """The names of these optimizers."""
        return " with ".join(name for number, name in enumerate(self.names) if taken >> number & 1)

    @property
    def stepping(self) -> list[tuple[int, Any]]:
        """(number, optimizer) of each optimizer that the step takes."""
        return [(number, one) for number, one in enumerate(self.optimizers) if self.taken >> number & 1]

    @property
    def following(self) -> list[Any]:
        """The schedulers that are stepped with them."""
        return [one for one in self.schedulers if self._steps(one)]

    @property
    def judging(self) -> list[Any]:
        """The schedulers that a figure steps with them."""
        return [one for one in self.plateaus if self._steps(one)]

    def _steps(self, scheduler: Any) -> bool:
        return not self.several or bool(self.taken >> (self._number(scheduler.optimizer) or 0) & 1)

    def note(self, step: int) -> None:
        """The step after ``step`` steps is taken."""
        self._begun = step if self._begun is None else self._begun
        self._named |= self.taken

    def check_named(self, steps: int, total: int) -> None:
        """``steps`` of ``total`` steps are taken. Raises ConfigError: none of them has taken one of the optimizers."""
        missing = self.all & ~self._named
        if not missing or self._begun != 0 or steps != min(total, NAMED_WITHIN):
            return
        name = next((name for number, name in enumerate(self.names) if missing >> number & 1 and self._trains(number)), None)
        if name is not None:
            reason = f"none of the first {steps} steps has taken this optimizer, so that nothing of it is trained"
            later = "If its turn comes later, freeze its parameters until then: requires_grad_(False)."
            way_out = f"Name it in one of them, alone or with another: step.commit(OPTIMIZER, OTHER). {later} Or do not track it."
            raise ConfigError("track", name, reason, way_out)

    def _trains(self, number: int) -> bool:
        """Whether some parameter of this optimizer is not frozen now."""
        return any(one.requires_grad for group in self.optimizers[number].param_groups for one in group["params"])

    # ---- clipping ------------------------------------------------------------------------------------------------------------------------

    @property
    def clipped(self) -> Iterator[Clipped]:
        """The sets of gradients to clip in the current step."""
        if isinstance(self._clip_norm, Mapping):
            norms = ((number, self._clip_norm.get(one)) for number, one in self.stepping)
            yield from (Clipped(1 << number, norm) for number, norm in norms if norm is not None)
        elif self._clip_norm is not None:
            yield Clipped(self.taken, self._clip_norm)

    # ---- state of the scaler and the optimizers ------------------------------------------------------------------------------------------

    @property
    def unscaling(self) -> float:
        """The factor by which a gradient scaler unscales the gradient before clipping, with the scaler's rounding."""
        return 1.0 if self.scaler is None else float(torch.tensor(self.scaler.get_scale(), device="cpu").double().reciprocal().float())

    @property
    def moments(self) -> list[torch.Tensor]:
        """The tensors of the optimizers' states."""
        states = [one for optimizer in self.optimizers for one in optimizer.state.values()]
        return [value for one in states for value in one.values() if isinstance(value, torch.Tensor) and value.dim()]
