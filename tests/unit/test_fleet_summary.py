"""The end of a run: which word of a room counts, what became of each host, and the command that goes on."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PLUGIN = Path(__file__).resolve().parents[2] / "plugins/callback/fleet_summary.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("fleet_summary", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summary = load()


@pytest.mark.parametrize(
    ("argv", "hosts", "again"),
    [
        ("ansible-playbook site.yml", ["localhost"], "ansible-playbook site.yml"),
        ("ansible-playbook -i f.yml site.yml", ["b", "c"], "ansible-playbook -i f.yml site.yml --limit b,c"),
        ("ansible-playbook -l a,b site.yml --check", ["b"], "ansible-playbook site.yml --check --limit b"),
        ("ansible-playbook -la:b --limit=c --limit d site.yml", ["b"], "ansible-playbook site.yml --limit b"),
        ("ansible-playbook -e x=1 -e @v.yml site.yml", ["b"], "ansible-playbook -e x=1 -e @v.yml site.yml --limit b"),
        ("ansible-playbook -e hub_token=hf_1 s.yml", ["b"], "ansible-playbook -e '***' s.yml --limit b"),
        (
            "ansible-playbook --extra-vars=pass_key=1 s.yml",
            ["b"],
            "ansible-playbook '--extra-vars=***' s.yml --limit b",
        ),
        ("ansible-playbook -epassword=1 s.yml", ["b"], "ansible-playbook '-e***' s.yml --limit b"),
        ("ansible-playbook -e @keys.yml s.yml", ["b"], "ansible-playbook -e @keys.yml s.yml --limit b"),
        (
            "/opt/venv/bin/ansible-playbook 'my site.yml'",
            ["b"],
            "/opt/venv/bin/ansible-playbook 'my site.yml' --limit b",
        ),
    ],
)
def test_the_command_to_go_on(argv: str, hosts: list[str], again: str) -> None:
    assert summary.command_again(shlex.split(argv), hosts) == again


@pytest.mark.parametrize(
    "words",
    [
        "-e hub_token=hunter2",
        "-ehub_token=hunter2",
        "-be hub_token=hunter2",
        "--extra-vars hub_token=hunter2",
        "--extra-vars=hub_token=hunter2",
        "--extra-var hub_token=hunter2",
        "--extra api_tokens=hunter2",
        "-e vault_pw=hunter2",
        """-e '{"ds4_proxy_url": "http://me:hunter2@proxy"}'""",
        "-e token=12345hunter2",
    ],
)
def test_no_secret_is_repeated_however_it_was_given(words: str) -> None:
    again = summary.command_again(shlex.split(f"ansible-playbook {words} site.yml"), ["a"])
    assert "hunter2" not in again
    assert again.endswith("site.yml --limit a")


class Stats:
    def __init__(self, failed: Collection[str], lost: Collection[str]) -> None:
        self.failed, self.lost = failed, lost

    def summarize(self, host: str) -> dict[str, int]:
        return {"changed": 0, "failures": int(host in self.failed), "unreachable": int(host in self.lost)}


def said(callback: Any, host: str, ended: str | None, **row: Any) -> None:
    content = {"ds4_summary": row, "msg": "it said so"} if row else {"msg": "it said so"}
    task = SimpleNamespace(get_name=lambda: "some task")
    callback._note(SimpleNamespace(host=SimpleNamespace(get_name=lambda: host), result=content, task=task), ended)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A callback, and a function that ends its run: the lines it shows and the file it writes."""
    callback = summary.CallbackModule()
    lines: list[str] = []
    callback._display = SimpleNamespace(display=lambda text, color=None: lines.append(text))
    path = tmp_path / "summary.json"
    monkeypatch.setattr(callback, "get_option", lambda name: str(path))
    monkeypatch.setattr(summary.sys, "argv", ["ansible-playbook", "site.yml"])
    monkeypatch.setattr(summary.context, "CLIARGS", {"check": False})

    def end(failed: Collection[str] = (), lost: Collection[str] = ()) -> tuple[list[str], dict[str, Any]]:
        callback.v2_playbook_on_stats(Stats(failed, lost))
        return lines, json.loads(path.read_text(encoding="utf-8"))

    return callback, end


def test_everybody_is_named_by_what_became_of_him_with_the_command_to_go_on(run: Any) -> None:
    callback, end = run
    for host in "abcdeg":
        said(callback, host, None, room="rollout", state="planned", text="waits in batch 1 of 2")
    for host in "abce":
        said(callback, host, None, room="rollout", state="changed", text="began with a")
    said(callback, "a", None, room="rollout", state="changed", text="done")
    said(callback, "b", None, room="rollout", state="skipped", text="left alone", outcome="skipped")
    said(callback, "c", "failed", room="engine_service", state="failed", text="returned: x", outcome="returned")
    said(callback, "c", "failed", room="rollout", state="failed", text="returned: x")
    said(callback, "e", "unreachable")
    said(callback, "f", "failed", room="host_verify", state="failed", text="no GPU")
    said(callback, "g", None, room="rollout", state="skipped", text="drained")
    lines, data = end({"c", "d", "f"}, {"e"})  # the end of the rollout is told on one of those that wait
    assert lines[-8:] == [
        "done: a",
        "left out: g",
        "left alone: b",
        "rolled back: c",
        "failed: f",
        "unreachable: e",
        "not attempted: d",
        "To go on, once that is seen to: ansible-playbook site.yml --limit b,c,d,e,f",
    ]
    assert data["to_go_on"] == "ansible-playbook site.yml --limit b,c,d,e,f"
    assert data["fates"]["c"] == "rolled back"


def test_a_run_that_is_done_names_no_command(run: Any) -> None:
    callback, end = run
    said(callback, "a", None, room="rollout", state="changed", text="done")
    said(callback, "b", None, room="rollout", state="ok", text="serves v1 already; not touched")
    lines, data = end()
    assert lines[-1] == "done: a"
    assert data["to_go_on"] == ""


def test_a_preview_waits_for_nobody(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary.context, "CLIARGS", {"check": True})
    callback, end = run
    said(callback, "a", None, room="rollout", state="planned", text="would be switched")
    assert end()[1]["to_go_on"] == ""


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (["changed", "ok"], "changed"),
        (["planned", "ok"], "planned"),
        (["ok", "changed"], "changed"),
        (["changed", "skipped"], "skipped"),
        (["planned", "changed", "changed"], "changed"),
        (["failed", "changed"], "failed"),
        (["skipped", "ok"], "ok"),
    ],
)
def test_the_last_word_counts_but_nothing_hides_a_change_or_a_failure(run: Any, states: list[str], shown: str) -> None:
    callback, end = run
    for number, state in enumerate(states):
        said(callback, "a", None, room="weights", state=state, text=str(number))
    assert end()[1]["hosts"]["a"]["rooms"]["weights"]["state"] == shown
