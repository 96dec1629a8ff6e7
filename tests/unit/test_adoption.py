"""Adoption: verified once, shared in the cheapest way, its owner's file never altered."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4 import accounts, adoption, records
from ds4.accounts import Account
from ds4.adoption import Adoption, Judged
from ds4.errors import Ds4Error
from ds4.files import mark
from ds4.plan import Plan, PlanFile

CONTENT = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1) + os.urandom(5000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
STRANGER = Account(4711, 4711, frozenset({4711}))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "weights"
    directory.mkdir()
    mark(str(directory), "weights")
    me = Account(os.geteuid(), os.getegid(), frozenset({os.getegid()}))
    monkeypatch.setattr(adoption, "account", lambda user: STRANGER if user == "stranger" else me)
    monkeypatch.setattr(os, "chown", lambda *args, **more: None)
    monkeypatch.setattr(os, "fchown", lambda *args, **more: None)
    return directory


def put(path: Path, content: bytes = CONTENT, mode: int = 0o644) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def run(
    place: Path, *paths: Path, user: str = "me", sha256: str = SHA256, size: int | None = len(CONTENT), **more: Any
) -> tuple[list[dict[str, str]], list[str]]:
    item = PlanFile("base", "sub/base.gguf", "base.gguf", size, sha256, ["http://h/x"])
    plan = Plan(
        "0731",
        str(place),
        user,
        [item],
        str(place / "status"),
        adopt=[str(path) for path in paths],
        known={hashlib.sha256(b"GGUFold").hexdigest(): "legacy base"},
    )
    notes: list[str] = []
    made = Adoption(plan, Judged(str(place.parent / "judged.json")), note=notes.append, **more)
    return made.run(), notes


def test_a_readable_file_is_linked(place: Path) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    before = mine.stat()
    adopted, _ = run(place, mine.parent)
    assert adopted == [{"role": "base", "path": str(mine), "how": "linked"}]
    assert os.path.samefile(mine, place / "base.gguf")
    after = mine.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)
    record = records.read(str(place / "base.gguf"))
    assert record and (record["how"], record["source"], record["trust"]) == ("linked", str(mine), "manifest")
    assert records.quick_check(str(place / "base.gguf"), SHA256) == ""


def test_one_that_the_service_user_cannot_read_is_copied(place: Path) -> None:
    mine = put(place.parent / "gguf/base.gguf", mode=0o600)
    adopted, _ = run(place, mine, user="stranger")
    assert adopted[0]["how"] in ("copied", "reflinked")
    assert (place / "base.gguf").read_bytes() == CONTENT
    assert not os.path.samefile(mine, place / "base.gguf")
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    assert records.quick_check(str(place / "base.gguf"), SHA256) == ""


def test_another_disk_means_a_copy(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    adopted, _ = run(place, put(place.parent / "usb/base.gguf"))
    assert adopted[0]["how"] in ("copied", "reflinked")


def test_no_room_for_a_copy(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adoption, "_clone", staticmethod(lambda path, handle: False))
    monkeypatch.setattr(os, "fstatvfs", lambda handle: SimpleNamespace(f_bavail=1, f_frsize=1000))
    adopted, notes = run(place, put(place.parent / "gguf/base.gguf", mode=0o600), user="stranger")
    assert adopted == [] and not (place / "base.gguf").exists()
    assert "no room for a copy" in notes[-1] and "chmod o+r" in notes[-1] and "weights_adopt_move" in notes[-1]
    assert [name for name in os.listdir(place) if "adopted" in name] == []


def test_moved_only_when_asked(place: Path) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    adopted, _ = run(place, mine, move=True)
    assert adopted[0]["how"] == "moved" and not mine.exists()
    assert records.quick_check(str(place / "base.gguf"), SHA256) == ""


@pytest.mark.parametrize("step", ["write", "quick_check"])
def test_a_move_takes_the_file_last(place: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever goes wrong before everything else is done, the owner still has his file."""
    mine = put(place.parent / "gguf/base.gguf", mode=0o600)

    def fail(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records, step, fail)
        adopted, notes = run(place, mine, move=True)
    assert adopted == [] and "was not adopted" in notes[-1]
    assert mine.read_bytes() == CONTENT
    (place / "base.gguf").unlink(missing_ok=True)
    assert run(place, mine, move=True)[0][0]["how"] == "moved" and not mine.exists()
    assert (place / "base.gguf").read_bytes() == CONTENT


def test_a_move_from_another_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    mine = put(place.parent / "usb/base.gguf")
    assert run(place, mine, move=True)[0][0]["how"] == "moved" and not mine.exists()
    assert records.quick_check(str(place / "base.gguf"), SHA256) == ""


@pytest.mark.parametrize(
    ("content", "half", "said"),
    [(b"<html>not a model</html>" * 9, False, "a web page"), (CONTENT, True, "never finished")],
)
def test_without_a_hash_a_file_must_at_least_look_whole(place: Path, content: bytes, half: bool, said: str) -> None:
    mine = put(place.parent / "gguf/base.gguf", content)
    if half:
        put(place.parent / "gguf/base.gguf.aria2", b"?")
    adopted, notes = run(place, mine, sha256="", size=None)
    assert adopted == [] and not (place / "base.gguf").exists()
    assert said in notes[-1]


def test_first_use_is_said(place: Path) -> None:
    _, notes = run(place, put(place.parent / "gguf/base.gguf"), sha256="", size=None)
    assert notes[-1] == f"base.gguf: nobody publishes its hash; recorded at first use: sha256 {SHA256}"


def test_a_guest_drops_the_pages_of_a_copy_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda handle, *_: dropped.append(os.fstat(handle).st_ino))
    with (place / "copy").open("wb", buffering=0) as stream:
        records.hash_file(str(mine), 1024, drop_cache=True, copy_to=stream.fileno())
    assert set(dropped) == {mine.stat().st_ino, (place / "copy").stat().st_ino}


def test_the_wrong_content_is_told_apart_and_not_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = b"GGUFold" + bytes(len(CONTENT) - 7)
    put(place.parent / "gguf/base.gguf", old)
    good = put(place.parent / "gguf/copy of base.gguf")
    adopted, notes = run(place, good.parent)
    assert adopted[0]["path"] == str(good)
    assert any(f"is not base.gguf: sha256 {hashlib.sha256(old).hexdigest()}" in note for note in notes)
    (place / "base.gguf").unlink()
    reads: list[str] = []
    monkeypatch.setattr(records, "hash_file", lambda path, *args, **more: reads.append(path))
    assert run(place, good.parent)[0]
    assert reads == [], "80 GiB are read once"


def test_candidates_by_length_with_the_right_name_first(tmp_path: Path) -> None:
    item = PlanFile("base", "base.gguf", "base.gguf", 10, SHA256, [])
    folder = tmp_path / "gguf"
    put(folder / "a.gguf", b"x" * 10)
    put(folder / "base.gguf", b"x" * 10)
    put(folder / "longer.gguf", b"x" * 11)
    (folder / "deeper").mkdir()
    put(folder / "deeper/base.gguf", b"x" * 10)
    (folder / "link.gguf").symlink_to(tmp_path / "far.gguf")
    put(tmp_path / "far.gguf", b"x" * 10)
    os.mkfifo(folder / "pipe")
    found = adoption.candidates(item, [str(folder), str(folder / "base.gguf"), "/nowhere"], str(tmp_path / "weights"))
    assert found == [str(folder / "base.gguf"), str(folder / "a.gguf"), str(tmp_path / "far.gguf")]
    assert adoption.candidates(item, [str(folder)], str(folder)) == [str(tmp_path / "far.gguf")], (
        "ours are no candidates"
    )
    unknown = PlanFile("base", "base.gguf", "base.gguf", None, "", [])
    assert adoption.candidates(unknown, [str(folder)], "/w") == [str(folder / "base.gguf")]


def test_without_a_hash_nothing_closed_comes_into_reach(place: Path) -> None:
    secret = put(place.parent / "home/base.gguf", mode=0o600)
    adopted, notes = run(place, secret, user="stranger", sha256="", size=None)
    assert adopted == [] and not (place / "base.gguf").exists()
    assert "has no published hash" in notes[-1]
    adopted, _ = run(place, secret, sha256="", size=None)
    record = records.read(str(place / "base.gguf"))
    assert adopted and record and record["trust"] == "first-use"


def test_a_shared_file_that_its_owner_closed_gets_a_copy(place: Path) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    run(place, mine)
    mine.chmod(0o600)
    adopted, _ = run(place, user="stranger")
    assert adopted[0]["how"] in ("copied", "reflinked")
    assert not os.path.samefile(mine, place / "base.gguf")
    record = records.read(str(place / "base.gguf"))
    assert record and record["source"] == str(mine)


def test_a_link_under_our_name_is_left_to_the_fetcher(place: Path) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    (place / "base.gguf").symlink_to("/nowhere")
    assert run(place, mine)[0] == []


def test_a_file_that_changes_meanwhile_is_not_adopted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = put(place.parent / "gguf/base.gguf")
    real = os.link

    def link(source: str, target: str, **more: Any) -> None:
        real(source, target, **more)
        mine.write_bytes(CONTENT[:-1] + b"!")

    monkeypatch.setattr(os, "link", link)
    adopted, notes = run(place, mine)
    assert adopted == []
    assert "changed while it was adopted" in notes[-1]
    assert records.quick_check(str(place / "base.gguf"), SHA256) != "", "and the record does not vouch for it"


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "may"),
    [
        (4711, 0, 0o400, True),
        (4711, 0, 0o044, False),
        (0, 4711, 0o640, True),
        (0, 4711, 0o604, False),
        (0, 0, 0o604, True),
        (0, 0, 0o640, False),
    ],
)
def test_who_may_read(uid: int, gid: int, mode: int, may: bool) -> None:
    status: Any = SimpleNamespace(st_uid=uid, st_gid=gid, st_mode=mode)
    assert accounts.readable(status, STRANGER) is may
    assert accounts.readable(status, Account(0, 0, frozenset({0})))


def test_an_account_that_is_not_there() -> None:
    with pytest.raises(Ds4Error, match="no user") as caught:
        accounts.account("no-such-user-here")
    assert "host_base" in caught.value.cure


def test_memory_of_looks_forgets_what_changed(tmp_path: Path) -> None:
    path = put(tmp_path / "x.gguf")
    judged = Judged(str(tmp_path / "judged.json"))
    judged.remember(str(path), records.hash_file(str(path), 1024))
    assert Judged(str(tmp_path / "judged.json")).get(str(path)) == records.hash_file(str(path), 1024)
    path.touch()
    assert judged.get(str(path)) is None
    path.unlink()
    assert judged.get(str(path)) is None
    (tmp_path / "judged.json").write_text("[torn")
    assert Judged(str(tmp_path / "judged.json")).get(str(path)) is None
