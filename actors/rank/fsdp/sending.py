"""Contributions on their way to one rank, on a connection of their own: parts of gradients, for the owner of their chunk or its guards.

:mod:`actors.rank.fsdp.exchange` decides which contribution goes to which rank, and how it counts there.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from actors.rank.fsdp.serving import REACH_S, YES, Address, PeerRequest, bytes_of, reached
from actors.rank.telemetry.usage import SENT
from fleet.protocol.proof import UNPROVEN_S

log = logging.getLogger("fleet.rank")


class Contribution(NamedTuple):
    """A part of a gradient, and the request that describes it to its receiver. ``needed``: false where the receiver may have it."""

    request: PeerRequest
    elements: torch.Tensor
    needed: bool = True


class PeerSender:
    """One receiver, with a thread that sends it one contribution after the other."""

    def __init__(self, address: Address, patience_s: float, ended: Callable[[PeerSender, Contribution, str], None]) -> None:
        self.address, self._patience_s, self._ended = address, patience_s, ended
        self._contributions: deque[Contribution] = deque()
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._over = False
        threading.Thread(target=self._run, name="fleet-brings", daemon=True).start()

    def contribute(self, contribution: Contribution) -> None:
        with self._changed:
            self._contributions.append(contribution)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._contributions.clear()
            if self._connection is not None:
                _shut(self._connection)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._contributions)
                if self._over:
                    break
                contribution = self._contributions.popleft()
            self._ended(self, contribution, self._carry(contribution))
        if self._connection is not None:
            self._connection.close()

    def _carry(self, contribution: Contribution) -> str:
        """Send a contribution. Returns an error; empty when the contribution has arrived and counts."""
        flat, lo, hi = contribution.request.flat, contribution.request.lo, contribution.request.hi
        what = f"elements {lo} to {hi} of flat buffer {flat} of the gradient, for {self.address.host}:{self.address.port}"
        try:
            connection = self._connection or self._connect()
            connection.sendall(contribution.request.packed(self.address.token))
            connection.sendall(bytes_of(contribution.elements))
            answer = connection.recv(1)
        except OSError as error:
            return f"{what}: {error}"
        SENT.count(contribution.elements.nbytes)
        return "" if answer == YES else f"{what}: {'it is at another step' if answer else 'the connection has ended'}"

    def _connect(self) -> socket.socket:
        connection = reached(self.address, min(REACH_S, self._patience_s), min(UNPROVEN_S, self._patience_s))
        connection.settimeout(self._patience_s)
        with self._changed:
            self._connection = connection
            if self._over:
                _shut(connection)
        return connection


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the peer had ended the connection: %s", error)
