"""The unified memory of a GB10, simulated: one process per instance keeps every host's /proc/meminfo true to its tenants.

A tenant is a file ``/run/lab-tenants/<name>`` in the host holding ``KIB``, ``KIB PID`` or ``KIB until=UNIX_TIME``: that much
memory is in use while the file exists and, when a pid is given, while that process lives (a killed process gives its memory
back, as a real one does; a file without a pid is memory that stays lost), or until that time (memory that lingers). The available
memory is ``total - base - sum of tenants``.

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
PERIOD_SECONDS = 0.1


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


def tenants(guest_root: str) -> dict[str, int]:
    """Memory (kB) of every live tenant of the host whose root directory is ``guest_root``."""
    found: dict[str, int] = {}
    directory = os.path.join(guest_root, TENANTS)
    try:
        names = os.listdir(directory)
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = system.read(os.path.join(directory, name)).split()
            if len(words) == 1 or _holds(guest_root, words[1]):
                found[name] = int(words[0])
    return found


def _holds(guest_root: str, word: str) -> bool:
    if word.startswith("until="):
        return time.time() < float(word.removeprefix("until="))
    return _alive(guest_root, int(word))


def _alive(guest_root: str, pid: int) -> bool:
    try:
        status = system.read(os.path.join(guest_root, "proc", str(pid), "stat"))
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def update(directory: str, guest_root: str | None) -> None:
    """Write ``directory``/meminfo for the host running at ``guest_root`` (None: it is down), if it differs."""
    settings: dict[str, int] = dict(DEFAULTS)
    given: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        given = json.loads(system.read(os.path.join(directory, "memory.json")))
    settings.update({key: value for key, value in given.items() if isinstance(value, int)})
    fields = given.get("fields")
    held = tenants(guest_root) if guest_root else {}
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

    while True:
        for directory in hosts.directories(instance):
            leader = hosts.leader(instance, os.path.basename(directory))
            with contextlib.suppress(OSError):
                update(os.path.join(directory, "lab"), f"/proc/{leader}/root" if leader else None)
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
