"""What verification inside a molecule scenario stands on: the instance, both inventories, and a run of the playbook."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from . import harness, system
from .api import Lab


def lab() -> Lab:
    """The lab instance of the running scenario."""
    return Lab(f"molecule-{os.environ.get('MOLECULE_SCENARIO_NAME', 'default')}")


def inventories(instance: Lab) -> list[str]:
    """Options for the lab's inventory and the one in which molecule keeps the scenario's variables."""
    found = []
    if directory := os.environ.get("MOLECULE_EPHEMERAL_DIRECTORY"):
        found += ["-i", f"{directory}/inventory"]
    return [*found, "-i", str(instance.inventory)]


def run(instance: Lab, playbook: str, *options: str, summary: Path | None = None) -> str:
    """Run a playbook as the scenario's converge step does; what it printed. An exit status above 0 is an AssertionError."""
    environment = {**os.environ, **harness.environment(), "DS4_SUMMARY_FILE": str(summary or "")}
    argv = ["ansible-playbook", *inventories(instance), playbook, *options]
    ran = subprocess.run(argv, cwd=system.REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def resolved(instance: Lab, folder: Path) -> dict[str, dict[str, Any]]:
    """Host name → what the operator's and our variables resolve to there."""
    run(instance, "molecule/common/resolve.yml", "-e", f"resolve_to={folder}")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
