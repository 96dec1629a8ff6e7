"""What tests ask of a host that serves, and the faults they switch on there. Everything is read from the host itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import harness, system
from .api import Host
from .engine import releases

# Short limits, so that a wait that ends in a failure ends soon.
LIMITS: dict[str, Any] = {
    "engine_service_ready_seconds": 25,
    "engine_service_memory_wait_seconds": 12,
    "engine_service_stop_seconds": 6,
    "engine_service_busy_seconds": 10,
    "smoke_test_timeout_seconds": 20,
}
PLAYS: list[subprocess.Popen[bytes]] = []  # playbooks in the background
MARK = "DS4_TEST_PLAY"  # in the environment of a playbook in the background: which processes are its
ASK = "curl -s --noproxy '*' --max-time 5 http://127.0.0.1:8000"


def build_dir(tag: str) -> str:
    """Where the build of a release lies on a host."""
    return f"/opt/ds4/builds/{tag}-{releases()[tag]['commit'][:8]}"


def answers(host: Host) -> bool:
    """True when the service lists its models."""
    return host.run(f"{ASK}/v1/models", check=False).rc == 0


def pid(host: Host) -> str:
    """Main process of the service; "0" when there is none."""
    return host.run("systemctl show ds4 -p MainPID --value").out.strip()


def serving(host: Host) -> str:
    """Version that the running process itself reports; empty when nothing serves."""
    number = pid(host)
    return "" if number == "0" else host.run(f"/proc/{number}/exe --version", check=False).out.split()[-1]


def engines(host: Host) -> int:
    """How many engines run, whoever started them."""
    return len(host.run("pgrep -x ds4-server", check=False).out.split())


def record(host: Host) -> dict[str, Any]:
    """The newest transaction."""
    path = host.run("ls -1 /var/lib/ds4/state/transactions/*.json | tail -1").out.strip()
    found: dict[str, Any] = json.loads(host.read(path))
    return found


def has_step(host: Host, name: str) -> bool:
    """True while a transaction is open that has come to a step."""
    found = host.run("cat /var/lib/ds4/state/transactions/open", check=False).out
    with contextlib.suppress(json.JSONDecodeError):
        return any(step["name"] == name for step in json.loads(found or "{}").get("steps", []))
    return False


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for something, or fail saying for what."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def faults(host: Host, version: str, **kinds: Any) -> None:
    """Make one release misbehave on a host from now on; without kinds it behaves again."""
    host.run("mkdir -p /run/lab-engine && chmod 1777 /run/lab-engine")
    host.put("/run/lab-engine/faults.json", json.dumps({"only": [version], **kinds}), 0o644)


def long_request(host: Host) -> subprocess.Popen[str]:
    """A completion that takes some seconds, from inside the host."""
    body = json.dumps(
        {
            "model": "deepseek-v4-flash",
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 1500,
            "ignore": 1,
        }
    )
    command = ["curl", "-s", "-d", body, "http://127.0.0.1:8000/v1/chat/completions"]
    return subprocess.Popen(host.enter_command(command), stdout=subprocess.PIPE, text=True)


def inflight(host: Host) -> bool:
    """True while a request is being answered."""
    return "ds4_requests_inflight 1" in host.run(f"{ASK}/metrics", check=False).out


def start_play(host: Host, playbook: str = "site.yml", **extra: Any) -> subprocess.Popen[bytes]:
    """A playbook in the background, in a session of its own, so that it can be killed as a whole."""
    argv = harness.command(host.lab, playbook, extra_vars={**LIMITS, **extra})
    environment = {**harness.environment(), MARK: uuid.uuid4().hex}
    controller = subprocess.Popen(
        argv, cwd=system.REPOSITORY, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    controller.mark = environment[MARK]  # type: ignore[attr-defined]
    PLAYS.append(controller)
    return controller


def end_plays(host: Host) -> None:
    """End what a test that failed left running: it would go on in the next test."""
    while PLAYS:
        controller = PLAYS.pop()
        if controller.poll() is None:
            kill_play(host, controller)


def kill_play(host: Host, controller: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """End that playbook with its workers, which have sessions of their own, and the connections it leaves behind."""
    if number is signal.SIGINT:  # as Ctrl-C: the playbook ends its workers itself
        controller.send_signal(number)
    else:
        mark = f"{MARK}={controller.mark}".encode()  # type: ignore[attr-defined]
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), number)
    controller.wait()
    host.lab.forget_connections()
