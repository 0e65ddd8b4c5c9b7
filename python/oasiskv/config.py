"""Engine options, validated once at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal, InvalidOperation

from oasiskv.errors import ConfigError

BLOCK_TOKENS = 16
BACKENDS = ("cpu", "cuda")
MAX_DRAFT_LEN = 15
SUMMARIES = ("mean_std", "minmax", "halves")
GROUP_COMBINES = ("softmax_sum", "max", "sum")
DTYPES = ("float32", "float16", "bfloat16")
_MAX_GIB = 1 << 20  # far above any machine, and its bytes still fit 64 bits


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} = {value!r}: use one of {', '.join(allowed)}")


def _in_range(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{field} = {value!r}: must be an integer in {low}..{high}")


def _size_gib(field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_GIB:
        raise ConfigError(f"{field} = {value!r}: must be a number of GiB above 0 and at most {_MAX_GIB}")


def fetch_cap_blocks(top_k_blocks: int, fetch_ratio: str) -> int:
    """Blocks a head may admit a step: max(1, floor(ratio * K)) in exact decimals; K for the ratio `all`. Raises ConfigError."""
    if fetch_ratio == "all":
        return top_k_blocks
    try:
        ratio = Decimal(fetch_ratio)
    except InvalidOperation:
        raise ConfigError(f"fetch_ratio = {fetch_ratio!r}: give a number in (0, 1] or 'all'") from None
    if not ratio.is_finite() or not 0 < ratio <= 1:
        raise ConfigError(f"fetch_ratio = {fetch_ratio}: must be in (0, 1], or 'all'")
    # Rounded down at 40 digits, so that the floor is that of the exact product.
    return max(1, math.floor(Context(prec=40, rounding=ROUND_FLOOR).multiply(ratio, Decimal(top_k_blocks))))


@dataclass(frozen=True)
class EngineConfig:
    """What an engine serves and with which memory. Units are in the names; see docs/design.md for K, C and m.

    Raises ConfigError for a value out of range or a combination that is not supported.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"  # of an imported checkpoint as stored, and of CUDA's computations; the CPU backend computes in float32
    backend: str = "cpu"
    dummy_weights: bool = False  # random ones for a model of models/presets.py: benchmarks
    dense: bool = False
    top_k_blocks: int = 128
    fetch_ratio: str | float = "0.05"  # of top_k_blocks, or "all"
    sparse_from: int | None = None  # context tokens; None: (K + 1) * 16
    sink_blocks: int = 1  # first blocks that every head keeps; the paper's mode has none
    summary: str = "mean_std"
    group_combine: str = "softmax_sum"
    drafter: str = "ngram"
    draft_len: int = 1  # draft rows a request and step; 0 with the drafter `previous`
    accept_drafts: bool = False
    max_batch_size: int = 64
    max_num_tokens: int = 512  # rows a step
    max_queue_size: int = 256  # requests that wait to be scheduled for the first time; more are refused
    max_seq_len: int | None = None  # None: the model's
    device_kv_gib: float = 2.0
    host_kv_gib: float = 4.0
    enable_prefix_caching: bool = True  # complete blocks stay in the host tier, for requests that begin with the same tokens
    host_memory_gib: float | None = None  # what the machine has in all, where memory grows with use; None: what it says of itself
    batch_invariant: bool = False  # CUDA: no row's result depends on its batch; slower. The CPU backend's never does
    cuda_graphs: bool = True
    gather_ctas: int | None = None  # SMs that fetch over the link, rounded up to an even number; None: by engine/sm_share.py's table
    foreground_sms: int = 0  # that matrix products may use, 0: all; with gather_ctas
    gather_in_flight: int = 8  # runs of 8 KiB that each of them has under way: 2, 4, 6 or 8; with gather_ctas
    num_threads: int | None = None  # None: the cores this process may use
    trace: bool = False
    transfer_delay_us: int = 0  # fault injection for tests

    def __post_init__(self) -> None:
        object.__setattr__(self, "fetch_ratio", str(self.fetch_ratio).strip())
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model = {self.model!r}: give a name such as smollm2-135m, or a path")
        for flag in ("dense", "accept_drafts", "trace", "dummy_weights", "batch_invariant", "cuda_graphs", "enable_prefix_caching"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"{flag} = {getattr(self, flag)!r}: must be true or false")
        if self.drafter == "previous":  # the normal row's query predicts: no draft rows
            object.__setattr__(self, "draft_len", 0)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, DTYPES)
        self._check_backend()
        _one_of("summary", self.summary, SUMMARIES)
        _one_of("group_combine", self.group_combine, GROUP_COMBINES)
        _in_range("top_k_blocks", self.top_k_blocks, 1, 65536)
        fetch_cap_blocks(self.top_k_blocks, self.fetch_ratio)
        if self.sparse_from is not None:
            _in_range("sparse_from", self.sparse_from, BLOCK_TOKENS, 2**31 - 1)
        _in_range("sink_blocks", self.sink_blocks, 0, self.top_k_blocks)
        _in_range("draft_len", self.draft_len, 0, MAX_DRAFT_LEN)
        _in_range("max_batch_size", self.max_batch_size, 1, 4096)
        _in_range("max_num_tokens", self.max_num_tokens, 1, 1 << 20)
        _in_range("max_queue_size", self.max_queue_size, 1, 1 << 20)
        rows = self.max_batch_size * (1 + self.draft_len)
        if self.max_num_tokens < rows:
            raise ConfigError(
                f"max_num_tokens = {self.max_num_tokens}: a step of max_batch_size = {self.max_batch_size} requests with "
                f"draft_len = {self.draft_len} has {rows} rows; raise it to {rows}, or lower one of the two"
            )
        if self.max_seq_len is not None:
            _in_range("max_seq_len", self.max_seq_len, 2, 1 << 24)
        if self.num_threads is not None:
            _in_range("num_threads", self.num_threads, 1, 1024)
        _in_range("transfer_delay_us", self.transfer_delay_us, 0, 10_000_000)
        _size_gib("device_kv_gib", self.device_kv_gib)
        if not (self.host_kv_gib == 0 and self.dense and self.backend == "cuda"):  # then nothing is preempted
            _size_gib("host_kv_gib", self.host_kv_gib)
        elif self.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching with host_kv_gib = 0: prefixes are kept in the host tier; give enable_prefix_caching = False "
                "(--no-enable-prefix-caching), or a host tier"
            )
        if self.gather_ctas is not None:
            _in_range("gather_ctas", self.gather_ctas, 1, 64)
        _in_range("foreground_sms", self.foreground_sms, 0, 1024)
        if self.foreground_sms and self.gather_ctas is None:
            raise ConfigError(f"foreground_sms = {self.foreground_sms} without gather_ctas: give both, or neither for the table")
        if self.gather_in_flight != 8 and self.gather_ctas is None:
            raise ConfigError(f"gather_in_flight = {self.gather_in_flight} without gather_ctas: give both, or neither for the table")
        if self.gather_in_flight not in (2, 4, 6, 8):
            raise ConfigError(f"gather_in_flight = {self.gather_in_flight}: must be 2, 4, 6 or 8")
        if self.host_memory_gib is not None:
            _size_gib("host_memory_gib", self.host_memory_gib)
        self._check_drafter()

    def _check_backend(self) -> None:
        """An option that the backend has no use for is refused, not ignored."""
        cpu_only = {"transfer_delay_us": 0}
        cuda_only = {
            "dummy_weights": False,
            "batch_invariant": False,
            "cuda_graphs": True,
            "gather_ctas": None,
            "foreground_sms": 0,
            "gather_in_flight": 8,
        }
        for field, default in (cuda_only if self.backend == "cpu" else cpu_only).items():
            if getattr(self, field) != default:
                raise ConfigError(
                    f"{field} = {getattr(self, field)!r} with backend = {self.backend!r}, which has no use for it: leave it out"
                )
        if self.batch_invariant and self.dtype != "float32":
            raise ConfigError(f"batch_invariant with dtype = {self.dtype!r}: attention in 16 bit is cut by the batch; use float32")

    def _check_drafter(self) -> None:
        model_path = isinstance(self.drafter, str) and self.drafter.startswith("model:") and len(self.drafter) > len("model:")
        if self.drafter not in ("ngram", "previous") and not model_path:
            raise ConfigError(f"drafter = {self.drafter!r}: use ngram, previous or model:<path>")
        if model_path and (self.draft_len == 0 or (self.dense and not self.accept_drafts)):
            unused = "draft_len = 0" if self.draft_len == 0 else "dense = True without accept_drafts"
            raise ConfigError(f"drafter = {self.drafter!r} with {unused}: its drafts would not be used; leave the drafter out")
        if not self.accept_drafts:
            return
        if self.drafter == "previous":
            raise ConfigError("accept_drafts with drafter 'previous': it drafts nothing; use ngram or model:<path>")
        if self.draft_len < 2:
            raise ConfigError(
                f"accept_drafts with draft_len = {self.draft_len}: of m draft rows at most m - 1 are accepted "
                "(the last only predicts); use draft_len 2 or more"
            )

    @property
    def fetch_cap_blocks(self) -> int:
        return fetch_cap_blocks(self.top_k_blocks, str(self.fetch_ratio))

    @property
    def sparse_from_tokens(self) -> int:
        return (self.top_k_blocks + 1) * BLOCK_TOKENS if self.sparse_from is None else self.sparse_from
