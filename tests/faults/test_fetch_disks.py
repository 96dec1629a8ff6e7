"""Disks that are full, too small or absent, and limits of time, rate and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.fetching import Fetcher
from lab.hub import Hub
from tests.faults.conftest import MIB, SIZES, judge

SIZE = SIZES["base"]
Make = Callable[..., Fetcher]
Disk = Callable[[Path, int], Path]


def free_bytes(path: Path) -> int:
    place = os.statvfs(path)
    return place.f_bavail * place.f_frsize


def fill(path: Path, leave: int) -> Path:
    """Take room until ``leave`` bytes are left."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while (room := free_bytes(path) - leave) > 0:
            stream.write(bytes(min(room, 64 * 1024)))
    return filler


def test_disk_too_small_before_a_byte_moves(hub: Hub, tmp_path: Path, loop_disk: Disk, manifest: Any) -> None:
    fetcher = Fetcher(loop_disk(tmp_path / "disk", 12), hub, {"base": manifest["0731"]["base"]})
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert "There is no room" in finished.text
    missing = fetcher.status()["error"]["evidence"]["missing_bytes"]
    assert 0 < missing < SIZE
    assert str(missing) in finished.text
    assert hub.stats()["bytes"]["cdn"] == 0


def test_disk_fills_midway_and_a_later_start_goes_on(hub: Hub, tmp_path: Path, loop_disk: Disk, manifest: Any) -> None:
    disk = loop_disk(tmp_path / "disk", 40)
    fetcher = Fetcher(disk, hub, {"base": manifest["0731"]["base"]})
    hub.options(total_rate=6 * MIB)
    running = fetcher.start()
    while fetcher.wire_bytes() < 2 * MIB:
        assert running.ended(0.02) is None, running.text()
    filler = fill(disk, 3 * MIB)
    filled, before = time.monotonic(), fetcher.wire_bytes()  # filling takes its time on a busy machine
    finished = running.wait(30)
    judge(fetcher, finished)
    assert finished.rc == 2
    assert time.monotonic() - filled < 5, "a full disk does not get better by asking again"
    assert "is full" in finished.text, finished.text
    error = fetcher.status()["error"]
    assert error["evidence"]["missing_bytes"] > 0
    assert "bytes" in error["found"]
    moved = fetcher.wire_bytes()
    assert moved < before + 6 * MIB
    filler.unlink()
    hub.options(total_rate=0)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert "are there already" in finished.text


def test_disk_fills_at_random_moments(hub: Hub, tmp_path: Path, loop_disk: Disk, manifest: Any, seed: int) -> None:
    """Also when there is no room left for the journal, the record or the status file."""
    disk = loop_disk(tmp_path / "disk", 40)
    fetcher = Fetcher(disk, hub, {"base": manifest["0731"]["base"]}, connections=2)
    hub.options(total_rate=8 * MIB)
    running = fetcher.start()
    while fetcher.wire_bytes() < MIB * (seed % 12):
        assert running.ended(0.01) is None, running.text()
    filler = fill(disk, (seed * 37 % 11) * 100_000)
    finished = running.wait(30)
    found = fetcher.sha256("base")
    assert finished.rc in {0, 2}, finished.text
    assert "Traceback" not in finished.text, finished.text
    assert found in {"", fetcher.plan.files[0].sha256}
    if finished.rc:
        assert "Cure: " in finished.text, finished.text
    filler.unlink()
    hub.options(total_rate=0)
    finished = fetcher.run()
    judge(fetcher, finished, wire_limit=1.4)
    assert finished.rc == 0, finished.text


def test_the_disk_of_the_weights_is_not_mounted(hub: Hub, tmp_path: Path, loop_disk: Disk, manifest: Any) -> None:
    """The root file system is never filled instead."""
    disk = loop_disk(tmp_path / "disk", 40)
    fetcher = Fetcher(disk, hub, {"base": manifest["0731"]["base"]}, mount={"path": str(disk), "uuid": ""})
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    fetcher.plan_path = tmp_path / "plan.json"
    fetcher.plan.status_file = str(tmp_path / "status.json")
    fetcher.plan.write(str(fetcher.plan_path))
    subprocess.run(["umount", disk], check=True)
    try:
        before = hub.stats()["bytes"]["cdn"]
        finished = fetcher.run()
        assert finished.rc == 2, finished.text
        assert "not mounted" in finished.text
        assert "Cure: " in finished.text
        assert hub.stats()["bytes"]["cdn"] == before
        assert list(disk.iterdir()) == [], "something was written under the mount point"
    finally:
        subprocess.run(["mount", "-o", "loop", tmp_path / "disk", disk], check=True)


def test_a_directory_of_somebody_else_is_not_touched(hub: Hub, base: Make) -> None:
    fetcher = base()
    (fetcher.directory / ".ds4-fleet").unlink()
    finished = fetcher.run()
    assert finished.rc == 2
    assert "marker" in finished.text
    assert hub.stats()["requests"] == []


def test_bandwidth_cap(hub: Hub, base: Make) -> None:
    fetcher = base(bandwidth_bytes_per_second=float(6 * MIB))
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0
    assert 1.7 < finished.seconds < 4


def test_deadline_keeps_what_is_there(hub: Hub, base: Make) -> None:
    hub.options(total_rate=4 * MIB)
    fetcher = base(deadline_seconds=1.5)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert finished.seconds < 4
    assert "weights_deadline_seconds" in finished.text
    first = fetcher.wire_bytes()
    assert first > 2 * MIB
    hub.options(total_rate=0)
    later = base()
    finished = later.run()
    judge(later, finished)
    assert finished.rc == 0, finished.text


def test_deadline_ends_a_silent_line_too(hub: Hub, base: Make) -> None:
    hub.faults({"fault": "slow_start", "seconds": 60, "count": -1})
    fetcher = base(deadline_seconds=2.0, stall_seconds=30.0)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert finished.seconds < 6, "the deadline must not wait for the stall watchdog"


def test_a_guest_waits_below_the_memory_floor(hub: Hub, base: Make) -> None:
    fetcher = base(memory_floor_kib=1 << 40, deadline_seconds=3.0)
    running = fetcher.start()
    seen = []
    while (finished := running.ended(0.1)) is None:
        seen.append(fetcher.status().get("state"))
    judge(fetcher, finished)
    assert finished.rc == 2
    assert "paused" in seen
    assert "MemAvailable" in finished.text
    assert fetcher.wire_bytes() < MIB, "it went on below the floor"


def test_a_guest_leaves_no_pages_behind(hub: Hub, tmp_path: Path, manifest: Any) -> None:
    """With drop_cache the file is not in the page cache afterwards (a real disk is needed for that)."""
    fetcher = Fetcher(tmp_path, hub, {"base": manifest["0731"]["base"]}, drop_cache=True)
    finished = fetcher.run()
    out = subprocess.run(
        ["fincore", "-b", "-n", "-o", "RES", fetcher.path("base")], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) <= MIB, f"{out.stdout.strip()} bytes are still in the page cache"
    judge(fetcher, finished)
