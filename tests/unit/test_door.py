"""What the module asks the host to do, with systemd in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4 import door
from ds4.command import Ran
from ds4.errors import Ds4Error
from ds4.files import MARKER_LINE, write_json
from ds4.service import Service, State, parse_show

HELPER = f"# {MARKER_LINE}\n[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
ADDRESS = {"host": "127.0.0.1", "port": 8000}


class Systemd:
    """Which units are enabled, and what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enabled: set[str] = set()
        self.told: list[list[str]] = []
        monkeypatch.setattr(door, "run", self.run)
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
    monkeypatch.setattr(door, "UNITS", str(tmp_path))
    return Systemd(monkeypatch)


def test_a_helper_is_written_and_enabled_once(systemd: Systemd) -> None:
    assert door.install_helpers({"ds4-switch.service": HELPER}, check=True) == ["ds4-switch.service"]
    assert systemd.told == []
    assert door.install_helpers({"ds4-switch.service": HELPER}) == ["ds4-switch.service"]
    assert systemd.enabled == {"ds4-switch.service"}
    assert door.install_helpers({"ds4-switch.service": HELPER}) == []


def test_a_helper_that_was_written_but_not_enabled_is_enabled(systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "ds4-switch.service").write_text(HELPER, encoding="utf-8")
    assert door.install_helpers({"ds4-switch.service": HELPER}) == ["ds4-switch.service"]
    assert systemd.enabled == {"ds4-switch.service"}


def test_a_helper_of_somebody_else_stays(systemd: Systemd, tmp_path: Path) -> None:
    (tmp_path / "ds4-switch.service").write_text("[Service]\n", encoding="utf-8")
    with pytest.raises(Ds4Error, match="is not ours"):
        door.install_helpers({"ds4-switch.service": HELPER})


# ------------------------------------------------------------------------------------------------------------ module


def test_a_rollback_whose_first_answer_was_lost_follows_what_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over meanwhile: the newest proven deployment that does not run is another one by now."""
    path = (
        Path(__file__).resolve().parents[2] / "plugins/modules/ds4_deployment.py"
    )  # its action plugin has the same name
    spec = importlib.util.spec_from_file_location("ds4_deployment_module", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    layout = loaded.Layout(
        deployments=str(tmp_path / "deployments"),
        current=str(tmp_path / "current"),
        unit_path=str(tmp_path / "ds4.service"),
        launcher=str(tmp_path / "ds4-serve"),
        state=str(tmp_path / "state"),
        lib=str(tmp_path / "lib"),
    )
    old, new = ({"id": letter * 12, "release": f"v-{letter}", "service": ADDRESS} for letter in "ab")
    for manifest in (old, new):
        folder = Path(layout.directory(str(manifest["id"])))
        folder.mkdir(parents=True)
        write_json(str(folder / "manifest.json"), manifest)
    monkeypatch.setattr(loaded.store, "problems", lambda manifest: [])
    monkeypatch.setattr(loaded.store, "drift", lambda manifest, layout, state: [])
    monkeypatch.setattr(loaded.Service, "state", lambda service: parse_show(""))
    record = loaded.switch.request(layout, old["id"], {"run": "mine"}, "rollback")
    loaded.switch.close(layout, record, outcome="proven", serving=old["id"])
    asked = {
        "state": "rolled_back",
        "id": "",
        "wanted": {},
        "transaction": "",
        "run": "mine",
        "adopt": False,
        "busy": "wait",
    }
    module = SimpleNamespace(params={**asked, "wait_seconds": 0, "steps_seen": 0}, check_mode=False)
    answer = loaded.switched(module, layout)
    assert (answer["running"], answer["deployment"]["id"]) == (False, old["id"])
    assert answer["ds4_summary"]["outcome"] == "proven"
