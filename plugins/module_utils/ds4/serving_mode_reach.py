# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How people and the playbook reach this host: what carries the connection, and whose desktop would be cut off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .command import run
from .files import read_text
from .machine import sessions as login_sessions
from .process import Process, is_number
from .serving_mode_plan import Rule
from .serving_mode_units import Runner, Systemd, Unit

_NET = "/sys/class/net"
_SESSION_UNIT = re.compile(r"^session-(.+)\.scope$")
_USER_MANAGER = re.compile(r"^user@(\d+)\.service$")
_TUN_DEVICE = "/dev/net/tun"


@dataclass
class Connection:
    """The connection that this process was started through.

    Attributes:
        kind: ``ssh`` or ``local``.
        identity: addresses and ports of both ends; a new connection has another one. Empty when local.
        peer: address of the controller, empty when local.
        units: units of this process and of those that started it.
        interfaces: network interfaces that carry it, from the routed one down to the hardware.
        managers: units that look after these interfaces.
        wireless: some interface with a connection is Wi-Fi.
    """

    kind: str = "local"
    identity: str = ""
    peer: str = ""
    units: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    managers: list[str] = field(default_factory=list)
    wireless: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _chain(proc: str) -> list[Process]:
    """This process and those that started it, nearest first."""
    found: list[Process] = []
    pid = os.getpid()
    while pid > 1 and len(found) < 64:
        process = Process(pid, proc=proc)
        found.append(process)
        pid = process.parent
    return found


def connection(*, proc: str = "/proc", net: str = _NET, root: str = "", runner: Runner = run) -> Connection:
    """Find the connection. sudo hides SSH_CONNECTION from us, so it is looked for in the processes above."""
    chain = _chain(proc)
    found = Connection(units=list(dict.fromkeys(unit for process in chain if (unit := process.unit))))
    for process in chain:
        identity = process.environment("SSH_CONNECTION").get("SSH_CONNECTION", "")
        if len(identity.split()) == 4:
            found.kind, found.identity, found.peer = "ssh", identity, identity.split()[0]
            break
    devices = _routed(found.peer, runner) if found.peer else []
    found.interfaces = _lower(devices or _default_routes(runner), net)
    for name in found.interfaces:
        found.managers += _managers(name, net, root, proc)
    found.managers = list(dict.fromkeys(found.managers))
    found.wireless = any(_is_wireless(name, net) and _is_up(name, net) for name in _names(net))
    return found


def guards(link: Connection, reached_as: str) -> list[Rule]:
    """What the way to this host stands on, as rules.

    Args:
        reached_as: name or address by which the inventory reaches the host.
    """
    rules = []
    way = f"the management connection from {link.peer}" if link.kind == "ssh" else "the network"
    if link.managers:
        rules.append(Rule(tuple(link.managers), f"carries {way} ({' over '.join(link.interfaces)})"))
    own = tuple(u for u in link.units if u.endswith(".service") and not _USER_MANAGER.match(u))
    if own:
        rules.append(Rule(own, "the playbook itself runs below it"))
    if link.wireless:
        rules.append(Rule(("wpa_supplicant.service", "wpa_supplicant@*.service"), "Wi-Fi carries a connection"))
    if reached_as.rstrip(".").endswith(".local"):
        rules.append(
            Rule(
                ("avahi-daemon.service", "avahi-daemon.socket"),
                f"the inventory reaches this host as {reached_as}",
                "give the host an address in ansible_host",
            )
        )
    return rules


# ---------------------------------------------------------------------------------------------------- interfaces


def _routed(peer: str, runner: Runner) -> list[str]:
    """Interface of the route to a peer; a link-local address names it itself."""
    address, _percent, zone = peer.partition("%")
    if zone:
        return [zone]
    answer = runner(["ip", "route", "get", address], timeout_seconds=5)
    return re.findall(r"\bdev (\S+)", answer.out)[:1]


def _default_routes(runner: Runner) -> list[str]:
    found = []
    for family in ("-4", "-6"):
        found += re.findall(r"\bdev (\S+)", runner(["ip", family, "route", "show", "default"], timeout_seconds=5).out)
    return list(dict.fromkeys(found))


def _names(net: str) -> list[str]:
    return sorted(os.listdir(net)) if os.path.isdir(net) else []


def _lower(devices: Sequence[str], net: str) -> list[str]:
    """Interfaces, each followed by those that it is stacked on (bond, bridge, VLAN)."""
    found: list[str] = []
    todo = list(devices)
    while todo:
        name = todo.pop(0)
        if name in found or not os.path.isdir(f"{net}/{name}"):
            continue
        found.append(name)
        todo += sorted(e[len("lower_") :] for e in os.listdir(f"{net}/{name}") if e.startswith("lower_"))
    return found


def _is_wireless(name: str, net: str) -> bool:
    return any(os.path.exists(f"{net}/{name}/{entry}") for entry in ("wireless", "phy80211"))


def _is_up(name: str, net: str) -> bool:
    return read_text(f"{net}/{name}/operstate").strip() == "up"


def _managers(name: str, net: str, root: str, proc: str) -> list[str]:
    """Units that look after an interface: a network manager, Wi-Fi authentication, or a VPN."""
    found = []
    number = read_text(f"{net}/{name}/ifindex").strip()
    networkd = read_text(f"{root}/run/systemd/netif/links/{number}")
    if networkd and "ADMIN_STATE=unmanaged" not in networkd:
        found.append("systemd-networkd.service")
    if re.search(r"^managed=true$", read_text(f"{root}/run/NetworkManager/devices/{number}"), re.M):
        found.append("NetworkManager.service")
    if _is_wireless(name, net):
        found += ["wpa_supplicant.service", f"wpa_supplicant@{name}.service", "iwd.service"]
    if "DEVTYPE=wireguard" in read_text(f"{net}/{name}/uevent").split():
        found.append(f"wg-quick@{name}.service")
    if os.path.exists(f"{net}/{name}/tun_flags"):
        found += _tun_holders(name, proc)
    return found


def _tun_holders(name: str, proc: str) -> list[str]:
    """Units whose process holds a tunnel device open (tailscaled, OpenVPN, ...)."""
    found = []
    for pid in (entry for entry in os.listdir(proc) if is_number(entry)):
        process = Process(int(pid), proc=proc)
        for number, target in process.descriptors():
            if target == _TUN_DEVICE and re.search(
                rf"^iff:\s*{re.escape(name)}$", read_text(f"{process.directory}/fdinfo/{number}"), re.M
            ):
                found.append(process.unit)
    return [unit for unit in dict.fromkeys(found) if unit]


# ------------------------------------------------------------------------------------------------------ sessions


@dataclass
class People:
    """Who would lose a desktop.

    Attributes:
        graphical: ``alice (wayland, session 3, gdm-password)``.
        remote_desktops: running units of remote-desktop programs, ``sunshine.service (alice)`` for users' ones.
        own: the graphical session that the playbook itself runs in, else empty.
        cut_off: users' units that live only with a graphical session: ``{user, unit, state}``.
    """

    graphical: list[str] = field(default_factory=list)
    remote_desktops: list[str] = field(default_factory=list)
    own: str = ""
    cut_off: list[dict[str, str]] = field(default_factory=list)


def people(
    link: Connection,
    patterns: Iterable[str],
    units: Mapping[str, Unit],
    user_units: Mapping[str, Mapping[str, Unit]],
    *,
    runner: Runner = run,
) -> People:
    """Graphical sessions, remote desktops, and what would fall with them.

    Args:
        patterns: names of remote-desktop units.
        user_units: uid → loaded units of that user's manager.
    """
    wanted = tuple(patterns)
    found = People()
    sessions = login_sessions(runner=runner) or []
    inside = {match.group(1) for unit in link.units if (match := _SESSION_UNIT.match(unit))}
    managers = {_user(match.group(1)) for unit in link.units if (match := _USER_MANAGER.match(unit))}
    for session in sessions:
        service = str(session["service"])
        by_remote = any(fnmatchcase(f"{service}.service", pattern) for pattern in wanted)
        if not session["graphical"] and not by_remote:
            continue
        remote = ", remote" if session["remote"] else ""
        text = (
            f"{session['user']} ({session['type']}{remote}, session {session['id']}{', ' if service else ''}{service})"
        )
        found.graphical.append(text)
        if session["id"] in inside or session["user"] in managers:
            found.own = text
    for unit in sorted({u.id: u for u in units.values()}.values()):
        if unit.up and any(fnmatchcase(name, pattern) for name in unit.names for pattern in wanted):
            found.remote_desktops.append(unit.id)
    for uid, theirs in sorted(user_units.items()):
        for unit in sorted({u.id: u for u in theirs.values()}.values()):
            if unit.up and any(fnmatchcase(unit.id, pattern) for pattern in wanted):
                found.remote_desktops.append(f"{unit.id} ({_user(uid)})")
        session_target = theirs.get("graphical-session.target")
        names = (*session_target.pulls, *session_target.stops_with) if session_target else ()
        for name in sorted(dict.fromkeys(names)):
            bound = theirs.get(name)
            if bound is not None and bound.exists and bound.id.endswith(".service"):
                found.cut_off.append({"user": _user(uid), "unit": bound.id, "state": bound.active})
    return found


def user_managers(units: Mapping[str, Unit]) -> list[str]:
    """Uids whose manager runs."""
    found = {m.group(1) for unit in units.values() if unit.active == "active" and (m := _USER_MANAGER.match(unit.id))}
    return sorted(found, key=int)


def read_user_units(systemd: Systemd, uid: str, names: Sequence[str]) -> dict[str, Unit]:
    """Loaded units of a user's manager and those of ``names``, under each of their names."""
    asked = list(dict.fromkeys((*names, "graphical-session.target")))
    loaded = [*systemd.loaded(uid), *systemd.show(asked, uid)]
    units = {name: unit for unit in loaded for name in unit.names}
    target = units["graphical-session.target"]
    missing = [name for name in (*target.pulls, *target.stops_with) if name not in units]
    units.update({name: unit for unit in systemd.show(missing, uid) for name in unit.names})
    return units


def _user(uid: str) -> str:
    from .process import user_name

    return user_name(int(uid))
