"""The service under more load than it takes, and ended in the middle of it: a client gets its whole text or an error, never another."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from oasiskv.serve.grpc_client import RemoteError, generate
from reference.service import Service, eventually

PROMPTS = [f"Once upon a time there were {n}" for n in ("two cats", "three ships", "many kings", "no bears")]
TOKENS = 40


def ask(service: Service, prompt: str) -> str:
    return "".join(p.text for p in generate(service.url, prompt, deadline_s=120, max_tokens=TOKENS, end_id=-1, stream=True))


def storm(service: Service, count: int, meanwhile: Callable[[], None]) -> tuple[list[tuple[str, str]], Counter[str]]:
    """`count` streams at once, until all have ended: those that were answered, as (prompt, text), and how many errors of which kind."""
    answers: list[tuple[str, str]] = []
    errors: Counter[str] = Counter()

    def one(prompt: str) -> None:
        try:
            answers.append((prompt, ask(service, prompt)))
        except RemoteError as error:
            errors["queue" if "max_queue_size is" in str(error) else "other"] += 1

    threads = [threading.Thread(target=one, args=(PROMPTS[i % len(PROMPTS)],)) for i in range(count)]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join(150)
    assert not any(thread.is_alive() for thread in threads), "a stream hangs"
    assert len(answers) + sum(errors.values()) == count
    return answers, errors


def in_flight(service: Service) -> int:
    with service.executor() as executor:
        return executor.ping()["in_flight"]


def pools_are_whole(service: Service) -> bool:
    with service.executor() as executor:
        usage = executor.usage()
    return usage["device_pages_free"] == usage["device_pages"] and usage["decoding"] + usage["waiting"] + usage["prefilling"] == 0


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    service = Service()
    answers = {prompt: ask(service, prompt) for prompt in PROMPTS}
    service.stop()
    return answers


def test_64_streams_against_a_queue_of_16(expected: dict[str, str]) -> None:
    service = Service("--max-batch-size", "4", "--max-queue-size", "16")
    answers, errors = storm(service, 64, lambda: None)
    assert all(expected[p] == text for p, text in answers)
    assert set(errors) == {"queue"}, errors
    assert len(answers) >= 16, f"only {len(answers)} of 64 were answered"
    eventually(lambda: pools_are_whole(service), 10)
    assert ask(service, PROMPTS[0]) == expected[PROMPTS[0]]
    assert not any("fault" in line for line in service.log), service.log
    service.stop()


@pytest.mark.parametrize("victim", ["oasiskv.executor", "triton_python_backend_stub"])
def test_a_process_killed_under_load(expected: dict[str, str], victim: str) -> None:
    service = Service()
    since = 0.0

    def kill() -> None:
        nonlocal since
        eventually(lambda: in_flight(service) >= 12, 30)
        os.kill(service.descendants(victim)[-1], signal.SIGKILL)
        since = time.monotonic()

    answers, errors = storm(service, 16, kill)
    assert all(expected[p] == text for p, text in answers), "a success with another text"
    assert sum(errors.values()) > 0
    eventually(lambda: any("recovered" in line for line in service.log), 30)
    assert ask(service, PROMPTS[1]) == expected[PROMPTS[1]]
    assert time.monotonic() - since < 30, "new requests were not served within 30 s"
    eventually(lambda: pools_are_whole(service), 10)
    prefix = shared_prefix(service)
    service.stop()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))


def shared_prefix(service: Service) -> str:
    """Of the service's regions in /dev/shm: the name of its folder."""
    socket = next(p for p in Path(tempfile.gettempdir()).glob("oasiskv-*/executor.sock") if _owner(p) == service.process.pid)
    return socket.parent.name


def _owner(socket: Path) -> int:
    """The supervisor whose executor listens on it."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if str(socket) in (proc / "cmdline").read_text() and "oasiskv.executor" in (proc / "cmdline").read_text():
                return int((proc / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return 0


def test_sigterm_under_load(expected: dict[str, str]) -> None:
    service = Service("--drain", "1")
    prefix = shared_prefix(service)

    def terminate() -> None:
        eventually(lambda: in_flight(service) >= 12, 30)
        service.process.terminate()

    answers, errors = storm(service, 16, terminate)
    assert all(expected[p] == text for p, text in answers), "a success with another text"
    assert sum(errors.values()) > 0, "the drain was long enough for all of them: nothing was tested"
    assert service.process.wait(40) == 0
    assert not list(Path("/dev/shm").glob(f"{prefix}*")) and not (Path(tempfile.gettempdir()) / prefix).exists()
