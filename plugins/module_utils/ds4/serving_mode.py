# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Serving mode: give the engine the memory of the desktop, and give the desktop back exactly.

Verbs: ``report`` (reads), ``serve`` (strips), ``restore`` (gives back), ``confirm`` (cancels the dead man's switch).
On a host: ``python3 -m ds4.serving_mode restore | confirm | status``, which ``ds4-desktop`` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import serving_mode_settings as settings_of
from . import serving_mode_tell as tell
from .command import run, which
from .errors import Ds4Error
from .files import MARKER_LINE, human_bytes, read_text
from .memory import read_meminfo
from .serving_mode_apply import Hands, by_manager, failure, refuse_foreign, still_running, why_not
from .serving_mode_deadman import DeadMan
from .serving_mode_host import Reading, Request, hashes, read_host
from .serving_mode_plan import DISPLAY_GROUP, Back, Plan, Policy, Seen, give_back, plan_strip, record
from .serving_mode_reach import connection, guards
from .serving_mode_snapshot import DEFAULT_TARGET, Snapshot, Store, boot_id, utc
from .serving_mode_tell import DEAD_MAN_OUTCOME, ROOM
from .serving_mode_units import MASK, SYSTEM, USER, Runner, Systemd, local_files, split

_WRAPPER = """\
#!/bin/sh
# {marker}: gives the desktop back, or shows what serving mode holds
exec env PYTHONPATH={lib}/current {python} -m ds4.serving_mode "$@" --state-dir {state}
"""
_GIVE_UP = "serving_mode_force: true (or `ds4-desktop restore --force`) gives up on them"


class ServingMode:
    """The verbs, on this host.

    Args:
        root: prefix of paths in /etc, /run and of settings in /proc; empty on a host.
        runner: runs a command, as ``command.run`` does.
    """

    def __init__(
        self,
        request: Request,
        *,
        root: str = "",
        runner: Runner = run,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.root = root
        self.runner = runner
        self.sleep = sleep
        self.clock = clock
        self.systemd = Systemd(root=root, runner=runner)
        self.store = Store(request.state_dir, etc=(self.systemd.etc(SYSTEM), self.systemd.etc(USER)))
        self.dead_man = DeadMan(self.systemd, self.store)
        self.hands = Hands(self.systemd, self.store, wait_seconds=request.wait_seconds, sleep=sleep, clock=clock)
        self.default_link = f"{self.systemd.etc()}/{DEFAULT_TARGET}"

    def _available(self) -> int:
        return read_meminfo(self.request.meminfo)["MemAvailable"]

    def _settled(self) -> int:
        """MemAvailable in KiB once three readings a second apart agree within ``settle_kib``, or time is up."""
        readings = [self._available()]
        deadline = self.clock() + self.request.settle_seconds
        while self.clock() < deadline:
            self.sleep(1.0)
            readings = [*readings[-2:], self._available()]
            if len(readings) == 3 and max(readings) - min(readings) <= self.request.settle_kib:
                break
        return readings[-1]

    def _read(self) -> Reading:
        return read_host(self.request, self.systemd, self.store, self.runner)

    def _policy(self, reading: Reading, selected: list[str]) -> Policy:
        request = self.request
        return Policy(
            groups=request.groups,
            selected=selected,
            extra=request.extra,
            rules=[*request.never, *guards(reading.link, request.reached_as), *request.keep],
            swaps=settings_of.swap_entries(request.swap, reading),
            boot_target=request.boot_target,
        )

    def _common(self, reading: Reading, rows: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
        """Keys that every verb returns."""
        available = self._available()
        target = reading.seen.units[DEFAULT_TARGET].id
        return {
            "changed": False,
            "serving": reading.snapshot is not None,
            "units": rows,
            "findings": [],
            "notes": notes,
            "connection": reading.link.as_dict(),
            "sessions": {
                "graphical": reading.people.graphical,
                "remote_desktops": reading.people.remote_desktops,
                "own": reading.people.own,
            },
            "would_cut_off": reading.people.cut_off,
            "falls_at_boot": [],
            "default_target": {"now": target, "then": target},
            "mem_available_before_kib": available,
            "mem_available_after_kib": available,
            "gained_kib": self.store.gained_kib() if reading.snapshot else 0,
            "dead_man": self._dead_man_row(),
            "diff": {"before": "", "after": ""},
        }

    def _dead_man_row(self) -> dict[str, Any]:
        armed = self.dead_man.armed()
        return {"armed": armed is not None, "seconds_left": armed["seconds_left"] if armed else None}

    # ------------------------------------------------------------------------------------------------- report

    def report(self) -> dict[str, Any]:
        """What the desktop holds, group by group. Changes nothing; needs root and a running systemd."""
        reading = self._read()
        plan = plan_strip(self._policy(reading, list(self.request.groups)), reading.seen, {})
        rows = []
        for item in plan.items:
            item.steps = []
            rows.append(item.row())
        going = [row for row in rows if row["action"] == "none" and row["now"].startswith("active")]
        held_kib = sum(row["memory_kib"] for row in going)
        text = f"unmanaged; {len(going)} running units could go{tell.held(held_kib * 1024)}"
        notes = []
        if reading.snapshot is not None:
            text = f"unmanaged, but {len(reading.held)} units are held since {reading.snapshot.taken_at}"
            notes.append(
                f"Serving mode holds {len(reading.held)} units since {reading.snapshot.taken_at}; "
                "`ansible-playbook desktop.yml` or `sudo ds4-desktop restore` gives them back."
            )
        return {
            **self._common(reading, rows, notes),
            "held_kib": held_kib,
            "ds4_summary": {"room": ROOM, "state": "ok", "text": text, "held_kib": held_kib},
        }

    # -------------------------------------------------------------------------------------------------- serve

    def serve(self) -> dict[str, Any]:
        """Strip the host to the policy.

        Raises:
            Ds4Error: findings, before anything was changed; or a unit that is not as it was made, and then the dead
                man's switch stays armed.
        """
        if self.request.check:
            return self._serve()
        self.store.prepare()
        with self.store.lock():
            return self._serve()

    def _serve(self) -> dict[str, Any]:
        request = self.request
        settings_of.check_window(request.window, self.runner)
        reading = self._read()
        plan = plan_strip(self._policy(reading, request.selected), reading.seen, reading.held)
        settings = settings_of.wanted(request, reading, self.root, self.systemd.etc())
        backs = [self._back(key, reading) for key in plan.gives_back()]
        target_back = reading.held_target if DISPLAY_GROUP not in request.selected else None
        rows = [item.row() for item in plan.items]
        result = self._common(reading, rows, list(plan.notes))
        available = result["mem_available_before_kib"]
        result["findings"] = tell.findings(plan, reading.people, request, self.root, available)
        result["falls_at_boot"] = plan.falls
        then = target_back["resolved"] if target_back else plan.default_target
        result["default_target"]["then"] = then or result["default_target"]["now"]
        result["changed"] = bool(plan.strips() or plan.default_target or backs or target_back or settings.changes)
        result["diff"] = tell.diff(rows, result["default_target"], settings, self.root)
        last = self.store.last_archived() if reading.snapshot is None else None
        result["notes"] += tell.notes(plan, reading.people, request.force, last)
        if result["findings"] and request.stop_on_findings:
            raise tell.stopped(plan, result)
        if request.check or not result["changed"]:
            text = tell.planned(plan, result) if result["changed"] else tell.nothing_to_do(plan, result)
            state = "planned" if result["changed"] else "ok"
            result["ds4_summary"] = {"room": ROOM, "state": state, "text": text, "gained_kib": result["gained_kib"]}
            return result
        settings.check(self.root)
        refuse_foreign(self._wrapper_path)
        before = available
        self._take_snapshot(plan, reading, settings, before)
        arms = bool(request.dead_man_seconds and (plan.strips() or plan.default_target))
        if arms:
            self.dead_man.arm(request.dead_man_seconds, request.lib_dir, reading.link.identity)
        self._write_wrapper()
        result["notes"] += self._strip(plan, reading, settings, backs, target_back)
        after = self._settled()
        self.store.journal("measured", before_kib=before, after_kib=after)
        if arms:  # the time to confirm counts from here
            self.dead_man.arm(request.dead_man_seconds, request.lib_dir, reading.link.identity)
        text = (
            f"serving; {len(plan.goes())} units off, MemAvailable {human_bytes(before * 1024)} → "
            f"{human_bytes(after * 1024)} ({tell.signed(after - before)})"
        )
        result.update(
            serving=True,
            dead_man=self._dead_man_row(),
            mem_available_after_kib=after,
            gained_kib=self.store.gained_kib(),
            ds4_summary={"room": ROOM, "state": "changed", "text": text, "gained_kib": after - before},
        )
        return result

    def _take_snapshot(self, plan: Plan, reading: Reading, settings: settings_of.Settings, available_kib: int) -> None:
        """Record what is about to be touched for the first time; on disk when this returns."""
        self.store.begin()
        snapshot = reading.snapshot or Snapshot(taken_at=utc(), boot_id=boot_id(), mem_available_kib=available_kib)
        snapshot.units = dict(reading.held)
        fell = set((reading.held_target or {}).get("running", [])) if snapshot.boot_id != boot_id() else set()
        for item in plan.goes().values():
            if item.key not in snapshot.units:
                entry = record(item, reading.seen, local_files(item.unit, root=self.root))
                if item.key in fell:  # it would run, had we not changed what the host boots into
                    entry["up_in"] = [SYSTEM]
                snapshot.units[item.key] = entry
        snapshot.missing = sorted(item.key for item in plan.items if item.action == "missing")
        if plan.default_target and reading.held_target is None:
            present = reading.seen.units[DEFAULT_TARGET]
            snapshot.default_target = {
                "link": os.readlink(self.default_link) if os.path.islink(self.default_link) else None,
                "resolved": present.id,
                "up": present.up,
                "running": [name for name in plan.falls if name != present.id],
            }
        snapshot.files = sorted({*snapshot.files, *settings.write})
        if self.request.swap == "low_swappiness" and snapshot.swappiness is None:
            snapshot.swappiness = settings_of.swappiness(self.root)
        if self.request.swap == "off" and not snapshot.swaps:
            snapshot.swaps = [{k: s[k] for k in ("device", "priority")} for s in settings_of.swaps(self.root)]
        self.store.save(snapshot)

    def _strip(
        self,
        plan: Plan,
        reading: Reading,
        settings: settings_of.Settings,
        backs: list[Back],
        target_back: Mapping[str, Any] | None,
    ) -> list[str]:
        """Carry out a plan: stop, disable, mask, each read back. Returns notes."""
        seen = reading.seen
        managers = [SYSTEM, *seen.user_units]
        if plan.default_target:
            self._set_default(seen.units[plan.default_target].fragment)
        strips = plan.strips()
        stubborn = self.hands.stop(
            by_manager((item.key, _managers_of(item.key, seen)) for item in strips if "stop" in item.steps)
        )
        for item in strips:
            if "disable" in item.steps:
                self.hands.set_links(item.key, dict.fromkeys(seen.enabling(item.key, item.unit.names)))
        for item in strips:
            if "mask" in item.steps:
                self.hands.set_links(item.key, {seen.mask_path(item.key): MASK})
        notes = settings_of.apply(settings, self.hands, self.root)
        notes += self._apply_backs(backs)
        if target_back:
            self._set_default(target_back["link"])
        for manager in managers:
            self.systemd.reload(manager)
        self._release(backs, target_back)
        keys = [item.key for item in plan.goes().values() if item.unit.exists]
        # What something started again between stop and mask: now it cannot any more. One that is still stopping stays out.
        again = [k for k, u in still_running(keys, self.systemd, managers).items() if u.active != "deactivating"]
        self.hands.stop(by_manager((key, managers[1:] if split(key)[0] == USER else [SYSTEM]) for key in again))
        wrong = self._unlike(plan)
        for key, unit in still_running(keys, self.systemd, managers).items():
            wrong[key] = stubborn.get(key) or f"came back after it was stopped: {why_not('stop', unit)}"
        if wrong:
            self.store.journal("mismatch", reasons=wrong)
            armed = self.dead_man.armed()
            back = f"; otherwise the desktop comes back in {armed['seconds_left']} s" if armed else ""
            raise failure(
                "Units did not become what serving mode needs",
                wrong,
                f"end what holds or starts them, or take them out of the list, and run again{back}",
            )
        return notes

    def _unlike(self, plan: Plan) -> dict[str, str]:
        """Units that were masked or disabled and that systemd sees differently."""
        items = [item for item in plan.strips() if split(item.key)[0] == SYSTEM and {"mask", "disable"} & {*item.steps}]
        wrong = {}
        for item, unit in zip(items, self.systemd.show([item.unit.id for item in items])):
            if "mask" in item.steps and unit.load != "masked":
                wrong[item.key] = f"masked, but systemd says {unit.load}, {unit.file_state}"
            elif "mask" not in item.steps and unit.file_state in ("enabled", "linked", "alias"):
                wrong[item.key] = f"disabled, but systemd says {unit.file_state}"
        return wrong

    def _set_default(self, target: str | None) -> None:
        if os.path.lexists(self.default_link) and not os.path.islink(self.default_link):
            raise Ds4Error(
                "The default target cannot be changed",
                found=f"{self.default_link} is a file",
                required="a link, as `systemctl set-default` makes it",
                cure="replace it by a link, or take the group display out of serving_mode_groups",
            )
        self.hands.set_links(DEFAULT_TARGET, {self.default_link: target})

    @property
    def _wrapper_path(self) -> str:
        return os.path.join(self.request.bin_dir, "ds4-desktop")

    def _write_wrapper(self) -> None:
        text = _WRAPPER.format(
            marker=MARKER_LINE,
            lib=self.request.lib_dir,
            python=sys.executable or "/usr/bin/python3",
            state=self.request.state_dir,
        )
        if read_text(self._wrapper_path) != text:
            self.hands.write_file(self._wrapper_path, text, mode=0o755)

    # ------------------------------------------------------------------------------------------------ restore

    def _back(self, key: str, reading: Reading) -> Back:
        entry = reading.held[key]
        return give_back(key, entry, reading.seen, hashes(entry["local_files"], self.root))

    def _apply_backs(self, backs: Iterable[Back]) -> list[str]:
        """Stop what did not run before, then put links back. Returns notes."""
        rows = list(backs)
        stuck = self.hands.stop(by_manager((back.key, back.stop_in) for back in rows))
        for back in rows:
            self.hands.set_links(back.key, back.links)
        notes = [note for back in rows for note in back.notes]
        return notes + [f"{key} could not be stopped again: {why}." for key, why in stuck.items()]

    def _release(self, backs: list[Back], target: Mapping[str, Any] | None) -> None:
        """Start what ran before; then these units (and the default target) are no longer held."""
        snapshot = self.store.load()
        if snapshot is None or not (backs or target or (snapshot.swaps and self.request.swap != "off")):
            return
        failed = self._start_backs(backs, target)
        if self.request.swap != "off":
            failed.update(settings_of.swap_on(snapshot, self.hands, self.root))
            snapshot.swaps = []
        if failed and not self.request.force:
            raise failure("Units that are given back do not start", failed, f"correct them and run again; {_GIVE_UP}")
        keys = {back.key for back in backs}
        self.store.journal("given_back", units=[*keys, *([DEFAULT_TARGET] if target else [])])
        snapshot.units = {key: entry for key, entry in snapshot.units.items() if key not in keys}
        if target:
            snapshot.default_target = None
        self.store.save(snapshot)

    def _start_backs(self, backs: list[Back], target: Mapping[str, Any] | None) -> dict[str, str]:
        """Start what ran. Of the old default target only what was running: a start of the target itself would also
        start what its owner had stopped."""
        failed = self.hands.start(by_manager((back.key, back.start_in) for back in backs))
        if target is not None:
            fallen = self._fallen(target)
            failed.update(self.hands.start({SYSTEM: [name for name in fallen if not name.endswith(".target")]}))
            reached = [name for name in fallen if name.endswith(".target")]
            reached += [target["resolved"]] if target["up"] else []
            if reached:
                self.systemd.ctl("start", "--no-block", "--job-mode=ignore-dependencies", "--", *reached)
        return failed

    def _fallen(self, target: Mapping[str, Any]) -> list[str]:
        """Units that ran under the old default target and do not since a boot without it."""
        units = self.systemd.show(target["running"])
        return [unit.id for unit in units if unit.load == "loaded" and not unit.running]

    def restore(self, *, outcome: str = "restored", even_if_tight: bool = False) -> dict[str, Any]:
        """Give the desktop back, exactly as the snapshot has it.

        Args:
            outcome: why, for the archive.
            even_if_tight: do not ask whether the desktop fits into memory beside what runs now.

        Raises:
            Ds4Error: it does not fit, or a unit does not start; the snapshot stays and the command can be repeated.
        """
        if self.request.check or not os.path.isdir(self.store.directory):
            return self._restore(outcome, even_if_tight)
        self.store.prepare()
        with self.store.lock():
            return self._restore(outcome, even_if_tight)

    def _restore(self, outcome: str, even_if_tight: bool) -> dict[str, Any]:
        reading = self._read()
        if reading.snapshot is None:
            return self._nothing_held(reading)
        snapshot, target = reading.snapshot, reading.held_target
        backs = [self._back(key, reading) for key in reading.held]
        settings = settings_of.unwanted(snapshot, self.root)
        rows = [back.row(reading.held[back.key]["group"], f"as before {snapshot.taken_at}") for back in backs]
        result = self._common(reading, rows, [note for back in backs for note in back.notes])
        result["changed"] = True
        present = result["default_target"]["now"]
        if target is not None:
            result["default_target"]["then"] = target["resolved"]
            if present not in (target["resolved"], self.request.boot_target):
                result["notes"].append(f"The default target was set to {present} meanwhile; it is set back.")
        added = [key for key in snapshot.missing if reading.seen.unit(key).exists]
        result["notes"] += [f"{key} was installed meanwhile; it was never touched." for key in added]
        result["diff"] = tell.diff(rows, result["default_target"], settings, self.root)
        starting = [back.key for back in backs if back.start_in]
        before, gained = result["mem_available_before_kib"], result["gained_kib"]
        if starting and before < gained and not (even_if_tight or self.request.force):
            finding = tell.finding(
                "tight",
                "The desktop does not fit into memory beside what runs now",
                f"MemAvailable {human_bytes(before * 1024)}",
                f"{human_bytes(gained * 1024)}, which is what taking it away brought",
                "stop the engine first (systemctl stop ds4), or set serving_mode_force: true",
            )
            result["findings"] = [finding]
            if self.request.stop_on_findings:
                texts = {key: finding[key] for key in ("found", "required", "cure")}
                raise Ds4Error(finding["what"], **texts, evidence={"units": rows, "findings": [finding]})
        if self.request.check:
            text = f"would give back {len(backs)} units, {len(starting)} of them to start"
            result["ds4_summary"] = {"room": ROOM, "state": "planned", "text": text}
            return result
        self.store.journal("restore", outcome=outcome)
        if target is not None:
            self._set_default(target["link"])
        notes = [*self._apply_backs(backs), *settings_of.apply(settings, self.hands, self.root)]
        for manager in (SYSTEM, *reading.seen.user_units):
            self.systemd.reload(manager)
        failed = self._start_backs(backs, target)
        failed.update(settings_of.swap_on(snapshot, self.hands, self.root))
        if failed and not self.request.force:
            self.store.journal("mismatch", reasons=failed)
            cure = f"look at `systemctl status` of each and run again; {_GIVE_UP}"
            raise failure("Units that ran before serving mode do not start", failed, cure)
        notes += [f"{key} does not start: {why}." for key, why in failed.items()]
        result["notes"] += [note for note in notes if note not in result["notes"]]
        result["archived"] = self.store.archive(outcome)
        self.dead_man.disarm()
        after = self._settled()
        text = f"desktop; {len(backs)} units given back, MemAvailable {human_bytes(after * 1024)}"
        result.update(
            serving=False,
            dead_man=self._dead_man_row(),
            mem_available_after_kib=after,
            ds4_summary={"room": ROOM, "state": "changed", "text": text},
        )
        return result

    def _nothing_held(self, reading: Reading) -> dict[str, Any]:
        """No snapshot: at most a timer is left to be cancelled."""
        result = self._common(reading, [], [])
        result["changed"] = result["dead_man"]["armed"]
        if result["changed"] and not self.request.check:
            self.dead_man.disarm()
            result["dead_man"] = self._dead_man_row()
        state = "ok" if not result["changed"] else "planned" if self.request.check else "changed"
        result["ds4_summary"] = {"room": ROOM, "state": state, "text": "desktop; serving mode holds nothing"}
        return result

    # ------------------------------------------------------------------------------------------------ confirm

    def confirm(self) -> dict[str, Any]:
        """Cancel the dead man's switch from a new connection.

        Raises:
            Ds4Error: it is the connection that armed it, or the desktop has been given back already.
        """
        if self.store.load() is None:
            last = self.store.last_archived() or {}
            raise Ds4Error(
                "There is nothing to confirm: serving mode holds nothing",
                found=f"{last.get('outcome', 'no snapshot')} at {last.get('at', 'an unknown time')}",
                cure="run the playbook again; serving_mode_dead_man_seconds gives more time",
            )
        link = connection(root=self.root, runner=self.runner)
        armed = self.dead_man.armed() is not None
        if armed and not self.request.check:
            with self.store.lock():
                self.dead_man.confirm(link.kind, link.identity)
        return {"changed": armed, "serving": True, "connection": link.as_dict(), "dead_man": self._dead_man_row()}

    # ----------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, Any]:
        """What is held now."""
        reading = self._read()
        snapshot = reading.snapshot
        return {
            "serving": snapshot is not None,
            "since": snapshot.taken_at if snapshot else "",
            "units": [self._back(key, reading).row(entry["group"], "") for key, entry in reading.held.items()],
            "dead_man": self.dead_man.armed(),
            "gained_kib": self.store.gained_kib() if snapshot else 0,
            "last": self.store.last_archived(),
        }


def _managers_of(key: str, seen: Seen) -> list[str]:
    """Managers in which a unit has not fully stopped."""
    scope, name = split(key)
    if scope == SYSTEM:
        return [SYSTEM]
    return [uid for uid, units in seen.user_units.items() if name in units and units[name].running]


# ---------------------------------------------------------------------------------------------------- command line


def _print_status(status: Mapping[str, Any]) -> None:
    if status["serving"]:
        gained = tell.signed(status["gained_kib"])
        print(
            f"serving since {status['since']}: {len(status['units'])} units held, {gained} MemAvailable when stripped"
        )
        for row in status["units"]:
            print(f"  {row['unit']:<40} now {row['now']:<24} was {row['then']}")
    else:
        last = status["last"]
        print("desktop: serving mode holds nothing" + (f" ({last['outcome']} at {last['at']})" if last else ""))
    if status["dead_man"]:
        left = status["dead_man"]["seconds_left"]
        when = "soon after this boot" if left is None else f"in {left} s"
        print(f"dead man's switch armed: the desktop comes back {when}; `ds4-desktop confirm` cancels that")


def main(arguments: list[str] | None = None) -> int:
    """Exit 1 on an expected failure, with one message."""
    parser = argparse.ArgumentParser(prog="ds4-desktop", description="Serving mode on this host.")
    parser.add_argument("verb", choices=["restore", "confirm", "status"])
    parser.add_argument("--state-dir", default=Request.state_dir, help="directory of state, default %(default)s")
    parser.add_argument("--force", action="store_true", help="give back although memory is tight or a unit fails")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dead-man", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    mode = ServingMode(Request(state_dir=options.state_dir, force=options.force))
    try:
        if os.geteuid() != 0:
            raise Ds4Error(
                "ds4-desktop needs root", found=f"uid {os.geteuid()}", cure=f"sudo ds4-desktop {options.verb}"
            )
        if which("systemctl") is None:
            raise Ds4Error("This host has no systemd", found="no systemctl", required="a host booted with systemd")
        if options.verb == "status":
            result = mode.status()
        elif options.verb == "confirm":
            result = mode.confirm()
        else:
            outcome = DEAD_MAN_OUTCOME if options.dead_man else "ds4-desktop restore"
            result = mode.restore(outcome=outcome, even_if_tight=options.dead_man)
    except Ds4Error as error:
        print(json.dumps(error.result(), sort_keys=True) if options.json else str(error), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, sort_keys=True))
    elif options.verb == "status":
        _print_status(result)
    elif options.verb == "confirm":
        print("confirmed: the desktop stays away" if result["changed"] else "nothing was armed")
    else:
        print("\n".join([result["ds4_summary"]["text"], *result["notes"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
