"""What an engine counts, for whoever watches it: counters that only grow, gauges, and times that were observed."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oasiskv import _core
from oasiskv.config import BLOCK_TOKENS, EngineConfig
from oasiskv.engine.sequence import RequestOutput

# Statistics of a request whose sums over all requests are counters.
SUMMED = (
    "prompt_tokens", "generated_tokens", "dense_steps", "sparse_steps", "blocks_predicted", "blocks_admitted", "blocks_capped",
    "bytes_fetched", "stall_ms", "preemptions", "draft_tokens", "draft_accepted", "kv_blocks_total", "kv_blocks_new", "kv_blocks_reused",
)  # fmt: skip
FROM_USAGE = ("prefix_blocks_evicted",)  # counters that the core keeps
REASONS = ("stop", "length", "cancelled", "error")
REFUSALS = ("invalid", "capacity", "queue_full", "unavailable", "internal")
# Seconds but for the last two: submit to first output; between outputs, a value a token; submit to the step that scheduled it first;
# submit to end. Tokens of a prompt and of an answer, at the end.
OBSERVED = ("ttft", "inter_token", "queue", "e2e", "prompt_tokens", "generated_tokens")
KEPT = 65536  # observations that a poller may be behind
PROGRESS_S = 0.25  # between looks at requests that have not ended


def sizes(config: EngineConfig, core: _core.CoreConfig) -> dict[str, int]:
    """What does not change: limits of the configuration, and bytes of blocks and of the pools by the memory that they are in."""
    device = core.device_pages * core.page_bytes * core.num_layers + core.summary_bytes
    host = core.host_blocks * core.page_bytes
    on_gpu = config.backend == "cuda"
    return {
        "max_batch_size": config.max_batch_size,
        "max_queue_size": config.max_queue_size,
        "top_k_blocks": config.top_k_blocks,
        "fetch_cap_blocks": config.fetch_cap_blocks,
        "block_tokens": BLOCK_TOKENS,
        "device_page_bytes": core.page_bytes * core.num_layers,
        "host_block_bytes": core.page_bytes,
        "memory_cpu_bytes": 0 if on_gpu else device + host,
        "memory_gpu_bytes": device if on_gpu else 0,
        "memory_pinned_bytes": host if on_gpu else 0,
    }


@dataclass(slots=True)
class _Live:
    """A request that has not ended; `seen`: its statistics as far as they are in the counters."""

    submitted: float
    last_output: float | None = None
    seen: dict[str, float] = field(default_factory=dict)


class EngineMetrics:
    """Written by the engine's thread alone, but for `refused`; `poll` is safe from any.

    A counter of SUMMED is at any time the sum of the ended requests' statistics and of what running ones had when they were last looked
    at. What is written shows in `poll` from the next `publish` on, all of it at once.
    """

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)  # whoever meets another one has another engine before him, whose counters began at 0
        self._lock = threading.Lock()  # guards what `poll` reads: the last five
        self._live: dict[int, _Live] = {}
        self._totals: dict[str, float] = dict.fromkeys(
            [*SUMMED, *FROM_USAGE, *(f"ended_{r}" for r in REASONS), "steps", "step_failures"], 0
        )
        self._pending: list[tuple[str, float]] = []
        self._next_look = 0.0
        self._counters: dict[str, float] = dict(self._totals)
        self._refused = dict.fromkeys((f"refused_{r}" for r in REFUSALS), 0)
        self._gauges: dict[str, Any] = {}
        self._observations: deque[tuple[str, float]] = deque(maxlen=KEPT)
        self._observed = 0  # how many there ever were

    # ------------------------------------------------------------ on the engine's thread

    def added(self, request_id: int, submitted: float) -> None:
        """`submitted`: time.monotonic() when its client asked."""
        self._live[request_id] = _Live(submitted)

    def scheduled(self, request_id: int, at: float) -> None:
        """For the first time, by the step that began at `at`."""
        self._pending.append(("queue", max(0.0, at - self._live[request_id].submitted)))

    def output(self, output: RequestOutput) -> None:
        """What a request yielded; the last one ends it."""
        live, now = self._live.get(output.request_id), time.monotonic()
        if live is None:  # it was told that it ended
            return
        count = len(output.token_ids)
        if count and live.last_output is None:
            self._pending.append(("ttft", now - live.submitted))
        elif count:
            self._pending += itertools.repeat(("inter_token", (now - live.last_output) / count), count)
        if count:
            live.last_output = now
        if output.finished:
            self.progress(output.request_id, output.stats or {})
            del self._live[output.request_id]
            self._totals[f"ended_{output.finish_reason}"] += 1
            self._pending.append(("e2e", now - live.submitted))
            for name in ("prompt_tokens", "generated_tokens"):
                if name in live.seen:  # not of one whose statistics are lost
                    self._pending.append((name, live.seen[name]))

    def wants_progress(self) -> bool:
        """Whether it is time again to look at what runs; never in an engine that is driven by hand, of which no request was `added`."""
        now = time.monotonic()
        if now < self._next_look or not self._live:
            return False
        self._next_look = now + PROGRESS_S
        return True

    def progress(self, request_id: int, stats: Mapping[str, Any]) -> None:
        """A request's statistics so far; empty where they are lost, which leaves what was counted of it."""
        live = self._live[request_id]
        for name in SUMMED:
            if name in stats:
                self._totals[name] += stats[name] - live.seen.get(name, 0)
                live.seen[name] = stats[name]

    def step_failed(self) -> None:
        self._totals["step_failures"] += 1

    def publish(self, steps: int, gauges: dict[str, Any]) -> None:
        """`steps`: that the engine has planned so far. `gauges` is kept: give it a dict of its own."""
        self._totals["steps"] = steps
        self._totals.update((name, gauges[name]) for name in FROM_USAGE)
        with self._lock:
            self._counters, self._gauges = dict(self._totals), gauges
            self._observations += self._pending
            self._observed += len(self._pending)
        self._pending.clear()

    # ------------------------------------------------------------ from any thread

    def refused(self, reason: str) -> None:
        """Count a request that was not taken; `reason` is one of REFUSALS."""
        with self._lock:
            self._refused[f"refused_{reason}"] += 1

    def poll(self, since: int = 0) -> dict[str, Any]:
        """Counters and gauges as of now, and what was observed from number `since` on, 0 being the first.

        `next` is the `since` of the next poll; `lost` says how many observations were asked for and are not kept any more. A `since`
        beyond the last is of another epoch: nothing is observed since.
        """
        with self._lock:
            counters, gauges, last = self._counters | self._refused, self._gauges, self._observed
            kept = last - len(self._observations)
            recent = list(itertools.islice(self._observations, max(0, since - kept), None))
        observations: dict[str, list[float]] = {name: [] for name in OBSERVED}
        for name, value in recent:
            observations[name].append(round(value, 6))
        return {
            "epoch": self.epoch,
            "counters": counters,
            "gauges": gauges,
            "observations": observations,
            "next": last,
            "lost": max(0, kept - since),
        }
