"""Files out of the page cache, and how much of them is in it (Linux)."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(file: Path) -> int:
    """Bytes of a file's pages that are in the page cache, as mincore(2) says.

    Raises:
        OSError: It cannot be asked.
    """
    size = file.stat().st_size
    if not size:
        return 0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # A private mapping of a file that is only read can be opened for writing, which ctypes insists on.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
        del first  # the mapping cannot be closed while it is referred to
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def evict(files: Iterable[Path]) -> None:
    """Take files out of the page cache.

    Raises:
        OSError: Some of a file is still there afterwards (in tmpfs, all of it).
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        left = resident_bytes(file)
        if left:
            raise OSError(0, f"{left} bytes of {file} are still in the page cache: is it on a disk?")


def disk_of(file: Path) -> str:
    """The file system that a file is on, in words."""
    path, best = file.resolve(), ("", "unknown", "")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        device, mount, kind = line.split()[:3]
        if path.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = mount, kind, device
    return f"{best[1]} on {best[2]}"
