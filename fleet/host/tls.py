"""TLS between hosts, by the folder that ``--tls`` names: each host has its certificate and key there, and the authority that all trust.

Connections within one machine stay plain. Behind the handshake both ends still prove the secret of the run. A certificate says that a host
may take part; the secret says in which run, and what for. Addresses of hosts come and go, so no name in a certificate is looked at.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fleet.errors import ConfigError, LineRefused
from fleet.protocol.proof import Reason

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)
_OTHERS = stat.S_IRWXO
SERVES = "Give a folder, by its path from the root on, that each host has, with ca.pem, cert.pem and key.pem."


class TlsSocket(ssl.SSLSocket):
    """To its user it is as a plain socket: it would block with the same error. LineRefused says why a certificate is refused.

    At most one thread at a time reads or writes.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen)
        except ssl.SSLError as error:
            _raise(error)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """It may give less than was asked for, with ``MSG_WAITALL``, too."""
        try:
            return super().recv_into(buffer, nbytes or None)
        except ssl.SSLError as error:
            _raise(error)

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data)
        except ssl.SSLError as error:
            _raise(error)

    def sendmsg(self, buffers: Any, *_: Any) -> int:  # type: ignore[override]  # that of ssl refuses
        """As much as one record takes, of the first."""
        return self.send(next(iter(buffers)))

    def shutdown(self, how: int) -> None:
        """From any thread. The method of ``ssl`` also forgets that the connection is encrypted: another thread would write plainly then."""
        socket.socket.shutdown(self, how)


def _raise(error: ssl.SSLError) -> NoReturn:
    if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        raise BlockingIOError(errno.EAGAIN, "the rest of a record is still to come") from error
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        raise ConnectionResetError(errno.ECONNRESET, "the peer has closed the connection") from error
    raise refusal(error) from error


def refusal(error: ssl.SSLError) -> LineRefused:
    """In words, what is wrong with the other end's certificate, or with this one's in its eyes."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return LineRefused(Reason.TLS, f"the certificate of the other end does not pass {AUTHORITY}: {error.verify_message}")
    words = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in words:
        return LineRefused(Reason.TLS, f"the other end refuses the certificate that it was shown: {words}")
    return LineRefused(Reason.TLS, f"the other end does not speak TLS 1.3: {words}")


def between_hosts(connection: socket.socket) -> bool:
    """Both ends see the same: the kernel gives a connection within one machine one address for its two ends."""
    try:
        return bool(connection.getsockname()[0] != connection.getpeername()[0])
    except OSError:  # the peer is gone
        return True


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """This host by its folder. ``authority`` is a digest of the certificates in ``ca.pem``, in any order."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    authority: str


# ---- the folder --------------------------------------------------------------------------------------------------------------------------


def identity(directory: str) -> HostIdentity:
    """Of the folder ``--tls`` names, tried on itself by a handshake in memory. Raises ConfigError naming the file and the reason."""
    if not os.path.isabs(directory):
        raise ConfigError("tls", directory, "it is read on each host, and is no path from the root on", SERVES)
    texts = {name: _text(directory, name) for name in (AUTHORITY, CERTIFICATE, KEY)}
    if os.stat(os.path.join(directory, KEY)).st_mode & _OTHERS:
        raise ConfigError("tls", directory, f"each user of this host may read {KEY}", f"chmod o-rwx {os.path.join(directory, KEY)}")
    client, server = (_context(directory, side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    made = HostIdentity(client, server, _digest(texts[AUTHORITY]))
    made.server.num_tickets = 0  # no ticket comes unasked: an idle connection is quiet
    try:
        _meet(made)
    except ssl.SSLCertVerificationError as error:
        reason = f"{CERTIFICATE} does not pass {AUTHORITY}: {error.verify_message}"
        raise ConfigError("tls", directory, reason, "Have that authority sign it anew, for servers and clients.") from error
    except ssl.SSLError as error:
        raise ConfigError("tls", directory, f"a connection to itself fails: {refusal(error)}", SERVES) from error
    return made


def _text(directory: str, name: str) -> str:
    try:
        return Path(directory, name).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError("tls", directory, f"{name} cannot be read: {error.strerror or error}", SERVES) from error


def _digest(text: str) -> str:
    found = sorted(hashlib.sha256(ssl.PEM_cert_to_DER_cert(each)).hexdigest() for each in _PEM.findall(text))
    return hashlib.sha256("".join(found).encode()).hexdigest()


def _context(directory: str, side: int) -> ssl.SSLContext:
    """Of one side. Raises ConfigError."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    certificate, key, authority = (os.path.join(directory, name) for name in (CERTIFICATE, KEY, AUTHORITY))
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls", directory, f"{CERTIFICATE} and {KEY} cannot be used: {_plainly(error)}", SERVES) from error
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("tls", directory, f"{AUTHORITY} cannot be used: {_plainly(error)}", SERVES) from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key asks for a password, and each process reads it by itself")


def _plainly(error: Exception) -> str:
    words = getattr(error, "reason", None)
    return str(words).replace("_", " ").lower() if words else str(error)


def _meet(made: HostIdentity) -> None:
    """Both sides of one connection, in memory. Raises ssl.SSLError as either of them does."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [made.client.wrap_bio(back, there), made.server.wrap_bio(there, back, server_side=True)]
    for _ in range(8):  # a handshake of TLS 1.3 has three flights
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)


def check_same(directory: str, authorities: dict[str, str]) -> None:
    """By host, the digest of its authority; the first one is what the others have to have. Raises ConfigError naming a host."""
    (first, wanted), *others = authorities.items()
    for host, authority in others:
        if authority != wanted:
            reason = f"node {host}: its {AUTHORITY} ({authority[:12]}) is not that of {first} ({wanted[:12]})"
            raise ConfigError("tls", directory, reason, f"Give all hosts the same {AUTHORITY}.")


# ---- what this process holds -------------------------------------------------------------------------------------------------------------


class _Held:
    def __init__(self) -> None:
        self.identity: HostIdentity | None = None
        self.between: Callable[[socket.socket], bool] = between_hosts


_held = _Held()


def hold(directory: str, between: Callable[[socket.socket], bool] = between_hosts) -> None:
    """From here on connections of this process are encrypted, of which ``between`` says so; empty: none is. Raises ConfigError."""
    _held.identity, _held.between = identity(directory) if directory else None, between


def held() -> bool:
    """Whether connections of this process between hosts are encrypted."""
    return _held.identity is not None


def crosses(connection: socket.socket) -> bool:
    """Whether this connection has to be encrypted."""
    return held() and _held.between(connection)


def client() -> ssl.SSLContext:
    """For connections that this process makes, where it :func:`held` an identity."""
    assert _held.identity is not None
    return _held.identity.client


def server() -> ssl.SSLContext:
    """For connections that it takes."""
    assert _held.identity is not None
    return _held.identity.server


def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """``socket.create_connection``, encrypted where it has to be. Raises OSError: LineRefused, for the other end's certificate."""
    return secured(socket.create_connection(address, timeout_s))


def secured(connection: socket.socket) -> socket.socket:
    """A connection that was made, encrypted where it has to be. It is closed when that fails; raises as :func:`connect` does."""
    if not crosses(connection):
        return connection
    try:
        return client().wrap_socket(connection)
    except ssl.SSLError as error:
        connection.close()
        _raise(error)
    except OSError:
        connection.close()
        raise


def accepted(connection: socket.socket) -> socket.socket:
    """A connection that was taken, encrypted where it has to be. The handshake comes with the first bytes that are read."""
    if not crosses(connection):
        return connection
    return server().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
