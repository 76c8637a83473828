"""Pieces of a sharded optimizer's state, and how they travel from rank to rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.plain_kinds import PLAIN
from actors.rank.state.tracked import checksum, flat_bytes
from actors.rank.tags import Tag

_Parts = tuple[torch.Tensor, torch.Tensor]
ROOM = 16
"""Bytes; each tensor begins at a multiple of it."""


PARAMETER = "\0parameter"
"""The key of the parameter's own elements in a piece, where they are kept in chunks too. No optimizer has a value of this name."""


class StatePiece(NamedTuple):
    """The optimizer's state of elements ``lo..hi`` of one parameter, in coordinates of the flat buffer."""

    parameter: int
    lo: int
    hi: int
    values: Mapping[str, Any]


def pack(pieces: Sequence[StatePiece]) -> tuple[torch.Tensor, torch.Tensor]:
    """(description of the pieces, bytes of their tensors), both flat uint8 on the host; see :func:`unpack`."""
    described, tensors = [], []
    for piece in pieces:
        fields = {}
        for key, value in piece.values.items():
            is_tensor = isinstance(value, torch.Tensor)
            fields[key] = (is_tensor, (value.dtype, value.shape, value.is_cpu) if is_tensor else value)
            tensors += [flat_bytes(value)] if is_tensor else []
        described.append((piece.parameter, piece.lo, piece.hi, fields))
    header = torch.frombuffer(bytearray(PLAIN.write(described).encode()), dtype=torch.uint8)
    payload = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, device="cpu")
    at = 0
    for tensor in tensors:
        payload[at : at + tensor.numel()].copy_(tensor)
        payload[at + tensor.numel() : at + _room(tensor)].zero_()  # the same bytes for the same pieces
        at += _room(tensor)
    return header, payload


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // ROOM) * ROOM


def unpack(header: torch.Tensor, payload: torch.Tensor, device: torch.device) -> list[StatePiece]:
    """Inverse of :func:`pack`; tensors of the host are views of ``payload``, others come to ``device``."""
    at, pieces = 0, []
    for parameter, lo, hi, fields in PLAIN.read(header.numpy().tobytes().decode()):
        values: dict[str, Any] = {}
        for key, (is_tensor, what) in fields.items():
            if not is_tensor:
                values[key] = what
                continue
            dtype, shape, on_host = what
            flat = payload[at : at + shape.numel() * dtype.itemsize]
            values[key] = flat.view(dtype).view(shape).to("cpu" if on_host else device)
            at += _room(flat)
        pieces.append(StatePiece(parameter, lo, hi, values))
    return pieces


def exchange_pieces(group: Group, outgoing: Mapping[int, list[StatePiece]], device: torch.device) -> list[StatePiece]:
    """Send each peer its pieces; returns the pieces from all peers. All ranks of the group take part. Raises GroupBroken."""
    packed = {peer: _packed(pieces) for peer, pieces in outgoing.items()}
    lengths = torch.zeros(group.size, group.size, 2, dtype=torch.int64, device="cpu")
    for peer, parts in packed.items():
        lengths[group.rank, peer] = _lengths(parts)
    group.all_gather(lengths, lengths[group.rank].clone(), Tag.PIECES)
    arriving = {
        source: lengths[source, group.rank] for source in range(group.size) if source != group.rank and lengths[source, group.rank, 0]
    }
    return _carry(group, packed, arriving, device, Tag.PIECES)


def swap_pieces(
    group: Group, outgoing: Mapping[int, list[StatePiece]], sources: Collection[int], device: torch.device, tag: int
) -> list[StatePiece]:  # fmt: skip
    """As :func:`exchange_pieces`, where each rank knows which ``sources`` send to it. Only these ranks take part."""
    packed = {peer: _packed(pieces) for peer, pieces in outgoing.items()}
    lengths = {peer: _lengths(parts) for peer, parts in packed.items()}
    arriving = {source: torch.empty(2, dtype=torch.int64, device="cpu") for source in sources}
    group.start([(each, peer) for peer, each in lengths.items()], [(each, source) for source, each in arriving.items()], tag).wait()
    return _carry(group, packed, arriving, device, tag)


def _carry(
    group: Group, packed: Mapping[int, _Parts], arriving: Mapping[int, torch.Tensor], device: torch.device, tag: int
) -> list[StatePiece]:  # fmt: skip
    """Send packed pieces, and receive those of the ranks ``arriving``, whose lengths are known."""
    arrived = {source: [torch.empty(int(n), dtype=torch.uint8, device="cpu") for n in lengths] for source, lengths in arriving.items()}
    sends = [(part, peer) for peer, parts in packed.items() for part in parts]
    receives = [(part, source) for source, parts in arrived.items() for part in parts]
    group.start(sends, receives, tag).wait()
    return [piece for source, parts in arrived.items() for piece in _opened(group, source, parts, device)]


def _packed(pieces: Sequence[StatePiece]) -> _Parts:
    """The pieces as two messages: a checksum of the second one with their description, and their bytes."""
    header, payload = pack(pieces)
    return torch.cat([torch.tensor([checksum(payload)], device="cpu").view(torch.uint8), header]), payload


def _lengths(parts: _Parts) -> torch.Tensor:
    return torch.tensor([part.numel() for part in parts], dtype=torch.int64, device="cpu")


def _opened(group: Group, source: int, parts: Sequence[torch.Tensor], device: torch.device) -> list[StatePiece]:
    sealed, payload = parts
    if int(sealed[:8].view(torch.int64)) != checksum(payload):
        raise GroupBroken(f"a chunk of the optimizer's state arrived damaged from rank {source}", group.generation)
    return unpack(sealed[8:], payload, device)
