"""The proof of a run's secret: two ends that hold it understand each other, and nothing else gets through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import LineRefused
from fleet.protocol.proof import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, Asking, Purpose, Reason, Serving

FAST = settings(max_examples=200, derandomize=True)
SECRET, OTHER = b"s" * 32, b"t" * 32
drawn = st.binary(min_size=32, max_size=32)


def ends(secret: bytes = SECRET, purpose: Purpose = Purpose.STORE, turn: int = 0) -> tuple[Asking, Serving]:
    """Two fresh ends; ``turn`` gives other nonces."""
    return Asking(secret, purpose, bytes((turn, 1)) * 16), Serving(SECRET, tuple(Purpose), bytes((turn, 2)) * 16)


def messages(turn: int = 0) -> tuple[bytes, bytes, bytes]:
    """What goes over the wire when all is well."""
    asking, serving = ends(turn=turn)
    challenge = serving.take(asking.hello)
    return asking.hello, challenge, asking.take(challenge)


def reason(work: object) -> str:
    with pytest.raises(LineRefused) as refused:
        work()  # type: ignore[operator]
    return refused.value.reason


@FAST
@given(drawn, drawn, drawn, st.sampled_from(Purpose), st.integers(1, 40))
def test_who_holds_the_secret_is_let_in_however_the_bytes_come(secret: bytes, one: bytes, two: bytes, purpose: Purpose, size: int) -> None:
    asking, serving = Asking(secret, purpose, one), Serving(secret, (purpose,), two)
    to_server, to_client = asking.hello, b""
    while to_server or to_client:
        for piece in (to_server[at : at + size] for at in range(0, len(to_server), size)):
            to_client += serving.take(piece)
        to_server = b""
        for piece in (to_client[at : at + size] for at in range(0, len(to_client), size)):
            to_server += asking.take(piece)
        to_client = b""
    assert (asking.proven, serving.proven, serving.purpose) == (True, True, purpose)
    assert (asking.missing, serving.missing) == (0, 0)


def test_all_is_small_and_of_fixed_length() -> None:
    assert tuple(map(len, messages())) == (HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES)
    assert max(HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES) <= 4096


def test_the_secret_is_in_none_of_it() -> None:
    assert not any(SECRET[:4] in message for message in messages())


@pytest.mark.parametrize("bit", [0x01, 0x80, 0xFF])
def test_a_byte_that_changes_anywhere_lets_nobody_in(bit: int) -> None:
    places = [(message, at) for message, length in enumerate(map(len, messages())) for at in range(length)]
    for message, at in places:
        asking, serving = ends()

        def passed(number: int, data: bytes, message: int = message, at: int = at) -> bytes:
            return bytes(byte ^ (bit if (number, place) == (message, at) else 0) for place, byte in enumerate(data))

        with pytest.raises(LineRefused):
            serving.take(passed(2, asking.take(passed(1, serving.take(passed(0, asking.hello))))))
        assert not serving.proven


def test_what_ends_early_is_not_proven_and_waits() -> None:
    whole = messages()
    for message, end in itertools.chain.from_iterable(((n, end) for end in range(len(whole[n]))) for n in (0, 2)):
        _, serving = ends()
        for sent in whole[:message:2]:
            serving.take(sent)
        assert serving.take(whole[message][:end]) == b""
        assert (serving.proven, serving.missing) == (False, len(whole[message]) - end)


def test_a_recorded_line_opens_nothing_twice() -> None:
    hello, _, proof = messages(turn=0)
    _, serving = ends(turn=1)
    serving.take(hello)
    assert reason(lambda: serving.take(proof)) == Reason.SECRET
    asking, _ = ends(turn=1)
    assert reason(lambda: asking.take(messages(turn=0)[1])) == Reason.SECRET


def test_a_challenge_that_is_sent_back_proves_nothing() -> None:
    """Who knows nothing asks a listener to prove itself, and gives that as its own: the side is in the proof."""
    hello, challenge, _ = messages()
    _, serving = ends()
    serving.take(hello)
    assert reason(lambda: serving.take(challenge[-PROOF_BYTES:])) == Reason.SECRET
    asking, _ = ends()
    own = asking.hello
    assert reason(lambda: asking.take(own[:9] + own[-32:] + messages()[2])) == Reason.SECRET


def test_two_listeners_cannot_be_played_against_each_other() -> None:
    """The nonce of one goes to the other as a client's, and its proof back: it is that of a server."""
    hello, *_ = messages()
    _, first = ends(turn=3)
    nonce = first.take(hello)[9:41]
    _, second = ends(turn=4)
    reused = second.take(hello[:-32] + nonce)[-PROOF_BYTES:]
    assert reason(lambda: first.take(reused)) == Reason.SECRET


@pytest.mark.parametrize(("asked", "instead"), [pair for pair in itertools.product(Purpose, Purpose) if pair[0] != pair[1]])
def test_a_proof_for_one_purpose_serves_no_other(asked: Purpose, instead: Purpose) -> None:
    asking, serving = ends(purpose=asked)
    changed = asking.hello[:9] + bytes((list(Purpose).index(instead) + 1,)) + asking.hello[10:]
    assert reason(lambda: asking.take(serving.take(changed))) == Reason.SECRET
    elsewhere = Serving(SECRET, (instead,), b"n" * 32)
    assert reason(lambda: elsewhere.take(asking.hello)) == Reason.PURPOSE


def test_another_secret_is_found_by_the_client_before_it_has_proven_anything() -> None:
    asking, serving = ends(secret=OTHER)
    assert reason(lambda: asking.take(serving.take(asking.hello))) == Reason.SECRET


def test_another_secret_is_found_by_the_listener() -> None:
    _, serving = ends()
    liar = Serving(OTHER, (Purpose.STORE,), b"\x00\x02" * 16)
    asking, _ = ends(secret=OTHER)
    serving.take(asking.hello)
    assert reason(lambda: serving.take(asking.take(liar.take(asking.hello)))) == Reason.SECRET


@FAST
@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused_or_waited_for(data: bytes) -> None:
    _, serving = ends()
    try:
        while data and serving.missing:
            piece, data = data[: serving.missing], data[serving.missing :]
            serving.take(piece)
    except LineRefused:
        return
    assert not serving.proven


def test_another_protocol_is_known_by_its_first_byte_and_another_version_by_its_number() -> None:
    assert reason(lambda: ends()[1].take(b"G")) == Reason.PROTOCOL
    hello = messages()[0]
    assert reason(lambda: ends()[1].take(hello[:8] + b"\x02" + hello[9:])) == Reason.PROTOCOL
    assert reason(lambda: ends()[1].take(hello + b"x")) == Reason.PROTOCOL


@pytest.mark.parametrize("secret", [b"", b"s" * 31, b"s" * 33])
def test_a_secret_has_32_bytes(secret: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Asking(secret, Purpose.STORE, b"n" * 32)
    with pytest.raises(ValueError, match="32 bytes"):
        Serving(secret, Purpose, b"n" * 32)
