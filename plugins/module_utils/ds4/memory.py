# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Memory of a host, from /proc only: on GB10 the GPU shares it, and nvidia-smi has no figure for it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .errors import Ds4Error
from .process import Process, is_number

MEMINFO = "/proc/meminfo"
_LINE = re.compile(r"^([A-Za-z0-9_()]+):\s+(\d+) kB$")


# Memory that meminfo books under a name. What the GPU driver allocated is under none of them, so the rest of what is
# not available is the driver's: on GB10 that is where an engine's weights and KV are.
_BOOKED = ("AnonPages", "Shmem", "SUnreclaim", "KernelStack", "PageTables", "SecPageTables", "Percpu")


class Waited(NamedTuple):
    """Outcome of a wait: was the value reached, what is available now, how long did it take."""

    reached: bool
    available_kib: int
    seconds: float


def parse_meminfo(text: str) -> dict[str, int]:
    """Every line of meminfo that carries a size, in KiB, under the kernel's own names (``MemAvailable``, ``Cached``…).

    Raises:
        Ds4Error: MemTotal or MemAvailable is absent, so nothing can be judged.
    """
    values = {m.group(1): int(m.group(2)) for m in map(_LINE.match, text.splitlines()) if m}
    absent = [key for key in ("MemTotal", "MemAvailable") if key not in values]
    if absent:
        raise Ds4Error(
            "Memory of the host cannot be read",
            found=f"no {' and no '.join(absent)} in {len(text.splitlines())} lines of meminfo",
            required="MemTotal and MemAvailable in kB",
            cure="look at /proc/meminfo on the host",
        )
    return values


def read_meminfo(path: str = MEMINFO) -> dict[str, int]:
    """``parse_meminfo`` of a file.

    Raises:
        Ds4Error: the file cannot be read, or lacks what ``parse_meminfo`` needs.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            text = stream.read()
    except OSError as error:
        raise Ds4Error(
            "Memory of the host cannot be read", found=f"{path}: {error.strerror}", cure=f"run `cat {path}` on the host"
        ) from error
    return parse_meminfo(text)


def booked_kib(meminfo: dict[str, int]) -> int:
    """Unreclaimable memory that meminfo has a name for (programs, shared memory, kernel), in KiB."""
    return sum(meminfo.get(name, 0) for name in _BOOKED)


def wait_for_available(
    wanted_kib: int,
    timeout_seconds: float,
    *,
    path: str = MEMINFO,
    interval_seconds: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Waited:
    """Wait until MemAvailable is at least ``wanted_kib``; look at least once, and once more when the time is up."""
    start = clock()
    while True:
        available = read_meminfo(path)["MemAvailable"]
        passed = clock() - start
        if available >= wanted_kib or passed >= timeout_seconds:
            return Waited(available >= wanted_kib, available, round(passed, 2))
        sleep(min(interval_seconds, max(0.0, timeout_seconds - passed)))


def largest_processes(count: int = 5, *, proc: str = "/proc") -> list[dict[str, Any]]:
    """The ``count`` processes with most resident memory of their own (anonymous and shared, without mapped files).

    Memory that the GPU driver allocated for a process is in no resident set: see ``host.cuda_processes``.
    """
    rows = []
    for name in os.listdir(proc):
        if not is_number(name):
            continue
        process = Process(int(name), proc=proc)
        resident = process.status_kib("RssAnon") + process.status_kib("RssShmem")
        if resident:
            rows.append((resident, process))
    rows.sort(key=lambda row: -row[0])
    return [
        {"pid": p.pid, "user": p.user, "command": p.program, "unit": p.unit, "resident_kib": resident}
        for resident, p in rows[:count]
    ]


def tmpfs_users(*, minimum_kib: int = 65536, mounts: str = "/proc/mounts") -> list[dict[str, Any]]:
    """Memory file systems that hold at least ``minimum_kib``: what lies there is memory the engine cannot have."""
    found: dict[int, dict[str, Any]] = {}
    try:
        with open(mounts, encoding="utf-8", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return []
    for line in lines:
        fields = line.split()
        if len(fields) < 3 or fields[2] not in ("tmpfs", "ramfs"):
            continue
        path = fields[1].encode().decode("unicode_escape")  # mounts writes a space as \040
        try:
            stat = os.statvfs(path)
            device = os.stat(path).st_dev
        except OSError:
            continue
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize // 1024
        if used >= minimum_kib:
            found.setdefault(device, {"path": path, "used_kib": used})
    return sorted(found.values(), key=lambda row: -int(row["used_kib"]))
