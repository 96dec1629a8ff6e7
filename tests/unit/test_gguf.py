"""The header of a GGUF file, and what is served instead of one."""

from __future__ import annotations

import struct

import pytest

from ds4 import gguf
from ds4.errors import Ds4Error


def header(version: int = 3, tensors: int = 1328, metadata: int = 60) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_the_header_says(version: int) -> None:
    assert gguf.parse(header(version) + b"more", "x.gguf") == gguf.Header(version, 1328, 60)


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (b"<!DOCTYPE html><html><head>", "a web page"),
        (b"\n  <HTML>" + b" " * 30, "a web page"),
        (b'<?xml version="1.0"?><Error><Code>', "a web page"),
        (b'{"error": "Repository not found"}', "JSON text"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (bytes(24), "zeros"),
        (b"", "an empty file"),
        (b"PK\x03\x04" + bytes(30), "bytes 50 4b 03 04 00 00 00 00"),
        (header()[:20], "bytes 47 47 55 46 03 00 00 00"),
        (header(1), "version 1"),
        (header(0x03000000), "version 50331648"),
        (header(tensors=1 << 40), f"{1 << 40} tensors"),
        (header(metadata=1 << 60), f"{1 << 60} metadata pairs"),
    ],
)
def test_says_what_it_looks_like(start: bytes, found: str) -> None:
    with pytest.raises(Ds4Error) as caught:
        gguf.parse(start, "base.gguf")
    assert "base.gguf is not a GGUF file" in caught.value.what
    assert found in caught.value.found
    assert "weights_sources" in caught.value.cure
