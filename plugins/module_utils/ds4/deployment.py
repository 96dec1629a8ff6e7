# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Deployments: build + weights + settings + rendered files, immutable, named by what the engine's process consumes.

``docs/schemas/deployment.schema.json`` describes the manifest. A deployment goes ``staged → active → proven``; which one
runs is read from the process (``DS4_DEPLOYMENT`` in its environment), never from a note.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import masking, records, systemd_text
from .accounts import account
from .command import run
from .errors import Ds4Error
from .files import (
    MARKER_LINE,
    digest,
    is_ours,
    is_written,
    link_atomic,
    link_target,
    mark,
    read_json,
    read_text,
    write_atomic,
    write_json,
)
from .process import Process
from .service import Service, State

SCHEMA = 1
SERVER = "ds4-server"
HISTORY = "deployments.json"
ENVIRONMENT, LAUNCHER, CATALOGUE, MANIFEST = "ds4.env", "ds4-serve", "codex-models.json", "manifest.json"
# What only the host can fill in: the id (a hash over the rest) and which device groups it has.
ID_TOKEN, GROUPS_TOKEN = "@DEPLOYMENT@", "@HOST_GROUPS@"


def linked(current: str, deployments: str) -> str:
    """Deployment that a link names; empty when it is none, or leads elsewhere."""
    target = link_target(current)
    return os.path.basename(target) if os.path.dirname(target) == os.path.normpath(deployments) else ""


class Layout(NamedTuple):
    """Where things are on this host."""

    deployments: str
    current: str
    unit_path: str
    launcher: str
    state: str
    lib: str

    @property
    def unit(self) -> str:
        """Name of the unit, ``ds4.service``."""
        return os.path.basename(self.unit_path)

    def directory(self, deployment: str) -> str:
        """Folder of one deployment."""
        return os.path.join(self.deployments, deployment)

    def current_id(self) -> str:
        """Deployment that the link names, or an empty string."""
        return linked(self.current, self.deployments)

    def manifest(self, deployment: str) -> dict[str, Any] | None:
        """Manifest of a deployment, or None when there is none (or it is torn)."""
        if not re.fullmatch(r"[0-9a-f]{12}", deployment):
            return None
        found = read_json(os.path.join(self.directory(deployment), MANIFEST))
        return found if isinstance(found, dict) and found.get("id") == deployment else None


class Wanted(NamedTuple):
    """A deployment as asked for, before the host filled anything in.

    ``files`` maps the file names above and the unit's name to their text. ``memory_required_kib`` is what must be
    available before a start.
    """

    release: str
    profile: str
    build: dict[str, Any]
    weights: dict[str, Any]
    args: list[str]
    env: dict[str, str]
    files: dict[str, str]
    host: str
    port: int
    context: int
    speculation: bool
    user: str
    memory_required_kib: int


def identity(wanted: Wanted, unit: str, groups: str) -> str:
    """Twelve hex digits over what the process consumes; comments, launcher and limits of the switch do not count."""
    server = wanted.build.get("binaries", {}).get(SERVER, {}).get("sha256", "")
    weights = {role: entry.get("sha256", "") for role, entry in wanted.weights.get("files", {}).items() if entry}
    return digest(
        server,
        weights,
        wanted.args,
        wanted.env,
        wanted.files.get(CATALOGUE, ""),
        [line.replace(GROUPS_TOKEN, groups) for line in systemd_text.directives(wanted.files[unit])],
    )[:12]


def existing_groups(names: list[str]) -> str:
    """Those of the device groups that this host has: systemd refuses to start a unit with an unknown one."""
    import grp

    have = {entry.gr_name for entry in grp.getgrall()}
    return " ".join(name for name in names if name in have)


def compose(wanted: Wanted, unit: str, groups: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and file texts of a deployment, with id and groups filled in."""
    deployment = identity(wanted, unit, groups)

    def fill(text: str) -> str:
        return text.replace(ID_TOKEN, deployment).replace(GROUPS_TOKEN, groups)

    texts = {name: fill(text) for name, text in wanted.files.items()}
    binary = wanted.build.get("binaries", {}).get(SERVER, {})
    manifest = {
        "schema": SCHEMA,
        "id": deployment,
        "release": wanted.release,
        "profile": wanted.profile,
        "build": {
            "id": wanted.build.get("id", ""),
            "path": wanted.build.get("path", ""),
            "version": wanted.build.get("version", ""),
            "commit": wanted.build.get("commit", ""),
            "server": os.path.join(wanted.build.get("path", ""), SERVER),
            "sha256": binary.get("sha256", ""),
        },
        "weights": {
            "generation": wanted.weights.get("generation", ""),
            "files": {
                role: {key: entry.get(key, "") for key in ("path", "sha256", "bytes")}
                for role, entry in wanted.weights.get("files", {}).items()
                if entry
            },
        },
        "args": [fill(argument) for argument in wanted.args],
        "env": {name: fill(value) for name, value in wanted.env.items()},
        "service": {
            "unit": unit,
            "user": wanted.user,
            "host": wanted.host,
            "port": wanted.port,
            "context": wanted.context,
            "speculation": wanted.speculation,
        },
        "memory_required_kib": wanted.memory_required_kib,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }
    return manifest, texts


def verify_unit(text: str, unit: str) -> None:
    """Let systemd judge a unit file before it is put anywhere.

    Raises:
        Ds4Error: systemd does not accept it, with systemd's own words.
    """
    with tempfile.TemporaryDirectory(prefix="ds4-verify-") as folder:
        path = os.path.join(folder, unit)
        write_atomic(path, text)
        # Plain verify returns 0 for unknown keys; the colon form names the unit, whose temporary file has a path.
        ran = run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"{path}:{unit}"], timeout_seconds=60
        )
    if ran.rc != 0:
        raise Ds4Error(
            f"systemd does not accept the rendered {unit}",
            found=" / ".join(line for line in ran.err.splitlines() if line.strip())[:2000] or f"exit status {ran.rc}",
            required="`systemd-analyze verify` without errors",
            cure="correct the variable or the setting whose value stands in that line",
        )


class Staged(NamedTuple):
    """Outcome of staging. ``before`` and ``after`` hold the texts that differ, for a diff; ``texts`` are all of it."""

    manifest: dict[str, Any]
    changed: bool
    before: dict[str, str]
    after: dict[str, str]
    texts: dict[str, str]


def stage(wanted: Wanted, layout: Layout, groups: list[str], *, check: bool = False) -> Staged:
    """Write a deployment beside the running one; nothing is activated.

    An existing deployment of the same id gets new comments or a new launcher, nothing the process consumes.

    Raises:
        Ds4Error: systemd refuses the unit, or a folder of that name is not ours.
    """
    manifest, texts = compose(wanted, layout.unit, existing_groups(groups))
    folder = layout.directory(manifest["id"])
    if os.path.islink(folder) or (os.path.lexists(folder) and not is_ours(folder)):
        raise Ds4Error(
            f"{folder} exists and is not ours",
            found="a file or folder without our marker",
            required="a free name",
            cure=f"move {folder} away",
        )
    known = layout.manifest(manifest["id"])
    changed = known != manifest or bool(worn(layout, manifest, texts))
    before, after = _difference(layout, manifest, texts)
    if changed and not check:
        verify_unit(texts[layout.unit], layout.unit)
        _write(layout, manifest, texts, folder)
    return Staged(manifest, changed, before, after, texts)


def _write(layout: Layout, manifest: dict[str, Any], texts: Mapping[str, str], folder: str) -> None:
    """Publish by rename, or refresh file by file; the manifest comes last, so a torn folder has none."""
    target = folder
    if not os.path.isdir(folder):
        target = tempfile.mkdtemp(dir=layout.deployments, prefix=".new-")
        mark(target, "deployment")
    os.chown(target, os.geteuid(), -1)
    os.chmod(target, 0o755)  # noqa: S103  (mkdtemp is 0700; the engine's user must enter)
    group = _group_of(manifest["service"]["user"])
    for name, text in texts.items():
        write_atomic(os.path.join(target, name), text, mode=_mode(name), gid=group)
    write_json(os.path.join(target, MANIFEST), manifest, mode=_mode(MANIFEST), gid=group)
    if target != folder:
        os.rename(target, folder)


def _mode(name: str) -> int:
    return {LAUNCHER: 0o755, ENVIRONMENT: 0o640, MANIFEST: 0o640}.get(name, 0o644)


def worn(layout: Layout, manifest: Mapping[str, Any], texts: Mapping[str, str]) -> list[str]:
    """Files of a deployment that are not as they would be written: to the byte, and in owner, group and mode."""
    folder, group = layout.directory(manifest["id"]), _group_of(manifest["service"]["user"])
    expected: dict[str, str | None] = {**texts, MANIFEST: None}  # its content is compared as what it says
    names = [
        name
        for name, text in expected.items()
        if not is_written(os.path.join(folder, name), text, mode=_mode(name), gid=group)
    ]
    found = os.lstat(folder) if os.path.isdir(folder) else None
    if found is None or stat.S_IMODE(found.st_mode) != 0o755 or found.st_uid != os.geteuid():
        names.append(folder)
    return names


def _group_of(user: str) -> int | None:
    """Group of the service's account, whose launcher reads the environment; nobody else may: there can be secrets in it."""
    try:
        return pwd.getpwnam(user).pw_gid
    except KeyError:
        return None


def _difference(
    layout: Layout, manifest: dict[str, Any], texts: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Texts that would change for the active deployment, as they may be shown, and the command line one word a line."""
    active = layout.current_id()
    old = layout.manifest(active)
    before = {name: read_text(os.path.join(layout.directory(active), name)) if old else "" for name in texts}
    before["command line"] = "".join(word + "\n" for word in command_line(old)) if old else ""
    after = {**texts, "command line": "".join(word + "\n" for word in command_line(manifest))}
    names = [name for name in after if before[name] != after[name]]
    if ENVIRONMENT in names:
        after[ENVIRONMENT] = masking.masked_file(after[ENVIRONMENT], before[ENVIRONMENT])
        before[ENVIRONMENT] = masking.masked_file(before[ENVIRONMENT])
    return {name: before[name] for name in names}, {name: after[name] for name in names}


def shown(manifest: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A manifest as it may leave the host; secrets that differ from those of the manifest ``known`` are told to."""
    return {**manifest, "env": masking.masked_environment(manifest["env"], (known or {}).get("env"))}


def base_weights(manifest: Mapping[str, Any]) -> str:
    """Path of the base weights: the engine maps them, and no second copy fits."""
    return str(manifest["weights"]["files"].get("base", {}).get("path", ""))


def command_line(manifest: Mapping[str, Any]) -> list[str]:
    """Program and arguments that the service's process must have."""
    return [manifest["build"]["server"], *manifest["args"]]


def problems(manifest: Mapping[str, Any], coming: frozenset[str] = frozenset()) -> list[str]:
    """Why a deployment could not be started: its binary or its weights are gone or other ones. Empty when whole.

    Args:
        coming: weights (sha256) that need not be there yet.
    """
    found = []
    build = manifest["build"]
    if not os.access(build["server"], os.X_OK):
        found.append(f"the build is gone ({build['server']})")
    elif build["sha256"] and file_digest(build["server"]) != build["sha256"]:
        found.append(f"{build['server']} is not the binary that was built (replaced by hand?)")
    return found + weights_problems(manifest, coming)


def weights_problems(manifest: Mapping[str, Any], coming: frozenset[str] = frozenset()) -> list[str]:
    """Why the service's account could not use the weights of a deployment, told by their records: no byte is read."""
    try:
        who = account(manifest["service"]["user"])
    except Ds4Error as error:
        return [str(error)]
    return [
        f"{role} weights: {problem}"
        for role, entry in manifest["weights"]["files"].items()
        if entry["sha256"] not in coming and (problem := records.quick_check(entry["path"], entry["sha256"], who))
    ]


def file_digest(path: str) -> str:
    """Hex sha256 of a small file (a binary, never weights)."""
    hasher = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            hasher.update(block)
    return hasher.hexdigest()


def running_deployment(state: State) -> str:
    """Deployment id that the unit's main process carries, or an empty string."""
    return Process(state.pid).environment("DS4_DEPLOYMENT").get("DS4_DEPLOYMENT", "") if state.pid else ""


def drift(manifest: Mapping[str, Any], layout: Layout, state: State) -> list[str]:
    """Why the host must be switched to ``manifest``, as sentences. Empty: it already runs exactly that.

    Judged from what is: the process, the unit file that systemd would use, the binary on disk.
    """
    reasons = []
    wanted = manifest["id"]
    if not state.running:
        reasons.append(f"{layout.unit} is not running: {state.describe()}")
    else:
        process = Process(state.pid)
        runs = running_deployment(state)
        if runs != wanted:
            reasons.append(f"the process {state.pid} runs deployment {runs or 'unknown'}, wanted {wanted}")
        elif process.argv and not _same_command(process, manifest):
            reasons.append(f"the command line of process {state.pid} is not the deployment's")
        elif others := _other_values(process, manifest["env"]):
            reasons.append(f"process {state.pid} was started with other values of {', '.join(others)}")
        if process.executable.endswith(" (deleted)"):
            reasons.append("the running binary was replaced on disk")
    reasons += unit_drift(manifest, layout)
    return reasons


def _same_command(process: Process, manifest: Mapping[str, Any]) -> bool:
    """True when the process was started with the deployment's arguments (an interpreter may stand before them)."""
    wanted = list(manifest["args"])
    return not wanted or process.argv[-len(wanted) :] == wanted


def _other_values(process: Process, wanted: Mapping[str, str]) -> list[str]:
    """Names of variables that the process has otherwise than wanted; values are never shown."""
    have = process.environment(*wanted)
    return [name for name, value in wanted.items() if have.get(name) != value]


def unit_drift(manifest: Mapping[str, Any], layout: Layout) -> list[str]:
    """How the installed unit differs from the deployment's in what systemd acts on."""
    installed = read_text(layout.unit_path)
    if not installed:
        return [f"{layout.unit_path} is not there"]
    staged = read_text(os.path.join(layout.directory(manifest["id"]), layout.unit))
    have, want = systemd_text.directives(installed), systemd_text.directives(staged)
    if have == want or systemd_text.deployment_of(installed) not in ("", manifest["id"]):
        return []  # another deployment's unit is told by the process
    changed = [line for line in have if line not in want] + [f"without {line}" for line in want if line not in have]
    return [f"{layout.unit_path} was edited by hand ({'; '.join(changed)[:300]})"]


def activate(manifest: Mapping[str, Any], layout: Layout, service: Service) -> None:
    """Make a deployment the one that systemd would start. Every step may be repeated.

    The unit is a real file, not a link through ``current``: at boot systemd reads units before /opt may be mounted.

    Raises:
        Ds4Error: a unit or launcher of that name is not ours.
    """
    refuse_foreign_files(layout)
    write_atomic(layout.unit_path, read_text(os.path.join(layout.directory(manifest["id"]), layout.unit)))
    link(manifest, layout)
    service.reload_manager()


def link(manifest: Mapping[str, Any], layout: Layout, *, check: bool = False) -> list[str]:
    """Make the links name a deployment; returns those that did not. What stands there and is no link, or a launcher of somebody
    else, stays.
    """
    folder, launcher = layout.directory(manifest["id"]), os.path.join(layout.current, LAUNCHER)
    changed = []
    for path, target, stays in (
        (layout.current, os.path.relpath(folder, os.path.dirname(layout.current)), not os.path.islink(layout.current)),
        (layout.launcher, launcher, not _launches_ours(layout)),
    ):
        if os.path.lexists(path) and (stays or os.readlink(path) == target):
            continue
        changed.append(path)
        if not check:
            link_atomic(target, path)
    return changed


def _launches_ours(layout: Layout) -> bool:
    return leads_into(layout.launcher, layout.current, layout.deployments)


def leads_into(path: str, *folders: str) -> bool:
    """True for a link of which one step leads below one of the folders, whether something is there or not."""
    return link_target(path).startswith(tuple(os.path.normpath(folder) + "/" for folder in folders))


def refuse_foreign_files(layout: Layout) -> None:
    """Stop when a unit or launcher of our name is somebody else's.

    Raises:
        Ds4Error: naming each of them.
    """
    foreign = []
    if os.path.lexists(layout.unit_path) and MARKER_LINE not in read_text(layout.unit_path):
        foreign.append(layout.unit_path)
    if os.path.lexists(layout.launcher) and not _launches_ours(layout):
        foreign.append(layout.launcher)
    if os.path.lexists(layout.current) and not os.path.islink(layout.current):
        foreign.append(layout.current)
    if foreign:
        raise Ds4Error(
            f"Files that are not ours stand where ours would go: {', '.join(foreign)}",
            found="no marker of ds4-fleet in them",
            required="free names, or files that ds4-fleet wrote",
            cure="move them away, or choose other names with ds4_unit and ds4_bin_dir",
        )


# ------------------------------------------------------------------------------------------------------- history


def _history_path(layout: Layout) -> str:
    return os.path.join(layout.state, HISTORY)


def history(layout: Layout) -> list[dict[str, Any]]:
    """Deployments proven on this host, newest first: ``{id, release, proven_at, downtime_seconds}``."""
    return history_in(layout.state)


def history_in(state: str) -> list[dict[str, Any]]:
    """The same by the folder of the state. A file of another shape is as good as none: what runs is proven anew."""
    found = read_json(os.path.join(state, HISTORY))
    entries = found.get("proven") if isinstance(found, dict) else None
    entries = entries if isinstance(entries, list) else []
    wanted = ("id", "release")
    return [
        entry
        for entry in entries
        if isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in wanted)
    ]


def proven(layout: Layout) -> list[str]:
    """Ids of proven deployments, newest first."""
    return [entry["id"] for entry in history(layout)]


def record_proven(layout: Layout, manifest: Mapping[str, Any], downtime_seconds: float | None) -> None:
    """Put a deployment at the head of the proven ones."""
    entry = {
        "id": manifest["id"],
        "release": manifest["release"],
        "proven_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "downtime_seconds": downtime_seconds,
    }
    kept = [old for old in history(layout) if old["id"] != manifest["id"]]
    write_json(_history_path(layout), {"schema": SCHEMA, "proven": [entry, *kept]})


def returnable(
    layout: Layout, without: str, judge: Callable[[Mapping[str, Any]], list[str]] = problems
) -> list[dict[str, Any]]:
    """Manifests of proven deployments that are still whole, newest first, leaving out the id ``without``."""
    found = [layout.manifest(name) for name in proven(layout) if name != without]
    return [manifest for manifest in found if manifest is not None and not judge(manifest)]


# ------------------------------------------------------------------------------------------------------- pruning


def prune_plan(
    layout: Layout, builds: str, keep: int, in_use: set[str], wanted: str = "", build: str = "", *, ahead: bool = False
) -> dict[str, list[str]]:
    """Deployments and builds beyond the last ``keep`` proven ones, as paths.

    Never one of ``in_use`` or what it needs, nor the one that a rollback would take, and never one staged since the newest
    was proven: its switch is to come.

    Args:
        wanted: the deployment whose switch this follows; the newest proven one.
        build: path of its build.
        ahead: that switch is still to come, and so may be the deployment: tell what will be removed after it.
    """
    names = sorted(os.listdir(layout.deployments)) if os.path.isdir(layout.deployments) else []
    whole = {
        name: manifest for name in names if (manifest := layout.manifest(name)) and is_ours(layout.directory(name))
    }
    newest = max((os.stat(_history_path(layout)).st_mtime for _ in proven(layout)[:1]), default=0.0)
    order = proven(layout)
    if ahead:
        newest, order = time.time(), [wanted, *(name for name in order if name != wanted)]
    kept = set(order[:keep]) | in_use | {wanted} | {back["id"] for back in returnable(layout, wanted)[:1]}
    kept |= {name for name in whole if os.stat(os.path.join(layout.directory(name), MANIFEST)).st_mtime > newest}
    gone = [name for name in whole if name not in kept]
    needed = {build} | {manifest["build"]["path"] for name, manifest in whole.items() if name not in gone}
    there = [os.path.join(builds, name) for name in sorted(os.listdir(builds))] if os.path.isdir(builds) else []
    return {
        "deployments": [layout.directory(name) for name in gone],
        "builds": [path for path in there if path not in needed and _is_unneeded_build(path, newest)],
    }


def _is_unneeded_build(path: str, newest: float) -> bool:
    record = os.path.join(path, "build.json")
    return is_ours(path) and os.path.isfile(record) and os.stat(record).st_mtime <= newest


def prune(layout: Layout, plan: Mapping[str, list[str]]) -> None:
    """Remove what ``prune_plan`` listed, and forget it in the proven list."""
    for path in (*plan["deployments"], *plan["builds"]):
        shutil.rmtree(path)
    gone = {os.path.basename(path) for path in plan["deployments"]}
    kept = [entry for entry in history(layout) if entry["id"] not in gone]
    if len(kept) != len(history(layout)):
        write_json(_history_path(layout), {"schema": SCHEMA, "proven": kept})


def catalogue_text(catalogue: Mapping[str, Any]) -> str:
    """Codex catalogue as the engine reads it."""
    return json.dumps(catalogue, indent=2, sort_keys=True) + "\n"
