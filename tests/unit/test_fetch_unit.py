"""ds4-fetch.service and the command of the same name."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds4 import fetch_unit
from ds4.command import Ran
from ds4.errors import Ds4Error
from ds4.fetch_unit import Layout
from ds4.files import is_ours, mark
from ds4.plan import Plan, PlanFile
from ds4.service import parse_show


def layout(root: Path) -> Layout:
    for folder in ("units", "bin"):
        (root / folder).mkdir(exist_ok=True)
    return Layout(
        str(root / "weights"), str(root / "state"), "/opt/ds4/lib/current", str(root / "bin"), str(root / "units")
    )


def plan(root: Path, **more: Any) -> Plan:
    item = PlanFile("base", "b.gguf", "b.gguf", 1, "ab" * 32, ["https://h/x"])
    return Plan("0731", str(root / "weights"), "root", [item], str(root / "weights/.fetch/status.json"), **more)


def lines(text: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_the_unit_goes_on_alone_and_only_while_there_is_work(tmp_path: Path) -> None:
    text = fetch_unit.unit_text(plan(tmp_path), layout(tmp_path), "/usr/bin/python3")
    assert text.splitlines()[0] == "# Managed by ds4-fleet"
    assert lines(text, "ConditionPathExists") == [f"{tmp_path}/weights/.fetch/unfinished"]
    assert lines(text, "RequiresMountsFor") == [f"{tmp_path}/weights {tmp_path}/state"]
    assert lines(text, "WantedBy") == ["multi-user.target"]
    assert (lines(text, "Restart"), lines(text, "RestartPreventExitStatus")) == (["on-failure"], ["2"])
    assert lines(text, "ExecStart") == [f"/usr/bin/python3 -m ds4.fetch --plan {tmp_path}/state/plan.json run"]
    assert lines(text, "User") == ["root"] and lines(text, "IOSchedulingClass") == ["idle"]
    assert lines(text, "LoadCredential") == []


def test_adoption_alone_runs_as_root(tmp_path: Path) -> None:
    text = fetch_unit.unit_text(plan(tmp_path), layout(tmp_path), "/usr/bin/python3", move=True)
    (before,) = lines(text, "ExecStartPre")
    assert before.startswith("+/usr/bin/nsenter --mount=/proc/1/ns/mnt -- /usr/bin/python3 -m ds4.weights adopt ")
    assert before.endswith("--move")
    assert "+" not in lines(text, "ExecStart")[0]


def test_secrets_come_as_credentials_and_odd_paths_are_quoted(tmp_path: Path) -> None:
    odd = plan(tmp_path, token_file="/etc/my token%", proxy_credentials_file="/etc/proxy")
    odd.directory = "/srv/my weights"
    text = fetch_unit.unit_text(odd, layout(tmp_path), "/usr/bin/python3")
    assert lines(text, "LoadCredential") == ['"hf_token:/etc/my token%%"', "proxy_credentials:/etc/proxy"]
    assert lines(text, "ReadWritePaths") == ['"/srv/my weights"']


@pytest.mark.skipif(not os.path.exists("/usr/bin/systemd-analyze"), reason="not run: no systemd-analyze here")
def test_systemd_reads_it_without_a_complaint(tmp_path: Path) -> None:
    path = tmp_path / "ds4-fetch.service"
    path.write_text(fetch_unit.unit_text(plan(tmp_path), layout(tmp_path), "/usr/bin/python3"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_install_once(tmp_path: Path) -> None:
    place, wanted = layout(tmp_path), plan(tmp_path)
    preview = fetch_unit.install(wanted, place, "/usr/bin/python3", move=False, check=True)
    assert preview == [place.unit, place.command, place.plan]
    assert not os.path.exists(place.unit)
    assert fetch_unit.install(wanted, place, "/usr/bin/python3", move=False, check=False) == preview
    assert stat.S_IMODE(os.stat(place.command).st_mode) == 0o755
    os.mkdir(place.state)
    wanted.write(place.plan)
    assert fetch_unit.install(wanted, place, "/usr/bin/python3", move=False, check=False) == []
    Path(place.plan).write_text("torn")
    assert fetch_unit.install(wanted, place, "/usr/bin/python3", move=False, check=False) == [place.plan]


def test_the_command_finds_mechanism_and_plan(tmp_path: Path) -> None:
    place = layout(tmp_path)._replace(lib=str(Path(fetch_unit.__file__).parent.parent))
    command = tmp_path / "bin/ds4-fetch"
    command.write_text(fetch_unit.command_text(place, "/usr/bin/python3"))
    command.chmod(0o755)
    os.mkdir(place.state)
    plan(tmp_path).write(place.plan)
    done = subprocess.run([command, "status"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no fetch has been started\n"), done.stderr


@pytest.mark.parametrize("which", ["unit", "command"])
def test_files_of_the_same_name_are_not_taken_over(tmp_path: Path, which: str) -> None:
    place = layout(tmp_path)
    Path(getattr(place, which)).write_text("of somebody else\n")
    with pytest.raises(Ds4Error, match="is not ours"):
        fetch_unit.install(plan(tmp_path), place, "/usr/bin/python3", move=False, check=False)
    assert Path(getattr(place, which)).read_text() == "of somebody else\n"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands instead of their effects."""
    ran: list[list[str]] = []

    def run(argv: list[str], **_more: Any) -> Ran:
        ran.append(argv)
        return Ran(0, "UnitFileState=disabled\n", "")

    monkeypatch.setattr(fetch_unit, "run", run)
    monkeypatch.setattr("ds4.service.run", run)
    return ran


def test_store_and_start(tmp_path: Path, quiet: list[list[str]]) -> None:
    place, wanted = layout(tmp_path), plan(tmp_path, mount={"path": "/", "uuid": "u"})
    fetch_unit.store(wanted, place, [place.unit])
    assert is_ours(place.directory)
    assert (tmp_path / "state/mount.json").exists() and (tmp_path / "state/plan.json").exists()
    assert any("daemon-reload" in argv for argv in quiet)
    (tmp_path / "weights/.fetch/status.json").write_text("{}")
    fetch_unit.start(wanted, place)
    assert (tmp_path / "weights/.fetch/unfinished").read_text() == wanted.id + "\n"
    assert not (tmp_path / "weights/.fetch/status.json").exists(), "an earlier end is not this one's"
    words = [" ".join(argv) for argv in quiet]
    assert words.index("systemctl reset-failed ds4-fetch.service") < words.index(
        "systemctl start --no-block ds4-fetch.service"
    )
    assert any("enable ds4-fetch.service" in text for text in words)


def test_root_writes_through_no_link_of_the_service_user(tmp_path: Path, quiet: list[list[str]]) -> None:
    place = layout(tmp_path)
    os.mkdir(place.directory)
    mark(place.directory, "weights")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights/.fetch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Ds4Error, match="not a folder"):
        fetch_unit.store(plan(tmp_path), place, [])
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        ("ActiveState=inactive\n", False),
        ("ActiveState=failed\n", False),
        ("ActiveState=active\n", True),
        ("ActiveState=activating\nSubState=auto-restart\n", True),
        ("ActiveState=inactive\nJob=4711\n", True),
        ("ActiveState=inactive\nJob=0\n", False),
    ],
)
def test_busy(monkeypatch: pytest.MonkeyPatch, text: str, busy: bool) -> None:
    monkeypatch.setattr(fetch_unit, "run", lambda argv: Ran(0, text, ""))
    assert fetch_unit.unit_now().busy is busy
    assert fetch_unit.unit_now().state == parse_show(text)


def test_removal_takes_only_what_is_ours(tmp_path: Path, quiet: list[list[str]]) -> None:
    place, wanted = layout(tmp_path), plan(tmp_path)
    fetch_unit.install(wanted, place, "/usr/bin/python3", move=False, check=False)
    fetch_unit.store(wanted, place, [])
    (tmp_path / "weights/b.gguf").write_text("weights")
    Path(place.command).write_text("of somebody else\n")
    fetch_unit.remove(place)
    assert not os.path.exists(place.unit) and not os.path.exists(place.state)
    assert os.path.exists(place.command) and (tmp_path / "weights/b.gguf").exists()
    words = [" ".join(argv) for argv in quiet]
    assert any("stop ds4-fetch.service" in text for text in words) and any(
        "disable ds4-fetch.service" in text for text in words
    )
    assert fetch_unit.removable(place) == []
