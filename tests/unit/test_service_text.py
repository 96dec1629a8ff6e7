"""The rendered unit, launcher and switch unit, as the role renders them, judged by systemd itself where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds4.command import which
from ds4.deployment import verify_unit
from ds4.errors import Ds4Error
from ds4.systemd_text import directives

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Bring the role's variables
      ansible.builtin.import_role: {name: engine_service, tasks_from: query}
      when: false
    - name: Write
      ansible.builtin.copy:
        dest: "{{ out }}"
        mode: "0644"
        content: "{{ {'files': __engine_service_files | combine(rendered), 'switch': switch, 'memory': __engine_service_memory_required_kib | int} | to_json }}"
      vars:
        rendered: >-
          {{ {__engine_service_unit: lookup('ansible.builtin.template', 'ds4.service.j2'),
              'ds4-serve': lookup('ansible.builtin.template', 'ds4-serve.j2')} }}
        switch: "{{ lookup('ansible.builtin.template', 'ds4-switch.service.j2') }}"
"""


def render(tmp_path: Path, **variables: Any) -> dict[str, Any]:
    """Texts of the role for given variables, by Ansible itself."""
    play = tmp_path / "render.yml"
    play.write_text(PLAY, encoding="utf-8")
    (tmp_path / "templates").symlink_to(ROOT / "roles/engine_service/templates")
    weights = {
        "generation": "0731",
        "files": {
            "base": {"path": "/var/lib/ds4/weights/base-0731.gguf", "sha256": "a" * 64, "bytes": 86720111488},
            "drafter": {
                "path": "/var/lib/ds4/weights/DSpark-drafter-Q2K-Q8-0731.gguf",
                "sha256": "b" * 64,
                "bytes": 6971241504,
            },
        },
    }
    given = {
        "out": str(tmp_path / "out.json"),
        "ansible_python_interpreter": sys.executable,
        "engine_service_release": "v0.6.5",
        "engine_service_build": {"path": "/opt/ds4/builds/v0.6.5-addc0c4b"},
        "engine_service_weights": weights,
        **variables,
    }
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
    }
    argv = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        "localhost,",
        "-e",
        json.dumps(given),
        str(play),
    ]
    ran = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return render(tmp_path_factory.mktemp("standard"))


def lines(rendered: dict[str, Any]) -> list[str]:
    return directives(rendered["files"]["ds4.service"])


def test_the_memory_gate_is_weights_and_floor_and_headroom(rendered: dict[str, Any]) -> None:
    weights = (86720111488 + 6971241504) // 1024
    assert rendered["memory"] == weights + (4 + 8) * 1048576


@pytest.mark.parametrize(
    "line",
    [
        "Restart=always",
        "RestartPreventExitStatus=2",
        "LimitMEMLOCK=infinity",
        "TimeoutStopSec=300",
        "KillSignal=SIGTERM",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "Environment=DS4_DEPLOYMENT=@DEPLOYMENT@",
        "SupplementaryGroups=@HOST_GROUPS@",
    ],
)
def test_the_unit_says(rendered: dict[str, Any], line: str) -> None:
    assert line in lines(rendered)


@pytest.mark.parametrize(
    "directive",
    [
        "MemoryMax",
        "MemoryHigh",
        "PrivateTmp",
        "PrivateDevices",
        "MemoryDenyWriteExecute",
        "ProtectClock",
        "OOMScoreAdjust",
    ],
)
def test_the_unit_never_says_what_breaks_the_engine_or_its_lock(rendered: dict[str, Any], directive: str) -> None:
    assert not [line for line in lines(rendered) if line.startswith(f"{directive}=")]


def test_a_start_that_cannot_work_ends_within_the_start_limit(rendered: dict[str, Any]) -> None:
    values = dict(line.split("=", 1) for line in lines(rendered) if "=" in line)
    gate = float(values["ExecStartPre"].split("--wait-seconds ")[1])
    one = max(gate, float(values["TimeoutStartSec"])) + float(values["RestartSec"])
    assert float(values["TimeoutStartSec"]) > gate
    assert float(values["StartLimitIntervalSec"]) > one * float(values["StartLimitBurst"]), (
        "else it would go on for ever"
    )


@pytest.mark.skipif(which("systemd-analyze") is None, reason="not run: no systemd-analyze on this machine")
def test_systemd_accepts_the_units(rendered: dict[str, Any], tmp_path: Path) -> None:
    server = tmp_path / "ds4-server"
    server.write_text("#!/bin/sh\n", encoding="utf-8")
    server.chmod(0o755)
    text = rendered["files"]["ds4.service"].replace("/opt/ds4/builds/v0.6.5-addc0c4b/ds4-server", str(server))
    text = text.replace("@HOST_GROUPS@", "").replace("@DEPLOYMENT@", "0123456789ab")
    verify_unit(text, "ds4.service")
    verify_unit(rendered["switch"], "ds4-switch.service")
    for wrong in (text.replace("Restart=always", "Restart=sometimes"), text.replace("UMask=", "NoSuchDirective=")):
        with pytest.raises(Ds4Error, match="systemd does not accept"):
            verify_unit(wrong, "ds4.service")


def test_traces_may_be_written_where_they_were_asked_for(tmp_path: Path) -> None:
    found = render(
        tmp_path,
        engine_service_settings={"tool_slip_dump_directory": "/srv/slips"},
        engine_service_extra_args=["--trace", "/srv/trace/file.txt"],
    )
    writable = next(line for line in directives(found["files"]["ds4.service"]) if line.startswith("ReadWritePaths="))
    assert writable == "ReadWritePaths=/tmp /var/lib/ds4/kv -/srv/slips -/srv/trace"


def test_paths_with_spaces_and_percent_signs_stay_whole(tmp_path: Path) -> None:
    weights = {
        "generation": "0731",
        "files": {"base": {"path": "/srv/my weights/b-0731.gguf", "sha256": "a" * 64, "bytes": 1}},
    }
    found = render(
        tmp_path,
        engine_service_settings={"tool_slip_dump_directory": "/srv/my slips 50%"},
        engine_service_weights=weights,
        engine_service_kv_dir="/srv/kv 100%",
        engine_service_deployments_dir="/opt/ds4 50%/deployments",
        engine_service_lib_dir="/opt/ds4 50%/lib",
        engine_service_mode="plain",
    )
    unit = found["files"]["ds4.service"]
    assert 'ReadWritePaths=/tmp "/srv/kv 100%%" "-/srv/my slips 50%%"\n' in unit
    assert 'RequiresMountsFor="/srv/my weights"\n' in unit
    assert "EnvironmentFile=/opt/ds4 50%%/deployments/@DEPLOYMENT@/ds4.env\n" in unit
    assert '"PYTHONPATH=/opt/ds4 50%%/lib/current"' in unit
    if which("systemd-analyze") is not None:
        server = tmp_path / "ds4-server"
        server.write_text("#!/bin/sh\n", encoding="utf-8")
        server.chmod(0o755)
        text = unit.replace("/opt/ds4/builds/v0.6.5-addc0c4b/ds4-server", str(server))
        verify_unit(text.replace("@HOST_GROUPS@", "").replace("@DEPLOYMENT@", "0123456789ab"), "ds4.service")


@pytest.mark.parametrize("state", ["active", "activating", "deactivating", "reloading", ""])
def test_the_launcher_refuses_unless_the_service_is_at_rest(
    rendered: dict[str, Any], tmp_path: Path, state: str
) -> None:
    ran = launch(rendered, tmp_path, state)
    assert ran.returncode == 1
    assert "two copies of the weights do not fit" in ran.stderr
    assert "sudo systemctl stop ds4.service" in ran.stderr


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_the_launcher_becomes_what_the_service_is(rendered: dict[str, Any], tmp_path: Path, state: str) -> None:
    asked = launch(rendered, tmp_path, state, "--port", "8123").stdout
    assert asked == f"sudo -- {tmp_path}/ds4-serve --port 8123\n"
    limits = launch(rendered, tmp_path, state, "--port", "8123", user="root").stdout.splitlines()
    assert [line.split()[-1] for line in limits[:2]] == ["--memlock=unlimited", "--nofile=1048576"]
    assert limits[2].startswith("setpriv --reuid=ds4 --regid=")
    assert limits[2].endswith(f"--init-groups --reset-env -- {tmp_path}/ds4-serve --port 8123")


def launch(
    rendered: dict[str, Any], tmp_path: Path, state: str, *arguments: str, user: str = "me"
) -> subprocess.CompletedProcess[str]:
    """The launcher with a service in that state; sudo, prlimit and setpriv tell what they were asked for."""
    programs = {"ds4-serve": rendered["files"]["ds4-serve"], "systemctl": f"#!/bin/sh\necho {state}\n"}
    programs |= {name: f'#!/bin/sh\necho {name} "$@"\n' for name in ("sudo", "prlimit", "setpriv")}
    programs["id"] = f"#!/bin/sh\necho {user}\n"
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    return subprocess.run(
        [tmp_path / "ds4-serve", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_the_launcher_is_valid_shell_and_keeps_hostile_values(tmp_path: Path) -> None:
    found = render(tmp_path, engine_service_extra_env={"DS4_NOTE": "it's $HOME `id` 50%"})
    launcher = tmp_path / "ds4-serve"
    launcher.write_text(found["files"]["ds4-serve"], encoding="utf-8")
    assert subprocess.run(["sh", "-n", str(launcher)], check=False).returncode == 0
    assert "DS4_NOTE" not in launcher.read_text(encoding="utf-8"), "anybody may read the launcher"
    assert "\nset -a\n. /opt/ds4/deployments/@DEPLOYMENT@/ds4.env\nset +a\n" in launcher.read_text(encoding="utf-8")
    (tmp_path / "ds4.env").write_text(found["files"]["ds4.env"], encoding="utf-8")
    script = f"set -a; . {tmp_path}/ds4.env; exec printenv DS4_NOTE"
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "it's $HOME `id` 50%\n"
    assert 'DS4_NOTE="it\'s \\$HOME \\`id\\` 50%"' in found["files"]["ds4.env"]
