# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The gate before every start of the engine, by whomever: ``ExecStartPre=+… python3 -m ds4.gate``.

Loading 87 GiB beside a second copy, or into memory that is not back yet, freezes the whole machine. So nothing starts
until no other engine holds the lock or the weights and enough memory is available.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from .command import run, which
from .deployment import base_weights, weights_problems
from .errors import Ds4Error
from .files import human_bytes, read_json
from .host import ENGINE_LOCK, lock_holders
from .memory import MEMINFO, Waited, wait_for_available
from .process import Process
from .service import mapping_pids


def refuse_second_copy(manifest: Mapping[str, Any]) -> None:
    """Stop when another process holds the engine's lock or maps the weights.

    Raises:
        Ds4Error: naming pid, user and program.
    """
    base = base_weights(manifest)
    holders = {holder.pid: f"holds {ENGINE_LOCK}" for holder in lock_holders()}
    holders.update({pid: f"maps {base}" for pid in mapping_pids(base) if base})
    holders.pop(os.getpid(), None)
    if holders:
        named = [
            f"process {pid} ({Process(pid).user}, {Process(pid).program}) {why}" for pid, why in sorted(holders.items())
        ]
        raise Ds4Error(
            "Another engine is running; a second copy of the weights would not fit",
            found="; ".join(named),
            required="no other process with the engine's lock or the weights",
            cure="stop that process, or let the playbook take it over with engine_service_adopt: true",
            evidence={"pids": sorted(holders)},
        )


def remove_stale_lock(user: str) -> str:
    """Remove a lock file that nobody holds and that the engine's user could not open (it is created with mode 0600).

    Returns:
        What was done, or an empty string.
    """
    import pwd

    try:
        status = os.lstat(ENGINE_LOCK)
    except FileNotFoundError:
        return ""
    if status.st_uid == pwd.getpwnam(user).pw_uid or lock_holders():
        return ""
    os.unlink(ENGINE_LOCK)
    return f"removed {ENGINE_LOCK}, left behind by uid {status.st_uid} and held by nobody"


def remove_own_lock(user: str) -> None:
    """Remove the lock file that the service's engine left: after an uninstall its owner has no name any more."""
    import pwd

    try:
        owner = pwd.getpwnam(user).pw_uid
        ours = os.lstat(ENGINE_LOCK).st_uid == owner
    except (KeyError, FileNotFoundError):
        return
    if ours and not lock_holders():
        os.unlink(ENGINE_LOCK)


def check_weights(manifest: Mapping[str, Any]) -> None:
    """Every file of the deployment is the one that was verified, told by its record: no byte of it is read.

    Raises:
        Ds4Error: a file is missing, changed after it was verified, or closed to the service's account.
    """
    found = weights_problems(manifest)
    if found:
        raise Ds4Error(
            "Weights of the deployment are not the verified ones",
            found="; ".join(found),
            required=f"the files as they were verified, readable by {manifest['service']['user']}",
            cure="run site.yml, which verifies them and fetches what is missing",
        )


def wait_for_memory(manifest: Mapping[str, Any], wait_seconds: float, meminfo: str = MEMINFO) -> Waited:
    """The one memory gate: MemAvailable (never MemFree) reaches what the deployment needs, within a bounded wait.

    Raises:
        Ds4Error: it did not.
    """
    needed = int(manifest["memory_required_kib"])
    waited = wait_for_available(needed, wait_seconds, path=meminfo)
    if not waited.reached:
        raise Ds4Error(
            "Not enough memory is available to load the engine",
            found=f"MemAvailable {human_bytes(waited.available_kib * 1024)} after {waited.seconds:.0f} s",
            required=f"{human_bytes(needed * 1024)} (short of {human_bytes((needed - waited.available_kib) * 1024)})",
            cure="stop what holds the memory (serving_mode_target: serving frees the desktop's), lower "
            "engine_service_memory_required_gib if you know better; when nothing holds it, reboot the host",
            evidence={"mem_available_kib": waited.available_kib, "required_kib": needed},
        )
    return waited


def ensure_device_nodes() -> None:
    """Create the GPU's device nodes: the engine may gain no privileges, so CUDA's own helper cannot do it for it."""
    helper = which("nvidia-modprobe")
    if helper and not os.path.exists("/dev/nvidia-uvm"):
        run([helper, "-u", "-c", "0"], timeout_seconds=30)


def pass_gate(manifest: Mapping[str, Any], wait_seconds: float) -> tuple[Waited, str]:
    """Everything that must hold before a start; returns the memory seen and a note about a stale lock.

    Raises:
        Ds4Error: the first thing that does not hold.
    """
    check_weights(manifest)
    refuse_second_copy(manifest)
    note = remove_stale_lock(manifest["service"]["user"])
    waited = wait_for_memory(manifest, wait_seconds)
    ensure_device_nodes()
    return waited, note


def main(argv: list[str] | None = None) -> int:
    """Entry of ``python3 -m ds4.gate``: 0 when the engine may start, 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="ds4.gate", description="Let the engine start only when the host is ready.")
    parser.add_argument("--manifest", required=True, help="manifest.json of the deployment")
    parser.add_argument("--wait-seconds", type=float, default=0.0, help="longest wait for memory, in seconds")
    options = parser.parse_args(argv)
    manifest = read_json(options.manifest)
    try:
        if not isinstance(manifest, dict):
            raise Ds4Error(
                "The deployment cannot be read", found=f"no valid {options.manifest}", cure="run site.yml again"
            )
        waited, note = pass_gate(manifest, options.wait_seconds)
    except Ds4Error as error:
        print(f"<3>ds4 gate: {error}", file=sys.stderr)
        return 1
    if note:
        print(f"<5>ds4 gate: {note}", file=sys.stderr)
    print(f"<6>ds4 gate: open, {human_bytes(waited.available_kib * 1024)} available", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
