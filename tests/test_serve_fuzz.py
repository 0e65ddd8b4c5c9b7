"""Random and malformed requests over gRPC and HTTP to every model: each is answered or refused, nothing crashes, hangs or stays behind.

OASISKV_FUZZ_REQUESTS says how many (10,000 take a while); OASISKV_FUZZ_SEED begins elsewhere.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from oasiskv.serve.grpc_client import generate
from reference.service import Service, eventually

REQUESTS = int(os.environ.get("OASISKV_FUZZ_REQUESTS", "400"))
SEED = int(os.environ.get("OASISKV_FUZZ_SEED", "1"))
DEADLINE_S = 60.0
KINDS = {"TYPE_" + name: name for name in ("INT32", "INT64", "UINT8", "UINT64", "FP16", "FP32", "BOOL")} | {"TYPE_STRING": "BYTES"}
FORMATS = {"INT32": "i", "INT64": "q", "UINT8": "B", "UINT64": "Q", "FP16": "e", "FP32": "f", "BOOL": "?"}
TEXTS = [
    "",
    "a",
    "Once upon a time",
    "\N{FAMILY}" * 3,
    "\0",
    "x" * 20_000,
    "\ufffd",
    "<|im_start|>",
    "{",
    '{"type": "object"}',
    "[a-z]{2}",
    "json",
]
INTEGERS = [0, 1, 2, 3, 7, -1, -2, 255, 256, 49151, 49152, 2**31 - 1, -(2**31)]
FLOATS = [0.0, 0.5, 1.0, -1.0, 2.0, 1e30, float("nan"), float("inf"), -float("inf"), 1e-40]
# Of a request that works; what the fuzzer does not touch.
SANE = {"max_tokens": 3, "request_output_len": 3, "REQUEST_OUTPUT_LEN": 3, "input_lengths": 4, "temperature": 1.0}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    running = Service("--max-seq-len", "256", "--max-batch-size", "8")
    yield running
    running.stop()


class Schema:
    """The inputs of every model, as the server itself describes them."""

    def __init__(self, url: str) -> None:
        client = grpcclient.InferenceServerClient(url)
        self.models: dict[str, list[tuple[str, str, list[int], bool]]] = {}
        for index in client.get_model_repository_index().models:
            config = client.get_model_config(index.name).config
            kind = model_config_pb2.DataType.Name
            self.models[index.name] = [(i.name, KINDS[kind(i.data_type)], list(i.dims), i.optional) for i in config.input]
        client.close()


class Fuzzer:
    """One request, by its number alone."""

    def __init__(self, schema: Schema, service: Service, number: int) -> None:
        self.rng = random.Random(f"{SEED} {number}")
        self.schema, self.service = schema, service
        self.model = self.rng.choice([*schema.models] * 4 + ["nobody", ""])

    def run(self) -> str:
        """How it ended: ok or refused, with the way it took. Raises AssertionError for anything else."""
        way = self.rng.choice([self.stream, self.stream, self.unary, self.generate, self.generate, self.infer, self.junk])
        return f"{way.__name__} {way()}"

    # ------------------------------------------------------------ tensors

    def scalar(self, kind: str) -> Any:
        if kind == "BYTES":
            return self.rng.choice(TEXTS)
        if kind.startswith("FP"):
            return self.rng.choice(FLOATS)
        if kind == "BOOL":
            return self.rng.random() < 0.5
        value = self.rng.choice(INTEGERS)
        return value % 2 ** (8 * struct.calcsize(FORMATS[kind])) if kind.startswith("U") else value

    def values(self, name: str, kind: str, dims: list[int]) -> tuple[list[int], list[Any]]:
        """A shape and as many values."""
        shape = [1, *(d if d > 0 else self.rng.choice([1, 1, 2, 4]) for d in dims)]
        if self.rng.random() < 0.15:
            shape = self.rng.choice([[1], [2, *shape[1:]], shape[1:], [*shape, 1], [1, 0], [1, 300], [-1, 2], [2**40, 2**40]])
        count = 1
        for d in shape:
            count *= max(0, d)
        count = min(count, 1000)
        if name in SANE and self.rng.random() < 0.8:
            return shape, [SANE[name]] * count
        return shape, [self.scalar(kind) for _ in range(count)]

    def tensors(self) -> list[tuple[str, str, list[int], list[Any]]]:
        chosen = []
        for name, kind, dims, optional in self.schema.models.get(self.model, []):
            if self.rng.random() < (0.05 if optional else 0.97):
                if self.rng.random() < 0.03:
                    kind = self.rng.choice([*FORMATS, "BYTES"])
                chosen.append((name, kind, *self.values(name, kind, dims)))
        if self.rng.random() < 0.05:
            chosen.append(("surprise", "INT32", [1, 1], [1]))
        return chosen

    def request(self) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=self.model, id=self.rng.choice(["", "", "7", "x" * 100]))
        for name, kind, shape, values in self.tensors():
            request.inputs.append(service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=shape))
            raw = raw_bytes(kind, values)
            if self.rng.random() < 0.04:
                raw = raw[: self.rng.randrange(len(raw) + 1)] + self.rng.randbytes(self.rng.randrange(9))
            request.raw_input_contents.append(raw)
        if self.rng.random() < 0.2:
            request.outputs.append(
                service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=self.rng.choice(["text_output", "output_ids", "no"]))
            )
        return request

    # ------------------------------------------------------------ ways

    def stream(self) -> str:
        with grpc.insecure_channel(self.service.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer(iter([self.request()]), timeout=DEADLINE_S)
            leave_after = self.rng.choice([None, None, None, 0, 1])
            try:
                for n, answer in enumerate(call):
                    if answer.error_message:
                        return "refused"
                    if n == leave_after:
                        call.cancel()
                        return "left"
            except grpc.RpcError as error:
                return self.refusal(error)
        return "ok"

    def unary(self) -> str:
        with grpc.insecure_channel(self.service.url) as channel:
            try:
                service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(self.request(), timeout=DEADLINE_S)
            except grpc.RpcError as error:
                return self.refusal(error)
        return "ok"

    def refusal(self, error: grpc.RpcError) -> str:
        assert error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL), (
            f"{self.model}: {error.code()}: {error.details()}"
        )
        return "refused"

    def generate(self) -> str:
        body = {}
        for name, _, _, values in self.tensors():
            body[name] = values if len(values) != 1 or self.rng.random() < 0.1 else values[0]
        path = f"/v2/models/{self.model}/{self.rng.choice(['generate', 'generate_stream'])}"
        return self.post(path, json.dumps(body).encode())

    def infer(self) -> str:
        inputs = [{"name": n, "datatype": k, "shape": s, "data": v} for n, k, s, v in self.tensors()]
        return self.post(f"/v2/models/{self.model}/infer", json.dumps({"inputs": inputs}).encode())

    def junk(self) -> str:
        body = self.rng.choice(
            [b"", b"{", b"null", b"[" * 5000, self.rng.randbytes(200), b'{"text_input": "a"}', b'{"inputs": 3}', b"\xff" * 50_000]
        )
        path = self.rng.choice(
            [f"/v2/models/{self.model}/generate", f"/v2/models/{self.model}/infer", "/v2/models/ensemble/nothing", "/" + "v" * 2000]
        )
        headers = self.rng.choice([{}, {}, {"Inference-Header-Content-Length": self.rng.choice(["5", "-1", "999999999", "x"])}])
        return self.post(path, body, headers)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.service.ports[1], timeout=DEADLINE_S)
        try:
            connection.request("POST", path.replace(" ", ""), body, headers or {})
            answer = connection.getresponse()
            if self.rng.random() < 0.1:
                return "left"
            answer.read()
        finally:
            connection.close()
        return "ok" if answer.status == 200 else "refused"


def raw_bytes(kind: str, values: list[Any]) -> bytes:
    if kind == "BYTES":
        texts = [v.encode() if isinstance(v, str) else b"?" for v in values]
        return b"".join(struct.pack("<I", len(t)) + t for t in texts)
    out = b""
    for v in values:
        try:
            out += struct.pack("<" + FORMATS[kind], v if kind in ("FP16", "FP32", "BOOL") else int(v))
        except (struct.error, ValueError, OverflowError):  # of another kind than the input's own
            out += bytes(struct.calcsize(FORMATS[kind]))
    return out


def ask(service: Service) -> str:
    return "".join(p.text for p in generate(service.url, "The capital of France is", max_tokens=12, deadline_s=60))


def test_every_request_is_answered_or_refused(service: Service) -> None:
    expected, before = ask(service), service.descendants()
    schema = Schema(service.url)
    with ThreadPoolExecutor(8) as pool:
        ends = Counter(pool.map(lambda n: Fuzzer(schema, service, n).run(), range(REQUESTS)))
    print(sorted(ends.items()))
    assert sum(n for end, n in ends.items() if end.endswith("ok")) > REQUESTS / 50, "hardly a request got through to the engine"
    assert ask(service) == expected
    assert service.descendants() == before, "a process died on the way"
    with service.executor() as executor:
        eventually(lambda: executor.ping()["in_flight"] == 0, 30)
        usage = executor.usage()
    assert usage["device_pages_free"] == usage["device_pages"]
