# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""ds4-fetch.service and the command ``ds4-fetch``: the fetch works without anybody connected and outlives a reboot."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from . import accounts, fetch_state
from .command import run
from .errors import Ds4Error
from .files import MARKER_LINE, is_ours, mark, read_text, write_atomic, write_json
from .plan import Plan, load, unfinished_path
from .service import Service, State, parse_show
from .systemd_text import exec_argument, exec_line

UNIT = "ds4-fetch.service"
NSENTER = "/usr/bin/nsenter"  # of util-linux, which every system has
EXCHANGE = "exchange.json"  # what the switch has to delete before it fetches


class Layout(NamedTuple):
    """Where things are: absolute paths.

    Attributes:
        directory: verified files and their records; belongs to the service user.
        state: what root writes: the plan, the mount, the memory of earlier looks.
        lib: where ``python3 -m ds4.…`` finds the mechanism.
        bin: where ``ds4-fetch`` goes.
        units: where systemd reads local units.
    """

    directory: str
    state: str
    lib: str
    bin: str
    units: str = "/etc/systemd/system"

    @property
    def plan(self) -> str:
        return os.path.join(self.state, "plan.json")

    @property
    def status(self) -> str:
        return os.path.join(self.directory, ".fetch", "status.json")

    @property
    def unit(self) -> str:
        return os.path.join(self.units, UNIT)

    @property
    def command(self) -> str:
        return os.path.join(self.bin, "ds4-fetch")

    @property
    def judged(self) -> str:
        return os.path.join(self.state, "judged.json")

    @property
    def exchange(self) -> str:
        return os.path.join(self.state, EXCHANGE)

    @property
    def mount(self) -> str:
        return os.path.join(self.state, "mount.json")


def unit_text(plan: Plan, layout: Layout, python: str, *, move: bool = False) -> str:
    """ds4-fetch.service: works without anybody connected, and goes on after a reboot while there is something to do."""
    credentials = [
        f"LoadCredential={exec_argument(f'{name}:{path}')}"
        for name, path in (
            (fetch_state.TOKEN_CREDENTIAL, plan.token_file),
            (fetch_state.PROXY_CREDENTIAL, plan.proxy_credentials_file),
        )
        if path
    ]
    # "+": as root, since only an owner or root may hard-link somebody's file. nsenter: in the host's own mounts, since the
    # sandbox mounts the weights over themselves, and no link crosses a mount.
    adopt = [
        NSENTER,
        "--mount=/proc/1/ns/mnt",
        "--",
        python,
        "-m",
        "ds4.weights",
        "adopt",
        "--plan",
        layout.plan,
        "--state",
        layout.state,
    ]
    lines = [
        f"# {MARKER_LINE}",
        "[Unit]",
        "Description=Fetch and verify the weights of DeepSeek-V4-Flash",
        "Wants=network-online.target",
        "After=network-online.target",
        "RequiresMountsFor=" + exec_line([plan.directory, layout.state]),
        f"ConditionPathExists={plan.unfinished}",
        # An outage ends a start after its retries, minutes later; weights_deadline_seconds ends the whole.
        "StartLimitIntervalSec=3600",
        "StartLimitBurst=30",
        "",
        "[Service]",
        "Type=exec",
        f"User={plan.user}",
        "Environment=" + exec_line([f"PYTHONPATH={layout.lib}", "PYTHONDONTWRITEBYTECODE=1"]),
        *credentials,
        "ExecStartPre=+" + exec_line(adopt + (["--move"] if move else [])),
        "ExecStart=" + exec_line([python, "-m", "ds4.fetch", "--plan", layout.plan, "run"]),
        "Restart=on-failure",
        "RestartSec=5",
        f"RestartPreventExitStatus={fetch_state.EXIT_FINAL}",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=30",
        "Nice=10",
        "IOSchedulingClass=idle",
        "UMask=0022",
        "CapabilityBoundingSet=",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "NoNewPrivileges=yes",
        "PrivateDevices=yes",
        "PrivateTmp=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHome=read-only",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectSystem=strict",
        "ReadWritePaths=" + exec_argument(plan.directory),
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def command_text(layout: Layout, python: str) -> str:
    """The command ``ds4-fetch`` for people; of the same low rank as the service, since an engine may be serving."""
    return (
        "#!/bin/sh\n"
        f"# {MARKER_LINE}\n"
        f'PYTHONPATH="{layout.lib}" exec nice -n 10 ionice -c 3 "{python}" -m ds4.fetch --plan "{layout.plan}" "$@"\n'
    )


def install(plan: Plan, layout: Layout, python: str, *, move: bool, check: bool) -> list[str]:
    """Write what is not as it should be: unit, command, plan. Returns the paths that were, or would be, written.

    Raises:
        Ds4Error: a file of the same name is somebody else's.
    """
    changed = []
    texts = {layout.unit: unit_text(plan, layout, python, move=move), layout.command: command_text(layout, python)}
    for path, text in texts.items():
        found = read_text(path)
        if found == text:
            continue
        if os.path.lexists(path) and MARKER_LINE not in found:
            raise Ds4Error(
                f"{path} is not ours",
                found="a file without our marker",
                required=f"no such file, or one with the line '{MARKER_LINE}'",
                cure=f"rename or remove {path}",
            )
        changed.append(path)
        if not check:
            write_atomic(path, text, mode=0o755 if path == layout.command else 0o644)
    with contextlib.suppress(Ds4Error):
        if load(layout.plan).id == plan.id:
            return changed
    return [*changed, layout.plan]


class Unit(NamedTuple):
    """The fetch service as systemd sees it. ``queued``: a start is on its way."""

    state: State
    queued: bool

    @property
    def busy(self) -> bool:
        return self.queued or self.state.active in ("active", "activating", "reloading", "deactivating")


def unit_now() -> Unit:
    """Ask systemd once."""
    text = run(["systemctl", "show", UNIT]).out
    jobs = [line for line in text.splitlines() if line.startswith("Job=") and line not in ("Job=", "Job=0")]
    return Unit(parse_show(text), bool(jobs))


def store(plan: Plan, layout: Layout, changes: Sequence[str]) -> None:
    """Directories and plan on disk; systemd reads the unit again when it changed.

    Raises:
        Ds4Error: the service user put a link where a folder of ours belongs.
    """
    who = accounts.account(plan.user)
    os.makedirs(layout.state, mode=0o755, exist_ok=True)
    made = not os.path.isdir(layout.directory)
    os.makedirs(layout.directory, mode=0o755, exist_ok=True)
    if not is_ours(layout.directory):
        mark(layout.directory, "weights")
    if made or os.stat(layout.directory).st_uid == 0:
        os.chown(layout.directory, who.uid, who.gid)
    folder = os.path.dirname(plan.unfinished)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o755)
    if os.path.islink(folder) or not os.path.isdir(folder):  # root writes into it
        raise Ds4Error(
            f"{folder} is not a folder", required="a folder of ours", cure=f"remove {folder}, then run again"
        )
    os.chown(folder, who.uid, who.gid, follow_symlinks=False)
    plan.write(layout.plan)
    write_json(layout.mount, {"directory": plan.directory, **plan.mount})
    if layout.unit in changes or unit_now().state.needs_reload:
        Service(UNIT).reload_manager()


def start(plan: Plan, layout: Layout) -> None:
    """Start the service and do not wait. It is enabled, so that a reboot goes on with the work.

    Raises:
        Ds4Error: systemd refuses.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(layout.status)  # of an earlier start
    write_atomic(plan.unfinished, plan.id + "\n")
    service = Service(UNIT)
    if not service.state().enabled:
        service.enable()
    run(["systemctl", "reset-failed", UNIT])
    started = run(["systemctl", "start", "--no-block", UNIT])
    if started.rc:
        raise Ds4Error(f"{UNIT} cannot be started", found=started.err.strip(), cure=f"see `systemctl status {UNIT}`")


def stop() -> None:
    """End a fetch; what it has is kept by its journal."""
    Service(UNIT).stop(60)


def log() -> str:
    """Last words of the service."""
    return Service(UNIT).journal(lines=20)


def removable(layout: Layout) -> list[str]:
    """What an uninstall takes away: unit, command, plan and progress. Never weights."""
    ours = [path for path in (layout.unit, layout.command) if MARKER_LINE in read_text(path)]
    more = [layout.plan, layout.mount, layout.judged, layout.exchange, layout.status, unfinished_path(layout.directory)]
    return [*ours, *(path for path in more if os.path.isfile(path))]


def remove(layout: Layout) -> None:
    """Stop the service and take away what :func:`removable` lists."""
    paths = removable(layout)
    if layout.unit in paths:
        stop()
        Service(UNIT).disable()
    for path in paths:
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(layout.state)
    if layout.unit in paths:
        Service(UNIT).reload_manager()
