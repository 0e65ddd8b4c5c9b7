"""What an engine counts reconciles with what its requests were told, whatever became of them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator

import pytest

from oasiskv.config import EngineConfig
from oasiskv.engine import metrics as engine_metrics
from oasiskv.engine.engine import Engine
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.metrics import FROM_USAGE, KEPT, OBSERVED, REASONS, SUMMED, EngineMetrics
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.executor import protocol
from reference.late_runner import LateRunner
from test_executor import Executor, submit

SMALL = {"top_k_blocks": 2, "sparse_from": 48, "device_kv_gib": 0.0075, "host_kv_gib": 0.1, "max_batch_size": 8, "max_seq_len": 256}
NO_GAUGES = dict.fromkeys(FROM_USAGE, 0)
OPTIONS = SMALL | {"max_queue_size": 64, "draft_len": 3, "accept_drafts": True}


class Ledger:
    """What the requests themselves were told."""

    def __init__(self) -> None:
        self.ended: list[RequestOutput] = []
        self.stats: list[dict] = []
        self.first_tokens: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    def take(self, output: RequestOutput) -> None:
        if output.token_ids:
            self.first_tokens.setdefault(output.request_id, len(output.token_ids))
            self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.token_ids)
        if output.finished:
            self.ended.append(output)
            self.stats.append(output.stats or {})

    def total(self, name: str) -> float:
        return sum(stats.get(name, 0) for stats in self.stats)


def watch(loop: EngineLoop, stop: threading.Event, polls: list[dict]) -> None:
    """Poll as Triton does, all the time."""
    since = 0
    while not stop.wait(0.02):
        polls.append(loop.metrics(since))
        since = polls[-1]["next"]
    polls.append(loop.metrics(since))


@pytest.mark.slow
def test_counters_are_the_sums_of_what_requests_were_told(prose_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random requests with cancels, failing callbacks, preemptions and failing steps; and they never shrink meanwhile."""
    monkeypatch.setattr(engine_metrics, "PROGRESS_S", 0.01)
    rng = random.Random(11)
    loop = EngineLoop(EngineConfig(**OPTIONS))
    ledger, polls, stop = Ledger(), [], threading.Event()
    watcher = threading.Thread(target=watch, args=(loop, stop, polls))
    watcher.start()
    room = threading.Semaphore(20)
    end = loop._engine.stop
    stopped: dict[int, RequestOutput] = {}

    def note_stop(request_id: int, reason: str, error: str | None = None) -> RequestOutput | None:
        output = end(request_id, reason, error)
        if output:
            stopped[request_id] = output
        return output

    monkeypatch.setattr(loop._engine, "stop", note_stop)
    gone: list[int] = []  # whose callback failed: nobody is told their statistics but who ends them

    def on_output(output: RequestOutput) -> None:
        if not output.finished and rng.random() < 0.01:
            gone.append(output.request_id)
            room.release()
            raise RuntimeError("a client's callback fails")
        ledger.take(output)
        if output.finished:
            room.release()
        elif rng.random() < 0.02:
            loop.cancel(output.request_id)

    model = loop._engine._runner._model
    forward, calls = model.forward, itertools.count()

    def sometimes_fails(*args):
        if next(calls) in (30, 100, 200):
            raise RuntimeError("injected")
        return forward(*args)

    monkeypatch.setattr(model, "forward", sometimes_fails)
    submitted = []
    for i in range(300):
        assert room.acquire(timeout=120), "hang"
        start, length = rng.choice([0, rng.randrange(50_000)]), rng.choice([1, 8, 20, 60])
        params = SamplingParams(
            max_tokens=rng.choice([1, 4, 12, 30]), temperature=rng.choice([0.0, 1.0]), seed=i, stop=("the",) if i % 7 == 0 else ()
        )
        submitted.append(loop.submit(prose_ids[start : start + length], params, on_output))
        if rng.random() < 0.1:
            loop.cancel(rng.choice(submitted[-10:]))
    for _ in range(20):
        assert room.acquire(timeout=120), "hang"
    loop.close()
    stop.set()
    watcher.join()
    final = loop.metrics()
    counters = final["counters"]
    ended = ledger.ended + [stopped[i] for i in gone]
    ledger.stats += [stopped[i].stats for i in gone]

    assert len(ended) == 300 == sum(counters[f"ended_{r}"] for r in REASONS)
    assert counters["step_failures"] == 3 and counters["steps"] > 200
    for reason in REASONS:
        assert counters[f"ended_{reason}"] == sum(o.finish_reason == reason for o in ended) > 0, reason
    for name in SUMMED:
        assert counters[name] == pytest.approx(ledger.total(name), rel=1e-9), name
    for name in SUMMED:
        assert counters[name] > 0, f"{name} is always 0"
    assert counters["generated_tokens"] == sum(ledger.tokens.values()) + sum(
        stopped[i].stats["generated_tokens"] - ledger.tokens.get(i, 0) for i in gone
    )
    for before, after in itertools.pairwise(polls):
        assert all(after["counters"][name] >= value for name, value in before["counters"].items())
        assert all(value >= 0 for value in after["gauges"].values())
    assert any(p["counters"]["generated_tokens"] < counters["generated_tokens"] for p in polls if p["counters"]["generated_tokens"])

    assert final["lost"] == 0 and all(p["lost"] == 0 for p in polls)
    for name in OBSERVED:
        assert [x for p in polls for x in p["observations"][name]] == final["observations"][name], "a poller misses or repeats some"
        assert all(x >= 0 for x in final["observations"][name])
    seen = {name: len(final["observations"][name]) for name in OBSERVED}
    assert seen["e2e"] == seen["prompt_tokens"] == seen["generated_tokens"] == 300
    assert sum(final["observations"]["prompt_tokens"]) == counters["prompt_tokens"]
    assert sum(final["observations"]["generated_tokens"]) == counters["generated_tokens"]
    assert len(ledger.first_tokens) <= seen["ttft"] <= seen["queue"] <= 300
    gauges = final["gauges"]
    assert counters["kv_blocks_reused"] == gauges["prefix_blocks_reused"]
    assert counters["prefix_blocks_evicted"] == gauges["prefix_blocks_evicted"]
    assert gauges["waiting"] == gauges["prefilling"] == gauges["decoding"] == gauges["preempted"] == 0


def test_times_are_those_that_the_client_sees(prose_ids: list[int]) -> None:
    loop = EngineLoop(EngineConfig(**SMALL | {"max_batch_size": 1}))
    times: list[float] = []
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        times.append(time.perf_counter())
        if output.finished:
            done.set()

    begin = time.perf_counter()
    loop.submit(prose_ids[:40], SamplingParams(max_tokens=20, ignore_eos=True), on_output)
    queued = threading.Event()
    asked = time.perf_counter()
    loop.submit(prose_ids[:4], SamplingParams(max_tokens=1, ignore_eos=True), lambda o: queued.set())
    assert done.wait(60) and queued.wait(60)
    seen = loop.metrics()["observations"]
    assert seen["ttft"][0] == pytest.approx(times[0] - begin, abs=0.02)
    assert sum(seen["inter_token"]) == pytest.approx(times[-1] - times[0], abs=0.02) and len(seen["inter_token"]) == 19
    assert seen["e2e"][0] == pytest.approx(times[-1] - begin, abs=0.02)
    assert seen["queue"][0] < 0.05 and seen["queue"][1] == pytest.approx(times[-1] - asked, abs=0.05), "the second waits for the first"
    loop.close()


def test_a_long_request_counts_before_its_end(prose_ids: list[int]) -> None:
    loop = EngineLoop(EngineConfig(**SMALL))
    outputs: list[RequestOutput] = []
    request = loop.submit(prose_ids[:60], SamplingParams(max_tokens=180, ignore_eos=True), outputs.append)
    end = time.monotonic() + 60
    while not (counters := loop.metrics()["counters"])["blocks_predicted"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert counters["ended_length"] == 0 and not any(o.finished for o in outputs)
    assert 0 < counters["generated_tokens"] < 180 and counters["prompt_tokens"] == 60
    loop.cancel(request)
    loop.close()
    assert loop.metrics()["counters"]["blocks_predicted"] == outputs[-1].stats["blocks_predicted"]


@pytest.mark.parametrize("runner", [None, LateRunner])
def test_running_requests_count_by_the_steps_whose_tokens_are_read(
    runner: type | None, prose_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine is two steps ahead: what is counted of a request never exceeds what it is told at its end."""
    monkeypatch.setattr(engine_metrics, "PROGRESS_S", 0.0)
    engine = Engine(EngineConfig(**SMALL | {"drafter": "previous", "device_kv_gib": 0.05}), runner=runner)
    metrics, ledger, shown = engine.metrics, Ledger(), []
    requests = [engine.next_id() for _ in range(3)]
    for i in requests:
        metrics.added(i, 0.0)
        engine.add(i, prose_ids[i * 100 : i * 100 + 60], SamplingParams(max_tokens=20, ignore_eos=True))
    while len(ledger.ended) < 3:
        for output in engine.step():
            metrics.output(output)
            ledger.take(output)
        metrics.publish(engine.steps, engine.usage())
        shown.append(metrics.poll()["counters"])
    for before, after in itertools.pairwise(shown):
        assert all(after[name] >= before[name] for name in before)
    for name in SUMMED:
        assert shown[-1][name] == pytest.approx(ledger.total(name)), name
    seen = [c["generated_tokens"] for c in shown]
    assert len(set(seen)) > 15 and seen[-1] == 60, "they count step by step"
    assert len({c["sparse_steps"] for c in shown}) > 15


def told(metrics: EngineMetrics, request_id: int, tokens: int, **stats: int) -> None:
    metrics.output(RequestOutput(request_id, [1] * tokens, finished=True, finish_reason="length", stats=stats))


def test_what_a_poller_is_too_late_for_is_counted() -> None:
    metrics = EngineMetrics()
    metrics.added(1, 0.0)
    metrics.output(RequestOutput(1, [1]))
    told(metrics, 1, KEPT + 10)
    metrics.publish(1, NO_GAUGES)
    late = metrics.poll(0)
    assert late["lost"] == 1 + 10 + 1  # the first token, ten of those between, and e2e made room in front
    assert sum(map(len, late["observations"].values())) == KEPT and late["next"] == KEPT + late["lost"]
    assert metrics.poll(late["next"])["lost"] == 0
    other = metrics.poll(late["next"] + 5)
    assert other["lost"] == 0 and not any(other["observations"].values()), "a number of another engine's"


def test_statistics_that_are_lost_take_nothing_back() -> None:
    """Of a device that is gone: what was counted of the request stays."""
    metrics = EngineMetrics()
    metrics.added(1, 0.0)
    metrics.progress(1, {"prompt_tokens": 5, "bytes_fetched": 700})
    metrics.output(RequestOutput(1, finished=True, finish_reason="error"))
    metrics.publish(1, NO_GAUGES)
    seen = metrics.poll()
    assert seen["counters"]["bytes_fetched"] == 700 and seen["counters"]["ended_error"] == 1
    assert seen["observations"]["prompt_tokens"] == [5] and seen["observations"]["generated_tokens"] == []


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    running = Executor(tmp_path_factory.mktemp("x"))
    yield running
    running.process.terminate()
    assert running.process.wait(30) == 0


def test_the_executor_answers_a_poller(executor: Executor) -> None:
    with executor.client() as client:
        assert submit(client, max_tokens=5)[1].wait().finish_reason == "length"
        for bad in ({"top_p": "x"}, {"max_tokens": 10**6}):
            assert submit(client, **bad)[1].wait().code == protocol.INVALID
        seen = client.metrics()
        assert seen["counters"]["generated_tokens"] == 5 and seen["counters"]["ended_length"] == 1
        assert seen["counters"]["refused_invalid"] == seen["counters"]["refused_capacity"] == 1
        assert len(seen["observations"]["inter_token"]) == 4 and seen["gauges"]["device_pages"] > 0
        again = client.metrics(seen["next"])
        assert again["epoch"] == seen["epoch"] and not any(again["observations"].values())
        assert again["gauges"]["memory_cpu_bytes"] > 0.7 * 2**30


@pytest.mark.parametrize("since", ["-1", "1.5", '"x"', "null", str(2**63)])
def test_a_number_that_is_none_is_refused(since: str) -> None:
    with pytest.raises(protocol.ProtocolError, match="since = "):
        protocol.decode_request(b'{"v":%d,"op":"metrics","id":1,"since":%s}' % (protocol.VERSION, since.encode()))


def test_pool_gauges_are_of_the_memory_they_are_in() -> None:
    loop = EngineLoop(EngineConfig(**SMALL))
    gauges = loop.metrics()["gauges"]
    loop.close()
    assert gauges["device_pages"] * gauges["device_page_bytes"] == pytest.approx(0.0075 * 2**30, rel=0.1)
    assert gauges["host_blocks"] * gauges["host_block_bytes"] == pytest.approx(0.1 * 2**30, rel=0.01)
    assert gauges["memory_gpu_bytes"] == gauges["memory_pinned_bytes"] == 0
    assert gauges["memory_cpu_bytes"] > 0.1 * 2**30
