"""EngineConfig and SamplingParams: what is refused, and the exact cap."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.config import EngineConfig
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import ConfigError, RequestError


def test_defaults_are_the_papers_operating_point():
    config = EngineConfig()
    assert (config.top_k_blocks, config.fetch_cap_blocks, config.draft_len) == (128, 6, 1)
    assert config.sparse_from_tokens == 129 * 16


@pytest.mark.parametrize(
    ("ratio", "k", "cap"),
    [("0.05", 128, 6), (0.05, 128, 6), (0.05, 20, 1), ("0.29", 100, 29), (0.29, 100, 29), (1, 128, 128), ("all", 7, 7), ("0.001", 128, 1),
     ("1e-999999", 128, 1), ("0." + "9" * 60, 65536, 65535)],
)  # fmt: skip
def test_fetch_cap_is_exact(ratio, k, cap):
    # 0.29 * 100 is 28.999... in binary; sixty nines round up to 1 at the default precision.
    assert EngineConfig(top_k_blocks=k, fetch_ratio=ratio).fetch_cap_blocks == cap


@given(st.integers(1, 65536), st.decimals("0.000001", "1", places=6))
def test_fetch_cap_is_the_floor_of_the_product(k, ratio):
    assert EngineConfig(top_k_blocks=k, fetch_ratio=str(ratio)).fetch_cap_blocks == max(1, int(Fraction(ratio) * k))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k_blocks": 0}, {"top_k_blocks": 65537}, {"top_k_blocks": True}, {"top_k_blocks": 1.5},
        {"fetch_ratio": "0"}, {"fetch_ratio": 0.0}, {"fetch_ratio": "1.01"}, {"fetch_ratio": "nan"}, {"fetch_ratio": "inf"},
        {"fetch_ratio": "-0.1"}, {"fetch_ratio": "most"}, {"fetch_ratio": "sNaN"}, {"fetch_ratio": None},
        {"sparse_from": 15}, {"sparse_from": 16.0}, {"summary": "median"}, {"group_combine": "mean"},
        {"draft_len": -1}, {"draft_len": 16}, {"drafter": "eagle3"}, {"drafter": "model:"}, {"drafter": None},
        {"max_batch_size": 0}, {"max_num_tokens": 127}, {"max_seq_len": 1}, {"device_kv_gib": 0}, {"device_kv_gib": float("nan")},
        {"host_kv_gib": float("inf")}, {"host_kv_gib": "4"}, {"host_memory_gib": 0}, {"host_memory_gib": True},
        {"num_threads": 0}, {"dtype": "int8"}, {"backend": "tpu"}, {"dummy_weights": True},
        {"gather_ctas": 0}, {"gather_ctas": 65}, {"gather_in_flight": 3}, {"foreground_sms": 100}, {"foreground_sms": -1},
        {"cuda_graphs": 1},
        {"batch_invariant": True, "backend": "cuda", "dtype": "bfloat16"}, {"host_kv_gib": 0},
        {"host_kv_gib": 0, "backend": "cuda"}, {"host_kv_gib": 0, "backend": "cuda", "dense": True}, {"enable_prefix_caching": 1},
        {"transfer_delay_us": 5, "backend": "cuda"},
        {"batch_invariant": True}, {"gather_ctas": 4}, {"gather_in_flight": 4}, {"cuda_graphs": False},
        {"gather_in_flight": 4, "backend": "cuda"},
        {"transfer_delay_us": -1}, {"dense": 1}, {"trace": "yes"}, {"model": ""}, {"accept_drafts": True, "draft_len": 1},
        {"accept_drafts": True, "draft_len": 2, "drafter": "previous"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options)).replace("draft_len", "draft_len|accept_drafts")):
        EngineConfig(**options)


def test_rows_of_a_full_batch_must_fit_a_step():
    assert EngineConfig(max_batch_size=64, draft_len=7, max_num_tokens=512)
    with pytest.raises(ConfigError, match="576"):
        EngineConfig(max_batch_size=64, draft_len=8, max_num_tokens=512)


def test_drafter_previous_has_no_draft_rows():
    config = EngineConfig(drafter="previous", draft_len=5, max_batch_size=512, max_num_tokens=512)
    assert config.draft_len == 0


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        EngineConfig().top_k_blocks = 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0}, {"max_tokens": 1.0}, {"max_tokens": True}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": "1"}, {"temperature": 10**400}, {"max_tokens": 2**31}, {"top_k": 2**31}, {"stop_token_ids": (2**31,)},
        {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.5}, {"seed": -1}, {"seed": 2**64},
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.1}, {"frequency_penalty": float("inf")}, {"stop": ("",)}, {"stop": (1,)},
        {"stop": None}, {"stop": ("x",) * 65}, {"stop": ("x" * 1025,)}, {"stop_token_ids": (1,) * 65}, {"stop_token_ids": (-1,)},
        {"stop_token_ids": 5}, {"logprobs": 21}, {"logprobs": -1}, {"min_tokens": 129},
        {"min_tokens": -1}, {"ignore_eos": "yes"}, {"include_stop_text": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_sampling_params_are_refused_by_name(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_sampling_params_take_lists_and_one_stop_string():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], seed=2**64 - 1)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
