"""The tracked training state: one skeleton and a list of tensors, its digest, and its transfer from rank to rank."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from actors.rank.fsdp.taken import Unit, numbers
from actors.rank.membership.process_group import Group, GroupBroken, Work
from actors.rank.mesh.parts import InWhole, cut_like, in_whole, local
from actors.rank.plain_kinds import PLAIN
from actors.rank.skeletons import Skeletons, read_skeleton
from actors.rank.state import optimizers
from actors.rank.state.weights import Read
from actors.rank.step.module_buffers import AVERAGED_BUFFER_LIMIT
from actors.rank.tags import Tag
from fleet.errors import ConfigError

CHUNK_BYTES = 8 << 20
SMALL_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 4
LARGEST_PLAN_BYTES = 1 << 30
"""Limit of the skeleton of a state together with the shapes of its tensors."""


MARKS = "\0requires_grad"
"""The name of ``TrackedState.marks`` among the parts of a state. No object has such a name."""


class Flat(NamedTuple):
    """The result of :meth:`TrackedState.flat`.

    Attributes:
        skeleton: text; all of the state except the tensors.
        tensors: the live tensors, not copies. One that occurs twice (tied weights) is listed once.
        volatile: indices of the tensors that a forward may change between commits: small buffers of modules, and integer ones.
        divided: by index, the place of a tensor of which ranks that compute together have a part each.
        elsewhere: indices of the tensors of other stages, which are empty here.
    """

    skeleton: str
    tensors: list[torch.Tensor]
    volatile: frozenset[int]
    divided: Mapping[int, InWhole] = MappingProxyType({})
    elsewhere: frozenset[int] = frozenset()


class StageCut(NamedTuple):
    """A model whose ranks have layers one after the other, as one of them has it.

    Attributes:
        layers: of the whole model; none where it is not cut. ``elsewhere``: ids of the parameters and buffers of other stages.
        leads: of the ranks that compute a unit together, this one writes the tensors that all of them have.
    """

    layers: Sequence[nn.Module] = ()
    elsewhere: frozenset[int] = frozenset()
    leads: bool = True


class TrackedState:
    """The training state: objects by name, each with ``state_dict`` and ``load_state_dict``.

    Raises ConfigError for an object without these, or with a state that is no plain data, see :mod:`fleet.protocol.plain`.

    Attributes:
        before_load: called when the state is about to be replaced; it waits for threads that still read the old one.
        units: the units into which ``fully_shard`` has cut the modules.
        apart: ids of the parameters that ranks keep in chunks: :meth:`flat` leaves them out.
        readers: by ``id`` of a parameter that will be in chunks, a function that reads its first value: see
            :mod:`actors.rank.state.weights`.
        load_parameter: takes (parameter, value) for each parameter of ``apart`` in a state that is loaded.
        ahead: there is room for the next unit while one computes.
        casts: units compute with stand-ins of parameters, whose gradients are then given to the parameters.
        trained: ids of the parameters that required a gradient when they were tracked.
        marks: gives the parameters that a loop has frozen or thawed, as text; None: there are none.
        mark: takes the marks of a state that is loaded.
        free: called between shards, and before the state changes: frees parameters that modules hold for one shard.
        stages: which layers are here.
    """

    def __init__(self, **objects: Any) -> None:
        for name, tracked in objects.items():
            if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
                raise ConfigError(
                    name, type(tracked).__name__, "it has no state_dict() and load_state_dict()", "Wrap it in an object that has."
                )
        self.objects = dict(objects)
        self.before_load: Callable[[], object] = lambda: None
        self.units: Sequence[Unit] = ()
        self.apart: frozenset[int] = frozenset()
        self.readers: Mapping[int, Read] = {}
        self.load_parameter: Callable[[torch.Tensor, torch.Tensor], object] = lambda parameter, value: None
        self.casts, self.ahead = False, True
        self.trained = frozenset(id(one) for module in self.modules.values() for one in module.parameters() if one.requires_grad)
        self.marks: Callable[[], str | None] = lambda: None
        self.mark: Callable[[str | None], object] = lambda marks: None
        self.free: Callable[[], object] = lambda: None
        self.stages = StageCut()
        self._seen: dict[int, _Seen] = {}
        self._skeletons = Skeletons()
        self.flat()  # refuses a state that cannot be written now, not after a rank is lost

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: tracked for name, tracked in self.objects.items() if isinstance(tracked, nn.Module)}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: tracked for name, tracked in self.objects.items() if isinstance(tracked, torch.optim.Optimizer)}

    def cut(self, stages: StageCut) -> None:
        """Set :attr:`stages`."""
        self.stages, self._seen = stages, {}

    def replace(self, tracked: Any, stand_in: Any) -> None:
        """Track ``stand_in`` in the place of ``tracked``, under its name."""
        self.objects = {name: stand_in if one is tracked else one for name, one in self.objects.items()}

    def flatten(self) -> tuple[str, list[torch.Tensor]]:
        """(skeleton, tensors). The skeleton is text; it holds all except the tensors, which are the live ones, not copies.

        A tensor that occurs twice (tied weights) is listed once.
        """
        flat = self.flat()
        return flat.skeleton, flat.tensors

    def flat(self, whole: Mapping[str, Any] | None = None) -> Flat:
        """As :meth:`flatten`, and which of the tensors a forward may change. ``whole``: see :meth:`digest`."""
        parts = self.common() | dict(whole or {}) | ({MARKS: marks} if (marks := self.marks()) is not None else {})
        found = _Tensors(self._seen, self._alone if self.stages.layers else None)
        skeleton = self._skeletons.write(parts, found.index)
        self._seen = found.seen
        buffers = [tensor for name in self.modules for key, tensor in parts[name].items() if _is_volatile(key, tensor)]
        volatile = frozenset(found.index(tensor) for tensor in buffers if not tensor.is_meta)
        return Flat(skeleton, found.tensors, volatile, found.divided, frozenset(found.elsewhere))

    @property
    def numbers(self) -> dict[int, int]:
        """By ``id`` of a parameter, the number of its layer, from 1 on; without layers that of its unit."""
        if not self.stages.layers:
            return numbers(self.units)
        return {id(one): number for number, layer in enumerate(self.stages.layers, 1) for one in layer.parameters()}

    @property
    def _alone(self) -> frozenset[int]:
        """Ids of the tensors of this rank's layers, which no other stage has."""
        if not self.stages.leads:
            return frozenset()
        own = [
            one for layer in self.stages.layers for one in (*layer.parameters(), *layer.buffers()) if id(one) not in self.stages.elsewhere
        ]
        held = ((one, optimizer.state.get(one, {})) for optimizer in self.optimizers.values() for one in own)
        moments = [value for one, state in held for key, value in state.items() if optimizers.is_cut(key, value, one)]
        return frozenset(map(id, (*own, *moments)))

    def common(self) -> dict[str, Any]:
        """The state dict of each object, with the live tensors, without parameters that ranks keep in chunks."""
        parts = {name: _live_state(tracked) for name, tracked in self.objects.items()}
        for name, live in self.spread().items():
            parts[name] = {key: value for key, value in live.items() if id(value) not in self.apart}
        return parts

    def spread(self) -> dict[str, dict[str, Any]]:
        """The state dict of each module with parameters in chunks, with the live tensors."""
        found = {name: dict(_live_state(module)) for name, module in self.modules.items()} if self.apart else {}
        return {name: live for name, live in found.items() if any(id(value) in self.apart for value in live.values())}

    def load(self, skeleton: str, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the state that :meth:`flatten` has described. Tensors may be kept, so they must not change afterwards.

        Of a divided tensor it takes this rank's part, or the whole. Raises ConfigError when it is the state of other objects.
        """
        parts = read_skeleton(skeleton, tensors)
        marks = parts.pop(MARKS, None)
        if parts.keys() != self.objects.keys():
            raise ConfigError(
                "track", sorted(self.objects), f"the state to load holds {sorted(parts)}", "Track the same names in every run."
            )
        self.before_load()
        self._seen = {}
        for name, tracked in self.objects.items():
            if self.apart and isinstance(tracked, nn.Module):
                self._load_rest(tracked, parts[name])
            elif isinstance(tracked, torch.optim.Optimizer):
                optimizers.load(tracked, parts[name])
            elif isinstance(tracked, nn.Module):
                live = _live_state(tracked)
                tracked.load_state_dict({key: cut_like(key, live.get(key), value) for key, value in parts[name].items()})
            else:
                tracked.load_state_dict(parts[name])
        self.mark(marks)

    def _load_rest(self, module: nn.Module, part: Mapping[str, Any]) -> None:
        """Give parameters in chunks to ``load_parameter``, where ``part`` has them; the module takes the rest."""
        apart = {key: value for key, value in _live_state(module).items() if id(value) in self.apart}
        for key in apart.keys() & part.keys():
            if part[key].shape != apart[key].shape:
                reason = f"the state to load has the shape {tuple(part[key].shape)} for it"
                raise ConfigError(key, tuple(apart[key].shape), reason, "Load a checkpoint of the same model.")
            self.load_parameter(apart[key], part[key])
        found = module.load_state_dict({key: value for key, value in part.items() if key not in apart}, strict=False)
        missing = {key for key in found.missing_keys if id(_at(module, key)) not in self.apart}
        if missing or found.unexpected_keys:
            names = sorted(missing) + sorted(found.unexpected_keys)
            raise ConfigError("model", names[0], "the state to load is that of another model", "Load a checkpoint of the same model.")

    def digest(self, step: int, whole: Mapping[str, Any] | None = None, *, known: Sequence[bytes] | None = None) -> str:
        """SHA-256 in hex over the whole state, the random generators and the data cursor; equal on ranks that are equal bit for bit.

        The cursor is ``step``, the number of committed steps: with the run's seed it determines the next samples. ``whole``: full state
        dicts of objects whose own state dict lacks parts. ``known``: the :meth:`fingerprint` of each tensor of :meth:`in_order`, where this
        rank lacks some.
        """
        parts = self.digest_parts(whole) if known is None else self._digest_of(dict(whole or {}), iter(known))
        return hashlib.sha256(repr(sorted({**parts, "cursor": step}.items())).encode()).hexdigest()

    def in_order(self, states: Mapping[str, Any]) -> list[torch.Tensor]:
        """All tensors of all objects' ``states``, in an order that does not depend on the order in which they were made."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> bytes:
            found.append(tensor)
            return b""

        for name in sorted(self.objects):
            _update(hashlib.sha256(), states[name], note)
        return found

    @staticmethod
    def fingerprint(tensor: torch.Tensor) -> bytes:
        """SHA-256 of its values."""
        return hashlib.sha256(_values(tensor)).digest()

    def _digest_of(self, states: Mapping[str, Any], known: Iterator[bytes]) -> dict[str, str]:
        parts = {name: _digest(states[name], lambda _: next(known)) for name in sorted(self.objects)}
        return {**parts, "rng": self._rng_digest}

    @property
    def _rng_digest(self) -> str:
        return _digest([torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)])

    def digest_parts(self, whole: Mapping[str, Any] | None = None) -> dict[str, str]:
        """A digest for each tracked object and one for ``rng``, to find the one that differs."""
        states = {name: tracked.state_dict() for name, tracked in self.objects.items()} | dict(whole or {})
        parts = {name: _digest(state) for name, state in states.items()}
        return {**parts, "rng": self._rng_digest}


def _live_state(tracked: Any) -> Any:
    """The state dict; of a module with its parameters themselves, which stay the same objects from call to call."""
    plain = isinstance(tracked, nn.Module) and type(tracked).state_dict is nn.Module.state_dict
    return tracked.state_dict(keep_vars=True) if plain else tracked.state_dict()


def _at(module: nn.Module, path: str) -> Any:
    """The object at ``path`` in ``module``; None if there is none. A wrapper's state dict may leave its own name out of a path."""
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _is_volatile(name: str, value: Any) -> bool:
    """Whether a forward may change this entry of a module's state, as far as :mod:`actors.rank.step.module_buffers` allows it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    small = not value.is_floating_point() or value.numel() <= AVERAGED_BUFFER_LIMIT
    return small or name.endswith(("running_mean", "running_var"))


class _Seen(NamedTuple):
    """A tensor of the last state, detached and described: to do this again for each tensor in each step would take most of the time."""

    live: torch.Tensor
    address: int
    detached: torch.Tensor
    key: Any
    place: InWhole | None


class _Tensors:
    """Makes a list of the tensors of a state.

    Args:
        known: the tensors seen in the last state.
        alone: ids of those that no other stage has; None without stages.
    """

    def __init__(self, known: Mapping[int, _Seen], alone: frozenset[int] | None) -> None:
        self._alone, self.elsewhere = alone, list[int]()
        self.tensors: list[torch.Tensor] = []
        self.divided: dict[int, InWhole] = {}
        self.seen: dict[int, _Seen] = {}
        self._before = known
        self._indices: dict[Any, int] = {}

    def index(self, tensor: torch.Tensor) -> int:
        """The index of ``tensor`` in the list."""
        found, mine = self._before.get(id(tensor)), local(tensor)
        lacking, alone = self._alone is not None and tensor.is_meta, self._alone is not None and id(tensor) in self._alone
        changed = found is None or found.live is not tensor or found.address != mine.data_ptr()
        if found is None or changed or (found.detached.shape != mine.shape and not lacking):
            found = _see(tensor, mine, lacking=lacking, alone=alone)
        self.seen[id(tensor)] = found
        index = self._indices.setdefault(found.key, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(found.detached)
            if found.place is not None:
                self.divided[index] = found.place
            if lacking:
                self.elsewhere.append(index)
        return index


def _see(tensor: torch.Tensor, mine: torch.Tensor, *, lacking: bool, alone: bool) -> _Seen:
    if lacking:
        return _Seen(tensor, 0, torch.empty(0, dtype=tensor.dtype, device="cpu"), id(tensor), None)
    detached, place = mine.detach(), in_whole(tensor) or (InWhole((0,) * mine.dim(), tuple(mine.shape)) if alone else None)
    key = (mine.data_ptr(), mine.dtype, mine.shape, mine.stride(), mine.device) if mine.data_ptr() else id(tensor)
    return _Seen(tensor, mine.data_ptr(), detached, key, place)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in logical order, flat, as uint8: a view if memory has this order, else a copy. (Another rank's memory may be in another
    order.)"""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- digest ------------------------------------------------------------------------------------------------------------------------------


Values = Callable[[torch.Tensor], Any]
"""Gives the bytes that stand for a tensor's values in a digest."""


def _values(tensor: torch.Tensor) -> Any:
    return flat_bytes(local(tensor).cpu()).numpy()


def _digest(value: Any, values: Values = _values) -> str:
    found = hashlib.sha256()
    _update(found, value, values)
    return found.hexdigest()


def _update(found: Any, value: Any, values: Values) -> None:
    """Add ``value`` to the digest in canonical form: keys sorted, with types and lengths, tensors with dtype and shape."""
    if isinstance(value, torch.Tensor):
        found.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        found.update(values(value))
    elif isinstance(value, np.ndarray):
        found.update(f"array {value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=lambda k: (type(k).__name__, repr(k))):
            _update(found, key, values)
            _update(found, value[key], values)
    elif isinstance(value, (list, tuple, deque)):
        found.update(f"sequence {len(value)} ".encode())
        for item in value:
            _update(found, item, values)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        text = value.hex() if isinstance(value, (float, bytes)) else str(value)
        found.update(f"{type(value).__name__} {len(text)} {text} ".encode())
    else:
        found.update(PLAIN.write(value).encode())  # equal values give equal bytes, unlike in a pickle


# ---- parts -------------------------------------------------------------------------------------------------------------------------------


Slice = tuple[int, torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""(index of a tensor, some of its rows, the offsets of their begin, its shape)."""

CUT_BYTES = 64 << 10
"""Smaller tensors are not cut."""


def slices(tensors: Sequence[torch.Tensor], count: int) -> list[list[Slice]]:
    """The state in ``count`` parts of about equal bytes: whole tensors one after the other, the large ones cut between rows.

    The begin of a part is rounded to a row. So a part has at most one row of a tensor more or less than its share.
    """
    parts: list[list[Slice]] = [[] for _ in range(count)]
    share = sum(tensor.nbytes for tensor in tensors) / count
    start = 0
    for index, tensor in enumerate(tensors):
        size = tensor.nbytes
        rows = tensor.shape[0] if tensor.ndim and size > CUT_BYTES else 1
        cuts = [round((min(max(share * part, start), start + size) - start) / max(size, 1) * rows) for part in range(1, count)]
        for part, (low, high) in enumerate(itertools.pairwise([0, *cuts, rows])):
            if low < high and rows > 1:
                parts[part].append((index, tensor[low:high], (low, *(0,) * (tensor.ndim - 1)), tuple(tensor.shape)))
            elif low < high:
                parts[part].append((index, tensor, (0,) * tensor.ndim, tuple(tensor.shape)))
        start += size
    return parts


# ---- transfer ----------------------------------------------------------------------------------------------------------------------------
#
# Three messages and the chunks: two lengths; the plan (skeleton and the shape of each tensor); the chunks, in order; their checksums.
# A chunk is a stretch of one large tensor, which travels without a copy, or several small tensors one after the other.


@dataclass(frozen=True)
class _Piece:
    tensor: int
    start: int
    stop: int


def _chunks(sizes: Sequence[int]) -> Iterator[list[_Piece]]:
    """Stretches of each large tensor, then small tensors together, in chunks of at most CHUNK_BYTES."""
    small: list[_Piece] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size > SMALL_BYTES:
            yield from ([_Piece(index, start, min(size, start + CHUNK_BYTES))] for start in range(0, size, CHUNK_BYTES))
        elif size:
            if filled + size > CHUNK_BYTES:
                yield small
                small, filled = [], 0
            small.append(_Piece(index, 0, size))
            filled += size
    if small:
        yield small


def checksum(data: torch.Tensor) -> int:
    """63 bits over a flat uint8 tensor of the host, at the speed of memory."""
    return xxhash.xxh3_64_intdigest(data.numpy().data) >> 1


class _Window:
    """The last few chunks on their way. ``arrived`` is called for each in order."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived, self._under_way = arrived, deque[tuple[int, Work]]()

    def push(self, number: int, work: Work) -> None:
        self._under_way.append((number, work))

    def make_room(self, room: int = 1) -> None:
        while len(self._under_way) > CHUNKS_IN_FLIGHT - room:
            number, work = self._under_way.popleft()
            work.wait()
            self._arrived(number)


class _Staging:
    """Memory for chunks that are no stretch of one host tensor; one buffer for each chunk on its way."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None] * CHUNKS_IN_FLIGHT

    def get(self, number: int, length: int) -> torch.Tensor:
        turn = number % CHUNKS_IN_FLIGHT
        buffer = self._buffers[turn]
        if buffer is None:
            buffer = self._buffers[turn] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        return buffer[:length]


def _views(chunk: Sequence[_Piece], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [memory[piece.tensor][piece.start : piece.stop] for piece in chunk]


def _in_place(views: Sequence[torch.Tensor]) -> bool:
    return len(views) == 1 and views[0].device.type == "cpu"


def send_state(group: Group, to: int, state: TrackedState) -> None:
    """Send ``state`` to view rank ``to``, which calls :func:`receive_state`. Raises GroupBroken."""
    skeleton, tensors = state.flatten()
    memory = [flat_bytes(tensor) for tensor in tensors]
    plan = PLAIN.write((skeleton, [(tensor.dtype, tensor.shape) for tensor in tensors])).encode()
    group.send(torch.tensor([len(plan)], device="cpu"), to, Tag.STATE)
    group.send(torch.frombuffer(bytearray(plan), dtype=torch.uint8), to, Tag.STATE)
    sums: list[int] = []
    staging, window = _Staging(), _Window(lambda _: None)
    for number, chunk in enumerate(_chunks([data.numel() for data in memory])):
        window.make_room()
        views = _views(chunk, memory)
        data = views[0] if _in_place(views) else staging.get(number, sum(view.numel() for view in views))
        if not _in_place(views):
            torch._foreach_copy_(_apart(data, views), views)
        window.push(number, group.start([(data, to)], [], Tag.STATE))
        sums.append(checksum(data))
    window.make_room(CHUNKS_IN_FLIGHT)
    group.send(torch.tensor([0, *sums], device="cpu"), to, Tag.STATE)


def _apart(data: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``data`` in pieces of the lengths of ``views``, which lie in it one after the other."""
    return list(data.split([view.numel() for view in views]))


def receive_state(group: Group, source: int, state: TrackedState, before_load: Callable[[], None] = lambda: None) -> None:
    """Take over the state of view rank ``source``, which calls :func:`send_state`.

    The new state is received beside the old one, and verified. Then ``before_load`` is called, and only then does ``state`` change. Raises
    GroupBroken when the transfer breaks or a checksum differs; the old state is as it was.
    """
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    group.recv(length, source, Tag.STATE)
    if not 0 < int(length) <= LARGEST_PLAN_BYTES:
        raise GroupBroken(f"rank {source} announces a plan of {int(length)} bytes for its state", group.generation)
    plan = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.recv(plan, source, Tag.STATE)
    skeleton, shapes = PLAIN.read(plan.numpy().tobytes().decode())
    shadow = [_fresh(dtype, shape) for dtype, shape in shapes]
    _receive_tensors(group, source, [flat_bytes(tensor) for tensor in shadow])
    before_load()
    state.load(skeleton, shadow)


def _fresh(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A new tensor in memory from numpy, which asks for huge pages: to touch new small pages costs more than the network transfer."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    data = torch.from_numpy(np.empty(shape.numel() * dtype.itemsize, dtype=np.uint8))
    return data.view(dtype).view(shape)


def _receive_tensors(group: Group, source: int, memory: Sequence[torch.Tensor]) -> None:
    chunks = list(_chunks([data.numel() for data in memory]))
    buffers: dict[int, torch.Tensor] = {}
    sums: list[int] = []

    def arrived(number: int) -> None:
        data, views = buffers.pop(number), _views(chunks[number], memory)
        sums.append(checksum(data))
        if not _in_place(views):
            torch._foreach_copy_(views, _apart(data, views))

    staging, window = _Staging(), _Window(arrived)
    for number, chunk in enumerate(chunks):
        window.make_room()
        views = _views(chunk, memory)
        buffers[number] = views[0] if _in_place(views) else staging.get(number, sum(view.numel() for view in views))
        window.push(number, group.start([], [(buffers[number], source)], Tag.STATE))
    window.make_room(CHUNKS_IN_FLIGHT)
    sent = torch.zeros(1 + len(chunks), dtype=torch.int64, device="cpu")
    group.recv(sent, source, Tag.STATE)
    for number, (mine, theirs) in enumerate(zip(sums, sent[1:].tolist(), strict=True)):
        if mine != theirs:
            raise GroupBroken(f"chunk {number} of the state arrived damaged from rank {source}", group.generation)
