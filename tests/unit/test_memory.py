"""Reading meminfo, waiting on it, and who uses memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds4 import memory
from ds4.errors import Ds4Error

GB10 = """MemTotal:       127535152 kB
MemFree:         3145728 kB
MemAvailable:   115343360 kB
Buffers:          204800 kB
Cached:         98566144 kB
SwapTotal:      16777212 kB
SwapFree:       16777212 kB
Active(anon):    1024000 kB
AnonPages:       2097152 kB
Shmem:            262144 kB
SUnreclaim:       524288 kB
KernelStack:       16384 kB
PageTables:        65536 kB
Percpu:            32768 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""


def test_parse() -> None:
    values = memory.parse_meminfo(GB10)
    assert values["MemTotal"] == 127535152
    assert values["MemAvailable"] == 115343360
    assert values["Active(anon)"] == 1024000
    assert "HugePages_Total" not in values  # a count, not a size


def test_booked() -> None:
    expected = 2097152 + 262144 + 524288 + 16384 + 65536 + 32768
    assert memory.booked_kib(memory.parse_meminfo(GB10)) == expected


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("", "no MemTotal and no MemAvailable"),
        ("MemTotal: 5 kB\nMemFree: 3 kB\n", "no MemAvailable"),
        ("MemTotal: five kB\nMemAvailable: 3 kB\n", "no MemTotal"),
        ("MemAvailable: 3\nMemTotal: 3 kB\n", "no MemAvailable"),
    ],
)
def test_what_cannot_be_judged_is_an_error(text: str, absent: str) -> None:
    with pytest.raises(Ds4Error) as caught:
        memory.parse_meminfo(text)
    assert caught.value.found.startswith(absent)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match="cannot be read"):
        memory.read_meminfo(str(tmp_path / "meminfo"))


def test_this_machine() -> None:
    values = memory.read_meminfo()
    assert 0 < values["MemAvailable"] <= values["MemTotal"]


class Clock:
    """Time that passes only while somebody sleeps; memory comes back at ``returns_at``."""

    def __init__(self, path: Path, returns_at: float) -> None:
        self.now, self.slept, self.path, self.returns_at = 0.0, 0, path, returns_at
        self.write()

    def write(self) -> None:
        available = 900 if self.now >= self.returns_at else 100
        self.path.write_text(f"MemTotal: 1000 kB\nMemAvailable: {available} kB\n")

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += 1
        self.write()

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("returns_at", "timeout", "reached", "seconds"),
    [(0, 10, True, 0.0), (3.2, 10, True, 3.5), (20, 10, False, 10.0), (10, 10, True, 10.0), (5, 0, False, 0.0)],
)
def test_wait(tmp_path: Path, returns_at: float, timeout: float, reached: bool, seconds: float) -> None:
    clock = Clock(tmp_path / "meminfo", returns_at)
    waited = memory.wait_for_available(500, timeout, path=str(clock.path), sleep=clock.sleep, clock=clock)
    assert waited == memory.Waited(reached, 900 if reached else 100, seconds)


def test_the_largest_processes_are_named_without_their_arguments(tmp_path: Path) -> None:
    for pid, resident, argv in (
        (10, 500, "java\0-Dpassword=x\0"),
        (11, 900, "/usr/bin/python3\0train.py\0"),
        (12, 0, ""),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "status").write_text(
            f"Name:\tx\nUid:\t{os.getuid()}\t0\t0\t0\nRssAnon:\t{resident} kB\nRssShmem:\t1 kB\n"
        )
        (folder / "cmdline").write_text(argv)
    (tmp_path / "12/status").write_text("Name:\tkthreadd\n")
    (tmp_path / "meminfo").touch()
    rows = memory.largest_processes(5, proc=str(tmp_path))
    assert [(row["pid"], row["command"], row["resident_kib"]) for row in rows] == [
        (11, "/usr/bin/python3 train.py", 901),
        (10, "java", 501),
    ]
    assert len(memory.largest_processes(1, proc=str(tmp_path))) == 1


def test_memory_file_systems(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/x / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\ntmpfs /nowhere\\040at tmpfs rw 0 0\nshort\n"
    )
    rows = memory.tmpfs_users(minimum_kib=0, mounts=str(mounts))
    assert [row["path"] for row in rows] == [str(tmp_path)]
    assert memory.tmpfs_users(minimum_kib=2**60, mounts=str(mounts)) == []
    assert memory.tmpfs_users(mounts=str(tmp_path / "none")) == []
