"""The room of the weights: compare, plan, start or attach, follow, exchange, take away; through the module's own door."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible.module_utils.ds4 import (  # isort: skip  (the copies that the module uses)
    accounts,
    exchange,
    fetch_unit,
    generations,
    guest,
    records,
    space,
    wanted,
    weights,
)
from ansible.module_utils.ds4.plan import load  # isort: skip
from ansible.module_utils.ds4.service import parse_show  # isort: skip

# By its path: the action plugin has the same name.
_SPEC = importlib.util.spec_from_file_location(
    "door", Path(__file__).resolve().parents[2] / "plugins/modules/ds4_weights.py"
)
assert _SPEC and _SPEC.loader
door = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(door)

BASE, DRAFTER, OLD = b"GGUFbase" + bytes(5000), b"GGUFdrafter" + bytes(900), b"GGUFold!" + bytes(5000)
GIB = 1024**3


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


FILES = [
    {"role": "base", "repo": "o/n", "revision": "1" * 40, "file": "base.gguf", "bytes": len(BASE), "sha256": sha(BASE)},
    {
        "role": "drafter",
        "repo": "o/d",
        "revision": "2" * 40,
        "file": "drafter.gguf",
        "bytes": len(DRAFTER),
        "sha256": sha(DRAFTER),
    },
]
KNOWN = [{"generation": "0731", **FILES[0]}, {"generation": "legacy", **FILES[0], "sha256": sha(OLD)}]


class Host:
    """A host without systemd: what the service would do is done by the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "weights"
        self.state = root / "state"
        self.busy = False
        self.started: list[str] = []
        self.warnings: list[str] = []
        self.when_started: Callable[[], None] = self.fetch
        self.free = 100 * GIB
        self.engines: list[dict[str, Any]] = []

    def fetch(self) -> None:
        for item in load(str(self.state / "plan.json")).files:
            content = {sha(BASE): BASE, sha(DRAFTER): DRAFTER}[item.sha256]
            self.lay(item.target, content, role=item.role)
        self.tell(state="done", bytes_received=len(BASE) + len(DRAFTER), elapsed_seconds=2.0)
        self.busy = False

    def lay(self, name: str, content: bytes, role: str = "base") -> Path:
        path = self.directory / name
        path.write_bytes(content)
        hashed = records.hash_file(str(path), 1024)
        source = f"https://huggingface.co/o/n/resolve/1/{name}"
        records.write(
            str(path),
            records.make(
                str(path), {"role": role, "generation": "g"}, hashed, how="fetched", source=source, trust="manifest"
            ),
        )
        return path

    def tell(self, **values: Any) -> None:
        base = {
            "state": "running",
            "files": [],
            "bytes_received": 0,
            "elapsed_seconds": 0.0,
            "error": None,
            "notes": [],
        }
        (self.directory / ".fetch/status.json").write_text(json.dumps({**base, **values}))

    def unit(self) -> fetch_unit.Unit:
        return fetch_unit.Unit(
            parse_show(f"ActiveState={'active' if self.busy else 'inactive'}\nResult=exit-code\nExecMainStatus=1"),
            False,
        )

    def run(self, state: str = "present", check: bool = False, **more: Any) -> dict[str, Any]:
        """Result of the module."""
        params: dict[str, Any] = {
            "state": state, "generation": "0731", "files": FILES, "known": KNOWN, "directory": str(self.directory),
            "state_directory": str(self.state), "bin_directory": str(self.root / "bin"), "user": "root", "margin_gib": 0,
            "deployments_directory": str(self.root / "deployments"), "current_link": str(self.root / "current"),
            "deployments_state_directory": str(self.root), "wait_seconds": 0.5, **more,
        }  # fmt: skip
        outcome: dict[str, Any] = {}
        mine = self.warnings

        def ended(self: Any, **values: Any) -> None:
            outcome.update(values)
            raise SystemExit

        with pytest.MonkeyPatch.context() as patch, patch_module_args({**params, "_ansible_check_mode": check}):
            patch.setattr(door.AnsibleModule, "exit_json", ended)
            patch.setattr(door.AnsibleModule, "warn", lambda self, text: mine.append(text))
            patch.setattr(door.AnsibleModule, "fail_json", lambda self, **values: ended(self, failed=True, **values))
            with pytest.raises(SystemExit):
                door.main()
        return outcome

    def written(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    for folder in ("bin", "units"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(fetch_unit.Layout, "unit", property(lambda self: str(tmp_path / "units/ds4-fetch.service")))
    monkeypatch.setattr(fetch_unit, "unit_now", made.unit)
    monkeypatch.setattr(weights, "unit_now", made.unit)

    def start(plan: Any, layout: Any) -> None:
        made.started.append(plan.id)
        made.busy = True
        made.when_started()

    monkeypatch.setattr(fetch_unit, "start", start)
    monkeypatch.setattr(fetch_unit, "stop", lambda: setattr(made, "busy", False))
    monkeypatch.setattr(fetch_unit, "log", lambda: "last words")
    service = SimpleNamespace(reload_manager=lambda: None, disable=lambda: None, stop=lambda seconds: None)
    monkeypatch.setattr(fetch_unit, "Service", lambda unit: service)
    for module in (wanted, exchange):
        monkeypatch.setattr(module, "ds4_processes", lambda: made.engines)
    monkeypatch.setattr(space.os, "statvfs", lambda path: SimpleNamespace(f_bavail=made.free, f_frsize=1))
    monkeypatch.setattr(weights, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(guest, "step_back", lambda: None)
    monkeypatch.setattr(accounts, "account", lambda user: accounts.Account(os.geteuid(), os.getegid(), frozenset()))
    return made


def test_check_mode_says_what_would_happen_and_does_nothing(host: Host) -> None:
    result = host.run(check=True)
    assert (result["state"], result["changed"]) == ("planned", True)
    total = len(BASE) + len(DRAFTER)
    assert result["msg"] == f"would fetch 5.8 KiB ({total} bytes) from huggingface.co"
    assert result["plan"]["bytes_to_fetch"] == result["ds4_summary"]["bytes_to_fetch"] == total
    assert [os.path.basename(path) for path in result["plan"]["write"]] == [
        "ds4-fetch.service",
        "ds4-fetch",
        "plan.json",
    ]
    assert host.written() == set()


def test_fetch_then_nothing_to_do(host: Host) -> None:
    first = host.run()
    assert (first["state"], first["changed"]) == ("done", True)
    assert first["weights"]["files"]["drafter"] == {
        "path": str(host.directory / "drafter.gguf"),
        "sha256": sha(DRAFTER),
        "bytes": len(DRAFTER),
    }
    assert (first["weights"]["bytes_fetched"], first["weights"]["seconds"]) == (len(BASE) + len(DRAFTER), 2.0)
    assert first["weights"]["source"] == "huggingface.co"
    assert first["ds4_summary"]["text"] == "fetched 5.8 KiB in 2s (0 MiB/s), verified"
    before = host.written()
    second = host.run()
    assert (second["state"], second["changed"]) == ("done", False)
    assert second["ds4_summary"] == {
        "room": "weights",
        "state": "ok",
        "text": "0731: base + drafter verified, nothing to fetch",
        "files": 2,
    }
    assert len(host.started) == 1 and host.written() == before
    assert host.run(check=True)["changed"] is False


def test_considerate_settings_of_the_day_change_nothing_on_a_second_run(host: Host) -> None:
    host.run()
    host.engines = [{"weights": [str(host.root / "elsewhere/base.gguf")]}]
    assert host.run(guest="auto", memory_floor_gib=2)["changed"] is False


def test_a_slow_fetch_is_followed(host: Host) -> None:
    row = {"role": "base", "state": "fetching", "bytes": 100, "done": 50, "hashed": 0}
    host.when_started = lambda: host.tell(files=[row], rate_bytes_per_second=10)
    started = host.run()
    assert (started["state"], started["changed"]) == ("running", True)
    assert started["progress"] == "base 50 %  0.0/0.0 MiB  0.0 MiB/s  eta 5s"
    again = host.run()
    assert (again["state"], again["changed"], len(host.started)) == ("running", False, 1), "a second start attaches"
    host.fetch()
    done = host.run("followed")
    assert done["state"] == "done" and done["weights"]["files"]["base"]["sha256"] == sha(BASE)


def test_another_plan_takes_over(host: Host) -> None:
    host.when_started = lambda: host.tell()
    host.run()
    host.run(connections=4)
    assert len(set(host.started)) == 2
    assert load(str(host.state / "plan.json")).connections == 4


def test_the_fetchers_own_words_reach_the_operator(host: Host) -> None:
    error = {
        "what": "base.gguf could not be fetched",
        "found": "HTTP 401",
        "required": "a source",
        "cure": "weights_token_file",
        "evidence": {},
    }

    def fail() -> None:
        host.tell(state="failed", error=error, notes=["12:00:00 tried"])
        host.busy = False

    host.when_started = fail
    result = host.run()
    assert result["failed"] and "HTTP 401" in result["msg"] and "weights_token_file" in result["msg"]
    assert result["error"]["evidence"]["notes"] == ["12:00:00 tried"]
    assert result["ds4_summary"]["state"] == "failed"


def test_a_fetch_that_vanished(host: Host) -> None:
    host.when_started = lambda: setattr(host, "busy", False)
    result = host.run()
    assert result["failed"] and "journalctl -u ds4-fetch.service" in result["msg"]
    assert result["error"]["evidence"]["log"] == ["last words"]


def test_no_room_is_said_with_numbers_before_anything_moves(host: Host) -> None:
    host.free = 3000
    needs = [{"path": str(host.root), "bytes": 4000, "what": "build"}]
    result = host.run(extra_needs=needs)
    assert result["failed"] and host.started == []
    assert re.search(
        r"9.7 KiB needed \(base 4.9 KiB, drafter 911 B, build 3.9 KiB\) \+ 0 B margin, 2.9 KiB free", result["msg"]
    )
    assert "6.8 KiB more on" in result["msg"] and "weights_old_generation" in result["msg"]
    assert host.run(check=True, extra_needs=needs)["failed"], "check mode tells it too"


def test_what_others_have_written_already_is_credited(host: Host) -> None:
    kv = host.root / "kv"
    (kv / "deep").mkdir(parents=True)
    (kv / "deep/one").write_bytes(b"x" * 8192)
    host.free = len(BASE) + len(DRAFTER) + 100
    need = {"path": str(kv), "bytes": 8192, "what": "KV"}
    assert host.run(check=True, extra_needs=[need])["failed"]
    os.sync()
    assert host.run(check=True, extra_needs=[{**need, "present": [str(kv)]}])["state"] == "planned"


def test_a_closed_file_that_costs_a_copy_is_named_with_its_cure(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "account", lambda user: accounts.Account(4711, 4711, frozenset()))
    monkeypatch.setattr(wanted.os, "geteuid", lambda: 0)
    home = host.root / "gguf"
    home.mkdir()
    (home / "base.gguf").write_bytes(BASE)
    (home / "base.gguf").chmod(0o600)
    host.free = 2000
    refused = host.run(check=True, adopt_paths=[str(home)])
    assert refused["failed"] and f"read {home}/base.gguf (chmod o+r)" in refused["msg"]
    assert host.run(check=True, adopt_paths=[str(home)], adopt_move=True)["state"] == "planned"


def test_partial_files_are_credited(host: Host) -> None:
    host.directory.mkdir()
    (host.directory / ".ds4-fleet").write_text("{}")
    part = host.directory / ".base.gguf.part"
    part.write_bytes(BASE)
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    host.free = len(DRAFTER) + 10
    result = host.run(check=True)
    assert not result.get("failed")
    assert result["plan"]["bytes_to_fetch"] == len(BASE) + len(DRAFTER), "room is not trust: the journal says nothing"


def test_a_file_that_is_there_is_adopted(host: Host) -> None:
    home = host.root / "gguf"
    home.mkdir()
    (home / "base.gguf").write_bytes(BASE)
    result = host.run(check=True, adopt_paths=[str(home)])
    assert f"would adopt base from {home}/base.gguf after verifying it" in result["msg"]
    assert result["plan"]["bytes_to_fetch"] == len(DRAFTER)
    host.engines = [{"weights": [str(home / "base.gguf")]}]
    assert "would adopt base" in host.run(check=True)["msg"], "the files of a running engine are found by themselves"
    assert "would adopt" not in host.run(check=True, adopt_running=False)["msg"]


def test_a_file_of_the_right_length_alone_is_not_counted_on(host: Host) -> None:
    """Both base files have the same length: the public installer's old one is not the new one."""
    home = host.root / "gguf"
    home.mkdir()
    old = home / "legacy.gguf"
    old.write_bytes(OLD)
    host.engines = [{"weights": [str(old)]}]
    total = len(BASE) + len(DRAFTER)
    result = host.run(check=True)
    assert result["plan"]["bytes_to_fetch"] == total and result["plan"]["adopt"] == {}
    assert f"would first read {old} to see whether it is base" in result["msg"]

    host.free = 2000
    refused = host.run(check=True)
    assert refused["failed"] and f"unless {old} is base, which only reading it tells" in refused["msg"]
    refused = host.run()
    assert refused["failed"] and "base 4.9 KiB" in refused["msg"] and str(old) not in refused["msg"], "read, and known"
    asked: dict[str, Any] = {
        "old_generation": "remove_before_fetch",
        "rollback_waived": True,
        "clean_paths": [str(home)],
    }
    assert host.run(**asked)["state"] == "deferred"
    assert host.started == []


def test_a_renamed_file_is_read_before_anything_is_refused(host: Host) -> None:
    home = host.root / "gguf"
    home.mkdir()
    (home / "renamed.gguf").write_bytes(BASE)
    host.free = 2000
    assert host.run(check=True, adopt_paths=[str(home)])["failed"]
    assert host.run(adopt_paths=[str(home)])["state"] == "done"
    assert host.started


def test_another_content_under_the_final_name_needs_room(host: Host) -> None:
    host.run()
    host.lay("base.gguf", OLD)
    result = host.run(check=True)
    assert result["plan"]["bytes_to_fetch"] == len(BASE)
    host.free = 2000
    assert "base 4.9 KiB" in host.run()["msg"]


def test_a_changed_file_is_read_where_it_is(host: Host) -> None:
    host.run()
    (host.directory / "base.gguf").touch()
    result = host.run(check=True)
    assert result["msg"] == "would read base where it is"
    assert result["plan"]["bytes_to_fetch"] == 0


def test_foreign_things_are_not_taken_over(host: Host) -> None:
    host.directory.mkdir()
    (host.directory / "theirs").write_text("x")
    assert "weights_adopt_paths" in host.run()["msg"]
    (host.directory / "theirs").unlink()
    (host.root / "bin/ds4-fetch").write_text("#!/bin/sh\nmine\n")
    assert "bin/ds4-fetch is not ours" in host.run()["msg"]
    assert (host.root / "bin/ds4-fetch").read_text() == "#!/bin/sh\nmine\n"


def test_the_disk_of_the_weights_is_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.run()
    monkeypatch.setattr(
        space, "mount_of", lambda path: {"path": "/elsewhere", "uuid": "", "source": "x", "type": "ext4"}
    )
    result = host.run()
    assert result["failed"] and "is not mounted" in result["msg"]
    assert host.run(mount_change_accepted=True)["state"] == "done"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"files": []}, "has no files"),
        ({"sources": ["ftp://x"]}, "weights_sources holds ftp"),
        ({"connections": 100}, "weights_connections 100"),
        ({"proxy_url": "http://u:p@x:1"}, "weights_proxy_credentials_file"),
        ({"old_generation": "remove_before_fetch"}, "weights_rollback_waived"),
        ({"old_generation": "keep", "clean_paths": ["/x"]}, "contradicts"),
        ({"token_file": "/nowhere"}, "weights_token_file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_touched(host: Host, settings: dict[str, Any], said: str) -> None:
    result = host.run(**settings)
    assert result["failed"] and said in result["msg"]
    assert host.started == []


def old_beside(host: Host) -> Path:
    host.run()
    host.started.clear()
    path = host.lay("old.gguf", OLD)
    for name in ("base.gguf", "drafter.gguf"):
        (host.directory / name).unlink()
        os.unlink(records.record_path(str(host.directory / name)))
    return path


def test_old_files_are_reported(host: Host) -> None:
    host.run()
    host.lay("old.gguf", OLD)
    result = host.run()
    assert result["bytes_deletable"] == len(OLD) and result["old"][0]["called"] == "legacy base"
    assert result["ds4_summary"]["text"].endswith("4.9 KiB of old files")


@pytest.mark.parametrize(
    ("waived", "deletable", "said"),
    [
        (True, len(OLD), "4.9 KiB of old files could be deleted afterwards"),
        (False, 0, "4.9 KiB stay for a return, unless weights_rollback_waived: true"),
    ],
)
def test_what_an_upgrade_could_delete(host: Host, waived: bool, deletable: int, said: str) -> None:
    """What serves at the time of the plan will only be the way back afterwards."""
    old_beside(host)
    deploy(host, True, [{"sha256": sha(OLD)}])
    result = host.run(check=True, old_generation="remove_after_smoke", rollback_waived=waived)
    assert (result["bytes_deletable"], result["bytes_for_return"]) == (deletable, len(OLD) - deletable)
    assert said in result["msg"]


def test_hashes_that_no_manifest_pins_are_said(host: Host) -> None:
    rows = [
        {"role": "base", "file": "base.gguf", "trust": "manifest", "sha256": "aa", "how": "fetched"},
        {"role": "drafter", "file": "drafter.gguf", "trust": "first-use", "sha256": "bb", "how": "linked"},
        {"role": "mtp", "file": "mtp.gguf", "trust": "hub", "sha256": "cc", "how": "fetched"},
    ]

    def fetch() -> None:
        host.fetch()
        host.tell(state="done", files=rows)

    host.when_started = fetch
    result = host.run()
    assert result["ds4_summary"]["text"] == "drafter were on the host, verified; hash of drafter recorded at first use"
    assert host.warnings == [
        "drafter.gguf: nobody publishes its hash; recorded at first use: sha256 bb. Pin it in ds4_weights_extra.",
        "mtp.gguf: only the hub says its hash: sha256 cc. Pin it in ds4_weights_extra.",
    ]
    host.warnings.clear()
    host.run()
    assert host.warnings == [], "said once"


def test_a_clean_up_that_could_not_read_everything_is_known_to_the_next_run(host: Host) -> None:
    host.run()
    home = host.root / "gguf"
    home.mkdir()
    (home / "old.gguf").write_bytes(OLD)
    deploy(host, True)
    settings: dict[str, Any] = {"old_generation": "remove_after_smoke", "clean_paths": [str(home)]}
    assert host.run(**settings)["old_unread"] == 1
    result = host.run("clean", **settings)
    assert result["served"] and result["bytes_freed"] == len(OLD) and not (home / "old.gguf").exists()
    assert host.run(**settings)["old_unread"] == 0


def test_exchange_is_left_to_the_switch_only_when_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    old = old_beside(host)
    host.free = 2000
    refused = host.run()
    assert refused["failed"] and "old files: legacy base, 4.9 KiB" in refused["msg"]
    asked: dict[str, Any] = {"old_generation": "remove_before_fetch", "rollback_waived": True}
    assert host.run(check=True, **asked)["state"] == "planned"
    assert not (host.state / "exchange.json").exists()
    deferred = host.run(**asked)
    assert deferred["state"] == "deferred" and deferred["weights"]["deferred"] and old.exists() and host.started == []
    assert (
        "legacy base, 4.9 KiB will be deleted in the switch" in deferred["msg"]
        and "a rollback will not be possible" in deferred["msg"]
    )
    assert exchange.coming(str(host.state / "plan.json"), str(host.state)) == {sha(BASE), sha(DRAFTER)}

    host.engines = [{"weights": [str(old)]}]
    plan = str(host.state / "plan.json")
    with pytest.raises(weights.Ds4Error, match="in use by a running engine"):
        weights.make_exchange(plan, str(host.state), 5)
    assert old.exists()
    host.engines = []
    order: list[str] = []
    real = generations.remove

    def remove(olds: Any) -> list[generations.Old]:
        order.append("delete")
        return list(real(olds))

    def fetch() -> None:
        order.append("fetch")
        host.fetch()

    monkeypatch.setattr(generations, "remove", remove)
    host.when_started = fetch
    text = weights.make_exchange(plan, str(host.state), 5)
    assert order == ["delete", "fetch"] and not old.exists()
    assert text.startswith("deleted legacy base, 4.9 KiB; fetched")
    assert weights.make_exchange(plan, str(host.state), 5) == "", "done once"
    assert host.run(**asked)["state"] == "done"


def replaced(old: Path) -> None:
    old.write_bytes(b"GGUFsomebody else's model")


def linked(old: Path) -> None:
    old.rename(old.parent / "elsewhere.gguf")
    old.symlink_to(old.parent / "elsewhere.gguf")


@pytest.mark.parametrize("change", [replaced, linked])
def test_what_lies_at_the_planned_path_by_now_is_looked_at_again(host: Host, change: Callable[[Path], None]) -> None:
    old = old_beside(host)
    host.free = 2000
    assert host.run(old_generation="remove_before_fetch", rollback_waived=True)["state"] == "deferred"
    change(old)
    with pytest.raises(weights.Ds4Error, match="is not what was to be deleted"):
        weights.make_exchange(str(host.state / "plan.json"), str(host.state), 5)
    assert os.path.lexists(old) and host.started == []


def test_a_named_folder_that_became_a_link_is_not_followed(host: Host) -> None:
    host.run()
    home = host.root / "gguf"
    home.mkdir()
    (home / "old.gguf").write_bytes(OLD)
    for name in ("base.gguf", "drafter.gguf"):
        (host.directory / name).unlink()
        os.unlink(records.record_path(str(host.directory / name)))
    host.free = 2000
    asked: dict[str, Any] = {
        "old_generation": "remove_before_fetch",
        "rollback_waived": True,
        "clean_paths": [str(home)],
    }
    assert host.run(**asked)["state"] == "deferred"
    home.rename(host.root / "models")
    home.symlink_to(host.root / "models")
    with pytest.raises(weights.Ds4Error, match="symbolic link"):
        weights.make_exchange(str(host.state / "plan.json"), str(host.state), 5)
    assert (host.root / "models/old.gguf").exists()


def test_an_exchange_that_would_not_be_enough(host: Host) -> None:
    old_beside(host)
    host.free = 100
    result = host.run(old_generation="remove_before_fetch", rollback_waived=True)
    assert result["failed"] and "after removing legacy base" in result["msg"]


def deploy(host: Host, proven: bool, entries: list[dict[str, Any]] = FILES) -> None:
    folder = host.root / "deployments/aaa"
    folder.mkdir(parents=True)
    files = {str(number): {"sha256": entry["sha256"]} for number, entry in enumerate(entries)}
    (folder / "manifest.json").write_text(json.dumps({"id": "aaa", "release": "v1", "weights": {"files": files}}))
    (host.root / "current").symlink_to("deployments/aaa")
    (host.root / "deployments.json").write_text(
        json.dumps({"proven": [{"id": "aaa", "release": "v1"}] if proven else []})
    )


@pytest.mark.parametrize(
    ("policy", "proven", "gone"),
    [("keep", True, False), ("remove_after_smoke", False, False), ("remove_after_smoke", True, True)],
)
def test_clean_after_the_smoke_test(host: Host, policy: str, proven: bool, gone: bool) -> None:
    host.run()
    old = host.lay("old.gguf", OLD)
    deploy(host, proven)
    preview = host.run("clean", check=True, old_generation=policy)
    assert preview["changed"] is gone and old.exists()
    result = host.run("clean", old_generation=policy)
    assert (result["changed"], result["bytes_freed"], old.exists()) == (gone, len(OLD) if gone else 0, not gone)
    reason = {"keep": "weights_old_generation: keep"}.get(policy, "the new service has not passed its questions yet")
    assert gone or reason in result["ds4_summary"]["text"]
    assert host.run("clean", old_generation=policy)["changed"] is False


def test_uninstall(host: Host) -> None:
    host.run()
    preview = host.run("absent", check=True, remove_files=True)
    assert preview["changed"] and preview["bytes_freed"] > len(BASE)
    kept = host.run("absent")
    assert "weights stay in" in kept["ds4_summary"]["text"] and (host.directory / "base.gguf").exists()
    assert not (host.root / "bin/ds4-fetch").exists() and not (host.root / "units/ds4-fetch.service").exists()
    host.run("absent", remove_files=True)
    assert host.written() == set()
    assert host.run("absent", remove_files=True)["changed"] is False
