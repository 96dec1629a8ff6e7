"""Somebody else's engine: what is compared, who supervises it, and that only the remembered process is ever ended."""

from __future__ import annotations

import mmap
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

from ds4 import foreign, probe
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


def test_a_lost_setting_that_is_a_secret_is_only_named() -> None:
    record = {"argv": ["ds4-server", "--api-key", "hunter2"], "environment": {"DS4_HUB_TOKEN": "hunter3"}}
    assert foreign.lost_settings(record, OURS) == ["--api-key ***", "DS4_HUB_TOKEN=***"]


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


# ---------------------------------------------------------------------------------------------------- who supervises


class Proc:
    """A process table in a folder: ``add(pid, parent, cgroup, command)``; ``show`` is what systemctl answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.show: dict[str, str] = {}
        self.told: list[list[str]] = []
        self.crontab: list[tuple[str, str]] = []
        monkeypatch.setattr(foreign, "run", self.run)
        monkeypatch.setattr(foreign, "cron_lines", lambda user: self.crontab)

    def add(self, pid: int, parent: int, cgroup: str, command: str) -> Process:
        place = self.folder / str(pid)
        place.mkdir()
        (place / "stat").write_text(f"{pid} (x) S {parent} {' '.join(['0'] * 17)} 77\n", encoding="utf-8")
        (place / "status").write_text(f"Uid:\t{os.getuid()}\t0\t0\t0\n", encoding="utf-8")
        (place / "cgroup").write_text(f"0::{cgroup}\n", encoding="utf-8")
        (place / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        return Process(pid, proc=str(self.folder))

    def run(self, argv: list[str], **options: Any) -> Ran:
        self.told.append(argv)
        return Ran(0, "".join(f"{name}={value}\n" for name, value in self.show.items()), "")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    return Proc(tmp_path, monkeypatch)


@pytest.mark.parametrize("main", [20, 21], ids=["the engine itself", "a wrapper that started it"])
def test_a_system_unit_whose_program_it_is_or_came_from_supervises_it(proc: Proc, main: int) -> None:
    proc.show = {"MainPID": str(main), "UnitFileState": "enabled", "Transient": "no"}
    proc.add(21, 1, "/system.slice/my-llm.service", "/bin/sh /home/a/start-llm.sh")
    engine = proc.add(20, 21, "/system.slice/my-llm.service", "ds4-server")
    proc.add(22, 20, "/system.slice/my-llm.service/child", "nvidia-helper")
    proc.add(30, 1, "/system.slice/other.service", "nginx")
    assert foreign.supervisor(engine) == {"kind": "system", "unit": "my-llm.service", "enabled": True, "notes": []}


def test_a_unit_of_a_user_is_asked_of_that_users_manager(proc: Proc) -> None:
    proc.show = {"MainPID": "20", "UnitFileState": "disabled", "Transient": "no"}
    uid = os.getuid()
    engine = proc.add(20, 9, f"/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/llm.service", "ds4-server")
    found = foreign.supervisor(engine)
    assert (found["kind"], found["unit"], found["enabled"]) == ("user", "llm.service", False)
    assert proc.told[0][:6] == ["runuser", "-u", pwd.getpwuid(uid).pw_name, "--", "systemctl", "--user"]


@pytest.mark.parametrize(
    ("cgroup", "show"),
    [
        ("/user.slice/user-1000.slice/session-3.scope", {"MainPID": "20"}),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope", {"MainPID": "20"}),
        ("/system.slice/cron.service", {"MainPID": "20"}),
        ("/system.slice/run-u7.service", {"MainPID": "20", "Transient": "yes"}),
        ("/system.slice/rc-local.service", {"MainPID": "0"}),  # it started something once and looks after nothing
        ("/system.slice/ds4-tools.service", {"MainPID": "99"}),  # a path with ds4 in it says nothing
        ("", {}),
    ],
)
def test_who_starts_nothing_again_supervises_nothing(proc: Proc, cgroup: str, show: dict[str, str]) -> None:
    proc.show, proc.crontab = show, [("/etc/crontab", "/opt/ds4-serve")]
    found = foreign.supervisor(proc.add(20, 1, cgroup, "ds4-server"))
    assert (found["kind"], found["unit"]) == ("none", "")
    assert found["notes"] == ["/etc/crontab starts /opt/ds4-serve by itself"]


def test_a_unit_that_runs_more_than_the_engine_is_never_stopped(proc: Proc) -> None:
    proc.show = {"MainPID": "21", "UnitFileState": "enabled", "Transient": "no"}
    proc.add(21, 1, "/system.slice/supervisord.service", "/usr/bin/supervisord")
    engine = proc.add(20, 21, "/system.slice/supervisord.service", "ds4-server")
    proc.add(23, 21, "/system.slice/supervisord.service", "/usr/bin/database")
    with pytest.raises(
        Ds4Error, match=r"not only it.*process 23 .*/usr/bin/database.*disable --now supervisord\.service"
    ):
        foreign.supervisor(engine)


def test_a_process_that_maps_the_weights_is_found_before_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "ds4_processes", list)
    monkeypatch.setattr(foreign, "lock_holders", list)
    monkeypatch.setattr(foreign, "listeners", lambda ports: [])
    path = tmp_path / "base.gguf"
    path.write_bytes(b"GGUF" * 1024)
    assert foreign.find(8000, "ds4.service", [str(path), ""]) == []
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ):
        (found,) = foreign.find(8000, "ds4.service", [str(path), str(path)])
    assert (found["pid"], found["engine"], found["why"]) == (os.getpid(), False, [f"maps {path}"])


def test_one_just_like_the_remembered_process_counts_as_it(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "ds4_processes", lambda: [{"pid": victim.pid}, {"pid": 2**22 + 1}])
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert foreign.runs(remembered(tmp_path, victim, argv=argv, pid=1))
    assert not foreign.runs(remembered(tmp_path, victim, argv=[*argv, ""]))
    assert not foreign.runs(remembered(tmp_path, victim, argv=argv, uid=os.getuid() + 1))
    assert not foreign.runs(str(tmp_path / "gone.json"))


def test_what_runs_again_is_not_started_a_second_time(
    tmp_path: Path, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = FakeSystemctl(monkeypatch, victim)
    monkeypatch.setattr(foreign, "runs", lambda path: True)
    monkeypatch.setattr(probe, "is_ready", lambda host, port: True)
    path = remembered(tmp_path, victim, host="127.0.0.1", port=8000, output=[])
    assert "answers again" in foreign.start_again(path, 1)
    assert [argv[:2] for argv in systemctl.told] == [["systemctl", "show"]]


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path)
    while Process(process.pid).argv[:1] != [sys.executable]:  # until it was executed
        time.sleep(0.01)
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
