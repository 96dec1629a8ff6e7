"""host_base and cuda_build on a simulated Spark: what only a real host with systemd, apt and accounts can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from typing import Any

import pytest

from lab import harness, system
from lab.api import Host
from lab.engine import releases
from lab.engine.repository import Tag, add_release

pytestmark = pytest.mark.lab

PLAYBOOK = "tests/lab/playbooks/build.yml"
TAG = "v0.6.5"
BUILD = f"/opt/ds4/builds/{TAG}-{releases()[TAG]['commit'][:8]}"
TASK = "Have an intact build of the release"
UNIT = "ds4-build.service"


def play(host: Host, *, check: bool = False, **extra_vars: Any) -> harness.Result:
    return harness.play(host.lab, PLAYBOOK, extra_vars=extra_vars, check=check, touches=[host.name])


def slow_release(host: Host, tag: str, seconds: int) -> dict[str, Any]:
    """A release whose compilation takes long; variables that choose it."""
    edit = (r"\tcd standin", f"\tsleep {seconds}; cd standin")
    commit = add_release(host.lab.engine.repository, tag, Tag("0.6.7", "0731", edits={"Makefile": edit}))
    return {"ds4_release": tag, "ds4_commit": commit}


def interrupted(host: Host, variables: dict[str, Any]) -> None:
    """Start the playbook and kill it, and its connections, while the compiler runs."""
    argv = harness.command(host.lab, PLAYBOOK, extra_vars=variables)
    process = subprocess.Popen(
        argv, cwd=system.REPOSITORY, env=harness.environment(), stdout=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 60
    while "compiling" not in host.journal(UNIT):
        assert time.monotonic() < until, "the build did not start"
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    host.lab.forget_connections(host)


def test_preview_build_and_nothing_to_do(spark: Host) -> None:
    preview = play(spark, check=True)
    assert preview.rc == 0, preview.text
    assert preview.task("spark1", TASK)["build"]["path"] == BUILD
    assert not spark.exists("/opt/ds4")
    assert spark.run(["id", "ds4"], check=False).rc == 1

    first = play(spark)
    assert first.rc == 0, first.text
    record = json.loads(spark.read(f"{BUILD}/build.json"))
    assert record == first.task("spark1", TASK)["build"]
    assert record["sass"] == ["sm_121a"]
    assert "ds4-fleet service account" in spark.run(["getent", "passwd", "ds4"]).out
    not_ours = spark.run(["find", BUILD, "(", "!", "-user", "root", "-o", "-perm", "/022", ")", "!", "-type", "l"]).out
    assert not_ours == ""
    owners = spark.run(["stat", "-c", "%U %a", "/var/lib/ds4/kv", "/var/lib/ds4/weights", "/opt/ds4/builds"]).out.split(
        "\n"
    )
    assert owners[:3] == ["ds4 700", "ds4 755", "root 755"]
    version = spark.run([f"{BUILD}/ds4-server", "--version"], user="ds4").out
    assert version == f"ds4-server {TAG}\n"

    # Nothing to do: nothing changes, and the git server is not needed.
    second = play(spark, cuda_build_repository="http://127.0.0.1:9/gone.git")
    assert (second.rc, second.changed("spark1")) == (0, []), second.text

    # And all of it can go again.
    gone = harness.play(spark.lab, "tests/lab/playbooks/absent.yml", touches=["spark1"])
    assert gone.rc == 0, gone.text
    assert not spark.exists("/opt/ds4")
    assert not spark.exists("/var/lib/ds4")
    assert spark.run(["getent", "passwd", "ds4"], check=False).rc == 2
    assert spark.run(["getent", "group", "ds4"], check=False).rc == 2


def test_a_long_build_is_followed_over_a_cut_link(spark: Host) -> None:
    """The play shows the steps, survives minutes of silence, and reports what happened as one task."""
    variables = slow_release(spark, "v0.6.7", 40)
    cut = threading.Timer(30, spark.link_down)
    mend = threading.Timer(45, spark.link_up)
    cut.start()
    mend.start()
    try:
        result = play(spark, **variables)
    finally:
        cut.join()
        mend.join()
    assert result.rc == 0, result.text
    assert "spark1: build: compiling with" in result.text
    answer = result.task("spark1", TASK)
    assert (answer["changed"], answer["build"]["release"], answer["ds4_summary"]["state"]) == (
        True,
        "v0.6.7",
        "changed",
    )
    assert spark.journal(UNIT).count("ds4-build: published") == 1


def test_a_killed_controller_costs_nothing(spark: Host) -> None:
    variables = slow_release(spark, "v0.6.7", 8)
    interrupted(spark, variables)
    again = play(spark, **variables)
    assert again.rc == 0, again.text
    journal = spark.journal(UNIT)
    assert journal.count("ds4-build: compiling") == 1
    assert journal.count("ds4-build: published") == 1


def test_a_killed_build_is_told_and_made_again(spark: Host) -> None:
    variables = slow_release(spark, "v0.6.7", 8)
    interrupted(spark, variables)
    spark.run(["systemctl", "kill", "--signal=KILL", UNIT])
    assert ".work-" in spark.run(["ls", "-A", "/opt/ds4/builds"]).out
    again = play(spark, **variables)
    assert again.rc == 0, again.text
    assert spark.journal(UNIT).count("ds4-build: published") == 1
    assert ".work-" not in spark.run(["ls", "-A", "/opt/ds4/builds"]).out


def test_a_release_that_does_not_compile(spark: Host) -> None:
    result = play(spark, ds4_release="bad-compile")
    assert result.rc == 2
    (message,) = result.failed("spark1")
    for words in ("bad-compile", "undeclared_factor", "exit code 2", "ds4_release"):
        assert words in message
    assert spark.run(["ls", "-A", "/opt/ds4/builds"]).out.split() == [".ds4-fleet", ".lock"]
    log = result.task("spark1", TASK)["error"]["evidence"]["log"]
    assert "undeclared_factor" in spark.read(log)
    assert "cuda_build" in result.text
    assert "failed" in result.text


def test_what_is_not_ours_stays(spark: Host) -> None:
    spark.run(["useradd", "--comment", "Dora", "ds4"])
    spark.run(["mkdir", "-p", "/opt/ds4"])
    spark.put("/opt/ds4/notes.txt", "mine")
    result = harness.play(
        spark.lab, PLAYBOOK, extra_vars={"host_verify_users": [], "host_verify_directories": []}, touches=["spark1"]
    )
    assert result.rc == 2
    (message,) = result.failed("spark1")
    for words in ("user ds4", "'Dora'", "/opt/ds4 was not made by ds4-fleet", "notes.txt", "ds4_user", "ds4_root"):
        assert words in message
    assert spark.run(["ls", "-A", "/opt/ds4"]).out.split() == ["notes.txt"]
    assert not spark.exists("/var/lib/ds4")


def test_missing_packages_and_nothing_else(spark: Host) -> None:
    spark.run(["dpkg", "--remove", "--force-depends", "make"])
    before = spark.run(["dpkg-query", "--show"]).out
    preview = play(spark, check=True)
    assert preview.rc == 0, preview.text
    assert "Would install make." in preview.text
    assert spark.run(["dpkg-query", "--show"]).out == before
    result = play(spark)
    assert result.rc == 0, result.text
    lines = set(spark.run(["dpkg-query", "--show"]).out.splitlines()) ^ set(before.splitlines())
    assert {line.split("\t")[0] for line in lines} == {"make"}
    assert spark.exists(BUILD)


def test_a_busy_package_manager_is_named(spark: Host) -> None:
    spark.run(["dpkg", "--remove", "--force-depends", "make"])
    code = "import fcntl,time; f=open('/var/lib/dpkg/lock-frontend','w'); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(60)"
    spark.run(["systemd-run", "--quiet", "--unit=holder", "python3", "-c", code])
    time.sleep(1)
    result = play(spark, host_base_apt_lock_timeout_seconds=1)
    assert result.rc == 2
    message = result.failed("spark1")[-1]
    pid = spark.run(["systemctl", "show", "--property=MainPID", "--value", "holder"]).out.strip()
    for words in ("could not be installed on spark1", f"process {pid}", "host_base_apt_lock_timeout_seconds"):
        assert words in message
