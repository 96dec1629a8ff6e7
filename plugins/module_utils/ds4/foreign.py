# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An engine that somebody else started: find it, name it, remember it exactly, end only it, start it again as it was.

It may come from the public installer (nohup), a unit of the system or of a user, or cron. Nothing is ever ended by name:
a process is its pid and start time, signalled through a pidfd.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import gate, probe
from .command import run
from .errors import Ds4Error
from .files import read_json, read_text, write_json
from .host import ds4_processes, listeners, lock_holders
from .masking import masked
from .process import Process, is_number
from .service import mapping_pids, parse_show

SERVER = "ds4-server"
RECORD = "adopted.json"


def find(port: int, unit: str, weights: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Processes outside ``unit`` that hold what the engine needs: its port, its lock, or the weights in memory.

    Args:
        weights: files that nobody else may map, since the gate before the start would stay closed.

    Returns:
        One entry a process: ``{pid, started_ticks, user, program, unit, why[], engine}``; ``engine`` is True for a
        ``ds4-server``, the only thing that can be adopted. ``program`` never shows arguments.
    """
    found: dict[int, dict[str, Any]] = {}

    def note(pid: int, why: str) -> None:
        process = Process(pid)
        if pid and process.unit != unit:
            entry = found.setdefault(pid, _entry(process))
            entry["why"].append(why)

    for engine in ds4_processes():
        note(engine["pid"], "is an engine")
    for listener in listeners([port]):
        if listener["pid"] is None and listener["unit"] != unit:
            raise Ds4Error(
                f"Port {port} is taken by a process that cannot be seen from here",
                found=f"a listener of user {listener['user']}",
                cure=f"`sudo ss -ltnp sport = :{port}` on the host; free the port or choose another (port in engine_service_settings)",
            )
        note(listener["pid"], f"listens on port {port}")
    for holder in lock_holders():
        note(holder.pid, "holds the engine's lock")
    for path in sorted(filter(None, set(weights))):
        for pid in mapping_pids(path):
            note(pid, f"maps {path}")
    return [found[pid] for pid in sorted(found)]


def _entry(process: Process) -> dict[str, Any]:
    names = {process.name, os.path.basename(process.executable.replace(" (deleted)", ""))}
    return {
        "pid": process.pid,
        "started_ticks": process.started_ticks,
        "user": process.user,
        "program": process.program,
        "unit": process.unit,
        "why": [],
        "engine": SERVER in names,
    }


def describe(others: Sequence[Mapping[str, Any]]) -> str:
    """``process 4711 (alice, /home/alice/code/ds4/ds4-server, session-3.scope) listens on port 8000``."""
    return "; ".join(
        f"process {other['pid']} ({other['user']}, {other['program']}, {other['unit'] or 'no unit'}) "
        + " and ".join(dict.fromkeys(other["why"]))
        for other in others
    )


def refusal(others: Sequence[Mapping[str, Any]]) -> Ds4Error:
    """Why a switch stops at somebody else's engine."""
    adoptable = [other for other in others if other["engine"]]
    cure = "stop it, or take it over with engine_service_adopt: true (make apply ADOPT=1)"
    if len(adoptable) != len(others):
        cure = "stop it yourself (only a ds4-server can be taken over), or choose another port"
    return Ds4Error(
        "Somebody else's process holds what the engine needs",
        found=describe(others),
        required="a free port, a free lock and the memory of one engine",
        cure=cure,
        evidence={"processes": [dict(other) for other in others]},
    )


# ------------------------------------------------------------------------------------------------------ remembering


def remember(others: Sequence[Mapping[str, Any]], folder: str) -> str:
    """Record one foreign engine so that it can be started again as it was; returns the path of the record.

    The record holds its environment, which may carry secrets: it is root's, mode 0600, and never shown.

    Raises:
        Ds4Error: there is more than one, or it is no ``ds4-server``.
    """
    if len(others) != 1 or not others[0]["engine"]:
        raise (
            refusal(others)
            if len(others) == 1
            else Ds4Error(
                "More than one foreign process would have to be taken over",
                found=describe(others),
                required="exactly one ds4-server",
                cure="stop all but one of them",
            )
        )
    process = Process(int(others[0]["pid"]))
    engine = next(entry for entry in ds4_processes() if entry["pid"] == process.pid)
    record = {
        "schema": 1,
        "pid": process.pid,
        "started_ticks": process.started_ticks,
        "user": process.user,
        "uid": process.uid,
        "argv": _words(process.pid, "cmdline"),
        "executable": process.executable,
        "directory": process.cwd,
        "environment": _environment(process.pid),
        "umask": _umask(process.pid),
        "nice": os.getpriority(os.PRIO_PROCESS, process.pid),
        "output": [_output(process, number) for number in ("1", "2")],
        "port": engine["port"],
        "host": _option(process.argv, "--host") or "127.0.0.1",
        "supervisor": supervisor(process),
    }
    os.makedirs(folder, mode=0o755, exist_ok=True)
    path = os.path.join(folder, RECORD)
    write_json(path, record, mode=0o600)
    return path


def _words(pid: int, name: str) -> list[str]:
    """Command line or environment of a process to the byte, empty words and what is no UTF-8 included."""
    with open(f"/proc/{pid}/{name}", "rb") as stream:
        text = stream.read().decode(errors="surrogateescape")
    return text.removesuffix("\0").split("\0")


def _environment(pid: int) -> dict[str, str]:
    return dict(item.split("=", 1) for item in _words(pid, "environ") if "=" in item)


def _umask(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
        found = re.search(r"^Umask:\s+(\d+)", stream.read(), re.M)
    return int(found.group(1), 8) if found else 0o022


def _output(process: Process, number: str) -> str:
    """Regular file that a descriptor of the process writes to, or an empty string (a terminal, a pipe, /dev/null)."""
    target = dict(process.descriptors()).get(number, "")
    return target if target.startswith("/") and os.path.isfile(target) else ""


def _option(argv: Sequence[str], name: str) -> str:
    """Value of the last occurrence of an option: the engine lets it win."""
    found = [argv[index + 1] for index in range(len(argv) - 1) if argv[index] == name]
    return found[-1] if found else ""


def supervisor(process: Process) -> dict[str, Any]:
    """Who would start it again: ``{kind: system|user|none, unit, enabled, notes[]}``.

    It is the service around the process, when that service's own program is the process or started it (a wrapper script).
    Cron, a login, and a program that a service only left behind start nothing again.

    Raises:
        Ds4Error: the service runs other programs too, which would end with it.
    """
    notes = [f"{where} starts {what} by itself" for where, what in cron_lines(process.user)]
    nobody = {"kind": "none", "unit": "", "enabled": False, "notes": notes}
    unit = process.manager
    if not unit:
        return nobody
    kind = "user" if f"/user@{process.uid}.service/" in process.cgroup else "system"
    prefix, env = _systemctl(kind, process.uid)
    shown = run([*prefix, "show", unit, "--property=MainPID,UnitFileState,Transient"], env=env).out
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    main, lineage = int(values.get("MainPID") or 0), process.lineage()
    # A transient unit is gone with its process: it could not be started again by name.
    if main not in lineage or values.get("Transient") == "yes":
        return nobody
    others = _others_in(process, lineage, unit)
    if others:
        raise Ds4Error(
            f"{unit} runs the engine, but not only it",
            found="; ".join(f"process {other.pid} ({other.user}, {other.program})" for other in others),
            required="a service that can be stopped without ending anything else",
            cure=f"stop it yourself (systemctl {'--user ' if kind == 'user' else ''}disable --now {unit}), then run again",
        )
    return {"kind": kind, "unit": unit, "enabled": values.get("UnitFileState") == "enabled", "notes": notes}


def _others_in(process: Process, own: Sequence[int], unit: str) -> list[Process]:
    """Processes of the service around an engine that neither started it nor were started by it."""
    group = process.cgroup[: process.cgroup.rindex(unit) + len(unit)]
    proc = os.path.dirname(process.directory)
    inside = [
        other
        for other in (Process(int(name), proc=proc) for name in sorted(os.listdir(proc)) if is_number(name))
        if f"{other.cgroup}/".startswith(f"{group}/")
    ]
    return [other for other in inside if other.pid not in own and process.pid not in other.lineage()]


def _systemctl(kind: str, uid: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment to talk to the service manager that a ``kind`` of supervisor belongs to."""
    if kind != "user":
        return ["systemctl"], {}
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return ["false"], {}
    return ["runuser", "-u", name, "--", "systemctl", "--user"], {"XDG_RUNTIME_DIR": f"/run/user/{uid}"}


def cron_lines(user: str) -> list[tuple[str, str]]:
    """Active cron entries that start an engine, as (where, program): a note, since nobody's crontab is edited."""
    found = []
    tables = [f"/var/spool/cron/crontabs/{user}", "/etc/crontab"]
    if os.path.isdir("/etc/cron.d"):
        tables += [os.path.join("/etc/cron.d", name) for name in sorted(os.listdir("/etc/cron.d"))]
    for table in tables:
        try:
            with open(table, encoding="utf-8", errors="replace") as stream:
                lines = stream.read().splitlines()
        except OSError:
            continue
        for line in lines:
            program = re.search(r"\S*\bds4-serve(?:r)?\b", line)
            if program and not line.lstrip().startswith("#"):
                found.append((table, program.group(0)))
    return found


# Long names of options with a short one, and options whose absence means the same (the engine's defaults on a Spark).
_SHORT = {"--ctx": "-c", "--model": "-m", "--tokens": "-n", "--threads": "-t"}
_DEFAULTS = {"--port": "8000", "--host": "127.0.0.1", "--cuda": "", "--no-update-check": ""}
_FILES = ("-m", "--mtp", "--dspark", "DS4_GGUF_DIR", "DS4_DSPARK_MODEL", "DS4_CODEX_MODELS_FILE", "DS4_LOCK_FILE")


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Options of a command line by their short name; the last occurrence wins, a switch has an empty value."""
    values: dict[str, str] = {}
    for index, word in enumerate(argv):
        if re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*", word):
            after = argv[index + 1] if index + 1 < len(argv) else ""
            values[_SHORT.get(word, word)] = "" if re.match(r"--?[A-Za-z]", after) else after
    return values


def lost_settings(record: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Options and DS4 variables that a foreign process has and the deployment has not, or has otherwise.

    Args:
        record: ``argv`` and ``environment`` of the process. Only variables of the engine are ever shown.
        manifest: of the deployment that takes its place. Files do not count: verified weights name them.
    """
    theirs = options_of(record["argv"][1:])
    theirs.update({name: value for name, value in record["environment"].items() if name.startswith("DS4_")})
    ours = {**_DEFAULTS, **options_of(manifest["args"]), **manifest["env"]}
    lost = []
    for name, value in theirs.items():
        if name not in _FILES and ours.get(name) != value:
            mark = "=" if name.startswith("DS4_") else " "
            instead = f" (ours: {masked(name, ours[name])})" if name in ours else ""
            lost.append(f"{name}{mark if value else ''}{masked(name, value)}{instead}")
    return lost


def running_settings(pid: int) -> dict[str, Any]:
    """``argv`` and ``environment`` of a process, for ``lost_settings``."""
    return {"argv": Process(pid).argv, "environment": _environment(pid)}


def read_record(path: str) -> dict[str, Any]:
    """What ``remember`` wrote.

    Raises:
        Ds4Error: it is gone or torn.
    """
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") != 1:
        raise Ds4Error("The record of the process that was taken over cannot be read", found=path)
    return record


# --------------------------------------------------------------------------------------------------- end and start


def end(path: str, seconds: float) -> str:
    """End exactly the remembered process, gracefully; SIGKILL past ``seconds``. May be repeated.

    A unit that ran it is stopped and disabled, also when the process has ended: its unit may have started another one.
    Who else might start it again is told, since nobody's crontab is edited.

    Raises:
        Ds4Error: it does not end.
    """
    record = read_record(path)
    begun = time.monotonic()
    boss = record["supervisor"]
    signals = [(signal.SIGTERM, seconds), (signal.SIGKILL, 30.0)]
    notes = list(boss["notes"])
    if boss["kind"] != "none":
        prefix, env = _systemctl(boss["kind"], record["uid"])
        run([*prefix, "disable", boss["unit"]], env=env)
        stop = run([*prefix, "stop", boss["unit"]], timeout_seconds=seconds, env=env)
        signals = signals[1:] if stop.timed_out else signals  # its SIGTERM was sent by the unit
        notes.insert(0, f"{boss['unit']} was stopped and disabled")
    how = _end_process(record["pid"], record["started_ticks"], signals)
    if how is None and boss["kind"] == "none":
        return "; ".join(["had ended by itself", *notes])
    if how != "":
        took = time.monotonic() - begun
        return "; ".join([f"process {record['pid']} of {record['user']} {how or 'ended'} after {took:.1f} s", *notes])
    raise Ds4Error(
        "The process that was to be taken over does not end, not even by SIGKILL",
        found=f"process {record['pid']} of {record['user']}",
        required="its end, before another engine may load",
        cure="reboot the host",
    )


def _end_process(pid: int, started_ticks: int, signals: Sequence[tuple[signal.Signals, float]]) -> str | None:
    """Send one signal after the other, each with a limit in seconds. None: it was gone; empty: it does not end."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        process = Process(pid)
        if not process.alive or process.started_ticks != started_ticks:
            return None
        for number, limit in signals:
            signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], limit)[0]:
                return "ended" if number is signal.SIGTERM else "had to be killed"
    except ProcessLookupError:
        return "ended"
    finally:
        os.close(handle)
    return ""


def runs(path: str) -> bool:
    """True while the remembered process runs, or one just like it: ours, its unit's or cron's start of it."""
    record = read_json(path)
    if not isinstance(record, dict):
        return False
    for engine in ds4_processes():
        try:
            same = _words(engine["pid"], "cmdline") == record["argv"]
        except OSError:  # it ended meanwhile
            continue
        if same and Process(engine["pid"]).uid == record["uid"]:
            return True
    return False


def start_again(path: str, ready_seconds: float) -> str:
    """Start the remembered process again as it was, unless it runs, and wait until it answers.

    Raises:
        Ds4Error: it does not come back.
    """
    record = read_record(path)
    boss = record["supervisor"]
    unit = boss["unit"] or f"ds4-adopted-{record['pid']}.service"
    prefix, env = _systemctl(boss["kind"], record["uid"])

    def gone() -> bool:
        shown = run([*prefix, "show", unit, "--property=ActiveState,SubState"], env=env).out
        return parse_show(shown).dead and not runs(path)

    if gone():
        gate.remove_stale_lock(record["user"])  # ours, since our engine ran in between
        if boss["kind"] != "none":
            if boss["enabled"]:
                run([*prefix, "enable", unit], env=env)
            ran = run([*prefix, "start", unit], timeout_seconds=120, env=env)
        else:
            # A unit of its own, so that it outlives the switch; the environment goes through the record, not through argv.
            library = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            argv = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--setenv=PYTHONPATH={library}"]
            again = ["/usr/bin/python3", "-B", "-m", "ds4.foreign", "exec", path]
            ran = run([*argv, "--property=LimitMEMLOCK=infinity", *again])
        if ran.rc != 0:
            raise Ds4Error(
                "The process that served before could not be started again", found=(ran.err or ran.out).strip()[:500]
            )
    deadline = time.monotonic() + ready_seconds
    while not probe.is_ready(record["host"], record["port"]):
        dead = gone()
        if dead or time.monotonic() > deadline:
            raise Ds4Error(
                "The process that served before was started again, but "
                + ("died" if dead else f"does not answer within {ready_seconds:g} s"),
                found=_last_words(record) or f"no answer on port {record['port']}",
                cure=f"start it by hand as {record['user']}: its command line is in {path}",
            )
        time.sleep(0.5)
    return f"{record['user']}'s process answers again"


def smoke(path: str, policy: Mapping[str, Any]) -> probe.Smoke:
    """Ask the remembered process the smoke questions."""
    record = read_record(path)
    wanted = policy["smoke"]
    return probe.smoke(
        record["host"],
        record["port"],
        model=wanted["model"],
        questions=wanted["questions"],
        timeout_seconds=wanted["timeout_seconds"],
        total_seconds=wanted["total_seconds"],
        speculation=False,
        forbidden_log=[],
        journal="",
    )


def _last_words(record: Mapping[str, Any]) -> str:
    """Last line of the log file that the process writes, if it writes one."""
    log = next((target for target in record["output"] if target), "")
    lines = read_text(log).strip().splitlines() if log else []
    return lines[-1][:300] if lines else ""


def execute(path: str) -> None:
    """Become the remembered process: its account, folder, environment, output files, then its program."""
    record = read_record(path)
    for number, target in zip((1, 2), record["output"]):
        if target:
            handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(handle, number)
    entry = pwd.getpwuid(record["uid"])
    os.setpriority(os.PRIO_PROCESS, 0, record["nice"])
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.umask(record["umask"])
    os.chdir(record["directory"])
    environment = {
        name.encode(errors="surrogateescape"): value.encode(errors="surrogateescape")
        for name, value in record["environment"].items()
    }
    os.execve(record["executable"].replace(" (deleted)", ""), record["argv"], environment)  # noqa: S606


def main(argv: list[str] | None = None) -> int:
    """Entry of ``python3 -m ds4.foreign exec RECORD``; does not return when the program could be executed."""
    parser = argparse.ArgumentParser(prog="ds4.foreign", description="Start a remembered process as it was.")
    parser.add_argument("command", choices=("exec",))
    parser.add_argument("record")
    execute(parser.parse_args(argv).record)
    return 1


if __name__ == "__main__":
    sys.exit(main())
