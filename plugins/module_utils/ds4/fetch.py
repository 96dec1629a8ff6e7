# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``ds4-fetch``: bring the files of a plan to this host, verified. Entered by ds4-fetch.service and by hand.

Exit codes: 0 done · 2 failed for a reason that trying again does not cure · 75 failed, worth another try (systemd does).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pwd
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from . import records, transfer
from .assembly import Assembled, Assembly, Limits, Valve, segment_size
from .errors import Ds4Error
from .files import fsync_directory, human_bytes, is_ours, read_json
from .memory import read_meminfo
from .plan import Plan, PlanFile, load
from .progress import line as progress_line
from .space import mount_of
from .transfer import TransferError

DEFAULT_PLAN = "/var/lib/ds4/state/weights/plan.json"
EXIT_FINAL = 2
EXIT_AGAIN = 75
TOKEN_CREDENTIAL = "hf_token"  # noqa: S105  (a name, not a secret)
PROXY_CREDENTIAL = "proxy_credentials"
TICK_SECONDS = 1.0
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
        self._wire_before = int(before["bytes_received"]) if same and before else 0
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
                bytes_received=self._wire_before + received,
                rate_bytes_per_second=round(rate),
                notes=list(self._notes),
            )
            text = json.dumps(self.value, sort_keys=True)
            with contextlib.suppress(OSError):  # a full disk must not hide the reason why it is full
                replace_text(self._path, text)


def replace_text(path: str, text: str) -> None:
    """Replace a file in one step, without waiting for the disk; never through a link, since root writes here too."""
    temporary = f"{path}.new-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)


class Fetch:
    """One run over a plan. The caller holds the lock."""

    def __init__(self, plan: Plan, status: Status) -> None:
        self.plan = plan
        self.status = status
        self.valve = Valve(plan.bandwidth_bytes_per_second)
        self.limits = Limits(
            connections=plan.connections,
            segment_bytes=plan.segment_bytes,
            stall_seconds=plan.stall_seconds,
            stall_bytes_per_second=plan.stall_bytes_per_second,
            retries=plan.retries,
            backoff_seconds=plan.backoff_seconds,
            backoff_limit_seconds=plan.backoff_limit_seconds,
            drop_cache=plan.drop_cache,
        )
        self._assembly: tuple[PlanFile, Assembly] | None = None
        self._received_before = 0  # by assemblies that are closed
        self._over = threading.Event()

    def run(self) -> None:
        """Bring every file of the plan.

        Raises:
            Ds4Error: what failed; ``evidence["again"]`` says whether another start may help.
        """
        if self.plan.deadline_seconds:
            left = self.plan.deadline_seconds - self.status.elapsed()
            self.valve.deadline(time.monotonic() + max(left, 0.0))
        self._check_place()
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            for item in self.plan.files:
                self._ensure(item)
            self.status.value.update(state="done", detail="")
        finally:
            self._over.set()
            watcher.join()
            self.tell()

    def tell(self) -> None:
        """Bring the status file up to date."""
        received = self._received_before
        current = self._assembly
        if current is not None:
            item, assembly = current
            received += assembly.received
            self.status.row(item).update(done=assembly.present, hashed=assembly.hashed, bytes=assembly.size)
        self.status.write(received)

    def _watch(self) -> None:
        """Once a second: progress, and the guest's manners."""
        floor = self.plan.memory_floor_kib
        while not self._over.wait(TICK_SECONDS):
            if floor:
                available = read_meminfo()["MemAvailable"]
                why = self.valve.paused_for
                if available < floor and not why:
                    self.valve.pause(
                        f"MemAvailable {human_bytes(available * 1024)} is below the floor {human_bytes(floor * 1024)}"
                    )
                    self.status.note(f"pausing: {self.valve.paused_for}")
                elif why and available >= floor * 1.02:
                    self.valve.pause("")
                    self.status.note("going on: there is memory again")
                self.status.value.update(
                    state="paused" if self.valve.paused_for else "running", detail=self.valve.paused_for
                )
            self.tell()

    def _check_place(self) -> None:
        directory = self.plan.directory
        wanted = self.plan.mount
        if wanted.get("path"):
            found = mount_of(directory)
            if found["path"] != wanted["path"] or (
                wanted.get("uuid") and found["uuid"] and found["uuid"] != wanted["uuid"]
            ):
                raise Ds4Error(
                    f"The disk that holds {directory} is not mounted",
                    found=f"{directory} is on {found['path']} ({found['uuid'] or found['source']})",
                    required=f"the file system mounted at {wanted['path']} ({wanted.get('uuid') or 'any'})",
                    cure=f"mount {wanted['path']}; or accept the new place with weights_mount_change_accepted: true",
                )
        if not is_ours(directory):
            raise Ds4Error(
                f"{directory} does not bear our marker",
                found="a directory of somebody else, or none",
                required="a directory made by ds4-fleet",
                cure="run site.yml, or choose another weights_directory",
            )

    def _ensure(self, item: PlanFile) -> None:
        row = self.status.row(item)
        path = self.plan.path(item)
        if not records.quick_check(path, item.sha256):
            self._done(item, records.read(path) or {})
            return
        if os.path.islink(path):
            raise Ds4Error(
                f"{path} is a symbolic link",
                found=f"a link to {os.readlink(path)}",
                required="a regular file (hard links are welcome)",
                cure="remove the link, and name the file's directory in weights_adopt_paths",
            )
        if os.path.exists(path) and self._judge_present(item, path):
            return
        if not self.plan.fetch:
            raise Ds4Error(
                f"{item.target} ({item.role}) is not on this host and weights_fetch is false",
                required=f"{path} with sha256 {item.sha256 or 'of your choice'}",
                cure="put the file there, or set weights_fetch: true",
            )
        row["state"] = "fetching"
        self._download(item)

    def _done(self, item: PlanFile, record: dict[str, Any]) -> None:
        self.status.row(item).update(
            state="done", bytes=record["bytes"], done=record["bytes"], hashed=record["bytes"], sha256=record["sha256"],
            source=record["source"], how=record["how"], trust=record["trust"],
        )  # fmt: skip

    def _judge_present(self, item: PlanFile, path: str) -> bool:
        """Hash a file that has the right name and no valid record. True when it is the wanted one."""
        row = self.status.row(item)
        size = os.stat(path).st_size
        row.update(state="verifying", bytes=size, done=size, hashed=0)
        hashed: records.Hashed | None = None
        if item.bytes is None or size == item.bytes:

            def progress(count: int) -> None:
                row["hashed"] += count
                self.valve.pass_through(0, lambda: False)

            hashed = records.hash_file(path, segment_size(size), progress=progress, drop_cache=self.plan.drop_cache)
            before = records.read(path)
            wanted = item.sha256 or (before["sha256"] if before else hashed.sha256)
            if hashed.sha256 == wanted:
                trust = "manifest" if item.sha256 else "first-use"
                how = before["how"] if before else "found"
                source = before["source"] if before else path
                record = records.make(path, self._entry(item), hashed, how=how, source=source, trust=trust)
                records.write(path, record)
                self._done(item, record)
                return True
        aside = self._set_aside(path, hashed.sha256 if hashed else "")
        found = (
            f"sha256 {hashed.sha256}{self._called(hashed.sha256)}" if hashed else f"{size} bytes, wanted {item.bytes}"
        )
        self.status.note(f"{item.target} has another content ({found}); moved to {os.path.basename(aside)}")
        row.update(state="waiting", done=0, hashed=0, bytes=item.bytes)
        return False

    def _called(self, sha256: str) -> str:
        """What our manifests call a hash, for messages."""
        return f", which is {self.plan.known[sha256]}" if sha256 in self.plan.known else ""

    def _set_aside(self, path: str, sha256: str) -> str:
        aside = f"{path}.{sha256[:8] or 'wrong'}.quarantine"
        os.replace(path, aside)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(records.record_path(path))
        fsync_directory(self.plan.directory)
        return aside

    def _entry(self, item: PlanFile) -> dict[str, Any]:
        return {"role": item.role, "generation": self.plan.generation, "repo": item.repo, "revision": item.revision}

    def _download(self, item: PlanFile) -> None:
        """Fetch a file; a wrong hash costs one more fetch and then ends it."""
        part = self.plan.part(item)
        earlier: list[Assembled] = []
        sources = list(item.sources)
        for _attempt in range(2):
            assembled, source, size, wanted = self._from_sources(item, sources)
            if not wanted:
                self.status.note(
                    f"{item.target}: nobody publishes its hash; recorded at first use: sha256 {assembled.sha256}"
                )
            if not wanted or assembled.sha256 == wanted:
                if earlier:
                    self.status.note(
                        f"{item.target}: the first download was damaged at {_differences(earlier[0], assembled, size)}"
                    )
                trust = "manifest" if item.sha256 else "hub" if wanted else "first-use"
                self._publish(item, part, assembled, source.name, trust)
                return
            self.status.note(
                f"{item.target}: wrong hash {assembled.sha256}{self._called(assembled.sha256)}, wanted {wanted}; set aside"
            )
            earlier.append(assembled)
            self._quarantine(part)
            sources = sources[1:] + sources[:1]  # another source first, when there is one
        same = earlier[0].crcs == earlier[1].crcs
        raise Ds4Error(
            f"{item.target} arrived twice with a wrong hash",
            found=f"sha256 {earlier[0].sha256}, then {earlier[1].sha256}{self._called(earlier[1].sha256)}; "
            + (
                "both downloads are the same, so the source serves another content"
                if same
                else f"the downloads differ at {_differences(earlier[0], earlier[1], size)}"
            ),
            required=f"sha256 {wanted}",
            cure="another entry in weights_sources; or, when the manifest is wrong, ds4_weights_extra",
            evidence={"sha256_found": [one.sha256 for one in earlier], "sha256_wanted": wanted},
        )

    def _from_sources(self, item: PlanFile, urls: list[str]) -> tuple[Assembled, transfer.Source, int, str]:
        """A complete partial file, with its source, size and the hash that it must have (empty: unknown)."""
        network = self._network()
        failures: list[tuple[str, TransferError]] = []
        received = self._received_before
        for url in urls:
            source = transfer.source(url, network, item.bytes, item.sha256)
            self.status.row(item)["source"] = source.name
            try:
                size = item.bytes
                if size is None:
                    size = self._probe(source)
                    source.size = size
                assembled = self._assemble(item, size, source)
                return assembled, source, size, item.sha256 or source.claims.sha256
            except TransferError as error:
                self.status.note(f"{source.name}: {error.reason}")
                failures.append((source.name, error))
        progress = self._received_before > received
        raise Ds4Error(
            f"{item.target} ({item.role}) could not be fetched",
            found="; ".join(f"{name}: {error.reason}" for name, error in failures),
            required=f"one source of it that works ({item.repo or 'weights_sources'})",
            cure=next((error.cure for _name, error in failures if error.cure), "check the network, then run again"),
            evidence={"again": progress},
        )

    def _probe(self, source: transfer.Source) -> int:
        lines = source.connections()
        try:
            claims = source.probe(lines)
        finally:
            lines.close()
        if claims.size is None:
            raise TransferError("does not say how long the file is", final=True)
        return claims.size

    def _assemble(self, item: PlanFile, size: int, source: transfer.Source) -> Assembled:
        part = self.plan.part(item)
        self._check_room(item, size, part)
        assembly = Assembly(
            part,
            size,
            item.sha256,
            self.limits,
            self.valve,
            check_header=item.target.endswith(".gguf"),
            note=self.status.note,
        )
        if assembly.present:
            self.status.note(f"{item.target}: {human_bytes(assembly.present)} of {human_bytes(size)} are there already")
        self._assembly = (item, assembly)
        try:
            return assembly.run(source)
        finally:
            self.tell()
            self._assembly = None
            self._received_before += assembly.received
            assembly.close()

    def _check_room(self, item: PlanFile, size: int, part: str) -> None:
        place = os.statvfs(self.plan.directory)
        free = place.f_bavail * place.f_frsize
        there = os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
        missing = max(size - there, 0)
        if missing > free:
            raise Ds4Error(
                f"There is no room for {item.target} in {self.plan.directory}",
                found=f"{human_bytes(free)} free",
                required=f"{human_bytes(missing)}, that is {missing - free} bytes more",
                cure="free room, move weights_directory, or see weights_old_generation",
                evidence={"missing_bytes": missing - free},
            )

    def _network(self) -> transfer.Network:
        plan = self.plan
        return transfer.Network(
            proxy_url=plan.proxy_url,
            proxy_credentials=secret(plan.proxy_credentials_file, PROXY_CREDENTIAL, "weights_proxy_credentials_file"),
            no_proxy=plan.no_proxy,
            ca_file=plan.ca_file,
            token=secret(plan.token_file, TOKEN_CREDENTIAL, "weights_token_file"),
            allowed_hosts=tuple(plan.allowed_hosts),
            stall_seconds=plan.stall_seconds,
        )

    def _quarantine(self, part: str) -> None:
        os.replace(part, part[: -len(".part")] + ".quarantine")
        os.unlink(part + ".journal")
        fsync_directory(self.plan.directory)

    def _publish(self, item: PlanFile, part: str, assembled: Assembled, source: str, trust: str) -> None:
        """Give the file its final name; the record is there before the name is."""
        path = self.plan.path(item)
        os.chmod(part, 0o644)
        found = os.stat(part)
        hashed = records.Hashed(
            assembled.sha256, assembled.segment_bytes, assembled.crcs, found.st_size, found.st_mtime_ns, found.st_ino
        )
        record = records.make(path, self._entry(item), hashed, how="fetched", source=source, trust=trust)
        records.write(path, record)
        os.replace(part, path)
        fsync_directory(self.plan.directory)
        for left in (part + ".journal", part[: -len(".part")] + ".quarantine"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        self._done(item, record)
        self.status.note(f"{item.target}: complete, sha256 {assembled.sha256}")


def _differences(first: Assembled, second: Assembled, size: int) -> str:
    """Byte ranges in which two downloads of the same file differ."""
    step = first.segment_bytes
    pairs = zip(first.crcs, second.crcs)
    ranges = [
        f"bytes {n * step}-{min((n + 1) * step, size) - 1}" for n, (one, other) in enumerate(pairs) if one != other
    ]
    return ", ".join(ranges[:8]) + (f" and {len(ranges) - 8} more" if len(ranges) > 8 else "") or "no place (same data)"


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
    handle = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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


def run(plan: Plan) -> int:
    """Do what the plan says, or attach to the one who does. Returns the exit code."""
    with locked(plan.directory) as mine:
        if not mine:
            return attach(plan)
        status = Status(plan)
        fetch = Fetch(plan, status)
        try:
            fetch.run()
        except Ds4Error as error:
            status.value.update(
                state="failed",
                detail=error.what,
                error=error.result()["error"],
                again=bool(error.evidence.get("again")),
            )
            fetch.tell()
            print(f"ds4-fetch: {error}", file=sys.stderr)
            return EXIT_AGAIN if error.evidence.get("again") else EXIT_FINAL
        with contextlib.suppress(FileNotFoundError):
            os.unlink(plan.unfinished)
        return 0


def attach(plan: Plan) -> int:
    """Follow the fetch that somebody else runs, until it ends."""
    print("ds4-fetch: another one is at work on this directory; following it", file=sys.stderr)
    last = ""
    while True:
        with locked(plan.directory) as free:
            over = free
        value = read_json(plan.status_file) or {}
        text = progress_line(value)
        if text != last:
            print(text, file=sys.stderr, flush=True)
            last = text
        if over:
            return 0 if value.get("state") == "done" else EXIT_AGAIN if value.get("again") else EXIT_FINAL
        time.sleep(TICK_SECONDS)


def verify(plan: Plan, deep: bool) -> list[dict[str, Any]]:
    """Judge every file of the plan. A deep look reads everything, names damaged places and renews good records."""
    results = []
    for item in plan.files:
        path = plan.path(item)
        result: dict[str, Any] = {
            "role": item.role,
            "file": item.target,
            "problem": records.quick_check(path, item.sha256),
        }
        if deep and os.path.isfile(path):
            record = records.read(path)
            hashed = records.hash_file(path, record["segment_bytes"] if record else segment_size(os.stat(path).st_size))
            result["sha256"] = hashed.sha256
            wanted = item.sha256 or (record["sha256"] if record else hashed.sha256)
            if hashed.sha256 != wanted:
                result["problem"] = f"{item.target} has the content sha256 {hashed.sha256}, wanted {wanted}"
                if record:
                    known = Assembled("", record["segment_bytes"], records.segment_crcs(record))
                    result["problem"] += "; damaged: " + _differences(
                        known, Assembled("", hashed.segment_bytes, hashed.crcs), hashed.bytes
                    )
            elif result["problem"]:
                entry = {"role": item.role, "generation": plan.generation, "repo": item.repo, "revision": item.revision}
                how, source = (record["how"], record["source"]) if record else ("found", path)
                trust = "manifest" if item.sha256 else "first-use"
                records.write(path, records.make(path, entry, hashed, how=how, source=source, trust=trust))
                result["problem"] = records.quick_check(path, item.sha256)
        results.append(result)
    return results


def become(user: str) -> None:
    """Give up root for the account that owns the weights; by hand and under sudo the files get the right owner."""
    if os.geteuid() == 0 and user != "root":
        try:
            entry = pwd.getpwnam(user)
        except KeyError as error:
            raise Ds4Error(f"There is no user {user}", cure="run site.yml, which makes it") from error
        os.initgroups(user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ds4-fetch", description="Fetch and verify the weights of DeepSeek-V4-Flash.")
    parser.add_argument("--plan", default=DEFAULT_PLAN, metavar="FILE", help="plan written by site.yml [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--deep", action="store_true", help="verify: read and hash everything again")
    parser.add_argument(
        "command",
        nargs="?",
        default="status",
        choices=("run", "status", "verify", "plan"),
        help="run: fetch, or follow the fetch at work; status: how far is it; verify: are the files good; plan: what is wanted [status]",
    )
    options = parser.parse_args(argv)
    try:
        plan = load(options.plan)
        if options.command == "plan":
            print(json.dumps(plan.as_json(), indent=2))
            return 0
        if options.command == "status":
            value = read_json(plan.status_file) or {}
            print(json.dumps(value, indent=2) if options.json else progress_line(value))
            return 0
        become(plan.user)
        if options.command == "verify":
            results = verify(plan, options.deep)
            bad = [result for result in results if result["problem"]]
            if options.json:
                print(json.dumps(results, indent=2))
            else:
                for result in results:
                    print(f"{result['role']:8} {result['file']}  {result['problem'] or 'good'}")
                if bad:
                    print("repair: sudo ds4-fetch run, or site.yml", file=sys.stderr)
            return EXIT_FINAL if bad else 0
        code = run(plan)
        if options.json:
            print(json.dumps(read_json(plan.status_file), indent=2))
        return code
    except Ds4Error as error:
        if options.json:
            print(json.dumps(error.result(), indent=2))
        else:
            print(f"ds4-fetch: {error}", file=sys.stderr)
        return EXIT_FINAL


if __name__ == "__main__":
    sys.exit(main())
