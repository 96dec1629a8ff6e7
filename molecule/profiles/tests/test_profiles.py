"""Every profile reaches the process, is served, and is told with its figures; what does not fit the host is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import scenario
from lab.api import Lab
from plugins.filter.ds4_engine import shipped_catalogue

CATALOGUE = shipped_catalogue()
PROFILES = CATALOGUE["profiles"]


def process(lab: Lab) -> tuple[list[str], list[str]]:
    """Command line and environment of the process that serves."""
    spark = lab.hosts[0]
    pid = spark.run("systemctl show ds4 -p MainPID --value").out.strip()
    read = [spark.run(f"tr '\\0' '\\n' </proc/{pid}/{name}").out.splitlines() for name in ("cmdline", "environ")]
    return read[0], read[1]


def served(lab: Lab) -> Any:
    return json.loads(lab.hosts[0].run("curl -sS --noproxy '*' http://127.0.0.1:8000/v1/models").out)


def holds(lab: Lab, profile: str) -> None:
    """The process runs with exactly the profile's values, and the model list and the catalogue agree with them."""
    words, environment = process(lab)
    for name, value in PROFILES[profile]["settings"].items():
        spec = CATALOGUE["settings"][name]
        if spec["type"] == "bool" and "env" in spec:
            assert f"{spec['env']}={int(value)}" in environment
        elif spec["type"] == "bool":
            assert (spec["flag"] in words) is value
        elif "env" in spec:
            assert f"{spec['env']}={value}" in environment
        else:
            assert words[words.index(spec["flag"]) + 1] == str(value)
    context = PROFILES[profile]["settings"]["context_tokens"]
    answer = served(lab)
    assert answer["data"][0]["context_length"] == context
    (codex,) = answer["models"]
    assert codex["context_window"] == codex["max_context_window"] == context
    assert codex["auto_compact_token_limit"] < context
    assert codex["base_instructions"].strip()


def test_the_recipe_for_three_million(lab: Lab) -> None:
    holds(lab, "three_million")


def test_the_engine_has_nothing_to_say_about_the_catalogue(lab: Lab) -> None:
    log = lab.hosts[0].journal("ds4")
    assert "codex models catalog spliced into /v1/models" in log
    assert "declares context_window" not in log


def test_status_tells_the_figures_and_what_the_engine_reports(lab: Lab) -> None:
    text = scenario.run(lab, "status.yml")
    assert "profile three_million: context 786432 tokens, about 3.22 GiB when full" in text
    assert "banks to expect: 6 (as set); the engine reports 6" in text
    assert "a request without max_tokens is charged 32768 tokens beyond its prompt" in text
    assert "memory for conversations now: about" in text


def test_a_preview_tells_the_figures_too(lab: Lab) -> None:
    text = scenario.run(lab, "site.yml", "--check", "-e", "engine_service_profile=full_window")
    assert "if applied:" in text
    assert "profile full_window: context 1048576 tokens" in text
    assert "banks to expect: 3 to 6 (estimate)" in text


@pytest.mark.parametrize("options", [{"serving_mode_target": "unmanaged"}, {"serving_mode_target": "desktop"}])
def test_the_recipe_is_refused_beside_a_desktop(lab: Lab, options: dict[str, str]) -> None:
    before = lab.hosts[0].run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out
    with pytest.raises(AssertionError) as failure:
        scenario.run(lab, "site.yml", "-e", json.dumps(options))
    assert "leaves so little memory free that no desktop may run beside it" in str(failure.value)
    assert "nothing was touched" in str(failure.value)
    assert lab.hosts[0].run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out == before


@pytest.mark.parametrize("profile", ["agents", "shared_desktop", "full_window", "standard"])
def test_every_other_profile_is_served(lab: Lab, profile: str) -> None:
    directory = [word for word in process(lab)[0] if word.startswith("/") and "/kv/" in word]
    scenario.run(lab, "site.yml", "-e", f"engine_service_profile={profile}")
    holds(lab, profile)
    assert [
        word for word in process(lab)[0] if word.startswith("/") and "/kv/" in word
    ] == directory  # conversations are kept


def test_conversations_in_memory_are_refused(lab: Lab) -> None:
    before = lab.hosts[0].run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out
    with pytest.raises(AssertionError) as failure:
        scenario.run(lab, "site.yml", "-e", "engine_service_kv_dir=/dev/shm/ds4-kv")
    assert "KV of conversations would lie in memory" in str(failure.value)
    assert lab.hosts[0].run("systemctl show ds4 -p ExecMainStartTimestampMonotonic --value").out == before


def test_conversations_lie_where_they_are_told_to(lab: Lab) -> None:
    options = {"engine_service_kv_dir": "/srv/ds4 kv", "engine_service_profile": "standard"}
    scenario.run(lab, "site.yml", "-e", json.dumps(options))
    words, _environment = process(lab)
    assert words[words.index("--kv-disk-dir") + 1].startswith("/srv/ds4 kv/ds4-")
    assert lab.hosts[0].run("stat -c '%U %a' '/srv/ds4 kv'").out.strip() == "ds4 700"


def test_the_profiles_above_are_all_there_are() -> None:
    assert set(PROFILES) == {"three_million", "agents", "shared_desktop", "full_window", "standard"}


# -- agents of the served Spark --------------------------------------------------------------------------------------
def changes(summary: Path) -> dict[str, int]:
    hosts = json.loads(summary.read_text(encoding="utf-8"))["hosts"]
    return {name: entry["stats"]["changed"] for name, entry in hosts.items()}


def test_clients_are_configured_from_the_served_context_and_removed_again(lab: Lab, tmp_path: Path) -> None:
    spark = lab.hosts[0]
    agents = tmp_path / "agents.yml"
    laptop = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "agent_clients_home": str(tmp_path / "laptop"),
    }
    agents.write_text(json.dumps({"agents": {"hosts": {spark.name: {}, "laptop": laptop}}}))
    options = [
        "-i",
        str(agents),
        "-e",
        f"agent_clients_directory={tmp_path}/clients",
        "-e",
        "agent_clients_make_default=true",
    ]
    options += ["-e", "agent_clients_codex_instructions_url="]  # no network here
    context = served(lab)["data"][0]["context_length"]
    home = spark.run(f"getent passwd {spark.user} | cut -d: -f6").out.strip()

    predicted = scenario.run(lab, "clients.yml", "--check", "--diff", *options)
    assert f'+      "context_window": {context},' in predicted
    assert not (tmp_path / "clients").exists()

    text = scenario.run(lab, "clients.yml", *options)
    folder = tmp_path / "clients" / spark.name
    assert f"{spark.name} serves {context} tokens of context at http://127.0.0.1:8000" in text
    told = " ".join(text.split())
    assert "laptop: the clients are given http://127.0.0.1:8000, which is this machine itself" in told
    assert f"{spark.name}: the clients are given" not in told
    assert "http://127.0.0.1:8000/v1" in (tmp_path / "laptop/.codex/config.toml").read_text()
    (codex,) = json.loads((folder / "codex/ds4-models.json").read_text())["models"]
    assert codex["context_window"] == context
    assert codex == served(lab)["models"][0]  # what the engine serves, as it is
    written = spark.run(
        f"cat {home}/.codex/config.toml {home}/.local/bin/claude-ds4 {home}/.config/opencode/opencode.json {home}/.pi/agent/models.json"
    ).out
    assert f"CLAUDE_CODE_MAX_CONTEXT_TOKENS={context}" in written
    assert f'"context": {context}' in written
    assert f'"contextWindow": {context}' in written

    again = tmp_path / "again.json"
    scenario.run(lab, "clients.yml", *options, summary=again)
    assert set(changes(again).values()) == {0}

    scenario.run(lab, "clients.yml", *options, "-e", "agent_clients_state=absent")
    assert not folder.parent.exists()
    assert not (tmp_path / "laptop/.codex").exists()
    assert spark.run(f"find {home} -type f -path '*ds4*' | wc -l").out.strip() == "0"
    assert spark.run(f"ls -A {home}/.codex {home}/.pi 2>/dev/null | wc -l").out.strip() == "0"


def test_clients_of_a_spark_that_does_not_serve_are_refused_with_the_cure(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        scenario.run(
            lab, "clients.yml", "-e", "agent_clients_port=18999", "-e", f"agent_clients_directory={tmp_path}/clients"
        )
    assert "the engine does not say what it serves, so no client can be given its limits" in " ".join(
        str(failure.value).split()
    )
