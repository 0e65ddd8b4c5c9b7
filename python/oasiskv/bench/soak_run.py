"""One run of the soak: its phases, and the watch over them. soak.py has the options."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from oasiskv.bench.report import GIB, say
from oasiskv.bench.soak_canary import Canary
from oasiskv.bench.soak_clients import Clients, start_thread
from oasiskv.bench.soak_ledger import Ledger, Live
from oasiskv.bench.soak_memory import Memory
from oasiskv.bench.soak_report import Report
from oasiskv.bench.soak_traffic import Request
from oasiskv.bench.text import prose
from oasiskv.config import EngineConfig
from oasiskv.engine.llm import LLM
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import ConfigError, EngineError, RequestError

DRAIN_S = 12.0  # what is in flight when the time is over may still take so long; the rest is cancelled
_CANARIES = 2  # at a time, amid the traffic
_CLOSE_S = 30.0
_SAMPLE_S = 0.5
_STEPS_A_SIZE = 4  # one is run eagerly, then one of each parity captured
POOLS = ("device_pages", "host_blocks", "summary_pages")
STATES = ("decoding", "prefilling", "waiting", "preempted")


def captures(config: EngineConfig) -> bool:
    """Whether the engine keeps something for each size of steps."""
    return config.backend == "cuda" and config.cuda_graphs


class Soak:
    """One run. What is wrong ends it and is in the report."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig, llm: LLM, report: Report) -> None:
        """Raises ConfigError where the largest request, or the canary, does not fit the engine."""
        self._args, self._config, self._report = args, config, report
        self._llm, self._loop = llm, llm.engine_loop
        self._seconds = args.minutes * 60
        self._exact = config.backend == "cpu" or config.batch_invariant
        text_ids = llm.tokenizer.encode(prose()[:400_000])
        canary = Request(text_ids[: args.canary_prompt], SamplingParams(max_tokens=args.canary_output, ignore_eos=True))
        largest = Request(text_ids[: args.max_prompt], SamplingParams(max_tokens=args.max_output))
        for request in (largest, canary):
            try:
                self._loop.check(request.prompt_ids, request.params)
            except RequestError as error:
                raise ConfigError(f"the largest request or the canary does not fit: {error}") from None
        self._ledger = Ledger()
        self._canary_prompt = canary.prompt_ids
        self._canary = Canary(canary, self._exact, llm, self._ledger, report)
        self._clients = Clients(args, llm, text_ids, self._ledger, report)
        self._memory = Memory(config)
        self._signal: int | None = None  # that came in
        self._held_at_start: dict[str, int] = {}
        self._began = self._told = self._sampled = time.monotonic()
        self._told_tokens = 0

    # ------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        """The row of the whole run; closes the engine. Its `exit_code` is 0, 1, or 128 and the number of the signal that ended it."""
        with self._noting_signals():
            try:
                self._phases()
            finally:
                self._report.close()
                row = self._row_of_the_run()  # before the pools go with the engine
                closed = self._close()
                faulthandler.cancel_dump_traceback_later()
            passed = closed and not self._report.failures
            row |= {"passed": passed, "closed": closed, "exit_code": 0 if passed else 128 + self._signal if self._signal else 1}
            self._report.row("end", row)
            return row

    def _phases(self) -> None:
        """The canary alone, the traffic, its drain, the canary alone again, and what must hold then."""
        if not self._ask_canary() or not (reference := self._canary.reference):
            return
        if not self._config.dense and not reference.stats["sparse_steps"]:
            raise ConfigError(f"--canary-prompt {self._args.canary_prompt}: the canary never turns sparse; make it longer")
        if captures(self._config) and not self._meet_sizes():
            return
        self._held_at_start = self._held()
        self._began = self._told = time.monotonic()
        self._memory.restart()
        asking = [self._ask_again_and_again(f"canary-{i}") for i in range(_CANARIES)]
        self._clients.start()
        if not self._watch(lambda: self._elapsed() >= self._seconds):
            return
        self._report.stop.set()
        say(f"the time is over: {len(self._ledger.in_flight())} requests have {DRAIN_S:g} s to end")
        if self._drain(asking) and self._ask_canary():
            self._check()

    def _ask_again_and_again(self, name: str) -> threading.Thread:
        return start_thread(self._report, name, self._canary.ask_again_and_again, name, self._args.seed, self._args.canary_every_s)

    def _ask_canary(self) -> bool:
        thread = start_thread(self._report, "canary", self._canary.ask)
        return self._watch(lambda: not thread.is_alive())

    def _meet_sizes(self) -> bool:
        """Steps of each number of requests, without a sparse one or with, greedy and random: captured later they would look like leaks."""
        say("each size of steps runs once")
        config, long = self._config, self._canary_prompt
        firsts = [long[:8]] if config.dense else [long[:8], long]

        def meet() -> None:
            for first, temperature in itertools.product(firsts, (0.0, 0.8)):
                prompts = [first] + [long[:8]] * (config.max_batch_size - 1)
                lives = range(_STEPS_A_SIZE * len(prompts), 0, -_STEPS_A_SIZE)
                most = config.max_seq_len - len(first)
                params = [SamplingParams(max_tokens=min(n, most), temperature=temperature, ignore_eos=True) for n in lives]
                self._llm.generate(prompts, params)

        thread = start_thread(self._report, "sizes", meet)
        return self._watch(lambda: not thread.is_alive())

    def _drain(self, asking: list[threading.Thread]) -> bool:
        began = time.monotonic()

        def drained() -> bool:
            running = self._clients.running() + [thread.name for thread in asking if thread.is_alive()]
            seconds = time.monotonic() - began
            if seconds > DRAIN_S:
                self._clients.give_up()
            if seconds > DRAIN_S + self._args.stall_s:
                self._report.fail(f"clients do not end: {running}; look at what they wait for")
            return not running and not self._ledger.in_flight()

        return self._watch(drained)

    def _check(self) -> None:
        """What must hold once nothing runs any more."""
        usage, args = self._llm.usage(), self._args
        if left := {name: n for name, n in {**self._held(), **{s: usage[s] for s in STATES}}.items() if n}:
            self._report.fail(
                f"after the last request had ended the engine holds {left}: look at Engine._end and at what releases sequences"
            )
        for what in self._memory.leaks(self._seconds, args.growth_mib) + self._ledger.too_few(args.backend, args.minutes, args.dense):
            self._report.fail(what)

    def _close(self) -> bool:
        """Whether the engine's thread came to its end."""

        def close() -> None:
            with contextlib.suppress(EngineError):
                self._llm.close()

        closer = threading.Thread(target=close, daemon=True)
        closer.start()
        closer.join(_CLOSE_S)
        return not closer.is_alive()

    # ------------------------------------------------------------ the watch

    @contextlib.contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in order, with its last row; a second one as it would have done before."""

        def note(number: int, _frame: object) -> None:
            self._signal = number
            signal.signal(number, before[number])

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, until: Callable[[], bool]) -> bool:
        """Look on until then; False when something is wrong."""
        while not self._report.failures:
            if until():
                return True
            time.sleep(0.1)
            now, oldest = time.monotonic(), next(iter(self._ledger.in_flight()), None)
            if self._signal:
                state = self._silence(oldest) if oldest else "nothing was in flight"
                self._report.fail(f"{signal.Signals(self._signal).name} came {self._elapsed():.0f} s into the run; {state}")
            elif oldest and now - oldest.heard > self._args.stall_s:
                self._report.fail(self._silence(oldest))
            elif not oldest and (quiet := self._loop.quiet_s()) > self._args.stall_s:
                self._report.fail(
                    f"no client waits, and the engine's thread has been in its step for {quiet:.1f} s (--stall-s {self._args.stall_s:g}): "
                    f"look at the step it is in\n{self._loop.stack() or 'it has ended'}"
                )
            if now - self._sampled >= _SAMPLE_S:
                self._sampled = now
                self._memory.sample()
                # For a hang that holds the GIL, and so this watch too: all stacks, and the end.
                faulthandler.dump_traceback_later(self._args.stall_s + _CLOSE_S, exit=True, file=sys.__stderr__)
            if now - self._told >= self._args.every_s:
                self._tell()
        return False

    def _silence(self, live: Live) -> str:
        return (
            f"{live.request} of client {live.client} has had no output for {time.monotonic() - live.heard:.0f} s (--stall-s "
            f"{self._args.stall_s:g}) after {live.outputs}. The engine's thread has been in its step for {self._loop.quiet_s():.1f} s: "
            f"if that is long, look at the step it is in (the stack below), else at the scheduler, with this usage: {self._llm.usage()}\n"
            f"{self._loop.stack() or 'it has ended'}"
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _held(self) -> dict[str, int]:
        usage = self._llm.usage()
        return {pool: usage[pool] - usage[f"{pool}_free"] for pool in POOLS}

    # ------------------------------------------------------------ what is told

    def _tell(self) -> None:
        now, row, usage, held = time.monotonic(), self._row(), self._llm.usage(), self._held()
        rate = (row["tokens"] - self._told_tokens) / max(now - self._told, 1e-3)
        self._told, self._told_tokens = now, row["tokens"]
        memory = ", ".join(f"{name} {row[f'{name}_bytes'] / GIB:.3f} GiB" for name in ("rss", "pinned", "gpu") if f"{name}_bytes" in row)
        states = ", ".join(f"{usage[state]} {state}" for state in STATES)
        pools = ", ".join(f"{held[pool]} of {usage[pool]} {pool.replace('_', ' ')}" for pool in POOLS[:2])
        say(
            f"{row['seconds']:5.0f} s: {row['done']} done, {row['cancelled']} cancelled, {row['refused']} refused, "
            f"{row['preemptions']} preemptions, {row['canaries']} canaries; {rate:.0f} tok/s; {memory}; {states}; {pools}"
        )
        self._report.row("progress", {**row, "tok_s": round(rate, 1), **usage})

    def _row(self) -> dict[str, Any]:
        memory = {f"{name}_bytes": size for name, size in self._memory.now().items()}
        return {"seconds": round(self._elapsed(), 1), **self._ledger.counts(), "in_flight": len(self._ledger.in_flight()), **memory}

    def _row_of_the_run(self) -> dict[str, Any]:
        usage = self._llm.usage()
        self._memory.sample()
        return {
            "failures": self._report.failures,
            "minutes": self._args.minutes,
            "seed": self._args.seed,
            "exact": self._exact,
            **self._row(),
            "longest_wait_s": round(self._ledger.longest_wait_s, 2),
            "pools": {pool: usage[pool] for pool in POOLS},
            "held_start": self._held_at_start,
            "held_end": self._held(),
            **self._memory.row(self._seconds),
        }
