# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Change units: stop, start, links. Every operation is in the journal before it happens and is read back after it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import Ds4Error
from .files import MARKER_LINE, fsync_directory, link_atomic, read_text, write_atomic
from .process import Process
from .serving_mode_snapshot import Store
from .serving_mode_units import SYSTEM, USER, Systemd, Unit, describe, join, split

_POLL_SECONDS = 0.2


class Hands:
    """Everything that changes a host.

    Args:
        wait_seconds: how long units together may take to stop or to start.
    """

    def __init__(
        self,
        systemd: Systemd,
        store: Store,
        *,
        wait_seconds: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.systemd = systemd
        self.store = store
        self.wait_seconds = wait_seconds
        self.sleep = sleep
        self.clock = clock

    # ---------------------------------------------------------------------------------------- stop and start

    def stop(self, keys_by_manager: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Stop units, all of a manager in one go. Returns key → why, for those that are still running."""
        return self._move("stop", keys_by_manager, lambda unit: not unit.running)

    def start(self, keys_by_manager: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Start units. Returns key → why, for those that do not run.

        One that ends by itself, or whose condition is not met, has done what it does. A socket cannot be started under a
        service that runs (systemd refuses): sockets come first, and such a service is started again after them.
        """
        failed: dict[str, str] = {}
        for manager, keys in keys_by_manager.items():
            first = [key for key in keys if not key.endswith((".service", ".target"))]
            busy = self._under_sockets([key for key in first if key.endswith(".socket")], manager)
            self.stop({manager: busy})
            last = [key for key in dict.fromkeys((*keys, *busy)) if key not in first]
            for group in (first, last):
                failed.update(self._move("start", {manager: group}, _has_started))
        return failed

    def _under_sockets(self, sockets: Sequence[str], manager: str) -> list[str]:
        """Keys of running services that these sockets listen for."""
        units = self.systemd.show([split(key)[1] for key in sockets], manager)
        names = list(dict.fromkeys(name for unit in units for name in unit.triggers))
        scope = SYSTEM if manager == SYSTEM else USER
        return [join(scope, unit.id) for unit in self.systemd.show(names, manager) if unit.running]

    def _move(
        self, verb: str, keys_by_manager: Mapping[str, Sequence[str]], done: Callable[[Unit], bool]
    ) -> dict[str, str]:
        waiting = {manager: list(keys) for manager, keys in keys_by_manager.items() if keys}
        keys = sorted({key for group in waiting.values() for key in group})
        if not keys:
            return {}
        self.store.journal(verb, units=keys)
        said: dict[str, str] = {}
        for manager, group in waiting.items():
            names = [split(key)[1] for key in group]
            # Queued and watched, so that one unit which never ends cannot hang the others or us.
            answer = self.systemd.ctl(verb, "--no-block", "--", *names, manager=manager)
            if answer.rc != 0:
                said[manager] = answer.err.strip().replace("\n", "; ")
        deadline = self.clock() + self.wait_seconds
        while True:
            open_units = self._open(waiting, done)
            # Without a job nothing will move any more: refused, failed, or started again by somebody.
            settled = all(
                not unit.job and unit.active in ("active", "failed", "inactive") for _manager, _key, unit in open_units
            )
            if not open_units or settled or self.clock() > deadline:
                break
            self.sleep(_POLL_SECONDS)
        return {key: why_not(verb, unit, said.get(manager, "")) for manager, key, unit in open_units}

    def _open(self, waiting: Mapping[str, Sequence[str]], done: Callable[[Unit], bool]) -> list[tuple[str, str, Unit]]:
        found = []
        for manager, keys in waiting.items():
            units = self.systemd.show([split(key)[1] for key in keys], manager)
            found += [(manager, key, unit) for key, unit in zip(keys, units) if not done(unit)]
        return found

    # ----------------------------------------------------------------------------------------------- links

    def set_links(self, key: str, links: Mapping[str, str | None]) -> None:
        """Make links (path → target) or remove them (path → None), each durably, and read each back.

        Raises:
            Ds4Error: something that is no link is in the way, or a link is not what was written.
        """
        for path, target in links.items():
            was = os.readlink(path) if os.path.islink(path) else None
            if was == target:
                continue
            if was is None and os.path.lexists(path):
                raise Ds4Error(
                    f"A link of {key} cannot be set",
                    found=f"{path} is a file or folder",
                    required="a link or nothing",
                    cure=f"move {path} away and run again",
                )
            self.store.journal("link", units=[key], path=path, was=was, now=target)
            if target is None:
                os.unlink(path)
                fsync_directory(os.path.dirname(path))
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                link_atomic(target, path)
            now = os.readlink(path) if os.path.islink(path) else None
            if now != target:
                raise Ds4Error(
                    f"A link of {key} is not what was written",
                    found=f"{path} → {now}",
                    required=str(target),
                    cure="look for a program that manages units on this host, then run again",
                )

    # ----------------------------------------------------------------------------------------------- files

    def write_file(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file of ours; it carries our marker.

        Raises:
            Ds4Error: a file of somebody else is there.
        """
        refuse_foreign(path)
        self.store.journal("file", path=path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomic(path, text, mode=mode)

    def remove_file(self, path: str) -> str:
        """Remove a file of ours, and its folder if that is a drop-in folder and empty. Returns a note if it is not ours."""
        if not os.path.lexists(path):
            return ""
        if MARKER_LINE not in read_text(path):
            return f"{path} is no longer ours (its marker is gone); it is left alone."
        self.store.journal("file", path=path, removed=True)
        os.unlink(path)
        folder = os.path.dirname(path)
        fsync_directory(folder)
        if folder.endswith(".d") and os.path.basename(folder) != "sysctl.d" and not os.listdir(folder):
            os.rmdir(folder)
        return ""


def _has_started(unit: Unit) -> bool:
    if unit.active == "active":
        return True
    return unit.active == "inactive" and unit.load == "loaded" and not unit.job and unit.result == "success"


def refuse_foreign(path: str) -> None:
    """Raise when a file of that name is there that is not ours."""
    if os.path.lexists(path) and MARKER_LINE not in read_text(path):
        raise Ds4Error(
            "A file that serving mode needs to write is there and is not ours",
            found=f"{path} without the line '{MARKER_LINE}'",
            cure=f"look at it, then move it away: mv {path} {path}.saved",
        )


def why_not(verb: str, unit: Unit, said: str = "") -> str:
    """One sentence about a unit that did not do what it was told."""
    text = f"{describe(unit)}, {unit.sub}"
    if unit.result not in ("", "success"):
        text += f", result {unit.result}"
    if verb == "stop" and unit.main_pid:
        text += f", process {unit.main_pid} ({Process(unit.main_pid).program}) goes on"
    if said:
        text += f": {said}"
    return text


def by_manager(rows: Iterable[tuple[str, Iterable[str]]]) -> dict[str, list[str]]:
    """(key, managers) pairs → manager → keys; the system's manager first."""
    found: dict[str, list[str]] = {}
    for key, managers in rows:
        for manager in managers:
            found.setdefault(manager, []).append(key)
    return {manager: found[manager] for manager in sorted(found, key=lambda name: (name != SYSTEM, name))}


def still_running(keys: Iterable[str], systemd: Systemd, managers: Iterable[str]) -> dict[str, Unit]:
    """Key → unit of those that run in any of the managers."""
    wanted = list(keys)
    found: dict[str, Unit] = {}
    for manager in managers:
        scope = SYSTEM if manager == SYSTEM else USER
        names = [split(key)[1] for key in wanted if split(key)[0] == scope]
        found.update({join(scope, name): u for name, u in zip(names, systemd.show(names, manager)) if u.running})
    return found


def failure(title: str, reasons: Mapping[str, str], cure: str, **evidence: Any) -> Ds4Error:
    """One error that names every unit and its reason."""
    return Ds4Error(
        title,
        found="; ".join(f"{key}: {why}" for key, why in sorted(reasons.items())),
        cure=cure,
        evidence={"units": dict(reasons), **evidence},
    )
