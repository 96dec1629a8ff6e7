"""The weights: GGUF headers, the pairing rules of the two generations, and where the launch defaults look."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from typing import NamedTuple

from common import FatalError

BASE_NAMES = {
    "0731": "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf",
    "legacy": "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix.gguf",
}
DRAFTER_NAMES = {"0731": "DSpark-drafter-Q2K-Q8-0731.gguf", "legacy": "DSpark-drafter-Q2K-Q8.gguf"}
MTP_NAMES = {"legacy": "DeepSeek-V4-Flash-MTP-Q4K-Q8_0-F32.gguf"}
NAMES = {"base": BASE_NAMES, "drafter": DRAFTER_NAMES, "mtp": MTP_NAMES}
# What the real files take in memory, in KiB: the lab's files are small, its memory accounting is not.
SIMULATED_KIB = {"base": 86720111488 // 1024, "drafter": 6971241504 // 1024, "mtp": 3807602400 // 1024}
PIECE = 1024 * 1024


class Weights(NamedTuple):
    path: str
    name: str
    generation: str
    role: str
    intact: bool


def load(path: str, role: str) -> Weights:
    """Map a GGUF file and read it once, as the engine does.

    A file that is no GGUF, ends early or has another role cannot be opened. One whose bytes are wrong can: like the
    real engine, the stand-in then serves nonsense.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except (OSError, ValueError) as error:
        raise FatalError(f"ds4: cannot open model {path}: {getattr(error, 'strerror', None) or error}") from None
    found, start, length = _header(data, path)
    if start + length > size:
        raise FatalError(f"ds4: {path}: tensor data ends early ({size} bytes, {start + length} expected)")
    generation, actual = found.get("ds4.lab.generation", ""), found.get("ds4.lab.role", "")
    if actual and actual != role:
        raise FatalError(f"ds4: {path}: this is a {actual} file, not a {role}")
    known = NAMES[role].get(generation)
    intact = known is not None and _intact(data, known, start, length)
    _MAPPED.append(data)
    return Weights(path, found.get("general.name", ""), generation, role, intact)


_MAPPED: list[mmap.mmap] = []  # the mappings live as long as the process


def _header(data: mmap.mmap, path: str) -> tuple[dict[str, str], int, int]:
    """Strings of the header, offset of the tensor data and its length."""
    position = 0

    def take(form: str) -> int:
        nonlocal position
        try:
            (value,) = struct.unpack_from(form, data, position)
        except struct.error:
            raise FatalError(f"ds4: {path}: GGUF header ends early") from None
        position += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal position
        length = take("<Q")
        position += length
        return data[position - length : position].decode("utf-8", "replace")

    if data[:4] != b"GGUF":
        raise FatalError(f"ds4: {path}: not a GGUF file")
    position = 4
    take("<I")
    take("<Q")
    found = {}
    for _ in range(take("<Q")):
        key = text()
        if take("<I") != 8:  # a value that is no string: nothing of the lab's, so a foreign model
            return found, 0, 0
        found[key] = text()
    text()
    take("<I")
    length = take("<Q")
    take("<I")
    take("<Q")
    return found, -(-position // 32) * 32, length


def _intact(data: mmap.mmap, name: str, start: int, length: int) -> bool:
    for number in range(-(-length // PIECE)):
        offset = number * PIECE
        wanted = hashlib.shake_128(f"{name}:{number}".encode()).digest(min(PIECE, length - offset))
        if data[start + offset : start + offset + len(wanted)] != wanted:
            return False
    return True


def find(directory: str, variable: str, names: dict[str, str]) -> str | None:
    """A file of ``directory``: the one an environment variable names, else the newer generation, else the older."""
    wanted = os.environ.get(variable)
    for name in [wanted] if wanted else names.values():
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            return path
    return None
