"""One bridge and one subnet per instance, and the cables of its hosts.

Nothing else of this machine's network is changed: no forwarding, no firewall rule, no route beyond the bridge's own
subnet. Hosts have no default route, so they reach the bridge address and each other, and nothing else.
"""

from __future__ import annotations

import json
import os

from . import system

PREFIX = "10.213"


def pick_subnet(taken: set[int]) -> int:
    """Lowest third byte of 10.213.X.0/24 that neither ``taken`` names nor a route of this machine uses."""
    routes = json.loads(system.run(["ip", "-j", "-4", "route", "show", "table", "all"]).out or "[]")
    used = {str(route.get("dst", "")).split("/")[0].rsplit(".", 1)[0] for route in routes}
    for number in range(1, 255):
        if number not in taken and f"{PREFIX}.{number}" not in used:
            return number
    raise system.LabError(f"All subnets of {PREFIX}.0.0/16 are in use. Cure: python3 -m lab down --all")


def bridge_name(subnet: int) -> str:
    """Name of the bridge of subnet 10.213.``subnet``.0/24."""
    return f"ds4lab{subnet}"


def gateway(subnet: int) -> str:
    """Address of this machine in the subnet; the stand-in hub and engine repository listen there."""
    return f"{PREFIX}.{subnet}.1"


def address(subnet: int, number: int) -> str:
    """Address of host ``number`` (1 to 99) of the subnet."""
    return f"{PREFIX}.{subnet}.{10 + number}"


def create_bridge(subnet: int) -> str:
    """Make the bridge with its address; an old one of the same name is replaced."""
    name = bridge_name(subnet)
    delete_bridge(subnet)
    system.run(["ip", "link", "add", name, "type", "bridge", "forward_delay", "0", "stp_state", "0"])
    system.run(["ip", "address", "add", f"{gateway(subnet)}/24", "dev", name])
    system.run(["ip", "link", "set", name, "up"])
    return name


def delete_bridge(subnet: int) -> None:
    """Remove the bridge of the subnet if it exists."""
    name = bridge_name(subnet)
    if os.path.isdir(f"/sys/class/net/{name}"):
        system.run(["ip", "link", "delete", name])


def cable(machine: str) -> str:
    """This machine's end of the virtual cable of a container, as systemd-nspawn names it."""
    name = f"vb-{machine}"
    if len(name) > 15:
        raise system.LabError(f"{machine} is too long a machine name: systemd-nspawn would shorten {name}.")
    return name


def link(machine: str, up: bool) -> None:
    """Plug the cable in or out."""
    system.run(["ip", "link", "set", cable(machine), "up" if up else "down"])


def rate(machine: str, limit: str | None) -> None:
    """Limit what the host can receive to ``limit`` in tc's words (``100mbit``); None lifts the limit."""
    system.run(["tc", "qdisc", "del", "dev", cable(machine), "root"], check=False)
    if limit is not None:
        system.run(
            [
                "tc",
                "qdisc",
                "add",
                "dev",
                cable(machine),
                "root",
                "tbf",
                "rate",
                limit,
                "burst",
                "128kb",
                "latency",
                "50ms",
            ]
        )
