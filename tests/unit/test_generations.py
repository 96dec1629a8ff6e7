"""Old generations: what is found, what may go, what never goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds4 import generations, policies, records
from ds4.adoption import Judged
from ds4.errors import Ds4Error
from ds4.files import MARKER_NAME, mark
from ds4.generations import Old, Uses

SIZE = 4096
CONTENTS = {name: (name * SIZE).encode()[:SIZE] for name in ("new base", "old base", "old mtp", "odd base", "foreign")}


def reading(count: int) -> None:
    """Also look into files without a record; nobody waits."""


NOTHING = Uses(frozenset(), False, frozenset(), "", frozenset())


def sha(name: str) -> str:
    import hashlib

    return hashlib.sha256(CONTENTS[name]).hexdigest()


KNOWN = [
    {"generation": "0731", "role": "base", "bytes": SIZE, "sha256": sha("new base")},
    {"generation": "legacy", "role": "base", "bytes": SIZE, "sha256": sha("old base")},
    {"generation": "legacy", "role": "mtp", "bytes": SIZE, "sha256": sha("old mtp")},
    {"generation": "odd", "role": "base", "bytes": SIZE, "sha256": sha("odd base")},
    {"generation": "legacy", "role": "drafter", "bytes": 0, "sha256": ""},
]
WANTED = {"new.gguf": sha("new base")}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "weights"
    directory.mkdir()
    mark(str(directory), "weights")
    for name, content in (("new.gguf", "new base"), ("old.gguf", "old base"), ("mtp.gguf", "old mtp")):
        put(directory / name, content)
        record(directory / name)
    return directory


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(CONTENTS[content])
    return path


def record(path: Path) -> None:
    hashed = records.hash_file(str(path), 1024)
    item = {"role": "x", "generation": "x"}
    records.write(
        str(path), records.make(str(path), item, hashed, how="fetched", source="http://h/x", trust="manifest")
    )


def find(place: Path, used: Uses = NOTHING, **more: Any) -> dict[str, Old]:
    judged = Judged(str(place.parent / "judged.json"))
    found = generations.find(str(place), KNOWN, WANTED, used, judged, **more)
    return {os.path.basename(old.path): old for old in found}


def test_old_files_are_known_by_their_records_without_reading(place: Path) -> None:
    found = find(place)
    assert {name: (old.called, old.bytes, old.kept_for) for name, old in found.items()} == {
        "old.gguf": ("legacy base", SIZE, ""),
        "mtp.gguf": ("legacy mtp", SIZE, ""),
    }
    assert generations.describe(list(found.values())) == "legacy mtp + legacy base, 8.0 KiB"


def test_a_renamed_file_is_found_by_its_content(place: Path) -> None:
    put(place / "renamed.gguf", "odd base")
    assert "renamed.gguf" not in find(place)
    assert find(place, read=reading)["renamed.gguf"].called == "odd base"
    assert find(place)["renamed.gguf"].called == "odd base", "read once, remembered"
    (place / "renamed.gguf").write_bytes(CONTENTS["foreign"])
    assert "renamed.gguf" not in find(place)


def test_a_foreign_model_of_the_same_size_is_never_ours(place: Path) -> None:
    put(place / "other.gguf", "foreign")
    assert "other.gguf" not in find(place, read=reading)
    assert "new.gguf" not in find(place, read=reading)


def test_nothing_is_followed_out_of_the_directory(place: Path) -> None:
    outside = put(place.parent / "elsewhere/old.gguf", "old base")
    (place / "link.gguf").symlink_to(outside)
    (place / "folder").symlink_to(outside.parent)
    notes: list[str] = []
    found = find(place, read=reading, note=notes.append)
    assert set(found) == {"old.gguf", "mtp.gguf"}
    assert any("link.gguf is a symbolic link" in note for note in notes)


def test_outside_only_what_was_named(place: Path) -> None:
    named = put(place.parent / "named/a.gguf", "old mtp")
    put(place.parent / "named/deeper/b.gguf", "old mtp")
    assert "a.gguf" not in find(place, read=reading)
    assert find(place, read=reading, paths=[str(named.parent)])["a.gguf"].called == "legacy mtp"
    assert "b.gguf" not in find(place, read=reading, paths=[str(named.parent)])
    assert find(place, read=reading, paths=[str(named)])["a.gguf"].called == "legacy mtp"
    assert set(find(place, paths=["/nowhere"])) == {"old.gguf", "mtp.gguf"}


def test_a_directory_without_our_marker_is_not_looked_at(place: Path) -> None:
    (place / MARKER_NAME).unlink()
    assert find(place, read=reading) == {}


def test_what_is_in_use_is_kept(place: Path) -> None:
    status = (place / "mtp.gguf").stat()
    used = Uses(frozenset({sha("old base")}), True, frozenset(), "", frozenset({(status.st_dev, status.st_ino)}))
    kept = {name: old.kept_for for name, old in find(place, used, rollback_waived=True).items()}
    assert kept == {"old.gguf": "the served deployment", "mtp.gguf": "an engine that is running"}


def test_the_way_back_is_kept_until_it_is_given_up(place: Path) -> None:
    used = Uses(frozenset({sha("new base")}), True, frozenset({sha("old base")}), "v0.6.3", frozenset())
    kept = {name: old.kept_for for name, old in find(place, used).items()}
    assert kept == {"old.gguf": "a return to v0.6.3", "mtp.gguf": ""}
    assert {old.kept_for for old in find(place, used, rollback_waived=True).values()} == {""}


def test_a_shared_file_gives_nothing_back(place: Path) -> None:
    os.link(place / "old.gguf", place.parent / "of the operator.gguf")
    record(place / "old.gguf")
    assert find(place)["old.gguf"].bytes == 0


def test_leftovers_of_our_own_fetches(place: Path) -> None:
    for name in (".gone.gguf.part", ".gone.gguf.part.journal", ".new.gguf.quarantine", ".half.gguf.part"):
        (place / name).write_bytes(b"x" * 100)
    judged = Judged(str(place.parent / "judged.json"))
    wanted = {**WANTED, "half.gguf": ""}
    found = generations.find(str(place), KNOWN, wanted, NOTHING, judged)
    names = {os.path.basename(old.path) for old in found if old.called == "leftover"}
    assert names == {".gone.gguf.part", ".gone.gguf.part.journal", ".new.gguf.quarantine"}, "a fetch on its way is kept"


def test_removal_takes_file_and_record_and_goes_on_after_an_interruption(place: Path) -> None:
    olds = list(find(place).values())
    (place / "mtp.gguf").unlink()  # as if the last run had been killed between file and record
    removed = generations.remove(olds)
    assert [os.path.basename(old.path) for old in removed] == ["old.gguf"]
    assert sorted(path.name for path in place.iterdir()) == [MARKER_NAME, "new.gguf", "new.gguf.record.json"]


def test_a_removal_killed_between_file_and_record_is_finished(place: Path) -> None:
    (place / "old.gguf").unlink()
    (place / "new.gguf").unlink()
    assert set(find(place)) == {"mtp.gguf", "old.gguf.record.json"}, "a wanted file's record says what it was"
    generations.remove(find(place).values())
    assert sorted(os.listdir(place)) == [MARKER_NAME, "new.gguf.record.json"]


def test_what_the_fetcher_set_aside(place: Path) -> None:
    """Known content may go like any old file; somebody's own is told and stays."""
    os.rename(place / "old.gguf", place / "new.gguf.0123abcd.quarantine")
    record(place / "new.gguf.0123abcd.quarantine")
    put(place / "new.gguf.89abcdef.quarantine", "foreign")
    (place / "new.gguf.wrong.quarantine").write_bytes(b"short")
    found = find(place, read=reading)
    assert found["new.gguf.0123abcd.quarantine"].called == "legacy base"
    for name in ("new.gguf.89abcdef.quarantine", "new.gguf.wrong.quarantine"):
        assert (found[name].called, found[name].kept_for) == ("file set aside", generations.UNKNOWN)
    generations.remove(found.values())
    assert (place / "new.gguf.wrong.quarantine").exists() and (place / "new.gguf.89abcdef.quarantine").exists()
    assert not (place / "new.gguf.0123abcd.quarantine").exists()


def test_files_that_only_reading_could_judge_are_counted(place: Path) -> None:
    put(place / "renamed.gguf", "odd base")
    os.unlink(records.record_path(str(place / "new.gguf")))
    named = put(place.parent / "named/a.gguf", "old mtp")
    unread: list[str] = []
    find(place, paths=[str(named.parent)], unread=unread.append)
    assert unread == [str(place / "renamed.gguf"), str(named)], "a wanted name is the fetch's business"
    find(place, paths=[str(named.parent)], read=reading)
    unread.clear()
    find(place, paths=[str(named.parent)], unread=unread.append)
    assert unread == [], "once read, nothing is left to do"


def test_a_named_link_to_a_folder_is_not_followed(place: Path) -> None:
    named = put(place.parent / "named/a.gguf", "old mtp")
    (place.parent / "link").symlink_to(named.parent)
    assert "a.gguf" not in find(place, read=reading, paths=[str(place.parent / "link")])


def test_removal_leaves_what_is_kept(place: Path) -> None:
    olds = [old._replace(kept_for="a return to v0.6.3") for old in find(place).values()]
    assert generations.remove(olds) == []
    assert (place / "old.gguf").exists() and (place / "mtp.gguf").exists()


def deployments(tmp_path: Path, active: str, proven: list[str], **weights: list[str]) -> Uses:
    for name, hashes in weights.items():
        folder = tmp_path / "deployments" / name
        folder.mkdir(parents=True)
        files = {str(number): {"sha256": sha(one)} for number, one in enumerate(hashes)}
        (folder / "manifest.json").write_text(
            json.dumps({"id": name, "release": f"v-{name}", "weights": {"files": files}})
        )
    (tmp_path / "deployments.json").write_text(
        json.dumps({"proven": [{"id": name, "release": f"v-{name}"} for name in proven]})
    )
    (tmp_path / "current").symlink_to(f"deployments/{active}")
    return generations.uses(str(tmp_path / "deployments"), str(tmp_path / "current"), str(tmp_path), ["/nowhere"])


def test_uses_are_read_from_the_deployments(tmp_path: Path) -> None:
    used = deployments(tmp_path, "b", ["b", "gone", "a"], a=["old base", "old mtp"], b=["new base"])
    assert used == Uses(
        frozenset({sha("new base")}), True, frozenset({sha("old base"), sha("old mtp")}), "v-a", frozenset()
    )


def test_a_new_service_that_is_not_proven(tmp_path: Path) -> None:
    used = deployments(tmp_path, "b", ["a"], a=["old base"], b=["new base"])
    assert (used.proven, used.rollback_release) == (False, "v-a")


def test_a_host_without_deployments(tmp_path: Path) -> None:
    assert generations.uses(str(tmp_path), str(tmp_path / "current"), str(tmp_path), []) == NOTHING


@pytest.mark.parametrize(
    ("policy", "settings", "cure"),
    [
        ("remove_before_fetch", {"rollback_waived": False}, "weights_rollback_waived: true"),
        ("remove_before_fetch", {"fetch": False}, "weights_fetch: true"),
        ("keep", {"paths": ["/x"]}, "remove_after_smoke"),
    ],
)
def test_contradictions_are_refused(policy: str, settings: dict[str, Any], cure: str) -> None:
    values: dict[str, Any] = {"fetch": True, "rollback_waived": True, "paths": [], **settings}
    with pytest.raises(Ds4Error) as caught:
        policies.require_consistent(policy, **values)
    assert cure in caught.value.cure


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_what_fits_together_is_accepted(policy: str) -> None:
    policies.require_consistent(policy, fetch=True, rollback_waived=True, paths=[])


def test_uninstall_names_only_what_records_vouch_for(place: Path) -> None:
    put(place / "mine.gguf", "foreign")
    (place / ".x.gguf.part").write_bytes(b"")
    names = {os.path.basename(path) for path in generations.recorded(str(place))}
    assert names == {
        "new.gguf",
        "old.gguf",
        "mtp.gguf",
        "new.gguf.record.json",
        "old.gguf.record.json",
        "mtp.gguf.record.json",
        ".x.gguf.part",
    }
    generations.remove_recorded(str(place), generations.recorded(str(place)))
    assert sorted(os.listdir(place)) == [MARKER_NAME, "mine.gguf"]
    (place / "mine.gguf").unlink()
    generations.remove_recorded(str(place), [])
    assert not place.exists()
