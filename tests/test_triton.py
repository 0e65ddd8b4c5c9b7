"""The real Triton server and the embedded model, over gRPC."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oasiskv.engine.llm import LLM
from oasiskv.engine.sampling import SamplingParams
from oasiskv.serve.grpc_client import RemoteError, generate
from oasiskv.serve.local import free_ports

OPTIONS = {"top_k_blocks": 4, "sparse_from": 64}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The gRPC address of a running service; its end must leave no port and no shared memory."""
    before = set(Path("/dev/shm").iterdir())
    grpc_port, http, metrics = free_ports(3)
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(http), "--metrics-port", str(metrics)]
    options = ["--top-k-blocks", "4", "--sparse-from", "64"]
    process = subprocess.Popen([sys.executable, "-m", "oasiskv.cli", "serve", *ports, *options], stdout=subprocess.PIPE, text=True)
    assert any("ready:" in line for line in process.stdout), "the server did not start"
    yield f"127.0.0.1:{grpc_port}"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    for port in (grpc_port, http, metrics):
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
    assert set(Path("/dev/shm").iterdir()) <= before


def text_of(server: str, prompt: str, **options: object) -> str:
    return "".join(p.text for p in generate(server, prompt, deadline_s=120, **options))


def test_streams_equal_the_llm_class(server: str) -> None:
    prompts = [f"{'The quick brown fox jumps over the lazy dog. ' * n}Once upon a time" for n in range(8)]
    with LLM(**OPTIONS) as llm:
        expected = [r.text for r in llm.generate(prompts, SamplingParams(max_tokens=20))]
    with ThreadPoolExecutor(8) as pool:
        streamed = list(pool.map(lambda p: text_of(server, p, max_tokens=20, stream=True), prompts))
    assert streamed == expected
    assert text_of(server, prompts[3], max_tokens=20, stream=False) == expected[3]


def test_the_statistics_prove_sparse_mode(server: str) -> None:
    last = list(generate(server, "word " * 200, deadline_s=120, max_tokens=20, stream=True))[-1]
    assert last.final and last.stats["sparse_steps"] > 0 and last.stats["bytes_fetched"] > 0
    assert last.stats["resident_tokens_max"] <= (4 + 2) * 16


def test_bad_requests_are_refused_by_name(server: str) -> None:
    with pytest.raises(RemoteError, match="max_tokens"):
        text_of(server, "hello", max_tokens=0)
    with pytest.raises(RemoteError, match="max_seq_len"):
        text_of(server, "hello " * 9000, max_tokens=4)
    with pytest.raises(RemoteError, match="max_seq_len"):
        text_of(server, "lorem ipsum " * 870_000, max_tokens=4)  # 10 MB
    with pytest.raises(RemoteError, match="empty"):
        text_of(server, "", max_tokens=4)
    assert text_of(server, "hello", max_tokens=4)
