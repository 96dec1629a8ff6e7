"""Bad input gets one clear message before anything is touched: validate.yml run for real, in both positions of a value."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.probe import question_errors

ROOT = Path(__file__).resolve().parents[2]
HOST = "sparks: {hosts: {s1: {ansible_host: 192.0.2.1, ansible_connection: ssh}}, vars: %s}\n"  # unreachable on purpose


def validate(
    tmp_path: Path, variables: dict[str, object], inventory: str = HOST, first: str = ""
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "inv.yml").write_text(
        inventory % json.dumps(variables) if "%s" in inventory else inventory, encoding="utf-8"
    )
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "DS4_SUMMARY_FILE": str(tmp_path / "summary.json"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(
        ["ansible-playbook", "-i", str(tmp_path / "inv.yml"), *([first] if first else []), str(ROOT / "validate.yml")],
        cwd=tmp_path,  # not the repository: plugins are found through the links beside the playbook too
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_good_input_passes_without_contact(tmp_path: Path) -> None:
    ran = validate(tmp_path, {"ds4_release": "v0.6.5", "weights_connections": 4})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "DEPRECATION" not in ran.stdout + ran.stderr


def test_everything_wrong_is_told_at_once_with_cures(tmp_path: Path) -> None:
    ran = validate(
        tmp_path,
        {
            "ds4_release": "v0.6.5",
            "ds4_commit": "4ad370b4a338efe9723a386673c0e04f6e214108",
            "weights_conections": 4,
            "weights_stall_seconds": "soon",
            "serving_mode_target": "headless",
            "weights_generation": "0713",
            "engine_service_keep": "1",
            "ds4_max_fail_percentage": 101,
            "weights_old_generation": "remove_before_fetch",
            "weights_fetch": False,
            "smoke_test_questions": [{"name": "any", "api": "chat", "prompt": "Hello"}],
        },
    )
    text = ran.stdout + ran.stderr
    assert ran.returncode != 0
    assert "10 problem(s)" in text, text
    for said in (
        "is pinned to",
        "did you mean weights_connections?",
        "weights_stall_seconds",
        "serving_mode_target must be one of",
        "known: 0731, legacy",
        "engine_service_keep is 1; required: 2 or more, since the deployment that serves and the one to go back to stay",
        "ds4_max_fail_percentage is 101; required: 0 to 100",
        "remove_before_fetch deletes what a rollback would start",
        "remove_before_fetch contradicts weights_fetch: false",
        "smoke_test_questions has 1 question(s), none with expect",
        "nothing was touched",
    ):
        assert said in text, said
    assert "Traceback" not in text
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["hosts"]["s1"]["rooms"]["validate"]["state"] == "failed"
    assert "FLEET SUMMARY" in ran.stdout


def test_a_drafter_that_is_left_out_is_not_counted_on(tmp_path: Path) -> None:
    """Else the mode would be refused only after the build and the fetch."""
    ran = validate(tmp_path, {"weights_drafter": False, "engine_service_mode": "dspark"})
    assert ran.returncode != 0
    assert "Mode dspark needs a file that generation 0731 does not have" in ran.stdout + ran.stderr
    assert validate(tmp_path, {"weights_drafter": False}).returncode == 0


@pytest.mark.parametrize("inventory", ["all: {hosts: {s1: {}}}\n", "sparks: {hosts: {}}\n"])
def test_an_inventory_without_sparks_is_refused(tmp_path: Path, inventory: str) -> None:
    ran = validate(tmp_path, {}, inventory)
    assert ran.returncode != 0
    assert "no host in a group named sparks" in ran.stdout + ran.stderr


FLEET = "sparks: {hosts: {s1: %s, s2: %s, s3: {}}, vars: {ansible_host: 192.0.2.1, ansible_connection: ssh}}\n"


@pytest.mark.parametrize("number", [0, 1])
def test_one_host_with_a_wrong_input_ends_the_run_for_all(tmp_path: Path, number: int) -> None:
    hosts = [{"ds4_release": "v0.6.5"}, {"ds4_release": "v0.6.5"}]
    good = validate(tmp_path, {}, FLEET % tuple(map(json.dumps, hosts)))
    assert good.returncode == 0, good.stdout + good.stderr
    hosts[number]["weights_conections"] = "4"
    ran = validate(tmp_path, {}, FLEET % tuple(map(json.dumps, hosts)))
    assert ran.returncode != 0
    assert f"s{number + 1}: 1 problem(s) in what was asked for; nothing was touched." in ran.stdout
    assert "Resolve once" in good.stdout
    assert "Resolve once" not in ran.stdout


def test_what_all_hosts_share_is_judged_once(tmp_path: Path) -> None:
    shared = "{hosts: {s1: {}, s2: {}}, vars: {ansible_host: 192.0.2.1, ansible_connection: ssh, serving_mode_target: headless}}"
    ran = validate(tmp_path, {}, f"sparks: {shared}\n")
    assert ran.returncode != 0
    assert "s1: 1 problem(s)" in ran.stdout
    assert "s2: " not in ran.stdout.replace("ok: [s2]", ""), ran.stdout
    assert "Resolve once" not in ran.stdout


def test_what_an_earlier_playbook_of_the_same_command_registered_is_ours(tmp_path: Path) -> None:
    play = tmp_path / "earlier.yml"
    names = ["host_verify_look", "weights_clean_result", "engine_service_switch_result", "engine_service_now"]
    tasks = [{"name": f"Register {name}", "ansible.builtin.set_fact": {name: {}}} for name in names]
    play.write_text(json.dumps([{"hosts": "sparks", "gather_facts": False, "tasks": tasks}]), encoding="utf-8")
    ran = validate(tmp_path, {}, first=str(play))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_settings_that_the_engine_would_not_accept_end_staging_without_contact(tmp_path: Path) -> None:
    """What only the weights that are really there tell comes after validation."""
    play = tmp_path / "stage.yml"
    build = {"path": "/b", "version": "v0.6.5"}
    values = {"engine_service_mode": "dspark", "engine_service_build": build, "engine_service_release": "v0.6.5"}
    stage = {"name": "engine_service", "tasks_from": "stage", "rolespec_validate": False}
    task = {"name": "Stage", "ansible.builtin.import_role": stage, "vars": values}
    play.write_text(json.dumps([{"hosts": "sparks", "gather_facts": False, "tasks": [task]}]), encoding="utf-8")
    ran = validate(tmp_path, {}, first=str(play))
    assert ran.returncode != 0
    assert re.search(
        r"s1: \d problem\(s\) in the settings of the engine; the engine was not touched\.\n", ran.stdout
    ), ran.stdout
    assert "Generation '' names no base model" in ran.stdout, ran.stdout
    assert "UNREACHABLE" not in ran.stdout


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ([], "0 question(s), none with expect"),
        ([{"name": "a", "api": "chat", "prompt": " ", "expect": "Paris"}], "the prompt of a in smoke_test_questions"),
        ([{"name": "a", "api": "chat", "prompt": "b", "expect": ""}], "1 question(s), none with expect"),
        ([{"name": "a", "api": "chat", "prompt": "b", "expect": "c"}], ""),
        (None, ""),
        ("no list", ""),  # told by the spec of the role
        (["no question"], "1 question(s), none with expect"),
    ],
)
def test_questions_that_prove_nothing_are_told(questions: object, said: str) -> None:
    errors = question_errors(questions)
    assert [said in error for error in errors] == ([True] if said else []), errors
