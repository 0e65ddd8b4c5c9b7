"""The bounded queue: as many requests wait as may, the next is refused at once, and no place is ever lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from oasiskv.config import EngineConfig
from oasiskv.engine.llm import LLM
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import ConfigError, EngineError, QueueFullError
from reference.service import eventually

LIMIT = 16
OPTIONS = {
    "max_queue_size": LIMIT,
    "max_batch_size": 1,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "device_kv_gib": 0.05,
    "host_kv_gib": 0.1,
}


class Ask:
    """A request and what became of it."""

    def __init__(self, loop: EngineLoop, prompt: list[int], tokens: int, wait: bool = False) -> None:
        self.prompt, self.tokens = prompt, []
        self.first, self.done = threading.Event(), threading.Event()
        self.reason: str | None = None
        self.id = loop.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), self.take, wait=wait)

    def take(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.first.set()
        if output.finished:
            self.reason = output.finish_reason
            self.done.set()

    def wait(self) -> list[int]:
        assert self.done.wait(120), "hang"
        return self.tokens


class Held:
    """A loop whose engine can be held between two steps, with one request running: what comes meanwhile waits."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._go, self._held = threading.Event(), threading.Event()
        step = loop._engine.step

        def step_when_let() -> list[RequestOutput]:
            if not self._go.is_set():
                self._held.set()
                assert self._go.wait(120)
            return step()

        loop._engine.step = step_when_let
        self._go.set()

    def hold(self) -> Ask:
        running = Ask(self.loop, [1, 2, 3], 200)
        assert running.first.wait(60)
        self._held.clear()
        self._go.clear()
        assert self._held.wait(60)
        return running

    def let_go(self, running: Ask) -> None:
        self.loop.cancel(running.id)
        self._go.set()

    def places(self) -> int:
        """How many requests find a place now; they are cancelled again."""
        running = self.hold()
        asks: list[Ask] = []
        with pytest.raises(QueueFullError):
            while True:
                asks.append(Ask(self.loop, [5], 4))
        for ask in asks:
            self.loop.cancel(ask.id)
        self.let_go(running)
        for ask in asks:
            ask.wait()
        running.wait()
        return len(asks)


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(EngineConfig(**OPTIONS))
    yield loop
    loop.close()


@pytest.fixture
def held(loop: EngineLoop) -> Iterator[Held]:
    step = loop._engine.step
    yield Held(loop)
    loop._engine.step = step


def test_many_threads_find_exactly_the_places_there_are(held: Held, prose_ids: list[int]) -> None:
    prompts = [prose_ids[i * 40 : i * 40 + 8] for i in range(10)]
    alone = [Ask(held.loop, p, 6).wait() for p in prompts]
    running = held.hold()
    accepted: list[Ask] = []
    refused: list[QueueFullError] = []
    begin = threading.Barrier(10)

    def client(prompt: list[int]) -> None:
        begin.wait(30)
        for _ in range(8):
            try:
                accepted.append(Ask(held.loop, prompt, 6))
            except QueueFullError as error:
                refused.append(error)

    threads = [threading.Thread(target=client, args=(p,)) for p in prompts]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a refusal must not wait for the engine, which is held"
    assert len(accepted) == LIMIT and len(refused) == 80 - LIMIT
    assert isinstance(refused[0], EngineError)
    assert str(refused[0]) == "16 requests wait and max_queue_size is 16: try again later, or start the engine with a larger one"
    held.let_go(running)
    assert all(a.wait() == alone[prompts.index(a.prompt)] for a in accepted)
    assert held.places() == LIMIT


def test_cancelling_what_waits_gives_its_place_back(held: Held) -> None:
    """Also of requests that the engine has not seen when they are cancelled, and twice, and again after their end."""
    running = held.hold()
    asks = [Ask(held.loop, [7, i], 3) for i in range(LIMIT)]
    for ask in asks[::2]:
        held.loop.cancel(ask.id)
        held.loop.cancel(ask.id)
    held.let_go(running)
    for i, ask in enumerate(asks):
        ask.wait()
        assert ask.reason == ("length" if i % 2 else "cancelled")
        held.loop.cancel(ask.id)
    assert held.places() == LIMIT


def test_random_ends_lose_no_place(held: Held) -> None:
    rng = random.Random(3)
    asks: list[Ask] = []
    refused = 0

    def fails(output: RequestOutput) -> None:
        raise RuntimeError("a client's callback fails")

    for i in range(300):
        try:
            if rng.random() < 0.1:
                held.loop.submit([9, i], SamplingParams(max_tokens=2), fails)
            else:
                asks.append(Ask(held.loop, [9, i], rng.randrange(1, 4), wait=rng.random() < 0.3))
        except QueueFullError:
            refused += 1
        if asks and rng.random() < 0.3:
            held.loop.cancel(rng.choice(asks[-8:]).id)
    for ask in asks:
        ask.wait()
    assert refused > 0 and {a.reason for a in asks} == {"cancelled", "length"}
    assert held.places() == LIMIT


def test_who_waits_for_a_place_learns_that_the_engine_closes() -> None:
    loop = EngineLoop(EngineConfig(**OPTIONS | {"max_queue_size": 1}))
    held = Held(loop)
    held.hold()
    Ask(loop, [5], 4)
    errors: list[EngineError] = []

    def client() -> None:
        try:
            Ask(loop, [6], 4, wait=True)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it must wait for a place"
    closing = threading.Thread(target=loop.close)
    closing.start()
    eventually(lambda: loop._inbox.qsize() == 2, 60)  # the request that waits, and the end
    held._go.set()
    for t in (closing, thread):
        t.join(60)
        assert not t.is_alive()
    assert [str(e) for e in errors] == ["the engine is closed"]


def test_generate_takes_more_prompts_than_may_wait() -> None:
    with LLM(**OPTIONS | {"max_queue_size": 2, "max_batch_size": 4}) as llm:
        results = llm.generate([[i + 1] for i in range(20)], SamplingParams(max_tokens=3, ignore_eos=True))
        assert [len(r.token_ids) for r in results] == [3] * 20
        assert all(r.finish_reason == "length" for r in results)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "16"])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="max_queue_size = "):
        EngineConfig(max_queue_size=size)
