"""A run killed at any moment converges on the next: one proven service, never two engines, no link to nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest

from lab import harness, system
from lab.api import Host

pytestmark = [pytest.mark.lab, pytest.mark.faults]

SEEDS = int(os.environ.get("FAULT_SEEDS", "2"))
LONGEST_SECONDS = 25.0  # a whole first run on a quiet machine


def engines(host: Host) -> int:
    """Processes that map the base weights."""
    return int(host.run("grep -l AProjQ8.*gguf /proc/[0-9]*/maps 2>/dev/null | wc -l").out)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_a_random_moment(spark: Host, seed: int) -> None:
    wait = random.Random(f"converge-{seed}").uniform(3.0, LONGEST_SECONDS)
    argv = harness.command(spark.lab, "site.yml")
    process = subprocess.Popen(
        argv,
        cwd=system.REPOSITORY,
        env={**os.environ, **harness.environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(wait)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    spark.lab.forget_connections(spark)
    assert engines(spark) <= 1

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
