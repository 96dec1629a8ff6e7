from __future__ import annotations

from typing import Any

import pytest

from ds4.pin import generation_errors, generation_files, known_files, resolve_pin

COMMIT = "addc0c4bd6c664f8eed556df5c41f17990dcfcb6"
OTHER = "4ad370b4a338efe9723a386673c0e04f6e214108"
RELEASES = {"v0.6.5": {"commit": COMMIT, "weights": "0731"}}
WEIGHTS: dict[str, Any] = {
    "0731": {"base": {"repo": "a/b", "revision": "c" * 40, "file": "base.gguf", "bytes": 1, "sha256": "d" * 64}},
    "legacy": {"mtp": {"repo": "a/b", "file": "mtp.gguf", "sha256": "short"}},
}


def test_a_listed_release_has_its_commit_and_weights() -> None:
    pin = resolve_pin("v0.6.5", RELEASES, weights=WEIGHTS)
    assert pin == {"release": "v0.6.5", "commit": COMMIT, "listed": True, "generation": "0731", "errors": []}


def test_an_unlisted_release_is_allowed_and_marked() -> None:
    pin = resolve_pin("v0.7.0", RELEASES, weights=WEIGHTS)
    assert (pin["listed"], pin["commit"], pin["generation"], pin["errors"]) == (False, "", "0731", [])
    assert resolve_pin("v0.7.0", RELEASES, commit=OTHER)["commit"] == OTHER


@pytest.mark.parametrize(
    ("release", "commit", "releases", "says"),
    [
        ("../etc", "", RELEASES, "no release tag"),
        ("", "", RELEASES, "no release tag"),
        ("v0.6.5", "addc0c4", RELEASES, "40 hex digits"),
        ("v0.6.5", OTHER, RELEASES, "is pinned to"),
        ("v0.6.5", "", {"v0.6.5": {"commit": "addc", "weights": "0731"}}, "40 hex digits"),
        ("v0.6.5", "", {"v0.6.5": {"commit": COMMIT, "weights": "0713"}}, "write 0731"),
    ],
)
def test_every_doubt_is_said_with_its_cure(release: str, commit: str, releases: dict[str, Any], says: str) -> None:
    errors = resolve_pin(release, releases, commit=commit, weights=WEIGHTS)["errors"]
    assert any(says in error and "Cure:" in error for error in errors), errors


def test_files_carry_their_role() -> None:
    assert [file["role"] for file in generation_files(WEIGHTS, "0731")] == ["base"]
    assert generation_files(WEIGHTS, "nothing") == []
    assert [(file["generation"], file["role"]) for file in known_files(WEIGHTS)] == [
        ("0731", "base"),
        ("legacy", "mtp"),
    ]


def test_a_half_described_generation_is_told_whole() -> None:
    errors = generation_errors(WEIGHTS, "legacy")
    assert len(errors) == 3
    assert "revision" in errors[0] and "64 hex" in errors[1] and "no base file" in errors[2]
    assert generation_errors(WEIGHTS, "0731") == []
    assert "write legacy" in generation_errors(WEIGHTS, "legcy")[0]
