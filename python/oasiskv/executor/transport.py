"""Connections: an AF_UNIX stream of length-prefixed frames, both sides proving that they know the key."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from oasiskv.errors import ConfigError, EngineError

HANDSHAKE_S = 5.0
SEND_S = 10.0  # a peer that reads nothing for so long is given up
_MAX_PATH_BYTES = 107  # of sockaddr_un


def write_key(path: Path) -> None:
    """Make a fresh key that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))


def read_key(path: Path) -> bytes:
    """Raises ConfigError for a key that is missing, or that others can read."""
    try:
        mode, key = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"authkey file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"authkey file {path} has mode {stat.S_IMODE(mode):o}: others can read it; chmod 600 and make a new key")
    if len(key) < 16:
        raise ConfigError(f"authkey file {path} holds {len(key)} bytes: need at least 16")
    return key


def check_path(path: Path) -> None:
    """Raises ConfigError for a path that the kernel would refuse."""
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise ConfigError(
            f"socket {path}: {length} bytes, but a local socket's path has at most {_MAX_PATH_BYTES}; set TMPDIR to a shorter one"
        )


def listen(path: Path) -> socket.socket:
    """A listening socket only this user can reach. Raises ConfigError when another executor answers there."""
    check_path(path)
    if path.is_symlink() or path.exists():
        _unlink_dead(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ConfigError(f"socket {path}: {error.strerror}") from None
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def _unlink_dead(path: Path) -> None:
    """Remove the socket of an executor that was killed, and nothing else. Raises ConfigError."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"socket {path}: there is something there that is not a socket; give another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"socket {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"socket {path}: another executor is listening there")


def accept(raw: socket.socket, key: bytes) -> Connection:
    """The server's half of the handshake, bounded in time. Raises OSError, EOFError or AuthenticationError."""
    return _prove(raw, key, server=True, timeout_s=HANDSHAKE_S)


def connect(path: Path, key: bytes, deadline_s: float) -> Connection:
    """Connect, retrying until an executor answers. Raises EngineError once `deadline_s` seconds have passed."""
    check_path(path)
    end = time.monotonic() + deadline_s
    while True:
        raw = socket.socket(socket.AF_UNIX)
        try:
            raw.connect(str(path))
            return _prove(raw, key, server=False, timeout_s=max(0.1, min(HANDSHAKE_S, end - time.monotonic())))
        except AuthenticationError:
            raise EngineError(f"the executor at {path} has another key: start client and executor with the same authkey file") from None
        except (OSError, EOFError) as error:
            raw.close()
            if time.monotonic() >= end:
                raise EngineError(
                    f"no executor answers at {path} within {deadline_s:g} s ({error or type(error).__name__}): is it running?"
                ) from None
            time.sleep(0.05)


def _prove(raw: socket.socket, key: bytes, server: bool, timeout_s: float) -> Connection:
    # Connection reads the bare descriptor, so the limits are set in the kernel, not on the Python socket.
    raw.setblocking(True)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_S))
    with socket.socket(fileno=os.dup(raw.fileno())) as options:
        connection = Connection(raw.detach())
        try:
            if server:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
            else:
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
        except BaseException:
            connection.close()
            raise
        options.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))
    return connection


def hang_up(connection: Connection) -> None:
    """End a connection so that a thread blocked in it wakes up; its reader closes it."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # closed already, by either side


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
