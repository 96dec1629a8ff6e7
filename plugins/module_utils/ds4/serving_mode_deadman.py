# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Dead man's switch: a timer on the host that gives the desktop back unless a new connection cancels it.

The timer is a unit file on disk and enabled, so that it also fires after a reboot in between.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .errors import Ds4Error
from .files import MARKER_LINE, fsync_directory, link_atomic, read_json, write_atomic, write_json
from .serving_mode_apply import refuse_foreign
from .serving_mode_snapshot import Store, boot_id
from .serving_mode_units import Systemd

TIMER = "ds4-desktop-deadman.timer"
SERVICE = "ds4-desktop-deadman.service"

_TIMER_TEXT = """\
# {marker}: cancelled by a new connection of the controller, or by: ds4-desktop confirm
[Unit]
Description=Give the desktop back unless a new connection confirms that this host can be reached

[Timer]
OnActiveSec={seconds}
AccuracySec=1
Unit={service}

[Install]
WantedBy=timers.target
"""
_SERVICE_TEXT = """\
# {marker}: started by {timer}
[Unit]
Description=Give the desktop back (dead man's switch of serving mode)
StartLimitIntervalSec=900
StartLimitBurst=5

[Service]
Type=oneshot
Environment=PYTHONPATH={lib}
ExecStart={python} -m ds4.serving_mode restore --dead-man --state-dir {state}
Restart=on-failure
RestartSec=30
"""


class DeadMan:
    """The timer, its service and the record of the connection that armed it."""

    def __init__(self, systemd: Systemd, store: Store) -> None:
        self.systemd = systemd
        self.store = store
        self.record_path = os.path.join(store.directory, "dead-man.json")
        self.folder = systemd.etc()
        self.link = f"{self.folder}/timers.target.wants/{TIMER}"

    def arm(self, seconds: int, lib_dir: str, identity: str) -> None:
        """Write, enable and start the timer, and read it back. Called again, it counts from now.

        Raises:
            Ds4Error: the mechanism is not installed, units of that name are not ours, or the timer does not run.
        """
        lib = os.path.join(lib_dir, "current")
        if not os.path.isfile(os.path.join(lib, "ds4", "serving_mode.py")):
            raise Ds4Error(
                "The dead man's switch cannot be armed, so nothing is changed",
                found=f"no {lib}/ds4/serving_mode.py",
                required="the mechanism installed on the host",
                cure="run the stage part first (`ansible-playbook site.yml`)",
            )
        paths = {name: os.path.join(self.folder, name) for name in (TIMER, SERVICE)}
        for path in paths.values():
            refuse_foreign(path)
        values = {
            "marker": MARKER_LINE,
            "seconds": seconds,
            "service": SERVICE,
            "timer": TIMER,
            "lib": lib,
            "python": sys.executable or "/usr/bin/python3",
            "state": os.path.dirname(self.store.directory),
        }
        record = {"identity": identity, "seconds": seconds, "armed_epoch": round(time.time()), "boot_id": boot_id()}
        write_json(self.record_path, record)
        write_atomic(paths[SERVICE], _SERVICE_TEXT.format(**values))
        write_atomic(paths[TIMER], _TIMER_TEXT.format(**values))
        os.makedirs(os.path.dirname(self.link), exist_ok=True)
        link_atomic(paths[TIMER], self.link)
        self.systemd.reload()
        self.systemd.ctl("restart", TIMER)
        unit = self.systemd.show([TIMER])[0]
        if unit.active != "active":
            raise Ds4Error(
                "The dead man's switch is not armed, so nothing is changed",
                found=f"{TIMER}: {unit.active}, {unit.sub}",
                required="active",
                cure=f"run `systemctl status {TIMER}` on the host",
            )

    def armed(self) -> dict[str, Any] | None:
        """The record while the timer's file is there, with ``seconds_left`` (None after a reboot); else None."""
        if not os.path.lexists(os.path.join(self.folder, TIMER)):
            return None
        record = read_json(self.record_path)
        record = record if isinstance(record, dict) else {}
        left = None
        if record.get("boot_id") == boot_id():
            left = max(0, round(record["armed_epoch"] + record["seconds"] - time.time()))
        return {"identity": record.get("identity", ""), "seconds": record.get("seconds", 0), "seconds_left": left}

    def disarm(self) -> bool:
        """Stop the timer and remove what belongs to it; True when there was something. Its service, if it is what
        calls us, goes on."""
        found = False
        if os.path.lexists(os.path.join(self.folder, TIMER)):
            self.systemd.ctl("stop", TIMER)
        for path in (self.link, os.path.join(self.folder, TIMER), os.path.join(self.folder, SERVICE), self.record_path):
            if os.path.lexists(path):
                os.unlink(path)
                fsync_directory(os.path.dirname(path))
                found = True
        if found:
            self.systemd.reload()
        return found

    def confirm(self, kind: str, identity: str) -> bool:
        """Cancel the timer, if this is another connection than the one that armed it; True when it was armed.

        Raises:
            Ds4Error: it is the same connection, which proves nothing.
        """
        record = self.armed()
        if record is None:
            return False
        if kind == "ssh" and identity == record["identity"]:
            raise Ds4Error(
                "The dead man's switch was not cancelled: this is the connection that armed it",
                found=f"SSH connection {identity}",
                required="a new connection from the controller",
                cure=f"run the playbook again; otherwise the desktop comes back (armed {record['seconds']} s)",
            )
        self.store.journal("confirmed", connection=identity or kind)
        return self.disarm()
