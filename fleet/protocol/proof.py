"""The handshake of a connection: both ends prove that they hold the secret of one run, before any other message. Pure.

Three messages of fixed length, with one round trip before the first request:

1. Client: magic, version, purpose, its nonce.
2. Server: magic, version, its nonce, HMAC of (server, purpose, both nonces).
3. Client: HMAC of (client, purpose, both nonces), then its first request.

The HMAC is that of RFC 2104 with SHA-256 and the secret as its key. Each connection has new nonces, so a recorded proof fits no other
connection. The proof contains the side, so a proof that is sent back does not fit. It contains the purpose, so a proof for one purpose
opens no other. An eavesdropper learns nothing that would help later. The handshake neither encrypts nor signs the bytes behind the proof:
only :mod:`fleet.host.tls` stops an attacker that can change packets.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Collection

from fleet.errors import LineRefused

MAGIC = b"\x93FLEET\r\n"
VERSION = 1
SECRET_BYTES, NONCE_BYTES = 32, 32
PROOF_BYTES = hashlib.sha256().digest_size
_HEAD = MAGIC + bytes((VERSION,))
HELLO_BYTES = len(_HEAD) + 1 + NONCE_BYTES
CHALLENGE_BYTES = len(_HEAD) + NONCE_BYTES + PROOF_BYTES
DENIAL = bytes(PROOF_BYTES)
"""A client that got a wrong proof sends this, and hangs up. So the listener can name the reason."""

UNPROVEN_S = 5.0
"""Seconds after which a listener closes a connection without a proof."""
MOST_UNPROVEN = 1024
"""Connections without a proof that may wait at a listener. One more pushes out the oldest. A right peer needs a round trip, and retries."""


class Purpose(enum.StrEnum):
    """The purpose of a connection."""

    AGENT = "agent"
    SETTING = "setting"
    STORE = "store"
    MEMORY = "memory"
    PARAMETERS = "parameters"
    EXCHANGE = "exchange"


_NUMBERS = {purpose: number for number, purpose in enumerate(Purpose, 1)}
_PURPOSES = {number: purpose for purpose, number in _NUMBERS.items()}

KIB, MIB = 1 << 10, 1 << 20
LIMITS_BYTES = {Purpose.AGENT: 64 * MIB, Purpose.SETTING: 16 * KIB, Purpose.STORE: MIB, Purpose.MEMORY: 64 * KIB}
"""Largest frame that a listener takes from a proven peer. An agent's largest frame holds the stacks of all ranks of its node."""
ANSWERS_BYTES = {Purpose.AGENT: 64 * MIB, Purpose.SETTING: 16 * KIB, Purpose.STORE: MIB, Purpose.MEMORY: 64 * MIB}
"""Largest frame that a client takes. A view of 10,000 ranks has less than 2 MiB; a memory describes all blocks of its files at once."""


class Reason(enum.StrEnum):
    """Why a connection was refused or ended."""

    PROTOCOL = "protocol"
    """The peer speaks another protocol, or another version."""
    PURPOSE = "purpose"
    """The peer wants another listener."""
    SECRET = "secret"
    """The peer does not hold this run's secret."""
    HUNG_UP = "hung_up"
    """The peer hung up before its proof."""
    SLOW = "slow"
    """The peer did not send its proof or the rest of a frame, or did not take its answer, in time."""
    CROWD = "crowd"
    """Too many connections had no proof."""
    SIZE = "size"
    """A frame was too large."""
    FORMAT = "format"
    """A proven peer sent a message that the listener cannot read: a bug, or another version."""
    USER = "user"
    """On a Unix socket: the peer belongs to another user."""
    TLS = "tls"
    """The peer is on another host, and speaks no TLS, or has no certificate of the run's authority."""


def check_secret(secret: bytes) -> bytes:
    """``secret``, if it has the length of a secret. Raises ValueError."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a run's secret has {SECRET_BYTES} bytes, this has {len(secret)}")
    return secret


def _proof(secret: bytes, side: bytes, purpose: Purpose, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """All parts have a fixed length, so different parts never give the same bytes."""
    return hmac.digest(secret, _HEAD + side + bytes((_NUMBERS[purpose],)) + client_nonce + server_nonce, "sha256")


class _Side:
    """One end. Give it at most :attr:`missing` received bytes at a time: the bytes behind the proof are for other code."""

    def __init__(self, first_bytes: int) -> None:
        self._data, self._wanted = bytearray(), first_bytes
        self.purpose: Purpose | None = None
        self.proven = False

    @property
    def missing(self) -> int:
        """Missing bytes of the awaited message; 0 once the peer has proven itself."""
        return self._wanted - len(self._data)

    def take(self, data: bytes) -> bytes:
        """Take received bytes; returns the bytes to send. Raises LineRefused: close the connection without an answer."""
        if len(data) > self.missing:
            raise LineRefused(Reason.PROTOCOL, "more than one message came at once")
        self._data += data
        self._look()
        if self.missing:
            return b""
        message, self._data = bytes(self._data), bytearray()
        return self._message(message)

    def _look(self) -> None:
        """A peer of another protocol shows in its first byte."""

    def _message(self, message: bytes) -> bytes:
        raise NotImplementedError

    def _begins_right(self) -> None:
        if not _HEAD.startswith(self._data[: len(_HEAD)]):
            raise LineRefused(Reason.PROTOCOL, "it does not speak this protocol, or another version of it")


def _nonce(drawn: bytes) -> bytes:
    if len(drawn) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, this has {len(drawn)}")
    return drawn


class Asking(_Side):
    """The client's end. Send :attr:`hello` first. The last bytes from :meth:`take` may go together with the first request.

    Args:
        secret: the run's, 32 bytes.
        purpose: the purpose of the connection.
        nonce: 32 bytes, drawn for this connection alone.
    """

    def __init__(self, secret: bytes, purpose: Purpose, nonce: bytes) -> None:
        super().__init__(CHALLENGE_BYTES)
        self.purpose, self._secret, self._nonce = purpose, check_secret(secret), _nonce(nonce)

    @property
    def hello(self) -> bytes:
        assert self.purpose is not None
        return _HEAD + bytes((_NUMBERS[self.purpose],)) + self._nonce

    def _look(self) -> None:
        self._begins_right()

    def _message(self, message: bytes) -> bytes:
        assert self.purpose is not None
        theirs, proof = message[len(_HEAD) : -PROOF_BYTES], message[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"server", self.purpose, self._nonce, theirs)):
            raise LineRefused(Reason.SECRET, "the other end does not hold this run's secret")
        self.proven, self._wanted = True, 0
        return _proof(self._secret, b"client", self.purpose, self._nonce, theirs)


class Serving(_Side):
    """The listener's end.

    Args:
        secret: the run's, 32 bytes.
        purposes: the purposes that this listener serves.
        nonce: 32 bytes, drawn for this connection alone.
    """

    def __init__(self, secret: bytes, purposes: Collection[Purpose], nonce: bytes) -> None:
        super().__init__(HELLO_BYTES)
        self._secret, self._purposes, self._nonce = check_secret(secret), frozenset(purposes), _nonce(nonce)
        self._theirs: bytes | None = None

    def _look(self) -> None:
        if self._theirs is None:
            self._begins_right()

    def _message(self, message: bytes) -> bytes:
        return self._hello(message) if self._theirs is None else self._proven(message, self._theirs)

    def _hello(self, message: bytes) -> bytes:
        purpose = _PURPOSES.get(message[len(_HEAD)])
        if purpose not in self._purposes:
            raise LineRefused(Reason.PURPOSE, f"it asks for {purpose or 'an unknown purpose'}, which this listener does not serve")
        self.purpose, self._theirs, self._wanted = purpose, message[-NONCE_BYTES:], PROOF_BYTES
        return _HEAD + self._nonce + _proof(self._secret, b"server", purpose, self._theirs, self._nonce)

    def _proven(self, message: bytes, theirs: bytes) -> bytes:
        assert self.purpose is not None
        if not hmac.compare_digest(message, _proof(self._secret, b"client", self.purpose, theirs, self._nonce)):
            raise LineRefused(Reason.SECRET, "it does not hold this run's secret")
        self.proven, self._wanted = True, 0
        return b""
