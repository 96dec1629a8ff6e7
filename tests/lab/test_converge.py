"""A run killed at any moment converges on the next: one proven service, never two engines, no link to nothing."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from lab import harness
from lab.api import Host
from lab.served import answers, kill_play, start_play, until

pytestmark = [pytest.mark.lab, pytest.mark.faults]

SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
LONGEST_SECONDS = 25.0  # a whole first run on a quiet machine


def engines(host: Host) -> int:
    """Processes that map the base weights."""
    return int(host.run("grep -l AProjQ8.*gguf /proc/[0-9]*/maps 2>/dev/null | wc -l").out)


def proven(host: Host) -> bool:
    """Whether a deployment was ever proven there."""
    path = "/var/lib/ds4/state/deployments.json"
    return host.exists(path) and bool(json.loads(host.read(path))["proven"])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_a_random_moment(spark: Host, seed: int) -> None:
    wait = random.Random(f"converge-{seed}").uniform(3.0, LONGEST_SECONDS)
    controller = start_play(spark)
    time.sleep(wait)
    kill_play(spark, controller)
    time.sleep(3)  # a module that had just come to the host may still begin a switch
    assert engines(spark) <= 1
    until(
        lambda: not spark.exists("/var/lib/ds4/state/transactions/open"), "what the host began it ends by itself", 180
    )
    assert engines(spark) == proven(spark), "what was proven runs, nothing else does"
    assert answers(spark) == proven(spark)
    link = spark.run("readlink -m /opt/ds4/current").out.strip()
    assert link == "/opt/ds4/current" or spark.exists(f"{link}/manifest.json"), "no link to nothing"

    second = harness.play(spark.lab, "site.yml", touches=[spark.name])
    assert second.rc == 0, f"killed after {wait:.1f} s:\n{second.text}"
    assert engines(spark) == 1
    assert spark.run("systemctl is-active ds4").out.strip() == "active"
    assert spark.run("readlink -e /opt/ds4/current").out.strip().startswith("/opt/ds4/deployments/")
    answer = spark.run(
        "curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "deepseek-v4-flash", "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}\''
    )
    assert "Paris" in answer.out

    third = harness.play(spark.lab, "site.yml", touches=[spark.name])
    assert third.rc == 0 and third.changed(spark.name) == [], third.text
