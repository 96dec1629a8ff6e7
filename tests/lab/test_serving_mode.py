"""Serving mode on a real systemd: a zoo of units goes and comes back exactly, whatever happens in between."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from lab.api import Host
from lab.harness import Result, play
from tests.lab.serving_mode_zoo import DESKTOP, EXTRA, POLICY, SLEEPER, look, settle_in, verb

pytestmark = pytest.mark.lab

PLAYBOOK = "tests/lab/playbooks/serving_mode.yml"
STATE = "/var/lib/ds4/state/serving-mode"
SEEDS = int(os.environ.get("FAULT_SEEDS", "10"))


def row(result: dict[str, Any], unit: str) -> dict[str, Any]:
    return next(row for row in result["units"] if row["unit"] == unit)


def run_role(host: Host, target: str, *, check: bool = False, **variables: Any) -> Result:
    return play(host.lab, PLAYBOOK, extra_vars={"serving_mode_target": target, **variables}, check=check, diff=check)


@pytest.fixture
def zoo(spark: Host) -> Host:
    """A host with the mechanism and every kind of unit."""
    settle_in(spark)
    result = run_role(spark, "unmanaged")
    assert result.rc == 0, result.text
    return spark


def test_zoo_goes_and_comes_back(zoo: Host) -> None:
    before = look(zoo)
    assert before["user"] == "active"
    everything = list(POLICY["groups"])
    plan = verb(zoo, "serve", selected=everything, extra=EXTRA, check=True)
    assert row(plan, "zoo-alias.service")["reason"] == "zoo (asked for as zoo-nick.service)"
    assert row(plan, "zoo-masked.service")["action"] == "keep"
    assert row(plan, "zoo-missing.service")["action"] == "missing"
    assert row(plan, "zoo-sock.socket")["reason"] == "can start zoo-sock.service again"
    assert row(plan, "zoo-along.service")["steps"] == ["stop"]
    assert row(plan, "unattended-upgrades.service")["action"] == "keep"
    assert {"user": "spark", "unit": "zoo-screen.service", "state": "inactive"} in plan["would_cut_off"]
    assert look(zoo) == before

    done = verb(zoo, "serve", selected=everything, extra=EXTRA, settle_seconds=10)
    assert {r["unit"]: r["then"] for r in done["units"]} == {r["unit"]: r["then"] for r in plan["units"]}
    during = look(zoo)
    for r in done["units"]:
        name = r["unit"]
        if r["action"] == "strip" and not name.startswith("user/"):
            assert name not in during["active"], name
            if "mask" in r["steps"] and name in during["files"]:
                assert during["files"][name] == "masked", name
    assert during["files"]["zoo-hand.service"] == "disabled"
    assert during["links"]["/etc/systemd/user/zoo-user.service"] == "/dev/null"
    assert during["user"] != "active"
    assert verb(zoo, "serve", selected=everything, extra=EXTRA)["changed"] is False
    held = sum(int(line.split()[0]) for line in zoo.run("cat /run/lab-tenants/* 2>/dev/null || true").out.splitlines())
    assert held < 2 * 1024 * 1024  # what stays: cron, rsyslog, DCGM, ...
    assert done["gained_kib"] > 9 * 1024 * 1024

    back = verb(zoo, "restore")
    assert back["changed"], back
    assert look(zoo) == before
    assert verb(zoo, "restore")["changed"] is False


def owner(host: Host, chance: random.Random, held: set[str]) -> tuple[str, bool]:
    """A change that an owner makes; True when it is about a unit that serving mode does not hold."""
    unit: str = chance.choice(
        ["zoo-enabled", "zoo-disabled", "zoo-stopped", "zoo-alias", "zoo-part", "cups", "bluetooth"]
    )
    change = chance.choice(["enable", "disable", "mask", "unmask", "enable --now"])
    host.run(f"systemctl {change} {unit}.service", check=False)
    return f"{change} {unit}", f"{unit}.service" not in held


def held_units(host: Host) -> set[str]:
    """Units that an operation was begun on."""
    ask = "from ds4.serving_mode_snapshot import Store; s = Store('/var/lib/ds4/state'); print(*(s.touched() if s.load() else []))"
    return set(host.run(f'PYTHONPATH=/opt/ds4/lib/current python3 -c "{ask}"').out.split())


@pytest.mark.faults
def test_random_histories_come_back_exactly(zoo: Host) -> None:
    """On, reboot, off, with owner's changes, other lists and kills in between, all on one host and one after another."""
    for seed in range(SEEDS):
        chance = random.Random(seed)
        history: list[str] = []
        for _ in range(chance.randint(0, 2)):
            history.append(owner(zoo, chance, set())[0])
        before = look(zoo)
        steps = ["on", *chance.sample(["on", "kill on", "owner", "owner", "reboot", "kill off"], chance.randint(1, 4))]
        if seed % 2:
            steps.append("reboot")
        ours = True
        for step in steps:
            groups = [
                "display",
                "sleep",
                *chance.sample(["printing", "bluetooth", "packaging", "dashboard", "containers"], 2),
            ]
            extra = chance.sample(EXTRA, chance.randint(6, len(EXTRA)))
            if step == "reboot":
                free = {name for name in before["active"] if name.startswith("zoo-")} - held_units(zoo)
                zoo.reboot()
                history.append("reboot")
                # What was only started by hand and that nobody held does not survive a reboot.
                before["active"] = sorted({*before["active"]} - (free - {*look(zoo)["active"]}))
            elif step == "owner":
                text, theirs = owner(zoo, chance, held_units(zoo))
                ours = ours and not theirs
                history.append(text)
            else:
                kill = chance.uniform(0.2, 2.5) if step.startswith("kill") else 0.0
                name = "restore" if step.endswith("off") else "serve"
                result = verb(zoo, name, selected=groups, extra=extra, kill_after=kill)
                history.append(f"{step} {kill:.2f} {groups[2:]} {len(extra)} {result.get('msg', '')}")
        result = verb(zoo, "restore")
        assert "changed" in result, (seed, history, result)
        after = look(zoo)
        if ours:
            _same(before, after, seed, history)
        else:  # an owner's change to what was not held is the owner's; the rest is as it was
            changed = {
                path
                for path in before["links"] | after["links"]
                if before["links"].get(path) != after["links"].get(path)
            }
            touched = {
                text.split()[-1] for text in history if text.split()[0] in ("enable", "disable", "mask", "unmask")
            }
            assert all(any(name in path for name in touched | {"nick"}) for path in changed), (seed, history, changed)


def _same(before: dict[str, Any], after: dict[str, Any], seed: int, history: list[str]) -> None:
    for key in ("links", "files"):
        assert after[key] == before[key], (seed, history)
    if not any(text == "reboot" for text in history):
        assert after["active"] == before["active"], (seed, history)
        return
    # What nobody held ran or not after a reboot as the boot found it: only what was held is compared.
    lost = set(before["active"]) - set(after["active"])
    assert not lost, (seed, history, lost)


def test_unit_that_refuses_and_unit_that_returns(zoo: Host) -> None:
    zoo.put(
        "/usr/lib/systemd/system/zoo-stubborn.service",
        "[Service]\nExecStart=/bin/sh -c 'trap : TERM; while :; do sleep 1; done'\nTimeoutStopSec=infinity\nKillMode=process\n",
    )
    zoo.put("/usr/lib/systemd/system/zoo-returns.service", SLEEPER % "returns")
    zoo.put(
        "/etc/systemd/system/zoo-watchdog.service",
        "[Service]\nExecStart=/bin/sh -c 'while :; do systemctl start --no-block zoo-returns; sleep 0.1; done'\n",
    )
    zoo.put("/etc/systemd/system/zoo-handreturns.service", SLEEPER % "returns, not maskable")
    zoo.run("systemctl daemon-reload && systemctl start zoo-stubborn zoo-returns zoo-watchdog")
    before = look(zoo)
    returns = {"unit": "zoo-returns.service", "reason": "zoo"}
    assert verb(zoo, "serve", extra=[returns])["changed"]
    time.sleep(0.5)
    assert zoo.run("systemctl is-active zoo-returns", check=False).out.strip() != "active"
    failed = verb(zoo, "serve", extra=[returns, {"unit": "zoo-stubborn.service", "reason": "zoo"}], wait_seconds=3)
    assert "zoo-stubborn.service: deactivating" in failed["error"]["found"]
    assert "(/bin/sh" in failed["error"]["found"]
    zoo.run("systemctl kill -s KILL zoo-stubborn")
    assert "changed" in verb(zoo, "restore")
    assert look(zoo) == before


def test_dead_man_gives_back_also_after_a_reboot(zoo: Host) -> None:
    before = look(zoo)

    def strip() -> dict[str, Any]:
        return verb(zoo, "serve", dead_man_seconds=6)

    result = strip()
    assert result["dead_man"]["armed"] and "gdm.service" not in look(zoo)["active"]
    _wait(lambda: not zoo.exists(f"{STATE}/snapshot.json") and look(zoo) == before, 30)
    assert "dead man" in zoo.run("ds4-desktop status").out
    assert "nobody confirmed in time" in " ".join(verb(zoo, "serve", check=True)["notes"])
    strip()
    zoo.reboot()
    assert "gdm.service" not in look(zoo)["active"]
    _wait(lambda: not zoo.exists(f"{STATE}/snapshot.json"), 40)
    after = look(zoo)
    assert (after["links"], after["files"]) == (before["links"], before["files"])
    assert {*DESKTOP} & {*after["active"]} == {*DESKTOP} & {*before["active"]}
    before = after  # what was only started by hand did not survive the reboot
    strip()
    assert "confirmed" in zoo.run("ds4-desktop confirm").out
    time.sleep(8)
    assert "gdm.service" not in look(zoo)["active"]
    assert "8 units given back" in zoo.run("ds4-desktop restore").out
    assert look(zoo) == before


def test_swap_policy_is_checked_first_and_undone(zoo: Host) -> None:
    before = look(zoo)
    value = "/proc/sys/vm/swappiness"
    refused = verb(zoo, "serve", swap="low_swappiness")  # a container may not set it
    assert "serving_mode_swap: keep" in refused["error"]["cure"]
    assert look(zoo) == before
    zoo.run(f"cat {value} >/run/swappiness && mount --bind /run/swappiness {value}")
    was = zoo.read(value)
    assert verb(zoo, "serve", swap="low_swappiness")["changed"]
    assert zoo.read(value).strip() == "10"
    assert verb(zoo, "serve", swap="low_swappiness")["changed"] is False
    assert verb(zoo, "restore")["changed"]
    assert zoo.read(value) == was and look(zoo) == before
    zoo.run(
        "printf 'Filename Type Size Used Priority\\n/swap.img file 209715200 209715200 -2\\n' >/run/swaps && mount --bind /run/swaps /proc/swaps"
    )
    refused = verb(zoo, "serve", swap="off")
    assert "200.0 GiB swapped out" in refused["error"]["found"]
    assert look(zoo) == before


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)


def test_role_over_ssh(zoo: Host) -> None:
    """Check, strip with a confirmation over a new connection, nothing to do, deny list, session, window, and back."""
    before = look(zoo)
    window: dict[str, Any] = {"serving_mode_update_window": "Sun 03:00"}
    planned = run_role(zoo, "serving", check=True, **window)
    assert planned.rc == 0, planned.text
    assert look(zoo) == before
    refused = run_role(
        zoo,
        "serving",
        serving_mode_extra_units=[{"unit": "ssh.service", "reason": "no"}, {"unit": "cron.service", "reason": "no"}],
    )
    assert refused.rc != 0
    message = refused.failed("spark1")[0]
    assert "ssh.service is never taken away" in message and "serving_mode_keep" in message
    assert look(zoo) == before

    zoo.run(
        "systemd-run --unit=zoo-session -p PAMName=login -p User=spark -p Environment=XDG_SESSION_TYPE=x11"
        " -p Environment=XDG_SESSION_CLASS=user sleep infinity"
    )
    _wait(
        lambda: (
            "x11"
            in zoo.run(
                "loginctl list-sessions --no-legend | awk '{print $1}' | xargs -r loginctl show-session -p Type"
            ).out
        ),
        10,
    )
    session = run_role(zoo, "serving")
    assert session.rc != 0
    told = session.task("spark1", "apply | Take the desktop away, give it back, or tell what it holds")
    # The report before it told the same, changed nothing and stopped nothing.
    report = next(data["res"] for data in session.results("spark1", "ok") if "findings" in data["res"])
    assert report["findings"] == told["error"]["evidence"]["findings"]
    assert report["needs_change"] and not report["changed"]
    assert "spark (x11, session" in session.failed("spark1")[0]
    assert look(zoo) == before
    zoo.run("systemctl stop zoo-session")
    _wait(
        lambda: (
            "x11"
            not in zoo.run(
                "loginctl list-sessions --no-legend | awk '{print $1}' | xargs -r loginctl show-session -p Type"
            ).out
        ),
        20,
    )

    done = run_role(zoo, "serving", **window)
    assert done.rc == 0, done.text
    applied = done.task("spark1", "apply | Take the desktop away, give it back, or tell what it holds")
    assert applied["gained_kib"] > 6 * 1024 * 1024
    assert applied["connection"]["kind"] == "ssh"
    assert applied["connection"]["managers"] == ["systemd-networkd.service"]
    assert done.task("spark1", "Cancel the dead man's switch")["changed"]
    assert not zoo.exists("/etc/systemd/system/ds4-desktop-deadman.timer")
    assert "+6." in applied["ds4_summary"]["text"]  # GiB that the table at the end tells
    calendar = zoo.run("systemctl show apt-daily.timer -p TimersCalendar").out
    assert "Sun *-*-* 03:00:00" in calendar and calendar.count("OnCalendar=") == 1
    again = run_role(zoo, "serving", **window)
    assert again.changed("spark1") == []
    needs = [data["res"]["needs_change"] for data in again.results("spark1", "ok") if "needs_change" in data["res"]]
    assert needs == [False, False]  # the report in check mode, and the run
    assert run_role(zoo, "serving", check=True, **window).changed("spark1") == []

    back = play(zoo.lab, "desktop.yml")
    assert back.rc == 0, back.text
    assert look(zoo) == before
