"""One answer over HTTP: whole as JSON, or as server-sent events. A client that leaves cancels what it asked for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from oasiskv.serve.openai.answers import ChatAnswers, CompletionAnswers, Envelope, Usage, Whole
from oasiskv.serve.openai.errors import ApiError
from oasiskv.serve.openai.link import InFlight

MAX_BODY_BYTES = 16 << 20
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Answer(Response):
    """Raises ApiError while nothing is sent yet. An error after that is the stream's last event, and no [DONE] follows."""

    def __init__(
        self, in_flight: InFlight, count: int, answers: ChatAnswers | CompletionAnswers, envelope: Envelope, usage: Usage, stream: bool
    ) -> None:
        super().__init__()
        self._in_flight = in_flight
        self._count = count
        self._answers = answers
        self._envelope = envelope
        self._usage = usage
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._in_flight:
            work = asyncio.ensure_future(self._send_events(send) if self._stream else self._send_whole(scope, receive, send))
            gone = asyncio.ensure_future(_disconnect(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, gone):
                    task.cancel()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        wholes = [Whole() for _ in range(self._count)]
        async for index, output in self._in_flight:
            wholes[index].take(output)
            self._usage.completion_tokens += len(output.token_ids)
        choices = [self._answers.choice(i, whole) for i, whole in enumerate(wholes)]
        await JSONResponse(self._envelope.whole(choices, self._usage))(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        """The first output is waited for, so that what is refused has its own status."""
        index, output = await anext(self._in_flight)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        try:
            for choice in self._answers.openings(self._count):
                await send(_event(self._envelope.chunk(choice)))
            await self._send_pieces(send, index, output)
            async for index, output in self._in_flight:
                await self._send_pieces(send, index, output)
            for chunk in self._envelope.last_chunks(self._usage):
                await send(_event(chunk))
            await send(_body(b"data: [DONE]\n\n"))
        except ApiError as error:
            await send(_event(error.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send, index: int, output: Any) -> None:
        self._usage.completion_tokens += len(output.token_ids)
        for choice in self._answers.pieces(index, output):
            await send(_event(self._envelope.chunk(choice)))


class BodyLimit:
    """ASGI middleware: refuses bodies over MAX_BODY_BYTES with 413, once read to their end, as a client reads no answer before."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size <= MAX_BODY_BYTES:
                parts.append(message.get("body", b""))
            else:
                parts.clear()
        if size > MAX_BODY_BYTES:
            error = ApiError(413, f"the body has {size} bytes: at most {MAX_BODY_BYTES}", code="request_too_large")
            await JSONResponse(error.body, 413)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> Message:
    return _body(b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n")


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
