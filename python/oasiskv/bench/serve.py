"""`oasiskv bench serve`: what the way through Triton costs. The same requests, all at once, in turn through streams of gRPC to the core
model `tensorrt_llm` of a real server, and through the LLM class in this process; tokens a second of each, and their ratio.

Both hold the model all the time, on the same cores; only one of them works at a time. The client of the streams is this process too.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from typing import Any

import numpy as np

from oasiskv.bench.report import append_row, say
from oasiskv.bench.text import prose
from oasiskv.config import EngineConfig
from oasiskv.engine.llm import LLM
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import OasisError
from oasiskv.serve.local import LocalService

_DEADLINE_S = 600.0


class Streams:
    """As many gRPC streams to the core model as there are requests; each carries one of every round."""

    def __init__(self, url: str, count: int) -> None:
        import tritonclient.grpc as grpcclient

        self._grpc = grpcclient
        self._answers: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
        self._clients = [grpcclient.InferenceServerClient(url) for _ in range(count)]
        for i, client in enumerate(self._clients):
            client.start_stream(lambda result, error, i=i: self._answers.put((i, result, error)))

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Token ids of each. Raises OasisError."""
        for client, prompt in zip(self._clients, prompts, strict=True):
            client.async_stream_infer("tensorrt_llm", self._inputs(prompt, tokens), enable_empty_final_response=True)
        outputs: list[list[int]] = [[] for _ in prompts]
        left, end = len(prompts), time.monotonic() + _DEADLINE_S
        while left:
            i, result, error = self._answers.get(timeout=max(0.1, end - time.monotonic()))
            if error is not None:
                raise OasisError(f"stream {i}: {error}")
            ids = result.as_numpy("output_ids")
            if ids is not None:
                outputs[i] += ids.reshape(-1).tolist()
            left -= result.get_response().parameters["triton_final_response"].bool_param
        return outputs

    def _inputs(self, prompt: list[int], tokens: int) -> list[Any]:
        values = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([[len(prompt)]], np.int32),
            "request_output_len": np.array([[tokens]], np.int32),
            "end_id": np.array([[-1]], np.int32),
            "streaming": np.array([[True]]),
        }
        inputs = []
        for name, value in values.items():
            tensor = self._grpc.InferInput(name, list(value.shape), "BOOL" if value.dtype == bool else "INT32")
            tensor.set_data_from_numpy(value)
            inputs.append(tensor)
        return inputs

    def close(self) -> None:
        for client in self._clients:
            client.stop_stream()
            client.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oasiskv bench serve", description=__doc__)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output", type=int, default=64, help="tokens a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="add the figures there as a line")
    args = parser.parse_args(argv)
    config = EngineConfig(model=args.model, max_seq_len=args.prompt_tokens + args.output, device_kv_gib=0.5, host_kv_gib=0.5)
    flags = ("--model", args.model, "--max-seq-len", str(config.max_seq_len), "--device-kv-gib", "0.5", "--host-kv-gib", "0.5")
    params = SamplingParams(max_tokens=args.output, ignore_eos=True)
    with LLM(config) as llm, LocalService(*flags) as service:
        ids, n = llm.tokenizer.encode(prose()[: args.streams * args.prompt_tokens * 16]), args.prompt_tokens
        prompts = [ids[i * n : (i + 1) * n] for i in range(args.streams)]
        streams = Streams(service.grpc_url, args.streams)
        times: dict[str, list[float]] = {"front": [], "llm": []}
        for round_ in range(args.rounds + 1):
            begin = time.perf_counter()
            answers = streams.generate(prompts, args.output)
            middle = time.perf_counter()
            direct = [r.token_ids for r in llm.generate(prompts, params)]
            end = time.perf_counter()
            if answers != direct:
                raise OasisError("the two ways gave different tokens")
            if round_ > 0:
                times["front"].append(middle - begin)
                times["llm"].append(end - middle)
                say(f"round {round_}: front {middle - begin:.2f} s, LLM {end - middle:.2f} s")
        streams.close()
    total = args.streams * args.output
    rate = {name: total / statistics.median(t) for name, t in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["llm"], times["front"], strict=True))
    say(f"{args.streams} streams, tok/s: {rate['front']:.1f} through gRPC, {rate['llm']:.1f} through LLM; median ratio {ratio:.3f}")
    if args.json:
        append_row(args.json, {**vars(args), "front_tok_s": rate["front"], "llm_tok_s": rate["llm"], "ratio": ratio})
    return 0
