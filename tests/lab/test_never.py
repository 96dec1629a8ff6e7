"""What the playbook must never do, proven around a whole first run and a second one with a token and an adopted file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lab import harness, system
from lab.api import Host
from lab.hub import weights as lab_weights

pytestmark = pytest.mark.lab

TOKEN = "hf_neverShowThisToken"
PASSED_ON = "/home/spark/gguf"
LOOK = {  # what must be the same afterwards: name → command
    "boot": "cat /proc/sys/kernel/random/boot_id",
    "firewall": "nft list ruleset",
    "addresses": "ip -o addr; ip route",
    "network units": "find /etc/systemd/network /etc/network /etc/netplan -type f 2>/dev/null | xargs -r sha256sum",
    "ssh": "find /etc/ssh -type f | xargs sha256sum; systemctl show ssh -p ExecMainStartTimestampMonotonic",
    "apt": "find /etc/apt -type f | xargs -r sha256sum",
    "kernel": "uname -a; ls -la /boot",
    "bystander": "systemctl show bystander -p ExecMainPID -p ExecMainStartTimestampMonotonic",
    "engine's namesake": "systemctl show namesake -p MainPID -p ActiveState",
    "files of the operator": f"find {PASSED_ON} /home/spark/keep -type f -printf '%p %i %u %g %m %s %T@\\n' | sort",
    "their content": f"find {PASSED_ON} /home/spark/keep -type f | sort | xargs sha256sum",
    "default target": "systemctl get-default",
}


def look(host: Host) -> dict[str, str]:
    return {name: host.run(command).out for name, command in LOOK.items()}


def packages(host: Host) -> dict[str, str]:
    listing = host.run("dpkg-query -W -f '${Package}\\t${Version}\\n'").out
    return dict(line.split("\t") for line in listing.splitlines())


def prepare(host: Host) -> None:
    """An operator's files, a service that a restart tool would like to restart, and a process that is named like ours."""
    base = next(file for file in lab_weights.manifest()["0731"].items() if file[0] == "base")[1]
    host.run(f"install -d -o spark -g spark {PASSED_ON} /home/spark/keep")
    host.run(f"curl -sSfL -o {PASSED_ON}/{base['file']} {address(host, base)} && chown spark: {PASSED_ON}/*")
    host.put("/home/spark/keep/other.gguf", "GGUF of somebody else")
    host.put(
        "/etc/systemd/system/bystander.service",
        "[Service]\nExecStart=/usr/bin/python3 -c 'import time; time.sleep(100000)'\n",
    )
    host.run("systemctl daemon-reload && systemctl start bystander")
    # Only its name is the engine's: no port, no lock, no weights.
    host.run("cp /bin/sleep /home/spark/keep/ds4-server-sleep && chown spark: /home/spark/keep/*")
    host.run(
        "systemd-run -q --unit=namesake /bin/bash -c 'exec -a ds4-server /home/spark/keep/ds4-server-sleep 100000'"
    )


def address(host: Host, file: dict[str, Any]) -> str:
    return f"{host.lab.hub.url}/{file['repo']}/resolve/{file['revision']}/{file['file']}"


class Watch(threading.Thread):
    """Command lines of the host's processes while the playbook runs."""

    def __init__(self, host: Host) -> None:
        super().__init__(daemon=True)
        self.host, self.seen, self.ended = host, set[str](), threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            self.seen.update(
                self.host.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '", check=False).out.split("\n")
            )
            time.sleep(0.5)


def test_never(sparks: Callable[..., list[Host]]) -> None:
    spark = sparks(1, without=["make"])[0]
    prepare(spark)
    spark.lab.hub.options(token=TOKEN)
    spark.run(f"umask 077; printf %s {TOKEN} >/root/hub-token")
    before, installed = look(spark), packages(spark)
    watch = Watch(spark)
    watch.start()
    variables = {"weights_adopt_paths": [PASSED_ON], "weights_token_file": "/root/hub-token", "cuda_build_jobs": 2}
    stopped = harness.play(spark.lab, "site.yml", extra_vars=variables)
    assert stopped.rc != 0 and "that this playbook did not start" in stopped.text, stopped.text
    assert look(spark)["engine's namesake"] == before["engine's namesake"]
    spark.run("systemctl stop namesake")  # only its owner ends it
    before["engine's namesake"] = look(spark)["engine's namesake"]
    argv = harness.command(spark.lab, "site.yml", extra_vars=variables, diff=True, arguments=["-vvv"])
    environment = {**os.environ, **harness.environment()}
    first = subprocess.run(argv, cwd=system.REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    again = harness.play(spark.lab, "site.yml", extra_vars=variables)
    watch.ended.set()
    watch.join()
    assert first.returncode == 0, (first.stdout + first.stderr)[-6000:]
    assert again.rc == 0 and again.changed(spark.name) == [], again.text

    after, present = look(spark), packages(spark)
    assert {name: after[name] for name in LOOK} == before
    assert {name: present[name] for name in installed} == installed, "a package that was there was changed"
    assert "make" in present, "the missing package was not installed"

    # The token reached the hub and nothing else: no output, no argument, no log, no file of ours.
    stats = spark.lab.hub.stats()
    assert stats["tokens"]["cdn"] == 0 and sum(stats["tokens"].values()) > 0, json.dumps(stats["tokens"])
    said = first.stdout + first.stderr + again.text + "\n".join(watch.seen)
    said += spark.run("journalctl --no-pager -o cat").out
    said += spark.run(
        "grep -rIl --exclude-dir=weights hf_neverShow /opt/ds4 /var/lib/ds4 /etc /run/systemd /tmp 2>/dev/null",
        check=False,
    ).out
    assert TOKEN not in said and "hf_neverShow" not in said


def test_kept_conversations_survive_a_new_deployment(spark: Host) -> None:
    first = harness.play(spark.lab, "site.yml")
    assert first.rc == 0, first.text
    folder = spark.run("find /var/lib/ds4/kv -mindepth 1 -maxdepth 1 -type d").out.split()[0]
    name = hashlib.sha1(b"conversation", usedforsecurity=False).hexdigest() + ".kv"
    spark.run(f"printf 'a conversation' >{folder}/{name} && chown ds4: {folder}/{name}")
    second = harness.play(spark.lab, "site.yml", extra_vars={"engine_service_settings": {"context_tokens": 262144}})
    assert second.rc == 0, second.text
    assert spark.read(f"{folder}/{name}") == "a conversation"
