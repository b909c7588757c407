"""What reward functions print, kept up to a size."""

from __future__ import annotations

import os

MOST_BYTES = 4 * 2**20
CHUNK_BYTES = 1 << 20
NOTE = b"[earlier output is dropped: this file keeps the last %d MiB at most]\n" % (MOST_BYTES // 2**20)


class OutputFile:
    """A log file that begins anew when it is full; not being able to write it is no failure of a reward."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._size = os.fstat(self._file).st_size
        except OSError:
            self._file, self._size = -1, 0

    def take(self, descriptor: int) -> bool:
        """Whether the pipe may hold more later; what it holds now goes to the file."""
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if chunk and self._file >= 0:
            self._write(chunk)
        return bool(chunk)

    def _write(self, chunk: bytes) -> None:
        try:
            if self._size + len(chunk) > MOST_BYTES:
                os.ftruncate(self._file, 0)
                self._size = os.write(self._file, NOTE)
            self._size += os.write(self._file, chunk)
        except OSError:
            os.close(self._file)
            self._file = -1
