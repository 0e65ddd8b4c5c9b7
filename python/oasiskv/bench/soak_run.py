"""One run of the soak: clients on their threads, and the watch over them. soak.py has the options."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oasiskv.bench.soak_traffic import Client, Limits, Request, Schedule, wrong
from oasiskv.bench.text import prose
from oasiskv.config import EngineConfig
from oasiskv.engine.llm import LLM, GenerationResult
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import ConfigError, EngineError, RequestError

MIB, _GIB = 2**20, 2**30
_CLOSE_S = 30.0

# A minute: a soak that saw less of them has tested nothing.
LEAST = {
    "cpu": {"done": 20, "cancelled": 5, "preemptions": 3, "sparse_steps": 60, "canaries": 2},
    "cuda": {"done": 200, "cancelled": 50, "preemptions": 50, "sparse_steps": 5000, "canaries": 4},
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(eq=False)
class Live:
    """A request in flight, as its client sees it."""

    request: Request
    client: str
    heard: float  # time.monotonic() of its submission, then of its last output
    result: GenerationResult = field(default_factory=GenerationResult)
    outputs: int = 0


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int:
    """In use on the GPU, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def growth(samples: list[tuple[float, int]], seconds: float) -> float:
    """How much a line through the (second, bytes) of the last two thirds of `seconds` rises over them; bytes."""
    late = [s for s in samples if s[0] >= seconds / 3]
    if len(late) < 3:
        return 0.0
    times, sizes = zip(*late, strict=True)
    return statistics.linear_regression(times, sizes).slope * (times[-1] - times[0])


class Soak:
    """One run. What is wrong ends it and is in `failures`."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig, llm: LLM) -> None:
        self._args, self._config, self._llm, self._loop = args, config, llm, llm._loop
        self._seconds = args.minutes * 60
        self._exact = config.backend == "cpu" or config.batch_invariant
        self._text_ids = llm.tokenizer.encode(prose()[:400_000])
        vocab = self._loop.model_config.vocab_size
        self._limits = Limits(args.max_prompt, args.max_output, self._loop.max_seq_len, vocab, min(args.stall_s / 8, 6.0))
        canary = self._text_ids[: args.canary_prompt]
        self._canary_request = Request(canary, SamplingParams(max_tokens=args.canary_output, ignore_eos=True))
        largest = Request(self._text_ids[: args.max_prompt], SamplingParams(max_tokens=args.max_output))
        for request in (largest, self._canary_request):
            try:
                self._loop.check(request.prompt_ids, request.params)
            except RequestError as error:
                raise ConfigError(f"the largest request or the canary does not fit: {error}") from None
        self._schedule = Schedule(args.seed, self._seconds)
        self._reference: GenerationResult | None = None
        self._room = threading.Semaphore(args.in_flight)
        self._stop, self._over = threading.Event(), False
        self._lock = threading.Lock()  # guards what follows
        self._live: set[Live] = set()
        self._counts: Counter[str] = Counter()
        self._longest_wait = 0.0
        self.failures: list[str] = []
        self._memory: dict[str, list[tuple[float, int]]] = {"RSS": []} | ({"GPU": []} if config.backend == "cuda" else {})
        self._began = self._told = time.monotonic()
        self._told_tokens = 0

    def fail(self, what: str) -> None:
        with self._lock:
            if not self._over and len(self.failures) < 8:  # the first says it; the others are often its children
                self.failures.append(what)
        self._stop.set()

    # ------------------------------------------------------------ clients

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*args)
            except Exception:
                self.fail(f"client {name} failed, look at the call at the end of:\n{traceback.format_exc()}")

        thread = threading.Thread(target=guarded, name=f"soak-{name}", daemon=True)
        thread.start()
        return thread

    def _send(self, name: str, send: Callable[[Live], None]) -> None:
        """A client's whole life."""
        args = self._args
        client = Client(args.seed, name, self._text_ids, self._limits)
        while not self._stop.is_set():
            phase = self._schedule.at(self._elapsed())
            if phase.rate == 0:
                self._stop.wait(0.05)
                continue
            self._stop.wait(client.delay(args.rate * phase.rate / args.clients))
            for request in client.arrivals(phase.host_sampling):
                while not self._stop.is_set() and not self._room.acquire(timeout=0.1):
                    pass
                if self._stop.is_set():
                    return
                live = self._begin(request, name)
                try:
                    send(live)
                except RequestError as error:
                    self._end(live, "refused")
                    if not request.refused:
                        self.fail(f"{request} was refused, look at check(): {error}")
                    continue
                if request.refused:
                    self.fail(f"{request} was accepted though it can never run: look at Engine.check")

    def _submit(self, live: Live) -> None:
        """By callback; cancelled from this thread, timers' threads and the engine's."""
        request_id = self._loop.submit(live.request.prompt_ids, live.request.params, lambda output: self._output(live, output))
        for after in live.request.cancel_after_s:
            if after == 0:
                self._loop.cancel(request_id)
                continue
            timer = threading.Timer(after, self._loop.cancel, (request_id,))
            timer.daemon = True
            timer.start()

    def _output(self, live: Live, output: RequestOutput) -> None:
        if live.result.finish_reason is not None:
            self.fail(f"{live.request} had an output after its last: look at EngineLoop._deliver")
            return
        self._heard(live)
        live.result.take(output)
        live.outputs += 1
        with self._lock:
            self._counts["tokens"] += len(output.token_ids)
        if output.finished:
            if why := wrong(live.request, live.result, self._llm.tokenizer.eos_ids):
                self.fail(f"{live.request}: {why}; look at its client {live.client} and at the engine's log above")
            self._end(live, "cancelled" if output.finish_reason == "cancelled" else "done")
        elif live.outputs == live.request.cancel_after_outputs:
            self._loop.cancel(output.request_id)

    def _stream(self, live: Live) -> None:
        """By LLM.stream, which is closed instead of cancelled."""
        most = live.request.cancel_after_outputs or len(live.request.cancel_after_s)
        with contextlib.closing(self._llm.stream(live.request.prompt_ids, live.request.params)) as outputs:
            for output in outputs:
                self._output(live, output)
                if live.outputs == most and not output.finished:
                    self._end(live, "cancelled")
                    return

    def _canary(self) -> None:
        """Ask the canary; the first answer is the reference."""
        live = self._begin(self._canary_request, "canary")
        result = self._llm.generate([live.request.prompt_ids], live.request.params)[0]
        self._heard(live)
        if why := wrong(live.request, result, frozenset()):
            self.fail(f"the canary, {why}: look at the engine's log above")
        elif self._reference is None:
            self._reference = result
        elif self._exact and result.token_ids != self._reference.token_ids:
            self.fail(self._canary_differs(self._reference, result))
        with self._lock:
            self._live.discard(live)
            self._counts["canaries"] += 1
            self._counts["canary_preemptions"] += result.stats.get("preemptions", 0)

    def _canary_differs(self, expected: GenerationResult, got: GenerationResult) -> str:
        at = next((i for i, (a, b) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)) if a != b), "the end")
        names = ("dense_steps", "sparse_steps", "preemptions", "draft_tokens", "blocks_predicted", "blocks_admitted", "bytes_fetched")
        stats = ", ".join(f"{n} {expected.stats[n]} / {got.stats[n]}" for n in names)
        return (
            f"the canary answered otherwise from token {at} on, {self._elapsed():.0f} s into the run: "
            f"{expected.token_ids} / {got.token_ids}. Alone at the start / now: {stats}. If the blocks differ, look at drafts, selection "
            f"and preemption; if only tokens do, at what in a row's result depends on its batch. Usage: {self._loop.usage()}"
        )

    def _canaries(self) -> None:
        rng = random.Random(f"{self._args.seed} canaries")
        while not self._stop.wait(rng.uniform(0.5, 1.5) * self._args.canary_every_s):
            self._canary()

    # ------------------------------------------------------------ who is in flight

    def _begin(self, request: Request, client: str) -> Live:
        live = Live(request, client, time.monotonic())
        with self._lock:
            self._live.add(live)
        return live

    def _heard(self, live: Live) -> None:
        now = time.monotonic()
        with self._lock:
            self._longest_wait = max(self._longest_wait, now - live.heard)
        live.heard = now

    def _end(self, live: Live, how: str) -> None:
        with self._lock:
            self._live.discard(live)
            self._counts[how] += 1
            self._counts["host_sampled"] += live.request.params.sampled_on_host and how == "done"
            for name in ("preemptions", "sparse_steps"):
                self._counts[name] += live.result.stats.get(name, 0)
        self._room.release()

    # ------------------------------------------------------------ the watch

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _watch(self, until: Callable[[], bool]) -> bool:
        """Look on until then; False when something is wrong."""
        while not self.failures:
            if until():
                return True
            time.sleep(0.1)
            with self._lock:
                oldest = min(self._live, key=lambda r: r.heard, default=None)
            if oldest and time.monotonic() - oldest.heard > self._args.stall_s:
                self.fail(self._hang(oldest))
            if time.monotonic() - self._told >= self._args.every_s:
                self._tell()
        return False

    def _hang(self, live: Live) -> str:
        stack = sys._current_frames().get(self._loop._thread.ident or 0)
        where = "".join(traceback.format_stack(stack)) if stack else "it has ended"
        return (
            f"{live.request} of client {live.client} has had no output for {time.monotonic() - live.heard:.0f} s (--stall-s "
            f"{self._args.stall_s:g}) after {live.outputs}. The engine's thread has been in its step for {self._loop.quiet_s():.1f} s: if "
            f"that is long, look at the step it is in (the stack below), else at the scheduler, with this usage: {self._loop.usage()}\n"
            f"{where}"
        )

    def _sample(self) -> None:
        self._memory["RSS"].append((self._elapsed(), rss_bytes()))
        if "GPU" in self._memory:
            self._memory["GPU"].append((self._elapsed(), gpu_bytes()))

    def _tell(self) -> None:
        now, elapsed = time.monotonic(), self._elapsed()
        with self._lock:
            c, in_flight = self._counts.copy(), len(self._live)
        rate = (c["tokens"] - self._told_tokens) / max(now - self._told, 1e-3)
        self._told, self._told_tokens = now, c["tokens"]
        usage, gpu = self._loop.usage(), gpu_bytes() if "GPU" in self._memory else None
        states = ", ".join(f"{usage[s]} {s}" for s in ("decoding", "prefilling", "waiting", "preempted"))
        pools = ", ".join(f"{usage[p] - usage[p + '_free']} of {usage[p]} {p.replace('_', ' ')}" for p in ("device_pages", "host_blocks"))
        say(
            f"{elapsed:5.0f} s: {c['done']} done, {c['cancelled']} cancelled, {c['refused']} refused, {c['preemptions']} preemptions, "
            f"{c['canaries']} canaries; {rate:.0f} tok/s; RSS {rss_bytes() / _GIB:.3f} GiB"
            + (f", GPU {gpu / _GIB:.3f} GiB" if gpu is not None else "")
            + f"; {states}; {pools}"
        )
        self._write({"kind": "progress", **self._row(c), "in_flight": in_flight, "tok_s": round(rate, 1), **usage})

    def _row(self, counts: Counter[str]) -> dict[str, Any]:
        memory = {"rss_bytes": rss_bytes()} | ({"gpu_bytes": gpu_bytes()} if "GPU" in self._memory else {})
        names = ("done", "cancelled", "refused", "preemptions", "canaries", "canary_preemptions", "sparse_steps", "host_sampled", "tokens")
        return {"seconds": round(self._elapsed(), 1), **{n: counts[n] for n in names}, **memory}

    def _write(self, row: dict[str, Any]) -> None:
        if self._args.json:
            with Path(self._args.json).open("a") as out:
                out.write(json.dumps(row) + "\n")

    # ------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        """The last row, with `failures`; closes the engine."""
        try:
            self._run()
        finally:
            self._stop.set()
            self._over = True  # what closing cancels is nobody's fault
            closed = self._close()
        self._tell()
        row = {
            "kind": "end",
            "model": self._config.model,
            "backend": self._config.backend,
            "dtype": self._config.dtype,
            "seed": self._args.seed,
            "minutes": self._args.minutes,
            **self._row(self._counts),
            "longest_wait_s": round(self._longest_wait, 2),
            **{f"{name.lower()}_growth_bytes": round(growth(samples, self._seconds)) for name, samples in self._memory.items()},
            "failures": self.failures,
            "closed": closed,
        }
        self._write(row)
        return row

    def _run(self) -> None:
        reference = self._thread("canary", self._canary)
        if not self._watch(lambda: not reference.is_alive()) or self._reference is None:
            return
        if not self._config.dense and not self._reference.stats["sparse_steps"]:
            raise ConfigError(f"--canary-prompt {self._args.canary_prompt}: the canary never turns sparse; make it longer")
        self._began = self._told = time.monotonic()
        threads = [self._thread("canary", self._canaries)]
        for i in range(self._args.clients):
            name = f"stream-{i}" if i == 0 else f"submit-{i}"
            threads.append(self._thread(name, self._send, name, self._stream if i == 0 else self._submit))

        def over() -> bool:
            if not self._memory["RSS"] or self._elapsed() - self._memory["RSS"][-1][0] >= 0.5:
                self._sample()
            return self._elapsed() >= self._seconds

        if not self._watch(over):
            return
        self._stop.set()
        if not self._watch(lambda: not self._live and not any(t.is_alive() for t in threads)):
            return
        last = self._thread("canary", self._canary)
        if self._watch(lambda: not last.is_alive()):
            self._check_pools()
            self._check_memory()
            self._check_counts()

    def _check_pools(self) -> None:
        usage = self._loop.usage()
        held = {p: usage[p] - usage[f"{p}_free"] for p in ("device_pages", "host_blocks", "summary_pages")}
        held |= {s: usage[s] for s in ("waiting", "prefilling", "decoding", "preempted")}
        if left := {name: n for name, n in held.items() if n}:
            self.fail(f"after the last request had ended the engine still holds {left}: look at Engine._end and at what releases sequences")

    def _check_memory(self) -> None:
        places = {
            "RSS": "what is kept for each request (Engine._sequences, EngineLoop._listeners, the runner, the drafter), then the core",
            "GPU": "graphs captured again and again, then torch's allocator (torch.cuda.memory_summary())",
        }
        for name, samples in self._memory.items():
            if (grown := growth(samples, self._seconds) / MIB) > self._args.growth_mib:
                self.fail(
                    f"{name} still grew by {grown:.0f} MiB over the last two thirds of the run (--growth-mib {self._args.growth_mib:g}): "
                    f"look at {places[name]}"
                )

    def _check_counts(self) -> None:
        for name, a_minute in LEAST[self._config.backend].items():
            if name == "sparse_steps" and self._config.dense:
                continue
            if self._counts[name] < max(1, a_minute * self._args.minutes):
                self.fail(
                    f"only {self._counts[name]} {name}, at least {a_minute} a minute are needed: this run has tested too little; "
                    "look at --rate and the sizes of the pools"
                )

    def _close(self) -> bool:
        """Whether the engine's thread came to its end."""

        def close() -> None:
            with contextlib.suppress(EngineError):
                self._llm.close()

        closer = threading.Thread(target=close, daemon=True)
        closer.start()
        closer.join(_CLOSE_S)
        return not closer.is_alive()
