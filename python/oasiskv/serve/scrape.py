"""Reads a metrics endpoint in Prometheus's text format, and what two scrapes say of the time between them."""

from __future__ import annotations

import math
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from oasiskv.errors import ServeError

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ANSWER_S = 5.0
_MOST_BYTES = 16 << 20
Samples = dict[str, list[tuple[dict[str, str], float]]]  # by name: labels and value of each series


def parse(text: str) -> Samples:
    """Series by name; lines that are none are left out."""
    samples: Samples = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := _LINE.fullmatch(line.strip())):
            name, labels, value = match.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            samples.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
    return samples


@dataclass(frozen=True)
class Scrape:
    at: float  # time.monotonic() when it was read
    samples: Samples

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series with these labels; 0 without any."""
        return sum(value for own, value in self.samples.get(name, ()) if labels.items() <= own.items())


def scrape(url: str) -> Scrape:
    """Raises ServeError for an endpoint that does not answer, or has none of our metrics."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:  # URLError and what reading raises are OSErrors; ValueError: not a URL
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServeError(f"{url} does not answer ({why}): is `oasiskv serve` running, and is this its --metrics-port?") from None
    found = Scrape(time.monotonic(), parse(text))
    if "oasis_executor_up" not in found.samples:
        raise ServeError(f"{url} has no oasis_executor_up: it is not the metrics endpoint of `oasiskv serve`")
    return found


@dataclass(frozen=True)
class Between:
    """Two scrapes, the later second."""

    before: Scrape
    after: Scrape

    def grown(self, name: str, **labels: str) -> float:
        """What a counter grew by; from 0 if it began anew."""
        old, new = self.before.total(name, **labels), self.after.total(name, **labels)
        return new - old if new >= old else new

    def rate(self, name: str, **labels: str) -> float:
        """A second."""
        return self.grown(name, **labels) / max(1e-9, self.after.at - self.before.at)

    def share(self, part: str, *whole: str) -> float | None:
        """What `part` grew by, of what all of `whole` grew by; None if they did not."""
        total = sum(self.grown(name) for name in whole)
        return self.grown(part) / total if total else None

    def quantile(self, name: str, q: float) -> float | None:
        """Of a histogram's values between the scrapes, taken as evenly spread within a bucket; None without any.

        For what is above all bounds it is the last of them.
        """
        bounds = {labels["le"] for labels, _ in self.after.samples.get(f"{name}_bucket", ()) if "le" in labels}
        counts = sorted((float(le), self.grown(f"{name}_bucket", le=le)) for le in bounds)
        if not counts or not counts[-1][1]:
            return None
        wanted = q * counts[-1][1]
        low, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(1e-9, count - below)
            low, below = bound, count
        return low
