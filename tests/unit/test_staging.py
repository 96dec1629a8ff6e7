"""Staging beside what serves, and what a host tells so that staging needs no round trip; with systemd in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4 import deployment as store
from ds4 import door, staging, transaction
from ds4.command import Ran
from ds4.deployment import Layout
from ds4.errors import Ds4Error
from ds4.files import MARKER_LINE, write_json
from ds4.service import Service, State, parse_show

HELPER = f"# {MARKER_LINE}\n[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"


class Systemd:
    """Which units are enabled, and what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enabled: set[str] = set()
        self.told: list[list[str]] = []
        monkeypatch.setattr(staging, "run", self.run)
        monkeypatch.setattr(Service, "state", lambda service: self.state(service.unit))

    def run(self, argv: list[str], **options: object) -> Ran:
        self.told.append(argv)
        if argv[1] == "enable":
            self.enabled.add(argv[2])
        return Ran(0, "", "")

    def state(self, unit: str) -> State:
        return parse_show(f"UnitFileState={'enabled' if unit in self.enabled else 'disabled'}\n")


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    monkeypatch.setattr(staging, "UNITS", str(tmp_path))
    return Systemd(monkeypatch)


def test_a_helper_is_written_and_enabled_once(systemd: Systemd) -> None:
    assert staging.install_helpers({"ds4-switch.service": HELPER}, check=True) == ["ds4-switch.service"]
    assert systemd.told == []
    assert staging.install_helpers({"ds4-switch.service": HELPER}) == ["ds4-switch.service"]
    assert systemd.enabled == {"ds4-switch.service"}
    assert staging.install_helpers({"ds4-switch.service": HELPER}) == []


def test_a_helper_that_was_written_but_not_enabled_is_enabled(systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "ds4-switch.service").write_text(HELPER, encoding="utf-8")
    assert staging.install_helpers({"ds4-switch.service": HELPER}) == ["ds4-switch.service"]
    assert systemd.enabled == {"ds4-switch.service"}


def test_a_helper_of_somebody_else_stays(systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "ds4-switch.service").write_text("[Service]\n", encoding="utf-8")
    with pytest.raises(Ds4Error, match="is not ours"):
        staging.install_helpers({"ds4-switch.service": HELPER})


# ------------------------------------------------------------------------------------------------------- what stands

UNIT = f"# {MARKER_LINE}\n[Service]\nEnvironment=DS4_DEPLOYMENT=@DEPLOYMENT@\nSupplementaryGroups=@HOST_GROUPS@\n"


@pytest.fixture
def asked(systemd: Systemd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a task asks for, on a host that serves just that, proven."""
    layout = Layout(
        deployments=str(tmp_path / "deployments"),
        current=str(tmp_path / "current"),
        unit_path=str(tmp_path / "etc" / "ds4.service"),
        launcher=str(tmp_path / "ds4-serve"),
        state=str(tmp_path / "state"),
        lib=str(tmp_path / "lib"),
    )
    for folder in (layout.deployments, layout.state, str(tmp_path / "etc")):
        os.makedirs(folder)
    monkeypatch.setattr(store, "verify_unit", lambda text, unit: None)
    monkeypatch.setattr(store, "existing_groups", lambda names: " ".join(names))
    monkeypatch.setattr(store, "drift", lambda manifest, layout, state: [])
    params: dict[str, Any] = {
        "layout": layout._asdict(),
        "deployment": {
            "release": "v0.6.5",
            "profile": "standard",
            "build": {"id": "v0.6.5-addc0c4b", "path": "/b", "version": "v0.6.5", "commit": "addc0c4b", "binaries": {}},
            "weights": {"generation": "0731", "files": {}},
            "args": ["--port", "8000"],
            "env": {"DS4_TOKEN": "hunter2", "DS4_BANKS": 6},
            "files": {"ds4.service": UNIT, "ds4.env": "DS4_TOKEN=hunter2\n", "ds4-serve": "#!/bin/sh\n"},
            "host": "127.0.0.1",
            "port": 8000,
            "context": 524288,
            "speculation": True,
            "user": "nobody",
            "memory_required_kib": 100,
        },
        "device_groups": ["video"],
        "policy": {"limits": {"stop_seconds": 300}},
        "helpers": {"ds4-switch.service": HELPER},
    }
    told = staging.have_staged(params, [], check=False)
    manifest = layout.manifest(told["deployment"]["id"])
    assert manifest is not None
    store.activate(manifest, layout, Service(layout.unit))
    store.record_proven(layout, manifest, None)
    systemd.enabled.add("ds4.service")
    return params


def question(params: dict[str, Any]) -> dict[str, Any]:
    return {**{name: params[name] for name in ("layout", "device_groups")}, "helpers": list(params["helpers"])}


def test_what_stands_is_told_as_staging_would_tell_it(asked: dict[str, Any]) -> None:
    found = staging.standing(question(asked))
    assert staging.stands(asked, ["mind this"], found) == staging.have_staged(asked, ["mind this"], check=False)
    assert "hunter2" not in str(found)
    assert "hunter2" not in str(staging.stands(asked, [], found))


def edited(name: str) -> Callable[[dict[str, Any]], None]:
    def edit(params: dict[str, Any]) -> None:
        layout = Layout(**params["layout"])
        path = {"unit": layout.unit_path, "helper": os.path.join(staging.UNITS, "ds4-switch.service")}.get(
            name, os.path.join(layout.directory(layout.current_id()), name)
        )
        with open(path, "a", encoding="utf-8") as stream:
            stream.write("# by hand\n")

    return edit


def other_policy(params: dict[str, Any]) -> None:
    write_json(os.path.join(params["layout"]["state"], "policy.json"), {"schema": 1})


def unfinished_switch(params: dict[str, Any]) -> None:
    layout = Layout(**params["layout"])
    transaction.request(layout, layout.current_id(), {}, "activate")


def not_proven(params: dict[str, Any]) -> None:
    os.unlink(os.path.join(params["layout"]["state"], "deployments.json"))


def no_marker(params: dict[str, Any]) -> None:
    layout = Layout(**params["layout"])
    os.unlink(os.path.join(layout.directory(layout.current_id()), ".ds4-fleet"))


def no_link(params: dict[str, Any]) -> None:
    os.unlink(params["layout"]["current"])


def mode_of(name: str, mode: int) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        layout = Layout(**params["layout"])
        os.chmod(os.path.join(layout.directory(layout.current_id()), name), mode)

    return change


def line_ends(params: dict[str, Any]) -> None:
    layout = Layout(**params["layout"])
    path = Path(layout.directory(layout.current_id())) / "ds4-serve"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def no_launcher(params: dict[str, Any]) -> None:
    os.unlink(params["layout"]["launcher"])


def link_elsewhere(params: dict[str, Any]) -> None:
    layout = Layout(**params["layout"])
    name = layout.current_id()
    os.unlink(layout.current)
    os.symlink(f"/tmp/{name}", layout.current)


def comment(params: dict[str, Any]) -> None:
    with open(params["layout"]["unit_path"], "a", encoding="utf-8") as stream:
        stream.write("# by hand\n")


def unit_mode(params: dict[str, Any]) -> None:
    os.chmod(params["layout"]["unit_path"], 0o666)  # noqa: S103  (that is the harm)


def owner_of(name: str) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        layout = Layout(**params["layout"])
        os.chown(os.path.join(layout.directory(layout.current_id()), name), 65534, -1)

    return change


def group_of_manifest(params: dict[str, Any]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    layout = Layout(**params["layout"])
    os.chown(os.path.join(layout.directory(layout.current_id()), "manifest.json"), -1, 0)


def relative_launcher(params: dict[str, Any]) -> None:
    os.unlink(params["layout"]["launcher"])
    os.symlink("current/ds4-serve", params["layout"]["launcher"])


def unit_and_launcher_gone(params: dict[str, Any]) -> None:
    layout = Layout(**params["layout"])
    os.unlink(os.path.join(layout.directory(layout.current_id()), layout.unit))
    no_launcher(params)


# What a run puts right, and says so, without touching the process.
HEALED = {
    "a comment in the unit": comment,
    "no link to the active one": no_link,
    "a link to elsewhere": link_elsewhere,
    "no link to the launcher": no_launcher,
    "a launcher that cannot be run": mode_of("ds4-serve", 0o644),
    "an environment that everybody reads": mode_of("ds4.env", 0o666),
    "a manifest that the service cannot read": mode_of("manifest.json", 0o600),
    "a folder that the service cannot enter": mode_of("", 0o700),
    "line ends of another system": line_ends,
    "a unit that everybody writes": unit_mode,
    "a folder of somebody else": owner_of(""),
    "an environment of somebody else": owner_of("ds4.env"),
    "a manifest of another group": group_of_manifest,
    "a launcher link that was made by hand": relative_launcher,
    "the text of the unit and the launcher link": unit_and_launcher_gone,
}


@pytest.mark.parametrize("harm", HEALED.values(), ids=HEALED.keys())
def test_what_needs_no_restart_is_put_right_and_said(
    asked: dict[str, Any], harm: Callable[[dict[str, Any]], None]
) -> None:
    harm(asked)
    found = staging.standing(question(asked))
    assert not found or staging.stands(asked, [], found) is None
    predicted = staging.have_staged(asked, [], check=True)
    done = staging.have_staged(asked, [], check=False)
    assert (predicted["changes"], predicted["changed"]) == (done["changes"], True)
    assert not done["deployment"]["needs_switch"]
    again = staging.have_staged(asked, [], check=False)
    assert again["changed"] is False
    assert staging.stands(asked, [], staging.standing(question(asked))) == again


BY_HAND = {
    "the unit": edited("unit"),
    "the helper": edited("helper"),
    "the launcher": edited("ds4-serve"),
    "the environment": edited("ds4.env"),
    "the policy": other_policy,
    "an unfinished switch": unfinished_switch,
    "not proven": not_proven,
    "no marker": no_marker,
    "no link": no_link,
}


@pytest.mark.parametrize("change", BY_HAND.values(), ids=BY_HAND.keys())
def test_what_was_changed_on_the_host_does_not_stand(
    asked: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    change(asked)
    found = staging.standing(question(asked))
    assert not found or staging.stands(asked, [], found) is None


@pytest.mark.parametrize("unit", ["ds4.service", "ds4-switch.service"])
def test_what_does_not_start_at_boot_does_not_stand(asked: dict[str, Any], systemd: Systemd, unit: str) -> None:
    systemd.enabled.discard(unit)
    assert staging.standing(question(asked)) == {}


WANTED = {
    "args": ["--port", "8001"],
    "env": {"DS4_TOKEN": "hunter3", "DS4_BANKS": 6},
    "release": "v0.6.6",
    "memory_required_kib": 101,
    "files": {"ds4.service": UNIT, "ds4.env": "DS4_TOKEN=hunter2\n", "ds4-serve": "#!/bin/sh\ntrue\n"},
}


@pytest.mark.parametrize(("name", "value"), WANTED.items())
def test_what_is_wanted_otherwise_does_not_stand(asked: dict[str, Any], name: str, value: Any) -> None:
    found = staging.standing(question(asked))
    assert staging.stands(asked, [], found)
    other = copy.deepcopy(asked)
    other["deployment"][name] = value
    assert staging.stands(other, [], found) is None


@pytest.mark.parametrize("other", [{"policy": {}}, {"helpers": {"ds4-switch.service": HELPER + "# new\n"}}])
def test_another_policy_or_helper_does_not_stand(asked: dict[str, Any], other: dict[str, Any]) -> None:
    assert staging.stands({**asked, **other}, [], staging.standing(question(asked))) is None


def test_a_unit_that_systemd_has_not_read_does_not_stand(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = staging.standing(question(asked))
    monkeypatch.setattr(Service, "state", lambda service: parse_show("UnitFileState=enabled\nNeedDaemonReload=yes\n"))
    assert told
    assert staging.standing(question(asked)) == {}


def test_a_deployment_that_serves_unproven_is_active_but_not_proven(asked: dict[str, Any]) -> None:
    layout = Layout(**asked["layout"])
    manifest = layout.manifest(layout.current_id())
    assert manifest is not None
    proven = staging.describe(layout, manifest)
    assert not staging.takes_switch(proven)
    not_proven(asked)
    told = staging.describe(layout, manifest)
    assert told["reasons"] == [f"deployment {manifest['id']} runs, but is not proven"]
    assert staging.takes_switch(told)
    assert not staging.takes_switch(told, served=True)
    unfinished_switch(asked)
    assert staging.takes_switch(staging.describe(layout, manifest), served=True)


def test_a_deployment_that_does_not_serve_is_not_active(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(**asked["layout"])
    manifest = layout.manifest(layout.current_id())
    assert manifest is not None
    monkeypatch.setattr(store, "drift", lambda manifest, layout, state: ["the process runs another one"])
    assert staging.takes_switch(staging.describe(layout, manifest), served=True)


def test_active_is_content_with_what_serves(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(**asked["layout"])
    manifest = layout.manifest(layout.current_id())
    assert manifest is not None
    not_proven(asked)
    begun: list[str] = []

    def begin(layout: Layout, to: str, options: object, reason: str) -> transaction.Record:
        begun.append(to)
        return transaction.request(layout, to, {}, reason)

    monkeypatch.setattr(transaction, "attach_or_request", begin)
    monkeypatch.setattr(transaction, "runner_failure", lambda: "")
    assert door.activate(layout, manifest, {}, "activate", wait_seconds=0, seen=0, served=True) is None
    assert begun == []
    assert door.activate(layout, manifest, {}, "activate", wait_seconds=0, seen=0) is not None
    assert begun == [manifest["id"]]


def test_nothing_is_put_right_under_an_open_switch(asked: dict[str, Any]) -> None:
    """It may be returning: what is installed is its matter then."""
    comment(asked)
    no_launcher(asked)
    unfinished_switch(asked)
    assert staging.have_staged(asked, [], check=False)["changes"] == []
    assert not os.path.lexists(asked["layout"]["launcher"])


def test_a_link_in_place_of_a_deployment_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    layout = Layout(**asked["layout"])
    folder = layout.directory(layout.current_id())
    os.rename(folder, tmp_path / "moved")
    os.symlink(tmp_path / "moved", folder)
    with pytest.raises(Ds4Error, match="is not ours"):
        staging.have_staged(asked, [], check=False)
