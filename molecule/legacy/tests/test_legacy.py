"""The legacy generation serves in each of its modes, and never with a file of another generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import scenario
from lab.api import Lab


def started(lab: Lab) -> str:
    return lab.hosts[0].run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out


def command(lab: Lab) -> list[str]:
    """Words of the process that serves."""
    return lab.hosts[0].run("tr '\\0' '\\n' </proc/$(systemctl show ds4 -p MainPID --value)/cmdline").out.splitlines()


def path(expected: dict[str, Any], role: str) -> str:
    (name,) = [file["file"] for file in expected["files"] if file["role"] == role]
    return f"{expected['weights_directory']}/{name}"


def speculation(lab: Lab) -> list[str]:
    words = command(lab)
    return words[words.index("-m") + 2 : words.index("-m") + 5]


def ask(lab: Lab) -> str:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    spark = lab.hosts[0]
    spark.put("/tmp/question.json", json.dumps(body), 0o644)
    return spark.run(
        "curl -sS --noproxy '*' -H 'Content-Type: application/json' -d @/tmp/question.json http://127.0.0.1:8000/v1/chat/completions"
    ).out


def run_fails(lab: Lab, *options: str) -> str:
    with pytest.raises(AssertionError) as failure:
        scenario.run(lab, "site.yml", *options)
    return str(failure.value)


def test_mtp_serves_with_the_files_named(lab: Lab, expected: dict[str, Any]) -> None:
    assert expected["generation"] == "legacy"
    assert command(lab)[1:3] == ["-m", path(expected, "base")]
    assert speculation(lab) == ["--mtp", path(expected, "mtp"), "--no-dspark"]


def test_conversations_have_a_directory_of_their_own(lab: Lab, expected: dict[str, Any]) -> None:
    (base,) = [file for file in expected["files"] if file["role"] == "base"]
    words = command(lab)
    assert words[words.index("--kv-disk-dir") + 1] == f"{expected['kv_dir']}/ds4-legacy-{base['sha256'][:8]}"


def test_the_mtp_file_is_refused_with_a_newer_base(lab: Lab) -> None:
    before = started(lab)
    text = run_fails(lab, "-e", "weights_generation=0731")
    assert "The MTP head belongs to the legacy generation and fits no 0731 base" in text
    assert "nothing was touched" in text
    assert started(lab) == before


def test_a_drafter_of_another_generation_is_refused(lab: Lab, tmp_path: Path) -> None:
    before = started(lab)
    mixed = tmp_path / "mixed.json"
    generation = {"base": "{{ ds4_weights.legacy.base }}", "drafter": "{{ ds4_weights['0731'].drafter }}"}
    mixed.write_text(
        json.dumps(
            {"ds4_weights_extra": {"mixed": generation}, "weights_generation": "mixed", "engine_service_mode": "dspark"}
        )
    )
    text = run_fails(lab, "-e", f"@{mixed}")
    assert "The drafter was trained against another generation" in text
    assert started(lab) == before


def test_its_own_drafter_serves_when_a_manifest_names_it(lab: Lab, expected: dict[str, Any]) -> None:
    scenario.run(lab, "site.yml", "-e", "engine_service_mode=auto")
    assert speculation(lab) == ["--dspark", path(expected, "drafter"), "--mtp"]
    words = command(lab)
    assert words[words.index("--mtp") + 1] == path(expected, "mtp")
    assert "Paris" in ask(lab)


def test_a_drafter_without_a_known_hash_is_recorded_at_first_use(
    lab: Lab, expected: dict[str, Any], tmp_path: Path
) -> None:
    (drafter,) = [file for file in expected["files"] if file["role"] == "drafter"]
    unknown = {key: drafter[key] for key in ("repo", "revision", "file")}
    lab.hosts[0].run(f"find {expected['weights_directory']} -name '*{drafter['file']}*' -delete")
    extra = tmp_path / "first.json"
    generation = {"base": "{{ ds4_weights.legacy.base }}", "drafter": unknown}
    extra.write_text(
        json.dumps(
            {
                "ds4_weights_extra": {"legacy-first": generation},
                "weights_generation": "legacy-first",
                "engine_service_mode": "dspark",
            }
        )
    )
    # A mirror that tells no hash: otherwise the hub's own word would be recorded.
    lab.hub.faults({"fault": "bare", "count": -1, "file": drafter["file"]})
    scenario.run(lab, "site.yml", "-e", f"@{extra}")
    lab.hub.faults()
    # The MTP file of the other tests lies beside the base; this generation does not name it.
    assert speculation(lab) == ["--dspark", path(expected, "drafter"), "--no-mtp"]
    record = json.loads(lab.hosts[0].run(f"cat {path(expected, 'drafter')}.record.json").out)
    assert record["sha256"] == drafter["sha256"]
    assert record["trust"] == "first-use"  # nobody pinned it, and the record says so
    assert "Paris" in ask(lab)


def test_without_a_drafter_the_ladder_goes_on_and_says_so(lab: Lab, expected: dict[str, Any], tmp_path: Path) -> None:
    extra = tmp_path / "pinned.json"
    generation = {"base": "{{ ds4_weights.legacy.base }}", "mtp": "{{ ds4_weights.legacy.mtp }}"}
    extra.write_text(
        json.dumps(
            {
                "ds4_weights_extra": {"legacy-pinned": generation},
                "weights_generation": "legacy-pinned",
                "engine_service_mode": "auto",
            }
        )
    )
    text = scenario.run(lab, "site.yml", "-e", f"@{extra}")
    assert "has no drafter, so the engine serves with MTP speculation" in text
    assert speculation(lab) == ["--mtp", path(expected, "mtp"), "--no-dspark"]


def test_plain_serves_without_any_drafting(lab: Lab) -> None:
    scenario.run(lab, "site.yml", "-e", "engine_service_mode=plain")
    assert speculation(lab)[0] == "--no-spec"
    assert "Paris" in ask(lab)
