# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Old generations of weights: find them, say what they cost, remove them when that is safe and asked for.

Only files whose sha256 is in our manifests are ever removed, and leftovers of our own fetches. Outside our directory
only where the operator named a path. Nothing behind a symbolic link, nothing that an engine has open, nothing that the
served deployment needs, and nothing that a return to the previous one needs unless that was given up in so many words.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import syslog
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import records
from .adoption import Judged
from .deployment import history_in, linked
from .errors import Ds4Error
from .files import MARKER_NAME, fsync_directory, human_bytes, is_ours, read_json

# Why a file is kept, for people.
SERVED, RUNNING = "the served deployment", "an engine that is running"
UNKNOWN = "its owner: no manifest knows it"
_LEFTOVER = re.compile(r"\.(?P<target>.+)\.(part|part\.journal|adopted|quarantine)")
_SET_ASIDE = re.compile(
    r"(?P<target>.+)\.([0-9a-f]{8}|wrong)\.quarantine"
)  # somebody's file that had the name of one of ours


class Old(NamedTuple):
    """A file of ours that the wanted generation does not need.

    Attributes:
        path: absolute.
        called: ``legacy base``, or ``leftover`` for a partial file, a wrong download or a record without its file.
        bytes: what its removal gives back; 0 when the content has another name too.
        sha256: its content; empty for a leftover.
        kept_for: why it may not be removed; empty when it may.
    """

    path: str
    called: str
    bytes: int
    sha256: str
    kept_for: str


class Uses(NamedTuple):
    """Contents (sha256) and files (device, inode) in use.

    Attributes:
        served: needed by the deployment that is active.
        proven: the active deployment has passed its questions.
        rollback: needed by the deployment that a rollback would start; with its release.
        open_files: model files of running engines.
    """

    served: frozenset[str]
    proven: bool
    rollback: frozenset[str]
    rollback_release: str
    open_files: frozenset[tuple[int, int]]


def uses(deployments: str, current: str, state: str, open_paths: Iterable[str]) -> Uses:
    """What is in use on this host, from the deployments' manifests and the running engines.

    Args:
        deployments: directory of the deployments.
        current: the link that names the active one.
        state: directory with ``deployments.json``, the proven ones, newest first.
        open_paths: model files of running engines.
    """

    def manifest(name: str) -> dict[str, Any]:
        value = read_json(os.path.join(deployments, name, "manifest.json"))
        return value if isinstance(value, dict) else {}

    def hashes(value: Mapping[str, Any]) -> frozenset[str]:
        files = (value.get("weights") or {}).get("files") or {}
        return frozenset(str(entry.get("sha256")) for entry in files.values() if entry)

    active = linked(current, deployments)
    proven = [entry["id"] for entry in history_in(state)]
    before = next((name for name in proven if name != active and manifest(name)), "")
    return Uses(
        hashes(manifest(active)) if active else frozenset(),
        bool(active) and active in proven,
        hashes(manifest(before)) if before else frozenset(),
        str(manifest(before).get("release", before)) if before else "",
        identities(open_paths),
    )


def identities(paths: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Device and inode of files, as far as they are there: a file may have more than one name."""
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def find(
    directory: str,
    known: Iterable[Mapping[str, Any]],
    wanted: Mapping[str, str],
    used: Uses,
    judged: Judged,
    *,
    paths: Sequence[str] = (),
    rollback_waived: bool = False,
    read: Callable[[int], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
    unread: Callable[[str], None] = lambda path: None,
) -> list[Old]:
    """Files of old generations and leftovers.

    Args:
        directory: our own.
        known: entries of all manifests: generation, role, bytes, sha256.
        wanted: target name → sha256 (empty: unknown) of the generation that is wanted.
        used: see :func:`uses`.
        judged: hashes of files without a record.
        paths: directories and files outside our directory that the operator named.
        rollback_waived: what a return to the previous deployment needs may go too.
        read: hash files that have no valid record (each of them once), calling this with the bytes of every read, which
            may wait; None leaves them out.
        note: called with one sentence per file that is left out.
        unread: called with each file that only reading could judge, while ``read`` is None.
    """
    by_hash = {str(entry["sha256"]): entry for entry in known if entry.get("sha256")}
    sizes = {int(entry["bytes"]) for entry in by_hash.values() if entry.get("bytes")}
    keep = frozenset(sha256 for sha256 in wanted.values() if sha256)
    found: list[Old] = []
    for path in _files(directory, paths, note):
        name, inside = os.path.basename(path), os.path.dirname(path) == directory
        status = os.lstat(path)
        leftover = _LEFTOVER.fullmatch(name) if inside else None
        if leftover:
            target = leftover.group("target")
            if (
                name.endswith(".quarantine")
                or target not in wanted
                or not records.quick_check(os.path.join(directory, target))
            ):
                found.append(Old(path, "leftover", status.st_blocks * 512, "", ""))
            continue
        sha256 = _content(path, inside, status, sizes, judged, read)
        if sha256 is None:
            if not (inside and name in wanted):
                unread(path)
            continue
        entry = by_hash.get(sha256)
        if entry is None and inside and _SET_ASIDE.fullmatch(name):
            found.append(Old(path, "file set aside", status.st_size, "", UNKNOWN))
        if entry is None or sha256 in keep:
            continue
        kept = ""
        if (status.st_dev, status.st_ino) in used.open_files:
            kept = RUNNING
        elif sha256 in used.served:
            kept = SERVED
        elif sha256 in used.rollback and not rollback_waived:
            kept = f"a return to {used.rollback_release}"
        freed = status.st_size if status.st_nlink == 1 else 0
        found.append(Old(path, f"{entry['generation']} {entry['role']}", freed, sha256, kept))
    return found + _records_without_files(directory, wanted)


def _records_without_files(directory: str, wanted: Mapping[str, str]) -> list[Old]:
    """What a removal that was killed between a file and its record leaves; a wanted file's record still says what it was."""
    if not is_ours(directory):
        return []
    found = []
    for name in sorted(os.listdir(directory)):
        path, file = os.path.join(directory, name), name[: -len(records.SUFFIX)]
        if name.endswith(records.SUFFIX) and file not in wanted and not os.path.lexists(os.path.join(directory, file)):
            found.append(Old(path, "leftover", os.lstat(path).st_blocks * 512, "", ""))
    return found


def _files(directory: str, paths: Sequence[str], note: Callable[[str], None]) -> Iterable[str]:
    """Regular files that may be looked at, never through a link."""
    places = [directory] if is_ours(directory) else []
    for place in [*places, *paths]:
        if os.path.isfile(place) and not os.path.islink(place):
            names = [place]
        elif os.path.isdir(place) and (place == directory or not os.path.islink(place)):
            names = [os.path.join(place, name) for name in sorted(os.listdir(place))]
        else:
            continue
        for path in names:
            if os.path.islink(path) and path.endswith(".gguf"):
                note(f"{path} is a symbolic link and is left alone")
            elif stat.S_ISREG(os.lstat(path).st_mode) and not path.endswith(records.SUFFIX):
                yield path


def _content(
    path: str,
    inside: bool,
    status: os.stat_result,
    sizes: set[int],
    judged: Judged,
    read: Callable[[int], None] | None = None,
) -> str | None:
    """sha256 of a file, from its record or an earlier look, or by reading it; empty when it is none of ours, None unread."""
    record = records.read(path) if inside else None
    if record is not None and not records.quick_check(path):
        return str(record["sha256"])
    if status.st_size not in sizes:
        return ""
    hashed = judged.read(path, progress=read, drop_cache=True) if read else judged.get(path)
    return hashed.sha256 if hashed else None


def changed(old: Old, directory: str, judged: Judged) -> str:
    """Say what speaks against removing a file that was found some time ago; empty when it is gone or still the same."""
    inside = os.path.dirname(old.path) == directory
    try:
        status = os.lstat(old.path)
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if not inside and os.path.islink(os.path.dirname(old.path)):
        return f"{os.path.dirname(old.path)} is a symbolic link"
    if not old.sha256:
        leftover = _LEFTOVER.fullmatch(os.path.basename(old.path)) or old.path.endswith(records.SUFFIX)
        return "" if inside and leftover else "no leftover of ours"
    sha256 = _content(old.path, inside, status, {status.st_size}, judged)
    return "" if sha256 == old.sha256 else f"sha256 {sha256}" if sha256 else "a file that changed since it was verified"


def remove(olds: Iterable[Old]) -> list[Old]:
    """Remove files that may go, one by one; each is told to the system's journal before it goes.

    Raises:
        Ds4Error: one could not be removed; what is left is found again by the next run.
    """
    removed: list[Old] = []
    for old in olds:
        if old.kept_for:
            continue
        syslog.syslog(syslog.LOG_NOTICE, f"ds4-weights: removing {old.path} ({old.called}, {old.bytes} bytes)")
        there = os.path.lexists(old.path)
        try:
            for path in (old.path, records.record_path(old.path)):
                with contextlib.suppress(FileNotFoundError):  # an earlier run got so far
                    os.unlink(path)
            fsync_directory(os.path.dirname(old.path))
        except OSError as error:
            raise Ds4Error(
                f"{old.path} could not be removed", found=str(error.strerror), cure="see `dmesg`, then run again",
                evidence={"removed": [one.path for one in removed]},
            ) from error  # fmt: skip
        removed += [old] if there else []
    return removed


def recorded(directory: str) -> list[str]:
    """Everything in our directory that our own records or names vouch for: weights with a record, records, leftovers."""
    if not is_ours(directory):
        return []
    names = sorted(os.listdir(directory))
    records_of = [name[: -len(records.SUFFIX)] for name in names if name.endswith(records.SUFFIX)]
    leftovers = [name for name in names if _LEFTOVER.fullmatch(name)]
    ours = [
        *(name for name in records_of if name in names),
        *(name + records.SUFFIX for name in records_of),
        *leftovers,
    ]
    return [path for path in (os.path.join(directory, name) for name in ours) if os.path.isfile(path)]


def remove_recorded(directory: str, paths: Iterable[str]) -> None:
    """Remove files that :func:`recorded` listed, and the directory itself when nothing else is in it."""
    for path in paths:
        os.unlink(path)
    if not is_ours(directory):
        return
    folder, marker = os.path.join(directory, ".fetch"), os.path.join(directory, MARKER_NAME)
    for take, path in ((os.unlink, os.path.join(folder, "lock")), (os.rmdir, folder)):
        with contextlib.suppress(OSError):  # absent, or somebody's file in it: it stays
            take(path)
    if os.listdir(directory) == [MARKER_NAME]:
        os.unlink(marker)
        os.rmdir(directory)


def describe(olds: Sequence[Old]) -> str:
    """``legacy base + legacy mtp, 84.3 GiB``."""
    if not olds:
        return "nothing old"
    return f"{' + '.join(dict.fromkeys(old.called for old in olds))}, {human_bytes(sum(old.bytes for old in olds))}"
