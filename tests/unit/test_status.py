"""What status.yml says of a host."""

from __future__ import annotations

from typing import Any

import pytest

from ds4.status import describe, settings_drift

MANIFEST: dict[str, Any] = {
    "id": "0" * 12,
    "release": "v0.6.5",
    "build": {"version": "v0.6.5"},
    "weights": {"generation": "0731"},
    "args": ["--ctx", "524288", "--cors"],
    "env": {"DS4_CODEX_MODELS_FILE": f"/opt/ds4/deployments/{'0' * 12}/codex-models.json"},
    "service": {"host": "127.0.0.1", "port": 8000},
}
SERVICE: dict[str, Any] = {
    "state": "active",
    "enabled": True,
    "pid": 7,
    "deployment": "0" * 12,
    "version": "v0.6.5",
    "answers": True,
    "metrics": {"ds4_banks_total": 6.0},
}


def query(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "service": SERVICE,
        "manifest": MANIFEST,
        "problems": [],
        "history": [],
        "transaction": None,
    }
    return {**base, "deployment": {"reasons": []}, **changes}


def staged(**changes: Any) -> dict[str, Any]:
    wanted = {
        **MANIFEST,
        "id": "1" * 12,
        "env": {"DS4_CODEX_MODELS_FILE": f"/opt/ds4/deployments/{'1' * 12}/codex-models.json"},
    }
    return {"deployment": {"reasons": []}, "wanted": {**wanted, **changes}}


def test_the_same_is_the_same_whatever_its_id() -> None:
    assert settings_drift(MANIFEST, staged()["wanted"]) == []
    made = describe(query(), "spark1", staged(), "v0.6.5")
    assert made["same"]
    assert made["text"].splitlines() == [
        f"spark1: v0.6.5 serves as {'0' * 12} on 127.0.0.1:8000, answers",
        "  6 banks",
        "  is exactly what is wanted",
    ]
    assert made["summary"]["state"] == "ok"


@pytest.mark.parametrize(
    ("seen", "want", "release", "says"),
    [
        (query(), staged(), "v0.6.6", "release v0.6.5, wanted v0.6.6"),
        (query(service={**SERVICE, "version": "v0.6.2"}), staged(), "v0.6.5", "the running binary says v0.6.2"),
        (query(), staged(weights={"generation": "legacy"}), "v0.6.5", "weights 0731, wanted legacy"),
        (query(), staged(args=["--ctx", "8192", "--cors"]), "v0.6.5", "settings: -524288 +8192"),
        (query(problems=["the build is gone"]), staged(), "v0.6.5", "the build is gone"),
        (query(service={**SERVICE, "enabled": False}), staged(), "v0.6.5", "does not start at boot"),
        (query(service={**SERVICE, "answers": False}), staged(), "v0.6.5", "does not answer"),
        (query(deployment={"reasons": ["unit was edited"]}), None, "v0.6.5", "unit was edited"),
    ],
)
def test_every_drift_is_named(seen: dict[str, Any], want: dict[str, Any] | None, release: str, says: str) -> None:
    made = describe(seen, "spark1", want, release)
    assert not made["same"]
    assert says in made["text"]
    assert made["summary"]["state"] == "changed"


def test_a_host_that_serves_nothing_is_a_failure() -> None:
    made = describe(query(service={**SERVICE, "deployment": "", "state": "failed"}, manifest=None), "s", None, "v0.6.5")
    assert made["summary"]["state"] == "failed"
    assert "nothing of ours serves (failed)" in made["text"]


def test_a_reason_is_told_once() -> None:
    reason = "it does not start at boot"
    seen = query(service={**SERVICE, "enabled": False}, deployment={"reasons": [reason]})
    assert describe(seen, "s", None, "v0.6.5")["drift"] == [reason]


def test_what_cannot_be_told_is_no_agreement() -> None:
    made = describe(query(), "s", None, "v0.6.5", "the repository does not answer")
    assert not made["same"]
    assert "cannot be told: the repository does not answer" in made["text"]


def test_a_silent_service_and_an_unproven_switch_are_said() -> None:
    last = {"outcome": "returned", "requested_at": "2026-11-29T22:00:00Z", "message": "smoke failed"}
    made = describe(query(service={**SERVICE, "answers": False}, transaction=last), "s", staged(), "v0.6.5")
    assert "DOES NOT ANSWER" in made["text"]
    assert not made["same"]
    assert "last switch (2026-11-29T22:00:00Z): returned. smoke failed" in made["text"]
