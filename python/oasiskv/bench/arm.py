"""One arm of a decode benchmark: an engine that is filled with requests and whose steps are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from oasiskv.bench.report import say
from oasiskv.engine.engine import Engine
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import EngineError

WARM_UP_STEPS = 8  # until requests are sparse and sizes captured
# Reading statistics waits for all that is launched, whose tokens the next calls then have at once: as many are not timed.
REFILL_STEPS = 4
# Kernels, by the beginning of their names, and copies that are none of the foreground's work.
_BACKGROUND = ("gather_kernel", "wait_kernel", "set_kernel", "score_kernel", "select_kernel", "write_through_kernel", "Memcpy", "Memset")


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


class Arm:
    """One engine, with its step's times. Requests that are filled in run until `empty`."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self._turns: list[float] = []  # seconds from a step's tokens to the end of the next launch
        self._arrived: float | None = None
        self._waited = 0.0  # seconds for tokens, in all
        runner = engine.runner
        runner.results, runner.launch = self._then(runner.results, self._arrive), self._then(runner.launch, self._launched)

    def _then(self, call: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            note(began)
            return result

        return noted

    def _arrive(self, asked: float) -> None:
        self._arrived = time.perf_counter()
        self._waited += self._arrived - asked

    def _launched(self, _: float) -> None:
        if self._arrived is not None:
            self._turns.append(time.perf_counter() - self._arrived)
        self._arrived = None

    def fill(self, requests: int, context: int, output: int) -> dict[str, float]:
        """Submit `requests` prompts of `context` made-up tokens, and run until all that fit decode; how many, and how long it took."""
        engine = self.engine
        vocab = engine.model_config.vocab_size
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for i in range(requests):
            ids = ((torch.arange(context) * 7919 + i * 104729) % vocab).tolist()
            engine.add(engine.next_id(), ids, params)
        begin = told = time.perf_counter()
        quiet_steps = 0  # in a row, in which nobody came in
        while quiet_steps < 3:
            engine.step()
            usage = engine.usage()
            quiet_steps = quiet_steps + 1 if usage["prefilling"] == 0 else 0
            if time.perf_counter() - told > 5:
                told = time.perf_counter()
                say(f"  {self.name}: {usage['decoding']} of {requests} decode after {told - begin:.0f} s")
        engine.drain()
        return {"running": engine.usage()["decoding"], "prefill_s": time.perf_counter() - begin}

    def measure(self, steps: int) -> dict[str, float]:
        """Over `steps` steps: their times; the link's megabytes; what the foreground stalled, waiting for the step before's transfers; and
        of the host: from tokens to the next launch (`turn`), and all of its time but the wait for tokens (`host`).

        Raises EngineError when not the same requests ran through all of them.
        """
        engine, running = self.engine, self.engine.usage()["decoding"]
        for _ in range(WARM_UP_STEPS):
            engine.step()
        fetched, stalled = self._transfers()
        for _ in range(REFILL_STEPS):
            engine.step()
        self._turns.clear()
        self._waited = 0.0
        times = []
        last = time.perf_counter()
        for _ in range(steps):
            engine.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        if engine.usage()["decoding"] != running:
            raise EngineError(f"{running} requests ran when the measurement began, {engine.usage()['decoding']} at its end")
        waited = self._waited
        fetched_now, stalled_now = self._transfers()
        return {
            "tpot_ms": statistics.median(times) * 1e3,
            "tpot_mean_ms": statistics.fmean(times) * 1e3,
            "tpot_p99_ms": _percentile(times, 0.99) * 1e3,
            "link_mb_step": (fetched_now - fetched) / (steps + REFILL_STEPS) / 1e6,
            "stall_ms_step": (stalled_now - stalled) / (steps + REFILL_STEPS),
            "host_ms_step": (sum(times) - waited) / steps * 1e3,
            "turn_ms": statistics.median(self._turns) * 1e3,
            "turn_p99_ms": _percentile(self._turns, 0.99) * 1e3,
        }

    def profile(self, steps: int, trace: str | None) -> list[dict[str, object]]:
        """By name: calls a step, and microseconds a step and a call, of the kernels on the GPU and of CUDA's calls on the host."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(steps):
                self.engine.step()
            torch.cuda.synchronize()
        if trace:
            prof.export_chrome_trace(trace)
        found: dict[tuple[str, str], list[float]] = {}
        for event in prof.events():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if not on_gpu and not event.name.startswith("cuda"):
                continue
            name = event.name.replace("void ", "").replace("oasis::cuda::", "").replace("(anonymous namespace)::", "").split("(")[0]
            took = event.device_time if on_gpu else event.cpu_time
            found.setdefault(("gpu" if on_gpu else "host", name[:80]), []).append(took)
        rows = [
            {
                "mode": self.name,
                "where": where,
                "name": name,
                "calls": len(t) / steps,
                "us_step": sum(t) / steps,
                "us_call": sum(t) / len(t),
            }
            for (where, name), t in found.items()
        ]
        return sorted(rows, key=lambda r: (r["where"], -float(r["us_step"])))

    def foreground_ms(self, steps: int) -> float:
        """What the kernels of a step's foreground take, beside whatever runs with them; what lies between them is not in it."""
        rows = self.profile(steps, None)
        return sum(float(r["us_step"]) for r in rows if r["where"] == "gpu" and not str(r["name"]).startswith(_BACKGROUND)) / 1e3

    def _transfers(self) -> tuple[int, float]:
        """Bytes that all who run have fetched; milliseconds that the oldest's steps have stalled."""
        stats = [self.engine.stats(i) for i in self.engine.request_ids()]
        return sum(s["bytes_fetched"] for s in stats), stats[0]["stall_ms"] if stats else 0.0

    def empty(self) -> None:
        """Cancel all. Raises EngineError when something of them stays behind in the pools."""
        for i in self.engine.request_ids():
            self.engine.stop(i, "cancelled")
        self.engine.step()
        usage = self.engine.usage()
        if usage["device_pages_free"] != usage["device_pages"] or usage["host_blocks_free"] != usage["host_blocks"]:
            raise EngineError(f"pools are not at their baseline: {usage}")
