"""One request to `tensorrt_llm` on its way: its executor requests, and the responses that they become."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from oasiskv.errors import OasisError
from oasiskv.executor.client import ExecutorClient
from oasiskv.executor.protocol import INTERNAL, Output
from oasiskv.serve.contract import CoreRequest, SequenceOutput, Tensors


class Reply(Protocol):
    """Triton's side. After `final` or `fail` nothing more may be asked of it."""

    def send(self, tensors: Tensors, final: bool) -> None: ...

    def fail(self, code: str, message: str) -> None:
        """code: one of protocol.CODES."""

    def is_cancelled(self) -> bool: ...


class Call:
    """Rows x sequences, answered one response at a time; final is the last token's response of the last that ends.

    An empty response after it would break NVIDIA's BLS. When one sequence fails the call fails, and the others are cancelled.
    on_end: called once, when nothing more will be sent.
    """

    def __init__(
        self,
        requests: list[CoreRequest],
        wanted: frozenset[str],
        logits: type[np.floating],
        reply: Reply,
        on_end: Callable[[Call], None],
    ) -> None:
        self._wanted, self._logits, self._reply, self._on_end = wanted, logits, reply, on_end
        self._pending: list[tuple[CoreRequest, int, SequenceOutput]] = []
        for row, request in enumerate(requests):
            for index in range(request.sequences):
                indices = row if len(requests) > 1 else None, index if request.sequences > 1 else None
                self._pending.append((request, index, SequenceOutput(request, *indices)))
        self._open = len(self._pending)
        self._ended = False
        self._handles: list[tuple[ExecutorClient, int]] = []
        self._lock = threading.Lock()  # guards the three above and the reply

    def start(self, client: ExecutorClient) -> None:
        """Raises EngineError, ProtocolError; then nothing of it runs, and nothing was sent."""
        try:
            for request, index, sequence in self._pending:
                number = client.submit(request.prompt, request.sequence(index), self._listener(request, sequence))
                with self._lock:
                    self._handles.append((client, number))
                    ended = self._ended
                if ended:  # an earlier sequence was refused meanwhile
                    self.cancel()
                    return
        except OasisError:
            with self._lock:
                self._ended = True
            self.cancel()
            raise

    def cancel(self) -> None:
        """Each of its sequences ends with what it has; nothing happens to those that have ended."""
        with self._lock:
            handles = list(self._handles)
        for client, number in handles:
            client.cancel(number)

    def abandoned(self) -> bool:
        with self._lock:
            return not self._ended and self._reply.is_cancelled()

    def _listener(self, request: CoreRequest, sequence: SequenceOutput) -> Callable[[Output], None]:
        return lambda output: self._take(request, sequence, output)

    def _take(self, request: CoreRequest, sequence: SequenceOutput, output: Output) -> None:
        """On the client's reader thread."""
        with self._lock:
            if self._ended:
                return
            try:
                failed = self._answer(request, sequence, output)
            except Exception as error:  # the caller must not be left without an answer
                failed = True
                self._reply.fail(INTERNAL, f"{type(error).__name__}: {error}")
            self._ended = ended = failed or self._open == 0
        if failed:
            self.cancel()
        if ended:
            self._on_end(self)

    def _answer(self, request: CoreRequest, sequence: SequenceOutput, output: Output) -> bool:
        """Whether the call failed by it."""
        if output.code:
            self._reply.fail(output.code, output.error or "the request failed")
            return True
        sequence.add(output)
        self._open -= output.finished
        if output.finished or (request.streaming and output.token_ids):
            tensors = sequence.take(self._wanted, self._logits, output.stats if output.finished else None)
            self._reply.send(tensors, final=self._open == 0)
        return False
