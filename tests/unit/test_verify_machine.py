"""Releases, firmware, disks, names, packages and sessions of a machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds4 import machine
from ds4.command import Ran
from ds4.files import mark

DGX = """DGX_NAME="DGX Spark"
DGX_PRETTY_NAME="NVIDIA DGX Spark"
DGX_SWBUILD_DATE="2025-09-10-13-50-03"
DGX_SWBUILD_VERSION="7.2.3"
DGX_PLATFORM="DGX Server for KVM"
DGX_SERIAL_NUMBER="1234567890"

DGX_OTA_VERSION="7.3.1"
DGX_OTA_DATE="Mon Oct 20 10:00:00 UTC 2025"
DGX_OTA_VERSION="7.6.0"
DGX_OTA_DATE="Tue Mar  3 10:00:00 UTC 2026"
"""


class Answers:
    """Stand-in for command.run: the answer by the program's name."""

    def __init__(self, **answers: Ran) -> None:
        self.answers = answers

    def __call__(self, argv: Sequence[str], *, timeout_seconds: float) -> Ran:
        assert timeout_seconds <= 30
        key = argv[0].replace("-", "_")
        return self.answers.get(f"{key}_{argv[1].replace('-', '_')}", self.answers.get(key, Ran(127, "", "not found")))


def test_repeated_keys_of_dgx_release_the_last_wins(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/dgx-release").write_text(DGX)
    (tmp_path / "etc/os-release").write_text('ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n')
    found = machine.releases(str(tmp_path))
    assert found["os"] == {"id": "ubuntu", "version": "24.04", "name": "Ubuntu 24.04.3 LTS"}
    assert found["dgx"]["version"] == found["dgx"]["ota_version"] == "7.6.0"
    assert found["dgx"]["image_version"] == "7.2.3"
    assert "1234567890" not in str(found)  # a serial number is nobody's business


def test_an_image_without_updates_has_the_factory_version(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/dgx-release").write_text('DGX_SWBUILD_VERSION="7.2.3"\n')
    assert machine.releases(str(tmp_path))["dgx"]["version"] == "7.2.3"
    assert machine.releases(str(tmp_path / "none"))["dgx"]["version"] == ""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("A=1\nB='two words'\n# C=3\nD", {"A": "1", "B": "two words"}),
        ('A="unbalanced\n', {"A": "unbalanced"}),
        ("A=\nexport B=1\n1X=2\n", {"A": ""}),
    ],
)
def test_shell_values(text: str, values: dict[str, str]) -> None:
    assert machine.parse_shell_values(text) == values


def test_firmware(tmp_path: Path) -> None:
    (tmp_path / "bios_version").write_text("5.36_0ACUM018\n")
    found = machine.firmware(str(tmp_path))
    assert found["bios_version"] == "5.36_0ACUM018"
    assert found["product_name"] == ""
    assert not [name for name in found if "serial" in name]


# ----------------------------------------------------------------------------------------------------- disks


def test_a_path_that_does_not_exist_lies_on_its_parents_file_system(tmp_path: Path) -> None:
    row = machine.disk(str(tmp_path / "a/b/c"))
    assert (row["exists"], row["parent"]) == (False, str(tmp_path))
    assert row["device"] == machine.disk(str(tmp_path))["device"]
    figures = os.statvfs(tmp_path)
    assert row["total_bytes"] == figures.f_blocks * figures.f_frsize
    assert 0 < row["free_bytes"] <= row["total_bytes"]
    assert row["read_only"] is False


def test_the_innermost_and_latest_mount_counts(tmp_path: Path) -> None:
    lines = [
        "1 0 254:0 / / rw - ext4 /dev/root rw",
        f"2 1 8:1 / {tmp_path} rw shared:1 - xfs /dev/old rw",
        f"3 2 8:2 / {tmp_path} rw - btrfs /dev/new rw",
        f"4 1 8:3 / {tmp_path}xx rw - vfat /dev/other rw",
        "garbage",
    ]
    row = machine.disk(str(tmp_path / "weights"), mountinfo="\n".join(lines))
    assert (row["mount"], row["filesystem"], row["source"]) == (str(tmp_path), "btrfs", "/dev/new")


def test_mount_points(tmp_path: Path) -> None:
    for name in ("data", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("data")
    mountinfo = f"1 0 254:0 / / rw - ext4 /dev/root rw\n2 1 254:0 /srv/x {tmp_path}/data rw - ext4 /dev/root rw\n"
    names = ("data", "link", "folder", "data/deeper", "none")
    mounts = {name: machine.is_mount(str(tmp_path / name), mountinfo=mountinfo) for name in names}
    assert mounts == {"data": True, "link": True, "folder": False, "data/deeper": False, "none": False}


def test_bytes_on_disk(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"x" * 100_000)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(10_000_000)
    (tmp_path / "folder/deeper").mkdir(parents=True)
    (tmp_path / "folder/deeper/file").write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to("full")
    (tmp_path / "folder/link").symlink_to(tmp_path / "full")
    assert machine.present_bytes(str(tmp_path / "full")) == 100_000
    assert machine.present_bytes(str(tmp_path / "sparse")) == 0
    assert machine.present_bytes(str(tmp_path / "link")) == 100_000
    assert machine.present_bytes(str(tmp_path / "folder")) == 5000  # links inside are not followed
    assert machine.present_bytes(str(tmp_path / "none")) == 0


# ----------------------------------------------------------------------------------------------------- names


def test_accounts() -> None:
    assert machine.account("root", "ds4-fleet service account")["ours"] is False
    root = machine.account("root", "root")
    assert (root["exists"], root["ours"]) == (True, True)
    assert machine.account("no-such-user", "x") == {"name": "no-such-user", "exists": False, "ours": False, "found": ""}


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    mark(str(tmp_path / "ours"), "test")
    (tmp_path / "fresh/lost+found").mkdir(parents=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/file").touch()
    (tmp_path / "file").touch()
    rows = {name: machine.directory(str(tmp_path / name)) for name in ("ours", "fresh", "foreign", "file", "none")}
    assert {name: (row["exists"], row["ours"], row["empty"]) for name, row in rows.items()} == {
        "ours": (True, True, False),
        "fresh": (True, False, True),
        "foreign": (True, False, False),
        "file": (True, False, False),
        "none": (False, False, False),
    }
    assert rows["file"]["found"] == "not a directory"


def test_a_link_into_a_folder_of_ours_is_ours_whether_it_leads_to_something_or_not(tmp_path: Path) -> None:
    """Else the cure would be to move away what the next run makes anew."""
    ours = tmp_path / "ours"
    ours.mkdir()
    mark(str(ours), "test")
    (tmp_path / "launcher").symlink_to(ours / "current" / "ds4-serve")
    (tmp_path / "other").symlink_to(tmp_path / "gone" / "ds4-serve")
    assert machine.text_file(str(tmp_path / "launcher"))["ours"]
    assert not machine.text_file(str(tmp_path / "other"))["ours"]
    (ours / "current").symlink_to(tmp_path)  # which leads out again, and is put right
    assert machine.text_file(str(tmp_path / "launcher"))["ours"]
    (tmp_path / "ds4-serve").write_text("edited by hand\n")
    assert machine.text_file(str(tmp_path / "launcher"))["ours"]
    assert not machine.text_file(str(tmp_path / "ds4-serve"))["ours"]


def test_units_and_files(tmp_path: Path) -> None:
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    etc.mkdir()
    lib.mkdir()
    (lib / "ds4.service").write_text("[Unit]\nDescription=somebody's\n")
    paths = [str(etc), str(lib)]
    found = machine.unit("ds4.service", paths)
    assert (found["exists"], found["ours"], found["path"]) == (True, False, str(lib / "ds4.service"))
    (tmp_path / "target").write_text("# Managed by ds4-fleet\n[Unit]\n")
    (etc / "ds4.service").symlink_to(tmp_path / "target")
    found = machine.unit("ds4.service", paths)  # /etc wins, and is read through the link
    assert (found["ours"], found["found"]) == (True, str(tmp_path / "target"))
    assert machine.unit("none.service", paths)["exists"] is False
    (etc / "dangling.service").symlink_to("/nowhere")
    assert machine.unit("dangling.service", paths)["exists"] is True


# -------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (Ran(0, "git\tinstalled\nmake\tinstalled\n", ""), []),
        (Ran(1, "git\tinstalled\n", "no packages found matching make"), ["make"]),
        (Ran(0, "git\tinstalled\nmake\tconfig-files\n", ""), ["make"]),
        (Ran(1, "", ""), ["git", "make"]),
        (Ran(127, "", "dpkg-query: command not found"), None),
        (Ran(2, "", "dpkg-query: error"), None),
    ],
)
def test_packages(answer: Ran, missing: list[str] | None) -> None:
    assert machine.missing_packages(["git", "make"], runner=Answers(dpkg_query=answer)) == missing


def test_no_packages_asked_for_asks_nothing() -> None:
    assert machine.missing_packages([], runner=Answers(dpkg_query=Ran(2, "", ""))) == []


def test_commands() -> None:
    assert machine.missing_commands(["sh", "no-such-command"]) == ["no-such-command"]


def test_systemd(tmp_path: Path) -> None:
    runner = Answers(systemctl=Ran(0, "Version=255.4-1ubuntu8\nSystemState=degraded\n", ""))
    expected = {"running": True, "state": "degraded", "version": "255.4-1ubuntu8"}
    assert machine.systemd_state(runner=runner, directory_path=str(tmp_path)) == expected
    assert machine.systemd_state(runner=runner, directory_path=str(tmp_path / "none"))["running"] is False


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        (Ran(0, "ActiveState=active\n", ""), True),
        (Ran(0, "ActiveState=inactive\n", ""), False),  # also where no display manager is installed
        (Ran(0, "ActiveState=failed\n", ""), False),
        (Ran(124, "", ""), None),
    ],
)
def test_display(answer: Ran, runs: bool | None) -> None:
    assert machine.display(runner=Answers(systemctl=answer)) is runs


@pytest.mark.parametrize(("error", "said"), [(500, True), (15_999_999, True), (16_000_000, False), (None, None)])
def test_clock(error: int | None, said: bool | None) -> None:
    clock = machine.clock(adjtimex=lambda: error, now=lambda: 1790000000.6)
    assert clock == {"epoch": 1790000001, "utc": "2026-09-21T14:13:20Z", "ntp_synchronized": said}


def test_the_clock_of_this_machine_is_read_and_not_set() -> None:
    before = time.time()
    found = machine.clock()
    assert found["ntp_synchronized"] in (True, False)
    assert abs(found["epoch"] - before) < 5


SESSIONS = """Id=2
Name=alice
Type=wayland
Class=user
State=active
Remote=no
Service=gdm-password

Id=c1
Name=gdm
Type=wayland
Class=greeter
State=active
Remote=no

Id=5
Name=bob
Type=tty
Class=user
State=closing
Remote=yes
Service=sshd

Id=7
Name=bob
Type=unspecified
Class=manager
State=active
"""


def test_sessions_are_those_of_people() -> None:
    listed = Ran(0, " 2 1000 alice seat0 tty2\nc1 120 gdm seat0 tty1\n 5 1001 bob - pts/0\n", "")
    runner = Answers(loginctl_list_sessions=listed, loginctl_show_session=Ran(0, SESSIONS, ""))
    rows = machine.sessions(runner=runner)
    assert rows is not None
    assert [(row["user"], row["graphical"], row["remote"], row["active"]) for row in rows] == [
        ("alice", True, False, True),
        ("bob", False, True, False),
    ]


def test_no_sessions_and_no_logind() -> None:
    assert machine.sessions(runner=Answers(loginctl=Ran(0, "", ""))) == []
    assert machine.sessions(runner=Answers()) is None
