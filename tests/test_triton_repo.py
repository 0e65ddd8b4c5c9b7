"""The model repository's templates and parameters, without a server."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.cli.main import main
from oasiskv.errors import ConfigError
from oasiskv.serve import contract, repo

ENDPOINT = {"tokenizer_dir": "/t", "oasis_executor_socket": "/s", "oasis_executor_authkey_file": "/k"}
# Keys that TensorRT-LLM's users fill its templates with, and the model that has them.
NVIDIAS_KEYS = {
    "tensorrt_llm": """
        triton_backend triton_max_batch_size decoupled_mode max_queue_delay_microseconds max_queue_size engine_dir batching_strategy
        max_beam_width kv_cache_free_gpu_mem_fraction kv_cache_host_memory_bytes exclude_input_in_output enable_kv_cache_reuse
        enable_trt_overlap enable_chunked_context batch_scheduler_policy decoding_mode logits_datatype encoder_input_features_data_type
        tokenizer_dir cancellation_check_period_ms max_tokens_in_paged_kv_cache max_attention_window_size guided_decoding_backend""",
    "preprocessing": """
        tokenizer_dir triton_max_batch_size preprocessing_instance_count add_special_tokens max_queue_size engine_dir max_num_images""",
    "postprocessing": "tokenizer_dir triton_max_batch_size postprocessing_instance_count skip_special_tokens",
    "ensemble": "triton_max_batch_size logits_datatype",
    "tensorrt_llm_bls": """
        triton_max_batch_size decoupled_mode bls_instance_count accumulate_tokens tensorrt_llm_model_name logits_datatype""",
}


def config(decoupled: bool = True, logits: str = "TYPE_FP32", **parameters: str) -> dict[str, Any]:
    values = {"oasis_executor_socket": "/s", "oasis_executor_authkey_file": "/k", **parameters}
    return {
        "parameters": {name: {"string_value": value} for name, value in values.items()},
        "model_transaction_policy": {"decoupled": decoupled},
        "max_batch_size": 8,
        "output": [{"name": name, "data_type": logits} for name in ("context_logits", "generation_logits")],
    }


def test_parameters_that_are_not_filled_are_not_set() -> None:
    made = contract.CoreParameters.of(
        config(exclude_input_in_output="${exclude_input_in_output}", max_beam_width="", oasis_drafter="ngram")
    )
    assert not made.exclude_prompt and made.decoupled and made.logits is np.float32 and made.expected == {"drafter": "ngram"}
    assert contract.CoreParameters.of(config(kv_cache_free_gpu_mem_fraction="0.9")).idle == ["kv_cache_free_gpu_mem_fraction"]
    made.check_executor({"drafter": "ngram"})
    with pytest.raises(ConfigError, match="oasis_drafter = 'ngram', but the executor runs with 'previous'"):
        made.check_executor({"drafter": "previous"})


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"max_beam_width": "4"}, "max_beam_width"),
        ({"decoding_mode": "medusa"}, "decoding_mode"),
        ({"gpt_model_type": "V1"}, "gpt_model_type"),
        ({"oasis_executor_socket": "${x}"}, "oasis_executor_socket"),
        ({"exclude_input_in_output": "maybe"}, "exclude_input_in_output"),
        ({"cancellation_check_period_ms": "-5"}, "cancellation_check_period_ms"),
        ({"logits": "TYPE_BF16"}, "logits_datatype"),
        ({"triton_backend": "onnxruntime"}, "triton_backend"),
        ({"lookahead_window_size": "7"}, "lookahead_window_size"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(parameters: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        contract.CoreParameters.of(config(**parameters))


def test_the_templates_have_nvidias_placeholders() -> None:
    for model, names in NVIDIAS_KEYS.items():
        template = (repo.templates() / model / "config.pbtxt").read_text(encoding="utf-8")
        assert [n for n in names.split() if f"${{{n}}}" not in template] == [], model
        assert string.Template(template).safe_substitute(dict.fromkeys(names.split(), "1")), "other dollars would break their tool"


def test_a_filled_repository(tmp_path: Path) -> None:
    repo.fill(tmp_path / "r", {**ENDPOINT, "oasis_drafter": 'a"b\\', "decoupled_mode": "false"})
    texts = {model: (tmp_path / "r" / model / "config.pbtxt").read_text(encoding="utf-8") for model in repo.MODELS}
    assert not any("${" in text for text in texts.values()) and 'string_value: "a\\"b\\\\"' in texts["tensorrt_llm"]
    assert "decoupled: false" in texts["tensorrt_llm"] and "max_queue_size: 1024" in texts["preprocessing"]
    assert all((tmp_path / "r" / model / "1").is_dir() for model in repo.MODELS)
    for values, named in (({"top_k": "3"}, "unknown parameters: top_k"), ({"oasis_drafter": "a\nb"}, "control characters")):
        with pytest.raises(ConfigError, match=named):
            repo.fill(tmp_path / "s", {**ENDPOINT, **values})
    with pytest.raises(ConfigError, match="exists"):
        repo.fill(tmp_path / "r", ENDPOINT)
    with pytest.raises(ConfigError, match="oasis_executor_socket"):
        repo.fill(tmp_path / "t", {"tokenizer_dir": "/t"})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    command = ["triton-repo", "--model", "smollm2-135m", "--out", str(out), f"oasis_executor_socket={tmp_path.anchor}tmp/x.sock"]
    assert main([*command, "oasis_top_k_blocks=64", "oasis_fetch_ratio=all"]) == 0
    said = capsys.readouterr().out
    assert '{"model": "smollm2-135m", "top_k_blocks": 64, "fetch_ratio": "all"}' in said and str(out) in said
    assert (tmp_path / "r.key").stat().st_mode & 0o777 == 0o600
    assert main(command) == 2 and "exists" in capsys.readouterr().err
    assert main([*command[:4], str(tmp_path / "q"), "nonsense"]) == 2 and "key=value" in capsys.readouterr().err
