"""What an operator writes wins over ours, position by position, with the real ansible.cfg and ansible-playbook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS, THEIRS = "v0.6.5", "v9.9.9"
HOST = "sparks: {hosts: {s1: {ansible_connection: local}}}\n"
PLAYBOOK = """
- hosts: sparks
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "RELEASE={{ ds4_release }}"}
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def inventory_all_vars(base: Path) -> list[str]:
    write(base / "inv.yml", f"all: {{vars: {{ds4_release: {THEIRS}}}}}\n{HOST}")
    return ["-i", str(base / "inv.yml")]


def inventory_group_vars(base: Path) -> list[str]:
    write(
        base / "inv.yml", f"sparks: {{vars: {{ds4_release: {THEIRS}}}, hosts: {{s1: {{ansible_connection: local}}}}}}\n"
    )
    return ["-i", str(base / "inv.yml")]


def inventory_host_var(base: Path) -> list[str]:
    write(base / "inv.yml", f"sparks: {{hosts: {{s1: {{ansible_connection: local, ds4_release: {THEIRS}}}}}}}\n")
    return ["-i", str(base / "inv.yml")]


def beside_inventory(relative: str) -> Callable[[Path], list[str]]:
    def build(base: Path) -> list[str]:
        write(base / "inv/hosts.yml", HOST)
        write(base / "inv" / relative, f"ds4_release: {THEIRS}\n")
        return ["-i", str(base / "inv")]

    return build


def inventory_script(base: Path) -> list[str]:
    data = {
        "sparks": {"hosts": ["s1"], "vars": {"ds4_release": THEIRS, "ansible_connection": "local"}},
        "_meta": {"hostvars": {}},
    }
    write(base / "inv.py", f"#!{sys.executable}\nprint('''{json.dumps(data)}''')\n")
    (base / "inv.py").chmod(0o755)
    return ["-i", str(base / "inv.py")]


def extra_var(base: Path) -> list[str]:
    write(base / "inv.yml", HOST)
    return ["-i", str(base / "inv.yml"), "-e", f"ds4_release={THEIRS}"]


def canary_group(base: Path) -> list[str]:
    write(
        base / "inv.yml",
        "sparks: {hosts: {s1: {ansible_connection: local}}, children: {canaries: {hosts: {s1: {}}, "
        f"vars: {{ds4_release: {THEIRS}}}}}}}}}\n",
    )
    return ["-i", str(base / "inv.yml")]


POSITIONS = {
    "all vars in an inventory file": inventory_all_vars,
    "group vars in an inventory file": inventory_group_vars,
    "host var in an inventory file": inventory_host_var,
    "group_vars/all beside the inventory": beside_inventory("group_vars/all.yml"),
    "group_vars/all folder beside the inventory": beside_inventory("group_vars/all/mine.yml"),
    "group_vars/sparks beside the inventory": beside_inventory("group_vars/sparks.yml"),
    "host_vars beside the inventory": beside_inventory("host_vars/s1.yml"),
    "inventory script": inventory_script,
    "canary group": canary_group,
    "extra variable": extra_var,
}


def release(project: Path, options: list[str]) -> str:
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(project / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    argv = ["ansible-playbook", str(project / "probe.yml"), *options]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, cwd=project)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.split("RELEASE=")[1].split('"')[0].split("\n")[0].strip()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our ansible.cfg and group_vars beside a playbook that prints what it resolved."""
    base = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "ansible.cfg", base)
    (base / "plugins").symlink_to(ROOT / "plugins")
    shutil.copytree(ROOT / "group_vars", base / "group_vars")
    write(base / "probe.yml", PLAYBOOK)
    return base


@pytest.mark.parametrize("position", POSITIONS)
def test_the_operator_wins(position: str, project: Path, tmp_path: Path) -> None:
    assert release(project, POSITIONS[position](tmp_path)) == THEIRS


def test_ours_holds_when_nobody_says_otherwise(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "inv.yml", HOST)
    assert release(project, ["-i", str(tmp_path / "inv.yml")]) == OURS
