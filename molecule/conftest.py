"""What every scenario's verification stands on: the lab instance, and the resolved variables of each host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab import harness  # noqa: E402  (the path is set above)
from lab.api import Lab  # noqa: E402

SCENARIO = os.environ.get("MOLECULE_SCENARIO_NAME", "default")


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab(f"molecule-{SCENARIO}")


@pytest.fixture(scope="session")
def variables(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Host name → what the operator's and our variables resolve to there."""
    folder = tmp_path_factory.mktemp("resolved")
    argv = ["ansible-playbook", *inventories(lab), "-e", f"resolve_to={folder}", "molecule/common/resolve.yml"]
    ran = subprocess.run(argv, cwd=ROOT, env={**os.environ, **harness.environment()}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def inventories(lab: Lab) -> list[str]:
    """The lab's inventory and the one in which molecule keeps the scenario's variables."""
    found = ["-i", str(lab.inventory)]
    if directory := os.environ.get("MOLECULE_EPHEMERAL_DIRECTORY"):
        found += ["-i", f"{directory}/inventory"]
    return found


@pytest.fixture(scope="session")
def expected(variables: dict[str, dict[str, Any]], lab: Lab) -> dict[str, Any]:
    """Resolved variables of the first host."""
    return variables[lab.hosts[0].name]
