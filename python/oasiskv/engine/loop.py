"""The thread that drives an Engine: requests and cancels come in from any thread, outputs go out by callback."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.guide import RowGuide
from oasiskv.engine.metrics import sizes
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import ConfigError, EngineError, QueueFullError

OnOutput = Callable[[RequestOutput], None]
_log = logging.getLogger(__name__)


class EngineLoop:
    """Every request that `submit` accepted gets exactly one output with `finished` set, whatever happens."""

    def __init__(self, config: EngineConfig) -> None:
        if config.trace:
            raise ConfigError("trace = True: only a caller that drives an Engine itself can take the records")
        engine = Engine(config)
        self._engine: Engine | None = engine  # None once closed
        self.config = config
        self.tokenizer, self.model_config = engine.tokenizer, engine.model_config
        self.max_seq_len: int = engine.core_config.max_seq_len
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[int, OnOutput] = {}
        self._lock = threading.Condition()  # guards _broken, _queued and the order of submit against them; notified when a place comes free
        self._broken: str | None = None
        self._queued = 0  # requests that no step has begun with: in the inbox, or waiting in the engine
        self._waiting: dict[int, None] = {}  # those of them that the engine has seen, oldest first
        self._progress = self._step_began = time.monotonic()
        self._usage = engine.usage()
        self._metrics = engine.metrics
        self._sizes = sizes(config, engine.core_config)
        self._publish()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="oasiskv-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a script may end without closing; the thread must not run into the interpreter's end

    def submit(self, prompt_ids: list[int], params: SamplingParams, on_output: OnOutput, wait: bool = False) -> int:
        """Queue a request; `on_output` is called on the engine's thread. Raises RequestError, CapacityError, EngineError.

        When `max_queue_size` requests wait already: QueueFullError, or with `wait` (from other threads than the engine's) not before
        one of them does not wait any more.
        """
        if os.getpid() != self._owner:
            raise EngineError("this engine lives in the parent process: make one of its own in the child, or start children by spawn")
        engine = self._open_engine()
        arrival_ns = time.monotonic_ns()
        with self._lock:
            self._require_place(wait)  # before a guide is compiled in vain
        engine.check(prompt_ids, params)
        guide = engine.start_guide(prompt_ids, params)
        request_id = engine.next_id()
        with self._lock:
            self._require_place(wait)
            self._queued += 1
            self._inbox.put(lambda: self._add(request_id, prompt_ids, params, on_output, arrival_ns, guide))
        return request_id

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError or CapacityError for what can never run here, EngineError if closed; safe from any thread."""
        self._open_engine().check(prompt_ids, params)

    def cancel(self, request_id: int) -> None:
        """End a request with the reason `cancelled`; nothing happens if it has ended."""
        self._inbox.put(lambda: self._deliver(self._engine.stop(request_id, "cancelled")))

    def quiet_s(self) -> float:
        """Seconds since the engine last finished a step, or was idle: how long it has been at the one it is in."""
        return time.monotonic() - self._progress if self._listeners else 0.0

    def stack(self) -> str:
        """Where the engine's thread is now, as a traceback, for whoever finds it not getting on; empty once it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def usage(self) -> dict[str, Any]:
        """Pool occupancy after the last step; safe from any thread."""
        return dict(self._usage)

    def metrics(self, since: int = 0) -> dict[str, Any]:
        """What the engine counted, has and observed from number `since` on (EngineMetrics.poll); safe from any thread.

        Gauges are those of `usage` and metrics.sizes; `waiting` counts also what the engine has not seen yet.
        """
        seen = self._metrics.poll(since)
        return seen | {"gauges": {**seen["gauges"], "waiting": self._queued}}

    def refused(self, reason: str) -> None:
        """Count a request that a client was refused, by `submit` or before it; `reason`: one of metrics.REFUSALS."""
        self._metrics.refused(reason)

    @property
    def broken(self) -> str | None:
        """Why the engine can serve no more, or None."""
        return self._broken

    def close(self) -> None:
        """Cancel what runs, end the thread, free the model and the pools. Idempotent. Raises EngineError on the engine's own thread."""
        if threading.current_thread() is self._thread:
            raise EngineError("close() from an output callback would wait for itself: call it from another thread")
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._inbox.put(self._shut)
        self._thread.join()
        self._engine = None

    def _require_place(self, wait: bool) -> None:
        limit = self.config.max_queue_size
        while not self._broken and self._queued >= limit and wait:
            self._lock.wait()
        if self._broken:
            raise EngineError(self._broken)
        if self._queued >= limit:
            raise QueueFullError(
                f"{self._queued} requests wait and max_queue_size is {limit}: try again later, or start the engine with a larger one"
            )

    def _open_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise EngineError("the engine is closed")
        return engine

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        while not self._broken:
            try:
                self._handle_inbox(block=not self._listeners)
                self._progress = self._step_began = time.monotonic()
                if self._listeners and not self._broken:
                    outputs = self._engine.step()
                    self._give_places_back()
                    for output in outputs:
                        self._deliver(output)
            except Exception as error:
                self._fail(error)
            self._publish()

    def _give_places_back(self) -> None:
        """Of those that the step scheduled: admission is in their order, so the ones that still wait are the last."""
        scheduled = len(self._waiting) - self._engine.usage()["waiting"]
        for request_id in list(itertools.islice(self._waiting, scheduled)):
            self._metrics.scheduled(request_id, self._step_began)
            self._waits_no_more(request_id)

    def _publish(self) -> None:
        self._usage = self._engine.usage()
        self._metrics.publish(self._engine.steps, self._usage | self._sizes)

    def _waits_no_more(self, request_id: int) -> None:
        if request_id not in self._waiting:
            return
        del self._waiting[request_id]
        with self._lock:
            self._queued -= 1
            self._lock.notify_all()

    def _handle_inbox(self, block: bool) -> None:
        try:
            if block:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _add(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        on_output: OnOutput,
        arrival_ns: int,
        guide: RowGuide | None,
    ) -> None:
        self._listeners[request_id] = on_output
        self._waiting[request_id] = None
        self._metrics.added(request_id, arrival_ns / 1e9)
        self._engine.add(request_id, prompt_ids, params, arrival_ns, guide)

    def _deliver(self, output: RequestOutput | None) -> None:
        if output is None:
            return
        listener = self._listeners.get(output.request_id)
        self._metrics.output(output)
        if output.finished:
            self._listeners.pop(output.request_id, None)
            self._waits_no_more(output.request_id)
            self._publish()  # before its client can ask
        if listener is None:
            return
        try:
            listener(output)
        except Exception:  # one client's fault must not stop the batch
            _log.exception("request %d: its output callback failed; the request is cancelled", output.request_id)
            self._listeners.pop(output.request_id, None)
            if stopped := self._engine.stop(output.request_id, "cancelled"):
                self._metrics.output(stopped)

    def _fail(self, error: Exception) -> None:
        """A step failed: every request in flight ends with the error. The engine goes on if its background is sound."""
        self._metrics.step_failed()
        _log.exception("engine step failed; the requests in flight end with an error")
        why = f"engine step failed: {type(error).__name__}: {error}"
        try:
            self._engine.drain()
        except EngineError as fatal:
            with self._lock:
                self._broken = str(fatal)
                self._lock.notify_all()
        self._end_all("error", why)
        if self._broken:
            self._refuse_queued(why)

    def _refuse_queued(self, why: str) -> None:
        while not self._inbox.empty():  # submit() refuses by now: no more come in
            try:
                self._inbox.get_nowait()()
            except Exception:  # the others must end too
                _log.exception("a queued call failed while the engine ends")
        self._end_all("error", why)

    def _end_all(self, reason: str, error: str | None) -> None:
        for request_id in list(self._listeners):
            try:
                output = self._engine.stop(request_id, reason, error)
            except Exception:  # its client must learn of the end whatever state the engine is in
                _log.exception("request %d could not be ended in order", request_id)
                output = None
            self._deliver(output or RequestOutput(request_id, finished=True, finish_reason=reason, error=error))

    def _shut(self) -> None:
        with self._lock:
            self._broken = "the engine is closed"
            self._lock.notify_all()
        self._end_all("cancelled", None)
        self._refuse_queued("the engine is closed")
        self._engine.close()
