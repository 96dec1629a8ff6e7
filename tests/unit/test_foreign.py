"""Somebody else's engine: what is compared, who supervises it, and that only the remembered process is ever ended."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4 import foreign
from ds4.command import Ran
from ds4.errors import Ds4Error
from ds4.files import read_json, write_json
from ds4.process import Process

OURS = {
    "args": ["-m", "/w/base.gguf", "--dspark", "/w/drafter.gguf", "--ctx", "524288", "--no-update-check"],
    "env": {"DS4_CODEX_MODELS_FILE": "/opt/x.json"},
}


@pytest.mark.parametrize(
    ("argv", "environment", "lost"),
    [
        (["-m", "/home/a/base.gguf", "-c", "524288"], {}, []),
        (["--ctx", "524288", "--port", "8000", "--host", "127.0.0.1", "--cuda"], {}, []),
        (["-c", "32768"], {}, ["-c 32768 (ours: 524288)"]),
        (["-c", "1", "-c", "524288"], {}, []),  # the last one wins
        (["--cors", "--host", "192.0.2.1"], {}, ["--cors", "--host 192.0.2.1 (ours: 127.0.0.1)"]),
        (["--port", "8001"], {}, ["--port 8001 (ours: 8000)"]),
        ([], {"DS4_MEM_FLOOR_GB": "1", "SECRET": "x", "HOME": "/home/a"}, ["DS4_MEM_FLOOR_GB=1"]),
        ([], {"DS4_CODEX_MODELS_FILE": "/home/a/codex.json", "DS4_GGUF_DIR": "/home/a"}, []),
        (["--mtp-margin", "-3"], {}, ["--mtp-margin -3"]),
    ],
)
def test_settings_that_would_be_lost(argv: list[str], environment: dict[str, str], lost: list[str]) -> None:
    record = {"argv": ["/home/a/ds4-server", *argv], "environment": environment}
    assert foreign.lost_settings(record, OURS) == lost


def other(**changes: Any) -> dict[str, Any]:
    values = {"pid": 4711, "user": "alice", "program": "/home/alice/ds4-server", "unit": "session-3.scope"}
    return {**values, "started_ticks": 1, "why": ["is an engine", "listens on port 8000"], "engine": True, **changes}


def test_a_refusal_names_who_and_how_to_go_on() -> None:
    text = str(foreign.refusal([other()]))
    assert "process 4711 (alice, /home/alice/ds4-server, session-3.scope) is an engine and listens on port 8000" in text
    assert "engine_service_adopt: true" in text


def test_what_is_no_engine_cannot_be_adopted(tmp_path: Path) -> None:
    nginx = other(program="/usr/sbin/nginx", engine=False)
    assert "engine_service_adopt" not in str(foreign.refusal([nginx]))
    with pytest.raises(Ds4Error, match="Somebody else's process"):
        foreign.remember([nginx], str(tmp_path))
    with pytest.raises(Ds4Error, match="More than one"):
        foreign.remember([other(), other(pid=4712)], str(tmp_path))


def test_cron_entries_that_start_an_engine_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# @reboot /home/a/.local/bin/ds4-serve\n@reboot nohup /home/a/.local/bin/ds4-serve --port 8000\n0 1 * * * backup\n"
    real_open = open

    def fake_open(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == "/var/spool/cron/crontabs/alice":
            import io

            return io.StringIO(text)
        if str(path).startswith("/etc/cron"):
            raise FileNotFoundError
        return real_open(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", fake_open)
    assert foreign.cron_lines("alice") == [("/var/spool/cron/crontabs/alice", "/home/a/.local/bin/ds4-serve")]


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path)
    yield process
    process.kill()
    process.wait()


def remembered(tmp_path: Path, process: subprocess.Popen[bytes], **changes: Any) -> str:
    path = str(tmp_path / "adopted.json")
    record = {
        "schema": 1,
        "pid": process.pid,
        "started_ticks": Process(process.pid).started_ticks,
        "user": "me",
        "uid": os.getuid(),
        "supervisor": {"kind": "none", "unit": "", "enabled": False, "notes": []},
    }
    write_json(path, {**record, **changes}, mode=0o600)
    return path


def test_exactly_the_remembered_process_is_ended(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    text = foreign.end(remembered(tmp_path, victim), 10)
    assert victim.wait(5) == -signal.SIGTERM
    assert f"process {victim.pid} of me ended" in text


def test_a_later_process_with_the_same_pid_is_left_alone(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    path = remembered(tmp_path, victim, started_ticks=Process(victim.pid).started_ticks - 1)
    assert foreign.end(path, 10) == "had ended by itself"
    assert victim.poll() is None


UNIT = {"kind": "system", "unit": "my-llm.service", "enabled": True, "notes": []}


class FakeSystemctl:
    """What ``systemctl`` was told; ``stop`` ends the victim, as its unit would, or runs past its limit."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, victim: subprocess.Popen[bytes], *, hangs: bool = False
    ) -> None:
        self.told: list[list[str]] = []
        self.victim, self.hangs = victim, hangs
        monkeypatch.setattr(foreign, "run", self.run)

    def run(self, argv: list[str], **options: Any) -> Ran:
        self.told.append(argv)
        if "stop" in argv and self.hangs:
            return Ran(124, "", "")
        if "stop" in argv:
            self.victim.terminate()
            self.victim.wait()
        return Ran(0, "", "")


def test_an_engine_under_a_unit_is_ended_by_its_unit(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = FakeSystemctl(monkeypatch, victim)
    path = remembered(tmp_path, victim, supervisor=UNIT)
    text = foreign.end(path, 10)
    assert f"process {victim.pid} of me ended" in text
    assert "my-llm.service was stopped and disabled" in text
    assert systemctl.told == [["systemctl", "disable", "my-llm.service"], ["systemctl", "stop", "my-llm.service"]]
    assert "stopped and disabled" in foreign.end(path, 10), "it may be taken up again"


def test_a_unit_that_does_not_stop_in_time_has_its_process_killed(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSystemctl(monkeypatch, victim, hangs=True)
    assert "had to be killed" in foreign.end(remembered(tmp_path, victim, supervisor=UNIT), 10)
    assert victim.wait(5) == -signal.SIGKILL


def test_one_that_ignores_sigterm_is_killed_after_the_limit(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    start = time.monotonic()
    assert "had to be killed" in foreign.end(remembered(tmp_path, process), 0.3)
    assert process.wait(5) == -signal.SIGKILL
    assert time.monotonic() - start >= 0.3
    process.stdout.close()


def test_a_process_is_remembered_exactly_and_in_private(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"pid": victim.pid, "port": 8000, "weights_bytes": 0, "resident_kib": 0}
    monkeypatch.setattr(foreign, "ds4_processes", lambda: [engine])
    monkeypatch.setattr(foreign, "supervisor", lambda process: {"kind": "none"})
    path = foreign.remember([other(pid=victim.pid)], str(tmp_path / "evidence"))
    assert os.stat(path).st_mode & 0o777 == 0o600
    record = read_json(path)
    assert isinstance(record, dict)
    assert record["argv"] == [sys.executable, "-c", "import time; time.sleep(60)"]
    assert record["directory"] == str(tmp_path)
    assert record["environment"]["PATH"] == os.environ["PATH"]
    assert record["uid"] == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root to become somebody else")
def test_it_becomes_that_process_again(tmp_path: Path) -> None:
    entry = pwd.getpwnam("nobody")
    log, folder = tmp_path / "log", tmp_path / "work"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    code = "import os; print(os.getuid(), os.getcwd(), sorted(os.environ.items()), oct(os.umask(0)), flush=True)"
    path = str(tmp_path / "adopted.json")
    write_json(
        path,
        {
            "schema": 1,
            "uid": entry.pw_uid,
            "executable": "/usr/bin/python3",
            "argv": ["ds4-server", "-I", "-c", code],
            "directory": str(folder),
            "environment": {"LC_ALL": "C.UTF-8", "SECRET": "x y"},
            "umask": 0o027,
            "nice": 5,
            "output": [str(log), ""],
        },
    )
    ran = subprocess.run(
        [sys.executable, "-c", f"from ds4 import foreign; foreign.execute({path!r})"],
        env={"PYTHONPATH": str(Path(foreign.__file__).parents[1])},
        check=False,
    )
    assert ran.returncode == 0
    expected = f"{entry.pw_uid} {folder} [('LC_ALL', 'C.UTF-8'), ('SECRET', 'x y')] 0o27\n"
    assert log.read_text(encoding="utf-8") == expected
