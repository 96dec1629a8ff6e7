"""Listeners, engine processes and lock holders, from recorded and from real /proc."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds4 import host
from ds4.process import Process, manager_of_cgroup, unit_of_cgroup

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  4000000     0 31337 1 0000000000000000 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 200 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000   996        0 31338 1 0000000000000000 20 4 30 10 -1
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 777 1 0000000000000000 100 0 0 10 0
   1: B80D0120000000000000000001000000:1F41 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 778 1 0000000000000000 100 0 0 10 0
"""


def fake(tmp_path: Path, pid: int, **files: str) -> Path:
    """A process directory; names with an underscore before them are links (``_exe``)."""
    folder = tmp_path / str(pid)
    (folder / "fd").mkdir(parents=True)
    files.setdefault("stat", f"{pid} (x) S 1 {pid} " + "0 " * 16 + "4242 0")
    files.setdefault("status", "Name:\tx\nUid:\t0\t0\t0\t0\nRssAnon:\t1000 kB\nRssShmem:\t24 kB\n")
    for name, content in files.items():
        if name.startswith("_"):
            (folder / name[1:]).symlink_to(content)
        else:
            (folder / name).write_text(content)
    return folder


# ----------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("cgroup", "unit", "manager"),
    [
        ("/system.slice/ds4.service", "ds4.service", "ds4.service"),
        ("/system.slice/ds4.service/worker", "ds4.service", "ds4.service"),
        ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope", ""),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service", "user@1000.service", "llm.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-1.scope", "user@1000.service", ""),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", "user@1000.service", ""),
        ("/system.slice/cron.service", "cron.service", ""),
        ("/system.slice/ssh.service", "ssh.service", ""),
        ("/system.slice/system-sshd.slice/sshd@1.service", "sshd@1.service", ""),
        ("/init.scope", "init.scope", ""),
        ("/", "", ""),
        ("", "", ""),
    ],
)
def test_unit_and_manager(cgroup: str, unit: str, manager: str) -> None:
    assert unit_of_cgroup(cgroup) == unit
    assert manager_of_cgroup(cgroup) == manager


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/ds4.service\n", "ds4.service"),
        ("12:pids:/a.slice\n1:name=systemd:/system.slice/ds4.service\n0::/\n", "ds4.service"),
        ("", ""),
    ],
)
def test_process_unit(tmp_path: Path, text: str, unit: str) -> None:
    fake(tmp_path, 5, cgroup=text)
    assert host.process_unit(5, proc=str(tmp_path)) == unit


def test_a_process_that_is_gone_answers_with_nothing(tmp_path: Path) -> None:
    gone = Process(99, proc=str(tmp_path))
    assert (gone.alive, gone.argv, gone.user, gone.unit, gone.executable, gone.parent, gone.started_ticks) == (
        False, [], "", "", "", 0, 0,
    )  # fmt: skip
    assert (gone.descriptors(), gone.mapped_files(".gguf"), gone.environment("A"), gone.status_kib("RssAnon")) == (
        [],
        [],
        {},
        0,
    )


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["/usr/bin/vllm", "--api-key", "secret"], "/usr/bin/vllm"),
        (["python3", "-m", "http.server", "80"], "python3 -m http.server"),
        (["/usr/bin/python3.12", "-u", "serve.py", "--token=x"], "/usr/bin/python3.12 serve.py"),
        (["bash", "-c", "curl -H 'secret'"], "bash -c …"),
        (["bash"], "bash"),
        (["java", "-Dx=secret", "-jar", "a.jar"], "java -jar a.jar"),
    ],
)
def test_arguments_are_not_shown(tmp_path: Path, argv: list[str], program: str) -> None:
    fake(tmp_path, 5, cmdline="\0".join(argv) + "\0")
    assert Process(5, proc=str(tmp_path)).program == program


@pytest.mark.parametrize("argv", [["ds4-server", "--log", ""], ["ds4-server", "", "--x"], ["ds4-server"]])
def test_empty_arguments_are_arguments(tmp_path: Path, argv: list[str]) -> None:
    """Else a deployment whose last argument is empty would be started again in every run."""
    fake(tmp_path, 5, cmdline="\0".join(argv) + "\0")
    assert Process(5, proc=str(tmp_path)).argv == argv


def test_a_kernel_thread_has_the_kernels_name(tmp_path: Path) -> None:
    fake(tmp_path, 2, comm="kthreadd\n", cmdline="")
    assert Process(2, proc=str(tmp_path)).program == "kthreadd"


def test_a_name_with_brackets_and_blanks(tmp_path: Path) -> None:
    fake(tmp_path, 7, stat="7 (a) (b c) Z 1 7 " + "0 " * 16 + "99 0")
    process = Process(7, proc=str(tmp_path))
    assert (process.state, process.alive, process.parent, process.started_ticks) == ("Z", False, 1, 99)


# ------------------------------------------------------------------------------------------------- listeners


def test_parse_tcp_listeners() -> None:
    assert host.parse_tcp_listeners(TCP) == [
        {"address": "127.0.0.1", "port": 8000, "uid": 4000000, "inode": 31337},
        {"address": "0.0.0.0", "port": 22, "uid": 0, "inode": 200},  # noqa: S104
    ]
    assert [(row["address"], row["port"]) for row in host.parse_tcp_listeners(TCP6)] == [
        ("::1", 8000),
        ("2001:db8::1", 8001),
    ]


def test_listeners_have_their_owner(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(TCP)
    folder = fake(
        tmp_path, 812, cmdline="/opt/ds4/ds4-server\0--port\0008000\0", cgroup="0::/system.slice/ds4.service\n"
    )
    (folder / "fd/3").symlink_to("socket:[31337]")
    rows = host.listeners([8000], proc=str(tmp_path))
    assert rows == [
        {
            "address": "127.0.0.1",
            "port": 8000,
            "inode": 31337,
            "pid": 812,
            "user": "4000000",
            "command": "/opt/ds4/ds4-server",
            "unit": "ds4.service",
        }
    ]
    assert [(row["port"], row["pid"], row["user"]) for row in host.listeners(proc=str(tmp_path))] == [
        (22, None, "root"),
        (8000, 812, "4000000"),
    ]
    assert host.listeners([9], proc=str(tmp_path)) == []


def test_a_real_listener_of_this_process() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        (row,) = host.listeners([server.getsockname()[1]])
        assert (row["address"], row["pid"]) == ("127.0.0.1", os.getpid())


# --------------------------------------------------------------------------------------------------- engines


def test_engine_processes(tmp_path: Path) -> None:
    weights = tmp_path / "base.gguf"
    weights.write_bytes(b"x" * 1000)
    fake(
        tmp_path,
        812,
        cmdline="/home/a/code/ds4/ds4-server\0--cuda\0-m\0base.gguf\0--dspark\0/gone.gguf\0--port\08001\0--port\08002\0",
        cgroup="0::/user.slice/user-1000.slice/session-3.scope\n",
        environ="SECRET=1\0DS4_DEPLOYMENT=abc\0DS4_DSPARK_MODEL=/other.gguf\0",
        maps=f"7f00-7f01 r--s 00000000 fe:00 12   {weights}\n7f01-7f02 r-xp 0 fe:00 9  /usr/lib/libc.so.6\n7f02-7f03 rw-p 0 0 0\n",
        _cwd=str(tmp_path),
        _exe="/home/a/code/ds4/ds4-server (deleted)",
    )
    fake(tmp_path, 813, cmdline="vim\0ds4-server.c\0")
    fake(tmp_path, 814, cmdline="/usr/bin/python3\0x\0", _exe="/opt/ds4/builds/x/ds4-bench")
    fake(tmp_path, 815, cmdline="ds4\0", stat="815 (ds4) Z 1 815 " + "0 " * 16 + "1 0")
    fake(tmp_path, 816, cmdline="/x/ds4-server\0", _exe="/x/ds4-server", cgroup="0::/system.slice/ds4.service\n")
    rows = host.ds4_processes(proc=str(tmp_path))
    assert [(row["pid"], row["program"], row["port"]) for row in rows] == [
        (812, "ds4-server", 8002),
        (814, "ds4-bench", 0),
        (816, "ds4-server", 8000),
    ]
    first = rows[0]
    assert first["weights"] == ["/gone.gguf", "/other.gguf", str(weights)]
    assert first["weights_bytes"] == 1000
    assert first["deployment"] == "abc"
    assert first["started_ticks"] == 4242
    assert first["resident_kib"] == 1024
    assert (first["unit"], first["manager"]) == ("session-3.scope", "")
    assert (rows[2]["unit"], rows[2]["manager"]) == ("ds4.service", "ds4.service")
    assert "SECRET" not in str(rows)


def test_weights_that_are_named_by_a_link_count_once(tmp_path: Path) -> None:
    (tmp_path / "real.gguf").write_bytes(b"x" * 1000)
    (tmp_path / "link.gguf").symlink_to("real.gguf")
    maps = f"7f00-7f01 r--s 00000000 fe:00 12   {tmp_path}/real.gguf\n"
    fake(tmp_path, 812, cmdline="ds4-server\0-m\0link.gguf\0", maps=maps, _cwd=str(tmp_path))
    (row,) = host.ds4_processes(proc=str(tmp_path))
    assert row["weights"] == [str(tmp_path / "link.gguf"), str(tmp_path / "real.gguf")]
    assert row["weights_bytes"] == 1000


def test_programs_with_cuda_memory(tmp_path: Path) -> None:
    folder = fake(tmp_path, 20, cmdline="/usr/bin/vllm\0--api-key\0secret\0")
    (folder / "fd/9").symlink_to("/dev/nvidia-uvm")
    desktop = fake(tmp_path, 21, cmdline="/usr/bin/Xorg\0")
    (desktop / "fd/9").symlink_to("/dev/nvidia0")
    assert host.cuda_processes(proc=str(tmp_path)) == [
        {"pid": 20, "user": "root", "command": "/usr/bin/vllm", "unit": ""}
    ]


def test_programs_by_name(tmp_path: Path) -> None:
    fake(tmp_path, 30, cmdline="/usr/bin/sunshine\0")
    fake(tmp_path, 31, cmdline="/usr/bin/sun\0sunshine\0")
    assert [row["pid"] for row in host.running_programs(["sunshine"], proc=str(tmp_path))] == [30]
    assert host.running_programs([], proc=str(tmp_path)) == []


# ----------------------------------------------------------------------------------------------------- locks


def test_parse_locks() -> None:
    text = "1: FLOCK  ADVISORY  WRITE 812 fe:00:1234 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 900 fe:00:1234 0 EOF\n2: POSIX  ADVISORY  READ 7 00:19:5 0 9\n\nx\n"
    assert host.parse_locks(text) == [("FLOCK", 812, 0xFE, 0, 1234), ("POSIX", 7, 0, 0x19, 5)]


def test_nobody_holds_an_absent_or_free_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert host.lock_holders(str(path)) == []
    path.touch()
    assert host.lock_holders(str(path)) == []


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_the_holder_of_a_real_lock(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    with path.open("w") as stream:
        getattr(fcntl, kind)(stream, fcntl.LOCK_EX)
        (holder,) = host.lock_holders(str(path))
        assert (holder.pid, holder.kind) == (os.getpid(), "FLOCK" if kind == "flock" else "POSIX")
    assert host.lock_holders(str(path)) == []


def test_a_lock_that_a_child_inherited_is_found_after_the_parent_let_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[stream.fileno()], stdin=subprocess.PIPE)
    try:
        (holder,) = host.lock_holders(str(path))
        assert holder.pid == child.pid
    finally:
        child.communicate(b"\n")
    deadline = time.monotonic() + 5
    while host.lock_holders(str(path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert host.lock_holders(str(path)) == []


def test_a_holder_that_cannot_be_seen_is_held_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    stat = path.stat()
    (tmp_path / "locks").write_text(
        f"1: FLOCK  ADVISORY  WRITE 0 {os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino} 0 EOF\n"
    )
    (holder,) = host.lock_holders(str(path), proc=str(tmp_path))
    assert holder.pid == 0


def test_the_same_inode_number_on_another_device_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    (tmp_path / "locks").write_text(f"1: FLOCK  ADVISORY  WRITE 0 ff:ff:{path.stat().st_ino} 0 EOF\n")
    assert host.lock_holders(str(path), proc=str(tmp_path)) == []
