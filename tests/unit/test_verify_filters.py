"""The controller's side of host_verify: filters, and the action that says what was found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ds4_findings  # type: ignore[import-not-found]
import ds4_report  # type: ignore[import-not-found]
import pytest
from ansible.errors import AnsibleFilterError
from ansible.module_utils.ds4.errors import Ds4Error
from ansible.plugins.action import ActionBase


def test_a_policy_that_cannot_be_read_is_told_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_args: Any, **_more: Any) -> None:
        raise Ds4Error("A value is neither yes nor no", found="'perhaps'")

    monkeypatch.setattr(ds4_findings, "judge_host", wrong)
    with pytest.raises(AnsibleFilterError, match=r"spark1: A value is neither yes nor no\. Found: 'perhaps'"):
        ds4_findings.ds4_findings({}, {}, {}, name="spark1")


def test_hosts_that_were_not_probed_are_left_out_of_the_comparison() -> None:
    def variables(kernel: str) -> dict[str, Any]:
        return {"host_verify_look": {"gpu": {"gpus": []}, "host": {"kernel": kernel}}}

    hostvars = {"a": variables("6.17"), "b": variables("6.14"), "c": {}, "d": variables("6.17")}
    drift = ds4_findings.ds4_fleet_drift(hostvars, ["a", "b", "c", "d"])
    assert drift == {"a": [], "b": ["kernel is 6.14 here, 6.17 on a and 1 more"], "d": []}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(
        ds4_report, "Display", lambda: SimpleNamespace(display=lambda text, **_more: lines.append(text))
    )
    monkeypatch.setattr(ActionBase, "run", lambda *_args, **_more: {})
    return lines


def report(**arguments: Any) -> dict[str, Any]:
    action = ds4_report.ActionModule.__new__(ds4_report.ActionModule)
    action._task = SimpleNamespace(args={"summary": {"room": "host_verify", "state": "ok"}, **arguments})
    return dict(action.run())


def test_nothing_to_say_says_nothing(shown: list[str]) -> None:
    assert report(text="", stop=False) == {"changed": False, "ds4_summary": {"room": "host_verify", "state": "ok"}}
    assert shown == []


def test_notes_are_shown_and_stop_nothing(shown: list[str]) -> None:
    assert "failed" not in report(text="spark1: 1 note.", stop=False)
    assert shown == ["spark1: 1 note."]


def test_findings_stop_with_the_text_once(shown: list[str]) -> None:
    result = report(text="spark1: 3 problems", stop=True)
    assert (result["failed"], result["msg"]) == (True, "spark1: 3 problems")
    assert shown == []


def test_a_verdict_is_told_and_returned_whole(shown: list[str]) -> None:
    verdict = {
        "text": "spark1: 1 note.",
        "stop": False,
        "summary": {"room": "host_verify", "state": "ok"},
        "findings": ["x"],
    }
    assert report(verdict=verdict)["verdict"] == verdict
    assert shown == ["spark1: 1 note."]
    failed = report(verdict={**verdict, "stop": True})
    assert (failed["failed"], failed["msg"], failed["verdict"]["findings"]) == (True, "spark1: 1 note.", ["x"])
    quiet = report(verdict={**verdict, "stop": True}, quiet="true")
    assert "failed" not in quiet
    assert len(shown) == 1
