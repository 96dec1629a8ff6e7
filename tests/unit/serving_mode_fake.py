"""A small systemd over a folder: enough of its rules about links, masks, reloads and boots to test serving mode without root.

Kept close to what systemd does: UnitFileState is read from disk at every question, LoadState and names only at a reload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4.command import Ran

FOLDERS = ("etc/systemd/system", "run/systemd/generator", "run/systemd/system", "usr/lib/systemd/system")


@dataclass
class Fake:
    """A unit file and how it behaves.

    Attributes:
        kind: vendor, local (file in /etc), linked (file in /opt), generated, transient.
        wanted_by: targets it is enabled for; ``static`` units have none.
        starts: units that it triggers (socket, timer, path).
        stops: units that its stop takes down with it.
        refuses: it goes on running when told to stop.
        returns: it runs again after a stop as long as it is not masked.
    """

    name: str
    kind: str = "vendor"
    wanted_by: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    refuses: bool = False
    returns: bool = False
    fails: bool = False


@dataclass
class FakeHost:
    """The host: a root folder, running units, a runner in the place of ``command.run``."""

    root: Path
    units: dict[str, Fake] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    loaded: dict[str, str] = field(default_factory=dict)
    sessions: list[dict[str, str]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    before_call: Callable[[list[str]], None] = lambda _argv: None
    available_kib: int = 100 * 1024 * 1024
    memory_of: dict[str, int] = field(default_factory=dict)
    known_links: dict[str, str] | None = None  # while one question is answered, the disk stands still

    def __post_init__(self) -> None:
        for folder in (*FOLDERS, "opt", "proc/sys/vm", "proc", "etc/sysctl.d"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name in ("multi-user.target", "graphical.target", "basic.target"):
            wants = {"graphical.target": ("multi-user.target",), "multi-user.target": ("basic.target",)}.get(name, ())
            self.add(Fake(name, wants=wants))
        self.link("etc/systemd/system/default.target", "/lib/systemd/system/graphical.target")
        (self.root / "proc/sys/vm/swappiness").write_text("60\n")
        self.write_meminfo()
        self.boot()

    # ------------------------------------------------------------------------------------------------- disk

    @property
    def meminfo(self) -> str:
        return str(self.root / "proc/meminfo")

    def write_meminfo(self) -> None:
        available = self.available_kib - sum(self.memory_of.get(name, 0) for name in self.active)
        (self.root / "proc/meminfo").write_text(f"MemTotal: 127535152 kB\nMemAvailable: {available} kB\n")

    def link(self, path: str, target: str) -> None:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        if full.is_symlink():
            full.unlink()
        full.symlink_to(target)

    def add(self, unit: Fake, *, enable: bool = True, running: bool = False) -> None:
        """Install a unit as a package or its owner would."""
        self.units[unit.name] = unit
        folder = {"local": "etc/systemd/system", "linked": "opt", "generated": "run/systemd/generator"}
        path = self.root / folder.get(unit.kind, "usr/lib/systemd/system") / unit.name
        path.write_text(f"[Unit]\nDescription={unit.name}\n")
        if unit.kind == "linked":
            self.link(f"etc/systemd/system/{unit.name}", f"../../../opt/{unit.name}")
        if enable:
            self.enable(unit.name)
        if running:
            self.active.add(unit.name)
        self.reload()

    def remove(self, name: str) -> None:
        """Remove the unit's file, as a package removal does; its links stay."""
        unit = self.units.pop(name)
        for folder in ("etc/systemd/system", "opt", "run/systemd/generator", "usr/lib/systemd/system"):
            path = self.root / folder / name
            if path.exists() and not path.is_symlink():
                path.unlink()
        self.active.discard(unit.name)
        self.reload()

    def enable(self, name: str) -> None:
        unit = self.units[name]
        for target in unit.wanted_by:
            self.link(f"etc/systemd/system/{target}.wants/{name}", f"/usr/lib/systemd/system/{name}")
        for alias in unit.alias:
            self.link(f"etc/systemd/system/{alias}", f"/lib/systemd/system/{name}")

    def disable(self, name: str) -> None:
        for path, target in self.links().items():
            pulled_in = Path(path).name == name and Path(path).parent.suffix == ".wants"
            aliased = Path(target).name == name and Path(path).name != name
            if target != "/dev/null" and (pulled_in or aliased):
                Path(path).unlink()

    def mask(self, name: str) -> None:
        self.link(f"etc/systemd/system/{name}", "/dev/null")

    def unmask(self, name: str) -> None:
        path = self.root / "etc/systemd/system" / name
        if path.is_symlink() and os.readlink(path) == "/dev/null":
            path.unlink()

    def links(self) -> dict[str, str]:
        if self.known_links is not None:
            return self.known_links
        found = {}
        folder = f"{self.root}/etc/systemd/system"
        for directory in (folder, *(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))):
            for entry in os.scandir(directory):
                if entry.is_symlink():
                    found[entry.path] = os.readlink(entry.path)
        return dict(sorted(found.items()))

    def state(self) -> dict[str, Any]:
        """Everything that has to be as before: links byte for byte, states, what runs."""
        names = [name for name in self.units if not name.startswith("ds4-")]
        files = {name: self.file_state(name) for name in names}
        return {"links": self.links(), "files": files, "active": sorted(self.active & set(names))}

    # ------------------------------------------------------------------------------------------------- rules

    def _resolve(self, name: str) -> str:
        """Follow aliases on disk, as loading does."""
        target = self.links().get(f"{self.root}/etc/systemd/system/{name}", "/dev/null")
        return name if target == "/dev/null" else os.path.basename(target)

    def _on_disk(self, name: str) -> str:
        for folder in FOLDERS:
            path = f"{self.root}/{folder}/{name}"
            if os.path.islink(path) and os.readlink(path) == "/dev/null":
                return "masked"
            if os.path.exists(path):
                return "loaded"
        return "not-found"

    def reload(self) -> None:
        for name, unit in self.units.items():  # generators run again, and make nothing for a masked unit
            if unit.kind == "generated":
                path = self.root / "run/systemd/generator" / name
                if (self.root / "etc/systemd/system" / name).is_symlink():
                    path.unlink(missing_ok=True)
                else:
                    path.write_text(f"[Unit]\nDescription={name}\n")
        self.loaded = {name: self._on_disk(name) for name in self.units}

    def boot(self) -> None:
        """Reboot: /run is empty, what the default target pulls in starts."""
        self.active = {"basic.target"}
        self.reload()
        self._start_tree(Path(os.readlink(self.root / "etc/systemd/system/default.target")).name)
        self.write_meminfo()

    def _start_tree(self, name: str) -> None:
        name = self._resolve(name)
        if name in self.active or self._on_disk(name) != "loaded":
            return
        if name in self.units and not self.units[name].fails:
            self.active.add(name)
        for wanted in sorted(self._pulls(name), key=lambda wanted: not wanted.endswith(".socket")):
            self._start_tree(wanted)

    def _pulls(self, name: str) -> list[str]:
        folder = f"{self.root}/etc/systemd/system/{name}.wants"
        linked = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [*(self.units[name].wants if name in self.units else ()), *linked]

    def file_state(self, name: str) -> str:
        on_disk = self._on_disk(name)
        unit = self.units.get(name)
        if on_disk != "loaded" or unit is None:
            return "masked" if on_disk == "masked" else ""
        if unit.kind in ("generated", "transient"):
            return unit.kind
        places = [(os.path.split(path), os.path.basename(target)) for path, target in self.links().items()]
        enabled = any(
            (base == name and folder.endswith((".wants", ".requires"))) or (target == name and base in unit.alias)
            for (folder, base), target in places
        )
        if enabled:
            return "enabled"
        return "linked" if unit.kind == "linked" else "disabled" if unit.wanted_by or unit.alias else "static"

    def show(self, asked: str) -> str:
        name = self._resolve(asked) if self._on_disk(asked) != "masked" else asked
        load = self.loaded.get(name, self._on_disk(name))
        unit = self.units.get(name, Fake(name))
        aliases = [a for a in unit.alias if self._resolve(a) == name] if load == "loaded" else []
        if asked == "default.target" or name == self._resolve("default.target"):
            aliases.append("default.target")
        folder = {
            "local": "/etc/systemd/system",
            "linked": "/etc/systemd/system",
            "generated": "/run/systemd/generator",
        }
        fragment = f"{self.root}{folder.get(unit.kind, '/usr/lib/systemd/system')}/{name}" if load == "loaded" else ""
        triggered_by = sorted(other.name for other in self.units.values() if name in other.starts)
        values = {
            "Id": name,
            "Names": " ".join([name, *aliases]),
            "LoadState": load,
            "ActiveState": "active" if name in self.active else "inactive",
            "SubState": "running" if name in self.active else "dead",
            "UnitFileState": self.file_state(name),
            "FragmentPath": fragment,
            "IgnoreOnIsolate": "no",
            "MemoryCurrent": str(self.memory_of[name] * 1024) if name in self.memory_of else "[not set]",
            "Result": "success",
            "MainPID": "0",
            "Type": "simple",
            "TriggeredBy": " ".join(triggered_by),
            "Triggers": " ".join(unit.starts),
            "ConsistsOf": " ".join(unit.stops),
            "Wants": " ".join(self._pulls(name)),
        }
        return "".join(f"{key}={value}\n" for key, value in values.items())

    # ------------------------------------------------------------------------------------------------ runner

    def run(self, argv: Sequence[str], **_options: object) -> Ran:
        words = list(argv)
        self.calls.append(words)
        self.before_call(words)
        if words[:2] == ["loginctl", "list-sessions"]:
            return Ran(0, "".join(f"{s['Id']} seat0\n" for s in self.sessions), "")
        if words[:2] == ["loginctl", "show-session"]:
            blocks = ["".join(f"{key}={value}\n" for key, value in s.items()) for s in self.sessions]
            return Ran(0, "\n".join(blocks), "")
        if words[0] == "systemd-analyze":
            return (
                Ran(0, "", "")
                if words[-1][:3] in ("Sun", "Mon")
                else Ran(1, "", "Failed to parse calendar specification")
            )
        if words[0] == "ip":
            return Ran(0, "default via 10.0.0.1 dev lo\n", "")
        if words[0] != "systemctl":
            return Ran(127, "", "not here")
        verb, names = words[1], [word for word in words[2:] if not word.startswith("--")]
        if verb == "show":
            if names and names[0].startswith("*"):
                names = [name for name in self.units if name in self.active or self.loaded.get(name) == "loaded"]
            self.known_links = self.links()
            text = "\n".join(self.show(name) for name in names)
            self.known_links = None
            return Ran(0, text, "")
        if verb == "daemon-reload":
            self.reload()
        elif verb == "stop":
            for name in names:
                self._stop(name)
        elif verb in ("start", "restart"):
            said = [f"Unit {name} is masked." for name in names if self.loaded.get(name) == "masked"]
            self._start(names, ignore_dependencies="--job-mode=ignore-dependencies" in words)
            self.write_meminfo()
            return Ran(1 if said else 0, "", "\n".join(said))
        self.write_meminfo()
        return Ran(0, "", "")

    def _stop(self, name: str) -> None:
        unit = self.units.get(name)
        if unit is None or unit.refuses or name not in self.active:
            return
        if unit.returns and self.loaded.get(name) != "masked":
            return
        self.active.discard(name)
        for other in unit.stops:
            self._stop(other)

    def _start(self, names: Sequence[str], *, ignore_dependencies: bool) -> None:
        for name in names:
            if name.startswith("ds4-desktop-deadman"):
                self.units.setdefault(name, Fake(name, kind="local"))
                self.loaded[name] = "loaded"
            if self.loaded.get(name) != "loaded" or self.units[name].fails:
                continue
            if name.endswith(".socket") and set(self.units[name].starts) & self.active:
                continue  # systemd refuses to listen where the service runs already
            if ignore_dependencies:
                self.active.add(name)
            else:
                self._start_tree(name)
