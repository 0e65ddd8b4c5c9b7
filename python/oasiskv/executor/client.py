"""The other end of the executor's socket, for any process that wants tokens."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oasiskv.errors import EngineError
from oasiskv.executor import protocol, transport
from oasiskv.executor.protocol import Output

OnOutput = Callable[[Output], None]
_log = logging.getLogger(__name__)


class ExecutorClient:
    """Every submitted request gets exactly one output with `finished` set: when the connection is lost, an error. Thread-safe.

    Callbacks run on the client's reader thread. Raises EngineError when no executor answers within the deadline.
    """

    def __init__(self, socket_path: Path | str, authkey_file: Path | str, deadline_s: float = 10.0) -> None:
        self._connection = transport.connect(Path(socket_path), transport.read_key(Path(authkey_file)), deadline_s)
        self._ids = itertools.count(1)
        self._listeners: dict[int, OnOutput] = {}
        self._askers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._lost: str | None = None
        self._state = threading.Lock()  # guards the three above
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="oasiskv-client", daemon=True)
        self._reader.start()

    @property
    def closed(self) -> bool:
        """Whether the connection is gone: make a new client."""
        return self._lost is not None

    def submit(self, prompt: list[int] | str, params: dict[str, Any], on_output: OnOutput) -> int:
        """Send a request and return its id at once; refusals come as its only output. Raises EngineError, ProtocolError."""
        request_id = next(self._ids)
        frame = protocol.encode(protocol.Submit(request_id, prompt, params))
        with self._state:
            self._require_open()
            self._listeners[request_id] = on_output
        self._send(frame)
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request with the reason `cancelled`; nothing happens if it has ended."""
        self._send(protocol.encode(protocol.Cancel(request_id)))

    def ping(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Who the executor is and how busy: model, model_dir, pid, in_flight, quiet_s. Raises EngineError."""
        return self._ask("ping", timeout_s)

    def usage(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The engine's pools. Raises EngineError."""
        return self._ask("usage", timeout_s)

    def metrics(self, since: int = 0, timeout_s: float = 5.0) -> dict[str, Any]:
        """What the engine counted, has and observed (EngineMetrics.poll). Raises EngineError."""
        return self._ask("metrics", timeout_s, since)

    def close(self) -> None:
        """Hang up: what is in flight ends with an error here and is cancelled there. Idempotent."""
        transport.hang_up(self._connection)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def __enter__(self) -> ExecutorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._lost is not None:
            raise EngineError(f"no connection to the executor: {self._lost}")

    def _ask(self, what: str, timeout_s: float, since: int = 0) -> dict[str, Any]:
        ask_id = next(self._ids)
        answer: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._state:
            self._require_open()
            self._askers[ask_id] = answer
        self._send(protocol.encode(protocol.Ask(ask_id, what, since)))
        try:
            value = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineError(f"the executor did not answer a {what} within {timeout_s:g} s") from None
        finally:
            with self._state:
                self._askers.pop(ask_id, None)
        if value is None:
            self._require_open()
        return value or {}

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(frame)
        except OSError:
            # Part of a frame may be out: the stream is useless. The reader wakes up and ends what is in flight.
            transport.hang_up(self._connection)

    def _read(self) -> None:
        why = "the executor closed the connection"
        try:
            while True:
                answer = protocol.decode_answer(self._connection.recv_bytes(protocol.MAX_FRAME_BYTES))
                if isinstance(answer, protocol.Fault):
                    why = f"the executor refused this client: {answer.error}"
                    break
                self._dispatch(answer)
        except (OSError, EOFError) as error:
            why = f"the executor closed the connection ({type(error).__name__})"
        except protocol.ProtocolError as error:
            why = f"the executor broke the protocol: {error}"
        self._end(why)

    def _dispatch(self, answer: Output | protocol.Reply) -> None:
        with self._state:
            if isinstance(answer, protocol.Reply):
                asker = self._askers.get(answer.id)
                if asker:
                    asker.put(answer.value)
                return
            listener = self._listeners.pop(answer.id, None) if answer.finished else self._listeners.get(answer.id)
        if listener:
            _call(listener, answer)

    def _end(self, why: str) -> None:
        with self._state:
            self._lost = why
            listeners, self._listeners = self._listeners, {}
            askers, self._askers = self._askers, {}
        # Under the senders' lock, so that none writes to a descriptor that was closed and given to someone else.
        transport.hang_up(self._connection)
        with self._sending:
            self._connection.close()
        for asker in askers.values():
            asker.put(None)
        for request_id, listener in listeners.items():
            _call(listener, protocol.failed(request_id, protocol.UNAVAILABLE, f"the request was lost: {why}"))


def _call(listener: OnOutput, output: Output) -> None:
    try:
        listener(output)
    except Exception:  # one request's fault must not end the others
        _log.exception("an output callback failed")
