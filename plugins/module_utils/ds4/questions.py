# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The questions that a host is asked, each with its options: by a module of its own, or several in one round trip by ``ds4_look``."""

from __future__ import annotations

from typing import Any

from . import gpu, host, machine, memory, toolkit
from .errors import Ds4Error
from .files import human_bytes

_STRINGS: dict[str, Any] = {"type": "list", "elements": "str", "default": []}

GPU_OPTIONS: dict[str, dict[str, Any]] = {
    "cuda_home": {"type": "str", "default": ""},
    "toolkit_files": _STRINGS,
    "timeout_seconds": {"type": "int", "default": 20},
}
MEMORY_OPTIONS: dict[str, dict[str, Any]] = {
    "meminfo_path": {"type": "str", "default": memory.MEMINFO},
    "wait_available_kib": {"type": "int", "default": 0},
    "timeout_seconds": {"type": "int", "default": 120},
    "processes": {"type": "int", "default": 5},
    "tmpfs_minimum_kib": {"type": "int", "default": 65536},
}
HOST_OPTIONS: dict[str, dict[str, Any]] = {
    "paths": _STRINGS,
    "measure": _STRINGS,
    "mounts": _STRINGS,
    "ports": {"type": "list", "elements": "int", "default": []},
    "commands": _STRINGS,
    "packages": _STRINGS,
    "users": _STRINGS,
    "user_comment": {"type": "str", "default": ""},
    "directories": _STRINGS,
    "files": _STRINGS,
    "units": _STRINGS,
    "lock_path": {"type": "str", "default": host.ENGINE_LOCK},
    "package_locks": _STRINGS,
    "remote_desktop_programs": _STRINGS,
}


def of_gpu(wanted: dict[str, Any]) -> dict[str, Any]:
    """GPUs, driver and toolkit."""
    timeout = wanted["timeout_seconds"]
    found = gpu.probe(timeout_seconds=timeout)
    found["toolkit"] = toolkit.resolve(
        wanted["cuda_home"], required_files=wanted["toolkit_files"], timeout_seconds=timeout
    )
    return found


def of_memory(wanted: dict[str, Any], *, check: bool = False) -> dict[str, Any]:
    """Memory and who holds it, after waiting for some to become available where that is asked for.

    Raises:
        Ds4Error: it cannot be read, or did not become available in time.
    """
    path, kib = wanted["meminfo_path"], wanted["wait_available_kib"]
    seconds = _wait(path, kib, wanted["timeout_seconds"]) if kib and not check else 0.0
    meminfo = memory.read_meminfo(path)
    return {
        "mem_total_kib": meminfo["MemTotal"],
        "mem_available_kib": meminfo["MemAvailable"],
        "mem_free_kib": meminfo.get("MemFree", 0),
        "cached_kib": meminfo.get("Cached", 0),
        "swap_total_kib": meminfo.get("SwapTotal", 0),
        "swap_free_kib": meminfo.get("SwapFree", 0),
        "booked_kib": memory.booked_kib(meminfo),
        "processes": memory.largest_processes(wanted["processes"]),
        "tmpfs": memory.tmpfs_users(minimum_kib=wanted["tmpfs_minimum_kib"]),
        "waited_seconds": seconds,
    }


def _wait(path: str, wanted_kib: int, timeout_seconds: int) -> float:
    """Wait for ``wanted_kib``; seconds it took.

    Raises:
        Ds4Error: it was not reached in time.
    """
    waited = memory.wait_for_available(wanted_kib, timeout_seconds, path=path)
    if not waited.reached:
        raise Ds4Error(
            f"Memory did not become available within {timeout_seconds} s",
            found=f"{human_bytes(waited.available_kib * 1024)} (MemAvailable)",
            required=human_bytes(wanted_kib * 1024),
            cure="see who holds it with `ps --sort -rss -e -o pid,user,rss,args | head`; memory of the GPU driver that "
            "nobody holds comes back with a reboot",
            evidence={"mem_available_kib": waited.available_kib, "wait_available_kib": wanted_kib},
        )
    return float(waited.seconds)


def of_host(wanted: dict[str, Any]) -> dict[str, Any]:
    """What the machine is and what runs on it."""
    package_locks = [
        {"path": path, **holder._asdict()} for path in wanted["package_locks"] for holder in host.lock_holders(path)
    ]
    engines = host.ds4_processes()
    measured = dict.fromkeys([*wanted["measure"], *(path for engine in engines for path in engine["weights"])])
    return {
        **machine.describe(),
        "remote_desktops": host.running_programs(wanted["remote_desktop_programs"]),
        "disks": [machine.disk(path) for path in wanted["paths"]],
        "measured": [
            {"path": path, "bytes": machine.present_bytes(path), "device": machine.disk(path)["device"]}
            for path in measured
        ],
        "mounts": [{"path": path, "mounted": machine.is_mount(path)} for path in wanted["mounts"]],
        "listeners": host.listeners(wanted["ports"]),
        "ds4_processes": engines,
        "cuda_processes": host.cuda_processes(),
        "engine_lock": [holder._asdict() for holder in host.lock_holders(wanted["lock_path"])],
        "package_locks": package_locks,
        "missing_commands": machine.missing_commands(wanted["commands"]),
        "missing_packages": machine.missing_packages(wanted["packages"]),
        "users": [machine.account(name, wanted["user_comment"]) for name in wanted["users"]],
        "directories": [machine.directory(path) for path in wanted["directories"]],
        "files": [machine.text_file(path) for path in wanted["files"]],
        "units": [machine.unit(name) for name in wanted["units"]],
    }
