"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from oasiskv.errors import EngineError, RequestError
from oasiskv.serve.openai import errors, translate
from oasiskv.serve.openai.answers import ChatAnswers, CompletionAnswers, Envelope, Usage
from oasiskv.serve.openai.errors import ApiError
from oasiskv.serve.openai.link import ExecutorLink, InFlight
from oasiskv.serve.openai.respond import Answer, BodyLimit
from oasiskv.serve.openai.schema import ChatRequest, CompletionRequest
from oasiskv.tokenizer import Tokenizer


class Front:
    """The state of the endpoints: a tokenizer and a connection, nothing of a request."""

    def __init__(self, link: ExecutorLink, tokenizer: Tokenizer, model: str) -> None:
        self.link = link
        self.model = model
        self._tokenizer = tokenizer
        self._max_seq_len: int = link.identity["max_seq_len"]
        self._started = int(time.time())

    def describe(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {
            "id": self.model, "object": "model", "created": self._started, "owned_by": "oasiskv", "max_model_len": self._max_seq_len,
        }  # fmt: skip

    def check_model(self, name: str) -> None:
        """Raises ApiError."""
        if name != self.model:
            raise ApiError(404, f"model = {name!r}: this server has {self.model!r}", "model", "model_not_found")

    async def complete(self, request: CompletionRequest) -> Answer:
        """Raises RequestError, ApiError."""
        self.check_model(request.model)
        many = translate.prompts(request)
        params = translate.completion_params(request)
        prompts = await asyncio.to_thread(lambda: [self._encode(p) if isinstance(p, str) else p for p in many])
        return self._answer(request, prompts, params, CompletionAnswers(self._tokenizer))

    async def chat(self, request: ChatRequest) -> Answer:
        """Raises RequestError, ApiError."""
        self.check_model(request.model)
        messages = translate.messages(request)
        prompt = await asyncio.to_thread(lambda: self._encode(self._tokenizer.apply_chat(messages)))
        params = translate.chat_params(request, len(prompt), self._max_seq_len)
        return self._answer(request, [prompt], params, ChatAnswers(self._tokenizer))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, max_tokens=self._max_seq_len)

    def _answer(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: dict[str, Any],
        answers: ChatAnswers | CompletionAnswers,
    ) -> Answer:
        seeds = [secrets.randbits(63) for _ in prompts]
        each = translate.sequences(params, len(prompts), request.n, request.seed, seeds)
        in_flight = InFlight(self.link, [p for p in prompts for _ in range(request.n)], each)
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        envelope = Envelope(self.model, answers, include_usage)
        return Answer(in_flight, len(each), answers, envelope, Usage(sum(map(len, prompts))), request.stream)


def make_app(front: Front) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        keeper = asyncio.create_task(front.link.keep())
        try:
            yield
        finally:
            keeper.cancel()
            front.link.close()

    app = FastAPI(title="OasisKV", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [front.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        front.check_model(name)
        return front.describe()

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            ping = await front.link.ping()
        except EngineError as error:
            raise ApiError(503, str(error), code="service_unavailable") from None
        return JSONResponse({"status": "ok", "in_flight": ping["in_flight"], "quiet_s": ping["quiet_s"]})

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Answer:
        return await front.complete(request)

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Answer:
        return await front.chat(request)

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(errors.refused(str(error)).body, 400)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(errors.from_validation(error.errors()).body, 400)

    @app.exception_handler(HTTPException)
    async def refuse_http(_: Request, error: HTTPException) -> JSONResponse:
        body = error.body if isinstance(error, ApiError) else errors.body(error.status_code, str(error.detail))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(errors.body(500, f"{type(error).__name__}: the front failed; its log says where"), 500)

    return app
