"""Serves one EngineLoop to local clients. Whatever a client does or sends, only that client is affected."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import CapacityError, EngineError, QueueFullError, RequestError
from oasiskv.executor import protocol, transport
from oasiskv.executor.params import sampling_params

MAX_CLIENTS = 64
MAX_IN_FLIGHT = 4096  # a client
_ACCEPT_PAUSE_S = 0.1
MAX_UNREAD = 16384  # answers a client may leave unread before it is dropped
MAX_UNREAD_BYTES = 4 << 30  # of their arrays
_log = logging.getLogger(__name__)
_REFUSAL_CODES = {
    "invalid": protocol.INVALID,
    "capacity": protocol.INVALID,
    "queue_full": protocol.UNAVAILABLE,
    "unavailable": protocol.UNAVAILABLE,
    "internal": protocol.INTERNAL,
}


class ExecutorServer:
    """Accepts clients once constructed; `close` drains. `identity` is part of every ping's answer."""

    def __init__(self, loop: EngineLoop, socket_path: Path, key: bytes, identity: dict[str, Any]) -> None:
        self.loop = loop
        self.draining = False
        self._closed = False
        self._identity = {**identity, "pid": os.getpid()}
        self._key = key
        self._path = socket_path
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()
        self._listener = transport.listen(socket_path)
        self._acceptor = threading.Thread(target=self._accept, name="oasiskv-accept", daemon=True)
        self._acceptor.start()

    def close(self, drain_s: float) -> None:
        """Refuse new requests, let those in flight end for `drain_s` seconds, cancel the rest, say goodbye."""
        self.draining = True
        end = time.monotonic() + drain_s
        while self.in_flight() and time.monotonic() < end:
            time.sleep(0.02)
        self.loop.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.say_goodbye()
        end = time.monotonic() + transport.SEND_S
        for client in clients:
            client.finish(end - time.monotonic())
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._acceptor.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def in_flight(self) -> int:
        with self._lock:
            return sum(len(c.requests) for c in self._clients)

    def status(self) -> dict[str, Any]:
        """quiet_s: seconds that the engine has been in one step; 0 when it has nothing to do."""
        return {**self._identity, "in_flight": self.in_flight(), "quiet_s": self.loop.quiet_s()}

    def forget(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)

    def _accept(self) -> None:
        while True:
            raw = None
            try:
                raw, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(raw,), name="oasiskv-reader", daemon=True).start()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads: other clients will leave again
                if self._closed:
                    return
                _log.warning("a client could not be accepted: %s", error)
                if raw:
                    raw.close()
                time.sleep(_ACCEPT_PAUSE_S)

    def _greet(self, raw: socket.socket) -> None:
        with self._lock:
            full = len(self._clients) >= MAX_CLIENTS
        if full:
            _log.warning("a client was turned away: %d are connected", MAX_CLIENTS)
            raw.close()
            return
        try:
            connection = transport.accept(raw, self._key)
        except (OSError, EOFError, AuthenticationError) as error:
            _log.warning("a client failed to authenticate: %s", error or type(error).__name__)
            raw.close()
            return
        client = _Client(self, connection)
        with self._lock:
            self._clients.add(client)
        client.serve()


class _Client:
    """One connection: this thread reads, another writes; the engine's thread only ever puts into the queue between."""

    def __init__(self, server: ExecutorServer, connection: Connection) -> None:
        self.requests: dict[int, int] = {}  # client's id -> engine's id
        self._server = server
        self._connection = connection
        self._lock = threading.Lock()  # guards requests against the engine's thread
        self._gone = False
        self._answers: queue.Queue[protocol.Answer | None] = queue.Queue(MAX_UNREAD)
        self._unread_bytes = 0
        self._counting = threading.Lock()  # guards _unread_bytes
        self._writer = threading.Thread(target=self._write, name="oasiskv-writer", daemon=True)
        self._writer.start()

    def serve(self) -> None:
        """Read until the client goes or breaks the protocol, then cancel what it had."""
        try:
            while True:
                self._handle(protocol.decode_request(self._connection.recv_bytes(protocol.MAX_FRAME_BYTES)))
        except protocol.ProtocolError as error:
            _log.warning("a client is dropped: %s", error)
            self._put(protocol.Fault(str(error)))
        except (OSError, EOFError):
            pass  # it left, or sent a frame over the limit
        finally:
            with self._lock:
                self._gone = True
                left, self.requests = list(self.requests.values()), {}
            self._server.forget(self)
            for engine_id in left:
                self._server.loop.cancel(engine_id)
            self.say_goodbye()
            self.finish(transport.SEND_S)
            self._connection.close()

    def say_goodbye(self) -> None:
        """Let the writer end once it has written what is queued."""
        try:
            self._answers.put_nowait(None)
        except queue.Full:
            transport.hang_up(self._connection)

    def finish(self, timeout_s: float) -> None:
        """Wait for the writer, then hang up, which also ends the reader."""
        self._writer.join(timeout=max(0.0, timeout_s))
        transport.hang_up(self._connection)

    def _handle(self, request: protocol.Request) -> None:
        if isinstance(request, protocol.Submit):
            self._submit(request)
        elif isinstance(request, protocol.Cancel):
            with self._lock:
                engine_id = self.requests.get(request.id)
            if engine_id is not None:
                self._server.loop.cancel(engine_id)
        elif request.what == "ping":
            self._put(protocol.Reply(request.id, self._server.status()))
        elif request.what == "metrics":
            self._put(protocol.Reply(request.id, self._server.loop.metrics(request.since)))
        else:
            self._put(protocol.Reply(request.id, self._server.loop.usage()))

    def _submit(self, request: protocol.Submit) -> None:
        if request.id in self.requests:
            raise protocol.ProtocolError(f"id = {request.id} is in flight already")
        refused = self._start(request)
        if refused:
            self._put(refused)

    def _start(self, request: protocol.Submit) -> protocol.Output | None:
        if self._server.draining:
            return self._refused(request.id, "unavailable", "the executor is shutting down")
        if len(self.requests) >= MAX_IN_FLIGHT:
            return self._refused(request.id, "queue_full", f"{MAX_IN_FLIGHT} requests are in flight: try again later")
        loop = self._server.loop
        try:
            params = sampling_params(request.params, loop.tokenizer)
            prompt = (
                loop.tokenizer.encode(request.prompt, max_tokens=loop.max_seq_len) if isinstance(request.prompt, str) else request.prompt
            )
            if params.guide is not None:
                loop.check(prompt, params)  # compiles it before the lock is held, which the engine's thread takes for every output
            # The lock keeps the engine's first output behind the entry in `requests`.
            with self._lock:
                self.requests[request.id] = loop.submit(prompt, params, lambda o: self._take(request.id, o))
        except RequestError as error:
            return self._refused(request.id, "capacity" if isinstance(error, CapacityError) else "invalid", str(error))
        except EngineError as error:
            return self._refused(request.id, "queue_full" if isinstance(error, QueueFullError) else "unavailable", str(error))
        except Exception as error:  # one request must not end its connection, which may carry many users'
            _log.exception("a request could not be started")
            return self._refused(request.id, "internal", f"{type(error).__name__}: {error}")
        return None

    def _refused(self, request_id: int, reason: str, error: str) -> protocol.Output:
        self._server.loop.refused(reason)
        return protocol.failed(request_id, _REFUSAL_CODES[reason], error)

    def _take(self, request_id: int, output: RequestOutput) -> None:
        """On the engine's thread: never blocks on the client."""
        with self._lock:
            if self._gone:
                return
            if output.finished:
                self.requests.pop(request_id, None)
        if output.finish_reason == "cancelled" and self._server.draining:  # not by its client: it must not pass for a whole answer
            self._put(protocol.failed(request_id, protocol.UNAVAILABLE, "the executor shut down before the request had ended"))
            return
        for answer in _answers(request_id, output):
            self._put(answer)

    def _put(self, answer: protocol.Answer) -> None:
        if self._count_unread(answer, 1) > MAX_UNREAD_BYTES:
            _log.warning("a client left %d bytes of logits unread and is dropped", MAX_UNREAD_BYTES)
            transport.hang_up(self._connection)
            return
        try:
            self._answers.put_nowait(answer)
        except queue.Full:
            _log.warning("a client left %d answers unread and is dropped", MAX_UNREAD)
            transport.hang_up(self._connection)

    def _count_unread(self, answer: protocol.Answer, sign: int) -> int:
        if not isinstance(answer, protocol.Output):
            return 0
        with self._counting:
            self._unread_bytes += sign * answer.array_bytes
            return self._unread_bytes

    def _write(self) -> None:
        while (answer := self._answers.get()) is not None:
            self._count_unread(answer, -1)
            try:
                self._connection.send_bytes(protocol.encode(answer))
            except (OSError, protocol.ProtocolError) as error:  # it left, or the answer is over the limit of a frame
                _log.warning("a client is dropped: %s", error)
                transport.hang_up(self._connection)
                return


def _answers(request_id: int, output: RequestOutput) -> Iterator[protocol.Output]:
    """Logits in parts that fit a frame, the last of them with all else."""
    whole = {name: array for name in protocol.ARRAYS if (array := getattr(output, name)) is not None}
    last: dict[str, np.ndarray] = {}
    for name, array in whole.items():
        rows = max(1, protocol.MAX_ARRAY_BYTES // array[0].nbytes)
        *parts, last[name] = (array[at : at + rows] for at in range(0, len(array), rows))
        for part in parts:
            yield protocol.Output(request_id, **{name: part})
    yield protocol.Output(
        request_id,
        output.token_ids,
        output.text,
        output.finished,
        output.finish_reason,
        output.error,
        protocol.INTERNAL if output.finish_reason == "error" else None,
        output.stats,
        [[s.logprob, [list(pair) for pair in s.top_logprobs]] for s in output.logprobs],
        **last,
    )
