# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``ds4-fetch``: bring the files of a plan to this host, verified. Entered by ds4-fetch.service and by hand.

Exit codes: 0 done · 2 failed for a reason that trying again does not cure · 75 failed, worth another try (systemd does).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pwd
import sys
import threading
import time
import traceback
from typing import Any

from . import gguf, journal, records, transfer
from .assembly import Assembled, Assembly, Limits, Valve
from .errors import Ds4Error
from .fetch_state import DEFAULT_PLAN, EXIT_FINAL, TICK_SECONDS, Secrets, Status, locked
from .files import TEMPORARY, fsync_directory, human_bytes, is_ours, read_json
from .host import ds4_processes
from .memory import read_meminfo
from .plan import Plan, PlanFile, load, segment_size
from .progress import line as progress_line
from .space import mount_of
from .transfer import TransferError

EXIT_AGAIN = 75
FLOOR_SLACK = 1.02  # memory must be so far above the floor before a guest goes on


class Fetch:
    """One run over a plan. The caller holds the lock."""

    def __init__(self, plan: Plan, status: Status, secrets: Secrets) -> None:
        self.plan = plan
        self._secrets = secrets
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
        self._pinned: dict[str, str] = {}  # role → who said the hash of a file that no manifest pins
        self._over = threading.Event()

    def run(self) -> None:
        """Bring every file of the plan.

        Raises:
            Ds4Error: what failed; ``evidence["again"]`` says whether another start may help.
        """
        if self.plan.deadline_seconds:
            left = self.plan.deadline_seconds - self.status.elapsed()
            self.valve.deadline(time.monotonic() + max(left, 0.0))
        self._sweep()
        self._mind_memory()
        self.tell()  # nobody shall read the status of an earlier run
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

    def _sweep(self) -> None:
        """Remove what an interrupted writing of a record left behind."""
        for name in os.listdir(self.plan.directory):
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.plan.directory, name))

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
        """Once a second: memory, and progress."""
        while not self._over.wait(TICK_SECONDS):
            self._mind_memory()
            self.tell()

    def _mind_memory(self) -> None:
        """The manners of a guest: wait while the host is short of memory."""
        floor = self.plan.memory_floor_kib
        if not floor:
            return
        available, why = read_meminfo()["MemAvailable"], self.valve.paused_for
        if available < floor and not why:
            self.valve.pause(
                f"MemAvailable {human_bytes(available * 1024)} is below the floor {human_bytes(floor * 1024)}"
            )
            self.status.note(f"pausing: {self.valve.paused_for}")
        elif why and available >= floor * FLOOR_SLACK:
            self.valve.pause("")
            self.status.note("going on: there is memory again")
        self.status.value.update(state="paused" if self.valve.paused_for else "running", detail=self.valve.paused_for)

    def _ensure(self, item: PlanFile) -> None:
        row = self.status.row(item)
        path = self.plan.path(item)
        if not item.sha256:
            self._pin(item, path)
        record = records.read(path)
        if record and not records.quick_check(path, item.sha256) and item.bytes in (None, record["bytes"]):
            if self._trust(item, record) != record["trust"]:
                record["trust"] = self._trust(item, record)
                records.write(path, record)
            self._done(item, record)
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

    def _pin(self, item: PlanFile, path: str) -> None:
        """Hold a file whose hash no manifest says to the hub's own statement, or to what was recorded at first use."""
        record = records.read(path)
        if not os.path.lexists(path):
            if record and (record["repo"], record["revision"]) == (item.repo, item.revision):
                item.sha256, self._pinned[item.role] = record["sha256"], record["trust"]
            return
        brought = record is None or (record["how"] != "fetched" and record["trust"] == records.FIRST_USE)
        if not self.plan.fetch or not brought:
            return
        for url in item.sources:  # somebody else laid it there: the first source that answers says what it should be
            try:
                size, sha256 = self._probe(transfer.source(url, self._network(), item.bytes, ""))
            except TransferError as error:
                self.status.note(f"{transfer.bare(url)}: {error.reason}")
                continue
            item.bytes = size
            if sha256:
                item.sha256, self._pinned[item.role] = sha256, "hub"
            return

    def _trust(self, item: PlanFile, record: dict[str, Any] | None = None) -> str:
        """Who vouches for the hash of a file."""
        if item.sha256:
            return self._pinned.get(item.role, "manifest")
        return str(record["trust"]) if record else records.FIRST_USE

    def _done(self, item: PlanFile, record: dict[str, Any]) -> None:
        part = self.plan.part(item)
        for left in (part, part + ".journal"):  # of a fetch that adoption made needless
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        self.status.row(item).update(
            state="done", bytes=record["bytes"], done=record["bytes"], hashed=record["bytes"], sha256=record["sha256"],
            source=record["source"], how=record["how"], trust=record["trust"],
        )  # fmt: skip

    def _judge_present(self, item: PlanFile, path: str) -> bool:
        """Hash a file that has the right name and no valid record. True when it is the wanted one.

        Otherwise it leaves that name: what is still good of a file of ours stays for the fetch, the rest is set aside.
        """
        row = self.status.row(item)
        size = os.stat(path).st_size
        row.update(state="verifying", bytes=size, done=size, hashed=0)
        before = records.read(path)
        wanted = item.sha256 or (before["sha256"] if before else "")
        hashed: records.Hashed | None = None
        found = f"{size} bytes, not {item.bytes}" if item.bytes not in (None, size) else ""
        if not wanted and not found and item.target.endswith(".gguf"):
            found = _looks(path)
        if not found:

            def progress(count: int) -> None:
                row["hashed"] += count
                self.valve.pass_through(0, lambda: False)

            step = before["segment_bytes"] if before else self._segment(size)
            try:
                hashed = records.hash_file(path, step, progress=progress, drop_cache=self.plan.drop_cache)
            except PermissionError as error:
                raise Ds4Error(
                    f"{path} cannot be read by {self.plan.user}",
                    found=str(error.strerror),
                    cure="run site.yml, which makes a copy of its own; or let its owner open it again",
                ) from error
            if hashed.sha256 == (wanted or hashed.sha256):
                how, source = (before["how"], before["source"]) if before else ("found", path)
                record = records.make(
                    path, self._entry(item), hashed, how=how, source=source, trust=self._trust(item, before)
                )
                records.write(path, record)
                if not wanted:
                    self.status.note(records.first_use(item.target, hashed.sha256))
                self._done(item, record)
                return True
            found = f"sha256 {hashed.sha256}{self._called(hashed.sha256)}"
        damaged = before is not None and before["sha256"] == wanted and hashed is not None and _mostly(before, hashed)
        if damaged and before and hashed and self._salvage(item, path, before, hashed):
            self.status.note(f"{item.target} is damaged ({found}); fetching only what is wrong again")
        else:
            ours = damaged and before is not None and before["how"] not in ("linked", "found")
            aside = self._set_aside(item, path, hashed, ours=ours)
            self.status.note(f"{item.target} has another content ({found}); moved to {os.path.basename(aside)}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(records.record_path(path))
        fsync_directory(self.plan.directory)
        if before and not item.sha256:  # recorded at first use: the next copy has to be the same
            item.sha256, self._pinned[item.role] = wanted, before["trust"]
        row.update(state="waiting", done=0, hashed=0, bytes=item.bytes)
        return False

    def _set_aside(self, item: PlanFile, path: str, hashed: records.Hashed | None, *, ours: bool) -> str:
        """Free the final name. A damaged file of ours goes when the new one is there; what anybody else laid there stays.

        A file of another generation gets a record, so that it is known as what it is.
        """
        if ours:
            aside = self.plan.part(item)[: -len(".part")] + ".quarantine"
            os.replace(path, aside)
            return aside
        aside = f"{path}.{hashed.sha256[:8] if hashed else 'wrong'}.quarantine"
        os.replace(path, aside)
        if hashed and hashed.sha256 in self.plan.known:
            generation, _, role = self.plan.known[hashed.sha256].rpartition(" ")
            entry = {"role": role, "generation": generation}
            records.write(aside, records.make(aside, entry, hashed, how="found", source=path, trust="manifest"))
        return aside

    def _segment(self, size: int) -> int:
        return self.plan.segment_bytes or segment_size(size)

    def _salvage(self, item: PlanFile, path: str, before: dict[str, Any], hashed: records.Hashed) -> bool:
        """Make a damaged file of ours a partial one that keeps its good segments; never one that others share or map."""
        status = os.stat(path)
        engines = [name for engine in ds4_processes() for name in engine["weights"]]
        shared = status.st_nlink != 1 or status.st_uid != os.geteuid()
        mapped = any(os.path.exists(name) and os.path.samefile(name, path) for name in engines)
        if shared or mapped or before["segment_bytes"] != self._segment(hashed.bytes) or item.bytes is None:
            return False
        pairs = enumerate(zip(records.segment_crcs(before), hashed.crcs))
        good = [(number, one) for number, (one, other) in pairs if one == other]
        part = self.plan.part(item)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part + ".journal")
        os.replace(path, part)
        kept = journal.Journal(
            part + ".journal", journal.identity(before["sha256"], hashed.bytes, hashed.segment_bytes)
        )
        kept.append(good)
        kept.close()
        return True

    def _called(self, sha256: str) -> str:
        """What our manifests call a hash, for messages."""
        return f", which is {self.plan.known[sha256]}" if sha256 in self.plan.known else ""

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
                self.status.note(records.first_use(item.target, assembled.sha256))
            if not wanted or assembled.sha256 == wanted:
                if earlier:
                    self.status.note(
                        f"{item.target}: the first download was damaged at {_places(earlier[0], assembled, size)}"
                    )
                trust = "hub" if wanted and not item.sha256 else self._trust(item)
                self._publish(item, part, assembled, source.name, trust)
                return
            called = self._called(assembled.sha256)
            self.status.note(f"{item.target}: wrong hash {assembled.sha256}{called}, wanted {wanted}; set aside")
            earlier.append(assembled)
            self._quarantine(part)
            sources = sources[1:] + sources[:1]  # another source first, when there is one
        same = earlier[0].crcs == earlier[1].crcs
        cure = "another entry in weights_sources; or, when the manifest is wrong, ds4_weights_extra"
        if self._trust(item) == records.FIRST_USE:
            cure = f"remove {records.record_path(self.plan.path(item))} if the new content is wanted, then run again"
        raise Ds4Error(
            f"{item.target} arrived twice with a wrong hash",
            found=f"sha256 {earlier[0].sha256}, then {earlier[1].sha256}{self._called(earlier[1].sha256)}; "
            + (
                "both downloads are the same, so the source serves another content"
                if same
                else f"the downloads differ at {_places(earlier[0], earlier[1], size)}"
            ),
            required=f"sha256 {wanted}",
            cure=cure,
            evidence={"sha256_found": [one.sha256 for one in earlier], "sha256_wanted": wanted},
        )

    def _from_sources(self, item: PlanFile, urls: list[str]) -> tuple[Assembled, transfer.Source, int, str]:
        """A complete partial file, with its source, size and the hash that it must have (empty: unknown)."""
        network = self._network()
        failures: list[tuple[str, TransferError]] = []
        received = self._received_before
        for url in urls:
            name = self.status.row(item)["source"] = transfer.bare(url)
            try:
                source = transfer.source(url, network, item.bytes, item.sha256)
                size = item.bytes
                if size is None:
                    size = source.size = self._probe(source)[0]
                assembled = self._assemble(item, size, source)
                return assembled, source, size, item.sha256 or source.claims.sha256
            except TransferError as error:
                self.status.note(f"{name}: {error.reason}")
                failures.append((name, error))
        # A line that gave something, today or at an earlier start, will be back; one that never did is a wrong address.
        progress = self._received_before > received
        lost = self.status.received_before and not any(error.final or error.first for _name, error in failures)
        raise Ds4Error(
            f"{item.target} ({item.role}) could not be fetched",
            found="; ".join(f"{name}: {error.reason}" for name, error in failures),
            required=f"one source of it that works ({item.repo or 'weights_sources'})",
            cure=next((error.cure for _name, error in failures if error.cure), "check the network, then run again"),
            evidence={"again": progress or bool(lost)},
        )

    def _probe(self, source: transfer.Source) -> tuple[int, str]:
        """Length of a file as its source says it, and its sha256 where the source says that too."""
        lines = source.connections()
        try:
            claims = source.probe(lines)
        finally:
            lines.close()
        if claims.size is None:
            raise TransferError("does not say how long the file is", final=True)
        return claims.size, claims.sha256

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
            proxy_credentials=self._secrets.proxy_credentials,
            no_proxy=plan.no_proxy,
            ca_file=plan.ca_file,
            token=self._secrets.token,
            token_hosts=tuple(plan.token_hosts),
            allowed_hosts=tuple(plan.allowed_hosts),
            stall_seconds=plan.stall_seconds,
        )

    def _quarantine(self, part: str) -> None:
        """Keep a wrong download for a look, as long as there is room for the next one beside it."""
        aside = part[: -len(".part")] + ".quarantine"
        os.replace(part, aside)
        os.unlink(part + ".journal")
        place, size = os.statvfs(self.plan.directory), os.stat(aside).st_size
        if place.f_bavail * place.f_frsize < size:
            os.unlink(aside)
            self.status.note("there is no room to keep the wrong download beside the next one; removed")
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part[: -len(".part")] + ".quarantine")
        self._done(item, record)
        self.status.note(f"{item.target}: complete, sha256 {assembled.sha256}")


def _looks(path: str) -> str:
    """Why a file of unknown hash cannot be the wanted one; empty when nothing speaks against it."""
    try:
        gguf.check_file(path)
    except Ds4Error as error:
        return error.found
    return ""


def _mostly(before: dict[str, Any], hashed: records.Hashed) -> bool:
    """Is this the recorded file with some damage, and not another one that was written over it?"""
    pairs = list(itertools.zip_longest(records.segment_crcs(before), hashed.crcs))
    return 2 * sum(1 for one, other in pairs if one == other) > len(pairs)


def _places(first: Assembled, second: Assembled, size: int) -> str:
    return records.differences(first.segment_bytes, size, first.crcs, second.crcs) or "no place"


def check_place(plan: Plan) -> None:
    """Stop when the disk of the weights is not there, before anything is written under its mount point.

    Raises:
        Ds4Error: what is there instead.
    """
    directory = plan.directory
    wanted = plan.mount
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


def run(plan: Plan, secrets: Secrets | Ds4Error) -> int:
    """Do what the plan says, or follow the one who does; take over when that one dies. Returns the exit code.

    Args:
        secrets: or why they could not be read, to be told where everything else is told.
    """
    check_place(plan)
    while True:
        with locked(plan.directory) as mine:
            if mine:
                return _work(plan, secrets)
        code = _follow(plan)
        if code is not None:
            return code
        print("ds4-fetch: it died, or did another plan; taking over", file=sys.stderr)


def _work(plan: Plan, secrets: Secrets | Ds4Error) -> int:
    status = Status(plan)
    fetch = Fetch(plan, status, secrets if isinstance(secrets, Secrets) else Secrets())
    try:
        if isinstance(secrets, Ds4Error):
            raise secrets
        fetch.run()
    except Exception as raised:  # whatever it is, nobody shall wait for a status that never comes
        error = _trouble(plan, raised)
        again = bool(error.evidence.get("again"))
        status.value.update(state="failed", detail=error.what, error=error.result()["error"], again=again)
        fetch.tell()
        print(f"ds4-fetch: {error}", file=sys.stderr)
        return EXIT_AGAIN if again else EXIT_FINAL
    with contextlib.suppress(FileNotFoundError):
        os.unlink(plan.unfinished)
    return 0


def _trouble(plan: Plan, error: Exception) -> Ds4Error:
    """What to tell about an exception."""
    if isinstance(error, Ds4Error):
        return error
    if not isinstance(error, OSError):
        traceback.print_exception(type(error), error, error.__traceback__)
        return Ds4Error(
            "The fetcher met something it does not know",
            found=f"{type(error).__name__}: {error}",
            cure="run again (what is there is kept); report it with `journalctl -u ds4-fetch`",
        )
    return Ds4Error(
        f"{plan.directory} cannot be used",
        found=f"{error.strerror}" + (f": {error.filename}" if error.filename else ""),
        required=f"a directory that {plan.user} can write to, with room",
        cure="see `df` and `dmesg`; then run again (what is there is kept)",
    )


def _follow(plan: Plan) -> int | None:
    """Follow the fetch that somebody else runs. Returns how it ended, or None when it died."""
    print("ds4-fetch: another one is at work on this directory; following it", file=sys.stderr)
    last = ""
    while True:
        with locked(plan.directory) as over:
            value = read_json(plan.status_file) or {}
        text = progress_line(value)
        if text != last and value.get("state") != "failed":
            print(text, file=sys.stderr, flush=True)
        last = text
        if over and value.get("plan") != plan.id:  # it had other things to do
            return None
        if over and value.get("state") == "done":
            return 0
        if over and value.get("state") == "failed":
            error = value["error"]
            known = {key: error[key] for key in ("found", "required", "cure")}
            print(f"ds4-fetch: {Ds4Error(error['what'], **known)}", file=sys.stderr)
            return EXIT_AGAIN if value.get("again") else EXIT_FINAL
        if over:
            return None
        time.sleep(TICK_SECONDS)


def verify(plan: Plan, deep: bool) -> list[dict[str, Any]]:
    """Judge every file of the plan: ``[{role, file, problem, sha256}]``, an empty problem for a good one.

    A deep look reads everything. It renews the record of a file that is good although its time or inode changed, and
    notes damage in the record of one that is not, so that neither the engine nor the next run trusts it.
    """
    results = []
    for item in plan.files:
        path = plan.path(item)
        problem, record = records.quick_check(path, item.sha256), records.read(path)
        result: dict[str, Any] = {"role": item.role, "file": item.target, "problem": problem}
        results.append(result)
        if not deep or not os.path.isfile(path):
            continue
        size = os.stat(path).st_size
        hashed = records.hash_file(
            path,
            record["segment_bytes"] if record else segment_size(size),
            drop_cache=plan.drop_cache or bool(ds4_processes()),
        )
        wanted = item.sha256 or (record["sha256"] if record else hashed.sha256)
        result["sha256"] = hashed.sha256
        if hashed.sha256 != wanted:
            result["problem"] = f"{item.target} has the content sha256 {hashed.sha256}, wanted {wanted}"
            if record and record["sha256"] == wanted:
                places = records.differences(record["segment_bytes"], size, records.segment_crcs(record), hashed.crcs)
                result["problem"] += f"; damaged at {places}"
                with contextlib.suppress(PermissionError):  # an ordinary user may know it, and not write it down
                    records.write(path, {**record, "damaged": places or "an unknown place"})
        elif problem:
            entry = {"role": item.role, "generation": plan.generation, "repo": item.repo, "revision": item.revision}
            how, source = (record["how"], record["source"]) if record else ("found", path)
            trust = "manifest" if item.sha256 else record["trust"] if record else records.FIRST_USE
            try:
                records.write(path, records.make(path, entry, hashed, how=how, source=source, trust=trust))
                result["problem"] = records.quick_check(path, item.sha256)
            except PermissionError:
                result["problem"] += "; its content is right, `sudo ds4-fetch verify --deep` renews the record"
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
        secrets: Secrets | Ds4Error = Secrets()
        if options.command == "run":
            try:
                secrets = Secrets.of(plan)  # while we may still read them
            except Ds4Error as problem:
                secrets = problem
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
        code = run(plan, secrets)
        if options.json:
            print(json.dumps(read_json(plan.status_file), indent=2))
        return code
    except (Ds4Error, OSError) as raised:
        error = raised if isinstance(raised, Ds4Error) else _trouble(plan, raised)
        if options.json:
            print(json.dumps(error.result(), indent=2))
        else:
            print(f"ds4-fetch: {error}", file=sys.stderr)
        return EXIT_FINAL


if __name__ == "__main__":
    sys.exit(main())
