# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is known about a verified file, kept beside it as ``<file>.record.json`` (docs/schemas/weights-record.schema.json).

Weights are hashed once. Afterwards size, modification time and inode say that the file is still the one that was
hashed; a file whose owner changed it, or that was restored from a backup, is hashed again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .accounts import Account, readable
from .errors import Ds4Error
from .files import read_json, write_json
from .process import user_name

SCHEMA = 1
SUFFIX = ".record.json"
FIRST_USE = "first-use"  # nobody publishes the hash: what was there at first is what holds
BUFFER_BYTES = 1024 * 1024


class Hashed(NamedTuple):
    """A file read from beginning to end.

    Attributes:
        sha256: of the whole.
        segment_bytes: length of the parts that have a CRC-32 of their own.
        crcs: one per part, so that damage can be found and named later.
        bytes, mtime_ns, inode: as they were while reading.
    """

    sha256: str
    segment_bytes: int
    crcs: list[int]
    bytes: int
    mtime_ns: int
    inode: int


def hash_file(
    path: str,
    segment_bytes: int,
    *,
    progress: Callable[[int], None] = lambda count: None,
    drop_cache: bool = False,
    copy_to: int | None = None,
) -> Hashed:
    """Read a file once, in bounded memory.

    Args:
        segment_bytes: length of the parts that get a CRC-32.
        progress: called with the bytes of every read; may wait or raise.
        drop_cache: leave no pages behind in the page cache.
        copy_to: descriptor that receives the bytes too.

    Raises:
        OSError: the file cannot be read.
        Ds4Error: somebody changed it meanwhile.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    digest = hashlib.sha256()
    crcs: list[int] = []
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(handle)
        at = 0
        while at < before.st_size:
            crc, end = 0, min(at + segment_bytes, before.st_size)
            start = at
            while at < end:
                count = os.preadv(handle, [buffer[: min(len(buffer), end - at)]], at)
                if not count:
                    break
                digest.update(buffer[:count])
                crc = zlib.crc32(buffer[:count], crc)
                if copy_to is not None:
                    _write_all(copy_to, buffer[:count])
                at += count
                progress(count)
            crcs.append(crc)
            if drop_cache:
                os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)
                if copy_to is not None:  # only what is on the disk can be dropped
                    os.fdatasync(copy_to)
                    os.posix_fadvise(copy_to, start, end - start, os.POSIX_FADV_DONTNEED)
            if at < end:
                break
        after = os.fstat(handle)
    finally:
        os.close(handle)
    if at != after.st_size or before.st_mtime_ns != after.st_mtime_ns:
        raise Ds4Error(
            f"{path} changed while it was read",
            found=f"{after.st_size} bytes now, {before.st_size} before",
            required="a file that nobody writes to",
            cure="end what writes to it, then run again",
        )
    return Hashed(digest.hexdigest(), segment_bytes, crcs, at, after.st_mtime_ns, after.st_ino)


def _write_all(handle: int, view: memoryview) -> None:
    while view:
        view = view[os.write(handle, view) :]


def record_path(path: str) -> str:
    """Where the record of a weights file lies."""
    return path + SUFFIX


def make(path: str, item: dict[str, Any], hashed: Hashed, *, how: str, source: str, trust: str) -> dict[str, Any]:
    """A record.

    Args:
        path: of the file under its final name, or the one it is about to get.
        item: the plan's entry (role, generation, revision, repo).
        how: ``fetched``, ``linked``, ``reflinked``, ``copied`` or ``found``.
        source: address or path that it came from, without query.
        trust: where the expected hash came from: ``manifest``, ``hub`` or ``first-use``.
    """
    return {
        "schema": SCHEMA,
        "file": os.path.basename(path),
        "role": item["role"],
        "generation": item.get("generation", ""),
        "repo": item.get("repo", ""),
        "revision": item.get("revision", ""),
        "bytes": hashed.bytes,
        "mtime_ns": hashed.mtime_ns,
        "inode": hashed.inode,
        "sha256": hashed.sha256,
        "trust": trust,
        "how": how,
        "source": source,
        "segment_bytes": hashed.segment_bytes,
        "segment_crc32": "".join(f"{crc:08x}" for crc in hashed.crcs),
        "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def first_use(name: str, sha256: str) -> str:
    """One sentence for people about a file without a published hash."""
    return f"{name}: nobody publishes its hash; recorded at first use: sha256 {sha256}"


def write(path: str, record: dict[str, Any]) -> None:
    """Store the record of ``path`` beside it."""
    write_json(record_path(path), record)


def read(path: str) -> dict[str, Any] | None:
    """The record of a weights file, or None when there is none that can be used."""
    record = read_json(record_path(path))
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def differences(step: int, size: int, first: Sequence[int], second: Sequence[int]) -> str:
    """Byte ranges in which two readings of one file differ; empty when they do not.

    Args:
        step: bytes of a segment.
        size: bytes of the file.
        first, second: CRC-32 of every segment.
    """
    ranges = [
        f"bytes {number * step}-{min((number + 1) * step, size) - 1}"
        for number, (one, other) in enumerate(itertools.zip_longest(first, second))
        if one != other
    ]
    return ", ".join(ranges[:8]) + (f" and {len(ranges) - 8} more places" if len(ranges) > 8 else "")


def segment_crcs(record: dict[str, Any]) -> list[int]:
    """The CRC-32 of every segment, as recorded."""
    text = str(record.get("segment_crc32", ""))
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def quick_check(path: str, sha256: str = "", who: Account | None = None) -> str:
    """Say what speaks against using this file, without reading it; empty when nothing does.

    Args:
        path: the weights file; its record lies beside it.
        sha256: hash that it must have; empty accepts the recorded one.
        who: account that is going to read it; None: the caller.
    """
    name = os.path.basename(path)
    try:
        stat = os.lstat(path)
    except OSError as error:
        return f"{name}: {error.strerror}"
    record = read(path)
    if record is None:
        return f"{name} has no record: it was never verified"
    if not os.path.isfile(path) or os.path.islink(path):
        return f"{name} is not a regular file"
    if record.get("damaged"):
        return f"{name} is damaged at {record['damaged']}"
    if sha256 and record["sha256"] != sha256:
        return f"{name} has the content sha256 {record['sha256']}, wanted {sha256}"
    found = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    changed = [f"{key} {record[key]} → {value}" for key, value in found.items() if record[key] != value]
    if changed:
        return f"{name} changed since it was verified ({', '.join(changed)})"
    if not (os.access(path, os.R_OK) if who is None else readable(stat, who)):
        return f"{name} cannot be read by {user_name(os.geteuid() if who is None else who.uid)}"
    return ""
