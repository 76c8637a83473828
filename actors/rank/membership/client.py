"""A live rank's connection to its node's agent: one thread listens, sends beats, reconnects, and wakes the loop at each message."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from actors.rank.telemetry.recorder import Recorder
from fleet.errors import Fenced
from fleet.host.proc import start_ticks
from fleet.host.refusals import REFUSALS
from fleet.host.scheduling import be_prompt
from fleet.host.wire import FrameBuffer, connect_unix, frame
from fleet.protocol.events import EVENTS, Event
from fleet.protocol.instructions import INSTRUCTIONS, Inspect, Instruction, Quiesce
from fleet.protocol.member import MemberProtocol
from fleet.protocol.operations import Operation
from fleet.protocol.types import Process

log = logging.getLogger("fleet.rank.membership")

BEAT_S = 0.25
RECONNECT_S = 0.05
RESEND_S = 1.0


class Client:
    """The protocol of one rank, connected to the agent and safe for two threads.

    ``lock`` guards ``protocol``; ``changed`` is notified at each message. The listening thread calls ``on_messages``, ``on_operation``,
    ``on_inspect``, and several times a second ``on_beat``. It calls ``on_messages`` under the lock, as this gives the messages to the
    protocol. The loop calls ``on_rehearsal`` when a rehearsal begins and when it ends.

    If the agent has hung up, and is not back within ``hangup_s``, the rank leaves its view by itself. The coordinator then gives up the
    rank with its node, and another history may begin. A rank that is alone in its view would otherwise train on.
    """

    def __init__(
        self, slot: int, token: str, node: str, agent_path: str, store: str, recorder: Recorder, hangup_s: float = math.inf
    ) -> None:  # fmt: skip
        pid = os.getpid()
        self.protocol = MemberProtocol(slot, token, Process(node, pid, start_ticks(pid)), store)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.on_messages: Callable[[Sequence[Instruction]], None] = self._receive
        self.on_operation: Callable[[Operation], object] = lambda order: None
        self.on_inspect: Callable[[], None] = lambda: None
        self.on_beat: Callable[[], None] = lambda: None
        self.on_rehearsal: Callable[[bool], None] = lambda begins: None
        self._agent_path, self._recorder = agent_path, recorder
        self._stream: socket.socket | None = None
        self._hangup_s, self._alone_since_s = hangup_s, math.inf
        self._closing = False
        self._said_s = 0.0
        self._thread = threading.Thread(target=self._listen, name="fleet-membership", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Say hello and wait to be welcomed."""
        self._thread.start()
        if not self.wait(lambda: self.protocol.incarnation is not None, timeout_s):
            raise TimeoutError(f"slot {self.protocol.slot} was not welcomed by the coordinator within {timeout_s} s")

    def wait(self, condition: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``condition()`` holds. Raises Fenced when this process was replaced."""
        with self.lock:
            met = self.changed.wait_for(lambda: condition() or self.protocol.fenced is not None, timeout_s)
            if self.protocol.fenced is not None:
                raise Fenced(self.protocol.fenced)
            return bool(met)

    def say(self, *events: Event) -> None:
        """Send ``events``, after the messages in the protocol's outbox."""
        with self.lock:
            waiting, self.protocol.outbox = self.protocol.outbox, []
            self._send([*waiting, *events])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which the loop does work that no other rank does."""
        with self.lock:
            self.protocol.alone = True
        try:
            yield
        finally:
            with self.lock:
                self.protocol.alone = False

    def close(self) -> None:
        with self.lock:
            self._closing = True
            self._hang_up()

    def _send(self, events: list[Event]) -> None:
        self._said_s = time.monotonic()
        if self._stream is None or not events:
            return
        try:
            self._stream.sendall(b"".join(frame(EVENTS.encode(event)) for event in events))
        except OSError:
            self._hang_up()  # the listening thread reconnects and repeats the last status

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # ---- the listening thread ------------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        be_prompt(children=True)
        while not self._closing:
            self._recorder.beat()
            stream = self._connected()
            if stream is None:
                self._look_alone(time.monotonic())
                time.sleep(RECONNECT_S)
                continue
            self._serve(stream)
            self._alone_since_s = time.monotonic()

    def _look_alone(self, now_s: float) -> None:
        """Leave the view once the agent has been away for too long."""
        if now_s - self._alone_since_s <= self._hangup_s:
            return
        self._alone_since_s = math.inf
        with self.lock:
            if self.protocol.incarnation is not None and self.protocol.released is None:
                log.warning("this rank's agent is gone: it leaves generation %d", self.protocol.generation)
                self.on_messages([Quiesce((self.protocol.member,), self.protocol.generation)])
                self.changed.notify_all()

    def _connected(self) -> socket.socket | None:
        try:
            stream = connect_unix(self._agent_path, timeout_s=5.0)
        except OSError:
            return None
        with self.lock:
            self._stream = stream
            self._send([self.protocol.hello(), *(self.protocol.status() if self.protocol.incarnation is not None else [])])
        return stream

    def _serve(self, stream: socket.socket) -> None:
        """Read frames until the agent hangs up."""
        buffer = FrameBuffer()
        while not self._closing and self._stream is stream:
            self._recorder.beat()
            self.on_beat()
            try:
                readable = select.select([stream], [], [], BEAT_S)[0]
                data = stream.recv(1 << 20) if readable else None
                frames = buffer.feed(data) if data else []
            except (OSError, ValueError):
                data = b""
            if data == b"":
                with self.lock:
                    self._hang_up()
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        messages = [INSTRUCTIONS.decode(data) for data in frames]
        if any(isinstance(message, Inspect) for message in messages):
            self.on_inspect()  # before anything else changes
        with self.lock:
            if messages:
                self.on_messages(messages)
                self.changed.notify_all()
            if self.protocol.waits and time.monotonic() - self._said_s > RESEND_S:
                self.protocol.outbox.extend(self.protocol.status())
                self._said_s = time.monotonic()
            if self.protocol.incarnation is not None:
                self.protocol.outbox.extend(REFUSALS.take(str(self.protocol.member)))
            if self.protocol.outbox:
                self.say()
        for message in messages:
            if isinstance(message, Operation):
                self.on_operation(message)

    def _receive(self, messages: Sequence[Instruction]) -> None:
        """Used before training: the coordinator welcomes the process, or says that the run is over."""
        for message in messages:
            self.protocol.receive(message)
