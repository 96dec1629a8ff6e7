# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Room on disks, counted per file system: what several rooms need on one device is added before it is compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .files import existing_parent, human_bytes, read_text

BY_UUID = "/dev/disk/by-uuid"


class Need(NamedTuple):
    """Bytes that somebody is going to write under a path; what lies in the directories of ``present`` counts as written."""

    path: str
    bytes: int
    what: str
    present: tuple[str, ...] = ()


class Room(NamedTuple):
    """One file system and what is wanted of it. All in bytes; ``missing`` is 0 when everything fits."""

    path: str
    device: int
    free: int
    needs: list[Need]
    margin: int

    @property
    def needed(self) -> int:
        return sum(need.bytes for need in self.needs)

    @property
    def missing(self) -> int:
        return max(self.needed + self.margin - self.free, 0) if self.needed else 0

    def text(self) -> str:
        """``/var/lib/ds4: 91.2 GiB needed (base 80.8 GiB, build 2.0 GiB) + 5.0 GiB margin, 60.1 GiB free``."""
        parts = ", ".join(f"{need.what} {human_bytes(need.bytes)}" for need in self.needs if need.bytes)
        return (
            f"{self.path}: {human_bytes(self.needed)} needed ({parts or 'nothing'}) + {human_bytes(self.margin)} margin, "
            f"{human_bytes(self.free)} free"
        )


def rooms(needs: Iterable[Need], margin: int) -> list[Room]:
    """Add up needs per device, looking at the nearest existing parent of every path.

    Args:
        needs: what is going to be written.
        margin: bytes that must remain free on every device.
    """
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        by_device.setdefault(os.stat(existing_parent(need.path)).st_dev, []).append(need)
    found = []
    for device, group in by_device.items():
        path = existing_parent(group[0].path)
        place = os.statvfs(path)
        found.append(Room(mount_of(path)["path"], device, place.f_bavail * place.f_frsize, group, margin))
    return found


def held(need: Need) -> Need:
    """What is still to be written, when some of it is there."""
    there = 0
    for place in need.present:
        for folder, _folders, names in os.walk(place):
            for name in names:
                with contextlib.suppress(OSError):
                    there += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return need._replace(bytes=max(need.bytes - there, 0))


def credit(path: str, wanted: int) -> int:
    """Bytes of a partial file that occupy room already and will not be needed again."""
    try:
        return min(os.stat(path).st_blocks * 512, wanted)
    except OSError:
        return 0


def mount_of(path: str, mountinfo: str | None = None) -> dict[str, str]:
    """The file system that holds a path: ``path`` where it is mounted, ``source``, ``type``, ``uuid`` (empty: none).

    As process 1 sees it: a hardened unit has mounts of its own over the folders that it may write.
    """
    real = os.path.realpath(existing_parent(path))
    best = {"path": "/", "source": "", "type": "", "uuid": ""}
    if mountinfo is None:
        mountinfo = read_text("/proc/1/mountinfo") or read_text("/proc/self/mountinfo")
    for entry in parse_mountinfo(mountinfo):
        mounted = entry["path"]
        if (real == mounted or real.startswith(mounted.rstrip("/") + "/")) and len(mounted) >= len(best["path"]):
            best = entry
    return {**best, "uuid": _uuid(best["source"])}


def parse_mountinfo(text: str) -> list[dict[str, str]]:
    """Lines of a mountinfo file (proc(5)), in the order of mounting."""
    entries = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if separator and len(fields) >= 5 and len(more) >= 2:
            entries.append({"path": _unescape(fields[4]), "type": more[0], "source": _unescape(more[1]), "uuid": ""})
    return entries


def _unescape(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def _uuid(device: str) -> str:
    if not device.startswith("/dev/"):
        return ""
    real = os.path.realpath(device)
    try:
        names: Sequence[str] = os.listdir(BY_UUID)
    except OSError:
        return ""
    return next((name for name in names if os.path.realpath(os.path.join(BY_UUID, name)) == real), "")
