"""``fleet runs watch``: the live page, of a run that goes on or of one that has ended."""

from __future__ import annotations

import errno
import getpass
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli.config import RUNS, Storage
from fleet.app.cli.looked_at import check_there, looked_at
from fleet.app.stopping import interrupted_by_signals
from fleet.errors import ConfigError

if TYPE_CHECKING:
    from dashboards.access import Access
    from dashboards.feeds import RunFeeds
    from dashboards.identities import NamedToken
    from dashboards.server import ChaosPort, WatchServer
    from fleet.host.follow import Follower

LOOK_S = 1.0
PRIVATE = ".fleet"
"""Folder beside the runs: the write token, the audit log, what `fleet cluster up` wrote."""
Port = Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: a free one.")]
PerRank = Annotated[bool, typer.Option("--per-rank", help="Metrics of each rank also of runs with more than 256.")]
console = cli_print.Terminal(stderr=True)


class PageServer:
    """A server and what it serves."""

    def __init__(self, feeds: RunFeeds, server: WatchServer, token: str, read_token: str | None) -> None:
        self._feeds, self.server, self._token, self._read_token = feeds, server, token, read_token

    def show(self, name: str, follower: Follower, chaos: ChaosPort | None) -> None:
        """Serve run ``name`` from ``follower``, and let the page order ``chaos``, where it can be reached."""
        self._feeds.adopt(name, follower)
        if chaos is not None:
            self.server.control(name, chaos)

    def release(self, name: str) -> None:
        """The run has ended: it can still be seen, and takes no orders."""
        self.server.release(name)

    def link(self, name: str = "") -> str:
        """Where to look. The token is behind the #, which browsers keep to themselves."""
        return f"{self._page(name)}#token={self._token}"

    def read_link(self, name: str = "") -> str:
        """The same for users that may only look."""
        return f"{self._page(name)}#token={self._read_token}" if self._read_token else self._page(name)

    def _page(self, name: str) -> str:
        return self.server.url + (f"/runs/{quote(name)}" if name else "/")


def read_token_path(root: Path, host: str) -> Path | None:
    """Path of the readers' token; None: readers need none, as only users of this machine reach ``host``."""
    from dashboards.access import LOOPBACK, READ_TOKEN

    return None if host in LOOPBACK else root / PRIVATE / READ_TOKEN


def access_to(root: Path, host: str, named: Sequence[NamedToken] = ()) -> Access:
    """The rights at a server of the runs under ``root``, with tokens that are made where there are none.

    Raises ConfigError: they cannot be kept, or can be guessed, and nothing is served without them.
    """
    from dashboards.access import LOOPBACK, Access, stored_token

    try:
        token = stored_token(root / PRIVATE)
        kept = read_token_path(root, host)
        read_token = stored_token(kept.parent, kept.name) if kept else None
    except OSError as error:
        reason = f"the tokens of its page cannot be kept in its folder {PRIVATE}: {error.strerror}"
        raise ConfigError("--storage", str(root), reason, "Nothing is served without them.") from error
    hosts = () if host in ("0.0.0.0", "::") else (*LOOPBACK, host)
    return Access(token, read_token, hosts, tuple(named), _user())


def check_listens(host: str, port: int) -> None:
    """Raises ConfigError where no server can listen there now."""
    from fleet.host.ports import try_to_listen

    try:
        try_to_listen(host, port)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """The fault of the address, or of the port."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("--host", host, "is no address of this machine", "Use 127.0.0.1, or 0.0.0.0 for all of its addresses.")
    return ConfigError("--port", port, f"cannot listen on {host}: {os.strerror(error.errno or 0)}", "Choose another, or 0 for a free one.")


@contextmanager
def serving(root: Path, host: str, port: int, per_rank: bool = False, named: Sequence[NamedToken] = ()) -> Iterator[PageServer]:
    """The live page of the runs under ``root``. Readers from elsewhere must show a token.

    With ``per_rank`` large runs have metrics of each rank, too. Users with one of the ``named`` tokens may hand in runs.

    Raises ConfigError when it cannot listen there.
    """
    from dashboards.access import Audit
    from dashboards.control_registry import ControlRegistry
    from dashboards.feeds import RunFeeds
    from dashboards.server import WatchServer

    access = access_to(root, host, named)
    with RunFeeds(root, per_rank) as feeds:
        server = WatchServer(feeds, access, Audit(root / PRIVATE / "audit.jsonl"), host, port)
        server.control_registry = ControlRegistry(root / PRIVATE / "pages", access.write_token)
        try:
            server.__enter__()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        try:
            yield PageServer(feeds, server, access.write_token, access.read_token)
        finally:
            server.__exit__(None, None, None)


def _user() -> str:
    """The user of this process; a container may have no name for its user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.geteuid()}"


def watch(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name under --storage; empty: all runs.")] = "",
    storage: Storage = RUNS,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback ask every reader for the token.")] = "127.0.0.1",
    port: Port = 0,
    per_rank: PerRank = False,
) -> None:
    """Open RUN, or all runs, in the browser: live, or from the journal."""
    root, name = Path(storage), ""
    if run:
        folder = looked_at(run, storage).resolve()
        root, name = folder.parent, folder.name
    with until_a_signal(), serving(root, host, port, per_rank) as server:
        console.print(f"[bold]{server.link(name)}[/]")
        if server.read_link(name) != server.link(name):
            console.print(f"only to look: {server.read_link(name)}")
        while not threading.Event().wait(LOOK_S):
            if name:
                check_there(root / name)


@contextmanager
def until_a_signal() -> Iterator[None]:
    """The block, which ends at Ctrl-C, at SIGTERM, or with its terminal."""
    with interrupted_by_signals(), suppress(KeyboardInterrupt):
        yield
