# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Units as systemd sees them: their state, the links that enable or mask them, what stops and what starts with them.

Readers only. A unit is named by its key: ``gdm.service`` for the system manager, ``user/tracker.service`` for a unit
that the managers of users run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .command import Ran, run
from .errors import Ds4Error

SYSTEM = "system"  # manager and scope of the system's own units
USER = "user"  # scope of units that users' managers run; those managers are named by their uid
MASK = "/dev/null"
# systemd.unit(5): folders below a unit directory whose links pull a unit in.
PULLING_FOLDERS = (".wants", ".requires", ".upholds")
UNIT_NAME = re.compile(
    r"^[A-Za-z0-9:_.@\\-]{1,246}\.(service|socket|target|timer|path|swap|mount|automount|slice|scope)$"
)
_UP = ("active", "activating", "reloading", "refreshing")
_LOADED_TYPES = ("*.service", "*.socket", "*.target", "*.timer", "*.path", "*.swap")
# org.freedesktop.systemd1(5) names; the pairs below are what a stop or a start of a unit carries along.
_STOPS_WITH = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo")
_PULLS = ("Requires", "Requisite", "BindsTo", "Wants", "Upholds")
_SCALARS = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "UnitFilePreset",
    "FragmentPath",
    "SourcePath",
    "Following",
    "IgnoreOnIsolate",
    "MemoryCurrent",
    "Result",
    "MainPID",
    "Type",
    "Job",
    "RefuseManualStop",
    "RefuseManualStart",
)
_LISTS = ("Names", "DropInPaths", "TriggeredBy", "Triggers", *_STOPS_WITH, *_PULLS)
_PROPERTIES = ",".join(_SCALARS + _LISTS)

Runner = Callable[..., Ran]


class Unit(NamedTuple):
    """One unit of one manager, as ``systemctl show`` tells it. Empty strings are what systemd does not say."""

    id: str
    names: tuple[str, ...] = ()
    load: str = "loaded"
    active: str = "inactive"
    sub: str = ""
    file_state: str = ""
    preset: str = ""
    fragment: str = ""
    source: str = ""
    following: str = ""
    result: str = ""
    stays_on_isolate: bool = False
    memory_bytes: int = 0
    main_pid: int = 0
    type: str = ""
    job: str = ""
    by_hand: bool = True  # systemd lets people stop and start it
    drop_ins: tuple[str, ...] = ()
    triggered_by: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    stops_with: tuple[str, ...] = ()
    pulls: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """False for a name that no unit file, generator or running unit stands behind."""
        return self.load != "not-found"

    @property
    def up(self) -> bool:
        """True when it has to run again when the desktop is given back; a one-time job at work has not."""
        return self.active in _UP and not (self.active == "activating" and self.type == "oneshot")

    @property
    def running(self) -> bool:
        """True until it has fully stopped."""
        return self.active in _UP or self.active == "deactivating"


def parse_show(text: str) -> list[Unit]:
    """Blocks of ``systemctl show``, in their order."""
    units = []
    for block in text.strip().split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if not values.get("Id"):
            continue
        lists = {name: tuple(values.get(name, "").split()) for name in _LISTS}
        memory = values.get("MemoryCurrent", "")
        units.append(
            Unit(
                id=values["Id"],
                names=tuple(dict.fromkeys((values["Id"], *lists["Names"]))),
                load=values.get("LoadState", ""),
                active=values.get("ActiveState", ""),
                sub=values.get("SubState", ""),
                file_state=values.get("UnitFileState", ""),
                preset=values.get("UnitFilePreset", ""),
                fragment=values.get("FragmentPath", ""),
                source=values.get("SourcePath", ""),
                following=values.get("Following", ""),
                result=values.get("Result", ""),
                stays_on_isolate=values.get("IgnoreOnIsolate") == "yes",
                # 2^64-1 and "[not set]" both mean: no figure
                memory_bytes=int(memory) if memory.isdigit() and int(memory) < 1 << 60 else 0,
                main_pid=int(values.get("MainPID") or 0),
                type=values.get("Type", ""),
                job=values.get("Job", "").strip("0"),
                by_hand="yes" not in (values.get("RefuseManualStop"), values.get("RefuseManualStart")),
                drop_ins=lists["DropInPaths"],
                triggered_by=lists["TriggeredBy"],
                triggers=lists["Triggers"],
                stops_with=tuple(dict.fromkeys(name for key in _STOPS_WITH for name in lists[key])),
                pulls=tuple(dict.fromkeys(name for key in _PULLS for name in lists[key])),
            )
        )
    return units


def split(key: str) -> tuple[str, str]:
    """(scope, unit name) of a key."""
    return (USER, key[len(USER) + 1 :]) if key.startswith(f"{USER}/") else (SYSTEM, key)


def join(scope: str, name: str) -> str:
    """Key of a unit name in a scope."""
    return name if scope == SYSTEM else f"{USER}/{name}"


def closure(start: str, units: Mapping[str, Unit]) -> set[str]:
    """Everything that starting ``start`` pulls in, itself included, as far as systemd has loaded it."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        unit = units.get(todo.pop())
        if unit is not None and unit.id not in seen:
            seen.add(unit.id)
            todo += unit.pulls
    return seen


def isolate_would_stop(target: str, units: Mapping[str, Unit]) -> list[str]:
    """What ``systemctl isolate TARGET`` would stop: running units that the target does not pull in, sorted.

    As systemd does it: units with IgnoreOnIsolate stay, and so do units that are triggered by one that stays.
    """
    stays = closure(target, units)
    return sorted(
        {
            unit.id
            for unit in units.values()
            if unit.running
            and not unit.stays_on_isolate
            and unit.id not in stays
            and not any(name in stays for name in unit.triggered_by)
        }
    )


def by_name(units: Iterable[Unit]) -> dict[str, Unit]:
    """Units under each of their names."""
    return {name: unit for unit in units for name in unit.names}


class Systemd:
    """Questions to the systemd of this host.

    Args:
        root: prefix of every path; empty on a host.
        runner: runs a command, as ``command.run`` does.
    """

    def __init__(self, *, root: str = "", runner: Runner = run) -> None:
        self.root = root
        self.runner = runner

    def etc(self, scope: str = SYSTEM) -> str:
        """Folder of the administrator's units and links."""
        return f"{self.root}/etc/systemd/{scope}"

    def ctl(self, *words: str, manager: str = SYSTEM, timeout_seconds: float = 60.0) -> Ran:
        """``systemctl`` towards the system's manager, or towards the manager of the user with that uid."""
        if manager == SYSTEM:
            return self.runner(["systemctl", *words], timeout_seconds=timeout_seconds)
        return self.runner(
            ["systemctl", "--user", *words],
            timeout_seconds=timeout_seconds,
            user=_account(int(manager)),
            env={"XDG_RUNTIME_DIR": f"/run/user/{manager}"},
        )

    def _show(self, names: Sequence[str], manager: str) -> list[Unit]:
        answer = self.ctl("show", f"--property={_PROPERTIES}", "--", *names, manager=manager)
        if answer.rc != 0 and self._is_gone(manager):
            return [Unit(name, (name,), load="not-found") for name in names if UNIT_NAME.match(name)]
        if answer.rc != 0:
            who = "systemd" if manager == SYSTEM else f"The user manager of uid {manager}"
            raise Ds4Error(
                f"{who} does not answer",
                found=(answer.err.strip() or f"exit {answer.rc}").splitlines()[-1],
                required="a host booted with systemd, and root",
                cure="run `systemctl status` on the host",
            )
        return parse_show(answer.out)

    def _is_gone(self, manager: str) -> bool:
        """True for a user's manager that has ended, as that of a login screen does: nothing runs there any more."""
        return manager != SYSTEM and self.ctl("is-active", "--quiet", f"user@{manager}.service").rc != 0

    def show(self, names: Sequence[str], manager: str = SYSTEM) -> list[Unit]:
        """One unit per name, in their order; an unknown name gives a unit that does not exist.

        Raises:
            Ds4Error: systemd cannot be asked.
        """
        if not names:
            return []
        units = self._show(names, manager)
        if len(units) != len(names):
            raise Ds4Error(
                "systemd told less than it was asked",
                found=f"{len(units)} units",
                required=f"{len(names)}: {' '.join(names)}",
                cure="run `systemctl show` with these names on the host",
            )
        return units

    def loaded(self, manager: str = SYSTEM) -> list[Unit]:
        """Every loaded service, socket, target, timer, path and swap."""
        return self._show(_LOADED_TYPES, manager)

    def reload(self, manager: str = SYSTEM) -> None:
        """Make the manager read unit files and links again.

        Raises:
            Ds4Error: it did not.
        """
        answer = self.ctl("daemon-reload", manager=manager)
        if answer.rc != 0 and not self._is_gone(manager):
            raise Ds4Error(
                "systemd did not read its unit files again",
                found=(answer.err.strip() or f"exit {answer.rc}"),
                cure="run `systemctl daemon-reload` on the host",
            )

    def links(self, scope: str = SYSTEM) -> dict[str, str]:
        """Path → target, byte for byte, of every link that can enable, alias or mask a unit, in /etc and /run."""
        found = {}
        for folder in (self.etc(scope), f"{self.root}/run/systemd/{scope}"):
            for path in _entries(folder):
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                elif path.endswith(PULLING_FOLDERS):
                    found.update({link: os.readlink(link) for link in _entries(path) if os.path.islink(link)})
        return found

    def has_file(self, name: str, scope: str = SYSTEM) -> bool:
        """True when some unit directory holds a file or link of that name which is not a mask."""
        folders = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
        paths = [f"{self.root}/{folder}/{scope}/{name}" for folder in folders]
        return any(os.path.exists(path) and os.path.realpath(path) != MASK for path in paths)


def links_of(names: Iterable[str], links: Mapping[str, str]) -> dict[str, str]:
    """Those links that belong to a unit with these names: its masks, aliases, wants, requires and upholds."""
    wanted = set(names)
    found = {}
    for path, target in links.items():
        pulled_in = os.path.dirname(path).endswith(PULLING_FOLDERS)
        if os.path.basename(path) in wanted or (not pulled_in and os.path.basename(target) in wanted):
            found[path] = target
    return found


def local_files(unit: Unit, *, root: str = "") -> dict[str, str]:
    """Path → sha256 of the unit file and drop-ins that somebody put on this host (not those of packages)."""
    local = (f"{root}/etc/", f"{root}/run/systemd/system/", f"{root}/usr/local/")
    found = {}
    for path in (unit.fragment, unit.source, *unit.drop_ins):
        if path.startswith(local) and os.path.isfile(path):
            with open(path, "rb") as stream:
                found[path] = hashlib.sha256(stream.read()).hexdigest()
    return found


def describe(unit: Unit) -> str:
    """``active, enabled`` as people read it."""
    if not unit.exists:
        return "not installed"
    return ", ".join(part for part in (unit.active, unit.file_state) if part)


def _entries(folder: str) -> list[str]:
    try:
        return sorted(f"{folder}/{name}" for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _account(uid: int) -> str:
    import pwd

    return pwd.getpwuid(uid).pw_name
