"""What a running server keeps outside its processes: one private folder, and regions in /dev/shm under one prefix."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

_NAME = "oasiskv-"
_SHM = Path("/dev/shm")


class Runtime:
    """A context manager: the folder is made on entering, and it and the regions are removed on leaving.

    The folder's name is also the regions' prefix, and its lock is held while the owner lives, so that a later start can tell
    what a killed server left behind and remove it.
    """

    def __enter__(self) -> Runtime:
        sweep()
        self.folder, self._lock = _locked_folder()
        self.shm_prefix = self.folder.name
        self.cwd = self.folder / "cwd"  # Triton's stubs import from where they start: keep it empty
        self.cwd.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_shm()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @property
    def socket(self) -> Path:
        return self.folder / "executor.sock"

    @property
    def authkey_file(self) -> Path:
        return self.folder / "authkey"

    def clean_shm(self) -> None:
        """Remove the regions; only while no server of this runtime runs."""
        _clean_shm(self.shm_prefix)


def _locked_folder() -> tuple[Path, TextIO]:
    """A private folder and the lock that is held on it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_NAME))  # mode 0700
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "lock").exists():
            return folder, lock
        lock.close()  # the sweep of another start had the lock first and took the folder away


def sweep() -> None:
    """Remove what servers of this user left that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_NAME}*/lock"):
        try:
            with lock.open("r+") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clean_shm(lock.parent.name)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # another user's, in use, or gone by now


def _clean_shm(prefix: str) -> None:
    for region in _SHM.iterdir():
        if region.name.startswith(prefix):
            region.unlink(missing_ok=True)
