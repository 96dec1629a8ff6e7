"""User, directories and mechanism: what is ours is put right, what is not ours is never taken over."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4 import host_layout, mechanism
from ds4.command import Ran
from ds4.errors import Ds4Error
from ds4.files import is_ours, mark

PACKAGE = Path(mechanism.__file__).parent
ME = "root" if os.geteuid() == 0 else os.environ.get("USER", "root")


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Accounts of a pretended host: names → entries."""
    known: dict[str, Any] = {"users": {}, "groups": {}}
    monkeypatch.setattr(host_layout, "_known_user", lambda name: known["users"].get(name))
    monkeypatch.setattr(host_layout, "_known_group", lambda name: known["groups"].get(name))
    return known


def rows(root: Path, **changes: Any) -> list[dict[str, Any]]:
    base = {"owner": _name(os.geteuid()), "group": _group(os.getegid()), "mode": "0755", "purpose": "test"}
    return [{**base, "path": str(root / "opt/ds4/lib")}, {**base, "path": str(root / "opt/ds4"), **changes}]


def _name(uid: int) -> str:
    from ds4.process import user_name

    return user_name(uid)


def _group(gid: int) -> str:
    return host_layout._group_name(gid)


def planned(root: Path, **changes: Any) -> host_layout.Plan:
    return host_layout.plan("ds4", "ds4", host_layout.parse_directories(rows(root, **changes)))


def nothing(argv: list[str], **_more: Any) -> Ran:
    raise AssertionError(argv)


def test_virgin_host_is_prepared_once(tmp_path: Path, accounts: dict[str, Any]) -> None:
    ran: list[list[str]] = []

    def runner(argv: list[str], **_more: Any) -> Ran:
        ran.append(argv)
        return Ran(0, "", "")

    wanted = planned(tmp_path)
    assert not (tmp_path / "opt").exists()
    before, after = host_layout.describe(wanted)
    assert before == []
    assert [line.split()[0] for line in after] == ["group", "user", f"{tmp_path}/opt/ds4", f"{tmp_path}/opt/ds4/lib"]
    host_layout.apply(wanted, "ds4", "ds4", "/var/lib/ds4", runner=runner)
    assert [argv[0] for argv in ran] == ["groupadd", "useradd"]
    assert ran[1][-2:] == ["ds4-fleet service account", "ds4"]
    assert "--no-create-home" in ran[1]
    assert is_ours(str(tmp_path / "opt/ds4/lib"))
    accounts["groups"]["ds4"] = SimpleNamespace(gr_gid=990)
    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="ds4-fleet service account", pw_gid=990, pw_uid=991)
    assert not planned(tmp_path).changed


def test_mode_and_owner_are_put_right(tmp_path: Path, accounts: dict[str, Any]) -> None:
    host_layout.apply(planned(tmp_path)._replace(user="", group=""), "ds4", "ds4", "/", runner=nothing)
    (tmp_path / "opt/ds4").chmod(0o700)
    wanted = planned(tmp_path)
    assert [directory.path for directory, _ in wanted.directories] == [f"{tmp_path}/opt/ds4"]
    before, after = host_layout.describe(wanted)
    assert before[0].endswith("0700 ours")
    assert after[-1].endswith("0755 ours")
    host_layout.apply(wanted._replace(user="", group=""), "ds4", "ds4", "/", runner=nothing)
    assert (tmp_path / "opt/ds4").stat().st_mode & 0o777 == 0o755


def test_fresh_mount_is_adopted(tmp_path: Path, accounts: dict[str, Any]) -> None:
    (tmp_path / "opt/ds4/lost+found").mkdir(parents=True)
    host_layout.apply(planned(tmp_path)._replace(user="", group=""), "ds4", "ds4", "/", runner=nothing)
    assert is_ours(str(tmp_path / "opt/ds4"))


def test_everything_foreign_is_in_one_message(tmp_path: Path, accounts: dict[str, Any]) -> None:
    (tmp_path / "opt/ds4/lib").mkdir(parents=True)
    (tmp_path / "opt/ds4/lib/somebody").touch()
    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="Dora", pw_gid=1, pw_uid=1004)
    with pytest.raises(Ds4Error) as caught:
        planned(tmp_path)
    found = caught.value.found
    assert "user ds4 (uid 1004, comment 'Dora')" in found
    assert f"{tmp_path}/opt/ds4 was not made by ds4-fleet and holds 1 entries (lib)" in found
    assert "lib was not made by ds4-fleet and holds 1 entries (somebody)" in found
    assert (tmp_path / "opt/ds4/lib/somebody").exists()
    assert not is_ours(str(tmp_path / "opt/ds4"))


def test_our_user_with_another_group(tmp_path: Path, accounts: dict[str, Any]) -> None:
    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="ds4-fleet service account", pw_gid=0, pw_uid=991)
    accounts["groups"]["ds4"] = SimpleNamespace(gr_gid=990)
    with pytest.raises(Ds4Error, match="primary group root, not ds4"):
        planned(tmp_path)


def test_a_file_in_the_way(tmp_path: Path, accounts: dict[str, Any]) -> None:
    (tmp_path / "opt").touch()
    with pytest.raises(Ds4Error, match="opt is not a directory"):
        planned(tmp_path)


def test_account_that_cannot_be_made(tmp_path: Path, accounts: dict[str, Any]) -> None:
    with pytest.raises(Ds4Error, match=r"group ds4 could not be created.*no space") as caught:
        host_layout.apply(planned(tmp_path), "ds4", "ds4", "/", runner=lambda argv, **_more: Ran(1, "", "no space"))
    assert caught.value.cure


@pytest.mark.parametrize(
    ("row", "why"),
    [({"path": "opt"}, "not an absolute path"), ({"path": "/"}, "not an absolute"), ({"mode": "rwx"}, "is not octal")],
)
def test_unusable_rows(tmp_path: Path, row: dict[str, str], why: str) -> None:
    with pytest.raises(Ds4Error) as caught:
        host_layout.parse_directories([rows(tmp_path)[0], {**rows(tmp_path)[1], **row}])
    assert why in caught.value.found


def test_one_path_twice(tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match="listed twice"):
        host_layout.parse_directories([*rows(tmp_path), {**rows(tmp_path)[0], "path": f"{tmp_path}/opt//ds4/lib/"}])


# -- removing it all ---------------------------------------------------------------------------------------------------------
def everything(root: Path, kv: str = "keep") -> list[host_layout.Directory]:
    base = {"owner": _name(os.geteuid()), "group": _group(os.getegid()), "mode": "0755", "purpose": "test"}
    wanted = [("opt/ds4", "marked"), ("opt/ds4/lib", "marked"), ("opt/ds4/builds", "marked"), ("data/kv", kv)]
    return host_layout.parse_directories([{**base, "path": str(root / p), "contents": c} for p, c in wanted])


def prepared(root: Path) -> None:
    wanted = host_layout.plan("ds4", "ds4", everything(root))._replace(user="", group="")
    host_layout.apply(wanted, "ds4", "ds4", "/", runner=nothing)
    mechanism.install(str(root / "opt/ds4/lib"))
    for name in ("v1", "v2"):
        (root / "opt/ds4/builds" / name).mkdir()
        mark(str(root / "opt/ds4/builds" / name), "test")
    (root / "opt/ds4/builds/.lock").touch()
    (root / "opt/ds4/current").symlink_to("builds/v1")


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_removing_leaves_the_tree_as_it_was(tmp_path: Path, accounts: dict[str, Any]) -> None:
    (tmp_path / "opt/ds4").mkdir(parents=True)  # an empty directory that was there before
    (tmp_path / "opt/ds4").chmod(0o750)
    before = tree(tmp_path)
    prepared(tmp_path)
    removal = host_layout.plan_removal("ds4", everything(tmp_path))
    assert removal.left == []
    assert tree(tmp_path) != before
    host_layout.remove(removal, "ds4", runner=nothing)
    assert tree(tmp_path) == before
    assert (tmp_path / "opt/ds4").stat().st_mode & 0o777 == 0o750
    again = host_layout.plan_removal("ds4", everything(tmp_path))
    assert (again.changed, again.left) == (False, [f"{tmp_path}/opt/ds4 (not ours)"])


def test_removing_leaves_conversations_and_what_is_not_ours(tmp_path: Path, accounts: dict[str, Any]) -> None:
    prepared(tmp_path)
    (tmp_path / "data/kv/a.kv").touch()
    (tmp_path / "opt/ds4/builds/theirs").mkdir()
    (tmp_path / "opt/ds4/lib/note.txt").touch()
    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="ds4-fleet service account", pw_gid=990, pw_uid=4294000000)
    removal = host_layout.plan_removal("ds4", everything(tmp_path))
    host_layout.remove(removal, "ds4", runner=nothing)
    kept = {"data/kv/a.kv", "opt/ds4/builds/theirs", "opt/ds4/lib/note.txt"}
    assert {path for path in tree(tmp_path) if (tmp_path / path).name != ".ds4-fleet"} == kept | {
        str(parent) for path in kept for parent in Path(path).parents if str(parent) != "."
    }
    assert removal.user == ""  # it still owns something of ours
    assert f"{tmp_path}/data/kv (1 entries: a.kv)" in removal.left
    asked = host_layout.plan_removal("ds4", everything(tmp_path, kv="all"))
    host_layout.remove(asked._replace(user=""), "ds4", runner=nothing)
    assert not (tmp_path / "data").exists()


def test_the_account_goes_last_and_not_while_it_runs(
    tmp_path: Path, accounts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def runner(argv: list[str], **_more: Any) -> Ran:
        ran.append(argv)
        return Ran(0, "", "")

    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="ds4-fleet service account", pw_gid=990, pw_uid=os.getuid())
    accounts["groups"]["ds4"] = SimpleNamespace(gr_gid=990, gr_mem=[])
    with pytest.raises(Ds4Error, match="still runs programs"):
        host_layout.plan_removal("ds4", everything(tmp_path))
    monkeypatch.setattr(host_layout, "_processes_of", lambda _uid: [])
    removal = host_layout.plan_removal("ds4", everything(tmp_path))
    host_layout.remove(removal, "ds4", runner=runner)
    assert ran == [["userdel", "ds4"], ["groupdel", "ds4"]]
    accounts["users"]["ds4"] = SimpleNamespace(pw_gecos="Dora", pw_gid=990, pw_uid=1004)
    assert host_layout.plan_removal("ds4", everything(tmp_path)).user == ""


# -- the mechanism ---------------------------------------------------------------------------------------------------------
def test_every_part_is_shipped() -> None:
    """Ansible ships what is imported by name, so the list must be complete."""
    tree = ast.parse((PACKAGE / "mechanism.py").read_text())
    listed = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is None
        for name in node.names
    }
    there = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "mechanism"}
    assert listed == there, "name the new part in mechanism.py"


def test_installed_package_runs_and_is_kept(tmp_path: Path) -> None:
    lib = str(tmp_path)
    assert mechanism.install(lib, check=True).changed
    assert list(tmp_path.iterdir()) == []
    first = mechanism.install(lib)
    assert (first.before, first.changed) == ("", True)
    assert not mechanism.install(lib).changed
    command = "import ds4.build, ds4.mechanism as m; print(m.version(m.sources()))"
    ran = subprocess.run(
        [sys.executable, "-c", command], env={"PYTHONPATH": first.path}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == first.after


def test_damaged_version_is_written_again(tmp_path: Path) -> None:
    first = mechanism.install(str(tmp_path))
    part = tmp_path / first.after / "ds4/errors.py"
    part.write_text("edited")
    again = mechanism.install(str(tmp_path))
    assert again.changed
    assert part.read_bytes() == (PACKAGE / "errors.py").read_bytes()


def test_a_link_that_leads_elsewhere_is_put_right(tmp_path: Path) -> None:
    first = mechanism.install(str(tmp_path))
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(f"/nowhere/{first.after}")
    assert mechanism.install(str(tmp_path), check=True).changed
    assert mechanism.install(str(tmp_path)).changed
    assert os.readlink(tmp_path / "current") == first.after


def test_old_versions_go_and_foreign_folders_stay(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"old{number}").mkdir()
        mark(str(tmp_path / f"old{number}"), "test")
        os.utime(tmp_path / f"old{number}", (number, number))
    (tmp_path / "theirs").mkdir()
    installed = mechanism.install(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"old4", "old3", "theirs", installed.after, "current"}
