"""The clients of a soak, each on its thread: they send requests, cancel some of them and look at every answer."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from oasiskv.bench.soak_ledger import Ledger, Live
from oasiskv.bench.soak_report import Report
from oasiskv.bench.soak_traffic import Client, Limits, Schedule, wrong
from oasiskv.engine.llm import LLM
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import RequestError


def start_thread(report: Report, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread whose exception fails the soak."""

    def guarded() -> None:
        try:
            target(*args)
        except Exception:
            report.fail(f"client {name} failed, look at the call at the end of:\n{traceback.format_exc()}")

    thread = threading.Thread(target=guarded, name=f"soak-{name}", daemon=True)
    thread.start()
    return thread


class Clients:
    """The first streams, the others submit."""

    def __init__(self, args: argparse.Namespace, llm: LLM, text_ids: list[int], ledger: Ledger, report: Report) -> None:
        self._args, self._text_ids, self._ledger, self._report = args, text_ids, ledger, report
        self._llm, self._loop = llm, llm.engine_loop
        vocab = self._loop.model_config.vocab_size
        self._limits = Limits(args.max_prompt, args.max_output, self._loop.max_seq_len, vocab, min(args.stall_s / 8, 6.0))
        self._schedule = Schedule(args.seed, args.minutes * 60)
        self._room = threading.Semaphore(args.in_flight)
        self._threads: list[threading.Thread] = []
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        for i in range(self._args.clients):
            name, send = ("stream-0", self._stream) if i == 0 else (f"submit-{i}", self._submit)
            self._threads.append(start_thread(self._report, name, self._live_on, name, send))

    def running(self) -> list[str]:
        """Names of the threads that have not ended."""
        return [t.name for t in self._threads if t.is_alive()]

    def give_up(self) -> None:
        """Cancel what is in flight. A stream's id comes with its first output: until then it is left alone."""
        for live in self._ledger.in_flight():
            if live.request_id is not None and not live.given_up:
                live.given_up = True
                self._loop.cancel(live.request_id)

    def _live_on(self, name: str, send: Callable[[Live], None]) -> None:
        args, stop = self._args, self._report.stop
        client = Client(args.seed, name, self._text_ids, self._limits)
        while not stop.is_set():
            phase = self._schedule.at(time.monotonic() - self._began)
            if phase.rate == 0:
                stop.wait(0.05)
                continue
            stop.wait(client.delay(args.rate * phase.rate / args.clients))
            for request in client.arrivals(phase.host_sampling):
                while not stop.is_set() and not self._room.acquire(timeout=0.1):
                    pass
                if stop.is_set():
                    return
                live = self._ledger.begin(request, name)
                try:
                    send(live)
                except RequestError as error:
                    self._end(live, "refused")
                    if not request.refused:
                        self._report.fail(f"{request} was refused, look at check(): {error}")
                    continue
                if request.refused:
                    self._report.fail(f"{request} was accepted though it can never run: look at Engine.check")

    def _submit(self, live: Live) -> None:
        """By callback; cancelled from this thread, timers' threads and the engine's."""
        request = live.request
        live.request_id = self._loop.submit(request.prompt_ids, request.params, lambda output: self._output(live, output))
        for after in request.cancel_after_s:
            if after == 0:
                self._loop.cancel(live.request_id)
                continue
            timer = threading.Timer(after, self._loop.cancel, (live.request_id,))
            timer.daemon = True
            timer.start()

    def _stream(self, live: Live) -> None:
        """By LLM.stream, which is closed instead of cancelled."""
        most = live.request.cancel_after_outputs or len(live.request.cancel_after_s)
        with contextlib.closing(self._llm.stream(live.request.prompt_ids, live.request.params)) as outputs:
            for output in outputs:
                live.request_id = output.request_id
                self._output(live, output)
                if live.outputs == most and not output.finished:
                    self._end(live, "cancelled")
                    return

    def _output(self, live: Live, output: RequestOutput) -> None:
        if live.result.finish_reason is not None:
            self._report.fail(f"{live.request} had an output after its last: look at EngineLoop._deliver")
            return
        self._ledger.hear(live, len(output.token_ids))
        live.result.take(output)
        live.outputs += 1
        if output.finished:
            if why := wrong(live.request, live.result, self._llm.tokenizer.eos_ids, live.given_up):
                self._report.fail(f"{live.request}: {why}; look at its client {live.client} and at the engine's log above")
            how = "given_up" if live.given_up else "cancelled"
            self._end(live, how if output.finish_reason == "cancelled" else "done")
        elif live.outputs == live.request.cancel_after_outputs:
            self._loop.cancel(output.request_id)

    def _end(self, live: Live, how: str) -> None:
        self._ledger.end(live, how)
        self._room.release()
