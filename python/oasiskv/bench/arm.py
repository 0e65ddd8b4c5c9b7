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


class Arm:
    """One engine, with its step's times."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self._turns: list[float] = []  # seconds from a step's tokens to the end of the next launch
        self._arrived: float | None = None
        runner = engine.runner
        runner.results, runner.launch = self._after(runner.results, arrives=True), self._after(runner.launch, arrives=False)

    def _after(self, call: Callable[..., Any], arrives: bool) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            result = call(*args)
            now = time.perf_counter()
            if not arrives and self._arrived is not None:
                self._turns.append(now - self._arrived)
            self._arrived = now if arrives else None
            return result

        return timed

    def fill(self, requests: int, context: int, output: int) -> dict[str, float]:
        """Submit and run until all that fit decode; how many, and how long it took."""
        engine = self.engine
        vocab = engine.model_config.vocab_size
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for i in range(requests):
            ids = ((torch.arange(context) * 7919 + i * 104729) % vocab).tolist()
            engine.add(engine.next_id(), ids, params)
        begin = time.perf_counter()
        told = begin
        still = 0
        while still < 3:  # steps in which nobody came in
            engine.step()
            usage = engine.usage()
            still = still + 1 if usage["prefilling"] == 0 else 0
            if time.perf_counter() - told > 5:
                told = time.perf_counter()
                say(f"  {self.name}: {usage['decoding']} of {requests} decode after {told - begin:.0f} s")
        engine.drain()
        return {"running": engine.usage()["decoding"], "prefill_s": time.perf_counter() - begin}

    def measure(self, steps: int) -> dict[str, float]:
        """Step times over `steps` steps. Raises EngineError when not the same requests ran through all of them."""
        engine, running = self.engine, self.engine.usage()["decoding"]
        for _ in range(8):  # sparse by now, sizes captured
            engine.step()
        before, begin = self._admitted(), time.perf_counter()
        self._turns.clear()
        times, last = [], begin
        for _ in range(steps):
            engine.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        total = last - begin
        if engine.usage()["decoding"] != running:
            raise EngineError(f"{running} requests ran when the measurement began, {engine.usage()['decoding']} at its end")
        after = self._admitted()
        times.sort()
        return {
            "tpot_ms": statistics.median(times) * 1e3,
            "tpot_mean_ms": total / steps * 1e3,
            "tpot_p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] * 1e3,
            "link_mb_step": (after - before) / steps / 1e6,
            "turn_ms": statistics.median(self._turns) * 1e3,
            "turn_p99_ms": sorted(self._turns)[int(0.99 * (len(self._turns) - 1))] * 1e3,
        }

    def profile(self, steps: int, trace: str | None) -> list[dict[str, object]]:
        """By name: calls a step, and microseconds a step and a call, of the kernels on the GPU and of CUDA's calls on the host."""
        from torch.profiler import ProfilerActivity, profile

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

    def _admitted(self) -> int:
        return sum(self.engine.stats(i)["bytes_fetched"] for i in self.engine.request_ids())

    def empty(self) -> None:
        for i in self.engine.request_ids():
            self.engine.stop(i, "cancelled")
        self.engine.step()
        usage = self.engine.usage()
        if usage["device_pages_free"] != usage["device_pages"] or usage["host_blocks_free"] != usage["host_blocks"]:
            raise EngineError(f"pools are not at their baseline: {usage}")
