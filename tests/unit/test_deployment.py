"""Deployments on disk: identity, staging, drift, history and pruning, in a temporary folder and without systemd."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import deployment as store
from ds4 import records
from ds4.deployment import Layout, Wanted
from ds4.errors import Ds4Error
from ds4.files import MARKER_LINE, mark
from ds4.service import State, parse_show

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[2] / "docs/schemas/deployment.schema.json").read_text(encoding="utf-8")
)
UNIT = f"""# {MARKER_LINE}
[Service]
SupplementaryGroups=@HOST_GROUPS@
Environment=DS4_DEPLOYMENT=@DEPLOYMENT@
EnvironmentFile=/opt/ds4/deployments/@DEPLOYMENT@/ds4.env
ExecStart=/opt/ds4/builds/v0.6.5-addc0c4b/ds4-server --port 8000
"""


class FakeService:
    """Counts what systemd is told."""

    def __init__(self) -> None:
        self.reloads = 0

    def reload_manager(self) -> None:
        self.reloads += 1


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(
        deployments=str(tmp_path / "deployments"),
        current=str(tmp_path / "current"),
        unit_path=str(tmp_path / "ds4.service"),
        launcher=str(tmp_path / "bin" / "ds4-serve"),
        state=str(tmp_path / "state"),
        lib=str(tmp_path / "lib"),
    )
    for folder in (made.deployments, made.state, str(tmp_path / "bin")):
        os.makedirs(folder)
    return made


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "verify_unit", lambda text, unit: None)
    monkeypatch.setattr(store, "existing_groups", lambda names: " ".join(name for name in names if name == "video"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def wanted(**changes: Any) -> Wanted:
    values: dict[str, Any] = {
        "release": "v0.6.5",
        "profile": "standard",
        "build": {
            "id": "v0.6.5-addc0c4b",
            "path": "/opt/ds4/builds/v0.6.5-addc0c4b",
            "version": "v0.6.5",
            "commit": "addc0c4b",
            "binaries": {"ds4-server": {"sha256": "b" * 64, "bytes": 1}},
        },
        "weights": {
            "generation": "0731",
            "files": {"base": {"path": "/w/base.gguf", "sha256": "c" * 64, "bytes": 10}, "drafter": None},
        },
        "args": ["--port", "8000"],
        "env": {"DS4_CODEX_MODELS_FILE": "/opt/ds4/deployments/@DEPLOYMENT@/codex-models.json"},
        "files": {"ds4.service": UNIT, "ds4.env": "X=1\n", "ds4-serve": "#!/bin/sh\n", "codex-models.json": "{}\n"},
        "host": "127.0.0.1",
        "port": 8000,
        "context": 524288,
        "speculation": True,
        "user": "ds4",
        "memory_required_kib": 100,
    }
    return Wanted(**{**values, **changes})


def identity(**changes: Any) -> str:
    return store.identity(wanted(**changes), "ds4.service", "video")


def files(**changes: str) -> dict[str, str]:
    return {**wanted().files, **changes}


SAME = {
    "a comment of the unit": {"files": files(**{"ds4.service": "# other words\n" + UNIT})},
    "the launcher": {"files": files(**{"ds4-serve": "#!/bin/sh\necho\n"})},
    "the memory gate": {"memory_required_kib": 7},
    "the profile's name": {"profile": "agents"},
}
OTHER = {
    "the binary": {"build": {**wanted().build, "binaries": {"ds4-server": {"sha256": "d" * 64}}}},
    "a weights file": {
        "weights": {"generation": "0731", "files": {"base": {"path": "/w", "sha256": "e" * 64, "bytes": 1}}}
    },
    "an argument": {"args": ["--port", "8001"]},
    "an environment variable": {"env": {"DS4_MEM_FLOOR_GB": "4"}},
    "the catalogue": {"files": files(**{"codex-models.json": '{"models": []}\n'})},
    "a directive": {"files": files(**{"ds4.service": UNIT + "Restart=always\n"})},
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_what_the_process_does_not_consume_is_no_other_deployment(change: dict[str, Any]) -> None:
    assert identity(**change) == identity()


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_what_the_process_consumes_is_another_deployment(change: dict[str, Any]) -> None:
    assert identity(**change) != identity()


def test_groups_of_the_host_are_part_of_the_identity() -> None:
    assert store.identity(wanted(), "ds4.service", "video render") != identity()


def test_staging_writes_everything_filled_in(layout: Layout) -> None:
    staged = store.stage(wanted(), layout, ["video", "render"])
    folder = Path(layout.directory(staged.manifest["id"]))
    unit = (folder / "ds4.service").read_text(encoding="utf-8")
    jsonschema.validate(json.loads((folder / "manifest.json").read_text(encoding="utf-8")), SCHEMA)
    assert "@" not in unit
    assert "SupplementaryGroups=video\n" in unit
    assert f"DS4_DEPLOYMENT={staged.manifest['id']}" in unit
    assert staged.manifest["env"]["DS4_CODEX_MODELS_FILE"].endswith(f"{staged.manifest['id']}/codex-models.json")
    assert os.access(folder / "ds4-serve", os.X_OK)
    assert (folder / ".ds4-fleet").exists()
    assert set(staged.manifest["weights"]["files"]) == {"base"}
    assert staged.changed
    assert set(staged.after) == {"ds4.service", "ds4.env", "ds4-serve", "codex-models.json", "command line"}


def test_staging_again_changes_nothing(layout: Layout) -> None:
    first = store.stage(wanted(), layout, ["video"])
    stamp = os.stat(layout.directory(first.manifest["id"])).st_mtime_ns
    second = store.stage(wanted(), layout, ["video"])
    assert not second.changed
    assert os.stat(layout.directory(first.manifest["id"])).st_mtime_ns == stamp


def test_a_new_launcher_is_a_new_file_in_the_same_deployment(layout: Layout) -> None:
    first = store.stage(wanted(), layout, ["video"])
    second = store.stage(wanted(files=files(**{"ds4-serve": "#!/bin/sh\necho new\n"})), layout, ["video"])
    assert second.changed
    assert second.manifest["id"] == first.manifest["id"]
    assert "new" in Path(layout.directory(first.manifest["id"]), "ds4-serve").read_text(encoding="utf-8")


def test_check_mode_writes_nothing(layout: Layout) -> None:
    staged = store.stage(wanted(), layout, ["video"], check=True)
    assert staged.changed
    assert os.listdir(layout.deployments) == []


def test_a_folder_that_is_not_ours_is_never_written_to(layout: Layout) -> None:
    os.mkdir(layout.directory(identity()))
    with pytest.raises(Ds4Error, match="is not ours"):
        store.stage(wanted(), layout, ["video"])


def test_a_torn_deployment_is_completed(layout: Layout) -> None:
    first = store.stage(wanted(), layout, ["video"])
    os.unlink(os.path.join(layout.directory(first.manifest["id"]), "manifest.json"))
    assert layout.manifest(first.manifest["id"]) is None
    assert store.stage(wanted(), layout, ["video"]).changed
    assert layout.manifest(first.manifest["id"]) is not None


@pytest.mark.parametrize("name", ["", "../../etc", "0123456789AB", "0123456789ab/..", "x" * 12])
def test_only_an_id_names_a_deployment(layout: Layout, name: str) -> None:
    assert layout.manifest(name) is None


# ------------------------------------------------------------------------------------------------------ activation


def activated(layout: Layout, **changes: Any) -> dict[str, Any]:
    manifest = store.stage(wanted(**changes), layout, ["video"]).manifest
    service: Any = FakeService()
    store.activate(manifest, layout, service)
    assert service.reloads == 1
    return manifest


def test_activation_makes_it_what_systemd_starts(layout: Layout) -> None:
    manifest = activated(layout)
    assert layout.current_id() == manifest["id"]
    assert not os.path.islink(layout.unit_path), "systemd reads units before /opt may be mounted"
    assert manifest["id"] in Path(layout.unit_path).read_text(encoding="utf-8")
    assert Path(layout.launcher).read_text(encoding="utf-8") == "#!/bin/sh\n"
    assert activated(layout) == manifest, "it may be repeated"


@pytest.mark.parametrize("what", ["unit_path", "launcher", "current"])
def test_activation_refuses_files_that_are_not_ours(layout: Layout, what: str) -> None:
    manifest = store.stage(wanted(), layout, ["video"]).manifest
    Path(getattr(layout, what)).write_text("[Service]\nExecStart=/home/alice/ds4-server\n", encoding="utf-8")
    service: Any = FakeService()
    with pytest.raises(Ds4Error, match="not ours"):
        store.activate(manifest, layout, service)
    assert service.reloads == 0
    assert "alice" in Path(getattr(layout, what)).read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- drift


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.argv = ["/opt/ds4/builds/v0.6.5-addc0c4b/ds4-server", "--port", "8000"]
        self.executable = "/opt/ds4/builds/v0.6.5-addc0c4b/ds4-server"
        self.values = {
            "DS4_DEPLOYMENT": identity(),
            "DS4_CODEX_MODELS_FILE": f"/opt/ds4/deployments/{identity()}/codex-models.json",
        }

    def environment(self, *names: str) -> dict[str, str]:
        return self.values


def running() -> State:
    return parse_show("ActiveState=active\nSubState=running\nMainPID=4711\nLoadState=loaded\n")


def test_a_host_that_serves_exactly_this_has_no_reason_to_switch(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = activated(layout)
    monkeypatch.setattr(store, "Process", FakeProcess)
    assert store.drift(manifest, layout, running()) == []


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("values", {"DS4_DEPLOYMENT": "0" * 12}, "runs deployment 000000000000, wanted"),
        ("values", {}, "runs deployment unknown"),
        ("argv", ["/x/ds4-server", "--port", "9"], "command line of process 4711"),
        ("executable", "/x/ds4-server (deleted)", "binary was replaced"),
        (
            "values",
            {"DS4_DEPLOYMENT": identity(), "DS4_CODEX_MODELS_FILE": "/x"},
            "process 4711 was started with other values of DS4_CODEX_MODELS_FILE",
        ),
    ],
)
def test_what_the_process_says_is_believed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, says: str
) -> None:
    manifest = activated(layout)

    class Other(FakeProcess):
        def __init__(self, pid: int) -> None:
            super().__init__(pid)
            setattr(self, attribute, value)

    monkeypatch.setattr(store, "Process", Other)
    assert says in " ".join(store.drift(manifest, layout, running()))


def test_a_stopped_service_is_a_reason(layout: Layout) -> None:
    manifest = activated(layout)
    state = parse_show("ActiveState=failed\nResult=exit-code\nExecMainStatus=1\n")
    assert store.drift(manifest, layout, state) == ["ds4.service is not running: failed (exit-code, status 1)"]


def test_a_unit_edited_by_hand_is_a_reason_and_names_the_edit(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = activated(layout)
    monkeypatch.setattr(store, "Process", FakeProcess)
    Path(layout.unit_path).write_text(
        Path(layout.unit_path).read_text(encoding="utf-8") + "MemoryMax=1G\n", encoding="utf-8"
    )
    assert store.drift(manifest, layout, running()) == [f"{layout.unit_path} was edited by hand (MemoryMax=1G)"]


def test_another_comment_in_the_unit_is_no_reason(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = activated(layout)
    monkeypatch.setattr(store, "Process", FakeProcess)
    Path(layout.unit_path).write_text(Path(layout.unit_path).read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    assert store.drift(manifest, layout, running()) == []


def test_a_missing_unit_is_a_reason(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = activated(layout)
    monkeypatch.setattr(store, "Process", FakeProcess)
    os.unlink(layout.unit_path)
    assert store.drift(manifest, layout, running()) == [f"{layout.unit_path} is not there"]


# ------------------------------------------------------------------------------------------- files and old versions


def real(tmp_path: Path, layout: Layout, name: str, user: str = "root") -> dict[str, Any]:
    """A staged deployment whose binary and weights really are on disk, verified."""
    build = tmp_path / "builds" / name
    build.mkdir(parents=True)
    mark(str(build), "build")
    (build / "build.json").write_text("{}", encoding="utf-8")
    server = build / "ds4-server"
    server.write_text(name, encoding="utf-8")
    server.chmod(0o755)
    weights = tmp_path / "base.gguf"
    if not weights.exists():
        weights.write_bytes(b"GGUF" * 100)
        hashed = records.hash_file(str(weights), 4096)
        records.write(
            str(weights),
            records.make(str(weights), {"role": "base"}, hashed, how="fetched", source="test", trust="manifest"),
        )
    sha256 = store.file_digest(str(server))
    return store.stage(
        wanted(
            user=user,
            release=name,
            build={**wanted().build, "id": name, "path": str(build), "binaries": {"ds4-server": {"sha256": sha256}}},
            weights={
                "generation": "g",
                "files": {
                    "base": {
                        "path": str(weights),
                        "sha256": store.file_digest(str(weights)),
                        "bytes": weights.stat().st_size,
                    }
                },
            },
        ),
        layout,
        ["video"],
    ).manifest


def test_a_whole_deployment_has_no_problems(tmp_path: Path, layout: Layout) -> None:
    assert store.problems(real(tmp_path, layout, "v1")) == []


def test_a_replaced_binary_a_lost_build_and_changed_weights_are_told(tmp_path: Path, layout: Layout) -> None:
    manifest = real(tmp_path, layout, "v1")
    server = Path(manifest["build"]["server"])
    server.write_text("patched", encoding="utf-8")
    assert "not the binary that was built" in store.problems(manifest)[0]
    server.unlink()
    assert "the build is gone" in store.problems(manifest)[0]
    Path(manifest["weights"]["files"]["base"]["path"]).write_bytes(b"GGUF" * 100)
    assert "changed since it was verified" in store.problems(manifest)[1]


def test_weights_that_the_service_may_not_read_are_a_problem(tmp_path: Path, layout: Layout) -> None:
    manifest = real(tmp_path, layout, "v1", user="nobody")
    assert store.problems(manifest) == []
    Path(manifest["weights"]["files"]["base"]["path"]).chmod(0o600)
    assert store.problems(manifest) == ["base weights: base.gguf cannot be read by nobody"]
    assert store.problems({**manifest, "service": {"user": "ds4-gone"}})[0].startswith("There is no user ds4-gone")


def test_the_newest_proven_deployment_comes_first_and_once(layout: Layout) -> None:
    for name in ("a", "b", "a"):
        store.record_proven(layout, {"id": name, "release": name}, 1.5)
    assert store.proven(layout) == ["a", "b"]
    assert store.history(layout)[0]["downtime_seconds"] == 1.5


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"proven": null}',
        '{"proven": 3}',
        '{"proven": [null, {}, {"id": 7}, {"id": "b"}]}',
    ],
)
def test_a_history_of_another_shape_is_none(layout: Layout, content: str) -> None:
    """What runs is proven anew; a traceback would end every run."""
    (Path(layout.state) / "deployments.json").write_text(content, encoding="utf-8")
    assert store.history(layout) == []
    store.record_proven(layout, {"id": "a" * 12, "release": "v0.6.5"}, None)
    assert store.proven(layout) == ["a" * 12]


@pytest.mark.parametrize("target", ["/tmp/{id}", "deployments/x/../../elsewhere/{id}", "deployments/{id}/kv"])
def test_a_link_that_leads_elsewhere_names_no_deployment(layout: Layout, target: str) -> None:
    os.symlink(target.format(id="a" * 12), layout.current)
    assert layout.current_id() == ""
    os.unlink(layout.current)
    os.symlink("deployments/" + "a" * 12, layout.current)
    assert layout.current_id() == "a" * 12


def test_only_whole_proven_deployments_can_be_returned_to(tmp_path: Path, layout: Layout) -> None:
    first, second, third = (real(tmp_path, layout, name) for name in ("v1", "v2", "v3"))
    for manifest in (first, second, third):
        store.record_proven(layout, manifest, None)
    os.unlink(second["build"]["server"])
    assert [found["id"] for found in store.returnable(layout, third["id"])] == [first["id"]]


def test_pruning_keeps_the_last_proven_what_runs_and_what_is_staged_for_later(tmp_path: Path, layout: Layout) -> None:
    made = {name: real(tmp_path, layout, name) for name in ("v1", "v2", "v3", "v4", "failed")}
    builds = str(tmp_path / "builds")
    past = time.time() - 100
    for name, manifest in made.items():
        os.utime(os.path.join(layout.directory(manifest["id"]), "manifest.json"), (past, past))
        os.utime(os.path.join(builds, name, "build.json"), (past, past))
        if name != "failed":
            store.record_proven(layout, manifest, None)
    later = real(tmp_path, layout, "v5")
    os.utime(os.path.join(layout.directory(later["id"]), "manifest.json"), (time.time() + 5, time.time() + 5))
    (tmp_path / "builds" / "not-a-build").mkdir()
    plan = store.prune_plan(layout, builds, 2, {made["v1"]["id"]})
    assert plan["deployments"] == sorted(layout.directory(made[name]["id"]) for name in ("v2", "failed"))
    assert plan["builds"] == sorted(os.path.join(builds, name) for name in ("v2", "failed"))
    store.prune(layout, plan)
    assert sorted(os.listdir(builds)) == ["not-a-build", "v1", "v3", "v4", "v5"]
    assert made["v2"]["id"] not in store.proven(layout)
    assert store.prune_plan(layout, builds, 2, {made["v1"]["id"]}) == {"deployments": [], "builds": []}


def test_secrets_are_read_by_nobody_else_and_shown_to_nobody(layout: Layout) -> None:
    def with_token(value: str) -> Wanted:
        return wanted(env={"HF_TOKEN": value}, files=files(**{"ds4.env": f"HF_TOKEN={value}\n"}))

    first = store.stage(with_token("hunter1"), layout, []).manifest
    folder = layout.directory(first["id"])
    modes = {name: os.stat(os.path.join(folder, name)).st_mode & 0o777 for name in ("ds4.env", "manifest.json")}
    assert modes == {"ds4.env": 0o640, "manifest.json": 0o640}
    os.symlink(folder, layout.current)
    second = store.stage(with_token("hunter2"), layout, [])
    assert second.before["ds4.env"] == "HF_TOKEN=***\n"
    assert second.after["ds4.env"] == "HF_TOKEN=*** (another one)\n"
    assert store.shown(second.manifest, first)["env"] == {"HF_TOKEN": "*** (another one)"}
    assert second.manifest["env"] == {"HF_TOKEN": "hunter2"}, "the process gets the true one"


def test_what_pruning_will_remove_is_told_before_the_switch(tmp_path: Path, layout: Layout) -> None:
    made = {name: real(tmp_path, layout, name) for name in ("v1", "v2", "v3")}
    builds = str(tmp_path / "builds")
    for manifest in made.values():
        store.record_proven(layout, manifest, None)
    active = {made["v3"]["id"]}
    coming = store.prune_plan(layout, builds, 3, active, "4" * 12, os.path.join(builds, "v4"), ahead=True)
    assert coming == {"deployments": [layout.directory(made["v1"]["id"])], "builds": [os.path.join(builds, "v1")]}
    fourth = real(tmp_path, layout, "v4")
    assert store.prune_plan(layout, builds, 3, active, fourth["id"], os.path.join(builds, "v4"), ahead=True) == coming
    store.record_proven(layout, fourth, None)
    os.utime(store._history_path(layout), (time.time() + 5, time.time() + 5))
    assert store.prune_plan(layout, builds, 3, {fourth["id"]}, fourth["id"], os.path.join(builds, "v4")) == coming


def test_pruning_keeps_what_a_rollback_would_take_however_old(tmp_path: Path, layout: Layout) -> None:
    made = {name: real(tmp_path, layout, name) for name in ("v1", "v2", "v3")}
    for manifest in made.values():
        store.record_proven(layout, manifest, None)
    os.unlink(made["v2"]["build"]["server"])  # so nobody can go back to it
    plan = store.prune_plan(layout, str(tmp_path / "builds"), 1, set(), made["v3"]["id"], ahead=True)
    assert plan["deployments"] == [layout.directory(made["v2"]["id"])]


def test_pruning_never_touches_what_lacks_our_marker(tmp_path: Path, layout: Layout) -> None:
    foreign = Path(layout.deployments, "0123456789ab")
    foreign.mkdir()
    (foreign / "manifest.json").write_text(
        json.dumps({"id": "0123456789ab", "build": {"path": "/x"}}), encoding="utf-8"
    )
    os.utime(foreign / "manifest.json", (1, 1))
    store.record_proven(layout, {"id": "f" * 12, "release": "v"}, None)
    assert store.prune_plan(layout, str(tmp_path / "none"), 1, set())["deployments"] == []


@pytest.mark.parametrize(
    ("text", "active", "dead", "says"),
    [
        ("ActiveState=active\nSubState=running\nMainPID=7\n", True, False, "active"),
        ("ActiveState=activating\nSubState=start-pre\nMainPID=0\n", False, False, "activating"),
        (
            "ActiveState=activating\nSubState=auto-restart\nResult=exit-code\nExecMainStatus=1\n",
            False,
            True,
            "auto-restart",
        ),
        ("ActiveState=activating\nSubState=auto-restart-queued\n", False, True, "auto-restart-queued"),
        ("ActiveState=deactivating\nSubState=stop-sigterm\nMainPID=7\n", False, False, "deactivating"),
        ("ActiveState=inactive\nSubState=dead\n", False, True, "inactive"),
        ("", False, True, "inactive"),
    ],
)
def test_states_of_a_unit(text: str, active: bool, dead: bool, says: str) -> None:
    state = parse_show(text)
    assert (state.running, state.dead) == (active, dead)
    assert state.describe().startswith(says)
