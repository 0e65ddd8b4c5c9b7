"""Watch a running server: throughput, latencies, working set and link, from its metrics."""

from __future__ import annotations

import argparse
import sys
import time

from oasiskv.cli.ending import OK, interruptible
from oasiskv.errors import ConfigError, ServeError
from oasiskv.serve.scrape import Between, Scrape, scrape

_CLEAR = "\x1b[H\x1b[2J"
_STATES = ("waiting", "prefilling", "decoding", "preempted")
_POOLS = (("device pages", "oasis_device_pages"), ("host blocks", "oasis_host_blocks"), ("summary pages", "oasis_summary_pages"))
_TIMES = (
    ("first token", "oasis_time_to_first_token_seconds"),
    ("between tokens", "oasis_inter_token_seconds"),
    ("in the queue", "oasis_queue_seconds"),
    ("whole request", "oasis_request_seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8002/metrics", help="the server's metrics endpoint, see serve --metrics-port")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between frames, over which rates are taken")
    parser.add_argument("--once", action="store_true", help="print one frame after one interval, and end")


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C, or one frame. Raises ConfigError, and ServeError when the endpoint does not answer at the start."""
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval {args.interval:g}: must be in 0.1..3600 seconds")
    interruptible()
    last = scrape(args.url)
    while True:
        time.sleep(args.interval)
        try:
            now = scrape(args.url)
            text, last = frame(args.url, Between(last, now)), now
        except ServeError as error:
            if args.once:
                raise
            text = str(error)  # a server that is restarted comes back
        print(_CLEAR + text if sys.stdout.isatty() else text, flush=True)
        if args.once:
            return OK


def frame(url: str, seen: Between) -> str:
    """What one screen shows."""
    now = seen.after
    up = "up" if now.total("oasis_executor_up") else "EXECUTOR DOWN, gauges are old"
    refused = ", ".join(f"{labels['reason']} {value:.0f}" for labels, value in now.samples.get("oasis_requests_refused_total", ()) if value)
    decoding = max(1.0, now.total("oasis_requests", state="decoding"))
    return "\n".join([
        f"oasiskv  {url}  {up}  restarts {now.total('oasis_executor_restarts_total'):.0f}",
        "",
        _row("requests", *(f"{state} {now.total('oasis_requests', state=state):.0f}" for state in _STATES)),
        _row("", f"of {now.total('oasis_max_queue_size'):.0f} and {now.total('oasis_max_batch_size'):.0f} at most",
             f"ended {seen.rate('oasis_requests_total'):.2f}/s", f"errors {now.total('oasis_requests_total', reason='error'):.0f}",
             f"refused {refused or 0}"),
        _row("tokens", f"generated {seen.rate('oasis_generated_tokens_total'):.1f}/s",
             f"prompts {seen.rate('oasis_prompt_tokens_total'):.1f}/s",
             f"drafts kept {_percent(seen.share('oasis_draft_tokens_accepted_total', 'oasis_draft_tokens_total'))}"),
        _row("steps", f"{seen.rate('oasis_steps_total'):.1f}/s", f"preemptions {seen.rate('oasis_preemptions_total'):.2f}/s",
             f"failed {now.total('oasis_step_failures_total'):.0f}"),
        "",
        *(_row(label, *(f"p{q} {_seconds(seen.quantile(name, q / 100))}" for q in (50, 90, 99))) for label, name in _TIMES),
        "",
        *(_row(label, _pool(now, name)) for label, name in _POOLS),
        _row("working set", f"{now.total('oasis_resident_tokens'):.0f} tokens", f"K {now.total('oasis_top_k_blocks'):.0f} blocks",
             f"fetch cap {now.total('oasis_fetch_cap_blocks'):.0f}"),
        _row("link", f"{seen.rate('oasis_fetched_bytes_total') / 1e6:.1f} MB/s",
             f"capped {_percent(_capped(seen))} of what was missing",
             f"stalled {_percent(seen.rate('oasis_stall_seconds_total') / decoding)} of a decoding request's time"),
        _row("prefixes", f"reused {_percent(_reused(seen))} of new blocks", f"cached {now.total('oasis_prefix_blocks_cached'):.0f}",
             f"evicted {seen.rate('oasis_prefix_blocks_evicted_total'):.1f}/s"),
    ])  # fmt: skip


def _capped(seen: Between) -> float | None:
    return seen.share("oasis_block_heads_capped_total", "oasis_block_heads_admitted_total", "oasis_block_heads_capped_total")


def _reused(seen: Between) -> float | None:
    return seen.share("oasis_prefix_blocks_reused_total", "oasis_prefix_blocks_reused_total", "oasis_kv_blocks_computed_total")


def _row(label: str, *cells: str) -> str:
    return f"{label:16}" + "   ".join(cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _pool(now: Scrape, name: str) -> str:
    used, free = now.total(name, state="used"), now.total(name, state="free")
    return f"{used:.0f} of {used + free:.0f} used ({_percent(used / max(1.0, used + free))})"
