"""Compiled kernels of one process: which of triton's entries it has used, and which an artifact
gave it.

Triton asks here before it looks into its own cache (``cuda.kernels.caching``). What an artifact
gave lies in a folder of this process alone, and goes with it: triton's own cache holds what was
compiled on this machine, and nothing else.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from pilotlight.engine.cuda.compiled import (
    FACTS,
    IMAGE,
    LIBRARY,
    Entry,
    KernelsRefused,
    is_kept,
    unpack,
)
from pilotlight.engine.errors import NotWanted

log = structlog.get_logger()

FOLDER = "pilotlight-kernels-"
"""Beginning of the names of the processes' folders, in the system's temporary one."""
TRIES = 3
"""That a folder is made, if another process sweeps at that moment."""

Files = dict[str, str]
"""Paths, by the names that triton gives to files."""


class KernelStore:
    """See above. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._folder_lock = -1
        self._restored: dict[str, Files] = {}
        self._used: dict[str, Files] = {}
        self._compiled: list[str] = []
        self.noting = False
        """What is used is remembered, to be written down."""
        self.only = False
        """Triton's own cache is not looked into: to see what an artifact lacks."""
        self.broken = ""
        """Why restored entries were given up, if they were."""
        self._unwanted: Callable[[], bool] | None = None

    @contextmanager
    def wanted_until(self, unwanted: Callable[[], bool]) -> Generator[None]:
        """Kernels that are not there are compiled until ``unwanted``; where triton looks here."""
        self._unwanted = unwanted
        try:
            yield
        finally:
            self._unwanted = None

    def lack(self) -> None:
        """A kernel is not there, and would be compiled.

        Raises:
            NotWanted: it is for nobody (``wanted_until``).
        """
        if self._unwanted is not None and self._unwanted():
            raise NotWanted

    @property
    def compiled(self) -> tuple[str, ...]:
        """Images and libraries that were made since entries were restored last."""
        with self._lock:
            return tuple(self._compiled)

    @property
    def restored(self) -> int:
        """Entries that artifacts gave."""
        with self._lock:
            return len(self._restored)

    def file(self, key: str, name: str) -> str | None:
        """Where a restored file is; None: it is not."""
        with self._lock:
            return self._restored.get(key, {}).get(name)

    def kernel(self, key: str, facts: str) -> Files | None:
        """Where all of a restored kernel is, by the file with its facts; None: it is not."""
        with self._lock:
            files = self._restored.get(key, {})
            return dict(files) if facts in files else None

    def use(self, key: str, files: Files) -> None:
        """Triton has taken them."""
        if self.noting:
            with self._lock:
                self._used.setdefault(key, {}).update(
                    {name: path for name, path in files.items() if is_kept(name)}
                )

    def make(self, key: str, name: str) -> None:
        """Something was made that was not there."""
        if name.endswith((IMAGE, LIBRARY)):
            log.info("kernel compiled", action="kernel_compiled", kernel=name, key=key[:8])
            with self._lock:
                self._compiled.append(name)

    def noted(self) -> tuple[Entry, ...]:
        """All that this process has used, with the files' bytes.

        Raises:
            KernelsRefused: ``files``: one cannot be read any more.
        """
        with self._lock:
            used = {key: dict(files) for key, files in self._used.items()}
        try:
            return tuple(
                Entry(key, {name: Path(path).read_bytes() for name, path in files.items()})
                for key, files in used.items()
                if any(name.endswith((IMAGE, LIBRARY)) for name in files)
            )
        except OSError as error:
            raise KernelsRefused("files", f"a compiled kernel cannot be read: {error}") from error

    def restore(self, archive: bytes) -> int:
        """Has what an archive holds; how many entries.

        Raises:
            KernelsRefused: the archive does not hold together, or there is no room for its files.
                Nothing of it is there then.
        """
        entries = unpack(archive)
        try:
            folder = self._opened()
            written = {entry.key: _written(folder, entry) for entry in entries}
        except OSError as error:
            raise KernelsRefused("files", f"kernels cannot be written: {error}") from error
        with self._lock:
            self._restored.update(written)
            self._compiled.clear()
            self.broken = ""
        return len(entries)

    def give_up(self, why: str) -> bool:
        """Restored entries are used no more, for one of them does not work; False: there are
        none.
        """
        with self._lock:
            if not self._restored:
                return False
            self._restored.clear()
            self.broken = why
        log.error("restored kernels do not work", action="kernels_broken", error=why)
        return True

    def close(self) -> None:
        """Removes the files; nothing is restored any more."""
        with self._lock:
            self._restored.clear()
            folder, self._folder = self._folder, None
            lock, self._folder_lock = self._folder_lock, -1
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _opened(self) -> Path:
        """The folder of this process. Others, whose processes were killed, go."""
        with self._lock:
            if self._folder is None:
                _sweep()
                self._folder, self._folder_lock = _made()
            return self._folder


STORE = KernelStore()
"""Of this process: triton's cache is one, too."""
atexit.register(STORE.close)


def _written(folder: Path, entry: Entry) -> Files:
    """Paths of an entry's files. That of its facts is the last one."""
    place = folder / entry.key
    place.mkdir(exist_ok=True)
    paths: Files = {}
    for name, data in sorted(entry.files.items(), key=lambda file: file[0].endswith(FACTS)):
        # What another thread reads at this moment is not written into.
        fresh = place / f".{name}"
        fresh.write_bytes(data)
        fresh.replace(place / name)
        paths[name] = str(place / name)
    return paths


def _made() -> tuple[Path, int]:
    """A folder that this process holds, and the descriptor by which it does.

    Raises:
        OSError: there is no place for one.
    """
    for left in reversed(range(TRIES)):
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        try:
            descriptor = _locked(folder)
        except OSError:
            if not left:
                raise
            continue
        if folder.exists():
            return folder, descriptor
        # Another process swept it before it was held.
        os.close(descriptor)
    raise FileNotFoundError(f"folders in {tempfile.gettempdir()} are swept")


def _locked(folder: Path) -> int:
    """Holds a folder for as long as the descriptor is open.

    Raises:
        OSError: another process does.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep() -> None:
    """Removes folders that no process holds: the kernel lets a lock go with its process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                descriptor = _locked(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)
