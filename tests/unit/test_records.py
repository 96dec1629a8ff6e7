"""Records of verified files: they are believed without reading, so they must notice every change."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import records
from ds4.accounts import Account
from ds4.errors import Ds4Error

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"
CONTENT = os.urandom(3000)
ITEM = {"role": "base", "generation": "0731", "repo": "o/n", "revision": "1" * 40}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "base.gguf"
    found.write_bytes(CONTENT)
    hashed = records.hash_file(str(found), 1024)
    records.write(
        str(found), records.make(str(found), ITEM, hashed, how="fetched", source="https://h/x", trust="manifest")
    )
    return found


def test_hashing_gives_the_hash_and_a_crc_for_each_part(path: Path) -> None:
    read: list[int] = []
    hashed = records.hash_file(str(path), 1024, progress=read.append)
    assert hashed.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert hashed.crcs == [zlib.crc32(CONTENT[at : at + 1024]) for at in (0, 1024, 2048)]
    assert sum(read) == hashed.bytes == 3000


def test_hashing_can_copy(path: Path, tmp_path: Path) -> None:
    with (tmp_path / "copy").open("wb") as stream:
        records.hash_file(str(path), 1024, copy_to=stream.fileno())
    assert (tmp_path / "copy").read_bytes() == CONTENT


@pytest.mark.parametrize("change", [lambda p: os.truncate(p, 1500), lambda p: p.open("ab").write(b"more")])
def test_a_file_that_changes_while_it_is_read(path: Path, change: Any) -> None:
    done: list[int] = []

    def progress(count: int) -> None:
        if not done:
            change(path)
        done.append(count)

    with pytest.raises(Ds4Error, match="changed while it was read"):
        records.hash_file(str(path), 1024, progress=progress)


def test_record_and_schema(path: Path) -> None:
    record = records.read(str(path))
    assert record is not None
    schema = json.loads((SCHEMAS / "weights-record.schema.json").read_text())
    jsonschema.validate(record, schema)
    assert set(record) | {"damaged"} == set(schema["properties"])
    assert records.segment_crcs(record) == [zlib.crc32(CONTENT[at : at + 1024]) for at in (0, 1024, 2048)]


def test_a_good_file_is_believed(path: Path) -> None:
    assert records.quick_check(str(path)) == ""
    assert records.quick_check(str(path), hashlib.sha256(CONTENT).hexdigest()) == ""


def touch(path: Path) -> None:
    path.touch()


def rewrite(path: Path) -> None:
    path.write_bytes(CONTENT)


def replace(path: Path) -> None:
    status = path.stat()
    (path.parent / "new").write_bytes(CONTENT)
    os.utime(path.parent / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(path.parent / "new", path)


def truncate(path: Path) -> None:
    status = path.stat()
    os.truncate(path, 2999)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def forget(path: Path) -> None:
    os.unlink(records.record_path(str(path)))


def tear(path: Path) -> None:
    Path(records.record_path(str(path))).write_text('{"schema": 1, "fi')


def age(path: Path) -> None:
    record = records.read(str(path))
    assert record
    records.write(str(path), {**record, "schema": 0})


def damage(path: Path) -> None:
    record = records.read(str(path))
    assert record
    records.write(str(path), {**record, "damaged": "bytes 0-1023"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (touch, "changed since it was verified (mtime_ns"),
        (rewrite, "changed since it was verified (mtime_ns"),
        (replace, "changed since it was verified (inode"),
        (truncate, "changed since it was verified (bytes 3000 → 2999"),
        (link, "not a regular file"),
        (os.unlink, "No such file"),
        (forget, "never verified"),
        (tear, "never verified"),
        (age, "never verified"),
        (damage, "damaged at bytes 0-1023"),
    ],
)
def test_every_change_is_noticed(path: Path, change: Any, said: str) -> None:
    change(path)
    assert said in records.quick_check(str(path))


def test_a_file_that_the_service_user_cannot_read(path: Path) -> None:
    """Root may read everything: whoever asks for somebody else has to say for whom."""
    stranger = Account(4711, 4711, frozenset({4711}))
    path.chmod(0o644)
    assert records.quick_check(str(path), who=stranger) == ""
    path.chmod(0o600)
    assert records.quick_check(str(path), who=stranger) == f"{path.name} cannot be read by 4711"
    assert records.quick_check(str(path), who=Account(os.geteuid(), 0, frozenset())) == ""


def test_another_generation_under_this_name(path: Path) -> None:
    assert f"wanted {'ab' * 32}" in records.quick_check(str(path), "ab" * 32)


def test_where_two_readings_differ() -> None:
    assert records.differences(10, 25, [1, 2, 3], [1, 2, 3]) == ""
    assert records.differences(10, 25, [1, 2, 3], [1, 9, 9]) == "bytes 10-19, bytes 20-24"
    assert records.differences(10, 25, [1, 2, 3], [1, 2]) == "bytes 20-24"
    many = records.differences(10, 1000, [0] * 100, [1] * 100)
    assert many.startswith("bytes 0-9, ") and many.endswith("and 92 more places")
