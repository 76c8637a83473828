"""For how long a control store has been silent, and what that is told as."""

from __future__ import annotations

import socket
import struct
import threading

from actors.control_store import LOST_S, RAY_ENDS_S, Silence, why_lost
from fleet.app.cluster.ray_internals import answers


def test_silence_begins_with_the_first_question_that_is_not_answered() -> None:
    silence = Silence()
    assert [silence.note(answered, now_s) for answered, now_s in ((True, 1.0), (False, 3.0), (False, 5.0), (True, 7.0), (False, 9.0))] == [
        0.0, 0.0, 2.0, 0.0, 0.0,
    ]  # fmt: skip


def test_the_run_has_time_to_end_before_ray_ends_all() -> None:
    assert LOST_S <= RAY_ENDS_S / 2
    assert "at 10.0.0.1:6379 has not answered for 20 s" in why_lost("10.0.0.1:6379", 20.4)


def test_a_store_that_wants_tls_and_breaks_off_has_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def break_off() -> None:
            line, _ = server.accept()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.close()

        thread = threading.Thread(target=break_off, daemon=True)
        thread.start()
        assert answers(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
        thread.join()


def test_an_open_port_is_no_answer() -> None:
    """That of a process which is stopped is open, too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not answers(address, 0.5)
    assert not answers(address, 0.5)
