"""What calls itself a check must be able to fail."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tools import check

SCENARIOS = sorted(path.parent for path in (check.ROOT / "molecule").glob("*/molecule.yml"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_every_molecule_scenario_has_tests(scenario: Path) -> None:
    """Molecule calls a scenario whose tests were renamed or moved a success."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in scenario.glob("tests/test_*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name.startswith("test_")]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {"passed": [], "failed": []}
    for name, found in lists.items():
        monkeypatch.setattr(check, name, found)
    monkeypatch.setattr(check, "LOGS", tmp_path)
    return lists


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("print('3 passed')", "passed"),
        ("raise SystemExit(1)", "failed"),
        ("print('WARNING Skipping, no tests found.')", "failed"),
        ("print('[DEPRECATION WARNING]: x')", "failed"),
    ],
)
def test_a_step_fails_by_its_status_or_by_what_it_says(
    outcome: dict[str, list[str]], program: str, result: str
) -> None:
    check.step("one", [sys.executable, "-c", program], fails_on=[check.DEPRECATED, check.NO_TESTS])
    assert outcome == {"passed": [], "failed": [], result: ["one"]}


@pytest.mark.parametrize(
    ("words", "names"),
    [([], [path.name for path in SCENARIOS]), (["all"], [path.name for path in SCENARIOS]), (["fleet"], ["fleet"])],
)
def test_molecule_without_a_name_is_every_scenario(
    monkeypatch: pytest.MonkeyPatch, words: list[str], names: list[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(check, "lab_ready", lambda _name: True)
    monkeypatch.setattr(check, "step", lambda name, *_args, **_more: asked.append(name))
    assert check.main(["molecule", *words]) == 0
    assert asked == [f"molecule {name}" for name in names]
