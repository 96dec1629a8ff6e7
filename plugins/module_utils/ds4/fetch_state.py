# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a fetch shares with those who start, follow and watch it: its progress, its lock, its secrets.

Apart from ``ds4.fetch``, so that whoever only looks does not bring the whole fetcher along.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from .errors import Ds4Error
from .files import read_json
from .plan import Plan, PlanFile

DEFAULT_PLAN = "/var/lib/ds4/state/weights/plan.json"
EXIT_FINAL = 2
TOKEN_CREDENTIAL = "hf_token"  # noqa: S105  (a name, not a secret)
PROXY_CREDENTIAL = "proxy_credentials"
TICK_SECONDS = 1.0
STATUS_BYTES = 16384  # least size of the status file, see Status.write
RATE_SECONDS = 5.0
NOTES_KEPT = 40


class Status:
    """Progress, told to whoever reads the status file; written once a second, replaced in one step."""

    def __init__(self, plan: Plan) -> None:
        self._path = plan.status_file
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self._points: deque[tuple[float, int]] = deque()
        before = read_json(self._path)
        same = isinstance(before, dict) and before.get("plan") == plan.id
        self._before = float(before["elapsed_seconds"]) if same and before else 0.0
        self.received_before = int(before["bytes_received"]) if same and before else 0
        self.value: dict[str, Any] = {
            "schema": 1,
            "plan": plan.id,
            "generation": plan.generation,
            "state": "running",
            "detail": "",
            "pid": os.getpid(),
            "files": [
                {"role": item.role, "file": item.target, "bytes": item.bytes, "state": "waiting", "done": 0, "hashed": 0,
                 "source": "", "how": ""}
                for item in plan.files
            ],
            "error": None,
        }  # fmt: skip

    def row(self, item: PlanFile) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self.value["files"]
        return next(row for row in rows if row["role"] == item.role)

    def note(self, text: str) -> None:
        """Tell one event, here and in the journal of the unit."""
        print(text, file=sys.stderr, flush=True)
        with self._lock:
            self._notes.append(f"{time.strftime('%H:%M:%S')} {text}")

    def elapsed(self) -> float:
        """Seconds of work on this plan, over all starts."""
        return self._before + time.monotonic() - self._begun

    def write(self, received: int) -> None:
        """Put the present state where pollers read it."""
        with self._lock:
            now = time.monotonic()
            self._points.append((now, received))
            while len(self._points) > 2 and now - self._points[0][0] > RATE_SECONDS:
                self._points.popleft()
            (begun, first) = self._points[0]
            span = now - begun
            rate = (received - first) / span if span > 0 else 0.0
            self.value.update(
                updated=time.time(),
                elapsed_seconds=round(self.elapsed(), 2),
                bytes_received=self.received_before + received,
                rate_bytes_per_second=round(rate),
                notes=list(self._notes),
            )
            text = json.dumps(self.value, sort_keys=True)
            try:
                replace_text(self._path, text.ljust(STATUS_BYTES))
            except OSError:  # on a full disk the reason is told in the room that the last status holds
                with contextlib.suppress(OSError), open(self._path, "r+", encoding="utf-8") as stream:
                    stream.write(json.dumps({**self.value, "notes": []}, sort_keys=True).ljust(STATUS_BYTES))


def replace_text(path: str, text: str) -> None:
    """Replace a file in one step, without waiting for the disk; never through a link, since root writes here too."""
    temporary = f"{path}.new-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)


class Secrets(NamedTuple):
    """What no plan, log or message holds."""

    token: str = ""
    proxy_credentials: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Secrets:
        """Read the files that a plan names.

        Raises:
            Ds4Error: one of them cannot be used.
        """
        return cls(
            secret(plan.token_file, TOKEN_CREDENTIAL, "weights_token_file"),
            secret(plan.proxy_credentials_file, PROXY_CREDENTIAL, "weights_proxy_credentials_file"),
        )


def secret(path: str, credential: str, variable: str) -> str:
    """First line of a secret file, preferring the copy that systemd hands over.

    Raises:
        Ds4Error: absent, unreadable, empty, or readable by others.
    """
    if not path:
        return ""
    handed = os.path.join(os.environ.get("CREDENTIALS_DIRECTORY", ""), credential)
    source = handed if os.environ.get("CREDENTIALS_DIRECTORY") and os.path.exists(handed) else path
    try:
        with open(source, encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            text = stream.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Ds4Error(
            f"The file of {variable} cannot be read", found=f"{path}: {error}", cure=f"correct {variable}"
        ) from error
    if source == path and mode & 0o077:
        raise Ds4Error(
            f"The file of {variable} is open to other users",
            found=f"{path} has mode {mode:04o}",
            required="mode 0600",
            cure=f"chmod 600 {path}",
        )
    if not text:
        raise Ds4Error(f"The file of {variable} is empty", found=path, required="one line", cure=f"correct {variable}")
    return text


@contextlib.contextmanager
def locked(directory: str) -> Iterator[bool]:
    """The writer's lock of a weights directory; gives False when somebody else holds it."""
    folder = os.path.join(directory, ".fetch")
    os.makedirs(folder, exist_ok=True)
    handle = os.open(os.path.join(folder, "lock"), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        yield False
        return
    try:
        yield True
    finally:
        os.close(handle)
