"""The unified memory of a GB10, simulated: one process per instance keeps every host's /proc/meminfo true to its tenants.

A tenant is a file ``/run/lab-tenants/<name>`` in the host holding ``KIB [PID] [until=UNIX_TIME]``: that much memory
is in use while the file exists, while that process lives (a killed process gives its memory back, as a real one does) and
until that time (memory that lingers); a file with neither is memory that stays lost. The available memory is
``total - base - sum of tenants``. A change shows within half a second.

``memory.json`` beside the generated ``meminfo`` sets the scene (all kB, all optional):
``total`` [127535152], ``base`` [4194304], ``cached`` [8388608], ``swap_total`` [16777212], ``swap_used`` [0],
``shmem`` [262144], and ``fields``: {"Name": kB} laid over the computed lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping

from . import system

DEFAULTS: dict[str, int] = {
    "total": 127535152,
    "base": 4194304,
    "cached": 8388608,
    "swap_total": 16777212,
    "swap_used": 0,
    "shmem": 262144,
}
TENANTS = "run/lab-tenants"
ENGINES = re.compile(r"(?:held-)?\d+")  # the stand-in engine names its tenants by pid
PERIOD_SECONDS = 0.2


def render(settings: Mapping[str, int], used: int, fields: Mapping[str, int] | None = None, driver: int = 0) -> str:
    """Text of /proc/meminfo, always of the same length so that it can be replaced in place by one write.

    Args:
        settings: complete, see the module text (kB).
        used: memory in use by base and tenants together (kB).
        fields: names and values (kB) that win over the computed ones.
        driver: the part of it that a GPU driver allocated for engines (kB): the kernel books it under no name.
    """
    available = max(0, settings["total"] - used)
    cached = min(settings["cached"], available)
    values = {
        "MemTotal": settings["total"],
        "MemFree": available - cached,
        "MemAvailable": available,
        "Buffers": 0,
        "Cached": cached + settings["shmem"],
        "SwapCached": 0,
        "Active": used // 4,
        "Inactive": cached,
        "Unevictable": 0,
        "Mlocked": 0,
        "SwapTotal": settings["swap_total"],
        "SwapFree": max(0, settings["swap_total"] - settings["swap_used"]),
        "Dirty": 0,
        "Writeback": 0,
        "AnonPages": used - driver,
        "Mapped": 0,
        "Shmem": settings["shmem"],
        "Slab": 0,
        "SReclaimable": 0,
        "SUnreclaim": 0,
        "CommitLimit": settings["total"] // 2 + settings["swap_total"],
        "Committed_AS": used,
    }
    values.update(fields or {})
    lines = [f"{name + ':':<16}{value:>12} kB" for name, value in values.items()]
    lines += [f"{name:<16}{0:>12}" for name in ("HugePages_Total:", "HugePages_Free:")]
    return "\n".join([*lines, f"{'Hugepagesize:':<16}{2048:>12} kB"]) + "\n"


class Tenants:
    """The live tenants of the host whose root directory is ``guest_root``; asking again is cheap.

    Raises:
        OSError: when made or asked while the host is down or not that far in its boot.
    """

    def __init__(self, guest_root: str) -> None:
        self._known: dict[str, tuple[tuple[int, int, int], int, list[str]]] = {}
        self._directory = os.open(os.path.join(guest_root, TENANTS), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._proc = os.open(os.path.join(guest_root, "proc"), os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Let go of the host."""
        os.close(self._directory)
        os.close(self._proc)

    def held(self) -> dict[str, int]:
        """Memory (kB) that each live tenant holds."""
        # Init itself: its absence means that the host is gone, not that it is idle.
        os.stat("1", dir_fd=self._proc)
        found: dict[str, int] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError):
                    kib, limits = self._content(entry)
                    if all(self._holds(limit) for limit in limits):
                        found[entry.name] = kib
        return found

    def _content(self, entry: os.DirEntry[str]) -> tuple[int, list[str]]:
        status = entry.stat()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(entry.name)
        if known is None or known[0] != stamp:
            words = _read(entry.name, self._directory).split() or ["no number"]
            known = self._known[entry.name] = (stamp, int(words[0]), words[1:])
        return known[1], known[2]

    def _holds(self, limit: str) -> bool:
        if limit.startswith("until="):
            return time.time() < float(limit.removeprefix("until="))
        try:
            status = _read(f"{int(limit)}/stat", self._proc)
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _read(path: str, directory: int) -> str:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


def update(directory: str, held: Mapping[str, int]) -> None:
    """Write ``directory``/meminfo for a host whose tenants hold ``held``, if it differs."""
    given: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        given = json.loads(system.read(os.path.join(directory, "memory.json")))
    settings = {**DEFAULTS, **{key: value for key, value in given.items() if isinstance(value, int)}}
    fields = given.get("fields")
    driver = sum(kib for name, kib in held.items() if ENGINES.fullmatch(name))
    text = render(settings, settings["base"] + sum(held.values()), fields if isinstance(fields, dict) else None, driver)
    path = os.path.join(directory, "meminfo")
    try:
        old = system.read(path)
    except OSError:
        old = ""
    if old == text:
        return
    # In place: the hosts hold the file by a bind mount, which a rename would leave behind.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, text.encode(), 0)
        if len(old) > len(text):
            os.ftruncate(descriptor, len(text))
    finally:
        os.close(descriptor)


def main(instance: str) -> int:
    """Look after all hosts of the instance until killed."""
    from . import hosts

    watched: dict[str, Tenants] = {}
    while True:
        for directory in hosts.directories(instance):
            held: dict[str, int] = {}
            try:
                if directory not in watched:
                    leader = hosts.leader(instance, os.path.basename(directory))
                    watched[directory] = Tenants(f"/proc/{leader}/root")
                held = watched[directory].held()
            except OSError:
                if directory in watched:
                    watched.pop(directory).close()
            with contextlib.suppress(OSError):
                update(os.path.join(directory, "lab"), held)
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
