"""The gate before every start: weights as verified, no second copy, stale lock, memory within a bounded wait."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4 import gate, host, records, service
from ds4.deployment import file_digest
from ds4.errors import Ds4Error

GIB = 1048576


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ds4.lock"
    monkeypatch.setattr(gate, "ENGINE_LOCK", str(path))
    monkeypatch.setattr(gate, "lock_holders", lambda: host.lock_holders(str(path)))
    return path


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(
        f"MemTotal: {121 * GIB} kB\nMemFree: {3 * GIB} kB\nMemAvailable: {110 * GIB} kB\n", encoding="ascii"
    )
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    weights = tmp_path / "base.gguf"
    weights.write_bytes(b"GGUF" * 4096)
    records.write(
        str(weights),
        records.make(
            str(weights),
            {"role": "base"},
            records.hash_file(str(weights), 4096),
            how="fetched",
            source="test",
            trust="manifest",
        ),
    )
    return {
        "id": "0" * 12,
        "weights": {"files": {"base": {"path": str(weights), "sha256": file_digest(str(weights)), "bytes": 16384}}},
        "service": {"user": pwd.getpwuid(os.getuid()).pw_name},
        "memory_required_kib": 100 * GIB,
    }


HOLD = """
import fcntl, mmap, os, sys, time
lock, weights = sys.argv[1:3]
if lock:
    handle = open(lock, "w")
    fcntl.flock(handle, fcntl.LOCK_EX)
if weights:
    kept = mmap.mmap(os.open(weights, os.O_RDONLY), 0, prot=mmap.PROT_READ)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold() -> Iterator[Any]:
    """``hold(lock="", weights="")`` starts another process that holds them, as a second engine would."""
    started: list[subprocess.Popen[str]] = []

    def start(*, lock: str = "", weights: str = "") -> int:
        process = subprocess.Popen([sys.executable, "-c", HOLD, lock, weights], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_enough_available_memory_opens_the_gate_though_little_is_free(manifest: dict[str, Any], meminfo: Path) -> None:
    assert gate.wait_for_memory(manifest, 0, str(meminfo)).available_kib == 110 * GIB


def test_too_little_memory_names_the_gap_and_the_cure(manifest: dict[str, Any], meminfo: Path) -> None:
    manifest["memory_required_kib"] = 112 * GIB
    with pytest.raises(Ds4Error, match=r"MemAvailable 110\.0 GiB.*112\.0 GiB \(short of 2\.0 GiB\).*reboot"):
        gate.wait_for_memory(manifest, 0, str(meminfo))


def test_memory_that_comes_back_in_time_opens_the_gate(manifest: dict[str, Any], meminfo: Path) -> None:
    good = meminfo.read_text(encoding="ascii")
    meminfo.write_text(good.replace(str(110 * GIB), str(9 * GIB)), encoding="ascii")
    subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.4); open({str(meminfo)!r}, 'w').write({good!r})"]
    )
    start = time.monotonic()
    assert gate.wait_for_memory(manifest, 10, str(meminfo)).reached
    assert time.monotonic() - start >= 0.3


def test_a_held_lock_names_the_process(manifest: dict[str, Any], lock: Path, hold: Any) -> None:
    pid = hold(lock=str(lock))
    with pytest.raises(Ds4Error, match=f"process {pid} .*holds {lock}"):
        gate.refuse_second_copy(manifest)


def test_mapped_weights_name_the_process_under_whatever_name(
    manifest: dict[str, Any], lock: Path, hold: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other-name.gguf"
    os.link(manifest["weights"]["files"]["base"]["path"], other)
    pid = hold(weights=str(other))
    with pytest.raises(Ds4Error, match=f"process {pid} .*maps .*base.gguf"):
        gate.refuse_second_copy(manifest)
    assert service.mapping_pids(manifest["weights"]["files"]["base"]["path"]) == [pid]


def test_nobody_holding_anything_opens_the_gate(manifest: dict[str, Any], lock: Path) -> None:
    lock.write_text("4711", encoding="ascii")
    gate.refuse_second_copy(manifest)


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root to give files away")
def test_only_a_stale_lock_of_another_owner_is_removed(lock: Path, hold: Any) -> None:
    user = "nobody"
    assert gate.remove_stale_lock(user) == ""
    lock.write_text("4711", encoding="ascii")
    assert "left behind by uid 0" in gate.remove_stale_lock(user)
    assert not lock.exists()
    lock.write_text("4711", encoding="ascii")
    os.chown(lock, pwd.getpwnam(user).pw_uid, -1)
    assert gate.remove_stale_lock(user) == "", "the engine can open its own"
    os.chown(lock, 0, 0)
    hold(lock=str(lock))
    assert gate.remove_stale_lock(user) == "", "somebody holds it"
    assert lock.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root to give files away")
def test_an_uninstall_takes_only_the_services_own_lock(lock: Path, hold: Any) -> None:
    gate.remove_own_lock("nobody")
    lock.write_text("4711", encoding="ascii")
    gate.remove_own_lock("nobody")
    gate.remove_own_lock("ds4-gone")
    assert lock.exists(), "it is somebody else's"
    os.chown(lock, pwd.getpwnam("nobody").pw_uid, -1)
    pid = hold(lock=str(lock))
    gate.remove_own_lock("nobody")
    assert lock.exists(), f"process {pid} holds it"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    gate.remove_own_lock("nobody")
    assert not lock.exists()


def test_looking_at_a_lock_takes_it_from_nobody(lock: Path) -> None:
    lock.write_text("", encoding="ascii")
    with open(lock, "w", encoding="ascii") as handle:
        host.lock_holders(str(lock))
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_weights_changed_after_verification_close_the_gate(manifest: dict[str, Any]) -> None:
    gate.check_weights(manifest)
    path = manifest["weights"]["files"]["base"]["path"]
    os.utime(path, (1, 1))
    with pytest.raises(Ds4Error, match=r"not the verified ones.*base weights: base\.gguf changed since"):
        gate.check_weights(manifest)
    os.unlink(path)
    with pytest.raises(Ds4Error, match="No such file"):
        gate.check_weights(manifest)


def test_weights_that_their_owner_closed_close_the_gate(manifest: dict[str, Any]) -> None:
    manifest["service"]["user"] = "nobody"
    gate.check_weights(manifest)
    os.chmod(manifest["weights"]["files"]["base"]["path"], 0o600)
    with pytest.raises(Ds4Error, match=r"base\.gguf cannot be read by nobody"):
        gate.check_weights(manifest)


def test_another_generation_of_the_same_size_closes_the_gate(manifest: dict[str, Any]) -> None:
    manifest["weights"]["files"]["base"]["sha256"] = "f" * 64
    with pytest.raises(Ds4Error, match="wanted ffff"):
        gate.check_weights(manifest)


def test_the_program_says_why_it_stays_closed(
    manifest: dict[str, Any], tmp_path: Path, lock: Path, meminfo: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "manifest.json"
    assert gate.main(["--manifest", str(path)]) == 1
    assert "<3>ds4 gate: The deployment cannot be read" in capfd.readouterr().err
    path.write_text(json.dumps(manifest), encoding="utf-8")
    manifest["memory_required_kib"] = 10**12
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert gate.main(["--manifest", str(path)]) == 1
    assert "<3>ds4 gate: Not enough memory" in capfd.readouterr().err
    manifest["memory_required_kib"] = 1
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert gate.main(["--manifest", str(path)]) == 0
    assert "<6>ds4 gate: open" in capfd.readouterr().err


def test_mapping_a_file_is_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"x" * 4096)
    assert service.mapping_pids(str(path)) == []
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ):
        assert service.mapping_pids(str(path)) == [os.getpid()]
