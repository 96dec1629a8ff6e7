"""A zoo of units for serving mode's tests: every kind that systemd knows, and how to look at all of it.

``python3 -m tests.lab.serving_mode_zoo INSTANCE`` puts it on the first host of a running lab instance and writes there what
everything looks like: the beginning, to which giving the desktop back has to lead.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from lab.api import Host, Lab

ROOT = Path(__file__).resolve().parent.parent.parent
BEGINNING = "/root/serving-mode-beginning.json"

# What a module run does on the host, without Ansible around it: the same verbs over the same policy.
VERB = """
import json, sys
from ds4.errors import Ds4Error
from ds4.serving_mode import ServingMode
from ds4.serving_mode_host import Request, parse_entries, parse_rules
given = json.load(sys.stdin)
verb = given.pop("verb")
given["groups"] = {name: parse_entries(rows, name) for name, rows in given["groups"].items()}
given["extra"] = parse_entries(given["extra"], "extra")
given["never"], given["keep"] = parse_rules(given["never"]), parse_rules(given["keep"])
try:
    print(json.dumps(getattr(ServingMode(Request(**given)), verb)()))
except Ds4Error as error:
    print(json.dumps(error.result()))
"""

# Everything that has to be as it was: links byte for byte, the default target, states, what runs.
LOOK = """
import json, os, subprocess, sys
names = sys.argv[1:]
links = {}
for top in ("/etc/systemd/system", "/etc/systemd/user"):
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                links[path] = os.readlink(path)
show = ["systemctl", "show", "--property=Id,ActiveState,UnitFileState"]
text = subprocess.run([*show, *names], stdout=subprocess.PIPE, text=True, check=True).stdout
units = [dict(line.split("=", 1) for line in block.splitlines()) for block in text.strip().split("\\n\\n")]
files = {u["Id"]: u["UnitFileState"] for u in units}
active = sorted(u["Id"] for u in units if u["ActiveState"] == "active")
print(json.dumps({"links": links, "files": files, "active": active}))
"""

SLEEPER = "[Unit]\nDescription=%s\n[Service]\nExecStart=/bin/sleep infinity\n"
ZOO = {
    "/usr/lib/systemd/system/zoo-enabled.service": SLEEPER % "enabled" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/system/zoo-disabled.service": SLEEPER % "disabled" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/system/zoo-stopped.service": SLEEPER % "stopped" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/system/zoo-masked.service": SLEEPER % "masked" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/system/zoo-static.service": SLEEPER % "static",
    "/usr/lib/systemd/system/zoo-sock.socket": "[Socket]\nListenStream=/run/zoo.sock\n[Install]\nWantedBy=sockets.target\n",
    "/usr/lib/systemd/system/zoo-sock.service": SLEEPER % "by socket",
    "/usr/lib/systemd/system/zoo-time.timer": "[Timer]\nOnCalendar=yearly\n[Install]\nWantedBy=timers.target\n",
    "/usr/lib/systemd/system/zoo-time.service": "[Service]\nType=oneshot\nExecStart=/bin/true\n",
    "/usr/lib/systemd/system/zoo-alias.service": SLEEPER % "alias"
    + "[Install]\nWantedBy=multi-user.target\nAlias=zoo-nick.service\n",
    "/usr/lib/systemd/system/zoo-part.service": SLEEPER % "part" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/system/zoo-along.service": "[Unit]\nPartOf=zoo-part.service\n[Service]\nExecStart=/bin/sleep infinity\n"
    "[Install]\nWantedBy=multi-user.target\n",
    "/etc/systemd/system/zoo-hand.service": SLEEPER % "hand-made" + "[Install]\nWantedBy=multi-user.target\n",
    "/opt/zoo/zoo-linked.service": SLEEPER % "linked" + "[Install]\nWantedBy=multi-user.target\n",
    "/usr/lib/systemd/user/zoo-user.service": SLEEPER % "user" + "[Install]\nWantedBy=default.target\n",
    "/usr/lib/systemd/user/zoo-screen.service": "[Unit]\nPartOf=graphical-session.target\n[Service]\nExecStart=/bin/sleep infinity\n"
    "[Install]\nWantedBy=graphical-session.target\n",
}
GENERATOR = """#!/bin/sh
printf '[Unit]\\nDescription=generated\\nSourcePath=/etc/zoo.conf\\n[Service]\\nExecStart=/bin/sleep infinity\\n' >"$1/zoo-made.service"
mkdir -p "$1/multi-user.target.wants"
ln -s ../zoo-made.service "$1/multi-user.target.wants/zoo-made.service"
"""
LISTED = ["enabled", "disabled", "stopped", "masked", "static", "nick", "part", "hand", "linked", "made", "missing"]
EXTRA = [
    *({"unit": f"zoo-{name}.service", "reason": "zoo"} for name in LISTED),
    {"unit": "zoo-sock.service", "reason": "its socket goes along"},
    {"unit": "zoo-time.timer", "reason": "zoo"},
    {"unit": "zoo-user.service", "reason": "zoo", "scope": "user"},
]
ANIMALS = [f"zoo-{name}.service" for name in (*LISTED, "alias", "along", "sock", "time")] + [
    "zoo-sock.socket",
    "zoo-time.timer",
]
DESKTOP = [
    "gdm.service",
    "colord.service",
    "upower.service",
    "cups.service",
    "cups.socket",
    "cups.path",
    "bluetooth.service",
]
DESKTOP += [
    "dgx-dashboard.service",
    "fwupd.service",
    "snapd.service",
    "snapd.socket",
    "man-db.timer",
    "sleep.target",
    "docker.socket",
]
DESKTOP += ["docker.service", "containerd.service", "avahi-daemon.service", "ModemManager.service", "graphical.target"]


def policy() -> dict[str, Any]:
    """The role's own lists, as a module gets them."""
    variables = yaml.safe_load((ROOT / "roles/serving_mode/vars/main.yml").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((ROOT / "roles/serving_mode/defaults/main.yml").read_text(encoding="utf-8"))
    return {
        "groups": variables["__serving_mode_groups"],
        "never": variables["__serving_mode_never"],
        "keep": defaults["serving_mode_keep"],
        "remote_desktops": variables["__serving_mode_remote_desktops"],
        "window_timers": variables["__serving_mode_update_timers"],
    }


POLICY = policy()


def settle_in(host: Host) -> None:
    """Put the zoo on a host, in the states that its names tell."""
    for path, text in ZOO.items():
        host.put(path, text)
    host.put("/etc/zoo.conf", "")
    host.put("/etc/systemd/system-generators/zoo", GENERATOR, 0o755)
    host.run(
        "systemctl link /opt/zoo/zoo-linked.service && systemctl daemon-reload && loginctl enable-linger spark"
        " && systemctl enable --now zoo-enabled zoo-stopped zoo-alias zoo-part zoo-along zoo-hand zoo-linked zoo-sock.socket zoo-time.timer"
        " && systemctl start zoo-made zoo-static && systemctl stop zoo-stopped && systemctl mask zoo-masked"
        " && systemctl --global enable zoo-user zoo-screen",
    )
    for _ in range(50):
        if host.run("systemctl --user -M spark@.host start zoo-user", check=False).rc == 0:
            return
        time.sleep(0.2)
    raise AssertionError("the user manager of spark does not start zoo-user")


def verb(host: Host, name: str, *, kill_after: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Run a verb on the host; with ``kill_after`` it is killed that many seconds after its start."""
    given = {
        "verb": name,
        **POLICY,
        "selected": ["display", "sleep"],
        "extra": [],
        "dead_man_seconds": 0,
        "settle_seconds": 0,
    }
    killer = f"timeout -s KILL {kill_after:.3f} " if kill_after else ""
    ran = host.run(
        f"PYTHONPATH=/opt/ds4/lib/current exec {killer}python3 -c '{VERB}'",
        stdin=json.dumps({**given, **changes}),
        check=not kill_after,
        timeout=180,
    )
    return json.loads(ran.out) if ran.out.strip() else {}


def look(host: Host) -> dict[str, Any]:
    """See LOOK; our own timer is not the desktop's."""
    names = [name for name in ANIMALS if name not in ("zoo-nick.service", "zoo-missing.service")] + DESKTOP
    found: dict[str, Any] = json.loads(host.run(["python3", "-c", LOOK, *names]).out)
    user = host.run("systemctl --user -M spark@.host is-active zoo-user.service || true", check=False).out.strip()
    return {**found, "user": user}


if __name__ == "__main__":
    spark = Lab(sys.argv[1]).hosts[0]
    settle_in(spark)
    spark.put(BEGINNING, json.dumps(look(spark)))
