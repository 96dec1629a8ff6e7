"""What a stock DGX OS runs besides: simulated units of the real names that hold memory while they run.

The amounts are guesses that add up to what switching to serving mode is said to free (10 to 15 GB); only their names,
kinds and dependencies are meant to be faithful.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Unit(NamedTuple):
    """A simulated unit: its name, the memory it holds (MiB) and the target that wants it (empty: started by others)."""

    name: str
    mib: int
    wanted_by: str
    alias: str = ""


SERVICES = [
    Unit("gdm.service", 6144, "graphical.target", "display-manager.service"),
    Unit("dgx-dashboard.service", 512, "graphical.target"),
    Unit("dgx-dashboard-admin.service", 768, "multi-user.target"),
    Unit("docker.service", 640, "multi-user.target"),
    Unit("containerd.service", 256, "multi-user.target"),
    Unit("snapd.service", 512, "multi-user.target"),
    Unit("nvidia-dcgm.service", 640, "multi-user.target"),
    Unit("nvidia-persistenced.service", 32, "multi-user.target"),
    Unit("fwupd.service", 384, "graphical.target"),
    Unit("cups.service", 128, "multi-user.target"),
    Unit("cups-browsed.service", 96, "multi-user.target"),
    Unit("bluetooth.service", 64, "graphical.target"),
    Unit("avahi-daemon.service", 48, "multi-user.target"),
    Unit("ModemManager.service", 96, "multi-user.target"),
    Unit("colord.service", 96, "graphical.target"),
    Unit("upower.service", 64, "graphical.target"),
    Unit("smartmontools.service", 32, "multi-user.target"),
    Unit("rsyslog.service", 64, "multi-user.target"),
    Unit("cron.service", 16, "multi-user.target"),
    Unit("unattended-upgrades.service", 96, "multi-user.target"),
]
# socket or path unit → what it listens on or watches
ACTIVATORS = {
    "cups.socket": "ListenStream=/run/cups/cups.sock",
    "cups.path": "PathExists=/var/spool/cups/lab-job",
    "avahi-daemon.socket": "ListenStream=/run/avahi-daemon/socket",
    "docker.socket": "ListenStream=/run/docker.sock",
    "snapd.socket": "ListenStream=/run/snapd.socket",
}
TIMERS = ["fwupd-refresh", "motd-news", "update-notifier-download", "anacron", "man-db"]


def total_kib() -> int:
    """Memory that all simulated units hold together (kB)."""
    return sum(unit.mib for unit in SERVICES) * 1024


def install(root: str) -> None:
    """Write the units below ``root`` as a package would, and enable them; the graphical target becomes the default."""
    units = os.path.join(root, "usr/lib/systemd/system")
    enabled = os.path.join(root, "etc/systemd/system")
    os.makedirs(units, exist_ok=True)
    for unit in SERVICES:
        install_lines = f"WantedBy={unit.wanted_by}\n" + (f"Alias={unit.alias}\n" if unit.alias else "")
        _write(
            os.path.join(units, unit.name),
            f"[Unit]\nDescription=Simulated {unit.name.removesuffix('.service')}\n\n[Service]\n"
            f"ExecStart=/bin/sh -c 'echo {unit.mib * 1024} $$$$ >/run/lab-tenants/%N; exec sleep infinity'\n"
            f"ExecStopPost=/bin/rm -f /run/lab-tenants/%N\n\n[Install]\n{install_lines}",
        )
        _enable(enabled, unit.wanted_by, unit.name)
        if unit.alias:
            os.symlink(f"/lib/systemd/system/{unit.name}", os.path.join(enabled, unit.alias))
    os.symlink("gdm.service", os.path.join(units, "gdm3.service"))
    for name, condition in ACTIVATORS.items():
        kind = name.rpartition(".")[2].capitalize()
        target = "sockets.target" if kind == "Socket" else "paths.target"
        _write(
            os.path.join(units, name),
            f"[Unit]\nDescription=Simulated {name}\n\n[{kind}]\n{condition}\n\n[Install]\nWantedBy={target}\n",
        )
        _enable(enabled, target, name)
    _write(
        os.path.join(units, "snapd.seeded.service"),
        "[Unit]\nDescription=Simulated snapd.seeded\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n\n"
        "[Install]\nWantedBy=multi-user.target\n",
    )
    _enable(enabled, "multi-user.target", "snapd.seeded.service")
    for name in TIMERS:
        _write(
            os.path.join(units, f"{name}.service"),
            f"[Unit]\nDescription=Simulated {name}\n\n[Service]\nType=oneshot\nExecStart=/bin/true\n",
        )
        _write(
            os.path.join(units, f"{name}.timer"),
            f"[Unit]\nDescription=Simulated {name}\n\n[Timer]\nOnCalendar=daily\n\n[Install]\nWantedBy=timers.target\n",
        )
        _enable(enabled, "timers.target", f"{name}.timer")
    os.symlink("/lib/systemd/system/graphical.target", os.path.join(enabled, "default.target"))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)


def _enable(enabled: str, target: str, unit: str) -> None:
    wants = os.path.join(enabled, f"{target}.wants")
    os.makedirs(wants, exist_ok=True)
    os.symlink(f"/lib/systemd/system/{unit}", os.path.join(wants, unit))
