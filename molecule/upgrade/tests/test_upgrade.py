"""Upgrades by tag. The tests run in order: each begins where the one before ended."""

from __future__ import annotations

import json

import pytest

from lab import harness
from lab.api import Host, Lab
from lab.served import answers, build_dir, engines, pid, record, serving, until


@pytest.fixture
def spark(lab: Lab) -> Host:
    return lab.hosts[0]


def upgrade(spark: Host, release: str) -> harness.Result:
    result = harness.play(spark.lab, "site.yml", extra_vars={"ds4_release": release})
    assert result.rc == 0, result.text
    assert serving(spark) == release
    assert engines(spark) == 1
    return result


def conversations(spark: Host) -> set[str]:
    return set(spark.run("find /var/lib/ds4/kv -name '*.kv'").out.split())


def test_it_begins_at_the_release_of_the_inventory(spark: Host) -> None:
    until(lambda: answers(spark), "the service answers", 90)
    assert serving(spark) == "v0.6.4"


def test_up_by_one_line_keeps_conversations_and_tells_the_downtime(spark: Host) -> None:
    question = {
        "model": "deepseek-v4-flash",
        "messages": [{"role": "user", "content": "once upon a time " * 300}],
        "max_tokens": 8,
    }
    spark.run(["curl", "-sf", "-d", json.dumps(question), "http://127.0.0.1:8000/v1/chat/completions"])
    result = upgrade(spark, "v0.6.5")
    kept = conversations(spark)
    assert kept
    assert record(spark)["downtime_seconds"] > 0
    assert "down " in result.text
    assert json.loads(spark.run(f"cat {build_dir('v0.6.5')}/build.json").out)["release"] == "v0.6.5"
    assert upgrade(spark, "v0.6.6").changed("spark1")
    assert kept <= conversations(spark), "a conversation outlives an upgrade of its generation"


def test_back_by_one_line_builds_nothing(spark: Host) -> None:
    result = upgrade(spark, "v0.6.5")
    assert not result.task("spark1", "Have an intact build of the release")["changed"]


def test_nothing_to_do_restarts_nothing(spark: Host) -> None:
    before = pid(spark)
    result = upgrade(spark, "v0.6.5")
    assert result.changed("spark1") == []
    assert pid(spark) == before


def test_another_generation_brings_its_own_weights_and_conversations(spark: Host) -> None:
    before = conversations(spark)
    upgrade(spark, "v0.6.3")
    command = spark.run(f"tr '\\0' '\\n' </proc/{pid(spark)}/cmdline").out
    assert "imatrix.gguf" in command
    assert "0731" not in command
    assert before <= conversations(spark)
    folder = next(word for word in command.split() if word.startswith("/var/lib/ds4/kv/"))
    assert not any(path.startswith(folder + "/") for path in before), "a generation never reads another one's"


def test_rollback_over_the_generation_is_one_command(spark: Host) -> None:
    result = harness.play(spark.lab, "rollback.yml")
    assert result.rc == 0, result.text
    assert serving(spark) == "v0.6.5"
    assert "0731" in spark.run(f"tr '\\0' '\\n' </proc/{pid(spark)}/cmdline").out


def test_rollback_is_refused_before_any_stop_when_its_weights_are_gone(spark: Host) -> None:
    spark.run("rm -f /var/lib/ds4/weights/*imatrix.gguf")
    before = pid(spark)
    legacy = next(entry["id"] for entry in history(spark) if entry["release"] == "v0.6.3")
    result = harness.play(spark.lab, "rollback.yml", extra_vars={"deployment": legacy})
    assert result.rc != 0
    assert any("nothing was stopped" in text for text in result.failed("spark1"))
    assert pid(spark) == before


def history(spark: Host) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(spark.read("/var/lib/ds4/state/deployments.json"))["proven"]
    return found


def test_only_the_last_three_proven_stay(spark: Host) -> None:
    upgrade(spark, "v0.6.6")
    upgrade(spark, "v0.6.4")  # where the scenario began
    assert len(history(spark)) <= 3
    assert len(spark.run("ls /opt/ds4/builds").out.split()) <= 3
