"""Runs playbooks against the lab as an operator does, and keeps every event, so that tests can assert on what happened.

``play(lab, "site.yml").changed("spark1")``: the names of the tasks that changed something there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import system
from .api import Lab


@dataclasses.dataclass
class Result:
    """What a run did.

    Attributes:
        rc: exit status of ansible-playbook.
        events: ansible-runner's events in order.
        stats: the recap: ``{"ok": {host: n}, "changed": …, "failures": …, "dark": …, "skipped": …}``.
        text: what the operator saw, without colours.
    """

    rc: int
    events: list[dict[str, Any]]
    stats: dict[str, dict[str, int]]
    text: str

    @property
    def hosts(self) -> set[str]:
        """Hosts, the controller itself aside, on which at least one task ran or was tried in vain."""
        found = {name for kind in ("ok", "failures", "dark", "changed", "rescued") for name in self.stats.get(kind, {})}
        return found - {"localhost"}

    def results(self, host: str, kind: str = "") -> list[dict[str, Any]]:
        """Event data of the host's task results; ``kind`` is ok, failed, skipped or unreachable, empty for all."""
        wanted = {f"runner_on_{name}" for name in ([kind] if kind else ["ok", "failed", "skipped", "unreachable"])}
        return [
            event["event_data"]
            for event in self.events
            if event["event"] in wanted and event["event_data"].get("host") == host
        ]

    def changed(self, host: str) -> list[str]:
        """Names of the tasks that changed something on the host (or would, in check mode)."""
        return [data["task"] for data in self.results(host, "ok") if data["res"].get("changed")]

    def failed(self, host: str) -> list[str]:
        """Messages of the host's failed tasks, those rescued or ignored included."""
        found = [*self.results(host, "failed"), *self.results(host, "unreachable")]
        return [str(data["res"].get("msg", data["res"])) for data in found]

    def task(self, host: str, name: str) -> dict[str, Any]:
        """Result of the last task of that name (or ending with it) on the host."""
        for data in reversed(self.results(host)):
            if data["task"].endswith(name):
                result: dict[str, Any] = data["res"]
                return result
        raise KeyError(f"no task {name!r} on {host}; there were: {[data['task'] for data in self.results(host)]}")


def environment(venv: str | None = None) -> dict[str, str]:
    """Environment for Ansible's commands of a virtual environment (None: the one that runs us), with our ansible.cfg."""
    programs = os.path.join(system.REPOSITORY, venv, "bin") if venv else os.path.dirname(sys.executable)
    return {
        "PATH": f"{programs}:{os.environ.get('PATH', '')}",
        "ANSIBLE_CONFIG": os.path.join(system.REPOSITORY, "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_FORCE_COLOR": "0",  # molecule asks for colours, which would stand in the way of comparing texts
    }


def command(
    lab: Lab,
    playbook: str = "site.yml",
    *,
    extra_vars: Mapping[str, Any] | None = None,
    limit: str = "",
    tags: str = "",
    skip_tags: str = "",
    check: bool = False,
    diff: bool = False,
    arguments: Sequence[str] = (),
) -> list[str]:
    """``ansible-playbook …`` to be started from the repository root, for tests that kill it themselves."""
    return [
        "ansible-playbook",
        "-i",
        lab.inventory,
        *_options(extra_vars, limit, tags, skip_tags, check, diff),
        *arguments,
        playbook,
    ]


def _options(
    extra_vars: Mapping[str, Any] | None, limit: str, tags: str, skip_tags: str, check: bool, diff: bool
) -> list[str]:
    found = ["--extra-vars", json.dumps(extra_vars)] if extra_vars else []
    for option, value in (("--limit", limit), ("--tags", tags), ("--skip-tags", skip_tags)):
        found += [option, value] if value else []
    return found + (["--check"] if check else []) + (["--diff"] if diff else [])


def timed(lab: Lab, playbook: str, **more: Any) -> float:
    """Seconds of ``ansible-playbook …`` as an operator runs it; ``more`` as for :func:`command`.

    Raises:
        SystemExit: it failed; with what it printed.
    """
    begun = time.monotonic()
    argv = command(lab, playbook, **more)
    everything = {**os.environ, **environment()}
    ran = subprocess.run(argv, cwd=system.REPOSITORY, env=everything, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SystemExit(ran.stdout + ran.stderr)
    return time.monotonic() - begun


def play(
    lab: Lab,
    playbook: str = "site.yml",
    *,
    extra_vars: Mapping[str, Any] | None = None,
    limit: str = "",
    tags: str = "",
    skip_tags: str = "",
    check: bool = False,
    diff: bool = False,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    venv: str | None = None,
    timeout: float = 900.0,
    touches: Sequence[str] | None = None,
) -> Result:
    """Run a playbook of the repository through ansible-runner.

    A run that touched no host is an AssertionError, whatever its exit status: it proves nothing.

    Args:
        playbook: path, relative to the repository root.
        arguments: further arguments of ansible-playbook.
        env: environment variables on top of ``environment(venv)``.
        venv: virtual environment below the repository root; None: the one that runs us.
        timeout: seconds before the run is cancelled.
        touches: exactly the hosts that must have been touched; None: at least one.
    """
    import ansible_runner

    words = [*_options(extra_vars, limit, tags, skip_tags, check, diff), *arguments]
    folder = tempfile.mkdtemp(prefix="ds4-play-")
    try:
        runner = ansible_runner.run(
            private_data_dir=folder,
            project_dir=system.REPOSITORY,
            playbook=playbook,
            inventory=lab.inventory,
            cmdline=shlex.join(words) or None,
            envvars={**environment(venv), **(env or {})},
            settings={"job_timeout": timeout, "suppress_ansible_output": True},
            quiet=True,
        )
        events = list(runner.events)
        with runner.stdout as stream:
            text = stream.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stats: dict[str, dict[str, int]] = {}
    for event in events:
        if event["event"] == "playbook_on_stats":
            stats = {name: value for name, value in event["event_data"].items() if isinstance(value, dict)}
    result = Result(124 if runner.status == "timeout" else int(runner.rc), events, stats, text)
    if touches is not None:
        assert result.hosts == set(touches), f"touched {sorted(result.hosts)}, not {sorted(touches)}:\n{text}"
    assert result.hosts, f"the run touched no host:\n{text}"
    return result
