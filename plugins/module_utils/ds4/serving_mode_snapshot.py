# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the desktop was like before serving mode touched it, kept durably until it has been given back.

Folder ``serving-mode`` below the state directory, root's alone:

- ``snapshot.json``: state of each unit we hold, from before its first change (docs/schemas/serving-mode-snapshot.schema.json).
  An entry is written before the unit is touched and never changed while it is held.
- ``journal.jsonl``: every operation, on disk before it is carried out. A unit that no line names was never reached.
- ``archive/``: both files of earlier times in serving mode.
- ``lock``: held by whoever changes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import Ds4Error
from .files import fsync_directory, is_ours, mark, write_json

SCHEMA = 1
DEFAULT_TARGET = "default.target"  # the journal's name for the link that says what the next boot starts


def utc(epoch: float | None = None) -> str:
    """Time as text, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))


def boot_id() -> str:
    """Identity of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()


@dataclass
class Snapshot:
    """See the schema for every field. ``units`` and ``default_target`` are what give-back works from."""

    schema: int = SCHEMA
    taken_at: str = ""
    boot_id: str = ""
    mem_available_kib: int = 0
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    default_target: dict[str, Any] | None = None
    files: list[str] = field(default_factory=list)
    swappiness: int | None = None
    swaps: list[dict[str, Any]] = field(default_factory=list)


class Store:
    """The folder above.

    Args:
        state_dir: directory of state (host_base makes it).
        etc: folders that recorded links may lie in; a record that names another one is refused.
    """

    def __init__(self, state_dir: str, *, etc: Iterable[str] = ("/etc/systemd/system", "/etc/systemd/user")) -> None:
        self.directory = os.path.join(state_dir, "serving-mode")
        self.path = os.path.join(self.directory, "snapshot.json")
        self.journal_path = os.path.join(self.directory, "journal.jsonl")
        self._etc = tuple(f"{folder}/" for folder in etc)

    # ------------------------------------------------------------------------------------------------ folder

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            Ds4Error: something of that name is there that is not ours.
        """
        os.makedirs(self.directory, mode=0o755, exist_ok=True)
        if not is_ours(self.directory) and all(name.startswith(".new-") for name in os.listdir(self.directory)):
            # New, or a first time that was cut off before the marker was there.
            mark(self.directory, "serving mode: state of the desktop before it was stripped")
            fsync_directory(os.path.dirname(self.directory))
        if not is_ours(self.directory):
            raise Ds4Error(
                "The folder for the snapshot of the desktop is not ours",
                found=f"{self.directory} without the file .ds4-fleet",
                cure=f"move it away, or set serving_mode_state_dir (now {os.path.dirname(self.directory)})",
            )
        self._check_owner(self.directory)

    def _check_owner(self, path: str) -> None:
        # Links are made as root from what stands here, so nobody else may be able to write it.
        stat = os.stat(path)
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
            raise Ds4Error(
                "The snapshot of the desktop can be written by somebody else, so it is not trusted",
                found=f"{path}: owner uid {stat.st_uid}, mode {stat.st_mode & 0o7777:04o}",
                required=f"owner uid {os.geteuid()}, not writable by group or others",
                cure=f"look at who changed it, then: chown root: {path}; chmod go-w {path}",
            )

    @contextlib.contextmanager
    def lock(self, *, timeout_seconds: float = 120.0) -> Iterator[None]:
        """Hold the lock; waits for another change to end.

        Raises:
            Ds4Error: it did not end in time.
        """
        with open(os.path.join(self.directory, "lock"), "a", encoding="ascii") as stream:
            deadline = time.monotonic() + timeout_seconds
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Ds4Error(
                            "Another change of serving mode is still going on",
                            found=f"{stream.name} is locked",
                            cure="wait for it (`ds4-desktop status` shows the state), then run again",
                        ) from None
                    time.sleep(0.2)
            yield

    # ---------------------------------------------------------------------------------------------- snapshot

    def load(self) -> Snapshot | None:
        """What is held, or None when nothing is.

        Raises:
            Ds4Error: the file is there and cannot be trusted or understood.
        """
        try:
            with open(self.path, encoding="utf-8") as stream:
                data = json.load(stream)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._unreadable(str(error)) from error
        self._check_owner(self.directory)
        self._check_owner(self.path)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise self._unreadable(f"schema {data.get('schema') if isinstance(data, dict) else type(data).__name__}")
        try:
            snapshot = Snapshot(**data)
        except TypeError as error:
            raise self._unreadable(str(error)) from error
        for key, record in snapshot.units.items():
            for path in record["links"]:
                if not path.startswith(self._etc) or os.path.normpath(path) != path:
                    raise self._unreadable(f"link {path} of {key} lies outside {' and '.join(self._etc)}")
        return snapshot

    def _unreadable(self, found: str) -> Ds4Error:
        return Ds4Error(
            "The snapshot of the desktop cannot be read, so nothing is changed",
            found=f"{self.path}: {found}",
            required=f"a record of schema {SCHEMA}",
            cure=f"compare with {self.directory}/archive and {self.journal_path}, correct the file, run again",
        )

    def save(self, snapshot: Snapshot) -> None:
        """Write it durably; returns when it is on disk."""
        write_json(self.path, asdict(snapshot))

    def begin(self) -> None:
        """Start a new generation: a journal without a snapshot is the rest of an archiving that was cut off."""
        if os.path.exists(self.journal_path) and not os.path.exists(self.path):
            os.replace(self.journal_path, self._archive_name() + ".jsonl")
            fsync_directory(self.directory)

    def _archive_name(self) -> str:
        folder = os.path.join(self.directory, "archive")
        os.makedirs(folder, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        number = 0
        while any(os.path.exists(f"{folder}/{stamp}-{number:03d}{end}") for end in (".json", ".jsonl")):
            number += 1
        return f"{folder}/{stamp}-{number:03d}"

    def archive(self, outcome: str) -> str:
        """Put snapshot and journal aside after the desktop was given back; returns the path of the snapshot."""
        self.journal("archived", outcome=outcome)
        name = self._archive_name()
        os.replace(self.path, f"{name}.json")  # from here on nothing is held
        fsync_directory(self.directory)
        os.replace(self.journal_path, f"{name}.jsonl")
        fsync_directory(os.path.dirname(name))
        fsync_directory(self.directory)
        return f"{name}.json"

    # ----------------------------------------------------------------------------------------------- journal

    def journal(self, event: str, **details: Any) -> None:
        """Add a line; returns when it is on disk."""
        line = json.dumps({"at": utc(), "event": event, **details}, sort_keys=True)
        handle = os.open(self.journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, f"{chr(10) if torn else ''}{line}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def events(self) -> list[dict[str, Any]]:
        """Lines of the journal, oldest first; a torn last line counts as never written."""
        found = []
        try:
            with open(self.journal_path, encoding="utf-8", errors="replace") as stream:
                for line in stream:
                    with contextlib.suppress(ValueError):
                        found.append(json.loads(line))
        except FileNotFoundError:
            pass
        return found

    def touched(self) -> set[str]:
        """Units (and ``default.target``) that an operation was begun on and that were not given back since."""
        keys: set[str] = set()
        for event in self.events():
            if event["event"] == "given_back":
                keys -= set(event["units"])
            elif event["event"] in ("stop", "link"):
                keys |= set(event["units"])
        return keys

    def gained_kib(self) -> int:
        """MemAvailable that stripping brought, as measured around it, in KiB; runs since the snapshot added up."""
        return sum(event["after_kib"] - event["before_kib"] for event in self.events() if event["event"] == "measured")

    def last_archived(self) -> dict[str, Any] | None:
        """Last line of the newest archived journal: when and how the desktop was given back; None when never."""
        folder = os.path.join(self.directory, "archive")
        names = sorted(name for name in os.listdir(folder) if name.endswith(".jsonl")) if os.path.isdir(folder) else []
        if not names:
            return None
        with open(os.path.join(folder, names[-1]), encoding="utf-8") as stream:
            lines = stream.read().splitlines()
        try:
            event: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            return None
        return event
