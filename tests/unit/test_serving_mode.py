"""Serving mode on a small systemd over a folder: what goes, what stays, and that everything comes back exactly."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import serving_mode_deadman, serving_mode_snapshot
from ds4.errors import Ds4Error
from ds4.serving_mode import ServingMode, main
from ds4.serving_mode_host import Request, parse_entries, parse_rules
from ds4.serving_mode_plan import Entry, Rule
from ds4.serving_mode_reach import Connection
from tests.unit.serving_mode_fake import Fake, FakeHost

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = json.loads((ROOT / "docs/schemas/serving-mode-snapshot.schema.json").read_text(encoding="utf-8"))
NEVER = [Rule(("ssh.service", "ssh.socket", "systemd-*"), "is the way into the host")]
KEEP = [Rule(("cron.service",), "runs other people's jobs", "take its line out of serving_mode_keep")]
GROUPS = {
    "display": [
        Entry("display-manager.service", "login screen"),
        Entry("gdm.service", "login screen"),
        Entry("lightdm.service", "other"),
    ],
    "sleep": [Entry("sleep.target", "no sleep")],
    "printing": [Entry("cups.service", "printing"), Entry("cups-browsed.service", "printing")],
    "odd": [
        Entry("linked.service", "linked"),
        Entry("hand.service", "hand-made"),
        Entry("made.service", "generated"),
        Entry("off.service", "disabled"),
        Entry("no.service", "masked"),
        Entry("man-db.timer", "timer"),
        Entry("part.service", "takes another one down"),
    ],
}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, one boot, and a connection that nobody has to look for in /proc."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    fake = FakeHost(tmp_path)
    for unit in (
        Fake("ssh.service", wanted_by=("multi-user.target",)),
        Fake("cron.service", wanted_by=("multi-user.target",)),
        Fake("gdm.service", wanted_by=("graphical.target",), alias=("display-manager.service",)),
        Fake("dash.service", wanted_by=("graphical.target",)),
        Fake("sleep.target"),
        Fake("cups.service", wanted_by=("multi-user.target",)),
        Fake("cups.socket", wanted_by=("multi-user.target",), starts=("cups.service",)),
        Fake("cups-browsed.service", wanted_by=("multi-user.target",)),
        Fake("linked.service", kind="linked", wanted_by=("multi-user.target",)),
        Fake("hand.service", kind="local", wanted_by=("multi-user.target",)),
        Fake("made.service", kind="generated"),
        Fake("man-db.service"),
        Fake("man-db.timer", wanted_by=("multi-user.target",), starts=("man-db.service",)),
        Fake("part.service", wanted_by=("multi-user.target",), stops=("along.service",)),
        Fake("along.service", wanted_by=("multi-user.target",)),
    ):
        fake.add(unit)
    fake.add(Fake("off.service", wanted_by=("multi-user.target",)), enable=False)
    fake.add(Fake("no.service", wanted_by=("multi-user.target",)), enable=False)
    fake.mask("no.service")
    fake.memory_of = {"gdm.service": 6 * 1024 * 1024, "cups.service": 128 * 1024}
    fake.boot()
    fake.active.add("made.service")
    fake.write_meminfo()
    return fake


@pytest.fixture
def serving(host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServingMode]:
    """``serving(["display"], …)``: the verbs over the host, with a clock that costs no time."""
    lib = tmp_path / "lib/current/ds4"
    lib.mkdir(parents=True)
    (lib / "serving_mode.py").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    link = Connection(kind="ssh", identity="10.0.0.9 5000 10.0.0.2 22", peer="10.0.0.9", interfaces=["lo"])
    monkeypatch.setattr("ds4.serving_mode_host.connection", lambda **_: link)
    monkeypatch.setattr(
        "ds4.serving_mode.connection", lambda **_: Connection(kind="ssh", identity="10.0.0.9 5001 10.0.0.2 22")
    )
    now = iter(range(1_000_000))

    def make(selected: list[str] | None = None, **changes: Any) -> ServingMode:
        fields: dict[str, Any] = {
            "groups": GROUPS,
            "selected": list(GROUPS) if selected is None else selected,
            "never": NEVER,
            "keep": KEEP,
            "remote_desktops": ["sunshine*.service"],
            "state_dir": str(tmp_path / "state"),
            "lib_dir": str(tmp_path / "lib"),
            "bin_dir": str(tmp_path / "bin"),
            "meminfo": host.meminfo,
            **changes,
        }
        clock = lambda: float(next(now))  # noqa: E731
        return ServingMode(Request(**fields), root=str(host.root), runner=host.run, sleep=lambda _s: None, clock=clock)

    return make


def row(result: dict[str, Any], unit: str) -> dict[str, Any]:
    return next(row for row in result["units"] if row["unit"] == unit)


def error_of(call: Callable[[], object]) -> Ds4Error:
    with pytest.raises(Ds4Error) as caught:
        call()
    return caught.value


# ------------------------------------------------------------------------------------------------------ there and back


def test_strip_and_back_is_exact(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    before = host.state()
    result = serving().serve()
    assert result["changed"] and result["serving"]
    assert {"gdm.service", "cups.service", "cups.socket", "along.service", "hand.service"}.isdisjoint(host.active)
    assert "ssh.service" in host.active
    for unit in ("gdm.service", "cups.service", "cups.socket", "linked.service", "sleep.target", "off.service"):
        assert host.file_state(unit) == "masked", unit
    assert host.file_state("hand.service") == "disabled"  # a file in /etc cannot be masked
    assert host.file_state("along.service") == "enabled"  # it only went down with another one
    assert os.readlink(host.root / "etc/systemd/system/default.target").endswith("multi-user.target")
    assert result["gained_kib"] == 6 * 1024 * 1024 + 128 * 1024

    again = serving().serve()
    assert not again["changed"]
    assert again["gained_kib"] == result["gained_kib"]

    back = serving().restore()
    assert back["changed"] and not back["serving"]
    assert host.state() == before
    assert not serving().restore()["changed"]


def test_snapshot_follows_the_schema_and_is_written_before_the_first_change(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    before = host.state()
    mode = serving()
    seen: list[dict[str, Any]] = []

    def first_change(argv: list[str]) -> None:
        if argv[:2] in (["systemctl", "stop"], ["systemctl", "daemon-reload"]) and not seen:
            assert host.links().items() >= before["links"].items()  # the snapshot came first
            seen.append(json.loads(Path(mode.store.path).read_text()))

    host.before_call = first_change
    mode.serve()
    jsonschema.validate(seen[0], SCHEMA)
    entry = seen[0]["units"]["gdm.service"]
    assert entry["up_in"] == ["system"]
    assert entry["unit_file_state"] == "enabled"
    assert entry["enabled_by"] == ["graphical.target.wants"]
    assert seen[0]["default_target"]["link"] == "/lib/systemd/system/graphical.target"
    assert "lightdm.service" in seen[0]["missing"]
    jsonschema.validate(json.loads(Path(mode.store.path).read_text()), SCHEMA)


def test_snapshot_is_never_overwritten_while_serving(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    mode = serving(["display"])
    mode.serve()
    first = json.loads(Path(mode.store.path).read_text())["units"]["gdm.service"]
    host.unmask("gdm.service")
    host.enable("gdm.service")
    host.link("etc/systemd/system/multi-user.target.wants/gdm.service", "/usr/lib/systemd/system/gdm.service")
    host.reload()
    assert serving(["display", "printing"]).serve()["changed"]
    assert json.loads(Path(mode.store.path).read_text())["units"]["gdm.service"] == first
    assert host.file_state("gdm.service") == "masked"


def test_another_list_in_between_gives_back_what_is_no_longer_listed(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    before = host.state()
    serving(["display", "printing"]).serve()
    result = serving(["sleep", "odd"]).serve()
    assert row(result, "gdm.service")["action"] == "give_back"
    assert {"gdm.service", "cups.service", "cups.socket", "graphical.target"} <= host.active
    assert host.file_state("gdm.service") == "enabled"
    assert os.readlink(host.root / "etc/systemd/system/default.target") == "/lib/systemd/system/graphical.target"
    assert not serving(["sleep", "odd"]).serve()["changed"]
    serving().restore()
    assert host.state() == before


def test_back_after_a_reboot_starts_what_ran_and_nothing_else(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    host.active.discard("cups-browsed.service")  # its owner had stopped it, it stays enabled
    host.active.discard("ssh.socket")
    before = host.state()
    serving().serve()
    host.boot()
    host.active.add("made.service") if host.file_state("made.service") != "masked" else None
    assert "dash.service" not in host.active  # only graphical.target starts it
    serving().restore()
    assert host.state() == before


def test_swap_and_window_are_undone(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    host.add(Fake("apt-daily.timer", wanted_by=("multi-user.target",)))
    options = {"swap": "low_swappiness", "window": "Sun 03:00", "window_timers": ["apt-daily.timer", "absent.timer"]}
    serving(["sleep"], **options).serve()
    drop_in = host.root / "etc/systemd/system/apt-daily.timer.d/90-ds4-window.conf"
    assert "OnCalendar=\nOnCalendar=Sun 03:00\n" in drop_in.read_text()
    assert (host.root / "proc/sys/vm/swappiness").read_text() == "10\n"
    assert "vm.swappiness = 10" in (host.root / "etc/sysctl.d/90-ds4-serving-mode.conf").read_text()
    assert not serving(["sleep"], **options).serve()["changed"]
    assert serving(["sleep"]).serve()["changed"]  # policy keep again
    assert (host.root / "proc/sys/vm/swappiness").read_text() == "60\n"
    assert not drop_in.parent.exists()
    serving(["sleep"], **options).serve()
    serving().restore()
    assert (host.root / "proc/sys/vm/swappiness").read_text() == "60\n"
    assert not list((host.root / "etc/sysctl.d").iterdir())
    assert not drop_in.parent.exists()


# ------------------------------------------------------------------------------------------------- owners and packages


def test_owners_changes_to_held_units_are_put_back_and_told(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    before = host.state()
    serving().serve()
    host.unmask("cups.service")
    host.link("etc/systemd/system/graphical.target.wants/cups.service", "/usr/lib/systemd/system/cups.service")
    host.link("etc/systemd/system/default.target", "/lib/systemd/system/basic.target")
    result = serving().restore()
    assert host.state() == before
    told = "\n".join(result["notes"])
    assert "graphical.target.wants/cups.service was made meanwhile" in told
    assert "default target was set to basic.target meanwhile" in told


def test_units_removed_and_added_meanwhile(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    serving().serve()
    host.remove("cups-browsed.service")
    host.remove("linked.service")
    host.add(Fake("lightdm.service", wanted_by=("graphical.target",)))
    lightdm = {path: target for path, target in host.links().items() if "lightdm" in path}
    result = serving().restore()
    told = "\n".join(result["notes"])
    assert "cups-browsed.service is no longer installed" in told
    assert "lightdm.service was installed meanwhile" in told
    links = host.links()
    assert not [path for path in links if "cups-browsed" in path or path.endswith("linked.service")]
    assert {path: target for path, target in links.items() if "lightdm" in path} == lightdm


def test_a_file_of_the_owner_in_the_place_of_a_mask_is_left_alone(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    serving().serve()
    host.unmask("cups.service")
    path = host.root / "etc/systemd/system/cups.service"
    path.write_text("[Service]\nExecStart=/opt/mine\n")
    host.reload()
    serving().restore()
    assert path.read_text() == "[Service]\nExecStart=/opt/mine\n"


def test_unit_that_is_masked_by_its_owner_stays_masked(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    result = serving(["odd"]).serve()
    assert row(result, "no.service")["action"] == "keep"
    serving().restore()
    assert host.file_state("no.service") == "masked"


def test_unit_that_was_never_reached_is_not_put_back(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    """Cut off before the first operation: what the owner does afterwards is no business of the snapshot."""
    mode = serving(["printing"], dead_man_seconds=0)
    host.before_call = _cut_at(["systemctl", "stop"])
    with pytest.raises(Cut):
        mode.serve()
    host.before_call = lambda _argv: None
    assert mode.store.load() is not None
    events = [event for event in mode.store.events() if event["event"] not in ("stop", "link")]
    Path(mode.store.journal_path).write_text("".join(json.dumps(event) + "\n" for event in events))
    host.disable("cups-browsed.service")
    serving().restore()
    assert host.file_state("cups-browsed.service") == "disabled"


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("unit", "reason"),
    [
        ("ssh.service", "is the way into the host"),
        ("systemd-resolved.service", "is the way into the host"),
        ("cron.service", "runs other people's jobs"),
        ("takes-ssh.service", "ssh.service is stopped together with takes-ssh.service and stays"),
        ("alias-of-ssh.service", "is the way into the host"),
        ("once.service", "transient"),
    ],
)
def test_what_never_goes_is_refused_before_anything_is_touched(
    host: FakeHost, serving: Callable[..., ServingMode], unit: str, reason: str
) -> None:
    host.add(Fake("takes-ssh.service", stops=("ssh.service",)), running=True)
    host.add(Fake("once.service", kind="transient"), running=True)
    host.link("etc/systemd/system/alias-of-ssh.service", "/lib/systemd/system/ssh.service")
    before = host.state()
    error = error_of(serving(extra=[Entry(unit, "mine")]).serve)
    assert reason in error.found
    assert "Cure" in error.found
    assert error.evidence["findings"][0]["id"] == "serving_mode_never"
    assert host.state() == before


def test_a_groups_unit_that_must_stay_is_kept_without_an_error(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    groups = {"g": [Entry("cron.service", "x"), Entry("sleep.target", "y")]}
    result = serving(["g"], groups=groups).serve()
    assert row(result, "cron.service")["action"] == "keep"
    assert host.file_state("cron.service") == "enabled"


def test_unless_active(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    groups = {"g": [Entry("cups.service", "x", unless_active="snap.*.service")]}
    host.add(Fake("snap.lxd.daemon.service"), running=True)
    result = serving(["g"], groups=groups).serve()
    assert not result["changed"]
    assert row(result, "cups.service")["reason"] == "needed by snap.lxd.daemon.service"


SESSION = {
    "Id": "3",
    "Name": "alice",
    "Type": "wayland",
    "Class": "user",
    "State": "active",
    "Remote": "no",
    "Service": "gdm-password",
}


def test_graphical_session_stops_the_host_unless_forced(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    host.sessions = [SESSION]
    before = host.state()
    error = error_of(serving().serve)
    assert "alice (wayland, session 3, gdm-password)" in error.found
    assert "serving_mode_force" in error.found
    assert host.state() == before
    assert row({"units": error.evidence["units"]}, "gdm.service")["then"] == "inactive, masked"
    assert serving(["printing"]).serve()["changed"]  # the session does not need printing
    forced = serving(force=True).serve()
    assert any("cuts off alice" in note for note in forced["notes"])


def test_remote_desktop_and_own_session_stop_the_host(
    host: FakeHost, serving: Callable[..., ServingMode], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add(Fake("sunshine.service"), running=True)
    assert "sunshine.service" in error_of(serving().serve).found
    host.sessions = [SESSION]
    monkeypatch.setattr("ds4.serving_mode_host.connection", lambda **_: Connection(units=["session-3.scope"]))
    found = error_of(serving().serve).found
    assert "The playbook runs inside the graphical session" in found
    assert "(2) A remote desktop" in found


def test_report_only_tells(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    host.sessions = [SESSION]
    before = host.state()
    result = serving(check=True, stop_on_findings=False).serve()
    assert result["findings"] and result["changed"]
    report = serving().report()
    assert not report["changed"]
    assert report["held_kib"] == 6 * 1024 * 1024 + 128 * 1024
    assert host.state() == before


def test_check_mode_changes_nothing_and_lists_every_unit(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    before = host.state()
    result = serving(check=True).serve()
    assert result["changed"]
    assert result["ds4_summary"]["state"] == "planned"
    assert "gdm.service: active, enabled" in result["diff"]["before"]
    assert "gdm.service: inactive, masked" in result["diff"]["after"]
    assert "hand.service: inactive, disabled" in result["diff"]["after"]
    assert result["falls_at_boot"] == ["dash.service", "graphical.target"]
    assert result["default_target"] == {"now": "graphical.target", "then": "multi-user.target"}
    assert row(result, "lightdm.service")["action"] == "missing"
    assert row(result, "cups.socket")["reason"] == "can start cups.service again"
    assert host.state() == before
    assert not (host.root / "state/serving-mode").exists()
    real = serving().serve()
    assert {r["unit"]: r["then"] for r in real["units"]} == {r["unit"]: r["then"] for r in result["units"]}
    planned = serving(check=True).restore()
    assert planned["changed"] and planned["ds4_summary"]["state"] == "planned"
    assert serving().serve()["changed"] is False


def test_swap_off_is_refused_when_it_does_not_fit(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    host.available_kib = 4 * 1024 * 1024
    host.memory_of = {}
    host.write_meminfo()
    table = "Filename\tType\tSize\tUsed\tPriority\n/swap.img file 16777212 8388608 -2\n"
    (host.root / "proc/swaps").write_text(table)
    error = error_of(serving(["sleep"], swap="off").serve)
    assert "8.0 GiB swapped out, 4.0 GiB available" in error.found


def test_swap_off_takes_its_unit_and_gives_it_back(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    (host.root / "proc/swaps").write_text("Filename\tType\tSize\tUsed\tPriority\n/swap.img file 16777212 0 -2\n")
    host.add(Fake("swap.img.swap", kind="generated"), running=True)
    before = host.state()
    serving(["sleep"], swap="off").serve()
    assert "swap.img.swap" not in host.active
    assert host.file_state("swap.img.swap") == "masked"
    assert not serving(["sleep"], swap="off").serve()["changed"]
    serving().restore()
    assert host.state() == before


def test_desktop_that_does_not_fit_is_not_started(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    serving().serve()
    host.available_kib = 3 * 1024 * 1024
    host.memory_of = {}
    host.write_meminfo()
    during = host.state()
    error = error_of(serving().restore)
    assert "MemAvailable 3.0 GiB" in error.found
    assert "systemctl stop ds4" in error.cure
    assert host.state() == during
    told = serving(check=True, stop_on_findings=False).restore()
    assert told["findings"][0]["id"] == "serving_mode_tight"
    assert serving().restore(even_if_tight=True)["changed"]


def test_foreign_files_are_refused(host: FakeHost, serving: Callable[..., ServingMode], tmp_path: Path) -> None:
    before = host.state()
    (tmp_path / "bin/ds4-desktop").write_text("#!/bin/sh\n")
    assert "ds4-desktop" in error_of(serving().serve).found
    (tmp_path / "bin/ds4-desktop").unlink()
    (tmp_path / "etc/systemd/system" / serving_mode_deadman.TIMER).write_text("[Timer]\n")
    assert serving_mode_deadman.TIMER in error_of(serving().serve).found
    assert host.state() == before


@pytest.mark.parametrize(
    "row", [{"unit": "a.service"}, {"unit": "a.service", "reason": "x", "colour": 1}, {"reason": "x"}]
)
def test_badly_described_units(row: dict[str, Any]) -> None:
    assert "group g" in str(error_of(lambda: parse_entries([row], "g")))


def test_rules_name_their_cure() -> None:
    rules = parse_rules([{"units": ["a*"], "reason": "r"}, {"units": ["b"], "reason": "r", "cure": "own"}], "general")
    assert [rule.cure for rule in rules] == ["general", "own"]


def test_bad_input_is_refused_before_anything_is_touched(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    before = host.state()
    assert "fast" in error_of(serving(["fast"]).serve).found
    assert "'soon'" in error_of(serving(window="soon").serve).found
    (host.root / "proc/sys/vm/swappiness").unlink()
    assert "cannot be set" in error_of(serving(swap="low_swappiness").serve).what
    assert host.state() == before


def test_invalid_unit_name(serving: Callable[..., ServingMode]) -> None:
    assert "'cups'" in error_of(serving(extra=[Entry("cups", "x")]).serve).found


# ------------------------------------------------------------------------------------------------- units that resist


def test_unit_that_refuses_to_stop_is_named(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    before = host.state()
    host.units["cups.service"].refuses = True
    error = error_of(serving().serve)
    assert error.found.startswith("cups.service: active")
    assert "desktop comes back in" in error.cure
    host.units["cups.service"].refuses = False
    assert serving().serve()["changed"]
    serving().restore()
    assert host.state() == before


def test_unit_that_comes_back_is_stopped_once_it_is_masked(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    before = host.state()
    host.units["cups.service"].returns = True
    assert serving().serve()["changed"]
    assert "cups.service" not in host.active
    serving().restore()
    assert host.state() == before


def test_unit_that_cannot_be_masked_and_comes_back_is_named(
    host: FakeHost, serving: Callable[..., ServingMode]
) -> None:
    host.units["hand.service"].returns = True
    error = error_of(serving().serve)
    assert "hand.service" in error.found


def test_unit_that_does_not_start_again_keeps_the_snapshot(host: FakeHost, serving: Callable[..., ServingMode]) -> None:
    serving().serve()
    host.units["gdm.service"].fails = True
    host.run(["systemctl", "daemon-reload"])
    before_call = host.show

    def failing(asked: str) -> str:
        text = before_call(asked)
        return text.replace("ActiveState=inactive", "ActiveState=failed") if asked == "gdm.service" else text

    host.show = failing  # type: ignore[method-assign]
    error = error_of(serving().restore)
    assert "gdm.service" in error.found
    assert serving().store.load() is not None
    result = serving(force=True).restore()
    assert any("gdm.service does not start" in note for note in result["notes"])
    assert serving().store.load() is None


# --------------------------------------------------------------------------------------------------- dead man's switch


def test_dead_man_is_armed_before_the_first_change_and_confirmed_by_another_connection(
    host: FakeHost, serving: Callable[..., ServingMode], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.state()
    order: list[str] = []
    host.before_call = lambda argv: order.append(" ".join(argv[1:3])) if argv[0] == "systemctl" else None
    result = serving().serve()
    changes = [call for call in order if call.startswith(("stop", "restart"))]
    assert changes[0] == f"restart {serving_mode_deadman.TIMER}"
    assert result["dead_man"]["armed"]
    assert "OnActiveSec=300" in (host.root / "etc/systemd/system" / serving_mode_deadman.TIMER).read_text()
    with monkeypatch.context() as patch:
        same = Connection(kind="ssh", identity="10.0.0.9 5000 10.0.0.2 22")
        patch.setattr("ds4.serving_mode.connection", lambda **_: same)
        assert "this is the connection that armed it" in error_of(serving().confirm).what
    assert serving(check=True).confirm()["changed"]
    assert serving().confirm()["changed"]
    assert not serving().confirm()["changed"]
    assert not [path for path in host.links() if "deadman" in path]
    serving().restore(outcome="dead man's switch", even_if_tight=True)
    assert host.state() == before
    assert "dead man's switch" in error_of(serving().confirm).found
    notes = serving(check=True).serve()["notes"]
    assert any("nobody confirmed in time" in note for note in notes)


def test_no_dead_man_without_the_mechanism(host: FakeHost, serving: Callable[..., ServingMode], tmp_path: Path) -> None:
    before = host.state()
    (tmp_path / "lib/current/ds4/serving_mode.py").unlink()
    assert "stage part" in error_of(serving().serve).cure
    assert host.state() == before
    assert serving(dead_man_seconds=0).serve()["dead_man"] == {"armed": False, "seconds_left": None}


# --------------------------------------------------------------------------------------------------------- the record


def test_snapshot_that_somebody_else_could_write_is_not_trusted(
    serving: Callable[..., ServingMode], tmp_path: Path
) -> None:
    mode = serving()
    mode.serve()
    os.chmod(mode.store.path, 0o666)  # noqa: S103
    assert "not trusted" in error_of(serving().restore).what
    os.chmod(mode.store.path, 0o644)
    data = json.loads(Path(mode.store.path).read_text())
    data["units"]["gdm.service"]["links"]["/etc/cron.d/evil"] = "/tmp/x"
    Path(mode.store.path).write_text(json.dumps(data))
    assert "lies outside" in error_of(serving().restore).found
    Path(mode.store.path).write_text("{torn")
    assert "snapshot.json" in error_of(serving().serve).found


def test_torn_journal_and_half_archived_record(serving: Callable[..., ServingMode]) -> None:
    mode = serving(["sleep"])
    mode.serve()
    with open(mode.store.journal_path, "a", encoding="utf-8") as stream:
        stream.write('{"event": "link", "uni')
    assert mode.store.touched() == {"sleep.target"}
    mode.store.journal("given_back", units=["sleep.target"])
    assert mode.store.touched() == set()
    os.rename(mode.store.path, mode.store.path + ".elsewhere")  # the archiving was cut off after its first rename
    serving(["sleep"]).store.begin()
    assert not os.path.exists(mode.store.journal_path)


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert "sudo ds4-desktop status" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["strip"])


# ------------------------------------------------------------------------------------------------- random histories


class Cut(BaseException):
    """Power loss, kill -9: nothing of ours runs any more."""


def _cut_at(words: list[str]) -> Callable[[list[str]], None]:
    def check(argv: list[str]) -> None:
        if argv[: len(words)] == words:
            raise Cut

    return check


@pytest.fixture
def cutter(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> Iterator[Callable[[int], None]]:
    """``cutter(n)``: cut at the nth durable operation or call from now on."""
    left = [10**9]

    def tick(*_args: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Cut

    monkeypatch.setattr(os, "fsync", tick)
    host.before_call = tick

    def arm(count: int) -> None:
        left[0] = count

    yield arm
    left[0] = 10**9


def test_cut_anywhere_then_back_is_exact(
    host: FakeHost, serving: Callable[..., ServingMode], cutter: Callable[[int], None]
) -> None:
    before = host.state()
    reached_end = False
    for point in range(0, 600, 7):
        cutter(point)
        try:
            serving(dead_man_seconds=0).serve()
            reached_end = True
        except Cut:
            pass
        cutter(10**9)
        if point % 2:  # the next run goes on, as if nothing had happened
            serving(dead_man_seconds=0).serve()
            assert serving(dead_man_seconds=0).serve()["changed"] is False
            assert {host.loaded[unit] for unit in ("gdm.service", "cups.socket", "linked.service")} == {"masked"}
            assert {"gdm.service", "hand.service", "along.service"}.isdisjoint(host.active)
        serving().restore()
        assert host.state() == before, f"cut after {point} operations"
        if reached_end:
            return
    pytest.fail("the strip never came to its end")


@pytest.mark.parametrize("seed", range(int(os.environ.get("FAULT_SEEDS", "10"))))
def test_random_histories(
    host: FakeHost, serving: Callable[..., ServingMode], cutter: Callable[[int], None], seed: int
) -> None:
    """Strips, other lists, cuts, reboots and owner's changes in any order; at the end everything is as it has to be.

    What is held goes back to its record; what is not held is the owner's, before and after.
    """
    chance = random.Random(seed)
    units = ["gdm.service", "cups.service", "cups-browsed.service", "off.service", "hand.service", "linked.service"]
    expected = {unit: _own(host, unit) for unit in units}
    target = host.links()[f"{host.root}/etc/systemd/system/default.target"]
    running = {unit for unit in units if unit in host.active}
    history = []

    def held() -> set[str]:
        store = serving().store
        return store.touched() if store.load() else set()

    for _step in range(chance.randint(3, 9)):
        action = chance.choice(["strip", "strip", "cut strip", "reboot", "owner", "owner", "cut back"])
        groups = chance.sample(list(GROUPS), chance.randint(1, len(GROUPS)))
        history.append((action, groups if "strip" in action else ""))
        if action == "reboot":
            host.boot()
            running = {u for u in units if (u in running if u in held() else u in host.active)}
        elif action == "owner":
            unit = chance.choice(units)
            change = chance.choice([host.enable, host.disable, host.mask, host.unmask])
            if change == host.mask and unit in ("hand.service", "linked.service"):  # systemctl refuses as well
                continue
            mine = unit not in held()
            change(unit)
            host.reload()
            history.append((change.__name__, unit))
            if mine:
                expected[unit] = _own(host, unit)
        else:
            cutter(chance.randint(0, 120) if "cut" in action else 10**9)
            try:
                mode = serving() if "back" in action else serving(groups, dead_man_seconds=chance.choice([0, 300]))
                mode.restore() if "back" in action else mode.serve()
            except Cut:
                pass
            cutter(10**9)
    serving().restore()
    for unit in units:
        assert _own(host, unit) == expected[unit], (unit, history)
    assert host.links()[f"{host.root}/etc/systemd/system/default.target"] == target, history
    for unit in running:
        if host.file_state(unit) != "masked":
            assert unit in host.active, (unit, history)


def _own(host: FakeHost, unit: str) -> tuple[str, dict[str, str]]:
    """File state of a unit and every link that belongs to it."""
    links = {path: to for path, to in host.links().items() if unit in (Path(path).name, Path(to).name)}
    return host.file_state(unit), links


def test_boot_id_is_one_line() -> None:
    assert "\n" not in serving_mode_snapshot.boot_id()
