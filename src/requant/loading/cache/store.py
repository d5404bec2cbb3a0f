"""The folder of a cache: entries by key, what is being written, and what has been left behind.

Whatever happens, and with any number of processes, a folder that has a key as its name is complete: it is written
under another name, flushed to the disk, and only then renamed.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from requant.errors import CheckpointError, ConfigError
from requant.formats import CONTRACT_VERSION
from requant.loading.cache.entry import DESCRIPTION, Entry, read_description
from requant.loading.cache.identity import Identity, fingerprint
from requant.loading.headers import read_headers

logger = logging.getLogger(__name__)

LOCK = "writing"
"""In a folder that is not complete: locked (shared) by its writers, so that others can tell whether they live."""

_YOUNG_SECONDS = 60.0
_PARTIAL, _TRASH = ".partial", ".trash"

USABLE = "usable"
BEING_WRITTEN = "being written"


@dataclass(frozen=True)
class EntryState:
    """What is in one folder of a cache.

    Attributes:
        folder: The folder.
        state: :data:`USABLE`, :data:`BEING_WRITTEN`, or why it can never be of use again.
        nbytes: Bytes that it takes.
        last_used: Seconds since 1970.
        description: What it is for; {} if that is not known.
    """

    folder: Path
    state: str
    nbytes: int
    last_used: float
    description: dict[str, Any]

    @property
    def useless(self) -> bool:
        """Whether nobody will miss it."""
        return self.state not in (USABLE, BEING_WRITTEN)


class Store:
    """A cache in a folder.

    Args:
        folder: Made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    def find(self, identity: Identity) -> Entry | None:
        """The entry for a load, which the caller closes; None if there is none, or what there is is damaged."""
        folder = self.folder / identity.key
        if not folder.is_dir():
            return None
        try:
            entry = Entry(folder)
        except CheckpointError as error:
            logger.warning("an entry of the cache is damaged, and will be made anew: %s", error)
            return None
        entry.touch()
        return entry

    def check_writable(self) -> None:
        """Make the folder.

        Raises:
            ConfigError: Nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".{os.getpid()}{_TRASH}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise ConfigError(
                f"cannot write to the cache {self.folder}: {error.strerror or error}; "
                "--online-quant-cache takes a writable folder"
            ) from error

    def partial(self, identity: Identity, nonce: int) -> Path:
        """Where one load's ranks write, all of them with one ``nonce``."""
        return self.folder / f".{identity.key}.{nonce:x}{_PARTIAL}"

    def commit(self, partial: Path, identity: Identity) -> bool:
        """Let what has been written be seen; False if another process was first."""
        final = self.folder / identity.key
        sync_folder(partial)
        while True:
            try:
                partial.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
                try:
                    Entry(final).close()
                except CheckpointError:
                    self._discard(final)
                    continue
                self._discard(partial)
                return False
            sync_folder(self.folder)
            with suppress(OSError):
                (final / LOCK).unlink()
            return True

    def remove(self, folder: Path) -> bool:
        """Remove an entry, or what has been left behind; False if it is in use."""
        with _unused(folder) as unused:
            if unused:
                self._discard(folder)
        return unused

    def remove_leftovers(self, but: Path) -> None:
        """Remove what processes that no longer live have not finished, ``but`` one."""
        for folder in self._folders():
            if folder.name.startswith(".") and folder != but:
                self.remove(folder)

    def states(self) -> list[EntryState]:
        """What is there, most recently used first.

        Raises:
            ConfigError: The folder cannot be read.
        """
        found: dict[str, str | None] = {}
        states = [self._state(folder, found) for folder in self._folders()]
        return sorted(states, key=lambda state: -state.last_used)

    def _state(self, folder: Path, fingerprints: dict[str, str | None]) -> EntryState:
        nbytes, last_used = _size_and_time(folder)
        description: dict[str, Any] = {}
        with suppress(CheckpointError):
            description = read_description(folder)
        if folder.name.startswith("."):
            with _unused(folder) as unused:
                state = "left behind by a process that was ended" if unused else BEING_WRITTEN
        else:
            state = _judge(folder, description, fingerprints)
        return EntryState(folder, state, nbytes, last_used, description)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.is_dir() and _is_ours(path))
        except OSError as error:
            raise ConfigError(f"cannot read the cache {self.folder}: {error.strerror or error}") from error

    def _discard(self, folder: Path) -> None:
        """Remove a folder: at once out of sight, then from the disk."""
        trash = self.folder / f".{folder.name.lstrip('.')}.{os.getpid()}{_TRASH}"
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        except OSError:  # something of that name is there: what was to be removed twice
            trash = folder
        shutil.rmtree(trash, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Whether this is a folder that a store made: it may have been given one that holds other things, too."""
    name = path.name
    if name.startswith("."):
        return name.endswith((_PARTIAL, _TRASH))
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _judge(folder: Path, description: dict[str, Any], fingerprints: dict[str, str | None]) -> str:
    identity = description.get("identity") or {}
    if not identity:
        return "damaged"
    if identity.get("contract") != CONTRACT_VERSION:
        return "made by another version of requant"
    try:
        Entry(folder).close()
    except CheckpointError:
        return "damaged"
    source = str(identity.get("folder"))
    if source not in fingerprints:
        try:
            fingerprints[source] = fingerprint(read_headers(Path(source)))
        except CheckpointError:
            fingerprints[source] = None
    if fingerprints[source] is None:
        return "the checkpoint is gone"
    return USABLE if fingerprints[source] == identity.get("fingerprint") else "the checkpoint has changed"


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether nobody reads or writes a folder, and nobody begins to while the context lasts."""
    partial = folder.name.endswith(_PARTIAL)
    try:
        lock = os.open(folder / (LOCK if partial else DESCRIPTION), os.O_RDONLY)
    except OSError:  # damaged, or its writer was ended, or has only just begun
        yield not partial or time.time() - _size_and_time(folder)[1] > _YOUNG_SECONDS
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _size_and_time(folder: Path) -> tuple[int, float]:
    """Bytes that a folder takes on the disk's account, and when it was last used."""
    nbytes, last = 0, 0.0
    with suppress(OSError):
        last = folder.stat().st_mtime
        for file in folder.iterdir():
            state = file.stat()
            nbytes += state.st_size
            last = state.st_mtime if file.name == DESCRIPTION else last
    return nbytes, last


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
