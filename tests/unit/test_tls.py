"""TLS between hosts: which folders will do, and gloo's connections through Fleet's own, over real sockets of one machine."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization

from actors.rank.membership.process_group import Forming, Group, GroupBroken, StoreServer, _replaced
from actors.rank.membership.tunnels import BUFFER_BYTES, HOME, Tunnels, carry
from fleet.app.cluster.probe import facts
from fleet.app.plans import check_tls
from fleet.errors import ConfigError
from fleet.host import tls
from fleet.settings.per_rank import PerRankSettings
from fleet.settings.run import RunSettings
from tests.support.certificates import DAY, Authority
from tests.support.waiting import until

BOUND_S = 20.0
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def hosts(authority: Authority, tmp_path: Path) -> Iterator[Authority]:
    """This process encrypts, and each address of this machine is a host of its own."""
    tls.hold(authority.folder(tmp_path / "tls"), lambda connection: True)
    yield authority
    tls.hold("")


# ---- the folder --------------------------------------------------------------------------------------------------------------------------


def _unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _others_file(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        shutil.copy(Path(Authority().folder(folder.parent / "other")) / name, folder / name)

    return replace


def _lock(folder: Path) -> None:
    key = serialization.load_pem_private_key((folder / tls.KEY).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    (folder / tls.KEY).write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no authority": (_unlink(tls.AUTHORITY), "ca.pem cannot be read: No such file"),
    "no key": (_unlink(tls.KEY), "key.pem cannot be read: No such file"),
    "another key": (_others_file(tls.KEY), "cert.pem and key.pem cannot be used: key values mismatch"),
    "another authority": (_others_file(tls.AUTHORITY), "cert.pem does not pass ca.pem"),
    "no certificate in it": (lambda folder: (folder / tls.AUTHORITY).write_text("nothing"), "ca.pem cannot be used"),
    "nonsense": (lambda folder: (folder / tls.CERTIFICATE).write_text("nothing"), "cert.pem and key.pem cannot be used"),
    "a key for all": (lambda folder: (folder / tls.KEY).chmod(0o644), "each user of this host may read key.pem"),
    "a key with a password": (_lock, "the key asks for a password"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_will_not_do_is_refused_by_file_and_reason(authority: Authority, tmp_path: Path, case: str) -> None:
    spoil, reason = WRONG[case]
    folder = authority.folder(tmp_path / "tls")
    assert tls.identity(folder).authority
    spoil(Path(folder))
    with pytest.raises(ConfigError, match=reason) as caught:
        tls.identity(folder)
    assert str(caught.value).startswith(f"tls = {folder!r}: ") and caught.value.way_out


def test_certificates_that_are_no_longer_or_not_yet_valid_or_for_servers_alone(authority: Authority, tmp_path: Path) -> None:
    for number, (words, made) in enumerate({
        "certificate has expired": {"begin": -DAY, "end": -HOUR},
        "certificate is not yet valid": {"begin": HOUR, "end": DAY},
        "purpose": {"for_clients": False},
    }.items()):  # fmt: skip
        folder = authority.folder(tmp_path / str(number), **made)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=words):
            tls.identity(folder)


def test_all_hosts_have_one_authority(authority: Authority, tmp_path: Path) -> None:
    one, two = (tls.identity(authority.folder(tmp_path / name)).authority for name in ("one", "two"))
    other = tls.identity(Authority().folder(tmp_path / "three")).authority
    tls.check_same("/tls", {"the head": one, "10.0.0.2": two})
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.3: its ca\.pem \(\w+\) is not that of the head"):
        tls.check_same("/tls", {"the head": one, "10.0.0.2": two, "10.0.0.3": other})


def test_a_node_says_what_is_wrong_with_its_folder(authority: Authority, tmp_path: Path) -> None:
    folder = authority.folder(tmp_path / "tls")
    assert facts((), "/dev/shm", folder)["authority"] == tls.identity(folder).authority
    (tmp_path / "tls" / tls.KEY).unlink()
    assert "key.pem cannot be read" in facts((), "/dev/shm", folder)["tls"][2]


def test_where_it_cannot_be_kept_it_is_refused(authority: Authority, tmp_path: Path) -> None:
    folder = authority.folder(tmp_path / "tls")
    with pytest.raises(ConfigError, match="NCCL"):
        RunSettings(tls=folder, per_rank=PerRankSettings(gpus=1))
    with pytest.raises(ConfigError, match="none of its connections leaves it"):
        check_tls(None, folder, resume=False)
    with pytest.raises(ConfigError, match="no path from the root on"):
        check_tls("auto", "certs", resume=False)
    check_tls("auto", folder, resume=False)
    check_tls("auto", str(tmp_path / "on-the-hosts-alone"), resume=False)


def test_within_one_machine_nothing_is_encrypted(authority: Authority, tmp_path: Path) -> None:
    tls.hold(authority.folder(tmp_path / "tls"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = [tls.connect(listener.getsockname()[:2], BOUND_S), tls.accepted(listener.accept()[0])]
        assert not [each for each in ends if isinstance(each, tls.TlsSocket)]
        for each in ends:
            each.close()
    finally:
        tls.hold("")


def pair_of() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that is encrypted."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(tls.connect, listener.getsockname()[:2], BOUND_S)
        far = tls.accepted(listener.accept()[0])
        far.settimeout(BOUND_S)
        far.do_handshake()  # type: ignore[attr-defined]
        return begun.result(BOUND_S), far


def test_who_is_woken_by_a_shutdown_writes_nothing_plainly(hosts: Authority) -> None:
    near, far = pair_of()
    with near, far:
        near.shutdown(socket.SHUT_RD)
        near.sendall(b"behind it")
        assert far.recv(100) == b"behind it"


# ---- tunnels -----------------------------------------------------------------------------------------------------------------------------


def test_a_tunnel_hands_on_all_bytes_both_ways_and_the_end(hosts: Authority) -> None:
    near, far = pair_of()
    ends = [tcp_pair() for _ in range(2)]
    threads = [threading.Thread(target=carry, args=(inner, tunnel)) for (_, inner), tunnel in zip(ends, (near, far), strict=True)]
    for thread in threads:
        thread.start()
    sent = [np.random.default_rng(seed).bytes(3 * BUFFER_BYTES + 12_345) for seed in range(2)]
    with ThreadPoolExecutor(4) as pool, ends[0][0] as left, ends[1][0] as right:
        read = [pool.submit(read_exactly, end, len(sent[0])) for end in (left, right)]
        for end, data in zip((left, right), sent, strict=True):
            pool.submit(end.sendall, data)
        assert [each.result(BOUND_S) for each in read] == [sent[1], sent[0]]
        left.sendall(b"the last words")
        left.close()
        right.settimeout(BOUND_S)
        assert right.recv(100) == b"the last words" and right.recv(100) == b""
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()[:2], BOUND_S), listener.accept()[0]


def read_exactly(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += end.recv(count - len(data))
    return bytes(data)


@contextlib.contextmanager
def grouped(hosts: list[str]) -> Iterator[list[Group]]:
    """A group of one rank on each of these hosts, some of which may be the same."""
    store = StoreServer("127.0.0.1")
    parts = [
        Forming(store=store.address, generation=1, rank=rank, size=len(hosts), device=torch.device("cpu"), timeout_s=BOUND_S, host=host)
        for rank, host in enumerate(hosts)
    ]
    groups = list[Group]()
    try:
        groups = [part.wait() for part in parts]
        yield groups
    finally:
        for group in groups:
            group.close()
        store.close()


def swap(group: Group) -> list[torch.Tensor]:
    """The tensors of the other ranks."""
    mine, others = torch.full((1 << 16,), float(group.rank)), [torch.zeros(1 << 16) for _ in group.peers]
    group.start([(mine, peer) for peer in group.peers], list(zip(others, group.peers, strict=True))).wait()
    return others


def test_a_group_over_hosts_exchanges_and_gloo_is_at_home_alone(hosts: Authority) -> None:
    """Ranks 0 and 1 are of one host, and so have no tunnel between them."""
    with grouped(["127.0.0.10", "127.0.0.10", "127.0.0.11"]) as groups, ThreadPoolExecutor(3) as pool:
        for group, got in zip(groups, pool.map(swap, groups), strict=True):
            assert [float(each[0]) for each in got] == group.peers
            assert group._ends is not None and {host for host, _ in group._ends.near} == {HOME}
        tunnels = [thread for thread in threading.enumerate() if thread.name == "fleet-tunnel"]
        assert len(tunnels) == 4, tunnels  # two ends of two
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("fleet-tunnel")], "no tunnel is left", BOUND_S)


def test_a_rank_that_leaves_ends_the_wait_of_one_on_another_host(hosts: Authority) -> None:
    with grouped(["127.0.0.10", "127.0.0.11"]) as (one, two), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.recv, torch.zeros(4), 1)
        two.interrupt("on purpose")
        with pytest.raises(GroupBroken):
            waiting.result(BOUND_S)


def test_a_peer_of_another_authority_breaks_the_forming_by_name(hosts: Authority, tmp_path: Path) -> None:
    other, said = tls.identity(Authority().folder(tmp_path / "other")), list[str]()
    tunnels = Tunnels("127.0.0.1", 1, BOUND_S, said.append)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            with listener.accept()[0] as line, contextlib.suppress(OSError), other.server.wrap_socket(line, server_side=True):
                return

        pool.submit(serve)
        place = listener.getsockname()[:2]
        tunnels.stand_in(0, place)
        until(lambda: bool(said), "it is told", BOUND_S)
    assert f"the rank at 127.0.0.1:{place[1]} is not reached: the certificate of the other end does not pass ca.pem" in said[0]
    tunnels.close()


def test_an_address_that_gloo_tells_otherwise_is_noticed() -> None:
    assert _replaced(b"..ab..", b"ab", b"cd") == b"..cd.."
    for text in (b"....", b"abab"):
        with pytest.raises(RuntimeError, match="no tunnel can take its place"):
            _replaced(text, b"ab", b"cd")
