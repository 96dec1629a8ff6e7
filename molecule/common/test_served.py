"""What must be true of every served Spark, whatever the scenario moved. Expected values come from the resolved variables."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lab import scenario
from lab.api import Lab


def answer(host: Any, port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the service over HTTP from the host itself."""
    data = f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'" if body else ""
    ran = host.run(f"curl -sS --noproxy '*' --max-time 60 {data} http://127.0.0.1:{port}{path}")
    assert ran.rc == 0, ran.stderr + journal(host)
    return json.loads(ran.stdout)


def journal(host: Any) -> str:
    with host.sudo():
        return str(host.run("journalctl -u ds4 -n 40 --no-pager").stdout)


def port_of(expected: dict[str, Any]) -> int:
    return int(expected["settings"].get("port", 8000))


def test_the_capital_of_france(host: Any, expected: dict[str, Any]) -> None:
    question = {
        "model": "deepseek-v4-flash",
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "temperature": 0,
        "max_tokens": 64,
    }
    reply = answer(host, port_of(expected), "/v1/chat/completions", question)
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_served_context_is_the_configured_one(host: Any, expected: dict[str, Any]) -> None:
    model = answer(host, port_of(expected), "/v1/models")["data"][0]
    assert model["id"] == "deepseek-v4-flash"
    assert model["context_length"] == int(expected["settings"].get("context_tokens", 524288))


def test_systemd_supervises_the_pinned_binary(host: Any, expected: dict[str, Any]) -> None:
    service = host.service("ds4")
    assert service.is_running and service.is_enabled, journal(host)
    with host.sudo():
        pid = host.check_output("systemctl show ds4 -p MainPID --value")
        command = host.check_output(f"tr '\\0' ' ' </proc/{pid}/cmdline")
        environment = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ")
        current = host.check_output(f"readlink -f {expected['current_link']}")
        owner = host.check_output(f"stat -c %U /proc/{pid}")
    assert f"{expected['root']}/builds/{expected['release']}-{expected['commit'][:8]}/ds4-server" in command
    base = next(file["file"] for file in expected["files"] if file["role"] == "base")
    assert f"{expected['weights_directory']}/{base}" in command
    assert f"DS4_DEPLOYMENT={current.rsplit('/', 1)[1]}" in environment
    assert owner == expected["user"]


def test_weights_are_what_the_pin_says(host: Any, expected: dict[str, Any]) -> None:
    command = host.check_output("cat /proc/$(systemctl show ds4 -p MainPID --value)/cmdline | tr '\\0' '\\n'")
    for file in expected["files"]:
        path = f"{expected['weights_directory']}/{file['file']}"
        if path in command:
            assert host.file(path).sha256sum == file["sha256"]
    assert expected["weights_directory"] in command


def test_conversations_are_private(host: Any, expected: dict[str, Any]) -> None:
    with host.sudo():
        folder = host.file(expected["kv_dir"])
        assert folder.is_directory and folder.mode == 0o700 and folder.user == expected["user"]


def test_the_unit_passes_systemd(host: Any, expected: dict[str, Any]) -> None:
    with host.sudo():
        ran = host.run(f"systemd-analyze verify --recursive-errors=no {expected['unit_path']}")
    assert ran.rc == 0, ran.stderr


def test_a_server_started_by_hand_refuses_and_weights_are_mapped_once(host: Any, expected: dict[str, Any]) -> None:
    with host.sudo():
        server = host.check_output(
            "readlink -f /proc/$(systemctl show ds4 -p MainPID --value)/cwd"
        ) and host.check_output("tr '\\0' '\\n' </proc/$(systemctl show ds4 -p MainPID --value)/cmdline | head -1")
        base = f"{expected['weights_directory']}/{next(file['file'] for file in expected['files'] if file['role'] == 'base')}"
        ran = host.run(f"timeout 20 runuser -u {expected['user']} -- {server} -m {base} --port 18999")
        assert ran.rc == 2, ran.stdout + ran.stderr
        assert "another ds4 process is already running" in ran.stdout + ran.stderr
        mapped = host.run(f"grep -l {base} /proc/[0-9]*/maps 2>/dev/null | wc -l").stdout.strip()
    assert mapped == "1"


def test_the_launcher_refuses_while_the_service_runs(host: Any, expected: dict[str, Any]) -> None:
    ran = host.run(f"{expected['bin_dir']}/ds4-serve")
    assert ran.rc != 0 and "systemctl stop" in ran.stderr


@pytest.fixture(scope="module")
def again(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A third run: what it changed, which modules it executed, and whether the service noticed."""
    spark = lab.hosts[0]
    summary = tmp_path_factory.mktemp("again") / "summary.json"
    before = spark.run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out
    since = time.time()
    text = scenario.run(lab, "site.yml", summary=summary)
    return {
        "stats": {
            name: entry["stats"] for name, entry in json.loads(summary.read_text(encoding="utf-8"))["hosts"].items()
        },
        "modules": spark.module_executions(since),
        "same_process": before == spark.run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out,
        "text": text,
    }


def test_another_run_changes_and_restarts_nothing(again: dict[str, Any]) -> None:
    assert all(stats["changed"] == 0 and stats["failures"] == 0 for stats in again["stats"].values()), again["text"]
    assert again["same_process"]


def test_another_run_is_cheap(again: dict[str, Any]) -> None:
    assert {"ds4_look", "ds4_probe"} <= set(again["modules"]), again["modules"]  # it is looked at, and it answers
    assert len(again["modules"]) <= 12, again["modules"]


def test_a_preview_of_another_run_predicts_no_change(lab: Lab, tmp_path: Path) -> None:
    text = scenario.run(lab, "site.yml", "--check", "--diff", summary=tmp_path / "summary.json")
    data = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert data["hosts"] and all(entry["stats"]["changed"] == 0 for entry in data["hosts"].values()), text


def test_after_a_reboot_it_answers_by_itself(lab: Lab, host: Any, expected: dict[str, Any]) -> None:
    spark = lab.hosts[0]
    spark.reboot()
    deadline = time.monotonic() + 90
    port = port_of(expected)
    while spark.run(f"curl -sf --max-time 2 http://127.0.0.1:{port}/v1/models", check=False).rc != 0:
        assert time.monotonic() < deadline, spark.journal("ds4")
        time.sleep(1)
    assert "MemAvailable" in spark.journal("ds4") or "available" in spark.journal("ds4")
    test_the_capital_of_france(host, expected)
