# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read everything that serving mode judges, in few questions to systemd."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import Ds4Error
from .serving_mode_plan import DISPLAY_GROUP, Entry, Rule, Seen
from .serving_mode_reach import Connection, People, connection, people, read_user_units, user_managers
from .serving_mode_snapshot import DEFAULT_TARGET, Snapshot, Store
from .serving_mode_units import MASK, SYSTEM, UNIT_NAME, USER, Runner, Systemd, Unit, join, local_files, split


@dataclass
class Request:
    """What is asked of a host. Lists and thresholds come from the role; the module documents each of them."""

    groups: Mapping[str, list[Entry]] = field(default_factory=dict)
    selected: list[str] = field(default_factory=list)
    extra: list[Entry] = field(default_factory=list)
    never: list[Rule] = field(default_factory=list)
    keep: list[Rule] = field(default_factory=list)
    remote_desktops: list[str] = field(default_factory=list)
    boot_target: str = "multi-user.target"
    reached_as: str = ""
    swap: str = "keep"
    swappiness: int = 10
    window: str = ""
    window_timers: list[str] = field(default_factory=list)
    dead_man_seconds: int = 300
    force: bool = False
    check: bool = False
    stop_on_findings: bool = True
    wait_seconds: float = 120.0
    settle_seconds: float = 30.0
    settle_kib: int = 65536
    state_dir: str = "/var/lib/ds4/state"
    lib_dir: str = "/opt/ds4/lib"
    bin_dir: str = "/usr/local/bin"
    meminfo: str = "/proc/meminfo"


def parse_entries(rows: Iterable[Mapping[str, Any]], where: str) -> list[Entry]:
    """Units of a group from data.

    Raises:
        Ds4Error: a row lacks its unit or reason, or has a field of another name.
    """
    entries = []
    for row in rows:
        unknown = sorted(set(row) - set(Entry._fields))
        if unknown or not row.get("unit") or not row.get("reason") or row.get("scope", SYSTEM) not in (SYSTEM, USER):
            raise Ds4Error(
                f"A unit of the group {where} is not described as it must be",
                found=str(dict(row)),
                required=f"unit and reason; also known: scope ({SYSTEM} or {USER}) and unless_active",
                cure="correct it",
            )
        entries.append(Entry(**row))
    return entries


def parse_rules(rows: Iterable[Mapping[str, Any]], cure: str = "") -> list[Rule]:
    """Rules from data; ``cure`` is for those that name none."""
    return [Rule(tuple(row["units"]), row["reason"], row.get("cure") or cure) for row in rows]


@dataclass
class Reading:
    """The host at one moment.

    Attributes:
        touched: units (and ``default.target``) that an operation was begun on.
    """

    seen: Seen
    link: Connection
    people: People
    snapshot: Snapshot | None
    touched: set[str]

    @property
    def held(self) -> dict[str, dict[str, Any]]:
        """Records of units that an operation was begun on; an entry that was never reached binds nobody."""
        units = self.snapshot.units if self.snapshot else {}
        return {key: entry for key, entry in units.items() if key in self.touched}

    @property
    def held_target(self) -> dict[str, Any] | None:
        """The snapshot's default target, None while it is not ours."""
        return self.snapshot.default_target if self.snapshot and DEFAULT_TARGET in self.touched else None


def read_host(request: Request, systemd: Systemd, store: Store, runner: Runner) -> Reading:
    """Ask systemd, logind, the network and our records.

    Raises:
        Ds4Error: a name is no unit name, systemd does not answer, or the snapshot cannot be trusted.
    """
    snapshot = store.load()
    keys = _keys(request, snapshot)
    names = {scope: [name for s, name in map(split, keys) if s == scope] for scope in (SYSTEM, USER)}
    units = {name: unit for unit in systemd.loaded() for name in unit.names}
    _add(units, systemd, (*names[SYSTEM], DEFAULT_TARGET))
    _add(units, systemd, [name for unit in units.values() for name in unit.triggered_by])
    wants_users = bool(names[USER]) or DISPLAY_GROUP in request.groups
    managers = user_managers(units) if wants_users else []
    seen = Seen(
        units=units,
        user_units={uid: read_user_units(systemd, uid, names[USER]) for uid in managers},
        links={**systemd.links(SYSTEM), **systemd.links(USER)},
        etc={scope: systemd.etc(scope) for scope in (SYSTEM, USER)},
    )
    held = snapshot.units if snapshot else {}
    for key in {*keys, *(unit.id for unit in units.values())}:
        path = seen.mask_path(key)
        if os.path.lexists(path) and not os.path.islink(path):
            seen.unmaskable.add(key)
    for key in keys:
        scope, name = split(key)
        if systemd.has_file(name, scope) or (key in held and _stands_behind(held[key], seen.mask_path(key))):
            seen.installed.add(key)
    link = connection(root=systemd.root, runner=runner)
    found = people(link, request.remote_desktops, units, seen.user_units, runner=runner)
    return Reading(seen, link, found, snapshot, store.touched() if snapshot else set())


def _keys(request: Request, snapshot: Snapshot | None) -> list[str]:
    """Every unit that the request or the snapshot speaks of, once."""
    unknown = [name for name in request.selected if name not in request.groups]
    if unknown:
        raise Ds4Error(
            "A group of units is not known",
            found=", ".join(unknown),
            required=f"of {', '.join(request.groups) or 'none'}",
            cure="correct serving_mode_groups",
        )
    entries = [entry for group in request.groups.values() for entry in group] + request.extra
    keys = [join(entry.scope, entry.unit) for entry in entries] + list(request.window_timers)
    if snapshot:
        keys += [*snapshot.units, *snapshot.missing, *(snapshot.default_target or {}).get("running", [])]
    for key in keys:
        if not UNIT_NAME.match(split(key)[1]):
            raise Ds4Error(
                "A unit of the policy has no valid name",
                found=repr(key),
                required="a full unit name such as cups.service",
                cure="correct it in serving_mode_extra_units",
            )
    return list(dict.fromkeys(keys))


def _add(units: dict[str, Unit], systemd: Systemd, names: Iterable[str]) -> None:
    """Ask for those names that are not known yet."""
    missing = sorted({name for name in names if name not in units})
    for asked, unit in zip(missing, systemd.show(missing)):
        units.update(dict.fromkeys((asked, *unit.names), unit))


def _stands_behind(entry: Mapping[str, Any], place: str) -> bool:
    """Is there still what a recorded unit came from, where that is no file in a unit directory?"""
    if "/generator" in entry["fragment"]:  # a generator makes no file while the unit is masked
        return not entry["source"] or os.path.exists(entry["source"])
    linked = entry["links"].get(place, MASK)
    return linked != MASK and os.path.exists(os.path.join(os.path.dirname(place), linked))


def hashes(paths: Iterable[str], root: str) -> dict[str, str]:
    """Path → sha256 of those of the paths that are there."""
    found: dict[str, str] = {}
    for path in paths:
        found.update(local_files(Unit("", fragment=path), root=root))
    return found
