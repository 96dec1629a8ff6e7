# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Decide, without touching anything, what goes, what stays, what comes back, and why. Pure functions.

Policy (groups, rules) comes in as data; nothing here knows the name of a unit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from .serving_mode_units import (
    MASK,
    PULLING_FOLDERS,
    SYSTEM,
    Unit,
    closure,
    describe,
    isolate_would_stop,
    join,
    links_of,
    split,
)

DISPLAY_GROUP = "display"  # the group that people's graphical sessions stand on
EXTRA_GROUP = "extra"  # units that the operator added
SWAP_GROUP = "swap"


class Entry(NamedTuple):
    """One unit of a group: why it goes, whose manager runs it, and units whose activity makes it stay (pattern)."""

    unit: str
    reason: str
    scope: str = SYSTEM
    unless_active: str = ""


class Rule(NamedTuple):
    """Unit name patterns that stay, why, and what an operator can do about it (empty: nothing)."""

    units: tuple[str, ...]
    reason: str
    cure: str = ""

    def hits(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.units)


@dataclass
class Policy:
    """What the operator chose and what the house forbids.

    Attributes:
        groups: name → units; all of them, also those that are not selected.
        selected: groups that go, in order.
        extra: units the operator added.
        rules: what stays, most binding first: never, guards found on the host, kept by default.
        swaps: swap units that go; no rule is asked about them, the amount of memory was.
        boot_target: target to boot into while the display group goes; empty leaves the default target alone.
    """

    groups: Mapping[str, list[Entry]]
    selected: list[str]
    extra: list[Entry] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    swaps: list[Entry] = field(default_factory=list)
    boot_target: str = ""

    def entries(self) -> Iterable[tuple[str, Entry]]:
        """What goes, with its group."""
        for group in self.selected:
            yield from ((group, entry) for entry in self.groups.get(group, []))
        yield from ((EXTRA_GROUP, entry) for entry in self.extra)
        yield from ((SWAP_GROUP, entry) for entry in self.swaps)


@dataclass
class Seen:
    """The host as read.

    Attributes:
        units: every name of a loaded or asked-for system unit → unit; also ``default.target``.
        user_units: uid → the same for that user's manager.
        links: path → target, both scopes.
        etc: scope → folder of the administrator's units.
        unmaskable: keys with a regular file where the mask would have to be.
        installed: keys (of held units and of users' units) that something stands behind, whether masked or not.
    """

    units: Mapping[str, Unit]
    user_units: Mapping[str, Mapping[str, Unit]] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    etc: Mapping[str, str] = field(default_factory=lambda: {s: f"/etc/systemd/{s}" for s in ("system", "user")})
    unmaskable: set[str] = field(default_factory=set)
    installed: set[str] = field(default_factory=set)

    def unit(self, key: str) -> Unit:
        """The unit behind a key. For a users' unit: merged over all managers that run."""
        scope, name = split(key)
        if scope == SYSTEM:
            return self.units.get(name) or Unit(name, (name,), load="not-found")
        copies = [units[name] for units in self.user_units.values() if name in units and units[name].exists]
        if not copies and key not in self.installed:
            return Unit(name, (name,), load="not-found")
        base = next((copy for copy in copies if copy.up), copies[0] if copies else Unit(name, (name,)))
        masked = self.masked(key)
        state = "masked" if masked else "enabled" if self.enabling(key, base.names) else "disabled"
        return base._replace(id=name, file_state=state, load="masked" if masked else "loaded")

    def up_in(self, key: str) -> list[str]:
        """Managers in which the unit is up: ``["system"]`` or uids."""
        scope, name = split(key)
        if scope == SYSTEM:
            return [SYSTEM] if self.unit(key).up else []
        return sorted(uid for uid, units in self.user_units.items() if name in units and units[name].up)

    def etc_links(self, key: str, names: Iterable[str]) -> dict[str, str]:
        """Links of the unit in /etc: those that outlive a boot, hence those that are changed and put back."""
        folder = self.etc[split(key)[0]] + "/"
        return {path: to for path, to in links_of(names, self.links).items() if path.startswith(folder)}

    def enabling(self, key: str, names: Iterable[str]) -> dict[str, str]:
        """What ``systemctl disable`` is about: wants, requires, upholds and aliases.

        A linked unit file is not among them: it gives way to the mask, in one step.
        """
        place = self.mask_path(key)
        return {path: to for path, to in self.etc_links(key, names).items() if to != MASK and path != place}

    def mask_path(self, key: str) -> str:
        scope, name = split(key)
        return f"{self.etc[scope]}/{name}"

    def masked(self, key: str) -> bool:
        return self.links.get(self.mask_path(key)) == MASK


@dataclass
class Item:
    """One unit in a plan.

    Attributes:
        action: ``strip``, ``keep``, ``missing`` or ``give_back``.
        steps: of ``stop``, ``disable``, ``mask`` what is still to be done; none means: already so.
        via: key of the unit that this one goes along with.
        only_stop: it goes along because that unit's stop takes it down; it is neither disabled nor masked.
    """

    key: str
    group: str
    reason: str
    action: str
    unit: Unit
    steps: list[str] = field(default_factory=list)
    via: str = ""
    only_stop: bool = False
    then: str = ""

    def row(self) -> dict[str, Any]:
        """As shown to people."""
        now = describe(self.unit)
        then = self.then or now
        if self.action == "strip" and self.steps:
            state = (
                "masked" if "mask" in self.steps else "disabled" if "disable" in self.steps else self.unit.file_state
            )
            active = "inactive" if "stop" in self.steps else self.unit.active
            then = ", ".join(part for part in (active, state) if part)
        return {
            "unit": self.key,
            "group": self.group,
            "now": now,
            "then": then,
            "action": "none" if self.action == "strip" and not self.steps else self.action,
            "steps": list(self.steps),
            "reason": self.reason,
            "memory_kib": self.unit.memory_bytes // 1024 if self.unit.up else 0,
        }


@dataclass
class Plan:
    """Everything that would change, stay or fall.

    Attributes:
        items: units in the order of the policy; what comes along and what is given back last.
        refused: what an operator asked for that never goes: (unit, reason, cure).
        default_target: id of the new default target, empty when it does not change.
        falls: running units that only the present default target starts: they run on now, not after the next boot.
        notes: sentences for people.
    """

    items: list[Item] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    default_target: str = ""
    falls: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def strips(self) -> list[Item]:
        """Units with something left to do."""
        return [item for item in self.items if item.action == "strip" and item.steps]

    def goes(self) -> dict[str, Item]:
        """Every unit that is stripped or to be stripped."""
        return {item.key: item for item in self.items if item.action == "strip"}

    def gives_back(self) -> list[str]:
        return [item.key for item in self.items if item.action == "give_back"]

    def stops(self, group: str) -> list[Item]:
        """Running units of a group, and what goes along with them, that would be stopped."""
        return [item for item in self.strips() if item.group == group and "stop" in item.steps]


def steps_for(key: str, seen: Seen, *, only_stop: bool = False) -> list[str]:
    """What is left to do until a unit is stopped, disabled and masked."""
    unit = seen.unit(key)
    steps = ["stop"] if unit.running or seen.up_in(key) else []
    if only_stop:
        return steps
    if seen.enabling(key, unit.names):
        steps.append("disable")
    # A run that was cut off may have left a mask that systemd has not read yet.
    if key not in seen.unmaskable and not (seen.masked(key) and unit.load == "masked"):
        steps.append("mask")
    return steps


class _Along(NamedTuple):
    """A unit that goes along with another one."""

    unit: Unit
    why: str
    only_stop: bool


class _Builder:
    def __init__(self, policy: Policy, seen: Seen, held: Mapping[str, Mapping[str, Any]]) -> None:
        self.policy = policy
        self.seen = seen
        self.held = held
        self.plan = Plan()
        self.chosen: dict[str, Item] = {}
        # A held unit is masked, and systemd no longer tells its aliases: the record does.
        self.held_names = {join(split(key)[0], name): key for key, record in held.items() for name in record["names"]}

    def add(self, item: Item) -> None:
        self.chosen[item.key] = item
        self.plan.items.append(item)

    def rule_for(self, key: str, *names: str) -> Rule | None:
        known = {split(key)[1], *self.seen.unit(key).names, *self.held.get(key, {}).get("names", ()), *names}
        return next((rule for rule in self.policy.rules if rule.hits(known)), None)

    def along(self, key: str, unit: Unit) -> list[_Along]:
        """Units that would start this one again, and running units that its stop takes down."""
        if split(key)[0] != SYSTEM:
            return []
        triggers = [self.seen.units.get(name) for name in unit.triggered_by]
        found = [_Along(t, f"can start {unit.id} again", False) for t in triggers if t is not None and t.exists]
        reached = {unit.id, *(item.unit.id for item in found)}
        todo = list(unit.stops_with) if unit.running else []
        while todo:
            other = self.seen.units.get(todo.pop(0))
            if other is not None and other.running and other.id not in reached:
                reached.add(other.id)
                todo += other.stops_with
                found.append(_Along(other, f"is stopped together with {unit.id}", True))
        return found

    def why_not(self, entry: Entry, group: str, key: str, unit: Unit) -> Rule | None:
        """What makes a unit stay, if anything does."""
        if group == SWAP_GROUP:
            return None
        rule = self.rule_for(key, entry.unit)
        if rule is not None:
            return rule
        if unit.file_state == "transient":
            return Rule((), "transient: once stopped it could not be given back")
        if unit.running and key not in self.held and unit.file_state.startswith("masked"):
            return Rule((), "masked while it runs: once stopped it could not be given back")
        if unit.running and not unit.by_hand:
            return Rule((), "refuses to be stopped or started by hand (RefuseManualStop, RefuseManualStart)")
        if entry.unless_active:
            busy = sorted({u.id for u in self.seen.units.values() if u.up and fnmatchcase(u.id, entry.unless_active)})
            if busy:
                return Rule((), f"needed by {', '.join(busy)}")
        for other in self.along(key, unit) if unit.exists else []:
            blocking = self.rule_for(other.unit.id)
            if blocking is not None:
                return blocking._replace(reason=f"{other.unit.id} {other.why} and stays: {blocking.reason}")
        return None

    def consider(self, entry: Entry, group: str) -> None:
        asked = join(entry.scope, entry.unit)
        key = self.held_names.get(asked) or join(entry.scope, self.seen.unit(asked).id)
        if key in self.chosen:
            return
        unit = self.seen.unit(key)
        rule = self.why_not(entry, group, key, unit)
        if rule is not None and group == EXTRA_GROUP:
            self.plan.refused.append((entry.unit, rule.reason, rule.cure))
        elif rule is not None:
            if unit.exists:
                self.add(Item(key, group, rule.reason, "keep", unit))
        elif not unit.exists:
            self.add(Item(key, group, entry.reason, "missing", unit))
        elif key not in self.held and unit.load == "masked":
            self.add(Item(key, group, "masked before", "keep", unit))
        else:
            reason = entry.reason if key == asked else f"{entry.reason} (asked for as {entry.unit})"
            self.add(Item(key, group, reason, "strip", unit, steps_for(key, self.seen)))

    def consider_along(self) -> None:
        for cause in list(self.chosen.values()):
            if cause.action != "strip":
                continue
            for other in self.along(cause.key, cause.unit):
                there = self.chosen.get(other.unit.id)
                if there is not None and there.action == "keep" and there.unit.running:
                    cause.action, cause.steps = "keep", []
                    cause.reason = f"{other.unit.id} {other.why} and stays: {there.reason}"
                    break
                if there is None:
                    steps = steps_for(other.unit.id, self.seen, only_stop=other.only_stop)
                    self.add(
                        Item(
                            other.unit.id,
                            cause.group,
                            other.why,
                            "strip",
                            other.unit,
                            steps,
                            cause.key,
                            other.only_stop,
                        )
                    )

    def sockets_of_what_stays(self) -> None:
        """A socket without its running service frees nothing, and could only come back under a restart of it."""
        for item in [item for item in self.chosen.values() if item.key.endswith(".socket") and item.steps]:
            units = [self.seen.units.get(name) for name in item.unit.triggers]
            staying = [u.id for u in units if u is not None and u.running and u.id not in self.plan.goes()]
            if not staying or item.key in self.held:
                continue
            reason = f"listens for {', '.join(staying)}, which stays"
            if item.group == EXTRA_GROUP:
                self.plan.items.remove(item)
                self.plan.refused.append((item.key, reason, f"list {', '.join(staying)} as well"))
            else:
                item.action, item.reason, item.steps = "keep", reason, []

    def rest_of_held(self) -> None:
        """Held units that nobody asked for by name: along with one that goes, or to be given back."""
        for key, record in self.held.items():
            if key in self.chosen and self.chosen[key].action == "strip":
                continue
            unit = self.seen.unit(key)
            via = self.chosen.get(record["via"])
            if key not in self.chosen and via is not None and via.action == "strip":
                steps = steps_for(key, self.seen, only_stop=record["only_stop"])
                self.add(Item(key, via.group, record["reason"], "strip", unit, steps, via.key, record["only_stop"]))
                continue
            why = self.chosen[key].reason if key in self.chosen else "no longer asked for"
            self.plan.items = [item for item in self.plan.items if item.key != key]
            self.add(Item(key, record["group"], why, "give_back", unit, then=was(record)))

    def target(self) -> None:
        """The next boot: away from the graphical target, if the present default builds on the wanted one."""
        wanted = self.policy.boot_target
        present = self.seen.units.get("default.target")
        if not wanted or DISPLAY_GROUP not in self.policy.selected or present is None or present.id == wanted:
            return
        if wanted not in closure(present.id, self.seen.units):
            self.plan.notes.append(f"The default target {present.id} does not build on {wanted}: it is left alone.")
            return
        self.plan.default_target = wanted
        going = self.plan.goes()
        self.plan.falls = [name for name in isolate_would_stop(wanted, self.seen.units) if name not in going]


def plan_strip(policy: Policy, seen: Seen, held: Mapping[str, Mapping[str, Any]]) -> Plan:
    """What serving mode with this policy still has to change.

    Args:
        held: records of the units that are held already (key → entry of the snapshot).
    """
    builder = _Builder(policy, seen, held)
    for group, entry in policy.entries():
        builder.consider(entry, group)
    builder.consider_along()
    builder.sockets_of_what_stays()
    builder.rest_of_held()
    builder.target()
    return builder.plan


def record(item: Item, seen: Seen, files: Mapping[str, str]) -> dict[str, Any]:
    """The snapshot's entry of a unit: everything that giving it back needs, from before the first change.

    Args:
        files: path → sha256 of local unit files and drop-ins.
    """
    unit = item.unit
    links = links_of(unit.names, seen.links)
    folders = [os.path.dirname(path) for path, target in links.items() if target != MASK]
    return {
        "group": item.group,
        "reason": item.reason,
        "via": item.via,
        "only_stop": item.only_stop,
        "names": list(unit.names),
        "load_state": unit.load,
        "active_state": unit.active,
        "sub_state": unit.sub,
        "unit_file_state": unit.file_state,
        "preset": unit.preset,
        "fragment": unit.fragment,
        "source": unit.source,
        "up_in": seen.up_in(item.key),
        "links": links,
        "enabled_by": sorted({os.path.basename(f) for f in folders if f.endswith(PULLING_FOLDERS)}),
        "local_files": dict(files),
    }


def was(entry: Mapping[str, Any]) -> str:
    """A record's state as people read it."""
    active = "active" if entry["up_in"] else "inactive"
    return ", ".join(part for part in (active, entry["unit_file_state"]) if part)


@dataclass
class Back:
    """What giving one unit back takes: ``links`` to set (None: remove), managers to stop and start it in."""

    key: str
    unit: Unit
    then: str
    links: dict[str, str | None] = field(default_factory=dict)
    stop_in: list[str] = field(default_factory=list)
    start_in: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        return bool(self.links or self.stop_in or self.start_in)

    def row(self, group: str, reason: str) -> dict[str, Any]:
        steps = [
            name for name, value in (("stop", self.stop_in), ("links", self.links), ("start", self.start_in)) if value
        ]
        return {
            "unit": self.key,
            "group": group,
            "now": describe(self.unit),
            "then": self.then,
            "action": "give_back" if steps else "none",
            "steps": steps,
            "reason": reason,
            "memory_kib": self.unit.memory_bytes // 1024 if self.unit.up else 0,
        }


def give_back(key: str, entry: Mapping[str, Any], seen: Seen, files: Mapping[str, str]) -> Back:
    """How a held unit gets back to its record, from whatever it is now.

    What we hold goes back to its record, byte for byte, also where somebody changed it meanwhile: that is told. A unit
    that is no longer installed only loses its mask.

    Args:
        files: path → sha256 of the recorded local files as they are now; absent ones left out.
    """
    unit = seen.unit(key)
    back = Back(key, unit, was(entry))
    names = {*entry["names"], *unit.names}
    folder = seen.etc[split(key)[0]] + "/"
    wanted = {path: target for path, target in entry["links"].items() if path.startswith(folder)}
    present = seen.etc_links(key, names)
    gone = key not in seen.installed and entry["load_state"] != "masked"
    if gone:
        wanted = {}
        back.then = "not installed"
        if entry["fragment"]:  # a swap that was switched on by hand never had a unit file
            back.notes.append(f"{key} is no longer installed: only its mask was removed.")
        present = {path: target for path, target in present.items() if path == seen.mask_path(key) and target == MASK}
    if not entry["only_stop"]:
        for path, target in present.items():
            if path not in wanted:
                back.links[path] = None
                if not (path == seen.mask_path(key) and target == MASK):
                    back.notes.append(f"{key}: {path} was made meanwhile and is removed again.")
        for path, target in wanted.items():
            if path == seen.mask_path(key) and key in seen.unmaskable:
                back.notes.append(f"{key}: {path} is a file of somebody else now; it is left alone.")
            elif seen.links.get(path) != target:
                back.links[path] = target
    up = set(seen.up_in(key))
    managers = {SYSTEM, *seen.user_units}
    if not gone:
        back.start_in = [manager for manager in entry["up_in"] if manager in managers and manager not in up]
        back.stop_in = sorted(up - set(entry["up_in"]))
        if back.stop_in:
            back.notes.append(f"{key} was started meanwhile and is stopped again: it was not running before.")
        if dict(files) != dict(entry["local_files"]):
            back.notes.append(f"{key}: its local unit files changed meanwhile; they are left as they are now.")
    return back
