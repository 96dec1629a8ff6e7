"""ds4-fetch: what it does with a plan, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import fetch, fetch_state, records
from ds4.errors import Ds4Error
from ds4.fetch import EXIT_AGAIN
from ds4.fetch_state import EXIT_FINAL, Secrets, Status
from ds4.files import mark
from ds4.plan import Plan, PlanFile

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"
CONTENT = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + os.urandom(400_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHER = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(400_000)

Make = Callable[..., Plan]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A plan over a marked directory whose files come from folders on this machine."""
    directory = tmp_path / "weights"
    directory.mkdir()
    mark(str(directory), "weights")
    (directory / ".fetch").mkdir()

    def one(*folders: str, sha256: str = SHA256, size: int | None = len(CONTENT), **more: Any) -> Plan:
        sources = [f"file://{tmp_path}/{folder}/base.gguf" for folder in folders]
        item = PlanFile("base", "base.gguf", "base.gguf", size, sha256, sources, "o/n", "1" * 40)
        values = {"backoff_seconds": 0.001, "backoff_limit_seconds": 0.002, "retries": 1, **more}
        plan = Plan("0731", str(directory), "root", [item], str(directory / ".fetch/status.json"), **values)
        Path(plan.unfinished).touch()
        return plan

    return one


def serve(tmp_path: Path, folder: str, content: bytes = CONTENT) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "base.gguf").write_bytes(content)


def run(plan: Plan) -> tuple[int, dict[str, Any]]:
    code = fetch.run(plan, Secrets())
    status = json.loads(Path(plan.status_file).read_text())
    jsonschema.validate(status, json.loads((SCHEMAS / "weights-status.schema.json").read_text()))
    return code, status


def left(plan: Plan) -> set[str]:
    return set(os.listdir(plan.directory)) - {".ds4-fleet", ".fetch"}


def test_a_file_arrives_with_its_record(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    code, status = run(plan)
    assert (code, status["state"], status["error"]) == (0, "done", None)
    assert status["files"][0]["done"] == status["files"][0]["hashed"] == len(CONTENT) == status["bytes_received"]
    assert (Path(plan.directory) / "base.gguf").read_bytes() == CONTENT
    record = records.read(plan.path(plan.files[0]))
    assert record and (record["how"], record["trust"], record["revision"]) == ("fetched", "manifest", "1" * 40)
    assert left(plan) == {"base.gguf", "base.gguf.record.json"}
    assert not os.path.exists(plan.unfinished), "nothing to do after a reboot"


def test_a_second_run_opens_no_weights(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)
    opened: list[str] = []
    real = os.open

    def spy(path: Any, *args: Any, **more: Any) -> int:
        opened.append(str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", spy)
    assert run(plan)[0] == 0
    assert not [path for path in opened if path.endswith("base.gguf")]


def test_the_next_source_goes_on_where_one_failed(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    code, status = run(make("absent", "usb"))
    assert code == 0
    assert "No such file" in capsys.readouterr().err
    assert status["files"][0]["source"].endswith("usb/base.gguf")


def test_no_source_at_all_names_every_reason(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "short", CONTENT[:-1])
    plan = make("absent", "short")
    code, status = run(plan)
    assert code == EXIT_FINAL and status["state"] == "failed"
    error = status["error"]
    assert error["what"] == "base.gguf (base) could not be fetched"
    assert "absent/base.gguf: " in error["found"] and "400023 bytes, wanted 400024" in error["found"]
    assert os.path.exists(plan.unfinished)


def test_a_wrong_hash_is_fetched_once_more_from_elsewhere(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = bytearray(CONTENT)
    wrong[200_000] ^= 1
    serve(tmp_path, "bad", bytes(wrong))
    serve(tmp_path, "good")
    plan = make("bad", "good")
    code, _ = run(plan)
    text = capsys.readouterr().err
    assert code == 0
    assert f"wrong hash {hashlib.sha256(wrong).hexdigest()}, wanted {SHA256}" in text
    assert "the first download was damaged at bytes 131072-262143" in text
    assert left(plan) == {"base.gguf", "base.gguf.record.json"}


def test_a_hash_that_stays_wrong_ends_it(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "bad", OTHER)
    plan = make("bad", known={hashlib.sha256(OTHER).hexdigest(): "legacy base"})
    code, status = run(plan)
    error = status["error"]
    assert code == EXIT_FINAL
    assert error["what"] == "base.gguf arrived twice with a wrong hash"
    assert "both downloads are the same" in error["found"] and "which is legacy base" in error["found"]
    assert error["required"] == f"sha256 {SHA256}"
    assert status["bytes_received"] == 2 * len(OTHER), "once more, then it stops"
    assert left(plan) == {".base.gguf.quarantine"}


def test_no_room_to_keep_a_wrong_download(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(tmp_path, "bad", OTHER)
    plan = make("bad")
    real = os.statvfs
    monkeypatch.setattr(fetch.Fetch, "_check_room", lambda *args: None)

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full if str(path) == plan.directory else real(path))
    assert run(plan)[0] == EXIT_FINAL
    assert left(plan) == set()


def test_no_room_at_all_is_said_before_a_byte_moves(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(tmp_path, "usb")

    class Full:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    code, status = run(make("usb"))
    assert code == EXIT_FINAL and status["bytes_received"] == 0
    assert status["error"]["evidence"]["missing_bytes"] == len(CONTENT) - 40960
    assert f"that is {len(CONTENT) - 40960} bytes more" in status["error"]["required"]


def test_an_unknown_hash_is_recorded_at_first_use_and_then_holds(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    plan = make("usb", sha256="", size=None)
    assert run(plan)[0] == 0
    assert f"recorded at first use: sha256 {SHA256}" in capsys.readouterr().err
    record = records.read(plan.path(plan.files[0]))
    assert record and record["trust"] == "first-use"

    (tmp_path / "weights/base.gguf").write_bytes(OTHER)
    serve(tmp_path, "usb", OTHER)
    code, status = run(make("usb", sha256="", size=None))
    assert code == EXIT_FINAL and status["error"]["required"] == f"sha256 {SHA256}", (
        "another content is not trusted again"
    )


def test_a_hash_of_first_use_holds_when_the_file_is_gone(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb", sha256="", size=None)
    path = plan.path(plan.files[0])
    assert run(plan)[0] == 0
    os.unlink(path)
    assert run(make("usb", sha256="", size=None))[0] == 0
    record = records.read(path)
    assert record and record["trust"] == "first-use", "who vouched for it does not change"
    os.unlink(path)
    serve(tmp_path, "usb", OTHER)
    code, status = run(make("usb", sha256="", size=None))
    assert code == EXIT_FINAL and status["error"]["required"] == f"sha256 {SHA256}"
    assert records.record_path(path) in status["error"]["cure"]


@pytest.mark.parametrize(
    ("content", "half", "said"),
    [
        (b"<html>".ljust(len(CONTENT)), False, "a web page"),
        (CONTENT[:-100], False, f"{len(CONTENT) - 100} bytes, not {len(CONTENT)}"),
        (CONTENT, True, ".aria2"),
    ],
)
def test_a_file_of_unknown_hash_is_not_taken_blindly(
    make: Make, tmp_path: Path, content: bytes, half: bool, said: str
) -> None:
    serve(tmp_path, "usb")
    (tmp_path / "weights/base.gguf").write_bytes(content)
    if half:
        (tmp_path / "weights/base.gguf.aria2").touch()
    code, status = run(make("usb", sha256="", size=None))
    assert code == 0 and any(said in note for note in status["notes"]), status["notes"]
    assert (tmp_path / "weights/base.gguf").read_bytes() == CONTENT
    assert (tmp_path / "weights/base.gguf.wrong.quarantine").read_bytes() == content


def test_what_the_hub_says_of_an_adopted_file_counts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legacy drafter: no manifest says its hash, but the hub does."""
    serve(tmp_path, "usb")
    plan = make("usb", sha256="", size=None)
    path = plan.path(plan.files[0])
    monkeypatch.setattr(fetch.Fetch, "_probe", lambda self, source: (len(CONTENT), SHA256))
    for content, received in ((CONTENT, 0), (OTHER.ljust(len(CONTENT), b"x")[: len(CONTENT)], len(CONTENT))):
        Path(path).write_bytes(content)
        hashed = records.hash_file(path, 1024)
        entry = {"role": "base", "generation": "g", "repo": "o/n", "revision": ""}
        records.write(path, records.make(path, entry, hashed, how="linked", source="/home/x", trust="first-use"))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(plan.status_file)
        code, status = run(make("usb", sha256="", size=None))
        assert (code, status["bytes_received"]) == (0, received)
        record = records.read(path)
        assert record and (record["trust"], record["sha256"]) == ("hub", SHA256)


def test_whatever_happens_the_status_says_an_end(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_args: Any) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(fetch.Fetch, "_ensure", break_down)
    code, status = run(make("usb"))
    assert code == EXIT_FINAL and status["state"] == "failed"
    assert "ZeroDivisionError: surprise" in status["error"]["found"]
    assert "Traceback" in capsys.readouterr().err, "for whoever has to mend it"


def test_a_good_file_without_a_record_is_read_and_kept(make: Make, tmp_path: Path) -> None:
    plan = make("absent")
    (tmp_path / "weights/base.gguf").write_bytes(CONTENT)
    code, status = run(plan)
    assert code == 0 and status["bytes_received"] == 0
    record = records.read(plan.path(plan.files[0]))
    assert record and record["how"] == "found"


def test_a_partial_file_that_is_not_needed_any_more_goes(make: Make, tmp_path: Path) -> None:
    plan = make("absent")
    (tmp_path / "weights/base.gguf").write_bytes(CONTENT)
    for name in (".base.gguf.part", ".base.gguf.part.journal"):
        (tmp_path / "weights" / name).write_bytes(b"x")
    assert run(plan)[0] == 0
    assert left(plan) == {"base.gguf", "base.gguf.record.json"}


def test_another_content_under_the_final_name_is_set_aside(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    digest = hashlib.sha256(OTHER).hexdigest()
    plan = make("usb", known={digest: "legacy base"})
    (tmp_path / "weights/base.gguf").write_bytes(OTHER)
    assert run(plan)[0] == 0
    assert (tmp_path / "weights/base.gguf").read_bytes() == CONTENT
    assert (tmp_path / f"weights/base.gguf.{digest[:8]}.quarantine").read_bytes() == OTHER
    assert "which is legacy base" in capsys.readouterr().err
    record = records.read(str(tmp_path / f"weights/base.gguf.{digest[:8]}.quarantine"))
    assert record and (record["generation"], record["role"]) == ("legacy", "base"), "so that it can be cleaned up"


def test_damaged_bytes_of_our_own_go_when_the_new_file_is_there(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)
    path = tmp_path / "weights/base.gguf"
    os.link(path, tmp_path / "mapped by an engine")
    with path.open("r+b") as stream:
        stream.write(b"damage")
    assert run(plan)[0] == 0
    assert left(plan) == {"base.gguf", "base.gguf.record.json"}
    path.write_bytes(OTHER.ljust(len(CONTENT), b"?"))  # another file was written over it
    assert run(plan)[0] == 0
    assert sum(name.endswith(".quarantine") for name in left(plan)) == 1, "that one is somebody's"


def test_damage_costs_only_its_segment(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)
    path = tmp_path / "weights/base.gguf"
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(300_000)
        stream.write(b"damage")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fetch.verify(plan, deep=False)[0]["problem"] == ""
    (found,) = fetch.verify(plan, deep=True)
    assert "damaged at bytes 262144-393215" in found["problem"]
    assert "damaged" in records.quick_check(str(path), SHA256), "neither the engine nor the next run trusts it"
    os.unlink(plan.status_file)
    code, after = run(plan)
    assert code == 0 and after["bytes_received"] == 131072
    assert path.read_bytes() == CONTENT
    assert left(plan) == {"base.gguf", "base.gguf.record.json"}


def test_damage_in_a_shared_file_is_never_repaired_in_place(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)
    path = tmp_path / "weights/base.gguf"
    os.link(path, tmp_path / "of the operator.gguf")
    with path.open("r+b") as stream:
        stream.write(b"damage")
    assert run(plan)[0] == 0
    assert path.read_bytes() == CONTENT
    assert (tmp_path / "of the operator.gguf").read_bytes().startswith(b"damage"), "not ours to change"


def test_deep_look_renews_the_record_of_a_good_file(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)
    (tmp_path / "weights/base.gguf").touch()
    assert "changed" in fetch.verify(plan, deep=False)[0]["problem"]
    assert fetch.verify(plan, deep=True)[0] == {"role": "base", "file": "base.gguf", "problem": "", "sha256": SHA256}
    assert fetch.verify(plan, deep=False)[0]["problem"] == ""


def test_a_deep_look_of_an_ordinary_user_says_what_it_found(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(tmp_path, "usb")
    plan = make("usb")
    run(plan)

    def refuse(*_args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records, "write", refuse)
    path = tmp_path / "weights/base.gguf"
    path.touch()
    assert "its content is right" in fetch.verify(plan, deep=True)[0]["problem"]
    path.write_bytes(b"damage" + CONTENT[6:])
    assert "damaged at bytes 0-131071" in fetch.verify(plan, deep=True)[0]["problem"]


def test_a_line_that_gave_something_before_is_worth_another_start(make: Make, tmp_path: Path) -> None:
    """After an outage of an hour, or a reboot before the network is back; a wrong address never gave anything."""
    plan = make()
    plan.files[0].sources = ["http://127.0.0.1:1/x"]
    assert run(plan)[0] == EXIT_FINAL
    status = json.loads(Path(plan.status_file).read_text())
    Path(plan.status_file).write_text(json.dumps({**status, "bytes_received": 4096}))
    assert run(plan)[0] == EXIT_AGAIN


def test_only_what_is_there(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    code, status = run(make("usb", fetch=False))
    assert code == EXIT_FINAL
    assert "weights_fetch is false" in status["error"]["what"] and status["bytes_received"] == 0


def test_a_link_under_the_final_name_is_refused(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    (tmp_path / "weights/base.gguf").symlink_to(tmp_path / "usb/base.gguf")
    code, status = run(make("usb"))
    assert code == EXIT_FINAL and "symbolic link" in status["error"]["what"]
    assert (tmp_path / "usb/base.gguf").read_bytes() == CONTENT


def test_a_directory_that_is_not_ours(make: Make, tmp_path: Path) -> None:
    (tmp_path / "weights/.ds4-fleet").unlink()
    with pytest.raises(Ds4Error, match="marker"):
        fetch.run(make("usb"), Secrets())


def test_the_disk_is_not_mounted(make: Make, tmp_path: Path) -> None:
    plan = make("usb", mount={"path": "/mnt/weights", "uuid": "1234"})
    os.unlink(plan.unfinished)
    os.rmdir(tmp_path / "weights/.fetch")
    with pytest.raises(Ds4Error, match="not mounted") as caught:
        fetch.run(plan, Secrets())
    assert "/mnt/weights" in caught.value.required and "weights_mount_change_accepted" in caught.value.cure
    assert not (tmp_path / "weights/.fetch").exists(), "nothing is written under the mount point"


def test_secrets_that_cannot_be_read_are_told_in_the_status(make: Make) -> None:
    assert fetch.run(make("usb"), Ds4Error("The file of weights_token_file is empty")) == EXIT_FINAL


def test_deadline_counts_over_all_starts(make: Make, tmp_path: Path) -> None:
    serve(tmp_path, "usb")
    plan = make("usb", deadline_seconds=5.0)
    before = Status(plan)
    before._before = 60.0
    before.write(0)
    code, status = run(plan)
    assert code == EXIT_FINAL and "time limit" in status["error"]["what"]
    os.unlink(plan.status_file)  # what the module does for an explicit new start
    assert run(plan)[0] == 0


def test_a_guest_waits_for_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    monkeypatch.setattr(fetch, "TICK_SECONDS", 0.05)
    values = iter([500] * 4 + [1001] * 2 + [2000] * 100)
    monkeypatch.setattr(fetch, "read_meminfo", lambda: {"MemAvailable": next(values)})
    begun = time.monotonic()
    assert run(make("usb", memory_floor_kib=1000))[0] == 0
    assert time.monotonic() - begun > 0.2, "just above the floor is not enough to go on"
    text = capsys.readouterr().err
    assert "pausing: MemAvailable 500.0 KiB is below the floor 1000.0 KiB" in text and "going on" in text


def test_a_second_start_follows(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    monkeypatch.setattr(fetch, "TICK_SECONDS", 0.02)
    plan = make("usb", bandwidth_bytes_per_second=1_500_000.0)
    codes: list[int] = []
    first = threading.Thread(target=lambda: codes.append(fetch.run(plan, Secrets())))
    first.start()
    while not os.path.exists(plan.status_file):
        time.sleep(0.005)
    codes.append(fetch.run(plan, Secrets()))
    first.join()
    assert codes == [0, 0]
    assert "another one is at work" in capsys.readouterr().err
    assert json.loads(Path(plan.status_file).read_text())["bytes_received"] == len(CONTENT)


def test_a_follower_takes_over_from_a_dead_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path, "usb")
    monkeypatch.setattr(fetch, "TICK_SECONDS", 0.02)
    plan = make("usb")
    Status(plan).write(0)
    held = fetch_state.locked(plan.directory)
    assert held.__enter__()
    threading.Timer(0.1, held.__exit__, (None, None, None)).start()
    assert fetch.run(plan, Secrets()) == 0
    assert "taking over" in capsys.readouterr().err


@pytest.mark.parametrize(("again", "code"), [(True, EXIT_AGAIN), (False, EXIT_FINAL)])
def test_a_follower_says_how_it_ended(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, again: bool, code: int
) -> None:
    monkeypatch.setattr(fetch, "TICK_SECONDS", 0.02)
    plan = make("usb")
    status = Status(plan)
    error = Ds4Error("it broke", found="x", required="y", cure="z").result()["error"]
    status.value.update(state="failed", error=error, again=again)
    status.write(0)
    held = fetch_state.locked(plan.directory)
    assert held.__enter__()
    threading.Timer(0.1, held.__exit__, (None, None, None)).start()
    assert fetch.run(plan, Secrets()) == code
    assert "it broke. Found: x. Required: y. Cure: z." in capsys.readouterr().err


def test_status_is_told_on_a_full_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make("usb")
    status = Status(plan)
    status.write(0)

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_state, "replace_text", full)
    status.value["state"] = "failed"
    status.write(0)
    assert json.loads(Path(plan.status_file).read_text())["state"] == "failed"


def test_status_is_never_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"status.new-{os.getpid()}").symlink_to(victim)
    fetch_state.replace_text(str(tmp_path / "status"), "text")
    assert victim.read_text() == "precious" and (tmp_path / "status").read_text() == "text"


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("hf_token\n", 0o644, "open to other users"),
        ("hf_token\n", 0o640, "open to other users"),
        ("", 0o600, "empty"),
        ("\n", 0o600, "empty"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_secret_files(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(Ds4Error, match=said) as caught:
        fetch_state.secret(str(path), "hf_token", "weights_token_file")
    assert "hf_token\n" not in str(caught.value)


def test_secret_from_systemd_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("from file\nsecond line")
    path.chmod(0o600)
    assert fetch_state.secret(str(path), "hf_token", "x") == "from file"
    assert fetch_state.secret("", "hf_token", "x") == ""
    (tmp_path / "hf_token").write_text("from systemd\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert fetch_state.secret(str(path), "hf_token", "x") == "from systemd"


def test_command_line(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(tmp_path, "usb")
    plan, path = make("usb"), str(tmp_path / "plan.json")
    plan.write(path)
    assert fetch.main(["--plan", path]) == 0
    assert capsys.readouterr().out == "no fetch has been started\n"
    assert fetch.main(["--plan", path, "run"]) == 0
    capsys.readouterr()
    assert fetch.main(["--plan", path, "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"
    assert fetch.main(["--plan", path, "verify", "--deep"]) == 0
    assert capsys.readouterr().out == "base     base.gguf  good\n"
    assert fetch.main(["--plan", path, "plan"]) == 0
    assert json.loads(capsys.readouterr().out) == plan.as_json()
    (tmp_path / "weights/base.gguf").unlink()
    assert fetch.main(["--plan", path, "verify", "--json"]) == EXIT_FINAL
    assert "No such file" in json.loads(capsys.readouterr().out)[0]["problem"]
    assert fetch.main(["--plan", "/nowhere", "run"]) == EXIT_FINAL
    assert "There is no plan" in capsys.readouterr().err
    assert fetch.main(["--plan", "/nowhere", "run", "--json"]) == EXIT_FINAL
    assert "There is no plan" in json.loads(capsys.readouterr().out)["msg"]


def test_a_disk_that_is_full_from_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make("usb")
    path = os.path.join(plan.directory, "plan.json")
    plan.write(path)

    def full(*_args: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device", plan.directory)

    monkeypatch.setattr(os, "makedirs", full)
    assert fetch.main(["--plan", path, "run"]) == EXIT_FINAL
    assert "No space left on device" in capsys.readouterr().err
