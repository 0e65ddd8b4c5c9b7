"""The front's one connection to the executor, and what is in flight over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from oasiskv.errors import EngineError, OasisError
from oasiskv.executor import protocol
from oasiskv.executor.client import ExecutorClient
from oasiskv.executor.protocol import Output
from oasiskv.serve.openai.errors import ApiError, from_output

MAX_UNREAD = 1024  # outputs a sequence that wait for a client which reads too slowly
_CHECK_S = 0.1
_CONNECT_S = 1.0
_PING_S = 2.0
_log = logging.getLogger(__name__)


class ExecutorLink:
    """Connected once constructed; raises EngineError where no executor answers. `keep` makes it anew after a loss.

    identity: the executor's first ping. Sends may block, so one thread of their own does them, in order.
    """

    def __init__(self, socket: Path, authkey_file: Path) -> None:
        self._endpoint = socket, authkey_file
        self.client = ExecutorClient(*self._endpoint)
        self.identity = self.client.ping()
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="oasiskv-send")

    async def keep(self) -> None:
        """Until cancelled: reconnect when the executor was restarted."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if self.client.closed:
                with contextlib.suppress(OasisError):  # requests are told "unavailable" until a later round succeeds
                    self.client = await asyncio.to_thread(ExecutorClient, *self._endpoint, deadline_s=_CONNECT_S)
                    _log.warning("reconnected to the executor")

    async def ping(self) -> dict[str, Any]:
        """Raises EngineError."""
        return await asyncio.to_thread(self.client.ping, _PING_S)

    def close(self) -> None:
        self.sender.shutdown(wait=False, cancel_futures=True)
        self.client.close()


class InFlight:
    """The sequences of one API request: iterate over (index, output) as they come. Leaving the context cancels what has not ended.

    Raises ApiError from the iteration when one of them fails, or when outputs are not taken in time; the others are cancelled then.
    """

    def __init__(self, link: ExecutorLink, prompts: list[list[int]], params: list[dict[str, Any]]) -> None:
        self._link = link
        self._client = link.client
        self._requests = list(zip(prompts, params, strict=True))
        self._numbers: dict[int, int] = {}  # index -> the client's number; only on the sender's thread
        self._outputs: asyncio.Queue[tuple[int, Output | ApiError]] = asyncio.Queue()
        self._left = len(prompts)
        self._closed = False

    async def __aenter__(self) -> InFlight:
        self._loop = asyncio.get_running_loop()
        self._link.sender.submit(self._submit)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __aiter__(self) -> InFlight:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        if self._left == 0:
            raise StopAsyncIteration
        index, output = await self._outputs.get()
        error = output if isinstance(output, ApiError) else from_output(output)
        if error:
            self._close()
            raise error
        self._left -= output.finished
        return index, output

    def _submit(self) -> None:
        for index, (prompt, params) in enumerate(self._requests):
            if self._closed:
                return
            try:
                self._numbers[index] = self._client.submit(prompt, params, partial(self._on_output, index))
            except protocol.ProtocolError as error:
                self._on_output(index, protocol.failed(0, protocol.INVALID, str(error)))
            except EngineError as error:
                self._on_output(index, protocol.failed(0, protocol.UNAVAILABLE, str(error)))

    def _on_output(self, index: int, output: Output) -> None:
        """On the client's reader thread or the sender's."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it whoever waits
            self._loop.call_soon_threadsafe(self._take, index, output)

    def _take(self, index: int, output: Output) -> None:
        if self._closed:
            return
        if self._outputs.qsize() < MAX_UNREAD * len(self._requests):
            self._outputs.put_nowait((index, output))
            return
        self._close()
        self._outputs = asyncio.Queue()
        self._outputs.put_nowait((index, ApiError(503, f"the answer was given up: {MAX_UNREAD} parts of it were not read in time")))

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._left:
                self._link.sender.submit(self._cancel)

    def _cancel(self) -> None:
        for number in self._numbers.values():
            self._client.cancel(number)
