"""The controller's side of staging: no round trip where what stands on the host is what would be staged."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# By its path: the module has the same name.
_SPEC = importlib.util.spec_from_file_location(
    "deployment_action", Path(__file__).resolve().parents[2] / "plugins/action/ds4_deployment.py"
)
assert _SPEC and _SPEC.loader
plugin = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plugin)

LAYOUT = {name: f"/x/{name}" for name in ("deployments", "current", "unit_path", "launcher", "state", "lib")}
WANTED = {
    "release": "v0.6.5",
    "build": {},
    "weights": {},
    "args": [],
    "env": {"DS4_TOKEN": "hunter2"},
    "files": {"unit_path": "[Service]\nSupplementaryGroups=@HOST_GROUPS@\n"},
    "host": "127.0.0.1",
    "port": "8000",  # a template gives words
    "context": 524288,
    "user": "ds4",
    "memory_required_kib": 1,
}
TOLD = {"id": "0" * 12, "release": "v0.6.5", "needs_switch": False, "reasons": [], "drop_ins": ["/etc/x.conf"]}
ASKED = {"changed": False, "from": "the host"}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the plugin; gives its result and what was sent to the host."""
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp, task_vars: {})

    def one(**arguments: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args={"state": "staged", "layout": LAYOUT, "deployment": WANTED, **arguments})
        sent: list[dict[str, Any]] = []

        def execute(name: str, module_args: dict[str, Any], task_vars: object) -> dict[str, Any]:
            sent.append(module_args)
            return ASKED

        action._execute_module = execute
        return action.run(task_vars={"inventory_hostname": "spark1"}), sent

    return one


def standing(**changes: Any) -> dict[str, Any]:
    """What a host tells on which just ``WANTED`` stands."""
    wanted = {**WANTED, "port": 8000, "profile": "standard", "speculation": False}
    layout = plugin.staging.Layout(**LAYOUT)
    manifest, texts = plugin.staging.store.compose(plugin.staging.Wanted(**wanted), layout.unit, "video")
    policy = {"schema": 1, "layout": LAYOUT, "smoke": {}}
    found = {
        "deployment": TOLD,
        "groups": "video",
        "fingerprint": plugin.staging.digest(manifest, texts, {"ds4-switch.service": "x"}, policy),
    }
    return {**found, **changes}


SAME = {"helpers": {"ds4-switch.service": "x"}, "policy": {"smoke": {}}, "warn": ["mind this"]}


def test_what_stands_is_told_without_a_round_trip(stage: Any) -> None:
    result, sent = stage(**SAME, standing=standing())
    assert sent == []
    assert (result["changed"], result["deployment"], result["diff"]) == (False, TOLD, [])
    assert result["warnings"] == ["mind this", "unit_path has drop-ins that are not ours and stay: /etc/x.conf"]
    assert "hunter2" not in str(result)


@pytest.mark.parametrize(
    "other",
    [
        {"standing": {}},
        {"standing": standing(fingerprint="other")},
        {"standing": standing(groups="video render")},
        {"standing": {"fingerprint": standing()["fingerprint"], "groups": "video"}},
        {"policy": {"smoke": {"expect": datetime.date(2024, 1, 1)}}},
        {"layout": {**LAYOUT, "lib": "/y"}},
        {"layout": {}},
        {"deployment": {**WANTED, "port": "none"}},
        {"deployment": {**WANTED, "env": {"DS4_TOKEN": "hunter3"}}},
        {"helpers": {}},
    ],
)
def test_everything_else_is_asked(stage: Any, other: dict[str, Any]) -> None:
    result, sent = stage(**{**SAME, "standing": standing(), **other})
    assert result == ASKED
    assert len(sent) == 1
    assert not {"standing", "refuse", "templates"} & set(sent[0])


def test_a_refusal_asks_nobody(stage: Any) -> None:
    result, sent = stage(refuse=["no such option", "no such setting"], standing=standing())
    assert sent == []
    assert result["failed"]
    assert result["msg"].splitlines() == [
        "spark1: 2 problem(s) in the settings of the engine; the engine was not touched.",
        "no such option",
        "no such setting",
    ]


@pytest.mark.parametrize("found", [{}, standing()])
def test_what_the_profile_means_is_told_once_it_is_staged(
    stage: Any, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(plugin.display, "display", lambda text, color: shown.append(text))
    _result, sent = stage(**SAME, standing=found, tell=["6 banks"])
    assert shown == ["spark1, if applied:\n  6 banks"]
    assert all("tell" not in arguments for arguments in sent)
    stage(**SAME, standing=found, tell=[])
    stage(refuse=["no such option"], tell=["6 banks"])
    assert len(shown) == 1
