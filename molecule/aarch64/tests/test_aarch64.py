"""What is true of a host of the Spark's own architecture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab import scenario
from lab.api import Lab


def test_the_host_is_what_it_claims(host: Any) -> None:
    assert host.check_output("uname -m") == "aarch64"
    assert host.check_output("dpkg --print-architecture") == "arm64"


def test_verification_needs_no_override(lab: Lab, expected: dict[str, Any]) -> None:
    text = scenario.run(lab, "site.yml", "--tags", "verify")
    assert "NVIDIA GB10 12.1" in text
    assert "OVERRIDDEN" not in text


def test_weights_are_verified(host: Any, expected: dict[str, Any]) -> None:
    for file in expected["files"]:
        assert host.file(f"{expected['weights_directory']}/{file['file']}").sha256sum == file["sha256"]


def test_the_build_is_of_this_architecture(host: Any, expected: dict[str, Any]) -> None:
    folder = f"{expected['root']}/builds/{expected['release']}-{expected['commit'][:8]}"
    record = json.loads(host.file(f"{folder}/build.json").content_string)
    assert record["commit"] == expected["commit"]
    assert record["sass"] == ["sm_121a"]
    header = host.check_output(f"od -An -tx1 -j18 -N2 {folder}/ds4-server").split()
    assert header == ["b7", "00"]  # EM_AARCH64


def test_the_service_answers(host: Any, expected: dict[str, Any]) -> None:
    service = host.service("ds4")
    assert service.is_running and service.is_enabled
    question = {
        "model": "deepseek-v4-flash",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    ran = host.run(
        "curl -sS --max-time 120 -H 'Content-Type: application/json' "
        f"-d '{json.dumps(question)}' http://127.0.0.1:8000/v1/chat/completions"
    )
    assert ran.rc == 0, ran.stderr
    assert "Paris" in json.loads(ran.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["ds4.service", "ds4.env", "ds4-serve", "codex-models.json", "manifest.json"])
def test_the_deployment_is_whole(host: Any, expected: dict[str, Any], name: str) -> None:
    assert host.file(f"{expected['current_link']}/{name}").exists
