from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tools import bump

ROOT = Path(__file__).resolve().parents[2]

PIN = (ROOT / "group_vars/all/release.yml").read_text(encoding="utf-8")
COMMIT = "a" * 40


def git(cwd: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "tag.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", ".")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    git(tmp_path, "tag", "v1")
    git(tmp_path, "tag", "-a", "-m", "two", "v2")
    return tmp_path


def test_light_and_annotated_tags_resolve_to_the_commit(remote: Path) -> None:
    head = git(remote, "rev-parse", "HEAD")
    assert bump.resolve(str(remote), "v1") == head == bump.resolve(str(remote), "v2")


def test_a_missing_tag_and_a_silent_remote_are_named(remote: Path) -> None:
    with pytest.raises(ValueError, match="has no tag v3"):
        bump.resolve(str(remote), "v3")
    with pytest.raises(ValueError, match="did not answer"):
        bump.resolve(str(remote / "nothing"), "v1")


def test_a_new_release_is_added_and_pinned_and_nothing_else_changes() -> None:
    text, said = bump.edit(PIN, "v0.6.6", COMMIT)
    before, after = yaml.safe_load(PIN), yaml.safe_load(text)
    assert after["ds4_release"] == "v0.6.6"
    assert after["ds4_releases"].pop("v0.6.6") == {"commit": COMMIT, "weights": "0731"}
    after["ds4_release"] = before["ds4_release"]
    assert after == before
    assert len(said) == 2
    assert [line for line in PIN.splitlines() if line not in text.splitlines()] == ["ds4_release: v0.6.5"]


def test_a_moved_tag_is_said() -> None:
    text, said = bump.edit(PIN, "v0.6.5", COMMIT)
    assert "MOVED" in said[0] and yaml.safe_load(text)["ds4_releases"]["v0.6.5"]["commit"] == COMMIT


def test_nothing_to_do_changes_nothing() -> None:
    pinned = yaml.safe_load(PIN)["ds4_releases"]["v0.6.5"]["commit"]
    assert bump.edit(PIN, "v0.6.5", pinned) == (PIN, [])
