"""The metrics that a real server shows reconcile with what its requests were told, also after its executor was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.cli.top import frame
from oasiskv.serve.exported import EXPORTED
from oasiskv.serve.grpc_client import RemoteError, generate
from oasiskv.serve.scrape import Between, Scrape, parse, scrape
from reference.service import Service, eventually

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "docs" / "dashboards" / "oasiskv.json"
# What is exported, and the statistic of a request that it sums.
SUMS = {
    "oasis_prompt_tokens_total": "prompt_tokens", "oasis_generated_tokens_total": "generated_tokens",
    "oasis_block_heads_predicted_total": "blocks_predicted", "oasis_block_heads_admitted_total": "blocks_admitted",
    "oasis_block_heads_capped_total": "blocks_capped", "oasis_fetched_bytes_total": "bytes_fetched",
    "oasis_preemptions_total": "preemptions", "oasis_draft_tokens_total": "draft_tokens",
    "oasis_draft_tokens_accepted_total": "draft_accepted", "oasis_kv_blocks_computed_total": "kv_blocks_new",
    "oasis_prefix_blocks_reused_total": "kv_blocks_reused",
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    running = Service("--top-k-blocks", "4", "--probe-every", "3600")
    eventually(lambda: scrape(url(running)).total("oasis_requests_total") > 0, 10)  # the probe of the start, the last before an hour
    yield running
    running.stop()


def url(service: Service) -> str:
    return f"http://127.0.0.1:{service.ports[2]}/metrics"


def ask(service: Service, count: int) -> list[dict]:
    """So many requests at a time; their statistics."""
    stats: list[dict] = []

    def one(i: int) -> None:
        text = "Once upon a time there was a fox. " * (8 + 4 * (i % 3))
        stats.append(list(generate(service.url, text, max_tokens=20 + i, end_id=-1, stream=i % 2 == 0, deadline_s=120))[-1].stats)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert len(stats) == count
    return stats


def reconcile(service: Service, before: Scrape, stats: list[dict]) -> Scrape:
    """Everything that was counted since `before` is what these requests were told."""
    ended = before.total("oasis_requests_total") + len(stats)
    eventually(lambda: scrape(url(service)).total("oasis_requests_total") >= ended, 10)
    now = scrape(url(service))
    grown = Between(before, now).grown
    assert grown("oasis_requests_total", reason="length") == len(stats) == grown("oasis_requests_total")
    for name, statistic in SUMS.items():
        assert grown(name) == sum(s[statistic] for s in stats), name
    for mode in ("dense", "sparse"):
        assert grown("oasis_request_steps_total", mode=mode) == sum(s[f"{mode}_steps"] for s in stats)
    assert grown("oasis_stall_seconds_total") == pytest.approx(sum(s["stall_ms"] for s in stats) / 1e3)
    assert grown("oasis_fetched_bytes_total") > 0 and grown("oasis_block_heads_capped_total") > 0
    for kind, statistic in (("input", "prompt_tokens"), ("output", "generated_tokens")):
        assert grown(f"nv_llm_{kind}_token_len_count") == len(stats)
        assert grown(f"nv_llm_{kind}_token_len_sum") == sum(s[statistic] for s in stats)
    for name in ("time_to_first_token", "queue", "request"):
        assert grown(f"oasis_{name}_seconds_count") == grown(f"oasis_{name}_seconds_bucket", le="+Inf") == len(stats)
    first = sum(s["first_token_ns"] - s["arrival_ns"] for s in stats) / 1e9
    assert grown("oasis_time_to_first_token_seconds_sum") == pytest.approx(first, abs=0.05 * len(stats))
    queued = sum(s["first_scheduled_ns"] - s["arrival_ns"] for s in stats) / 1e9
    assert grown("oasis_queue_seconds_sum") == pytest.approx(queued, abs=0.1 * len(stats))
    assert grown("oasis_inter_token_seconds_count") == sum(s["generated_tokens"] for s in stats) - len(stats)
    return now


def test_everything_is_exported_and_reconciles(service: Service) -> None:
    before = scrape(url(service))
    for exported in EXPORTED:
        own = {exported.label} - {""}
        for name in exported.series_names:
            series = before.samples[name]
            assert all(own | {"model", "version"} == set(labels) - {"le"} for labels, _ in series), name
            assert {labels.get(exported.label, "") for labels, _ in series} == set(exported.series), name
    now = reconcile(service, before, ask(service, 6))
    assert now.total("nv_trt_llm_general_metrics", general_type="iteration_counter") > 0
    pages = {kind: now.total("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind) for kind in ("used", "free", "max")}
    assert pages["used"] + pages["free"] == pages["max"] > 0
    assert now.total("oasis_executor_up") == 1 and now.total("oasis_top_k_blocks") == 4


def test_refusals_are_counted(service: Service) -> None:
    before = scrape(url(service))
    for options in ({"max_tokens": 3, "top_p": 3.0}, {"max_tokens": 10**6}):
        with pytest.raises(RemoteError):
            list(generate(service.url, "a", deadline_s=20, **options))
    eventually(lambda: Between(before, scrape(url(service))).grown("oasis_requests_refused_total") == 2, 10)
    grown = Between(before, scrape(url(service))).grown
    assert grown("oasis_requests_refused_total", reason="invalid") == grown("oasis_requests_refused_total", reason="capacity") == 1


def test_counters_survive_the_executor(service: Service) -> None:
    before = scrape(url(service))
    recovered = sum("recovered" in line for line in service.log)
    os.kill(service.descendants("oasiskv.executor")[0], signal.SIGKILL)
    eventually(lambda: scrape(url(service)).total("oasis_executor_up") == 0, 10)
    eventually(lambda: sum("recovered" in line for line in service.log) > recovered, 30)
    eventually(lambda: scrape(url(service)).total("oasis_executor_restarts_total") == 1, 10)
    # Probes of the recovery, of one token each, are all that came since.
    last = [scrape(url(service))]

    def settled() -> bool:
        last.append(scrape(url(service)))
        ended = last[-1].total("oasis_requests_total")
        return ended == last[-3].total("oasis_requests_total") > before.total("oasis_requests_total") if len(last) > 12 else False

    eventually(settled, 20)
    after = last[-1]
    probes = after.total("oasis_requests_total") - before.total("oasis_requests_total")
    assert 1 <= probes <= 4
    for name in SUMS:
        assert after.total(name) >= before.total(name), f"{name} shrank"
    assert after.total("oasis_generated_tokens_total") == before.total("oasis_generated_tokens_total") + probes
    assert after.total("oasis_fetched_bytes_total") == before.total("oasis_fetched_bytes_total")
    reconcile(service, after, ask(service, 4))


def test_top_prints_a_frame_of_a_running_server(service: Service) -> None:
    command = [sys.executable, "-m", "oasiskv.cli", "top", "--url", url(service)]
    running = threading.Thread(target=ask, args=(service, 3))
    running.start()
    done = subprocess.run([*command, "--once", "--interval", "2"], capture_output=True, text=True, timeout=60)
    running.join(120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert re.search(r"generated +[1-9][\d.]*/s", done.stdout) and re.search(r"between tokens +p50 +[\d.]+ ms", done.stdout), done.stdout
    watching = subprocess.Popen([*command, "--interval", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "up" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 130 and "interrupted" in watching.stderr.read()


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--url", "http://127.0.0.1:9/metrics"], 1, "does not answer"),
        (["--url", "nonsense"], 1, "does not answer"),
        (["--interval", "0"], 2, "--interval 0"),
        (["--interval", "nan"], 2, "--interval nan"),
    ],
)
def test_top_says_what_is_wrong(flags: list[str], code: int, named: str) -> None:
    done = subprocess.run([sys.executable, "-m", "oasiskv.cli", "top", "--once", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and named in done.stderr and done.stderr.count("\n") == 1, done.stderr


def histogram(counts: dict[str, int], **more: float) -> Scrape:
    lines = [f'h_bucket{{le="{le}"}} {n}' for le, n in counts.items()] + [f"{name} {value}" for name, value in more.items()]
    return Scrape(more.get("at", 0.0), parse("\n".join(lines)))


def test_rates_and_quantiles_between_scrapes() -> None:
    before = histogram({"1": 10, "2": 10, "+Inf": 10}, at=0.0, c_total=50)
    after = histogram({"1": 10, "2": 20, "+Inf": 21}, at=4.0, c_total=70)
    seen = Between(before, after)
    assert seen.rate("c_total") == 5 and seen.grown("none_total") == 0
    assert seen.quantile("h", 0.5) == pytest.approx(1.55) and seen.quantile("h", 1.0) == 2.0
    assert Between(after, after).quantile("h", 0.5) is None and seen.quantile("none", 0.5) is None
    assert Between(after, before).grown("c_total") == 50, "it began anew"
    assert seen.share("c_total", "none_total") is None and seen.share("c_total", "c_total") == 1


def test_the_text_format_is_read_as_prometheus_writes_it() -> None:
    text = '# HELP a b\na{x="1,}\\"",y="2"} 3e2\nb 1.5 1700000000000\nc{z="w"} +Inf\n\nnot a line at all\nd NaN\n'
    assert parse(text)["a"] == [({"x": '1,}\\"', "y": "2"}, 300.0)]
    assert parse(text)["b"] == [({}, 1.5)] and set(parse(text)) == {"a", "b", "c", "d"}


def test_a_frame_needs_no_traffic() -> None:
    names = "\n".join(f"{name} 0" for exported in EXPORTED for name in exported.series_names)
    idle = Scrape(0.0, parse(names))
    assert "EXECUTOR DOWN" in frame("u", Between(idle, idle))


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:oasis|nv)_\w+", text))


def test_the_dashboard_shows_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    known = {name for exported in EXPORTED for name in exported.series_names}
    panels = [p for p in dashboard["panels"] if p["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    used = set().union(*map(names_in, expressions))
    assert used <= known, used - known
    assert {name for exported in EXPORTED if exported.name.startswith("oasis_") for name in exported.series_names[:1]} - used == set()
    assert all(e.count("(") == e.count(")") and e.count("[") == e.count("]") for e in expressions)
    assert [v["type"] for v in dashboard["templating"]["list"]].count("datasource") == 1
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels for target in panel["targets"])
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in dashboard["panels"])


def test_the_manual_names_every_metric_and_no_other() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = manual[manual.index("\n## Metrics\n") :]
    section = section[: section.index("\n## ", 5)]
    others = {"oasis_stats", "oasis_metrics_period_ms", "nv_inference_request_failure"}
    assert {exported.name for exported in EXPORTED} == names_in(section) - others
    for exported in EXPORTED:
        for value in exported.series:
            assert value in section, f"{exported.name}: {value}"
