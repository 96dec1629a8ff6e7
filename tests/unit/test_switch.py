"""The switch transaction against a simulated host: every way it can end, and every point it can be taken up again."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import deployment as store
from ds4 import probe, switch, transaction
from ds4.command import Ran
from ds4.deployment import Layout
from ds4.errors import Ds4Error
from ds4.files import write_json
from ds4.service import State
from ds4.switch import Switch
from ds4.transaction import Record

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[2] / "docs/schemas/transaction.schema.json").read_text(encoding="utf-8")
)
OLD, NEW, OLDER = "0" * 12, "1" * 12, "2" * 12
LIMITS = {
    "memory_seconds": 20,
    "start_seconds": 60,
    "ready_seconds": 30,
    "stop_seconds": 10,
    "exchange_seconds": 60,
    "busy_seconds": 5,
    "cut_seconds": 2,
}
POLICY: dict[str, Any] = {"limits": LIMITS, "memory_residue_gib": 4, "keep_records": 3, "smoke": {}}


class Killed(BaseException):
    """The runner dies here, as by SIGKILL: nothing after it runs."""


class FakeService:
    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine

    def start(self, timeout_seconds: float) -> Ran:
        return self.machine.start_unit()

    def stop(self, timeout_seconds: float) -> Ran:
        self.machine.stop_unit()
        return Ran(0, "", "")

    def stop_later(self) -> Ran:
        self.machine.log.append("SIGTERM")
        return Ran(0, "", "")

    def kill(self) -> Ran:
        self.machine.log.append("SIGKILL")
        if self.machine.immortal:
            return Ran(0, "", "")
        self.machine.pid, self.machine.process = 0, ""
        self.machine.free += self.machine.held
        return Ran(0, "", "")

    def enable(self) -> Ran:
        self.machine.enabled = True
        return Ran(0, "", "")

    def disable(self) -> Ran:
        self.machine.enabled = False
        return Ran(0, "", "")

    def journal(self, invocation: str = "", lines: int = 200) -> str:
        return "ds4: CUDA error\n" if self.machine.unit in self.machine.dies else "listening\n"


class FakeMachine(switch.Machine):
    """A host in memory. ``unit`` is the deployment that the unit file starts; ``pid`` its process, 0 when stopped."""

    def __init__(self, layout: Layout, *, serves: str = OLD) -> None:
        self.layout = layout
        self.service: Any = FakeService(self)
        self.clock = 1000.0
        self.boot = "boot-1"
        self.unit = serves
        self.pid = 7 if serves else 0
        self.process = serves  # deployment of the process
        self.enabled = bool(serves)
        self.held = 100
        self.free = 20 if serves else 120
        self.log: list[str] = []
        self.most_engines = 1 if serves else 0
        # What goes wrong.
        self.dies: set[str] = set()  # deployments whose process dies at start
        self.never_ready: set[str] = set()
        self.wrong: set[str] = set()  # deployments that answer wrongly
        self.broken: dict[str, list[str]] = {}  # deployment → problems of its files
        self.absent: set[str] = set()  # deployments whose weights come only in the switch
        self.deleted: set[str] = set()  # deployments whose weights were deleted
        self.fetch_fails = False
        self.refused_flag = ""
        self.keeps_memory = False
        self.second_copy = False  # somebody maps the weights once the old engine is gone
        self.memory_late = 0  # gate calls that fail first
        self.ignores_sigterm = False
        self.immortal = False
        self.busy = 0.0
        self.others: list[dict[str, Any]] = []
        self.foreign_runs_ = False
        self.foreign_comes_back = True
        self.foreign_is_old = False  # it answers, but has not all the interfaces that ours must have
        self.kill_at = -1  # count of observable actions after which the runner is killed
        self.actions = 0
        self.boots_late = False  # after a boot the unit's start is queued for a while
        self.queued = 0  # looks until a queued start is executed

    def point(self, text: str) -> None:
        """The runner may be killed right here."""
        self.actions += 1
        if self.actions == self.kill_at:
            raise Killed(text)

    def act(self, text: str) -> None:
        """An action that changes the host: the runner may be killed right before it."""
        self.point(text)
        self.log.append(text)
        engines = (1 if self.pid else 0) + (1 if self.foreign_runs_ else 0)
        self.most_engines = max(self.most_engines, engines)

    # -- systemd
    def state(self) -> State:
        if self.queued:
            self.queued -= 1
            if not self.queued:
                self._boot_unit()
        active = "active" if self.pid else "inactive"
        return State(
            True, active, "running" if self.pid else "dead", self.pid, 0, "success", 0, "i", False, self.enabled, []
        )

    def start_unit(self) -> Ran:
        self.queued = 0
        if self.pid:
            return Ran(0, "", "")
        self.act(f"start {self.unit}")
        if self.unit in self.dies:
            self.clock += 1
            return Ran(0, "", "")  # executed, then dead: readiness finds it
        self.pid, self.process, self.free = self.actions + 100, self.unit, self.free - self.held
        assert not self.foreign_runs_, "two engines"
        return Ran(0, "", "")

    def stop_unit(self) -> None:
        self.queued = 0
        if not self.pid:
            return
        self.act("stop")
        if self.immortal:
            return
        self.clock += LIMITS["stop_seconds"] if self.ignores_sigterm else 1
        self.pid, self.process = 0, ""
        if not self.keeps_memory:
            self.free += self.held

    def running(self) -> str:
        return self.process if self.pid else ""

    def alive(self, pid: int, started_ticks: int) -> bool:
        return pid == self.pid and pid != 0

    def started_ticks(self, pid: int) -> int:
        return pid

    # -- engine
    def available_kib(self) -> int:
        return self.free

    def given_back_kib(self, pid: int, policy: Mapping[str, Any]) -> int:
        return self.held

    def metrics(self, host: str, port: int) -> dict[str, float]:
        return {"ds4_requests_inflight": self.busy}

    def is_ready(self, host: str, port: int) -> bool:
        self.point("ask whether it answers")
        return bool(self.pid) and self.process not in self.never_ready

    def smoke(self, manifest: Mapping[str, Any], policy: Mapping[str, Any]) -> probe.Smoke:
        self.point("ask the questions")
        assert self.process == manifest["id"], "the questions go to the deployment that is to be proven"
        ok = self.process not in self.wrong
        check = probe.Check("capital of France", ok, "Paris" if ok else "the answer was 'Berlin'")
        return probe.Smoke(ok, [check], 0.5, 0.2, {"ok": ok})

    def pass_gate(self, manifest: Mapping[str, Any], wait_seconds: float) -> int:
        assert not self.pid, "the gate opens only when the process is gone"
        if self.second_copy:
            raise Ds4Error("Another engine is running; a second copy of the weights would not fit")
        needed = manifest["memory_required_kib"]
        if self.memory_late > 0 or self.free < needed:
            self.memory_late -= 1
            raise Ds4Error(
                "Not enough memory is available to load the engine",
                found=f"{self.free} KiB",
                evidence={"mem_available_kib": self.free, "required_kib": needed},
            )
        return self.free

    def wait_for_memory(self, manifest: Mapping[str, Any], wait_seconds: float) -> int:
        return self.pass_gate(manifest, wait_seconds)

    def ask(self, manifest: Mapping[str, Any], *arguments: str) -> Ran:
        if self.refused_flag and self.refused_flag in arguments:
            return Ran(2, "", f"ds4-server: unknown option: {self.refused_flag}")
        if "--ds4-fleet-asks" in arguments:
            return Ran(2, "", "ds4-server: unknown option: --ds4-fleet-asks")
        return Ran(0, f"ds4-server {manifest['build']['version']}\n", "")

    # -- files
    def drift(self, manifest: Mapping[str, Any]) -> list[str]:
        return [] if self.pid and self.process == manifest["id"] == self.unit else ["it differs"]

    def problems(self, manifest: Mapping[str, Any], coming: frozenset[str] = frozenset()) -> list[str]:
        if manifest["id"] in self.deleted or (manifest["id"] in self.absent and not coming):
            return ["base weights: No such file or directory"]
        return self.broken.get(manifest["id"], [])

    def coming(self) -> frozenset[str]:
        return frozenset({"sha256 of the new weights"}) if self.absent else frozenset()

    def exchange(self, seconds: float) -> str:
        assert not self.pid, "nothing is deleted under a running engine"
        self.act("delete and fetch")
        self.deleted.add(OLD)
        if self.fetch_fails:
            raise Ds4Error("The weights did not arrive in time")
        self.absent.clear()
        return "deleted legacy base; 0731: base fetched"

    def activate(self, manifest: Mapping[str, Any]) -> None:
        self.act(f"activate {manifest['id']}")
        assert not self.pid, "a unit is exchanged only while it is stopped"
        self.unit = manifest["id"]

    # -- somebody else's engine
    def foreign(self, port: int, weights: list[str]) -> list[dict[str, Any]]:
        assert weights[0] == "/w"
        return self.others if self.foreign_runs_ else []

    def remember(self, others: list[dict[str, Any]], folder: str) -> str:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "adopted.json")
        Path(path).write_text(
            json.dumps({"schema": 1, "pid": 4711, "argv": [], "directory": "/", "host": "127.0.0.1", "port": 8000}),
            encoding="utf-8",
        )
        return path

    def end(self, process: str, seconds: float) -> str:
        if self.foreign_runs_:
            self.act("end foreign")
            self.foreign_runs_ = False
            self.free += 0 if self.keeps_memory else self.held
        self.log.append(f"foreign: {seconds:g} s")
        return "ended"

    def foreign_runs(self, process: str) -> bool:
        return self.foreign_runs_

    def start_again(self, process: str, seconds: float) -> str:
        if not self.foreign_comes_back:
            raise Ds4Error("The process that served before could not be started again")
        if not self.foreign_runs_:
            assert not self.pid, "two engines"
            assert self.free >= self.held, "a blind start"
            self.act("start foreign")
            self.foreign_runs_ = True
            self.free -= self.held
        self.point("wait until it answers")
        return "answers again"

    def smoke_foreign(self, process: str, policy: Mapping[str, Any]) -> probe.Smoke:
        assert self.foreign_runs_
        ok = not self.foreign_is_old
        return probe.Smoke(ok, [probe.Check("responses API", ok, "ok" if ok else "status 404")], 0.5, 0.2, {"ok": ok})

    # -- time
    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.busy = max(0.0, self.busy - seconds)

    def monotonic(self) -> float:
        return self.clock

    def now(self) -> float:
        return self.clock

    def boot_id(self) -> str:
        return self.boot

    def reboot(self) -> None:
        """Everything is gone from memory; systemd starts the unit when it is enabled."""
        self.boot += "+"
        self.pid, self.process, self.free, self.foreign_runs_ = 0, "", 120, False
        self.keeps_memory = self.immortal = False
        self.queued = 0
        if self.enabled and self.unit:
            if self.boots_late:
                self.queued = 4
            else:
                self._boot_unit()

    def _boot_unit(self) -> None:
        if self.unit not in self.dies | self.deleted:
            self.pid, self.process, self.free = 9000 + self.actions, self.unit, 120 - self.held


def manifest(name: str, release: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "id": name,
        "release": release,
        "build": {"server": "/b/ds4-server", "version": release, "path": "/b", "sha256": "", "id": "", "commit": ""},
        "weights": {"generation": "g", "files": {"base": {"path": "/w", "sha256": "", "bytes": 90 * 1024}}},
        "args": ["--port", "8000", "--kv-disk-dir", "/nowhere"],
        "env": {},
        "service": {"unit": "ds4.service", "user": "ds4", "host": "127.0.0.1", "port": 8000, "speculation": False},
        "memory_required_kib": 100,
        "files": {},
    }


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durability is not what these tests are about, and waiting for the disk is most of their time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    where = Layout(
        deployments=str(tmp_path / "deployments"),
        current=str(tmp_path / "current"),
        unit_path=str(tmp_path / "ds4.service"),
        launcher=str(tmp_path / "ds4-serve"),
        state=str(tmp_path / "state"),
        lib=str(tmp_path / "lib"),
    )
    os.makedirs(where.state)
    for name, release in ((OLD, "v0.6.4"), (NEW, "v0.6.5"), (OLDER, "v0.6.3")):
        os.makedirs(where.directory(name))
        Path(where.directory(name), "manifest.json").write_text(json.dumps(manifest(name, release)), encoding="utf-8")
    return where


@pytest.fixture
def machine(layout: Layout) -> FakeMachine:
    store.record_proven(layout, manifest(OLD, "v0.6.4"), None)
    return FakeMachine(layout)


def run(machine: FakeMachine, *, to: str = NEW, **options: Any) -> Record:
    """Request a switch and run it to its end."""
    record = transaction.request(machine.layout, to, options, "test", now=1.8e9 + machine.actions)
    Switch(machine.layout, POLICY, record, machine, lambda line: None).run()
    found = Record.load(record.path)
    assert found is not None
    assert found.closed
    jsonschema.validate(found.data, SCHEMA)
    assert transaction.open_record(machine.layout) is None
    assert machine.most_engines <= 1, "two engines at once"
    return found


def steps(record: Record) -> list[str]:
    return [step["name"] for step in record.data["steps"]]


def test_a_good_release_is_proven_and_starts_at_boot(machine: FakeMachine) -> None:
    record = run(machine)
    assert record.data["outcome"] == "proven"
    assert record.data["serving"] == NEW
    assert steps(record) == [
        "check",
        "projection",
        "wait for requests",
        "stop",
        "memory",
        "activate",
        "start",
        "ready",
        "smoke",
        "proven",
    ]
    assert machine.enabled
    assert store.proven(machine.layout) == [NEW, OLD]
    assert record.data["downtime_seconds"] == pytest.approx(1.0, abs=0.5)
    assert json.loads(Path(record.data["evidence"], "smoke.json").read_text(encoding="utf-8"))["ok"] is True


def test_a_first_installation_needs_nothing_to_stop(layout: Layout) -> None:
    machine = FakeMachine(layout, serves="")
    record = run(machine)
    assert record.data["outcome"] == "proven"
    assert "stop" not in machine.log
    assert record.data["downtime_seconds"] is None, "nothing served, so nothing was down"


@pytest.mark.parametrize("fault", ["dies", "never_ready", "wrong"])
def test_a_bad_release_puts_itself_back(machine: FakeMachine, fault: str) -> None:
    getattr(machine, fault).add(NEW)
    record = run(machine)
    assert record.data["outcome"] == "returned"
    assert record.data["serving"] == OLD
    assert machine.unit == OLD
    assert store.proven(machine.layout) == [OLD], "what failed is never called proven"
    assert record.data["failure"]["step"] == ("smoke" if fault == "wrong" else "ready")
    assert record.data["downtime_seconds"] > 0
    assert Path(record.data["evidence"], "smoke-again.json").exists(), "the old one was proven by the same questions"
    assert Path(record.data["evidence"], "journal-failed.txt").exists()


@pytest.mark.parametrize("fault", ["dies", "never_ready", "wrong"])
def test_a_first_installation_that_fails_is_left_stopped(layout: Layout, fault: str) -> None:
    machine = FakeMachine(layout, serves="")
    getattr(machine, fault).add(NEW)
    record = run(machine)
    assert record.data["outcome"] == "stopped"
    assert record.data["serving"] == ""
    assert not machine.pid
    assert not machine.enabled, "what was never proven does not start at boot"


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m.broken.update({NEW: ["the build is gone"]}), "the build is gone"),
        (lambda m: setattr(m, "refused_flag", "--kv-disk-dir"), "unknown option: --kv-disk-dir"),
        (lambda m: setattr(m, "held", 50), "would not fit into memory"),
    ],
)
def test_what_can_be_known_before_the_stop_stops_nothing(machine: FakeMachine, break_it: Any, says: str) -> None:
    break_it(machine)
    record = run(machine)
    assert record.data["outcome"] == "refused"
    assert says in record.data["message"]
    assert machine.log == []
    assert record.data["serving"] == OLD


def test_memory_that_comes_late_leads_back(machine: FakeMachine) -> None:
    machine.memory_late = 1
    record = run(machine)
    assert record.data["outcome"] == "returned"
    assert record.data["failure"]["step"] == "memory"
    assert machine.process == OLD


def test_memory_that_never_comes_back_means_reboot_and_no_blind_start(machine: FakeMachine) -> None:
    machine.keeps_memory = True
    record = run(machine)
    assert record.data["outcome"] == "stopped"
    assert "Reboot the host" in record.data["message"]
    assert [entry for entry in machine.log if entry.startswith("start")] == []
    assert machine.unit == OLD
    assert machine.enabled
    machine.reboot()
    assert machine.process == OLD, "after the reboot the proven deployment starts by itself"


def test_an_engine_that_ignores_sigterm_is_killed_within_the_limit(machine: FakeMachine) -> None:
    machine.ignores_sigterm = True
    assert run(machine).data["outcome"] == "proven"


def test_a_process_that_cannot_be_killed_is_never_joined_by_a_second(machine: FakeMachine) -> None:
    machine.immortal = True
    record = run(machine)
    assert record.data["outcome"] == "stopped"
    assert "Reboot" in record.data["message"]
    assert [entry for entry in machine.log if entry.startswith("start")] == []


def test_going_back_that_fails_too_tells_both(machine: FakeMachine) -> None:
    machine.dies = {NEW, OLD}
    record = run(machine)
    assert record.data["outcome"] == "stopped"
    assert record.data["failure"]["step"] == "ready"
    assert record.data["return_failure"]["step"] == "ready again"
    assert not machine.pid


def test_going_back_skips_a_deployment_whose_files_are_gone(machine: FakeMachine) -> None:
    store.record_proven(machine.layout, manifest(OLDER, "v0.6.3"), None)
    store.record_proven(machine.layout, manifest(OLD, "v0.6.4"), None)
    machine.broken = {OLD: ["the weights are gone"]}
    machine.wrong = {NEW}
    record = run(machine)
    assert record.data["outcome"] == "returned"
    assert record.data["serving"] == OLDER


def test_weights_that_fit_only_after_the_old_ones_have_gone(machine: FakeMachine) -> None:
    machine.absent = {NEW}
    record = run(machine)
    assert record.data["outcome"] == "proven"
    assert machine.log == ["stop", "delete and fetch", f"activate {NEW}", f"start {NEW}"]
    assert steps(record)[3:6] == ["stop", "exchange", "memory"]


def test_weights_that_nobody_is_going_to_bring_stop_nothing(machine: FakeMachine) -> None:
    machine.broken = {NEW: ["base weights: No such file or directory"]}
    record = run(machine)
    assert (record.data["outcome"], machine.log) == ("refused", [])


@pytest.mark.parametrize("fault", ["fetch_fails", "wrong"])
def test_after_the_old_weights_have_gone_there_is_no_way_back(machine: FakeMachine, fault: str) -> None:
    machine.absent = {NEW}
    machine.fetch_fails = fault == "fetch_fails"
    machine.wrong = {NEW} if fault == "wrong" else set()
    record = run(machine)
    assert record.data["outcome"] == "stopped"
    assert "old weights were deleted as asked" in record.data["message"]
    assert not machine.pid
    assert not machine.enabled


@pytest.mark.parametrize("how", ["kill", "reboot"])
def test_an_exchange_of_weights_is_taken_up_wherever_it_was_killed(layout: Layout, how: str) -> None:
    for point in range(1, 12):
        for entry in Path(layout.state).glob("**/*"):
            if entry.is_file() or entry.is_symlink():
                entry.unlink()
        store.record_proven(layout, manifest(OLD, "v0.6.4"), None)
        machine = FakeMachine(layout)
        machine.absent, machine.kill_at = {NEW}, point
        transaction.request(layout, NEW, {}, "test")
        killed = not one_run(machine, layout)
        if killed and how == "reboot":
            machine.reboot()
        assert not killed or one_run(machine, layout)
        record = transaction.last_record(layout)
        assert record is not None
        assert record.data["outcome"] in {"proven", "refused"}
        assert machine.running() == (NEW if record.data["outcome"] == "proven" else OLD)
        if not killed:
            assert point > 4
            return
    raise AssertionError("it has fewer actions than that")


def test_the_running_deployment_that_lacks_its_proof_is_only_asked(machine: FakeMachine) -> None:
    machine.unit = machine.process = NEW
    record = run(machine)
    assert record.data["outcome"] == "proven"
    assert steps(record) == ["ready", "smoke", "proven"]
    assert machine.log == []
    assert record.data["downtime_seconds"] is None


@pytest.mark.parametrize(("policy", "outcome"), [("wait", "proven"), ("cut", "proven"), ("skip", "skipped")])
def test_requests_in_flight(machine: FakeMachine, policy: str, outcome: str) -> None:
    machine.busy = 3
    record = run(machine, busy=policy)
    assert record.data["outcome"] == outcome
    if policy == "wait":
        assert "all requests have ended" in record.data["steps"][2]["text"]
    if policy == "cut":
        assert machine.log[:2] == ["SIGTERM", "SIGKILL"]
    if policy == "skip":
        assert machine.log == []
        assert record.data["serving"] == OLD


def test_waiting_for_requests_is_bounded(machine: FakeMachine) -> None:
    machine.busy = 1e9
    assert run(machine, busy="wait").data["outcome"] == "proven"


# ------------------------------------------------------------------------------------------ somebody else's engine


def occupy(machine: FakeMachine) -> FakeMachine:
    """Let somebody else's engine serve there."""
    machine.foreign_runs_, machine.free, machine.most_engines = True, 20, 1
    who = {"pid": 4711, "user": "alice", "program": "/home/alice/ds4-server", "unit": ""}
    machine.others = [{**who, "why": ["listens"], "engine": True}]
    return machine


@pytest.fixture
def occupied(layout: Layout) -> FakeMachine:
    return occupy(FakeMachine(layout, serves=""))


def test_a_foreign_engine_is_named_and_left_alone(occupied: FakeMachine) -> None:
    record = run(occupied, adopt=False)
    assert record.data["outcome"] == "refused"
    assert "process 4711 (alice, /home/alice/ds4-server" in record.data["message"]
    assert "engine_service_adopt: true" in record.data["message"]
    assert occupied.foreign_runs_


def test_requests_of_a_foreign_engine_count_too(occupied: FakeMachine) -> None:
    occupied.busy = 2
    assert run(occupied, adopt=True, busy="skip").data["outcome"] == "skipped"
    assert occupied.foreign_runs_


def test_a_foreign_engine_is_adopted_when_asked(occupied: FakeMachine) -> None:
    record = run(occupied, adopt=True)
    assert record.data["outcome"] == "proven"
    assert not occupied.foreign_runs_
    assert record.data["from"]["kind"] == "foreign"


def test_a_failed_adoption_gives_the_very_process_back(occupied: FakeMachine) -> None:
    occupied.dies = {NEW}
    record = run(occupied, adopt=True)
    assert record.data["outcome"] == "returned"
    assert record.data["serving"] == "foreign"
    assert occupied.foreign_runs_


def test_memory_that_an_adopted_process_does_not_give_back_means_reboot(occupied: FakeMachine) -> None:
    occupied.keeps_memory = True
    record = run(occupied, adopt=True)
    assert record.data["outcome"] == "stopped"
    assert "Reboot the host" in record.data["message"]
    assert record.data["serving"] == ""


def test_only_memory_that_stays_away_means_reboot(occupied: FakeMachine) -> None:
    occupied.second_copy = True
    record = run(occupied, adopt=True)
    assert record.data["outcome"] == "stopped"
    assert "Reboot" not in record.data["message"]


@pytest.mark.parametrize(("busy", "limit"), [("wait", LIMITS["stop_seconds"]), ("cut", LIMITS["cut_seconds"])])
def test_an_adopted_engine_gets_the_time_that_was_asked_for(occupied: FakeMachine, busy: str, limit: int) -> None:
    occupied.busy = 1e9
    record = run(occupied, adopt=True, busy=busy)
    assert record.data["outcome"] == "proven"
    assert f"foreign: {limit} s" in occupied.log
    stop = next(step["text"] for step in record.data["steps"] if step["name"] == "stop")
    assert "request(s) were running; 0 conversation file(s) were written" in stop


def test_a_unit_of_ours_that_waits_for_its_restart_never_takes_the_lock(occupied: FakeMachine) -> None:
    occupied.unit, occupied.queued = OLD, 99
    assert run(occupied, adopt=True).data["outcome"] == "proven"


def test_an_older_engine_that_comes_back_is_not_judged_by_what_it_never_had(occupied: FakeMachine) -> None:
    occupied.dies, occupied.foreign_is_old = {NEW}, True
    record = run(occupied, adopt=True)
    assert (record.data["outcome"], record.data["serving"]) == ("returned", "foreign")
    assert record.data["return_failure"]["step"] == "smoke again"
    assert "runs again, as it was" in record.data["message"]
    assert occupied.foreign_runs_


def test_a_reboot_before_the_stop_tells_whether_the_foreign_engine_runs(occupied: FakeMachine) -> None:
    occupied.kill_at = 1
    transaction.request(occupied.layout, NEW, {"adopt": True}, "test")
    assert not one_run(occupied, occupied.layout)
    record = transaction.last_record(occupied.layout)
    assert record is not None
    record.update(stopped_at=None)
    occupied.reboot()
    assert one_run(occupied, occupied.layout)
    record = transaction.last_record(occupied.layout)
    assert record is not None
    assert (record.data["outcome"], record.data["serving"]) == ("refused", "")


def test_a_failed_adoption_whose_process_does_not_come_back_says_so(occupied: FakeMachine) -> None:
    occupied.dies, occupied.foreign_comes_back = {NEW}, False
    record = run(occupied, adopt=True)
    assert record.data["outcome"] == "stopped"
    assert record.data["serving"] == ""


# -------------------------------------------------------------------------------------------------- interruptions


def one_run(machine: FakeMachine, layout: Layout) -> bool:
    """One life of the runner; False when it was killed."""
    record = transaction.open_record(layout)
    assert record is not None
    try:
        Switch(layout, POLICY, record, machine, lambda line: None).run()
    except Killed:
        return False
    return True


def faults() -> Iterator[tuple[str, str]]:
    for fault in ("", "dies", "never_ready", "wrong"):
        for how in ("crash", "reboot", "late boot"):
            yield fault, how


@pytest.mark.parametrize(("fault", "how"), list(faults()))
@pytest.mark.parametrize("before", ["ours", "nothing", "foreign"])
def test_killed_at_every_point_it_ends_with_one_engine_or_an_honest_stop(
    layout: Layout, fault: str, how: str, before: str
) -> None:
    """The runner is killed before every single action in turn, once as by SIGKILL, once by a power loss."""
    for point in range(1, 14):
        for entry in Path(layout.state).glob("**/*"):
            if entry.is_file() or entry.is_symlink():
                entry.unlink()
        machine = FakeMachine(layout, serves=OLD if before == "ours" else "")
        if before == "ours":
            store.record_proven(layout, manifest(OLD, "v0.6.4"), None)
        if before == "foreign":
            occupy(machine)
        if fault:
            getattr(machine, fault).add(NEW)
        machine.kill_at = point
        transaction.request(layout, NEW, {"adopt": True}, "test")
        killed = not one_run(machine, layout)
        if killed:
            machine.boots_late = how == "late boot"
            if how != "crash":
                machine.reboot()
            assert one_run(machine, layout), "it is killed once only"
        record = transaction.last_record(layout)
        assert record is not None
        assert record.closed
        jsonschema.validate(record.data, SCHEMA)
        assert machine.most_engines <= 1
        outcome = record.data["outcome"]
        assert fault or outcome in ("proven", "refused"), f"a good release, killed at {point}: {record.data['message']}"
        if outcome == "proven":
            assert machine.running() == NEW
            assert not fault
        elif outcome in ("returned", "refused"):
            assert machine.running() == (OLD if before == "ours" else "")
            assert machine.foreign_runs_ == (before == "foreign")
        else:
            assert before == "nothing", "where something served, something serves"
            assert not machine.running()
            assert not machine.enabled
        for _look in range(9):
            machine.state()  # nothing that is still queued changes this
        serves = "foreign" if machine.foreign_runs_ else machine.running()
        assert serves == record.data["serving"] or outcome == "refused"
        if machine.running():
            assert machine.unit == machine.running()
        if not killed:  # it has fewer actions than that: every point was tried
            assert point > 2
            break


def test_another_deployment_that_answers_is_never_called_proven(machine: FakeMachine) -> None:
    start = machine.start_unit

    def another() -> Ran:
        ran = start()
        machine.process = OLDER if machine.process == NEW else machine.process
        return ran

    machine.start_unit = another  # type: ignore[method-assign]
    record = run(machine)
    assert (record.data["outcome"], record.data["serving"]) == ("returned", OLD)
    assert "Another deployment than the wanted one answers" in record.data["message"]


def test_random_histories_converge(layout: Layout) -> None:
    """Random faults, kills and reboots; afterwards a good release is always proven."""
    for seed in range(int(os.environ.get("FAULT_SEEDS", "25"))):
        dice = random.Random(seed)
        for entry in Path(layout.state).glob("**/*"):
            if entry.is_file() or entry.is_symlink():
                entry.unlink()
        store.record_proven(layout, manifest(OLD, "v0.6.4"), None)
        machine = FakeMachine(layout)
        transaction.request(layout, NEW, {}, "test")
        for _life in range(dice.randint(1, 4)):
            if transaction.open_record(layout) is None:
                break
            machine.dies = {NEW} if dice.random() < 0.3 else set()
            machine.wrong = {NEW} if dice.random() < 0.3 else set()
            machine.kill_at = machine.actions + dice.randint(1, 6)
            one_run(machine, layout)
            if dice.random() < 0.4:
                machine.reboot()
        machine.dies, machine.wrong, machine.kill_at = set(), set(), -1
        if transaction.open_record(layout) is not None:
            assert one_run(machine, layout)
        assert machine.running() in (OLD, NEW), f"seed {seed}: a proven host serves nothing"
        if machine.running() != NEW:
            run(machine)
        assert machine.running() == NEW, f"seed {seed}"
        assert machine.most_engines <= 1, f"seed {seed}"


def test_a_reboot_before_the_stop_changes_nothing(machine: FakeMachine) -> None:
    record = transaction.request(machine.layout, NEW, {}, "test")
    record.update(boot_id="an earlier boot")
    assert Switch(machine.layout, POLICY, record, machine, lambda line: None).run() == "refused"
    assert machine.log == []


# ------------------------------------------------------------------------------------------------------- requests


def test_a_second_request_is_refused_while_one_is_open(machine: FakeMachine) -> None:
    transaction.request(machine.layout, NEW, {}, "test")
    with pytest.raises(Ds4Error, match="in progress"):
        transaction.request(machine.layout, OLDER, {}, "test")


def test_a_run_finds_the_switch_it_began_though_it_never_heard_of_it(machine: FakeMachine) -> None:
    record = run(machine, run="mine")
    assert transaction.record_of_run(machine.layout, "mine") is not None
    assert transaction.record_of_run(machine.layout, "mine").data["id"] == record.data["id"]  # type: ignore[union-attr]
    assert transaction.record_of_run(machine.layout, "another") is None
    assert transaction.record_of_run(machine.layout, "") is None


class FakeRunner:
    """``systemctl`` for the runner's unit, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
        self.pid = 0
        monkeypatch.setattr(transaction, "start_runner", lambda: ran)
        monkeypatch.setattr(transaction, "run", lambda argv, **options: Ran(0, "", ""))
        monkeypatch.setattr(transaction, "Service", lambda unit: self)

    def state(self) -> State:
        return State(True, "inactive", "dead", self.pid, 0, "success", 0, "", False, True, [])


FAILS, HANGS = Ran(1, "", "Unit not found."), Ran(124, "", "no answer within 30 s")


def test_a_switch_whose_runner_cannot_be_started_is_called_off(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRunner(monkeypatch, FAILS)
    with pytest.raises(Ds4Error, match="nothing was stopped"):
        transaction.attach_or_request(machine.layout, NEW, {}, "test")
    assert transaction.open_record(machine.layout) is None
    assert transaction.last_record(machine.layout).data["outcome"] == "refused"  # type: ignore[union-attr]


@pytest.mark.parametrize("ran", [FAILS, HANGS])
def test_a_switch_that_others_began_is_never_called_off(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    transaction.request(machine.layout, NEW, {}, "test").update(stopped_at=1.0)
    FakeRunner(monkeypatch, ran)
    with pytest.raises(Ds4Error, match="its switch stays open") as caught:
        transaction.attach_or_request(machine.layout, OLDER, {}, "test")
    assert "nothing was stopped" not in str(caught.value)
    assert transaction.open_record(machine.layout) is not None


def test_a_runner_that_systemd_may_yet_start_keeps_its_switch(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRunner(monkeypatch, HANGS)
    with pytest.raises(Ds4Error, match="its switch stays open"):
        transaction.attach_or_request(machine.layout, NEW, {}, "test")
    assert transaction.open_record(machine.layout) is not None


def test_a_disk_that_fills_up_after_the_stop_leaves_no_host_unserved(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old engine writes its conversations at the stop, to the file system where the records are."""
    reserve = Path(transaction.transactions(machine.layout), transaction.RESERVE)

    def full(path: str, value: Any, **options: Any) -> None:
        if not machine.pid and reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, value, **options)

    monkeypatch.setattr(transaction, "write_json", full)
    assert run(machine).data["outcome"] == "proven"
    assert not reserve.exists()


def test_a_full_disk_is_found_before_anything_stops(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Ds4Error, match=r"no room for the records.*No space left"):
        transaction.request(machine.layout, NEW, {}, "test")
    assert transaction.open_record(machine.layout) is None
    assert os.listdir(transaction.transactions(machine.layout)) == []


def test_old_records_go_with_their_evidence_and_nothing_else(machine: FakeMachine) -> None:
    mine = Path(machine.layout.state, "evidence", "note.txt")
    made = []
    for number in range(5):
        machine.actions = number * 10  # another second, so another name
        made.append(run(machine, to=(NEW, OLD)[number % 2]))
        mine.write_text("kept", encoding="utf-8")
    left = sorted(os.listdir(transaction.transactions(machine.layout)))
    assert left == [f"{record.data['id']}.json" for record in made[-3:]]
    assert not Path(made[0].data["evidence"]).exists()
    assert Path(made[-1].data["evidence"]).exists()
    assert mine.read_text(encoding="utf-8") == "kept"


def test_waiting_ends_with_a_step_or_with_the_transaction(machine: FakeMachine) -> None:
    record = transaction.request(machine.layout, NEW, {}, "test")
    assert transaction.wait(record, 0.0).data["steps"] == []
    Switch(machine.layout, POLICY, record, machine, lambda line: None).run()
    assert transaction.wait(record, 60.0, steps_seen=99).closed
    found = transaction.find_record(machine.layout, record.data["id"])
    assert found is not None
    assert found.data["outcome"] == "proven"
    assert transaction.find_record(machine.layout, "../../etc/passwd") is None


# ------------------------------------------------------------------------------------------------------ the binary


def answers(*, in_order: bool, unknown: str = "", version: str = "v0.6.5") -> Any:
    def ask(_manifest: Mapping[str, Any], *arguments: str) -> Ran:
        if arguments == ("--help",):
            return Ran(0, "usage\n  -m, --model VALUE\n  --port VALUE [8000]\n  --kv-disk-dir DIR\n", "")
        words = ["--ds4-fleet-asks", unknown] if in_order else []
        for word in arguments:
            if word and word in words:
                return Ran(2, "", f"ds4-server: unknown option: {word}")
        return Ran(0, f"ds4-server {version}\n", "")

    return ask


@pytest.mark.parametrize("in_order", [True, False])
def test_a_binary_that_knows_every_option_passes(in_order: bool) -> None:
    assert "takes all 2 options" in switch.check_binary(manifest(NEW, "0.6.5"), answers(in_order=in_order))


@pytest.mark.parametrize("in_order", [True, False])
def test_an_unknown_option_is_found_before_the_stop(in_order: bool) -> None:
    wanted = copy.deepcopy(manifest(NEW, "v0.6.5"))
    wanted["args"] += ["--tool-call-reminder", "off", "--mtp-margin", "-3"]
    with pytest.raises(Ds4Error, match=r"does not take the configured options.*--tool-call-reminder"):
        switch.check_binary(wanted, answers(in_order=in_order, unknown="--tool-call-reminder"))


def test_another_version_than_the_built_one_is_found() -> None:
    with pytest.raises(Ds4Error, match=r"another version.*Found: v0\.6\.2"):
        switch.check_binary(manifest(NEW, "v0.6.5"), answers(in_order=True, version="v0.6.2"))


def eats_the_next_word(option: str) -> Any:
    """A parser that takes whatever follows ``option`` as its value."""

    def ask(_manifest: Mapping[str, Any], *arguments: str) -> Ran:
        words = iter(arguments)
        for word in words:
            if word == option:
                next(words, None)
            elif word == "--ds4-fleet-asks":
                return Ran(2, "", f"ds4-server: unknown option: {word}")
            elif word == "--version":
                return Ran(0, "ds4-server v0.6.5\n", "")
        raise AssertionError("the model is loaded")

    return ask


def test_a_last_option_without_its_value_is_found_and_loads_no_model() -> None:
    wanted = copy.deepcopy(manifest(NEW, "v0.6.5"))
    wanted["args"] += ["--trace"]
    with pytest.raises(
        Ds4Error, match=r"does not take the configured options.*--trace without the value that it needs"
    ):
        switch.check_binary(wanted, eats_the_next_word("--trace"))
    wanted["args"] += ["/tmp/trace"]
    assert "takes all" in switch.check_binary(wanted, eats_the_next_word("--trace"))


def test_a_variable_that_the_binary_does_not_name_is_found(tmp_path: Path) -> None:
    server = tmp_path / "ds4-server"
    server.write_bytes(b"\x7fELF DS4_SERVER_WARM\0DS4_CONTINUOUS\0DS4_WEIGHT_RESIDENCY_%s\0")
    wanted = copy.deepcopy(manifest(NEW, "v0.6.5"))
    wanted["build"]["server"] = str(server)
    wanted["env"] = {"DS4_SERVER_WARM": "1", "DS4_WEIGHT_RESIDENCY_BASE": "lazy", "CUDA_VISIBLE_DEVICES": "0"}
    assert "2 variables of its own" in switch.check_binary(wanted, answers(in_order=True))
    for slip in ("DS4_SERVER_WARN", "DS4_CONT"):  # the second is only the beginning of a name
        wanted["env"][slip] = "1"
        with pytest.raises(Ds4Error, match=rf"Found: {slip} not named in .*engine_service_extra_env"):
            switch.check_binary(wanted, answers(in_order=True))
        del wanted["env"][slip]
    server.write_bytes(b"packed")
    assert switch.unnamed(str(server), ["DS4_SERVER_WARN"]) == []


def test_numbers_are_no_options() -> None:
    assert switch.flags_of(["-m", "/a/b", "-3", "--port", "8000", "-0.5", "--x-y"]) == ["-m", "--port", "--x-y"]
