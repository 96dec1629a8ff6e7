"""The controller's side of a fetch: lines of progress, and patience with a host that is out of reach."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

# By its path: the module has the same name.
_SPEC = importlib.util.spec_from_file_location(
    "weights_action", Path(__file__).resolve().parents[2] / "plugins/action/ds4_weights.py"
)
assert _SPEC and _SPEC.loader
plugin = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plugin)

RUNNING = {"state": "running", "progress": "base 42 %  36.5/80.8 GiB  612 MiB/s  eta 1m12s", "changed": False}
DONE = {"state": "done", "weights": {"generation": "0731"}, "changed": False}
Follow = Callable[..., tuple[Any, list[str], list[dict[str, Any]]]]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Run the plugin with these answers of the host; gives (result or exception, lines shown, arguments sent)."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp, task_vars: {})
    clock = [0.0]
    monkeypatch.setattr(plugin.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(plugin.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def one(*answers: Any, **arguments: Any) -> tuple[Any, list[str], list[dict[str, Any]]]:
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(args={"directory": "/w", **arguments})
        shown: list[str] = []
        sent: list[dict[str, Any]] = []
        action._display = SimpleNamespace(display=lambda text, stderr: shown.append(text))
        left = list(answers)

        def execute(module_args: dict[str, Any], task_vars: Any) -> Any:
            sent.append(module_args)
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        action._execute_module = execute
        try:
            return action.run(task_vars={"inventory_hostname": "spark1"}), shown, sent
        except AnsibleConnectionFailure as error:
            return error, shown, sent

    return one


def test_present_is_the_module_itself(follow: Follow) -> None:
    result, shown, sent = follow(RUNNING, state="present", quiet=True, unreachable_seconds=3, generation="0731")
    assert (result, shown) == (RUNNING, [])
    assert sent == [{"directory": "/w", "state": "present", "generation": "0731"}]


def test_nothing_is_executed_when_nothing_runs(follow: Follow) -> None:
    for state in ("done", "planned", "deferred"):
        started: dict[str, Any] = {"state": state, "changed": True, "weights": {}}
        assert follow(state="followed", started=started) == (started, [], [])


def test_lines_until_the_end(follow: Follow) -> None:
    result, shown, sent = follow(
        RUNNING, RUNNING, DONE, state="followed", started={"state": "running", "changed": True}
    )
    assert result == {**DONE, "changed": True}
    assert shown == ["[spark1] base 42 %  36.5/80.8 GiB  612 MiB/s  eta 1m12s"] * 2
    assert len(sent) == 3 and "started" not in sent[0]


def test_a_failure_is_the_result(follow: Follow) -> None:
    failed = {"failed": True, "msg": "arrived twice with a wrong hash"}
    assert follow(RUNNING, failed, state="followed")[0]["msg"] == failed["msg"]


def test_a_host_out_of_reach_for_a_while(follow: Follow) -> None:
    gone = AnsibleConnectionFailure("no route to host")
    result, shown, _ = follow(RUNNING, gone, gone, gone, RUNNING, gone, DONE, state="followed", unreachable_seconds=60)
    assert result["state"] == "done"
    assert [text for text in shown if "out of reach" in text] == [
        "[spark1] out of reach for 0 s; its fetch goes on without us",
        "[spark1] out of reach for 5 s; its fetch goes on without us",
        "[spark1] out of reach for 10 s; its fetch goes on without us",
        "[spark1] out of reach for 0 s; its fetch goes on without us",
    ]


def test_patience_has_an_end(follow: Follow) -> None:
    gone = AnsibleConnectionFailure("no route to host")
    result, _, sent = follow(*[gone] * 20, state="followed", unreachable_seconds=30)
    assert result is gone
    assert len(sent) == 8


@pytest.mark.parametrize("how", ["quiet", "CI"])
def test_quiet(follow: Follow, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "CI":
        monkeypatch.setenv("CI", "true")
    _, shown, _ = follow(RUNNING, AnsibleConnectionFailure("x"), DONE, state="followed", quiet=how == "quiet")
    assert shown == []
