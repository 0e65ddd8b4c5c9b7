"""Every metric that is exported: its name, unit and meaning, and which of the engine's numbers it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Numbers = Mapping[str, float]  # the executor's counters and gauges by their names, see engine/metrics.py
Value = Callable[[Numbers], float]

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0)
# NVIDIA's first five, so that its dashboards find theirs, and more for long contexts.
LENGTHS = (10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10_000.0, 50_000.0, 100_000.0, 500_000.0)


@dataclass(frozen=True)
class Exported:
    """A family. `series`: values of its own label -> number to show; the label "" is none. A histogram's is the name of what is observed.

    A counter's number grows by what the executor's grew, also over its restarts; a gauge's is the executor's own.
    """

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    series: Mapping[str, Value | str]
    label: str = ""
    buckets: tuple[float, ...] = field(default=())

    @property
    def series_names(self) -> list[str]:
        """As they are scraped."""
        return [f"{self.name}_{end}" for end in ("bucket", "sum", "count")] if self.kind == "histogram" else [self.name]


def _of(name: str, scale: float = 1.0) -> Value:
    return lambda numbers: numbers[name] * scale


def _used(pool: str) -> Value:
    return lambda numbers: numbers[pool] - numbers[f"{pool}_free"]


def _sum(*names: str) -> Value:
    return lambda numbers: sum(numbers[name] for name in names)


def _counter(name: str, help: str, source: str, scale: float = 1.0) -> Exported:
    return Exported(name, "counter", help, {"": _of(source, scale)})


def _gauge(name: str, help: str, value: Value) -> Exported:
    return Exported(name, "gauge", help, {"": value})


def _pool(name: str, help: str) -> Exported:
    return Exported(f"oasis_{name}", "gauge", help, {"used": _used(name), "free": _of(f"{name}_free")}, "state")


def _times(name: str, help: str, source: str, buckets: tuple[float, ...]) -> Exported:
    return Exported(name, "histogram", help, {"": source}, buckets=buckets)


_STATES = ("waiting", "prefilling", "decoding", "preempted")

NVIDIAS = (
    Exported(
        "nv_trt_llm_request_metrics", "gauge", "Requests by what they do",
        {
            "active": _sum(*_STATES), "max": _of("max_batch_size"), "scheduled": _sum("prefilling", "decoding"),
            "context": _of("prefilling"), "waiting": _sum("waiting", "preempted"),
        },
        "request_type",
    ),
    Exported(
        "nv_trt_llm_runtime_memory_metrics", "gauge", "Bytes of the KV pools by the memory that they are in",
        {kind: _of(f"memory_{kind}_bytes") for kind in ("cpu", "gpu", "pinned")}, "memory_type",
    ),
    Exported(
        "nv_trt_llm_kv_cache_block_metrics", "gauge", "Blocks of the device pool; reused: blocks of prompts found in the prefix cache",
        {
            "max": _of("device_pages"), "free": _of("device_pages_free"), "used": _used("device_pages"),
            "tokens_per": _of("block_tokens"), "reused": _of("kv_blocks_reused"),
            "fraction": lambda numbers: _used("device_pages")(numbers) / max(1, numbers["device_pages"]),
        },
        "kv_cache_block_type",
    ),
    Exported(
        "nv_trt_llm_inflight_batcher_metrics", "gauge", "Requests in decode steps, and preempted ones",
        {"generation_requests": _of("decoding"), "paused_requests": _of("preempted")}, "inflight_batcher_specific_metric",
    ),
    Exported(
        "nv_trt_llm_general_metrics", "gauge", "Steps of the engine, and when these numbers were read, in microseconds since 1970",
        {"timestamp": _of("timestamp_us"), "iteration_counter": _of("steps")}, "general_type",
    ),
    Exported(
        "nv_llm_input_token_len", "histogram", "Tokens of a prompt, at its request's end", {"total_input_tokens": "prompt_tokens"},
        "response_metric_type", LENGTHS,
    ),
    Exported(
        "nv_llm_output_token_len", "histogram", "Tokens of an answer, at its request's end", {"total_output_tokens": "generated_tokens"},
        "response_metric_type", LENGTHS,
    ),
)  # fmt: skip

OURS = (
    Exported(
        "oasis_requests_total", "counter", "Requests that ended, by why",
        {reason: _of(f"ended_{reason}") for reason in ("stop", "length", "cancelled", "error")}, "reason",
    ),
    Exported(
        "oasis_requests_refused_total", "counter", "Requests that the executor did not take, by why",
        {reason: _of(f"refused_{reason}") for reason in ("invalid", "capacity", "queue_full", "unavailable", "internal")}, "reason",
    ),
    _counter("oasis_prompt_tokens_total", "Tokens of prompts, reused ones too", "prompt_tokens"),
    _counter("oasis_generated_tokens_total", "Tokens of answers", "generated_tokens"),
    _counter("oasis_steps_total", "Steps of the engine", "steps"),
    Exported(
        "oasis_request_steps_total", "counter", "Decode steps that requests took part in, one a request and step",
        {"dense": _of("dense_steps"), "sparse": _of("sparse_steps")}, "mode",
    ),
    _counter("oasis_step_failures_total", "Steps that failed and ended all their requests", "step_failures"),
    _counter("oasis_block_heads_predicted_total", "Block-heads that sparse steps predicted, over layers and heads", "blocks_predicted"),
    _counter("oasis_block_heads_admitted_total", "Of those that were not resident, block-heads that were fetched", "blocks_admitted"),
    _counter("oasis_block_heads_capped_total", "Of those that were not resident, block-heads over the fetch cap", "blocks_capped"),
    _counter("oasis_fetched_bytes_total", "Bytes from the host tier into the working set", "bytes_fetched"),
    _counter("oasis_stall_seconds_total", "Time that requests' steps waited for transfers, each of a batch all of it", "stall_ms", 1e-3),
    _counter("oasis_preemptions_total", "Preemptions of running requests", "preemptions"),
    _counter("oasis_draft_tokens_total", "Tokens that were drafted", "draft_tokens"),
    _counter("oasis_draft_tokens_accepted_total", "Drafted tokens that were kept", "draft_accepted"),
    _counter("oasis_kv_blocks_computed_total", "Blocks of 16 tokens whose keys and values were computed", "kv_blocks_new"),
    _counter("oasis_prefix_blocks_reused_total", "Blocks of prompts that were found in the prefix cache", "kv_blocks_reused"),
    _counter("oasis_prefix_blocks_evicted_total", "Blocks that left the prefix cache to make room", "prefix_blocks_evicted"),
    _counter("oasis_observations_lost_total", "Observed times that no histogram has, as they came faster than they were read", "lost"),
    _counter("oasis_executor_restarts_total", "New executors seen since Triton came up", "restarts"),
    _gauge("oasis_executor_up", "1 while the executor answers; the other gauges are as of the last time it did", _of("up")),
    Exported("oasis_requests", "gauge", "Requests by state", {state: _of(state) for state in _STATES}, "state"),
    _pool("device_pages", "Pages of 16 tokens in the device pool"),
    _pool("host_blocks", "Blocks of one layer in the host pool; free ones may hold cached prefixes"),
    _pool("summary_pages", "Pages of 64 block summaries"),
    _gauge("oasis_resident_tokens", "Tokens that the working sets in the device pool have room for",
           lambda numbers: _used("device_pages")(numbers) * numbers["block_tokens"]),
    _gauge("oasis_prefix_blocks_cached", "Blocks that are kept for prompts to come", _of("prefix_blocks_cached")),
    _gauge("oasis_top_k_blocks", "K: blocks that a head keeps", _of("top_k_blocks")),
    _gauge("oasis_fetch_cap_blocks", "Blocks that a head may fetch a step", _of("fetch_cap_blocks")),
    _gauge("oasis_max_queue_size", "Requests that may wait", _of("max_queue_size")),
    _gauge("oasis_max_batch_size", "Requests that may run at a time", _of("max_batch_size")),
    _times("oasis_time_to_first_token_seconds", "From a request's arrival to its first tokens", "ttft", LATENCY_S),
    _times("oasis_inter_token_seconds", "Between tokens of an answer, one value a token; those that come together share their time",
           "inter_token", BETWEEN_TOKENS_S),
    _times("oasis_queue_seconds", "From a request's arrival to the step that scheduled it first", "queue", LATENCY_S),
    _times("oasis_request_seconds", "From a request's arrival to its end", "e2e", LATENCY_S),
)  # fmt: skip

EXPORTED = NVIDIAS + OURS
