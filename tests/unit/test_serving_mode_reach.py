"""What carries the connection, who would lose a desktop, and what `systemctl show` really says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds4 import serving_mode_reach as reach
from ds4.command import Ran
from ds4.errors import Ds4Error
from ds4.serving_mode_plan import Rule
from ds4.serving_mode_reach import Connection, connection, guards, people, user_managers
from ds4.serving_mode_units import Systemd, Unit, by_name, closure, describe, isolate_would_stop, links_of, parse_show

# systemd 252, properties shortened to those that matter here
SHOW = """\
Type=simple
MainPID=278
Result=success
MemoryCurrent=[not set]
Id=gdm.service
Names=gdm.service gdm3.service display-manager.service
Requires=sysinit.target system.slice
TriggeredBy=
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/lib/systemd/system/gdm.service
DropInPaths=/etc/systemd/system/gdm.service.d/local.conf /run/systemd/system/gdm.service.d/x.conf
UnitFileState=enabled
UnitFilePreset=enabled
Job=
RefuseManualStop=no
IgnoreOnIsolate=no

Type=simple
MainPID=46
MemoryCurrent=134217728
Id=cups.service
Names=cups.service
TriggeredBy=cups.path cups.socket
ConsistsOf=cups-web.service
LoadState=loaded
ActiveState=deactivating
SubState=stop-sigterm
UnitFileState=enabled
Job=4711
IgnoreOnIsolate=no

Id=graphical.target
Names=graphical.target default.target runlevel5.target
Requires=multi-user.target
Wants=colord.service gdm.service
LoadState=loaded
ActiveState=active
UnitFileState=indirect

MainPID=0
MemoryCurrent=18446744073709551615
Id=nosuch.service
Names=nosuch.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=

Id=dev-disk-by\\x2duuid-1f.swap
Names=dev-disk-by\\x2duuid-1f.swap
Following=swap.img.swap
LoadState=loaded
ActiveState=active
"""


def test_show_is_read_as_systemd_writes_it() -> None:
    gdm, cups, target, nosuch, swap = parse_show(SHOW)
    assert gdm.names == ("gdm.service", "gdm3.service", "display-manager.service")
    assert (gdm.up, gdm.running, gdm.main_pid, gdm.memory_bytes, gdm.job) == (True, True, 278, 0, "")
    assert gdm.drop_ins[1] == "/run/systemd/system/gdm.service.d/x.conf"
    assert (cups.up, cups.running, cups.job, cups.memory_bytes) == (False, True, "4711", 128 * 1024 * 1024)
    assert cups.triggered_by == ("cups.path", "cups.socket")
    assert cups.stops_with == ("cups-web.service",)
    assert target.pulls == ("multi-user.target", "colord.service", "gdm.service")
    assert not nosuch.exists and describe(nosuch) == "not installed" and nosuch.memory_bytes == 0
    assert swap.id == "dev-disk-by\\x2duuid-1f.swap" and swap.following == "swap.img.swap"


@pytest.mark.parametrize(
    ("active", "kind", "up", "running"),
    [
        ("active", "simple", True, True),
        ("activating", "notify", True, True),
        ("activating", "oneshot", False, True),
        ("deactivating", "simple", False, True),
        ("failed", "simple", False, False),
    ],
)
def test_what_has_to_run_again(active: str, kind: str, up: bool, running: bool) -> None:
    unit = Unit("a.service", active=active, type=kind)
    assert (unit.up, unit.running) == (up, running)


def test_links_of_a_unit() -> None:
    links = {
        "/etc/systemd/system/display-manager.service": "/lib/systemd/system/gdm.service",
        "/etc/systemd/system/graphical.target.wants/gdm.service": "../gdm.service",
        "/etc/systemd/system/gdm.service": "/dev/null",
        "/etc/systemd/system/gdm3.service": "/dev/null",
        "/etc/systemd/system/x.target.wants/other.service": "/lib/systemd/system/gdm.service",
        "/etc/systemd/system/default.target": "/lib/systemd/system/graphical.target",
        "/run/systemd/system/x.target.requires/gdm.service": "/lib/systemd/system/gdm.service",
    }
    found = links_of(("gdm.service", "gdm3.service", "display-manager.service"), links)
    assert set(links) - set(found) == {
        "/etc/systemd/system/x.target.wants/other.service",
        "/etc/systemd/system/default.target",
    }


def test_isolate_is_computed_as_systemd_does_it() -> None:
    units = by_name(
        [
            Unit("multi-user.target", ("multi-user.target",), active="active", pulls=("a.service", "b.socket")),
            Unit(
                "graphical.target", ("graphical.target",), active="active", pulls=("multi-user.target", "gdm.service")
            ),
            Unit("a.service", ("a.service", "a-alias.service"), active="active", pulls=("deep.service",)),
            Unit("deep.service", ("deep.service",), active="active", pulls=("a-alias.service",)),
            Unit("b.socket", ("b.socket",), active="active"),
            Unit("b.service", ("b.service",), active="active", triggered_by=("b.socket",)),
            Unit("gdm.service", ("gdm.service",), active="active"),
            Unit("user@0.service", ("user@0.service",), active="active", stays_on_isolate=True),
            Unit("idle.service", ("idle.service",)),
        ]
    )
    assert closure("multi-user.target", units) == {"multi-user.target", "a.service", "deep.service", "b.socket"}
    assert isolate_would_stop("multi-user.target", units) == ["gdm.service", "graphical.target"]


def test_a_users_manager_that_has_ended_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.serving_mode_units._account", lambda uid: f"user{uid}")
    alive: list[str] = []

    def run(argv: Sequence[str], **_options: object) -> Ran:
        if argv[1] == "is-active":
            return Ran(0 if alive else 3, "", "")
        return Ran(1, "", "Failed to connect to bus: No such file or directory")

    systemd = Systemd(runner=run)
    assert [unit.exists for unit in systemd.show(["a.service", "b.service"], "120")] == [False, False]
    assert systemd.loaded("120") == []
    systemd.reload("120")
    alive.append("120")
    for call in (lambda: systemd.show(["a.service"], "120"), lambda: systemd.reload("120"), lambda: systemd.loaded()):
        with pytest.raises(Ds4Error):
            call()


# ------------------------------------------------------------------------------------------------------ connection


class Machine:
    """/proc, /sys/class/net and /run of a host, below a folder; we are process ``os.getpid()``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc, self.net = root / "proc", root / "net"
        self.net.mkdir()
        self.routes = ""

    def process(self, pid: int, parent: int, cgroup: str, environment: str = "") -> None:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fdinfo").mkdir()
        (folder / "stat").write_text(f"{pid} (name) S {parent} " + "0 " * 20)
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "environ").write_text(environment)

    def interface(self, name: str, number: int, *, up: bool = True, wireless: bool = False, uevent: str = "") -> Path:
        folder = self.net / name
        folder.mkdir()
        (folder / "ifindex").write_text(f"{number}\n")
        (folder / "operstate").write_text("up\n" if up else "down\n")
        (folder / "uevent").write_text(uevent)
        if wireless:
            (folder / "wireless").mkdir()
        return folder

    def managed(self, by: str, number: int, text: str) -> None:
        path = self.root / "run" / by / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, argv: Sequence[str], **_options: object) -> Ran:
        return Ran(0, self.routes if argv[0] == "ip" else "", "")

    def look(self) -> Connection:
        return connection(proc=str(self.proc), net=str(self.net), root=str(self.root), runner=self.run)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.process(os.getpid(), 50, "/user.slice/user-1000.slice/session-3.scope")
    found.process(
        50, 40, "/user.slice/user-1000.slice/session-3.scope", "SSH_CONNECTION=10.0.0.9 5000 10.0.0.2 22\0A=b\0"
    )
    found.process(40, 1, "/system.slice/ssh.service")
    found.routes = "10.0.0.9 dev enP7s7 src 10.0.0.2 uid 0\n    cache\n"
    return found


def reasons(rules: Sequence[Rule], unit: str) -> str:
    return next((rule.reason for rule in rules if rule.hits([unit])), "")


def test_wired_connection_under_networkmanager(machine: Machine) -> None:
    machine.interface("enP7s7", 2)
    machine.managed("NetworkManager/devices", 2, "[device]\nmanaged=true\n")
    machine.managed("systemd/netif/links", 2, "ADMIN_STATE=unmanaged\n")
    link = machine.look()
    assert (link.kind, link.peer, link.identity) == ("ssh", "10.0.0.9", "10.0.0.9 5000 10.0.0.2 22")
    assert (link.interfaces, link.managers, link.wireless) == (["enP7s7"], ["NetworkManager.service"], False)
    assert link.units == ["session-3.scope", "ssh.service"]
    rules = guards(link, "spark.example")
    assert reasons(rules, "NetworkManager.service") == "carries the management connection from 10.0.0.9 (enP7s7)"
    assert reasons(rules, "ssh.service") == "the playbook itself runs below it"
    assert not reasons(rules, "wpa_supplicant.service") and not reasons(rules, "avahi-daemon.service")


def test_bond_over_wifi_under_networkd(machine: Machine) -> None:
    machine.interface("wlP9s9", 3, wireless=True)
    (machine.interface("enP7s7", 2) / "lower_wlP9s9").mkdir()
    machine.managed("systemd/netif/links", 2, "ADMIN_STATE=configured\n")
    link = machine.look()
    assert link.interfaces == ["enP7s7", "wlP9s9"]
    assert link.managers[0] == "systemd-networkd.service" and "wpa_supplicant.service" in link.managers


def test_wifi_that_carries_something_else_keeps_its_supplicant(machine: Machine) -> None:
    machine.interface("enP7s7", 2)
    machine.interface("wlP9s9", 3, wireless=True)
    assert reasons(guards(machine.look(), ""), "wpa_supplicant.service") == "Wi-Fi carries a connection"
    (machine.net / "wlP9s9/operstate").write_text("down\n")
    assert not reasons(guards(machine.look(), ""), "wpa_supplicant.service")


def test_vpn_is_kept_by_whoever_holds_its_device(machine: Machine) -> None:
    machine.routes = "100.64.0.9 dev tailscale0 table 52 src 100.64.0.2\n"
    (machine.interface("tailscale0", 5) / "tun_flags").write_text("0x1002")
    machine.process(77, 1, "/system.slice/tailscaled.service")
    (machine.proc / "77/fd/9").symlink_to("/dev/net/tun")
    (machine.proc / "77/fdinfo/9").write_text("pos:\t0\niff:\ttailscale0\n")
    machine.process(78, 1, "/system.slice/openvpn.service")
    (machine.proc / "78/fd/9").symlink_to("/dev/net/tun")
    (machine.proc / "78/fdinfo/9").write_text("pos:\t0\niff:\ttailscale01\n")
    assert machine.look().managers == ["tailscaled.service"]


def test_wireguard(machine: Machine) -> None:
    machine.routes = "10.9.0.9 dev wg0 src 10.9.0.2\n"
    machine.interface("wg0", 6, uevent="DEVTYPE=wireguard\nINTERFACE=wg0\n")
    assert machine.look().managers == ["wg-quick@wg0.service"]


def test_local_run_keeps_the_default_route_and_what_runs_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.process(os.getpid(), 1, "/system.slice/ansible-pull.service")
    machine.routes = "default via 10.0.0.1 dev enP7s7 proto dhcp\n"
    machine.interface("enP7s7", 2)
    machine.managed("systemd/netif/links", 2, "ADMIN_STATE=configured\n")
    link = machine.look()
    assert (link.kind, link.identity, link.managers) == ("local", "", ["systemd-networkd.service"])
    rules = guards(link, "spark.local.")
    assert reasons(rules, "ansible-pull.service")
    assert reasons(rules, "avahi-daemon.socket") == "the inventory reaches this host as spark.local."


def test_link_local_peer_names_its_interface(machine: Machine) -> None:
    (machine.proc / "50/environ").write_text("SSH_CONNECTION=fe80::1%enP7s7 5000 fe80::2%enP7s7 22\0")
    machine.routes = ""
    machine.interface("enP7s7", 2)
    assert machine.look().interfaces == ["enP7s7"]


# ---------------------------------------------------------------------------------------------------------- people

SESSIONS = """\
Id=3
Name=alice
Type=wayland
Class=user
State=active
Remote=no
Service=gdm-password

Id=4
Name=bob
Type=tty
Class=user
State=active
Remote=yes
Service=sshd

Id=5
Name=carol
Type=unspecified
Class=user
State=active
Remote=yes
Service=xrdp-sesman

Id=c1
Name=gdm
Type=wayland
Class=greeter
State=active
Remote=no
Service=gdm-launch-environment
"""


def loginctl(argv: Sequence[str], **_options: object) -> Ran:
    return Ran(0, "3 1000 alice\n4 1001 bob\n5 1002 carol\nc1 120 gdm\n" if "list-sessions" in argv else SESSIONS, "")


def test_who_would_lose_a_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_user", lambda uid: {"1000": "alice", "1001": "bob"}[uid])
    patterns = ["sunshine*.service", "xrdp*.service", "x11vnc*.service"]
    system = by_name(
        [Unit("x11vnc.service", ("x11vnc.service",), active="active"), Unit("xrdp.service", ("xrdp.service",))]
    )
    session = Unit(
        "graphical-session.target",
        ("graphical-session.target",),
        pulls=("sunshine.service",),
        stops_with=("portal.service",),
    )
    alice = by_name(
        [
            session,
            Unit("sunshine.service", ("sunshine.service",), active="active"),
            Unit("portal.service", ("portal.service",)),
            Unit("music.service", ("music.service",), active="active"),
        ]
    )
    inside = Connection(units=["session-3.scope"])
    found = people(inside, patterns, system, {"1000": alice}, runner=loginctl)
    assert found.graphical == [
        "alice (wayland, session 3, gdm-password)",
        "carol (unspecified, remote, session 5, xrdp-sesman)",
    ]
    assert found.own == found.graphical[0]
    assert found.remote_desktops == ["x11vnc.service", "sunshine.service (alice)"]
    assert [(row["unit"], row["state"]) for row in found.cut_off] == [
        ("portal.service", "inactive"),
        ("sunshine.service", "active"),
    ]
    terminal = Connection(units=["user@1000.service"])  # a terminal window runs below the user's manager
    assert people(terminal, patterns, system, {}, runner=loginctl).own == found.graphical[0]
    assert people(Connection(units=["session-4.scope", "ssh.service"]), [], {}, {}, runner=loginctl).own == ""


def test_user_managers_that_run() -> None:
    units = by_name(
        [Unit(f"user@{n}.service", (f"user@{n}.service",), active=a) for n, a in ((1000, "active"), (7, "inactive"))]
    )
    assert user_managers(units) == ["1000"]
