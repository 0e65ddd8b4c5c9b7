"""`python -m oasiskv.bench.tokens`: the CUDA operations on tokens, each alone, against a plain read of its bytes (see kernels.py).

64 rows of a 151,936-token vocabulary, and 64 requests of 32,768 tokens. The logits fit the L2 cache, as they do after the head's product.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from oasiskv import _core
from oasiskv.bench.report import say
from oasiskv.bench.timing import Read, Run, paired
from oasiskv.engine.cuda_runner import require_cuda
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.token_table import TokenTable

_cuda = getattr(_core, "cuda", None)
BATCH, VOCAB, TOKENS, DIM = 64, 151_936, 32_768, 4096
SAMPLING = {
    "greedy": SamplingParams(),
    "random": SamplingParams(temperature=1.0),
    "random, top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "random, top_k, top_p, min_p": SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05),
}


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def calls(table: TokenTable, params: SamplingParams) -> dict[str, tuple[Run, int]]:
    """By name: the call and its bytes. Every request samples by `params`."""
    for request in range(BATCH):
        table.admit(request, torch.randint(VOCAB, (TOKENS,)).tolist(), replace(params, seed=request))
    logits = torch.randn(BATCH, VOCAB, device="cuda") * 3
    embedding = torch.randn(VOCAB, DIM, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(BATCH, DIM, device="cuda", dtype=torch.bfloat16)
    requests = torch.arange(BATCH, dtype=torch.int32, device="cuda")
    last = TOKENS - 2  # so that the sampled token is the prompt's last
    rows = torch.tensor([(last, 0, -1, i, 0) for i in range(BATCH)], dtype=torch.int32, device="cuda")
    logits_rows = torch.tensor([(i, i, last) for i in range(BATCH)], dtype=torch.int32, device="cuda")
    sampling = (logits.data_ptr(), VOCAB, logits_rows.data_ptr(), BATCH, table.tables)

    def sample() -> None:
        rest = (table.work.data_ptr(), table.result_ptr(0), _stream())
        if params.temperature:
            _cuda.sample_random(*sampling, table.sampling.data_ptr(), *rest)
        else:
            _cuda.sample_greedy(*sampling, *rest)

    def propose() -> None:
        _cuda.propose_ngram(requests.data_ptr(), BATCH, table.tables, 4, _stream())

    def embed() -> None:
        _cuda.embed(rows.data_ptr(), BATCH, table.tables, embedding.data_ptr(), x.data_ptr(), DIM * 2, _stream())

    return {"sample": (sample, logits.numel() * 4), "propose_ngram": (propose, BATCH * TOKENS * 4), "embed": (embed, BATCH * DIM * 4)}


def main() -> int:
    require_cuda()
    table = TokenTable(BATCH, TOKENS)
    for name, params in SAMPLING.items():
        for operation, (call, size) in calls(table, params).items():
            if operation != "sample" and params is not SAMPLING["greedy"]:
                continue
            times = paired({"kernel": call, "floor": Read(size)}, 15, 10)
            shape = name if operation == "sample" else ""
            say(f"{operation:14} {shape:28} {times['kernel']:8.1f} us, floor {times['floor']:8.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
