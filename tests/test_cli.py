"""The command line: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from oasiskv.cli import cuda_report
from oasiskv.cli.main import main

STATS = {
    "prompt_tokens", "generated_tokens", "dense_steps", "sparse_steps", "top_k_blocks", "fetch_cap_blocks", "resident_tokens_max",
    "blocks_predicted", "blocks_admitted", "blocks_capped", "bytes_fetched", "stall_ms", "ttft_ms", "tpot_ms", "draft_tokens",
    "draft_accepted",
}  # fmt: skip


@pytest.fixture(autouse=True)
def keep_sigint() -> object:
    previous = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, previous)


def code(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "--max-tokens = 0"),
        (["generate", "--prompt", "a", "--top-p", "3"], "--top-p = 3.0"),
        (["generate", "--prompt", "a", "--top-k-blocks", "x"], "--top-k-blocks"),
        (["generate", "--prompt", "a", "--fetch-ratio", "2"], "fetch_ratio = 2"),
        (["generate", "--prompt", "a", "--model", "no/such"], "no/such"),
        (["generate", "--prompt-file", "no/such.txt"], "no/such.txt"),
        (["serve", "--grpc-port", "70000"], "--grpc-port 70000"),
        (["serve", "--grpc-port", "8000"], "must differ"),
        (["serve", "--probe-every", "nan"], "--probe-every nan"),
        (["serve", "--drain", "inf"], "--drain inf"),
        (["serve", "--start-deadline", "-1"], "--start-deadline -1"),
        (["generate", "--prompt", "a", "--max-tokens", str(2**63)], f"--max-tokens = {2**63}"),
        (["generate", "--prompt", "a", "--host-kv-gib", "1e300"], "host_kv_gib"),
        (["generate", "--prompt", "a", "--device-kv-gib", "1e5"], "device_kv_gib"),
        (["generate", "--prompt", "a", "--backend", "cuda", "--dense", "--host-kv-gib", "0"], "--no-enable-prefix-caching"),
        (["generate", "--prompt", "a", "--model", "a" * 5000], "aaa"),
        (["generate", "--prompt", "a", "--model", "~nosuchuser/m"], "nosuchuser"),
        (["generate", "--prompt", "a", "--model", "/dev/null"], "/dev/null"),
        (["convert", "no/such", "target"], "no/such"),
        (["nonsense"], "nonsense"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("oasiskv: error: ") and named in error and error.count("\n") == 1


def test_a_file_that_is_not_utf8_is_named_with_its_offset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    assert code("generate", "--prompt-file", str(tmp_path / "bad.txt")) == 2
    assert f"{tmp_path / 'bad.txt'}: not UTF-8 at byte 3" in capsys.readouterr().err


def test_a_prompt_of_10_mb_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big.txt").write_text("lorem ipsum " * 870_000, encoding="utf-8")
    assert code("generate", "--prompt-file", str(tmp_path / "big.txt"), "--device-kv-gib", "0.25") == 1
    assert "max_seq_len" in capsys.readouterr().err


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("generate", "--prompt", "", "--device-kv-gib", "0.25") == 1
    assert "empty" in capsys.readouterr().err


def test_json_lines_come_in_prompt_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("word " * 120, encoding="utf-8")
    flags = ["--max-tokens", "6", "--ignore-eos", "--json", "--top-k-blocks", "4", "--sparse-from", "64", "--device-kv-gib", "0.25"]
    assert (
        code("generate", "--prompt", "One", "--prompt-file", str(tmp_path / "p.txt"), "--prompt", "The capital of France is", *flags) == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["stats"]["generated_tokens"] for line in lines] == [6, 6, 6]
    assert all(line["stats"].keys() >= STATS and line["finish_reason"] == "length" and len(line["token_ids"]) == 6 for line in lines)
    assert lines[1]["stats"]["sparse_steps"] > 0 and lines[0]["stats"]["sparse_steps"] == 0
    assert lines[2]["text"].startswith(" Paris")


def test_a_prompt_that_cannot_fit_fails_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("generate", "--prompt", "a", "--max-tokens", "99999999", "--device-kv-gib", "0.25") == 1
    assert "max_seq_len" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "oasiskv.cli", "env"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "oasiskv: error: [Errno 28] No space left on device\n"


def test_an_answer_beyond_the_terminals_encoding_is_escaped() -> None:
    script = (
        "import sys; from oasiskv.cli import main, env; env.run = lambda a: print('\\u00fc\\U0001f642') or 0; sys.exit(main.main(['env']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0 and done.stdout == b"\\xfc\\U0001f642\n", done.stderr


@pytest.mark.parametrize("after_s", [0.4, 2.0, 6.0])
def test_sigint_at_any_time_is_130_without_a_traceback(after_s: float) -> None:
    command = [sys.executable, "-m", "oasiskv.cli", "generate", "--prompt", "a", "--max-tokens", "4000", "--ignore-eos"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    time.sleep(after_s)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in error


def test_env_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("env", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["core_isa"] and not report["triton"].startswith("missing") and report["embedded_model"].endswith(".gguf")
    assert " GiB (" in report["memory_left"]
    if report["core_cuda"]:
        assert "libcublasLt.so" in report["cublaslt"] and report["cuda"].startswith(("ready: ", "built, but it will not run here: "))
    else:
        assert report["cuda"] == "not built: python3 build.py setup --cuda" and report["cublaslt"] is None


@pytest.mark.parametrize(
    ("built", "gpu", "why", "said"),
    [
        (False, ("NVIDIA H200", 9, 0), "", "not built: .*setup --cuda"),
        (True, None, "Found no NVIDIA driver on your system", "will not run here: Found no NVIDIA driver"),
        (True, ("NVIDIA A100", 8, 0), "", r"will not run here: NVIDIA A100 has compute capability 8\.0, the kernels are for 9\.0"),
        (True, ("NVIDIA B200", 10, 0), "", r"will not run here: NVIDIA B200 has compute capability 10\.0"),
        (True, ("NVIDIA H200", 9, 0), "", "^ready: NVIDIA H200$"),
    ],
)
def test_env_says_whether_cuda_runs(built: bool, gpu: tuple[str, int, int] | None, why: str, said: str) -> None:
    found = gpu and SimpleNamespace(name=gpu[0], major=gpu[1], minor=gpu[2])
    assert re.search(said, cuda_report.verdict(built, found, why))


@pytest.mark.parametrize("modules", ["oasiskv._core, torch", "torch, oasiskv._core"])
def test_the_core_loads_before_torch_and_after(modules: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {modules}; oasiskv._core.isa()"], check=True)
