"""Every bad release of the stand-in engine: who serves what afterwards, that others were not touched, and the exit status."""

from __future__ import annotations

from typing import Any

import pytest

from lab import harness
from lab.api import Host, Lab
from lab.served import LIMITS, answers, engines, pid, record, serving, until

GOOD, NEXT = "v0.6.5", "v0.6.6"


@pytest.fixture
def canary(lab: Lab) -> Host:
    """The first host, serving the good release, whatever the test before left."""
    first, second = lab.hosts
    until(lambda: answers(first) and answers(second), "both hosts serve", 120)
    if serving(first) != GOOD:
        assert play(lab, GOOD).rc == 0
    assert (serving(first), serving(second)) == (GOOD, GOOD)
    return first


def play(lab: Lab, release: str, **extra: Any) -> harness.Result:
    return harness.play(lab, "site.yml", extra_vars={**LIMITS, "ds4_release": release, **extra})


def others_untouched(lab: Lab, before: str) -> None:
    assert pid(lab.hosts[1]) == before
    assert serving(lab.hosts[1]) == GOOD


@pytest.mark.parametrize("release", ["bad-compile", "bad-builds-nothing", "bad-arch", "bad-version"])
def test_a_release_that_cannot_be_built_touches_no_service(lab: Lab, canary: Host, release: str) -> None:
    before, other = pid(canary), pid(lab.hosts[1])
    result = play(lab, release)
    assert result.rc != 0
    assert pid(canary) == before
    others_untouched(lab, other)
    assert all(result.failed(host.name) for host in lab.hosts)


@pytest.mark.parametrize(
    ("release", "step", "says"),
    [
        ("bad-dies-at-start", "ready", "The engine died"),
        ("bad-never-ready", "ready", "still loads"),
        ("bad-garbage", "smoke", "'Paris' expected"),
        ("bad-poison-at-once", "smoke", "HTTP 500"),
        ("bad-poison", "smoke", "HTTP 500"),
        ("bad-crash", "smoke", ""),
        ("bad-no-speculation", "smoke", "nothing was drafted"),
    ],
)
def test_a_release_that_fails_puts_the_canary_back(lab: Lab, canary: Host, release: str, step: str, says: str) -> None:
    other = pid(lab.hosts[1])
    result = play(lab, release, engine_service_ready_seconds=8)
    assert result.rc != 0
    done = record(canary)
    assert (done["outcome"], done["failure"]["step"]) == ("returned", step)
    assert (serving(canary), engines(canary)) == (GOOD, 1)
    others_untouched(lab, other)
    message = " ".join(result.failed("spark1"))
    assert says in message
    assert "serves again" in message
    assert "waits in batch 2" in result.text, "the other host is told to be waiting, not done"


def test_a_release_that_refuses_a_flag_is_found_before_the_stop(lab: Lab, canary: Host) -> None:
    before, other = pid(canary), pid(lab.hosts[1])
    result = play(lab, "bad-refuses-flag")
    assert result.rc != 0
    assert record(canary)["outcome"] == "refused"
    assert pid(canary) == before
    others_untouched(lab, other)


@pytest.mark.parametrize("release", ["bad-slow-start", "bad-busy", "bad-half-speed"])
def test_slow_is_not_dead(lab: Lab, canary: Host, release: str) -> None:
    result = play(lab, release, engine_service_ready_seconds=60)
    assert result.rc == 0, result.text
    assert serving(canary) == release
    assert play(lab, GOOD).rc == 0
    assert {serving(host) for host in lab.hosts} == {GOOD}


@pytest.mark.parametrize("release", ["bad-ignores-sigterm", "bad-slow-drain", "bad-holds-memory"])
def test_an_old_engine_that_goes_badly_is_left_behind_in_bounded_time(lab: Lab, canary: Host, release: str) -> None:
    assert play(lab, release).rc == 0
    result = play(lab, GOOD, engine_service_memory_wait_seconds=40)
    assert result.rc == 0, result.text
    assert serving(canary) == GOOD
    stop = next(step for step in record(canary)["steps"] if step["name"] == "stop")
    assert ("had to be killed" in stop["text"]) == (release != "bad-holds-memory")


def test_memory_that_never_comes_back_is_told_and_a_reboot_cures_it(lab: Lab, canary: Host) -> None:
    assert play(lab, "bad-holds-memory-forever", ds4_rollout_batches=[1]).rc == 0
    other = pid(lab.hosts[1])
    result = play(lab, NEXT)
    assert result.rc != 0
    assert record(canary)["outcome"] == "stopped"
    assert "Reboot the host" in " ".join(result.failed("spark1"))
    assert engines(canary) == 0
    assert pid(lab.hosts[1]) == other
    for host in lab.hosts:
        host.reboot()
    until(lambda: all(answers(host) for host in lab.hosts), "they serve again after the boot", 90)
    assert serving(canary) == "bad-holds-memory-forever"
    assert play(lab, GOOD, engine_service_memory_wait_seconds=5).rc != 0, "it holds its memory again"
    for host in lab.hosts:
        host.run("systemctl disable ds4", check=False)
        host.reboot()
    assert play(lab, GOOD).rc == 0
    assert {serving(host) for host in lab.hosts} == {GOOD}
