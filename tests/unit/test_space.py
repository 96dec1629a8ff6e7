"""Room per file system: needs on one device are added, what is there is credited."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4 import space
from ds4.space import Need, Room

MOUNTINFO = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 259:5 / /data rw - xfs /dev/nvme1n1p1 rw
41 22 0:50 / /data2 rw - ext4 /dev/sdb1 rw
42 40 0:51 / /data/my\040weights rw master:1 - btrfs /dev/sdc1 rw
43 22 0:52 / /mnt/nas rw - nfs4 nas:/models rw
broken line
"""


def test_needs_on_one_device_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"/": 1, "/data": 2, "/opt": 1, "/var": 1}
    monkeypatch.setattr(
        space, "existing_parent", lambda path: next(p for p in ("/data", "/opt", "/var", "/") if path.startswith(p))
    )
    monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_dev=devices[path]))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_frsize=10))
    monkeypatch.setattr(space, "mount_of", lambda path: {"path": path, "source": "", "type": "", "uuid": ""})
    found = space.rooms(
        [Need("/opt/ds4/builds", 700, "build"), Need("/var/lib/kv", 400, "kv"), Need("/data/w", 900, "base")], 50
    )
    assert [(room.path, room.needed, room.free, room.missing) for room in found] == [
        ("/opt", 1100, 1000, 150),
        ("/data", 900, 1000, 0),
    ]
    assert found[0].text() == "/opt: 1.1 KiB needed (build 700 B, kv 400 B) + 50 B margin, 1000 B free"


def test_a_file_system_on_which_nothing_is_written_needs_no_margin() -> None:
    assert Room("/", 1, 0, [Need("/x", 0, "base")], 500).missing == 0
    assert Room("/", 1, 0, [Need("/x", 1, "base")], 500).missing == 501


def test_real_file_system(tmp_path: Path) -> None:
    (room,) = space.rooms([Need(str(tmp_path / "not/there/yet"), 1, "x")], 0)
    assert room.device == os.stat(tmp_path).st_dev
    assert room.free > 0


def test_credit_for_a_partial_file(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    assert space.credit(str(part), 1000) == 0
    with part.open("wb") as stream:
        stream.seek(10 << 20)
        stream.write(b"x" * 4096)
        os.fsync(stream.fileno())
    assert space.credit(str(part), 20 << 20) < 1 << 20, "a hole is not room that is taken"
    part.write_bytes(b"x" * 8192)
    os.sync()
    assert space.credit(str(part), 5000) == 5000


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/", "/"),
        ("/database", "/"),
        ("/data/w", "/data"),
        ("/data2/w", "/data2"),
        ("/data/my weights/x", "/data/my weights"),
        ("/mnt/nas", "/mnt/nas"),
    ],
)
def test_which_file_system_holds_a_path(path: str, mounted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "existing_parent", lambda path: path)
    assert space.mount_of(path, MOUNTINFO)["path"] == mounted


def test_mounts_as_process_1_sees_them(tmp_path: Path) -> None:
    found = space.mount_of(str(tmp_path))
    assert str(tmp_path).startswith(found["path"])
    assert found["type"]
