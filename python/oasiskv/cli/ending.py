"""How a command ends: its exit codes, and what SIGINT does while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NoReturn

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def leave(*_: Any) -> NoReturn:
    """SIGINT's handler until a command is ready: nothing needs cleaning up yet."""
    with contextlib.suppress(OSError):
        os.write(2, b"oasiskv: interrupted\n")
    os._exit(INTERRUPTED)


def interruptible() -> None:
    """From here on SIGINT raises KeyboardInterrupt, so that what runs can clean up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
