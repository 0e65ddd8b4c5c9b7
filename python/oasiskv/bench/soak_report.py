"""What a soak tells: lines on standard error, rows of JSON, and what is wrong, each of them at once: the run may be killed at any time."""

from __future__ import annotations

import threading
from typing import Any

from oasiskv.bench.report import GIB, MIB, append_row, say

_MOST = 8  # failures that are told: the first says it, the others are often its children


class Report:
    """Of one run, from any thread. The first failure sets `stop`, which ends the clients."""

    def __init__(self, path: str | None) -> None:
        self.failures: list[str] = []
        self.stop = threading.Event()
        self._path = path
        self._lock = threading.Lock()  # guards the file, failures and _closed
        self._closed = False

    def row(self, kind: str, values: dict[str, Any]) -> None:
        with self._lock:
            self._write(kind, values)

    def fail(self, what: str) -> None:
        with self._lock:
            if not self._closed and len(self.failures) < _MOST:
                self.failures.append(what)
                say(f"soak failed: {what}")
                self._write("failure", {"what": what})
        self.stop.set()

    def close(self) -> None:
        """Nothing counts as a failure any more: what the end of the engine cancels is nobody's fault."""
        with self._lock:
            self._closed = True
        self.stop.set()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._path:
            append_row(self._path, {"kind": kind, **values})


def summary(end: dict[str, Any]) -> str:
    """The row of the whole run, for people."""
    verdict = "passed" if end["passed"] else "FAILED, as told above"
    held = {when: ", ".join(f"{n} of {end['pools'][pool]} {pool}" for pool, n in end[f"held_{when}"].items()) for when in ("start", "end")}
    memory = [
        f"{name}: {end[f'{name}_start_bytes'] / GIB:.3f} GiB at the start, {end[f'{name}_middle_bytes'] / GIB:.3f} in the middle, "
        f"{end[f'{name}_end_bytes'] / GIB:.3f} at the end; {end[f'{name}_growth_bytes'] / MIB:+.1f} MiB over the last two thirds"
        for name in ("rss", "pinned", "gpu")
        if f"{name}_growth_bytes" in end
    ]
    lines = [
        f"soak {verdict}: seed {end['seed']}, {end['minutes']:g} minutes of traffic, {end['seconds']:.0f} s with its end; exit code "
        f"{end['exit_code']}",
        f"requests: {end['done']} finished, {end['cancelled']} cancelled, {end['given_up']} given up at the end, {end['refused']} refused, "
        f"{end['in_flight']} left; {end['preempted']} were preempted, {end['preemptions']} times in all; longest wait "
        f"{end['longest_wait_s']} s",
        f"canary: {end['canaries']} answers, {end['canary_mismatches']} mismatches"
        f"{'' if end['exact'] else ' (no failure: in 16 bit results depend on the batch)'}, {end['canary_preemptions']} preemptions",
        f"pools held: at the start {held['start'] or 'unknown'}; at the end {held['end']}",
        *memory,
    ]
    return "\n  ".join(lines)
