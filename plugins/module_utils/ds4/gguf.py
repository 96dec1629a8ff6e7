# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The first bytes of a GGUF file, so that a web page under a model's name is found at once and not after 80 GiB."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from .errors import Ds4Error

HEADER_BYTES = 24  # magic, version, tensor count, metadata count (GGUF versions 2 and 3, little endian)
_VERSIONS = (2, 3)
_PLAUSIBLE = 1 << 24  # far above any real number of tensors or metadata pairs


class Header(NamedTuple):
    """What the first 24 bytes say."""

    version: int
    tensors: int
    metadata: int


def parse(start: bytes, name: str) -> Header:
    """Read the header of a GGUF file.

    Args:
        start: the first bytes of the file, at least :data:`HEADER_BYTES`.
        name: of the file, for the message.

    Raises:
        Ds4Error: it is something else; the message says what it looks like.
    """
    if len(start) < HEADER_BYTES or not start.startswith(b"GGUF"):
        raise _other(name, _looks_like(start))
    version, tensors, metadata = struct.unpack_from("<IQQ", start, 4)
    if version not in _VERSIONS or tensors > _PLAUSIBLE or metadata > _PLAUSIBLE:
        raise _other(name, f"GGUF magic with version {version}, {tensors} tensors, {metadata} metadata pairs")
    return Header(version, tensors, metadata)


def check_file(path: str) -> None:
    """What can be seen of a file whose hash nobody publishes: its header, and that no download is half done.

    Raises:
        Ds4Error: it is something else, or not whole.
        OSError: it cannot be read.
    """
    control = f"{path}.aria2"
    if os.path.lexists(control):
        raise Ds4Error(
            f"{path} is a download that was never finished",
            found=control,
            required="a whole file",
            cure="finish it with what began it, or remove both",
        )
    with open(path, "rb") as stream:
        parse(stream.read(HEADER_BYTES), path)


def _other(name: str, found: str) -> Ds4Error:
    return Ds4Error(
        f"{name} is not a GGUF file",
        found=found,
        required="the magic GGUF, version 2 or 3, and plausible counts",
        cure="check weights_sources: a login page, an error page or another file is served under this name",
    )


def _looks_like(start: bytes) -> str:
    text = start.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<")):
        return "a web page"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    if not start.strip(b"\0"):
        return "zeros" if start else "an empty file"
    if text.startswith((b"{", b"[")):
        return "JSON text"
    return f"bytes {start[:8].hex(' ')}"
