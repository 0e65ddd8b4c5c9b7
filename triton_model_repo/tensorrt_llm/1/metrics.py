"""Shows the executor's numbers on Triton's own metrics endpoint."""

from __future__ import annotations

import json
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from oasiskv.serve import contract
from oasiskv.serve.exported import EXPORTED, Exported
from oasiskv.serve.metrics_poll import MetricsPoller, Seen

_FAILURES_TOLD = 10  # of updates: the log must not fill with one that fails each time


class MetricsExporter:
    """Polls from a thread of its own. What came before it was made is not counted: as a Triton that starts, it begins at 0."""

    def __init__(self, args: dict[str, str]) -> None:
        """`args`: of the model's `initialize`. Raises ConfigError."""
        config = json.loads(args["model_config"])
        core = contract.CoreParameters.of(config)
        self._period_s = contract.whole(config, "oasis_metrics_period_ms", 500, 10, 60_000) / 1e3
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._families = [_Family(exported, labels) for exported in EXPORTED]
        self._poller = MetricsPoller(core.socket, core.authkey_file)
        self._told = 0
        self._stop = threading.Event()
        self._update()
        self._thread = threading.Thread(target=self._run, name="oasiskv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._poller.close()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._update()

    def _update(self) -> None:
        try:
            seen = self._poller.poll()
            for family in self._families:
                family.show(seen)
        except Exception as error:  # metrics must not end the model
            self._told += 1
            if self._told <= _FAILURES_TOLD:
                pb_utils.Logger.log_error(f"metrics could not be updated: {type(error).__name__}: {error}")


class _Family:
    def __init__(self, exported: Exported, labels: dict[str, str]) -> None:
        kind = getattr(pb_utils.MetricFamily, exported.kind.upper())
        buckets = {"buckets": list(exported.buckets)} if exported.buckets else {}
        self._kind = exported.kind
        self._family = pb_utils.MetricFamily(name=exported.name, description=exported.help, kind=kind)
        self._series: list[tuple[Any, Any]] = []  # a Triton metric, and where its number comes from
        for value, source in exported.series.items():
            own = {exported.label: value} if exported.label else {}
            self._series.append((self._family.Metric(labels=labels | own, **buckets), source))
        self._is_up = exported.name == "oasis_executor_up"

    def show(self, seen: Seen | None) -> None:
        if seen is None:
            if self._is_up:
                self._series[0][0].set(0)
            return
        for metric, source in self._series:
            if self._kind == "gauge":
                metric.set(source(seen.numbers))
            elif self._kind == "counter":
                if grown := source(seen.grown):
                    metric.increment(grown)
            else:
                for value in seen.observed.get(source, ()):
                    metric.observe(value)
