"""Several questions in one round trip: the module's own door, with what stands behind it replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible.module_utils.ds4 import questions, rooms  # type: ignore[import-not-found]  # isort: skip
from ansible.module_utils.ds4.errors import Ds4Error  # type: ignore[import-not-found]  # isort: skip

_SPEC = importlib.util.spec_from_file_location(
    "look", Path(__file__).resolve().parents[2] / "plugins/modules/ds4_look.py"
)
assert _SPEC and _SPEC.loader
door = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(door)

BUILD = {
    "release": "v0.6.5",
    "commit": "a" * 40,
    "builds_dir": "/b",
    "state_dir": "/s",
    "lib_dir": "/l",
    "user": "ds4",
    "expected_binaries": ["ds4-server"],
    "expected_sass": "sm_121a",
    "memory_floor_mib": 1,
    "memory_per_job_mib": 1,
    "timeout_seconds": 1,
    "environment": {"TOKEN": "hunter2"},
}
WEIGHTS = {"directory": "/w", "state_directory": "/s"}


def look(monkeypatch: pytest.MonkeyPatch, **asked: dict[str, Any]) -> dict[str, Any]:
    """Result of the module."""
    outcome: dict[str, Any] = {}

    def ended(self: Any, **values: Any) -> None:
        outcome.update(values, module_args=dict(self.params))
        raise SystemExit

    with patch_module_args(asked):
        monkeypatch.setattr(door.AnsibleModule, "exit_json", ended)
        monkeypatch.setattr(door.AnsibleModule, "fail_json", lambda self, **values: ended(self, failed=True, **values))
        with pytest.raises(SystemExit):
            door.main()
    return outcome


def raises(error: Exception) -> Any:
    def question(*_arguments: Any) -> None:
        raise error

    return question


def test_an_unanswered_question_does_not_silence_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "of_gpu", raises(Ds4Error("No answer", cure="ask again")))
    monkeypatch.setattr(questions, "of_host", raises(NotADirectoryError(20, "Not a directory", "/opt")))
    monkeypatch.setattr(questions, "of_memory", lambda wanted: {"mem_total_kib": wanted["processes"]})
    found = look(monkeypatch, gpu={}, host={}, memory={"processes": 7})
    assert (found["gpu"]["failed"], found["host"]["failed"]) == (True, True)
    assert "ask again" in found["gpu"]["msg"]
    assert "Not a directory" in found["host"]["msg"]
    assert found["memory"] == {"mem_total_kib": 7}
    assert found["settled"] == {}


@pytest.mark.parametrize("error", [Ds4Error("Not ours"), NotADirectoryError(20, "Not a directory")])
def test_a_room_that_cannot_answer_is_left_to_its_own_task(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    there = {"changed": False, "warnings": ["mind this"], "ds4_summary": {"room": "cuda_build"}}
    warned: list[str] = []
    monkeypatch.setattr(door.AnsibleModule, "warn", lambda self, text: warned.append(text))
    monkeypatch.setattr(
        rooms, "have_build", lambda options, check: there if check else pytest.fail("it must only look")
    )
    monkeypatch.setattr(rooms, "have_weights", raises(error))
    found = look(monkeypatch, build=BUILD, weights=WEIGHTS)
    assert set(found["settled"]) == {"build"}
    assert found["ds4_summaries"] == [{"room": "cuda_build"}]
    assert warned == ["mind this"]
    assert "hunter2" not in str(found), "the environment of a build may hold secrets"


@pytest.mark.parametrize("asked", [{"check_tag_always": True}, {"commit": ""}])
def test_a_build_for_which_a_server_must_be_asked_is_left_to_its_own_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """A slow server must not make the look at a healthy host too slow."""
    monkeypatch.setattr(rooms, "have_build", lambda options, check: pytest.fail("it would ask"))
    assert look(monkeypatch, build={**BUILD, "state_dir": str(tmp_path), **asked})["settled"] == {}


def test_a_room_with_something_to_do_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "have_build", lambda options, check: {"changed": True})
    assert look(monkeypatch, build=BUILD)["settled"] == {}


def test_wrong_options_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, memory={"processes": "many"})
    assert found["failed"]
    assert found["msg"].startswith("memory: ")
