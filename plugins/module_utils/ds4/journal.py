# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which segments of a partial file are on disk. Append-only; every line carries its own proof.

A line is written only after the data it speaks of was synced. Lines that a power loss tore, zeroed or mixed up fail
their check and are ignored, so the worst that damage can do is that a segment is fetched again. Nothing depends on a
header that could be lost: each line also names the file it belongs to.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

_LINE = re.compile(rb"seg ([0-9a-f]{16}) ([0-9]{1,9}) ([0-9a-f]{8}) ([0-9a-f]{16})")


class Loaded(NamedTuple):
    """What a journal says.

    Attributes:
        segments: number of a segment → CRC-32 of its data.
        damaged: lines that failed their check.
        foreign: intact lines of another file or another division into segments.
    """

    segments: dict[int, int]
    damaged: int
    foreign: int


def identity(sha256: str, size: int, segment_bytes: int) -> str:
    """16 hex digits that tie a line to one content and one division into segments."""
    return hashlib.blake2b(f"{sha256} {size} {segment_bytes}".encode(), digest_size=8).hexdigest()


def line(owner: str, segment: int, crc: int) -> bytes:
    """One line, with its newline."""
    body = f"seg {owner} {segment} {crc:08x}".encode()
    return body + b" " + _check(body) + b"\n"


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).hexdigest().encode()


def parse(data: bytes, owner: str) -> Loaded:
    """Read a journal, however damaged. A later line about the same segment wins."""
    segments: dict[int, int] = {}
    damaged = foreign = 0
    for text in data.split(b"\n"):
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if not found or _check(text[:-17]) != found.group(4):
            damaged += 1
        elif found.group(1).decode() != owner:
            foreign += 1
        else:
            segments[int(found.group(2))] = int(found.group(3), 16)
    return Loaded(segments, damaged, foreign)


def load(path: str, owner: str) -> Loaded:
    """Read a journal file; an absent one says nothing."""
    try:
        with open(path, "rb") as stream:
            return parse(stream.read(), owner)
    except FileNotFoundError:
        return Loaded({}, 0, 0)


class Journal:
    """The open journal of one partial file.

    Raises:
        OSError: from every method: the disk is full or broken.
    """

    def __init__(self, path: str, owner: str) -> None:
        self.path = path
        self._owner = owner
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":  # a torn last line must not swallow the next one
            os.write(self._handle, b"\n")

    def append(self, segments: Iterable[tuple[int, int]]) -> None:
        """Record (segment, CRC-32) pairs whose data is on disk, and wait until the record is too."""
        data = b"".join(line(self._owner, segment, crc) for segment, crc in segments)
        while data:  # a disk that fills up may take only a part
            data = data[os.write(self._handle, data) :]
        os.fdatasync(self._handle)

    def close(self) -> None:
        os.close(self._handle)
