"""Weights on a simulated Spark: what only a real host with systemd, accounts, disks and a link can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lab import harness, system
from lab.api import Host
from lab.hub import weights

pytestmark = pytest.mark.lab

PLAYBOOK = "tests/lab/playbooks/weights.yml"
UNIT = "ds4-fetch.service"
DIRECTORY = "/var/lib/ds4/weights"
START, FOLLOW = "Compare, plan, and start what is missing", "Follow the fetch to its end"
MIB = 1024 * 1024
NEW, LEGACY = weights.manifest()["0731"], weights.manifest()["legacy"]
SIZE = sum(entry["bytes"] for entry in NEW.values())
# Patience that suits a test, and a margin that suits its disks.
QUICK = {
    "weights_backoff_seconds": 0.1,
    "weights_backoff_limit_seconds": 1,
    "weights_progress_seconds": 2,
    "weights_space_margin_gib": 0.01,
}


def play(host: Host, *, check: bool = False, tags: str = "", **extra_vars: Any) -> harness.Result:
    return harness.play(
        host.lab, PLAYBOOK, extra_vars={**QUICK, **extra_vars}, check=check, tags=tags, touches=[host.name]
    )


def path(entry: dict[str, Any]) -> str:
    return f"{DIRECTORY}/{entry['file']}"


def require(host: Host, files: dict[str, dict[str, Any]]) -> None:
    """Every file is there, right, and the service user's."""
    for entry in files.values():
        assert host.run(["sha256sum", path(entry)]).out.split()[0] == entry["sha256"]
        assert host.run(["runuser", "-u", "ds4", "--", "head", "-c", "4", path(entry)]).out == "GGUF"


def wire(host: Host) -> int:
    return int(host.lab.hub.stats()["bytes"]["cdn"])


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def lay(host: Host, folder: str, file: weights.LabFile, name: str = "", mode: str = "0644") -> str:
    """Put a lab file on the host as an operator's own, and say where."""
    target = f"{folder}/{name or file.file}"
    host.run(["mkdir", "-p", folder])
    size = weights.DEFAULT_SIZES.get(file.role, MIB)
    weights.write_file(file, size, host.path(target))
    host.run(["chown", "-R", "spark:", folder])
    host.run(["chmod", mode, target])
    return target


def lab_file(generation: str, role: str) -> weights.LabFile:
    return next(file for file in weights.FILES if (file.generation, file.role) == (generation, role))


def identity(host: Host, target: str) -> str:
    return host.run(["stat", "-c", "%i %U %G %a %Y %s", target]).out


def start_in_background(host: Host, **extra_vars: Any) -> subprocess.Popen[str]:
    argv = harness.command(host.lab, PLAYBOOK, extra_vars={**QUICK, **extra_vars})
    return subprocess.Popen(
        argv,
        cwd=system.REPOSITORY,
        env=harness.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def running(host: Host) -> bool:
    return host.run(["systemctl", "is-active", UNIT], check=False).out.strip() == "active"


def test_preview_fetch_second_look_and_removal(spark: Host) -> None:
    preview = play(spark, check=True)
    assert preview.rc == 0, preview.text
    planned = preview.task("spark1", START)
    assert planned["state"] == "planned"
    assert f"would fetch 30.0 MiB ({SIZE} bytes) from {spark.lab.info['gateway']}" in planned["msg"]
    assert not spark.exists("/var/lib/ds4") and not spark.exists("/usr/local/bin/ds4-fetch")
    assert wire(spark) == 0

    first = play(spark)
    assert first.rc == 0, first.text
    result = first.task("spark1", FOLLOW)["weights"]
    assert result["files"] == {
        role: {"path": path(entry), "sha256": entry["sha256"], "bytes": entry["bytes"]} for role, entry in NEW.items()
    }
    assert result["bytes_fetched"] == SIZE == wire(spark)
    require(spark, NEW)
    assert spark.run(["find", DIRECTORY, "-name", "*.gguf*", "!", "-user", "ds4"]).out == ""
    assert spark.run(f"ls -A {DIRECTORY}").out.split().count(".fetch") == 1
    assert ".part" not in spark.run(f"ls -A {DIRECTORY}").out

    pid_blocks = spark.run(
        ["sh", "-c", f"echo 3 >/proc/sys/vm/drop_caches; cat {DIRECTORY}/*.record.json | wc -c"], check=False
    )
    assert int(pid_blocks.out or 0) < MIB
    begun = time.time()
    second = play(spark)
    assert second.rc == 0 and second.changed("spark1") == [], second.text
    executions = [name for name in spark.module_executions(begun) if "weights" in name]
    assert executions == ["ds4_weights"]
    assert second.task("spark1", FOLLOW)["ds4_summary"]["text"] == "0731: base + drafter verified, nothing to fetch"
    assert wire(spark) == SIZE

    assert "good" in spark.run(["ds4-fetch", "verify", "--deep"]).out
    assert json.loads(spark.run(["ds4-fetch", "status", "--json"]).out)["state"] == "done"
    assert (
        spark.run(["systemd-analyze", "verify", "--recursive-errors=no", f"/etc/systemd/system/{UNIT}"], check=False).rc
        == 0
    )
    exposure = spark.run(["systemd-analyze", "security", "--no-pager", UNIT]).out
    assert float(exposure.split("level for")[1].split(":")[1].split()[0]) < 3, exposure[-200:]

    spark.put(f"{DIRECTORY}/mine.gguf", "GGUF of somebody")
    gone = play(spark, tags="absent", weights_absent_files=True)
    assert gone.rc == 0, gone.text
    assert spark.run(f"ls -A {DIRECTORY}").out.split() == [".ds4-fleet", "mine.gguf"]
    assert not spark.exists("/usr/local/bin/ds4-fetch") and not spark.exists(f"/etc/systemd/system/{UNIT}")


def test_adoption_shares_and_alters_nothing(spark: Host) -> None:
    home = "/home/spark/gguf"
    base = lay(spark, home, lab_file("0731", "base"))
    drafter = lay(spark, home, lab_file("0731", "drafter"), mode="0600")
    legacy = lay(spark, "/srv/models", lab_file("legacy", "base"), name="base.gguf")
    other = lay(spark, home, weights.FOREIGN)
    before = {name: identity(spark, name) for name in (base, drafter, legacy, other)}
    paths = [home, "/srv/models", "/nowhere"]

    preview = play(spark, check=True, weights_adopt_paths=paths)
    assert "would adopt base from /home/spark/gguf" in preview.task("spark1", START)["msg"]
    first = play(spark, weights_adopt_paths=paths)
    assert first.rc == 0, first.text
    require(spark, NEW)
    assert wire(spark) == 0
    assert {name: identity(spark, name) for name in before} == before
    adopted = {one["role"]: one for one in first.task("spark1", FOLLOW)["weights"]["adopted"]}
    assert (adopted["base"]["how"], adopted["base"]["path"]) == ("linked", base)
    assert adopted["drafter"]["how"] in ("copied", "reflinked"), "its owner alone may read it"
    same = spark.run(["stat", "-c", "%i %h", base, path(NEW["base"])]).out.split()
    assert same[0] == same[2] and same[1] == "2"

    second = play(spark, weights_adopt_paths=paths)
    assert second.changed("spark1") == [], second.text

    # Its owner closes it: the engine could not read it any more, so it gets a copy of its own.
    spark.run(["chmod", "600", base])
    closed = play(spark, weights_adopt_paths=paths)
    assert closed.rc == 0, closed.text
    require(spark, NEW)
    assert wire(spark) == 0
    assert spark.run(["stat", "-c", "%U %a %h", base]).out.split() == ["spark", "600", "1"]

    # And one that its owner writes to is noticed without reading it.
    spark.run(["sh", "-c", f"printf x >>{path(NEW['drafter'])}"])
    refused = spark.run(["ds4-fetch", "verify"], check=False)
    assert refused.rc == 2 and "changed since it was verified" in refused.out


def test_another_generation_is_found_by_hash_not_by_name(spark: Host) -> None:
    lay(spark, "/srv/models", lab_file("legacy", "base"), name=NEW["base"]["file"])
    first = play(spark, weights_adopt_paths=["/srv/models"])
    assert first.rc == 0, first.text
    require(spark, NEW)
    assert wire(spark) == SIZE
    notes = "\n".join(first.task("spark1", FOLLOW)["status"]["notes"])
    assert "which is legacy base" in spark.journal(UNIT) + notes

    # The same under our own final name, as a disk restored from elsewhere would have it.
    weights.write_file(lab_file("legacy", "base"), NEW["base"]["bytes"], spark.path(path(NEW["base"]) + ".x"))
    spark.run(["mv", path(NEW["base"]) + ".x", path(NEW["base"])])
    repaired = play(spark)
    assert repaired.rc == 0, repaired.text
    require(spark, NEW)
    assert "has another content" in spark.journal(UNIT)


def test_killed_controller_lost_link_and_reboot(spark: Host) -> None:
    spark.lab.hub.options(total_rate=2 * MIB)
    controller = start_in_background(spark)
    until(lambda: wire(spark) > 4 * MIB, "bytes on the wire", 60)
    os.killpg(controller.pid, signal.SIGKILL)
    controller.wait()
    spark.lab.forget_connections(spark)
    begun = wire(spark)
    until(lambda: wire(spark) > begun + 2 * MIB, "it goes on without a controller")

    spark.reboot()
    begun = wire(spark)
    until(lambda: running(spark) and wire(spark) > begun, "the unit resumes by itself")

    spark.lab.hub.options(total_rate=256 * 1024)
    # A second start attaches, shows progress, and survives a link that is down for a while.
    attaching = start_in_background(spark, weights_unreachable_seconds=120)
    assert attaching.stdout is not None
    text = ""
    for line in attaching.stdout:
        text += line
        if line.startswith("[spark1] "):
            break
    spark.link_down()
    threading.Timer(30, spark.link_up).start()
    threading.Timer(35, spark.lab.hub.options, kwargs={"total_rate": 0}).start()
    text += attaching.communicate(timeout=180)[0]
    assert attaching.returncode == 0, text
    assert "out of reach for" in text, text
    require(spark, NEW)
    assert "[spark1] " in text and "MiB/s  eta" in text, text
    assert wire(spark) <= 1.2 * SIZE
    assert running(spark) is False
    assert play(spark).changed("spark1") == []
    spark.reboot()
    assert "skipped" in spark.journal(UNIT) or not running(spark)


def test_no_progress_lines_when_quiet(spark: Host) -> None:
    spark.lab.hub.options(total_rate=4 * MIB)
    process = start_in_background(spark, weights_quiet=True, weights_progress_seconds=1)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "[spark1] base" not in text, text


def test_small_disk_and_another_one(spark: Host) -> None:
    spark.run(["mkdir", "-p", "/srv/small"])
    spark.mount_small_disk("/srv/small", 40)
    variables: dict[str, Any] = {"weights_directory": "/srv/small/weights", "weights_space_margin_gib": 0.02}
    refused = play(spark, **variables)
    assert refused.rc != 0
    (message,) = refused.failed("spark1")
    assert "There is not enough room on disk" in message
    assert "/srv/small: 30.0 MiB needed (base 24.0 MiB, drafter 6.0 MiB) + 20.5 MiB margin" in message
    assert "more on /srv/small" in message
    assert wire(spark) == 0

    enough = play(spark, **{**variables, "weights_space_margin_gib": 0.0})
    assert enough.rc == 0, enough.text
    spark.run(["umount", "/srv/small"])
    absent = play(spark, **{**variables, "weights_space_margin_gib": 0.0})
    assert absent.rc != 0
    assert "The disk that holds /srv/small/weights is not mounted" in absent.failed("spark1")[0]
    assert wire(spark) == SIZE


def test_token_and_what_a_refusal_says(spark: Host) -> None:
    spark.lab.hub.options(token="hf_lab_secret_token")
    refused = play(spark)
    assert refused.rc != 0
    assert "weights_token_file" in refused.failed("spark1")[0]
    assert "401" in refused.failed("spark1")[0]

    spark.put("/etc/ds4-token", "hf_lab_secret_token\n", 0o644)
    open_file = play(spark, weights_token_file="/etc/ds4-token")
    assert "chmod 600 /etc/ds4-token" in open_file.failed("spark1")[0]

    spark.run(["chmod", "600", "/etc/ds4-token"])
    done = harness.play(
        spark.lab, PLAYBOOK, extra_vars={**QUICK, "weights_token_file": "/etc/ds4-token"}, arguments=["-vvv", "--diff"]
    )
    assert done.rc == 0, done.text
    require(spark, NEW)
    everywhere = (
        done.text
        + spark.journal()
        + spark.run(["sh", "-c", "cat /var/lib/ds4/state/weights/* /etc/systemd/system/ds4-*"]).out
    )
    assert "hf_lab_secret_token" not in everywhere
    assert spark.lab.hub.stats()["tokens"]["cdn"] == 0


def test_a_missing_file_is_a_failure_and_never_plain(spark: Host) -> None:
    spark.lab.hub.faults({"fault": "status", "status": 404, "at": "hub", "file": "DSpark", "count": -1})
    refused = play(spark)
    assert refused.rc != 0
    (message,) = refused.failed("spark1")
    assert "drafter" in message and "404" in message and "ds4_weights" in message
    plain = play(spark, weights_drafter=False)
    assert plain.rc == 0, plain.text
    assert set(plain.task("spark1", FOLLOW)["weights"]["files"]) == {"base"}


def test_only_what_is_there_and_an_offline_directory(spark: Host) -> None:
    refused = play(spark, weights_fetch=False)
    assert refused.rc != 0 and "weights_fetch is false" in refused.failed("spark1")[0]
    for role in NEW:
        lay(spark, "/media/usb", lab_file("0731", role))
    done = play(spark, weights_sources=["/media/usb"], weights_adopt_running=False)
    assert done.rc == 0, done.text
    require(spark, NEW)
    assert wire(spark) == 0
    assert play(spark, weights_fetch=False, weights_sources=["/media/usb"]).rc == 0
