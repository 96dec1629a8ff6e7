"""Rollouts over four hosts. Every test begins with all of them on the old release and says who was touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import harness, system
from lab.api import Host, Lab
from lab.served import (
    LIMITS,
    answers,
    build_dir,
    engines,
    faults,
    has_step,
    inflight,
    kill_play,
    long_request,
    pid,
    record,
    serving,
    start_play,
    until,
)

OLD, NEW = "v0.6.5", "v0.6.6"
NAMES = ["spark1", "spark2", "spark3", "spark4"]
Hooks = tuple[dict[str, Any], Callable[[], list[str]]]


def play(
    lab: Lab,
    release: str = NEW,
    playbook: str = "site.yml",
    arguments: list[str] | None = None,
    tags: str = "",
    **extra: Any,
) -> harness.Result:
    variables = {**LIMITS, "engine_service_patience_seconds": 15, "ds4_release": release, **extra}
    return harness.play(lab, playbook, extra_vars=variables, arguments=arguments or [], tags=tags)


def row(result: harness.Result, host: str, room: str = "rollout") -> tuple[str, str]:
    """State and text of a room's row in the final table."""
    table = result.text.partition("FLEET SUMMARY")[2]
    lines = table.partition(f"\n{host}: ")[2].partition("\nspark")[0].splitlines()
    found = next(line.split(None, 2) for line in lines if line.startswith(f"  {room} "))
    return found[1], found[2]


def releases_served(lab: Lab) -> list[str]:
    return [serving(host) for host in lab.hosts]


def pids(lab: Lab) -> list[str]:
    return [pid(host) for host in lab.hosts]


@pytest.fixture
def fleet(lab: Lab) -> Iterator[Lab]:
    """All four serve the old release; the new one is built beside it from the first test on."""
    for host in lab.hosts:
        if host.leader is None:
            host.power_on()
        host.link_up()
        host.run("rm -f /run/lab-engine/faults.json", check=False)
    until(lambda: all(answers(host) for host in lab.hosts), "all hosts serve", 120)
    if set(releases_served(lab)) != {OLD}:
        result = play(lab, OLD, ds4_rollout_batches=["100%"])
        assert result.rc == 0, result.text
    yield lab
    for host in lab.hosts:
        if host.leader is not None:
            host.resume()


def test_a_good_release_goes_to_all_and_a_second_run_touches_none(fleet: Lab) -> None:
    result = play(fleet)
    assert result.rc == 0, result.text
    assert releases_served(fleet) == [NEW] * 4
    assert "batch 1: spark1\n  batch 2: spark2\n  batch 3: spark3, spark4" in result.text
    before = pids(fleet)
    again = play(fleet)
    assert again.rc == 0
    assert "no host is to be switched" in again.text
    assert [again.changed(name) for name in NAMES] == [[], [], [], []]
    assert pids(fleet) == before


def test_a_bad_canary_is_put_back_and_nobody_else_is_touched(fleet: Lab) -> None:
    faults(fleet.hosts[0], NEW, garbage=True)
    before = pids(fleet)
    result = play(fleet)
    assert result.rc != 0
    assert record(fleet.hosts[0])["outcome"] == "returned"
    assert releases_served(fleet) == [OLD] * 4
    assert pids(fleet)[1:] == before[1:]


@pytest.mark.parametrize(
    ("batches", "served"),
    [([1], [NEW, NEW, OLD, OLD]), ([1, "25%", "100%"], [NEW, NEW, OLD, NEW])],
    ids=["one by one", "growing batches"],
)
def test_a_bad_third_host_stops_what_comes_after_its_batch(fleet: Lab, batches: list[Any], served: list[str]) -> None:
    faults(fleet.hosts[2], NEW, exit_at_start=1)
    before = pids(fleet)
    result = play(fleet, ds4_rollout_batches=batches)
    assert result.rc != 0
    assert releases_served(fleet) == served
    assert record(fleet.hosts[2])["outcome"] == "returned"
    if served[3] == OLD:
        assert pids(fleet)[3] == before[3]


def test_a_drained_first_host_is_skipped_and_the_canary_is_the_next(fleet: Lab, tmp_path: Path) -> None:
    extra = tmp_path / "drained.yml"
    extra.write_text(json.dumps({"sparks": {"hosts": {"spark1": {"spark_drained": True}}}}), encoding="utf-8")
    before = pids(fleet)
    result = play(fleet, arguments=["-i", str(extra)])
    assert result.rc == 0, result.text
    assert releases_served(fleet) == [OLD, NEW, NEW, NEW]
    assert pids(fleet)[0] == before[0]
    assert "batch 1: spark2" in result.text
    assert "spark1: drained" in result.text


def test_the_only_host_that_has_to_build_and_cannot_takes_nothing_from_the_others(fleet: Lab, tmp_path: Path) -> None:
    play(fleet, tags="stage")  # all of them have the build
    extra = tmp_path / "builds.yml"
    cannot = {"cuda_build_force": True, "cuda_build_repository": "http://127.0.0.1:9/ds4.git"}
    extra.write_text(json.dumps({"sparks": {"hosts": {"spark4": cannot}}}), encoding="utf-8")
    before = pids(fleet)
    result = play(fleet, arguments=["-i", str(extra)])
    assert result.rc != 0
    assert releases_served(fleet) == [NEW, NEW, NEW, OLD]
    assert pids(fleet)[3] == before[3]
    assert row(result, "spark4", "cuda_build")[0] == "failed"


def test_a_host_that_is_off_is_absent_and_the_rest_goes_on(fleet: Lab) -> None:
    fleet.hosts[0].power_off()
    result = play(fleet)
    assert result.rc != 0, "an absent host is no success"
    assert [serving(host) for host in fleet.hosts[1:]] == [NEW] * 3
    assert "batch 1: spark2" in result.text
    assert "spark1: absent" in result.text


def test_a_host_lost_in_its_batch_stops_the_next_and_finishes_alone(fleet: Lab) -> None:
    second = fleet.hosts[1]
    faults(second, NEW, start_seconds=5)
    before = pids(fleet)
    controller = start_play(
        second, ds4_release=NEW, ds4_rollout_batches=[1, 1, "100%"], engine_service_patience_seconds=10
    )
    until(lambda: has_step(second, "stop"), "the second host is being switched", 240)
    second.link_down()
    started = time.monotonic()
    assert controller.wait(180) != 0
    assert time.monotonic() - started < 150, "nobody is blocked longer than a bounded time"
    second.link_up()
    assert pids(fleet)[2:] == before[2:], "the next batch was not begun"
    until(lambda: bool(record(second)["outcome"]), "the host finishes alone")
    assert (record(second)["outcome"], serving(second)) == ("proven", NEW)
    assert play(fleet).rc == 0
    assert releases_served(fleet) == [NEW] * 4


def test_a_paused_host_is_left_behind_in_bounded_time(fleet: Lab) -> None:
    third = fleet.hosts[2]
    third.pause()
    started = time.monotonic()
    result = play(fleet)
    assert time.monotonic() - started < 300
    assert result.rc != 0
    third.resume()
    assert [serving(host) for host in fleet.hosts] == [NEW, NEW, OLD, NEW]
    assert play(fleet).rc == 0
    assert releases_served(fleet) == [NEW] * 4


def test_a_host_that_freezes_in_its_switch_stops_the_next_batch(fleet: Lab) -> None:
    second = fleet.hosts[1]
    faults(second, NEW, start_seconds=5)
    before = pids(fleet)
    controller = start_play(
        second, ds4_release=NEW, ds4_rollout_batches=[1, 1, "100%"], engine_service_patience_seconds=10
    )
    until(lambda: has_step(second, "stop"), "the second host is being switched", 240)
    second.pause()
    started = time.monotonic()
    assert controller.wait(180) != 0
    assert time.monotonic() - started < 150, "nobody is blocked longer than a bounded time"
    second.resume()
    assert pids(fleet)[2:] == before[2:], "the next batch was not begun"
    until(lambda: bool(record(second)["outcome"]) and answers(second), "the host finishes or returns alone")
    assert record(second)["outcome"] in ("proven", "returned"), "its limits ran on while it was frozen"
    assert engines(second) == 1
    assert play(fleet).rc == 0
    assert releases_served(fleet) == [NEW] * 4


def test_an_interrupted_rollout_can_be_looked_at_and_gone_on_with(fleet: Lab) -> None:
    second = fleet.hosts[1]
    faults(second, NEW, start_seconds=4)
    before = pids(fleet)
    controller = start_play(second, ds4_release=NEW, ds4_rollout_batches=[1])
    until(lambda: has_step(second, "stop"), "the second host is being switched", 240)
    kill_play(second, controller, signal.SIGINT)
    until(lambda: bool(record(second)["outcome"]), "the host finishes alone")
    assert pids(fleet)[2:] == before[2:], "no further batch was begun"
    status = play(fleet, NEW, "status.yml")
    assert status.rc == 0, status.text
    assert f"spark1: {NEW} serves" in status.text
    assert f"spark4: {OLD} serves" in status.text
    assert play(fleet).rc == 0
    assert releases_served(fleet) == [NEW] * 4
    assert [engines(host) for host in fleet.hosts] == [1] * 4


def test_a_controller_that_is_killed_leaves_nobody_half_done(fleet: Lab) -> None:
    second = fleet.hosts[1]
    faults(second, NEW, start_seconds=4)
    before = pids(fleet)
    controller = start_play(second, ds4_release=NEW, ds4_rollout_batches=[1])
    until(lambda: has_step(second, "stop"), "the second host is being switched", 240)
    kill_play(second, controller)
    until(lambda: bool(record(second)["outcome"]), "the host finishes alone")
    assert (record(second)["outcome"], serving(second)) == ("proven", NEW)
    now = pids(fleet)
    assert now[2:] == before[2:], "no further batch was begun"
    again = play(fleet)
    assert again.rc == 0, again.text
    assert releases_served(fleet) == [NEW] * 4
    assert pids(fleet)[:2] == now[:2], "who was done is not touched again"


def test_short_memory_on_one_host_only_keeps_that_one_back(fleet: Lab) -> None:
    fleet.hosts[1].memory(base=45 * 1024 * 1024)
    before = pids(fleet)
    result = play(fleet)
    fleet.hosts[1].memory()
    assert result.rc != 0
    assert releases_served(fleet) == [NEW, OLD, NEW, NEW]
    assert pids(fleet)[1] == before[1]
    assert any("memory" in text for text in result.failed("spark2"))


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    """Variables that name both hooks, and what the hooks have written so far: ``before_stop spark1`` and so on."""
    log = tmp_path / "log"
    for name in ("before_stop", "after_proven"):
        (tmp_path / f"{name}.yml").write_text(
            f"- name: {name} | Tell the load balancer\n"
            f"  ansible.builtin.shell: echo {name} {{{{ inventory_hostname }}}} >>{log}\n"
            "  delegate_to: localhost\n  become: false\n"
            "  vars: {ansible_connection: local, ansible_python_interpreter: '{{ ansible_playbook_python }}'}\n",
            encoding="utf-8",
        )
    names: dict[str, Any] = {
        f"engine_service_{name}_tasks": str(tmp_path / f"{name}.yml") for name in ("before_stop", "after_proven")
    }
    return names, lambda: log.read_text(encoding="utf-8").splitlines()


def test_hooks_run_around_each_switch(fleet: Lab, hooks: Hooks) -> None:
    names, told = hooks
    result = play(fleet, ds4_rollout_batches=[1], **names)
    assert result.rc == 0, result.text
    assert told() == [f"{when} {name}" for name in NAMES for when in ("before_stop", "after_proven")]


def test_two_playbooks_of_one_command_have_each_their_own_rollout(fleet: Lab, hooks: Hooks) -> None:
    names, told = hooks
    variables = {**LIMITS, "ds4_release": NEW, "ds4_rollout_batches": ["100%"], **names}
    argv = [*harness.command(fleet, extra_vars=variables), "site.yml"]
    environment = {**os.environ, **harness.environment()}
    ran = subprocess.run(argv, cwd=system.REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PLAY [Switch in batches, canary first]") == 2
    assert releases_served(fleet) == [NEW] * 4
    assert sorted(told()) == sorted(f"{when} {name}" for name in NAMES for when in ("before_stop", "after_proven"))


def test_a_bad_host_takes_nothing_from_the_good_ones_of_its_batch(fleet: Lab, hooks: Hooks) -> None:
    names, told = hooks
    faults(fleet.hosts[1], NEW, exit_at_start=1)
    result = play(fleet, ds4_rollout_batches=[1, "100%"], **names)
    assert result.rc != 0
    assert releases_served(fleet) == [NEW, OLD, NEW, NEW]
    assert sorted(told()) == sorted(
        [f"before_stop {name}" for name in NAMES] + [f"after_proven {name}" for name in NAMES if name != "spark2"]
    )
    assert result.stats["failures"] == {"spark2": 1}
    assert "\nrolled back: spark2\n" in result.text
    assert result.text.rstrip().endswith("--limit spark2"), "the one command to go on"
    assert [row(result, name)[0] for name in NAMES] == ["changed", "failed", "changed", "changed"]
    assert row(result, "spark4") == ("changed", "done")
    for name in ("spark3", "spark4"):
        assert "removed" in result.task(name, "Remove deployments and builds beyond the last proven ones")


def test_a_share_of_a_batch_may_be_allowed_to_fail(fleet: Lab) -> None:
    faults(fleet.hosts[0], NEW, exit_at_start=1)
    result = play(fleet, ds4_rollout_batches=["50%", "100%"], ds4_max_fail_percentage=50)
    assert result.rc != 0, "a host failed"
    assert releases_served(fleet) == [OLD, NEW, NEW, NEW]


def test_a_rollback_rolls_over_who_is_there_and_can_go_back(fleet: Lab, hooks: Hooks, tmp_path: Path) -> None:
    names, told = hooks
    assert play(fleet).rc == 0
    fleet.hosts[0].power_off()
    fleet.hosts[2].run(f"rm -rf {build_dir(OLD)}")
    extra = tmp_path / "drained.yml"
    extra.write_text(json.dumps({"sparks": {"hosts": {"spark4": {"spark_drained": True}}}}), encoding="utf-8")
    before = [pid(host) for host in fleet.hosts[2:]]
    result = play(fleet, playbook="rollback.yml", arguments=["-i", str(extra)], **names)
    assert result.rc != 0
    assert [serving(host) for host in fleet.hosts[1:]] == [OLD, NEW, NEW]
    assert [pid(host) for host in fleet.hosts[2:]] == before
    assert "batch 1: spark2" in result.text
    assert any("nothing was stopped" in text for text in result.failed("spark3"))
    assert told() == ["before_stop spark2", "after_proven spark2"]
    assert result.text.rstrip().endswith("--limit spark1,spark3")


def test_a_rollback_that_goes_wrong_touches_nobody_else(fleet: Lab) -> None:
    assert play(fleet).rc == 0
    faults(fleet.hosts[0], OLD, garbage=True)
    before = pids(fleet)
    result = play(fleet, playbook="rollback.yml")
    assert result.rc != 0
    assert record(fleet.hosts[0])["outcome"] == "returned"
    assert record(fleet.hosts[0])["reason"] == "rollback"
    assert releases_served(fleet) == [NEW] * 4
    assert pids(fleet)[1:] == before[1:]


def test_a_busy_canary_is_left_alone_and_ends_the_rollout_with_a_failure(fleet: Lab, hooks: Hooks) -> None:
    names, told = hooks
    faults(fleet.hosts[0], OLD, speed=0.0005)  # the request outlasts staging on all hosts
    before = pids(fleet)
    request = long_request(fleet.hosts[0])
    until(lambda: inflight(fleet.hosts[0]), "a request is running", 20)
    result = play(fleet, engine_service_busy="skip", **names)
    request.kill()
    request.wait()
    assert result.rc != 0, "hosts were not attempted"
    assert "no canary was proven" in result.text
    assert pids(fleet) == before
    assert told() == ["before_stop spark1", "after_proven spark1"], "nobody stays out of the load balancer"
    assert row(result, "spark1") == ("skipped", "left alone: requests were running")
    assert row(result, "spark2")[1].startswith("not attempted: no canary was proven")
    assert "\nleft alone: spark1\nnot attempted: spark2, spark3, spark4\n" in result.text


def test_a_canary_group_goes_alone(fleet: Lab, tmp_path: Path) -> None:
    extra = tmp_path / "canary.yml"
    group = {"canaries": {"hosts": {"spark2": None}, "vars": {"ds4_release": NEW}}}
    extra.write_text(json.dumps(group), encoding="utf-8")
    variables = {**LIMITS}
    before = pids(fleet)
    result = harness.play(fleet, "site.yml", extra_vars=variables, arguments=["-i", str(extra)])
    assert result.rc == 0, result.text
    assert releases_served(fleet) == [OLD, NEW, OLD, OLD]
    assert [pids(fleet)[number] for number in (0, 2, 3)] == [before[number] for number in (0, 2, 3)]


def test_limit_and_an_unknown_host(fleet: Lab) -> None:
    before = pids(fleet)
    result = play(fleet, arguments=["--limit", "spark3"])
    assert result.rc == 0, result.text
    assert result.hosts >= {"spark3"}
    assert releases_served(fleet) == [OLD, OLD, NEW, OLD]
    assert [pids(fleet)[number] for number in (0, 1, 3)] == [before[number] for number in (0, 1, 3)]


def test_every_host_keeps_exactly_one_engine(fleet: Lab) -> None:
    hosts: list[Host] = fleet.hosts
    assert [engines(host) for host in hosts] == [1] * 4
