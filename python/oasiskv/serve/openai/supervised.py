"""The front as the supervisor sees it: a child process and a real request that checks it."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oasiskv.errors import ConfigError, ServeError
from oasiskv.serve.child import Child
from oasiskv.serve.options import ServeOptions
from oasiskv.serve.runtime import Runtime


def check_packages() -> None:
    """Raises ConfigError naming the package that is missing."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"--openai-port: the package {package} is not installed: pip install 'oasiskv[openai]'")


def model_name(model: str) -> str:
    """What clients call `model`: an embedded model's own name, the last part of a path without `.gguf`."""
    return Path(model).name.removesuffix(".gguf") or model


def start(options: ServeOptions, runtime: Runtime) -> Child:
    """The process; it answers once it is connected to the executor. Raises ServeError."""
    command = [
        sys.executable, "-m", "oasiskv.serve.openai", "--socket", str(runtime.socket), "--authkey-file", str(runtime.authkey_file),
        "--host", options.host, "--port", str(options.openai_port), "--model-name", model_name(options.engine.model),
        "--parent-pid", str(os.getpid()), *(["--access-log"] if options.verbose else []),
    ]  # fmt: skip
    return Child("openai", command, runtime.cwd, dict(os.environ), options.verbose)


def probe(options: ServeOptions, deadline_s: float, give_up: Callable[[], bool]) -> None:
    """A completion of one token. Raises ServeError, also once `give_up` becomes true."""
    faults: queue.SimpleQueue[ServeError | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: faults.put(_complete(options, deadline_s)), name="oasiskv-probe", daemon=True).start()
    while True:
        try:
            fault = faults.get(timeout=0.1)
        except queue.Empty:
            if give_up():
                raise ServeError("given up") from None
        else:
            if fault:
                raise fault
            return


def _complete(options: ServeOptions, deadline_s: float) -> ServeError | None:
    body = {"model": model_name(options.engine.model), "prompt": "a", "max_tokens": 1, "temperature": 0}
    try:
        status, text = _ask(options, "POST", "/v1/completions", body, deadline_s)
    except ServeError as error:
        return error
    return None if status == 200 else ServeError(f"status {status}: {text[:500]}")


def responds(options: ServeOptions, deadline_s: float) -> bool:
    """Whether it answers what needs no engine: if not, the process itself hangs."""
    try:
        return _ask(options, "GET", "/v1/models", None, deadline_s)[0] == 200
    except ServeError:
        return False


def _ask(options: ServeOptions, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(options.host, options.openai_port, timeout=deadline_s)
    try:
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise ServeError(str(error) or type(error).__name__) from None
    finally:
        connection.close()
