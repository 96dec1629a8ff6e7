# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Small deterministic GGUF files that stand for the engine's weights, and the reader that recognises them.

Layout of a lab file (a valid GGUF version 3, little endian, no padding rule broken)::

    "GGUF"  u32 version=3  u64 tensors=1  u64 pairs
    pairs × { string key, u32 type=8 (string), string value }         string = u64 length + bytes
    1 tensor: string "lab.bytes", u32 dims=1, u64 count, u32 type=24 (I8), u64 offset=0
    zeros up to a multiple of 32, then ``count`` bytes of a stream that depends only on the file's name

Metadata keys: ``general.name`` (what a person reads), ``ds4.lab.generation`` ("0731" or "legacy") and
``ds4.lab.role`` ("base", "drafter" or "mtp"). A foreign file has no ``ds4.lab.*`` keys.

As with the real files, both base files have the SAME size and both generations' repositories and file names are the
real ones; only the bytes, and so the hashes, are the lab's own.

``describe`` needs nothing but ``struct``: the stand-in engine carries a copy of it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

MIB = 1024 * 1024
ALIGNMENT = 32
CHUNK = MIB
TYPE_STRING = 8
TYPE_I8 = 24

BASE_REPO = "antirez/deepseek-v4-gguf"
BASE_REVISION = "1cd7b564460821938add0475a60b942c409295e0"
DRAFTER_REPO = "bleysg/DeepSeek-V4-Flash-DSpark-drafter-GGUF"
DRAFTER_REVISION = "81c6fdd38f9582da45ba27f0ed7b63bcd3ea3b62"

DEFAULT_SIZES = {"base": 24 * MIB, "drafter": 6 * MIB, "mtp": 4 * MIB}  # bytes


class LabFile(NamedTuple):
    """One file of the lab's hub. ``generation`` and ``role`` are empty for a file that is not the engine's."""

    generation: str
    role: str
    repo: str
    revision: str
    file: str
    name: str


FILES = (
    LabFile(
        "0731",
        "base",
        BASE_REPO,
        BASE_REVISION,
        "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf",
        "Lab DeepSeek V4 Flash 0731",
    ),
    LabFile(
        "0731", "drafter", DRAFTER_REPO, DRAFTER_REVISION, "DSpark-drafter-Q2K-Q8-0731.gguf", "Lab DSpark drafter 0731"
    ),
    LabFile(
        "legacy",
        "base",
        BASE_REPO,
        BASE_REVISION,
        "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix.gguf",
        "Lab DeepSeek V4 Flash legacy",
    ),
    LabFile(
        "legacy", "drafter", DRAFTER_REPO, DRAFTER_REVISION, "DSpark-drafter-Q2K-Q8.gguf", "Lab DSpark drafter legacy"
    ),
    LabFile(
        "legacy",
        "mtp",
        BASE_REPO,
        BASE_REVISION,
        "DeepSeek-V4-Flash-MTP-Q4K-Q8_0-F32.gguf",
        "Lab DeepSeek V4 Flash MTP legacy",
    ),
)
FOREIGN = LabFile("", "", BASE_REPO, BASE_REVISION, "other.gguf", "A model of somebody else")


def describe(path: str) -> dict[str, str]:
    """Read the header of a GGUF file.

    Returns:
        ``{"name", "generation", "role"}`` from ``general.name``, ``ds4.lab.generation`` and ``ds4.lab.role``; a key
        that the file does not carry is an empty string.

    Raises:
        ValueError: not a GGUF version 3 file, or its header ends early.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:

        def number(form: str) -> int:
            size = struct.calcsize(form)
            data = stream.read(size)
            if len(data) != size:
                raise ValueError(f"{path}: header ends early")
            return int(struct.unpack(form, data)[0])

        def string() -> str:
            length = number("<Q")
            data = stream.read(min(length, 65536))
            if len(data) != length:
                raise ValueError(f"{path}: header ends early")
            return data.decode("utf-8", "replace")

        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path}: no GGUF magic")
        version = number("<I")
        if version != 3:
            raise ValueError(f"{path}: GGUF version {version}, not 3")
        number("<Q")  # tensors
        found = {}
        for _ in range(number("<Q")):
            key = string()
            kind = number("<I")
            if kind != 8:  # only strings are written by the lab; other files may carry more, which is not ours to read
                break
            found[key] = string()
    return {
        "name": found.get("general.name", ""),
        "generation": found.get("ds4.lab.generation", ""),
        "role": found.get("ds4.lab.role", ""),
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _header(file: LabFile, size: int) -> bytes:
    pairs = {"general.architecture": "ds4lab", "general.name": file.name}
    if file.generation:
        pairs.update({"ds4.lab.generation": file.generation, "ds4.lab.role": file.role})
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs))
    for key, value in pairs.items():
        head += _string(key) + struct.pack("<I", TYPE_STRING) + _string(value)
    info = _string("lab.bytes") + struct.pack("<I", 1)
    start = -(-(len(head) + len(info) + struct.calcsize("<QIQ")) // ALIGNMENT) * ALIGNMENT
    if size <= start:
        raise ValueError(f"{file.file}: a size of {size} bytes leaves no room behind the header of {start} bytes")
    head += info + struct.pack("<QIQ", size - start, TYPE_I8, 0)
    return head.ljust(start, b"\0")


def content(file: LabFile, size: int) -> Iterator[bytes]:
    """The bytes of a lab file, in pieces of at most 1 MiB. No two pieces are alike, so a misplaced one is noticed."""
    head = _header(file, size)
    yield head
    left = size - len(head)
    number = 0
    while left > 0:
        piece = hashlib.shake_128(f"{file.file}:{number}".encode()).digest(min(CHUNK, left))
        yield piece
        left -= len(piece)
        number += 1


@functools.cache
def _sha256(file: LabFile, size: int) -> str:
    digest = hashlib.sha256()
    for piece in content(file, size):
        digest.update(piece)
    return digest.hexdigest()


def manifest(sizes: dict[str, int] | None = None, *, first_use: bool = False) -> dict[str, dict[str, dict[str, Any]]]:
    """What ``ds4_weights`` must be in an inventory of the lab.

    Args:
        sizes: bytes per role (base, drafter, mtp); ``DEFAULT_SIZES`` where a role is not named.
        first_use: leave out bytes and sha256 of the legacy drafter, for which no public hash exists either.
    """
    wanted = DEFAULT_SIZES | (sizes or {})
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for file in FILES:
        entry: dict[str, Any] = {"repo": file.repo, "revision": file.revision, "file": file.file}
        if not (first_use and file.generation == "legacy" and file.role == "drafter"):
            size = wanted[file.role]
            entry.update(bytes=size, sha256=_sha256(file, size))
        result.setdefault(file.generation, {})[file.role] = entry
    return result


def _is_written(file: LabFile, size: int, path: str) -> bool:
    head = _header(file, size)
    try:
        with open(path, "rb") as stream:
            return os.fstat(stream.fileno()).st_size == size and stream.read(len(head)) == head
    except OSError:
        return False


def write_file(file: LabFile, size: int, path: str) -> str:
    """Write one lab file unless one of that size and header is there, and return its path."""
    if not _is_written(file, size, path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        temporary = f"{path}.{os.getpid()}.part"
        with open(temporary, "wb") as stream:
            for piece in content(file, size):
                stream.write(piece)
        os.replace(temporary, path)
    return path


def write(root: str, sizes: dict[str, int] | None = None, *, foreign: bool = True) -> list[str]:
    """Lay out all lab files as the hub serves them: ``root/OWNER/NAME/REVISION/FILE`` and a link ``main``.

    Files that exist with the right size are kept, so the second call costs nothing.

    Args:
        root: directory that the hub serves.
        sizes: bytes per role, as for ``manifest``.
        foreign: also write a GGUF file that belongs to nobody of ours.
    """
    wanted = DEFAULT_SIZES | (sizes or {})
    paths = []
    for file in (*FILES, *((FOREIGN,) if foreign else ())):
        repo = os.path.join(root, file.repo)
        path = os.path.join(repo, file.revision, file.file)
        paths.append(write_file(file, wanted.get(file.role, MIB), path))
        main = os.path.join(repo, "main")
        with contextlib.suppress(FileExistsError):
            os.symlink(file.revision, main)
    return paths
