"""The parts of the lab that need neither root nor hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import desktop, hosts, image, memory, network, services, system
from lab.__main__ import setting
from lab.api import Lab


def parsed(text: str) -> dict[str, int]:
    return {line.split()[0].rstrip(":"): int(line.split()[1]) for line in text.splitlines()}


@pytest.mark.parametrize("used", [0, 4194304, 127535152, 999999999])
def test_meminfo_keeps_its_length_and_adds_up(used: int) -> None:
    text = memory.render(memory.DEFAULTS, used)
    assert len(text) == len(memory.render(memory.DEFAULTS, 0))
    values = parsed(text)
    assert values["MemAvailable"] == max(0, memory.DEFAULTS["total"] - used)
    assert values["MemFree"] + values["Inactive"] == values["MemAvailable"]
    assert min(values.values()) >= 0


def test_meminfo_fields_win() -> None:
    assert parsed(memory.render(memory.DEFAULTS, 0, {"MemFree": 7}))["MemFree"] == 7


def test_tenants_live_as_long_as_their_process_or_their_time(tmp_path: Path) -> None:
    folder = tmp_path / memory.TENANTS
    folder.mkdir(parents=True)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "stat").write_text("7 (a) b) S 1")
    (tmp_path / "proc" / "8").mkdir(parents=True)
    (tmp_path / "proc" / "8" / "stat").write_text("8 (zombie) Z 1")
    contents = {
        "lost": "1",
        "alive": "2 7",
        "zombie": "4 8",
        "dead": "8 9",
        "past": "16 until=1",
        "later": "32 until=9999999999",
    }
    for name, text in {**contents, "half-written": "", "nonsense": "x y"}.items():
        (folder / name).write_text(text)
    (tmp_path / "proc" / "1").mkdir()
    tenants = memory.Tenants(str(tmp_path))
    for _ in range(2):
        assert tenants.held() == {"lost": 1, "alive": 2, "later": 32}
    (folder / "lost").write_text("100")
    (tmp_path / "proc" / "7" / "stat").write_text("7 (a) b) Z 1")
    assert tenants.held() == {"lost": 100, "later": 32}
    (tmp_path / "proc" / "1").rmdir()
    with pytest.raises(FileNotFoundError):
        tenants.held()
    tenants.close()
    with pytest.raises(FileNotFoundError):
        memory.Tenants(str(tmp_path / "nowhere"))


def test_meminfo_is_replaced_in_place(tmp_path: Path) -> None:
    memory.update(str(tmp_path), {})
    inode = (tmp_path / "meminfo").stat().st_ino
    (tmp_path / "memory.json").write_text(json.dumps({"base": 1, "fields": {"Dirty": 5}}))
    memory.update(str(tmp_path), {})
    assert (tmp_path / "meminfo").stat().st_ino == inode
    values = parsed((tmp_path / "meminfo").read_text())
    assert (values["MemAvailable"], values["Dirty"]) == (memory.DEFAULTS["total"] - 1, 5)


def test_subnets_avoid_the_taken_and_the_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = json.dumps([{"dst": "10.213.2.0/24"}, {"dst": "default"}, {"dst": "10.213.3.7"}])
    monkeypatch.setattr(system, "run", lambda argv: system.Ran(0, routes, ""))
    assert network.pick_subnet({1}) == 4


def test_names_of_cables_fit_the_kernel() -> None:
    assert network.cable(hosts.machine_name(254, "spark99")) == "vb-l254-spark99"
    with pytest.raises(system.LabError, match="too long"):
        network.cable(hosts.machine_name(254, "spark100"))


@pytest.mark.parametrize("name", ["", "A", "../x", "x/y", "-a", "a" * 41, "a b"])
def test_names_of_instances_are_checked(name: str) -> None:
    with pytest.raises(system.LabError, match="is no name"):
        Lab(name)


def test_unknown_gpu_and_memory_settings_are_refused(tmp_path: Path) -> None:
    for given in ({"state": "melted"}, {"colour": "red"}):
        with pytest.raises(system.LabError, match="Known"):
            hosts.write_gpu(str(tmp_path / "gpu.json"), given)
    with pytest.raises(system.LabError, match="Known"):
        hosts.write_memory(str(tmp_path / "memory.json"), {"colour": 1})
    assert os.listdir(tmp_path) == []


def test_simulated_units_cover_what_serving_mode_is_said_to_free() -> None:
    assert 10 <= desktop.total_kib() * 1024 / 1e9 <= 15


def test_pins_of_the_inventory_are_current() -> None:
    for path, text in services.pins().items():
        assert Path(path).read_text() == text, f"{path} is not current. Cure: python3 -m lab pin"


def test_command_line_values() -> None:
    assert setting("state=mismatch") == ("state", "mismatch")
    assert setting('gpus=[{"name": "x"}]') == ("gpus", [{"name": "x"}])
    assert setting("base=1024") == ("base", 1024)


def test_cache_publishes_only_what_was_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CACHE_DIR", str(tmp_path))

    def fail(path: str) -> None:
        Path(path, "half").touch()
        raise system.LabError("no network")

    with pytest.raises(system.LabError):
        image.cached("thing", "recipe", fail)
    assert [name for name in os.listdir(tmp_path) if "thing-" in name] == []
    made = image.cached("thing", "recipe", lambda path: Path(path, "whole").touch())
    assert os.listdir(made) == ["whole"]
    assert image.cached("thing", "recipe", fail) == made
    assert image.prune([]) == [made]


def test_commands_are_bounded_and_signals_counted_as_shells_do() -> None:
    assert system.run(["sleep", "9"], check=False, timeout=0.1).rc == 124
    assert system.run(["sh", "-c", "kill -9 $$"], check=False).rc == 137
    with pytest.raises(system.LabError, match="failed with 3: why"):
        system.run(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(system.LabError, match="needs --install"):
        system.run(["no-such-program"])


def test_help_needs_nothing() -> None:
    argv = [sys.executable, "-m", "lab", "--help"]
    ran = subprocess.run(argv, cwd=system.REPOSITORY, text=True, capture_output=True, check=False)
    assert ran.returncode == 0
    assert "up" in ran.stdout


def test_the_machines_limit_is_raised_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "limit"
    monkeypatch.setattr(system, "INOTIFY_LIMIT", str(limit))
    monkeypatch.setattr(system, "_INOTIFY_BEFORE", str(tmp_path / "before"))
    limit.write_text("128\n")
    for _ in range(2):
        system.raise_limits()
        assert int(limit.read_text()) == system.INOTIFY_WANTED
    system.restore_limits()
    assert limit.read_text() == "128\n"
    limit.write_text("8192\n")
    system.raise_limits()
    system.restore_limits()
    assert limit.read_text() == "8192\n"
