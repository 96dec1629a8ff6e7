"""What the module asks the host to do, with systemd in memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds4.files import write_json
from ds4.service import parse_show

ADDRESS = {"host": "127.0.0.1", "port": 8000}


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
    record = loaded.transaction.request(layout, old["id"], {"run": "mine"}, "rollback")
    loaded.transaction.close(layout, record, outcome="proven", serving=old["id"])
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
