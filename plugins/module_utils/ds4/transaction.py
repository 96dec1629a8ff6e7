# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Records of transactions: one file per switch, durable, found again after a crash or a reboot by the ``open`` link.

``docs/schemas/transaction.schema.json`` describes a record. ``ds4.switch`` works one off; everybody else requests, follows or
reads it here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .command import Ran, run
from .deployment import Layout
from .errors import Ds4Error
from .files import human_bytes, link_atomic, read_json, write_json
from .service import Service

SCHEMA = 1
RUNNER = "ds4-switch.service"
OPEN = "open"  # link to the record of the transaction in progress; the runner's unit has it as a condition
RESERVE = "reserve"  # file beside the records: room for what a switch writes when the disk fills up in the middle of it
RESERVE_BYTES = 1 << 20


class Record:
    """Durable state of one transaction: written before and after every step."""

    def __init__(self, path: str, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def load(cls, path: str) -> Record | None:
        data = read_json(path)
        return cls(path, data) if isinstance(data, dict) and data.get("schema") == SCHEMA else None

    def update(self, **values: Any) -> None:
        """Make progress durable; on a full disk, with the room that was kept for it."""
        self.data.update(values)
        try:
            write_json(self.path, self.data)
        except OSError:
            if not _give_up_reserve(os.path.dirname(self.path)):
                raise
            write_json(self.path, self.data)

    @property
    def closed(self) -> bool:
        return bool(self.data["outcome"])


def transactions(layout: Layout) -> str:
    """Folder of the records."""
    return os.path.join(layout.state, "transactions")


def open_record(layout: Layout) -> Record | None:
    """Record of the transaction in progress, or None."""
    return Record.load(os.path.realpath(os.path.join(transactions(layout), OPEN)))


def request(layout: Layout, to: str, options: Mapping[str, Any], reason: str, *, now: float | None = None) -> Record:
    """Write the record of a new transaction and make it the open one; the runner does the rest.

    Args:
        to: deployment id to switch to.
        options: ``adopt`` (bool), ``busy`` (wait, skip or cut), ``run`` (name of the run that asks).
        reason: why, for people who read the record.

    Raises:
        Ds4Error: another transaction is in progress.
    """
    folder = transactions(layout)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    current = open_record(layout)
    if current is not None and not current.closed:
        raise Ds4Error(
            "A switch is in progress on this host",
            found=f"to deployment {current.data['to']}, since {current.data['requested_at']}",
            cure=f"wait for it (journalctl -fu {RUNNER}), then run again",
        )
    moment = time.gmtime(now)
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', moment)}-{to}"
    path = os.path.join(folder, f"{name}.json")
    data = {
        "schema": SCHEMA,
        "id": name,
        "to": to,
        "from": None,
        "reason": reason,
        "options": dict(options),
        "requested_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment),
        "finished_at": "",
        "boot_id": "",
        "stopped_at": None,
        "served": False,
        "answered_at": None,
        "downtime_seconds": None,
        "returning": False,
        "steps": [],
        "failure": None,
        "return_failure": None,
        "outcome": "",
        "serving": "",
        "message": "",
        "evidence": os.path.join(layout.state, "evidence", name),
    }
    _keep_reserve(folder)
    write_json(path, data)
    link_atomic(os.path.basename(path), os.path.join(folder, OPEN))
    return Record(path, data)


def _keep_reserve(folder: str) -> None:
    """Take the room that a switch needs before anything is stopped.

    Raises:
        Ds4Error: there is none.
    """
    path = os.path.join(folder, RESERVE)
    try:
        with open(path, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, RESERVE_BYTES)
    except OSError as error:
        _give_up_reserve(folder)
        raise Ds4Error(
            "There is no room for the records of a switch; nothing was stopped",
            found=f"{folder}: {error.strerror}",
            required=human_bytes(RESERVE_BYTES),
            cure="free space on that file system, then run again",
        ) from error


def _give_up_reserve(folder: str) -> bool:
    """True when the reserve was there."""
    try:
        os.unlink(os.path.join(folder, RESERVE))
    except FileNotFoundError:
        return False
    return True


def close(layout: Layout, record: Record, *, keep: int = 0, **values: Any) -> None:
    """Write the outcome, then let go of the ``open`` link. Of older records and their evidence the last ``keep`` stay."""
    record.update(finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **values)
    try:
        os.unlink(os.path.join(transactions(layout), OPEN))
    except FileNotFoundError:
        pass
    _give_up_reserve(transactions(layout))
    for old in _records(layout)[:-keep] if keep else []:
        evidence = old.data["evidence"]
        if os.path.dirname(evidence) == os.path.join(layout.state, "evidence"):
            shutil.rmtree(evidence, ignore_errors=True)
        os.unlink(old.path)


def start_runner() -> Ran:
    """Let systemd run the open transaction; harmless when it already does."""
    return run(["systemctl", "--no-ask-password", "start", "--no-block", RUNNER])


def attach_or_request(layout: Layout, to: str, options: Mapping[str, Any], reason: str) -> Record:
    """The open transaction (whatever its target), or a new one to ``to``; its runner is started either way.

    Raises:
        Ds4Error: systemd does not start the runner.
    """
    with _alone(layout, "request.lock"):  # two controllers at once: the second follows what the first began
        record = open_record(layout)
        begun = record is None or record.closed
        if record is None or record.closed:
            record = request(layout, to, options, reason)
    if not Service(RUNNER).state().pid:
        run(
            ["systemctl", "--no-ask-password", "reset-failed", RUNNER]
        )  # an operator asks anew: earlier crashes do not count
    ran = start_runner()
    if ran.rc != 0:
        # Only what this call began, and what surely does not run, may be called off: all else is finished by its runner.
        called_off = begun and not ran.timed_out
        if called_off:
            close(layout, record, outcome="refused", message="its runner could not be started")
        raise Ds4Error(
            f"{RUNNER} could not be started; " + ("nothing was stopped" if called_off else "its switch stays open"),
            found=(ran.err or ran.out).strip()[:500],
            cure="run site.yml, which installs it; then `systemctl status ds4-switch`",
        )
    return record


@contextlib.contextmanager
def _alone(layout: Layout, name: str) -> Iterator[None]:
    """Hold a lock file of the state folder; waits for another holder."""
    handle = os.open(os.path.join(layout.state, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def runner_failure() -> str:
    """Last words of a runner that crashed too often to be started again; empty while it runs, waits or is done."""
    service = Service(RUNNER)
    return service.journal(lines=8).strip() or "nothing in its journal" if service.state().active == "failed" else ""


def find_record(layout: Layout, transaction: str) -> Record | None:
    """Record of a transaction by its id."""
    return Record.load(os.path.join(transactions(layout), f"{os.path.basename(transaction)}.json"))


def wait(record: Record, seconds: float, steps_seen: int = 0) -> Record:
    """Look at a transaction until it is closed, has more finished steps than ``steps_seen``, or ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    while True:
        record = Record.load(record.path) or record
        finished = sum(step["ok"] is not None for step in record.data["steps"])
        if record.closed or finished > steps_seen or time.monotonic() >= deadline:
            return record
        time.sleep(0.2)


def record_of_run(layout: Layout, run_name: str) -> Record | None:
    """Newest transaction that a run of the playbook began."""
    mine = [record for record in _records(layout) if run_name and record.data["options"].get("run") == run_name]
    return mine[-1] if mine else None


def _records(layout: Layout) -> list[Record]:
    """Readable records, oldest first: their names begin with the time."""
    try:
        names = sorted(name for name in os.listdir(transactions(layout)) if name.endswith(".json"))
    except OSError:
        return []
    found = (Record.load(os.path.join(transactions(layout), name)) for name in names)
    return [record for record in found if record is not None]


def last_record(layout: Layout) -> Record | None:
    """Newest transaction of this host, open or closed."""
    found = _records(layout)
    return found[-1] if found else None
