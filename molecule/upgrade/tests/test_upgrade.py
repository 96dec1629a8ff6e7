"""Upgrades by tag. The tests run in order: each begins where the one before ended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import harness
from lab.api import Host, Lab
from lab.engine.repository import Tag, add_release, git, move_tag
from lab.engine.serve import Server
from lab.served import answers, build_dir, engines, pid, record, serving, until


@pytest.fixture
def spark(lab: Lab) -> Host:
    return lab.hosts[0]


def upgrade(spark: Host, release: str, **extra: Any) -> harness.Result:
    result = harness.play(spark.lab, "site.yml", extra_vars={"ds4_release": release, **extra})
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
    assert not any(task.endswith("Have an intact build of the release") for task in result.changed("spark1"))


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


def test_a_secret_of_the_engine_is_seen_by_the_engine_alone(spark: Host) -> None:
    extra = {"ds4_release": "v0.6.4", "engine_service_extra_env": {"HUB_TOKEN": "hunter2"}}
    result = harness.play(spark.lab, "site.yml", extra_vars=extra, diff=True, arguments=["-v"])
    assert result.rc == 0, result.text
    assert "HUB_TOKEN=***" in result.text
    environment = spark.run(f"tr '\\0' '\\n' </proc/{pid(spark)}/environ").out.splitlines()
    assert "HUB_TOKEN=hunter2" in environment
    holders = spark.run("grep -rl hunter2 /opt/ds4 /var/lib/ds4/state /etc/systemd /usr/local", check=False).out.split()
    assert holders
    assert {spark.run(f"stat -c '%U:%G %a' {path}").out.strip() for path in holders} == {"root:ds4 640"}
    extra["engine_service_extra_env"] = {"HUB_TOKEN": "hunter3"}
    status = harness.play(spark.lab, "status.yml", extra_vars=extra, arguments=["-v"])
    assert "+HUB_TOKEN=*** (another one)" in status.text
    assert "hunter" not in result.text + status.text + spark.journal()


# ------------------------------------------------------------------------------------------- tags that are not what they were


def refused(spark: Host, release: str, **extra: Any) -> str:
    """A run that must fail before any stop; what it said of the host."""
    before, served = pid(spark), serving(spark)
    result = harness.play(spark.lab, "site.yml", extra_vars={"ds4_release": release, **extra})
    assert result.rc != 0, result.text
    assert (pid(spark), serving(spark)) == (before, served), "the old process never noticed"
    return " ".join(result.failed("spark1"))


@pytest.fixture
def repository(lab: Lab) -> str:
    return lab.engine.repository


def test_a_tag_that_moved_before_the_build_is_a_hard_stop_that_names_both_commits(spark: Host, repository: str) -> None:
    pinned = add_release(repository, "v0.6.7", Tag("0.6.7", "0731"))
    other = move_tag(repository, "v0.6.7", "v0.6.5")
    said = refused(spark, "v0.6.7", ds4_releases_extra={"v0.6.7": {"commit": pinned, "weights": "0731"}})
    assert pinned in said
    assert other in said
    assert not spark.exists(f"/opt/ds4/builds/v0.6.7-{other[:8]}")
    move_tag(repository, "v0.6.7", pinned)


def test_a_tag_that_moves_after_the_build_changes_nothing_and_is_told_when_asked(spark: Host, repository: str) -> None:
    pinned = git(repository, "rev-parse", "refs/tags/v0.6.7^{commit}")
    listed = {"v0.6.7": {"commit": pinned, "weights": "0731"}}
    upgrade(spark, "v0.6.7", ds4_releases_extra=listed)
    other = move_tag(repository, "v0.6.7", "v0.6.5")
    before = pid(spark)
    assert upgrade(spark, "v0.6.7", ds4_releases_extra=listed).changed("spark1") == []
    assert pid(spark) == before
    said = refused(spark, "v0.6.7", ds4_releases_extra=listed, cuda_build_check_tag_always=True)
    assert pinned in said
    assert other in said


def test_a_release_that_is_not_listed_is_recorded_and_held_to_what_it_was(spark: Host, repository: str) -> None:
    first = add_release(repository, "v0.6.8", Tag("0.6.8", "0731"))
    result = upgrade(spark, "v0.6.8")
    assert "is not pinned" in result.text
    assert first in result.text
    other = move_tag(repository, "v0.6.8", "v0.6.5")
    said = refused(spark, "v0.6.8", cuda_build_force=True)
    assert first in said
    assert other in said


def test_a_release_that_nobody_has_is_refused_with_what_there_is(spark: Host) -> None:
    assert "has no tag v0.6.55" in refused(spark, "v0.6.55")


def test_one_commit_under_two_tags_is_two_builds_and_a_switch(spark: Host, repository: str) -> None:
    commit = move_tag(repository, "v0.6.6.1", "v0.6.6")
    upgrade(spark, "v0.6.6")
    before = pid(spark)
    result = upgrade(spark, "v0.6.6.1", ds4_releases_extra={"v0.6.6.1": {"commit": commit, "weights": "0731"}})
    assert result.task("spark1", "Have an intact build of the release")["build"]["commit"] == commit
    assert record(spark)["outcome"] == "proven"
    assert pid(spark) != before
    assert spark.exists(build_dir("v0.6.6")), "the way back"


@pytest.fixture
def fork(lab: Lab, repository: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A second remote that gives the tag v0.6.9 to another commit than the first one does: its address and that commit."""
    add_release(repository, "v0.6.9", Tag("0.6.9", "0731"))
    other = tmp_path / "fork.git"
    shutil.copytree(repository, other)
    commit = add_release(other, "v0.6.9-fork", Tag("0.6.9", "0731", edits={"ds4_cuda.cu": (r"\A", "// a fork\n")}))
    move_tag(other, "v0.6.9", commit)
    with Server(other, address=lab.info["gateway"]) as server:
        yield server.url, commit


def test_one_tag_name_in_two_repositories_is_two_releases(spark: Host, repository: str, fork: tuple[str, str]) -> None:
    address, theirs = fork
    ours = git(repository, "rev-parse", "refs/tags/v0.6.9^{commit}")
    assert ours != theirs
    listed = {"v0.6.9": {"commit": ours, "weights": "0731"}}
    said = refused(spark, "v0.6.9", ds4_releases_extra=listed, cuda_build_repository=address)
    assert ours in said
    assert theirs in said
    upgrade(spark, "v0.6.9", ds4_releases_extra=listed)
    assert spark.run(f"git -C /opt/ds4/builds/v0.6.9-{ours[:8]} rev-parse HEAD").out.strip() == ours
    before = pid(spark)
    listed["v0.6.9"]["commit"] = theirs
    upgrade(spark, "v0.6.9", ds4_releases_extra=listed, cuda_build_repository=address)
    assert pid(spark) != before
    assert f"/opt/ds4/builds/v0.6.9-{theirs[:8]}/" in spark.run(f"readlink /proc/{pid(spark)}/exe").out
    assert spark.exists(f"/opt/ds4/builds/v0.6.9-{ours[:8]}/build.json"), "both lie side by side"
