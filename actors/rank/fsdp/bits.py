"""Chunks as bits, for parity: pieces of a state as one row of bytes that says what it is, and the exclusive or of such rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.tracked import checksum
from actors.rank.tags import Tag
from actors.rank.zero1.pieces import ROOM, Piece, pack, unpack
from fleet.errors import ProtocolError

HEAD = 2 * ROOM
"""Bytes, before what the pieces are and their tensors: how long these two are, and the sum over the second."""


def bits_of(pieces: Sequence[Piece]) -> torch.Tensor:
    """The same bytes for the same pieces, flat uint8 on the host; a multiple of 16 of them."""
    header, payload = pack(pieces)
    begin = HEAD + -(-header.numel() // ROOM) * ROOM
    bits = torch.zeros(begin + payload.numel(), dtype=torch.uint8, device="cpu")
    bits[:HEAD].view(torch.int64)[:3] = torch.tensor([header.numel(), payload.numel(), checksum(payload)], device="cpu")
    bits[HEAD : HEAD + header.numel()] = header
    bits[begin:] = payload
    return bits


def pieces_of(bits: torch.Tensor, device: torch.device) -> list[Piece]:
    """Inverse of :func:`bits_of`; zeros may follow. Raises ProtocolError for bits that are of no pieces."""
    header, payload, told = map(int, bits[:HEAD].view(torch.int64)[:3])
    begin = HEAD + -(-header // ROOM) * ROOM
    if header <= 0 or payload < 0 or begin + payload > bits.numel() or checksum(bits[begin : begin + payload]) != told:
        raise ProtocolError("what was made of parity is no chunk: a part of it was of another step, or was damaged")
    return unpack(bits[HEAD : HEAD + header], bits[begin : begin + payload], device)


def xor(into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``into``, changed in place where it is long enough, with the bits of ``other``; the shorter one ends in zeros."""
    if other.numel() > into.numel():
        grown = torch.zeros_like(other)
        grown[: into.numel()] = into
        into = grown
    into[: other.numel()].view(torch.int64).bitwise_xor_(other.view(torch.int64))
    return into


def swap(group: Group, gifts: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Give each of the peers its bits, and take theirs. All of them call it alike. Raises GroupBroken."""
    told = {peer: torch.tensor([gift.numel()], device="cpu") for peer, gift in gifts.items()}
    heard = {peer: torch.zeros(1, dtype=torch.int64, device="cpu") for peer in gifts}
    group.start([(one, peer) for peer, one in told.items()], [(one, peer) for peer, one in heard.items()], Tag.PARITY).wait()
    found = {peer: torch.empty(int(one), dtype=torch.uint8, device="cpu") for peer, one in heard.items()}
    group.start([(gift, peer) for peer, gift in gifts.items()], [(one, peer) for peer, one in found.items()], Tag.PARITY).wait()
    return list(found.values())


def give(group: Group, gift: torch.Tensor, peer: int) -> None:
    """To one peer, who calls :func:`take`. Raises GroupBroken."""
    group.send(torch.tensor([gift.numel()], device="cpu"), peer, Tag.PARITY)
    group.send(gift, peer, Tag.PARITY)


def take(group: Group, peer: int) -> torch.Tensor:
    """What the peer gives by :func:`give`. Raises GroupBroken."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    group.recv(length, peer, Tag.PARITY)
    found = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    group.recv(found, peer, Tag.PARITY)
    return found
