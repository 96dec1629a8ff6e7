"""Fixtures of every scenario's verification."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import scenario
from lab.api import Lab


@pytest.fixture(scope="session")
def lab() -> Lab:
    return scenario.lab()


@pytest.fixture(scope="session")
def variables(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Host name → what the operator's and our variables resolve to there."""
    return scenario.resolved(lab, tmp_path_factory.mktemp("resolved"))


@pytest.fixture(scope="session")
def expected(variables: dict[str, dict[str, Any]], lab: Lab) -> dict[str, Any]:
    """Resolved variables of the first host."""
    return variables[lab.hosts[0].name]
