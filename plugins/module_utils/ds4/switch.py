# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The switch from one deployment to another: one transaction on the host, by ``ds4-switch.service``.

It goes on when the controller dies or the connection is lost, and is taken up again after a crash or a reboot, since
each step is durable in a record (``docs/schemas/transaction.schema.json``) and may be repeated::

    check → projection → stop → memory → activate → start → ready → smoke → proven

Until ``stop`` a failure changes nothing (``refused``). After it, what served before is started again and proven by the
same questions (``returned``). When that is not possible the service is left stopped, and the record says why (``stopped``).
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import deployment as store
from . import foreign, gate, probe, transaction
from .command import Ran, run
from .deployment import Layout
from .errors import Ds4Error
from .files import human_bytes, read_json, write_json
from .findings import cuda_tenants, engine_hold_kib
from .host import cuda_processes, ds4_processes
from .memory import booked_kib, read_meminfo
from .process import Process
from .service import Service, State

JOURNAL_LINES = 100


class Machine:
    """Everything a switch asks of its host; tests put a simulated one in its place."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.service = Service(layout.unit)

    def state(self) -> State:
        return self.service.state()

    def running(self) -> str:
        """Deployment id that the unit's process carries, or an empty string."""
        return store.running_deployment(self.state())

    def alive(self, pid: int, started_ticks: int) -> bool:
        """True while that very process exists."""
        process = Process(pid)
        return process.alive and process.started_ticks == started_ticks

    def started_ticks(self, pid: int) -> int:
        return Process(pid).started_ticks

    def available_kib(self) -> int:
        return read_meminfo()["MemAvailable"]

    def given_back_kib(self, pid: int, policy: Mapping[str, Any]) -> int:
        """Memory that an engine will give back; on GB10 most of it is under no name, see ``findings.engine_hold_kib``."""
        seen = read_meminfo()
        memory = {
            "mem_total_kib": seen["MemTotal"],
            "mem_available_kib": seen["MemAvailable"],
            "booked_kib": booked_kib(seen),
        }
        engines = [engine for engine in ds4_processes() if engine["pid"] == pid]
        tenants = cuda_tenants(cuda_processes(), [pid], policy.get("desktop_programs", []))
        return engine_hold_kib(memory, tenants, engines, policy["memory_residue_gib"])

    def metrics(self, host: str, port: int) -> dict[str, float]:
        return probe.metrics(host, port)

    def is_ready(self, host: str, port: int) -> bool:
        return probe.is_ready(host, port)

    def smoke(self, manifest: Mapping[str, Any], policy: Mapping[str, Any]) -> probe.Smoke:
        journal = self.service.journal(self.state().invocation, 5000)
        return probe.smoke_deployment(manifest, policy, journal)

    def pass_gate(self, manifest: Mapping[str, Any], wait_seconds: float) -> int:
        """KiB available once the gate is open."""
        return gate.pass_gate(manifest, wait_seconds)[0].available_kib

    def wait_for_memory(self, manifest: Mapping[str, Any], wait_seconds: float) -> int:
        """KiB available once there is what ``manifest`` needs."""
        return gate.wait_for_memory(manifest, wait_seconds).available_kib

    def ask(self, manifest: Mapping[str, Any], *arguments: str) -> Ran:
        """Run the deployment's binary as the service user for an answer that needs no model."""
        return run(
            [manifest["build"]["server"], *arguments], timeout_seconds=30, user=manifest["service"]["user"], cwd="/"
        )

    def drift(self, manifest: Mapping[str, Any]) -> list[str]:
        return store.drift(manifest, self.layout, self.state())

    def problems(self, manifest: Mapping[str, Any], coming: frozenset[str] = frozenset()) -> list[str]:
        return store.problems(manifest, coming)

    def coming(self) -> frozenset[str]:
        """Weights (sha256) that staging left to this switch, because they fit only once the old ones are gone."""
        from . import exchange  # a deployment is staged without it, and a module's imports are compiled at each call

        return exchange.coming(os.path.join(self._weights_state, "plan.json"), self._weights_state)

    def exchange(self, seconds: float) -> str:
        """Delete the old weights as planned, then fetch the new ones."""
        from . import weights

        return weights.make_exchange(os.path.join(self._weights_state, "plan.json"), self._weights_state, seconds)

    @property
    def _weights_state(self) -> str:
        return os.path.join(self.layout.state, "weights")

    def activate(self, manifest: Mapping[str, Any]) -> None:
        store.activate(manifest, self.layout, self.service)

    def foreign(self, port: int, weights: list[str]) -> list[dict[str, Any]]:
        return foreign.find(port, self.layout.unit, weights)

    def remember(self, others: list[dict[str, Any]], folder: str) -> str:
        return foreign.remember(others, folder)

    def end(self, process: str, seconds: float) -> str:
        return foreign.end(process, seconds)

    def foreign_runs(self, process: str) -> bool:
        """True while the remembered process, or one just like it, runs."""
        return foreign.runs(process)

    def start_again(self, process: str, seconds: float) -> str:
        return foreign.start_again(process, seconds)

    def smoke_foreign(self, process: str, policy: Mapping[str, Any]) -> probe.Smoke:
        return foreign.smoke(process, policy)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()


class Target(NamedTuple):
    """What served before: a deployment of ours, a process of somebody else, or nothing."""

    kind: str  # deployment | foreign | none
    deployment: str = ""
    process: str = ""  # path of the record of an adopted process


class BusyError(Ds4Error):
    """The host is left as it is on purpose."""


# ------------------------------------------------------------------------------------------------------ the switch


class Switch:
    """Runs one transaction to its end.

    Args:
        layout: where things are.
        policy: the host's ``policy.json``: limits in seconds and the smoke questions.
        record: the open transaction.
        machine: the host.
        say: receives one line per step.
    """

    def __init__(
        self,
        layout: Layout,
        policy: Mapping[str, Any],
        record: transaction.Record,
        machine: Machine,
        say: Callable[[str], None] = print,
    ) -> None:
        self.layout = layout
        self.policy = policy
        self.limits: Mapping[str, float] = policy["limits"]
        self.record = record
        self.machine = machine
        self.say = say
        self.restarts: int | None = None  # automatic restarts of the unit when watching began

    # -- frame ------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Finish the transaction and return its outcome: proven, returned, stopped, refused or skipped."""
        data = self.record.data
        boot = self.machine.boot_id()
        interrupted = bool(data["boot_id"]) and data["boot_id"] != boot
        self.record.update(boot_id=boot)
        if interrupted and data["stopped_at"] is None:
            return self._close("refused", "the host was rebooted before the old service was stopped; run again")
        if interrupted and not data["returning"]:  # what the boot undid is done anew; what is on disk is still there
            undone = ("start", "ready", "smoke", "proven")
            self.record.update(steps=[step for step in data["steps"] if step["name"] not in undone])
        if data["returning"]:
            return self._return()
        try:
            self._forward()
        except BusyError as reason:
            return self._close("skipped", str(reason))
        except Ds4Error as error:
            self.record.update(failure=self._failure(error))
            if data["stopped_at"] is None:
                return self._close("refused", f"{error} Nothing was stopped.")
            self._keep_journal("failed")
            self.record.update(returning=True)
            return self._return()
        return self._close("proven", f"deployment {data['to']} serves")

    def _step(self, name: str, action: Callable[[], str]) -> None:
        """Run one step; its start and end are durable. A step that was interrupted is run again."""
        step: dict[str, Any] = {"name": name, "started": self.machine.now(), "finished": None, "ok": None, "text": ""}
        steps = [old for old in self.record.data["steps"] if old["name"] != name]
        self.record.update(steps=[*steps, step])
        self.say(f"{name} …")
        try:
            step["text"] = action()
            step["ok"] = True
        except Exception as error:
            step["text"] = str(error)
            step["ok"] = False
            if isinstance(error, Ds4Error):
                raise
            # A surprise after the stop must lead back to a served host, not to a dead runner.
            raise Ds4Error("The switch met something unforeseen", found=f"{type(error).__name__}: {error}") from error
        finally:
            step["finished"] = self.machine.now()
            self.record.update()
            self.say(f"{name}: {step['text']}")

    def _failure(self, error: Ds4Error) -> dict[str, Any]:
        steps = self.record.data["steps"]
        return {"step": steps[-1]["name"] if steps else "", **error.result()["error"]}

    def _close(self, outcome: str, message: str) -> str:
        serving = self.machine.running() if self.machine.state().running else ""
        before = self._from()
        if not serving and before.kind == "foreign" and self.machine.foreign_runs(before.process):
            serving = "foreign"
        transaction.close(
            self.layout,
            self.record,
            keep=self.policy.get("keep_records", 0),
            outcome=outcome,
            serving=serving,
            message=message,
        )
        self.say(f"{outcome}: {message}")
        return outcome

    def _from(self) -> Target:
        found = self.record.data["from"]
        return Target(**found) if found else Target("none")

    # -- forward ----------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        wanted = self.layout.manifest(self.record.data["to"])
        if wanted is None:
            raise Ds4Error(
                f"Deployment {self.record.data['to']} is not on this host",
                found=f"no manifest under {self.layout.deployments}",
                cure="run site.yml, which stages it",
            )
        stopped = self.record.data["stopped_at"] is not None
        if not stopped and self.machine.running() == wanted["id"] and not self.machine.drift(wanted):
            self.say("it runs already and is to be proven")
        elif not self._done("start"):
            if not stopped:
                self._step("check", lambda: self._check(wanted))
                self._remember_what_serves(wanted)
                self._step("projection", lambda: self._projection(wanted))
                self._step("wait for requests", self._wait_for_requests)
            if not self._done("activate"):  # taken up again after that, the unit on disk is the new one
                self._step("stop", lambda: self._stop(self._from()))
                if self.machine.problems(wanted) and self.machine.coming():
                    self._step("exchange", lambda: self._exchange(wanted))
                self._step("memory", lambda: self._memory(wanted))
                self._step("activate", lambda: self._activate(wanted))
            self._step("start", lambda: self._start(wanted))
        self._step("ready", lambda: self._ready(wanted))
        self._step("smoke", lambda: self._smoke(wanted, "smoke"))
        self._step("proven", lambda: self._prove(wanted))

    def _done(self, name: str) -> bool:
        """True when an earlier run of this transaction finished the step."""
        return any(step["name"] == name and step["ok"] for step in self.record.data["steps"])

    def _check(self, wanted: Mapping[str, Any]) -> str:
        """What can be known before anything stops: files whole, binary answers, every option known to it."""
        store.refuse_foreign_files(self.layout)
        self._require_whole(wanted, self.machine.coming())
        return f"deployment {wanted['id']} is whole; " + check_binary(wanted, self.machine.ask)

    def _require_whole(self, wanted: Mapping[str, Any], coming: frozenset[str] = frozenset()) -> None:
        missing = self.machine.problems(wanted, coming)
        if missing:
            raise Ds4Error(
                f"Deployment {wanted['id']} cannot be started",
                found="; ".join(missing),
                required="its build and its weights, as they were verified",
                cure="run site.yml, which builds and fetches what is missing",
            )

    def _remember_what_serves(self, wanted: Mapping[str, Any]) -> None:
        """Find out what would be put back, before it is touched.

        Raises:
            Ds4Error: somebody else's engine is running and was not to be adopted.
        """
        if self.record.data["from"]:
            return
        state = self.machine.state()
        served = self.layout.manifest(self.machine.running()) if state.running else None
        others = self.machine.foreign(
            wanted["service"]["port"], [store.base_weights(manifest) for manifest in (wanted, served) if manifest]
        )
        if others and not self.record.data["options"].get("adopt"):
            raise foreign.refusal(others)
        if others:
            path = self.machine.remember(others, self.record.data["evidence"])
            target = Target("foreign", process=path)
        elif state.running and self.machine.running():
            target = Target("deployment", self.machine.running())
        else:
            back = store.returnable(self.layout, wanted["id"], self.machine.problems)
            target = Target("deployment", back[0]["id"]) if back else Target("none")
        self.record.update(**{"from": target._asdict()})

    def _projection(self, wanted: Mapping[str, Any]) -> str:
        """Memory that should be there once the old engine is gone; the gate measures it afterwards."""
        available, needed = self.machine.available_kib(), int(wanted["memory_required_kib"])
        given_back = self._given_back()
        projected = available + given_back
        text = (
            f"{human_bytes(available * 1024)} available, {human_bytes(given_back * 1024)} to come back, "
            f"{human_bytes(needed * 1024)} needed"
        )
        if projected < needed:
            raise Ds4Error(
                "The new deployment would not fit into memory",
                found=text,
                required=f"{human_bytes(needed * 1024)} after the old engine has ended",
                cure="free memory (serving_mode_target: serving gives the desktop's), choose a smaller context, or lower "
                "engine_service_memory_required_gib if you know better",
            )
        return text

    def _given_back(self) -> int:
        """KiB that the engine which is to be ended will free."""
        target = self._from()
        if target.kind == "foreign":
            return self.machine.given_back_kib(foreign.read_record(target.process)["pid"], self.policy)
        state = self.machine.state()
        return self.machine.given_back_kib(state.pid, self.policy) if state.running else 0

    def _requests(self) -> int:
        target = self._from()
        if target.kind == "foreign":
            where: Mapping[str, Any] = foreign.read_record(target.process)
        elif (manifest := self.layout.manifest(target.deployment)) and self.machine.state().running:
            where = manifest["service"]
        else:
            return 0
        seen = self.machine.metrics(where["host"], int(where["port"]))
        return int(seen.get("ds4_requests_inflight", 0) + seen.get("ds4_queue_depth", 0))

    def _wait_for_requests(self) -> str:
        """What to do about requests in flight: wait for them (bounded), leave the host alone, or cut them."""
        policy = self.record.data["options"].get("busy", "wait")
        busy = self._requests()
        if not busy:
            return "no request is running"
        if policy == "skip":
            raise BusyError(
                "The host is busy and engine_service_busy is skip",
                found=f"{busy} request(s) running or queued",
                cure="run again later, or set engine_service_busy to wait or cut",
            )
        if policy == "cut":
            return f"{busy} request(s) running; they get {self.limits['cut_seconds']:g} s"
        deadline = self.machine.monotonic() + self.limits["busy_seconds"]
        while busy and self.machine.monotonic() < deadline:
            self.machine.sleep(0.5)
            busy = self._requests()
        return f"{busy} request(s) still running; they are drained" if busy else "all requests have ended"

    def _stop(self, target: Target) -> str:
        """End what serves: gracefully, bounded, and only it."""
        if self.record.data["stopped_at"] is None:
            served = target.kind == "foreign" or self.machine.state().running
            self.record.update(stopped_at=self.machine.now(), served=served)
        if target.kind == "foreign":
            return self._stop_foreign(target.process)
        return self._stop_unit(target.deployment)

    def _stop_foreign(self, process: str) -> str:
        # Ours too, should it wait for its next restart: it would take the lock that becomes free.
        self.machine.service.stop(self.limits["stop_seconds"] + 60)
        record = foreign.read_record(process)
        kept_before = kv_files(record["argv"], record["directory"])
        busy = self._requests()
        cut = self.record.data["options"].get("busy") == "cut"
        text = self.machine.end(process, self.limits["cut_seconds" if cut else "stop_seconds"])
        return f"{text}; {_told(busy, kept_before, kv_files(record['argv'], record['directory']))}"

    def _stop_unit(self, deployment: str, *, failed: bool = False) -> str:
        """Stop the unit and wait until its process is gone.

        Args:
            deployment: what runs there, to look after its conversations.
            failed: a release that failed is killed at once: what it would write on the way out is not to be trusted.
        """
        state = self.machine.state()
        if state.pid == 0 and state.dead:
            # A start that is queued (at boot) or to come (after a crash) must not bring it up later.
            self.machine.service.stop(self.limits["stop_seconds"] + 60)
            return "was not running"
        ticks = self.machine.started_ticks(state.pid) if state.pid else 0
        arguments = (self.layout.manifest(deployment) or {}).get("args", [])
        kept_before = kv_files(arguments)
        busy = 0 if failed else self._requests()
        begun = self.machine.monotonic()
        killed = failed
        if failed:
            self.machine.service.kill()
        elif self.record.data["options"].get("busy") == "cut":
            self.machine.service.stop_later()
            if not self._wait_gone(state.pid, ticks, self.limits["cut_seconds"]):
                self.machine.service.kill()
                killed = True
        self.machine.service.stop(self.limits["stop_seconds"] + 60)
        gone = self._wait_gone(state.pid, ticks, 30)
        took = self.machine.monotonic() - begun
        if not gone:
            raise Ds4Error(
                "The old engine's process does not end, not even by SIGKILL",
                found=f"process {state.pid} after {took:.0f} s",
                required="its end, before another engine may load",
                cure="reboot the host; it then starts the last proven deployment",
            )
        if failed:
            return f"killed after {took:.1f} s"
        killed = killed or self.machine.state().result == "timeout"
        how = "had to be killed" if killed else "ended"
        return f"{how} after {took:.1f} s; {_told(busy, kept_before, kv_files(arguments))}"

    def _wait_gone(self, pid: int, ticks: int, seconds: float) -> bool:
        deadline = self.machine.monotonic() + seconds
        while pid and self.machine.alive(pid, ticks):
            if self.machine.monotonic() >= deadline:
                return False
            self.machine.sleep(0.1)
        return True

    def _exchange(self, wanted: Mapping[str, Any]) -> str:
        """There is no room for old and new weights together, and the operator gave up the way back."""
        text = self.machine.exchange(self.limits["exchange_seconds"])
        self._require_whole(wanted)
        return text

    def _memory(self, wanted: Mapping[str, Any]) -> str:
        begun = self.machine.monotonic()
        available = self.machine.pass_gate(wanted, self.limits["memory_seconds"])
        return f"{human_bytes(available * 1024)} available after {self.machine.monotonic() - begun:.1f} s"

    def _activate(self, wanted: Mapping[str, Any]) -> str:
        self.machine.activate(wanted)
        return f"{self.layout.unit} is deployment {wanted['id']} ({wanted['release']})"

    def _start(self, wanted: Mapping[str, Any]) -> str:
        ran = self.machine.service.start(self.limits["start_seconds"])
        if ran.rc != 0:
            raise Ds4Error(
                f"{self.layout.unit} did not start",
                found=self.machine.state().describe() + "; " + self._last_lines(),
                cure=f"journalctl -u {self.layout.unit} on the host",
            )
        self.restarts = 0  # a start resets systemd's counter, so a death before the first look counts too
        return f"process {self.machine.state().pid}"

    def _ready(self, wanted: Mapping[str, Any]) -> str:
        """Wait until it answers; fail at once when it dies, and tell loading from dead at the limit."""
        service = wanted["service"]
        begun = self.machine.monotonic()
        first = self.machine.state()
        restarts = first.restarts if self.restarts is None else self.restarts
        while True:
            state = self.machine.state()
            if state.dead or state.restarts > restarts:
                raise Ds4Error(
                    f"The engine died after {self.machine.monotonic() - begun:.0f} s, before it answered",
                    found=f"{state.describe()}; {self._last_lines(first.invocation)}",
                    cure=f"journalctl -u {self.layout.unit} on the host",
                )
            if self.machine.is_ready(service["host"], service["port"]):
                self._require_running(wanted)
                return f"answers after {self.machine.monotonic() - begun:.1f} s"
            if self.machine.monotonic() - begun > self.limits["ready_seconds"]:
                raise Ds4Error(
                    "The engine still loads: its process lives, but it does not answer",
                    found=f"no answer on port {service['port']} after {self.limits['ready_seconds']:g} s; {self._last_lines()}",
                    required="an answer to /v1/models",
                    cure="raise engine_service_ready_seconds if it only needs longer",
                )
            self.machine.sleep(0.2)

    def _require_running(self, wanted: Mapping[str, Any]) -> None:
        """What answers must be what is to be proven: never another deployment that came up meanwhile."""
        runs = self.machine.running()
        if runs != wanted["id"]:
            raise Ds4Error(
                "Another deployment than the wanted one answers",
                found=f"the process of {self.layout.unit} runs {runs or 'an unknown deployment'}",
                required=wanted["id"],
                cure=f"see who started it (journalctl -u {self.layout.unit}), then run again",
            )

    def _smoke(self, wanted: Mapping[str, Any], name: str) -> str:
        return self._judge(self.machine.smoke(wanted, self.policy), name)

    def _judge(self, result: probe.Smoke, name: str) -> str:
        """Keep what was asked and answered; the first good answer ends the downtime."""
        os.makedirs(self.record.data["evidence"], mode=0o755, exist_ok=True)
        transcript = os.path.join(self.record.data["evidence"], f"{name}.json")
        write_json(transcript, result.transcript)
        if not result.ok:
            raise Ds4Error(
                "The engine answers, but not as it must",
                found="; ".join(result.failures)[:1500],
                cure=f"the questions and answers are in {transcript}",
            )
        if self.record.data["answered_at"] is None:
            self._measure_downtime(result)
        return f"{len(result.checks)} checks in {result.seconds:.1f} s"

    def _measure_downtime(self, result: probe.Smoke) -> None:
        """From the stop to the first good answer."""
        stopped = self.record.data["stopped_at"]
        answered = self.machine.now() - result.seconds + result.first_answer_seconds
        down = round(answered - stopped, 1) if stopped is not None and self.record.data["served"] else None
        self.record.update(answered_at=answered, downtime_seconds=down)

    def _prove(self, wanted: Mapping[str, Any]) -> str:
        store.record_proven(self.layout, wanted, self.record.data["downtime_seconds"])
        self.machine.service.enable()
        return "starts at boot"

    # -- back -------------------------------------------------------------------------------------------------

    def _return(self) -> str:
        """Put back what served before; the outcome is ``returned`` or ``stopped``, never success."""
        data = self.record.data
        failure = data["failure"] or {"step": "", "what": "interrupted"}
        told = f"{failure['step']} failed: {failure['what']}"
        if failure.get("found"):
            told += f" ({failure['found']})"
        try:
            self._step("stop again", lambda: self._stop_unit(data["to"], failed=True))
            target = self._target()
            if target.kind == "none":
                self.machine.service.disable()
                why = "Nothing served here before"
                if any(step["name"] == "exchange" for step in data["steps"]):
                    why = "The old weights were deleted as asked, so nothing can return"
                return self._close("stopped", f"{told}. {why}; the service is left stopped. Run again to go on.")
            if target.kind == "foreign":
                new = self.layout.manifest(data["to"]) or {}
                if not self.machine.foreign_runs(target.process):  # else an earlier life of this switch started it
                    self._step("memory again", lambda: self._memory_for_foreign(new))
                self._step("start again", lambda: self._start_foreign(target.process))
                return self._close("returned", f"{told}. {self._ask_foreign(target.process)}")
            old = self.layout.manifest(target.deployment) or {}
            # The unit first: should memory never come back, a reboot starts the proven deployment.
            self._step("activate again", lambda: self._activate(old))
            self._step("memory again", lambda: self._memory(old))
            self._step("start again", lambda: self._start(old))
            self._step("ready again", lambda: self._ready(old))
            self._step("smoke again", lambda: self._smoke(old, "smoke-again"))
        except Ds4Error as error:
            self._keep_journal("return")
            self.record.update(return_failure=self._failure(error))
            self.machine.service.stop(self.limits["stop_seconds"] + 60)
            lost = "required_kib" in error.evidence or self.record.data["return_failure"]["step"] == "stop again"
            advice = " Reboot the host: memory does not come back." if lost else ""
            back = "Going back meets the same." if error.what == failure["what"] else f"Going back failed too: {error}"
            return self._close("stopped", f"{told}.{advice} {back} The service is left stopped.")
        return self._close("returned", f"{told}. Deployment {old['id']} ({old['release']}) serves again.")

    def _memory_for_foreign(self, new: Mapping[str, Any]) -> str:
        """What ours needed is what its predecessor had; before that is back, nothing is started blindly."""
        return f"{human_bytes(self.machine.wait_for_memory(new, self.limits['memory_seconds']) * 1024)} available"

    def _start_foreign(self, process: str) -> str:
        return self.machine.start_again(process, self.limits["ready_seconds"])

    def _ask_foreign(self, process: str) -> str:
        """It is back as it was. What it answers is told: it never had to pass our questions, so it stays either way."""
        try:
            self._step(
                "smoke again", lambda: self._judge(self.machine.smoke_foreign(process, self.policy), "smoke-again")
            )
        except Ds4Error as error:
            self.record.update(return_failure=self._failure(error))
            return f"The process that served before runs again, as it was. Our questions: {error}"
        return "The process that served before serves again, as it was."

    def _target(self) -> Target:
        """Where to go back to: what served, if it is whole; else the newest proven deployment that is."""
        target = self._from()
        if target.kind == "foreign":
            return target
        known = store.proven(self.layout)
        served = self.layout.manifest(target.deployment)
        whole = served is not None and served["id"] != self.record.data["to"] and not self.machine.problems(served)
        if whole and target.deployment in known:
            return target
        back = store.returnable(self.layout, self.record.data["to"], self.machine.problems)
        if back:
            return Target("deployment", back[0]["id"])
        return target if whole else Target("none")

    # -- evidence ---------------------------------------------------------------------------------------------

    def _last_lines(self, invocation: str = "") -> str:
        """The engine's last words, for a message."""
        text = self.machine.service.journal(invocation or self.machine.state().invocation, 200)
        lines = [line for line in text.splitlines() if line.strip() and not re.match(r"(Started|Starting|Stopp)", line)]
        return "last log lines: " + " / ".join(lines[-3:])[-600:] if lines else "nothing in the journal"

    def _keep_journal(self, name: str) -> None:
        """Keep what the unit said for whoever looks into the failure later."""
        folder = self.record.data["evidence"]
        os.makedirs(folder, mode=0o755, exist_ok=True)
        text = self.machine.service.journal(self.machine.state().invocation, JOURNAL_LINES)
        with open(os.path.join(folder, f"journal-{name}.txt"), "w", encoding="utf-8") as stream:
            stream.write(text)


def _told(busy: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What a stop cost: requests, and conversations that were kept."""
    written = sum(before.get(name) != stamp for name, stamp in after.items())
    return f"{busy} request(s) were running; {written} conversation file(s) were written"


def kv_files(arguments: list[str], directory: str = "/") -> dict[str, tuple[int, int]]:
    """Kept conversations of an engine with this command line: file name → (bytes, mtime in ns)."""
    folder = arguments[arguments.index("--kv-disk-dir") + 1] if "--kv-disk-dir" in arguments[:-1] else ""
    folder = os.path.join(directory, folder) if folder else ""
    try:
        names = os.listdir(folder) if folder else []
    except OSError:
        return {}
    found = {}
    for name in names:
        try:
            status = os.stat(os.path.join(folder, name))
        except OSError:
            continue
        found[name] = (status.st_size, status.st_mtime_ns)
    return found


# --------------------------------------------------------------------------------------------- the binary's answer

_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*")


def flags_of(arguments: list[str]) -> list[str]:
    """Words of a command line that are options (a negative number is none)."""
    return [word for word in arguments if _FLAG.fullmatch(word)]


def help_flags(text: str) -> set[str]:
    """Options that a help text names."""
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][A-Za-z0-9-]*", text))


def check_binary(manifest: Mapping[str, Any], ask: Callable[..., Ran]) -> str:
    """Ask the binary itself, before anything stops: its version, and whether it knows every option and variable.

    Its own parser decides when it reads options in order: ``ARGS --version`` ends with exit 2 for an unknown option or a
    bad value, and with exit 0 before any model is opened. Should it look for ``--version`` first, its help decides. About
    variables it is silent; their names stand in it.

    Raises:
        Ds4Error: another version, an option or variable it does not know, or no answer.
    """
    server = manifest["build"]["server"]
    asked = ask(manifest, "--version")
    expected = manifest["build"]["version"]
    told = re.match(r"ds4-server\s+(\S+)", asked.out)
    if asked.rc != 0 or told is None:
        raise Ds4Error(
            "The new engine does not tell its version",
            found=f"`{server} --version`: exit {asked.rc}, {(asked.out + asked.err).strip()[:300]!r}",
            required="`ds4-server VERSION` and exit 0",
            cure="rebuild it with cuda_build_force: true",
        )
    if expected and told.group(1).lstrip("v") != str(expected).lstrip("v"):
        raise Ds4Error(
            "The new engine is another version than the one that was built",
            found=told.group(1),
            required=str(expected),
            cure="rebuild it with cuda_build_force: true",
        )
    reads_in_order = ask(manifest, "--ds4-fleet-asks", "--version").rc == 2
    if reads_in_order:
        # Twice, because a last option that lacks its value takes one: then it would load the model.
        parsed = ask(manifest, *manifest["args"], "--version", "--version")
        if parsed.rc != 0:
            raise _unknown_option(manifest, f"`{(parsed.err or parsed.out).strip()[-400:]}` (exit {parsed.rc})")
        if ask(manifest, *manifest["args"], "--ds4-fleet-asks", "--version").rc != 2:
            raise _unknown_option(manifest, f"{manifest['args'][-1]} without the value that it needs")
    else:
        known = help_flags(ask(manifest, "--help").out)
        unknown = [flag for flag in flags_of(manifest["args"]) if flag not in known]
        if unknown:
            raise _unknown_option(manifest, f"{', '.join(unknown)} not in its help")
    variables = sorted(name for name in manifest["env"] if name.startswith("DS4_"))
    missing = unnamed(server, variables) if variables else []
    if missing:
        raise _unknown_option(manifest, f"{', '.join(missing)} not named in {server}")
    return f"version {told.group(1)} takes all {len(flags_of(manifest['args']))} options and {len(variables)} variables of its own"


def unnamed(server: str, variables: list[str]) -> list[str]:
    """Those variables that a program does not name. A name counts that it puts together (``DS4_WEIGHT_RESIDENCY_%s``)."""
    with open(server, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not re.search(rb"DS4_[A-Z0-9_]+\0", content):
            return []  # packed in a way that hides every name: nothing can be told
        stems = tuple(found.decode() for found in re.findall(rb"(DS4_[A-Z0-9_]+)%[a-z]", content))
        return [name for name in variables if content.find(name.encode() + b"\0") < 0 and not name.startswith(stems)]


def _unknown_option(manifest: Mapping[str, Any], found: str) -> Ds4Error:
    return Ds4Error(
        f"Release {manifest['release']} does not take the configured options",
        found=found,
        required="options and variables that this release knows",
        cure=(
            "correct engine_service_settings, engine_service_extra_args or engine_service_extra_env, "
            "or choose another ds4_release"
        ),
    )


# ------------------------------------------------------------------------------------------------------------ entry


def main(argv: list[str] | None = None) -> int:
    """Entry of ``python3 -m ds4.switch``: ``run`` finishes the open transaction, ``status`` shows its steps."""
    parser = argparse.ArgumentParser(prog="ds4.switch", description="Run the open switch transaction of this host.")
    parser.add_argument("command", choices=("run", "status"))
    parser.add_argument("--state-dir", default="/var/lib/ds4/state")
    options = parser.parse_args(argv)
    policy = read_json(os.path.join(options.state_dir, "policy.json"))
    if not isinstance(policy, dict):
        print(f"<3>no policy in {options.state_dir}: run site.yml first", file=sys.stderr)
        return 2
    layout = Layout(**policy["layout"])
    record = transaction.open_record(layout)
    if record is None or record.closed:
        print("no switch is open")
        return 0
    if options.command == "status":
        for step in record.data["steps"]:
            print(f"{step['name']}: {step['text'] or 'running'}")
        return 0
    lock = os.open(os.path.join(layout.state, "switch.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        print("<4>another process runs this switch", file=sys.stderr)
        return 1
    outcome = Switch(layout, policy, record, Machine(layout), lambda line: print(line, flush=True)).run()
    print(f"finished: {outcome}")
    return 0  # a host that was put back is a finished transaction; only a crash makes systemd run this again


if __name__ == "__main__":
    sys.exit(main())
