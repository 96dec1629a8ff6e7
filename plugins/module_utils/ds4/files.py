# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Durable files, our marker, and sizes as people read them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from typing import Any

MARKER_NAME = ".ds4-fleet"  # present in every directory of ours; nothing without it is overwritten or removed
MARKER_LINE = "Managed by ds4-fleet"  # present in every unit and text file of ours
TEMPORARY = ".new-"  # prefix of a file on its way to its name; a power loss may leave one behind
FRESH_DISK = frozenset({"lost+found"})  # what the root of a file system holds that nobody has used yet


def fsync_directory(path: str) -> None:
    """Make a rename or unlink inside ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(
    path: str, data: str | bytes, *, mode: int = 0o644, uid: int | None = None, gid: int | None = None
) -> None:
    """Replace ``path`` so that a reader, or a power loss, sees the old or the new content and nothing between."""
    directory = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if uid is not None or gid is not None:
                os.fchown(stream.fileno(), -1 if uid is None else uid, -1 if gid is None else gid)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    fsync_directory(directory)


def is_written(path: str, data: str | None = None, *, mode: int = 0o644, gid: int | None = None) -> bool:
    """True when ``path`` is a regular file as ``write_atomic`` leaves it: ours in owner, group and mode, and to the byte."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != mode or found.st_uid != os.geteuid():
            return False
        if gid is not None and found.st_gid != gid:
            return False
        if data is None:
            return True
        with open(path, "rb") as stream:
            return stream.read() == data.encode()
    except OSError:
        return False


def link_target(path: str) -> str:
    """Where a symbolic link leads, one step and whether that is there or not; empty when it is none."""
    if not os.path.islink(path):
        return ""
    return os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))


def link_atomic(target: str, path: str) -> None:
    """Make ``path`` a symbolic link to ``target``, replacing an older link in one step."""
    temporary = f"{path}.new-{os.getpid()}"
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    fsync_directory(os.path.dirname(path))


def write_json(path: str, value: Any, *, mode: int = 0o644, uid: int | None = None, gid: int | None = None) -> None:
    """Durable, sorted, human-readable JSON."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode=mode, uid=uid, gid=gid)


def read_json(path: str) -> Any | None:
    """Content of a JSON file, or None when it is absent or torn (the caller decides what that means)."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def read_text(path: str, default: str = "") -> str:
    """Content of a text file, or ``default`` when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return default


def is_ours(directory: str) -> bool:
    """True when a directory bears our marker."""
    return os.path.isfile(os.path.join(directory, MARKER_NAME))


def mark(directory: str, purpose: str) -> None:
    """Put our marker into a directory that we made."""
    write_json(os.path.join(directory, MARKER_NAME), {"managed_by": "ds4-fleet", "purpose": purpose})


def digest(*parts: Any) -> str:
    """Hex sha256 over the canonical JSON of ``parts``: the identity of what has no file of its own."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def human_bytes(count: float) -> str:
    """``86720111488`` → ``80.8 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def existing_parent(path: str) -> str:
    """Nearest existing ancestor of ``path``, which may not exist yet."""
    current = os.path.abspath(path)
    while not os.path.exists(current):
        current = os.path.dirname(current)
    return current
