"""Follows the numbers of an executor that may be restarted at any time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.errors import OasisError
from oasiskv.executor.client import ExecutorClient

_CONNECT_S, _ANSWER_S = 0.2, 5.0


@dataclass(frozen=True)
class Seen:
    """grown: what each of the executor's counters grew by since the last poll; numbers: its counters and gauges themselves; observed: new
    observations by name."""

    grown: dict[str, float]
    numbers: dict[str, float]
    observed: dict[str, list[float]]


class MetricsPoller:
    """One thread's. Counts from its first contact on: what an executor did before that is not its.

    Besides the executor's counters it has `lost` (observations that it was too late for) and `restarts`, and the gauges `up` and
    `timestamp_us`.
    """

    def __init__(self, socket: Path | str, authkey_file: Path | str) -> None:
        self._endpoint = socket, authkey_file
        self._client: ExecutorClient | None = None
        self._epoch: str | None = None  # of the executor that was met last
        self._base: dict[str, float] = {}  # its counters then
        self._next = 0

    def poll(self) -> Seen | None:
        """None when no executor answers."""
        try:
            answer, first = self._ask(), self._epoch is None
            restarted = not first and answer["epoch"] != self._epoch
            if restarted:  # everything that a new one has done is new
                self._base, self._next = {}, 0
                answer = self._ask()
        except OasisError:
            self.close()
            return None
        self._epoch = answer["epoch"]
        counters, base = answer["counters"], answer["counters"] if first else self._base
        grown = {name: value - base.get(name, 0) for name, value in counters.items()}
        grown |= {"lost": 0 if first else answer["lost"], "restarts": int(restarted)}
        self._base, self._next = counters, answer["next"]
        numbers = {**answer["gauges"], **counters, "up": 1, "timestamp_us": time.time_ns() // 1000}
        return Seen(grown, numbers, {} if first else answer["observations"])

    def _ask(self) -> dict[str, Any]:
        if self._client is None or self._client.closed:
            self.close()
            self._client = ExecutorClient(*self._endpoint, deadline_s=_CONNECT_S)
        return self._client.metrics(self._next, timeout_s=_ANSWER_S)

    def close(self) -> None:
        """Hang up; another poll connects again. Idempotent."""
        client, self._client = self._client, None
        if client:
            client.close()
