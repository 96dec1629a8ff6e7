"""Every check of host_verify by table: right, wrong, unknown, several at once."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any, Callable

import ds4_findings  # type: ignore[import-not-found]
import pytest
import yaml

from ds4 import findings, switch
from ds4.errors import Ds4Error

ROLE = Path(__file__).resolve().parents[2] / "roles/host_verify"
CATALOGUE = yaml.safe_load((ROLE / "vars/main/findings.yml").read_text())["__host_verify_findings"]
GIB = 1024 * 1024  # in KiB
Probes = dict[str, Any]
Change = Callable[[Probes], None]


def gb10() -> Probes:
    """A Spark that is ready for a first installation: probes and policy, all of them right."""
    return {
        "gpu": {
            "gpus": [
                {
                    "name": "NVIDIA GB10",
                    "compute_cap": "12.1",
                    "driver": "580.95.05",
                    "vbios": "9A.0B.16",
                    "uuid": "GPU-1",
                }
            ],
            "driver": "580.95.05",
            "kernel_module": "580.95.05",
            "cuda_supported": "13.0",
            "diagnosis": "ok",
            "text": "",
            "toolkit": {
                "home": "/usr/local/cuda",
                "nvcc": "/usr/local/cuda/bin/nvcc",
                "cuobjdump": "/usr/local/cuda/bin/cuobjdump",
                "release": "13.0",
                "version": "13.0.88",
                "source": "default",
                "candidates": [
                    {"nvcc": "/usr/local/cuda/bin/nvcc", "source": "default", "version": "13.0.88", "error": ""}
                ],
                "missing": [],
                "text": "",
            },
        },
        "memory": {
            "mem_total_kib": 127535152,
            "mem_available_kib": 115 * GIB,
            "mem_free_kib": 20 * GIB,
            "cached_kib": 95 * GIB,
            "swap_total_kib": 0,
            "swap_free_kib": 0,
            "booked_kib": 3 * GIB,
            "processes": [],
            "tmpfs": [],
        },
        "host": {
            "architecture": "aarch64",
            "kernel": "6.17.0-1014-nvidia",
            "python": {"version": "3.12.3", "executable": "/usr/bin/python3"},
            "euid": 0,
            "os": {"id": "ubuntu", "version": "24.04", "name": "Ubuntu 24.04.3 LTS"},
            "dgx": {"version": "7.6.0"},
            "firmware": {"bios_version": "5.36", "product_name": "NVIDIA_DGX_Spark"},
            "systemd": {"running": True, "state": "running", "version": "255"},
            "clock": {"epoch": 1790000000, "utc": "2026-09-21T14:13:20Z", "ntp_synchronized": True},
            "display": False,
            "sessions": [],
            "remote_desktops": [],
            "disks": [],
            "measured": [],
            "mounts": [],
            "listeners": [],
            "ds4_processes": [],
            "cuda_processes": [],
            "engine_lock": [],
            "package_locks": [],
            "missing_commands": [],
            "missing_packages": [],
            "users": [],
            "directories": [],
            "files": [],
            "units": [{"name": "ds4.service", "path": "", "exists": False, "ours": False, "found": ""}],
        },
        "policy": {
            "allow": [],
            "architecture": "aarch64",
            "compute_cap": "12.1",
            "cuda_minimum": "",
            "cuda_minimums": {"12.1": "13.0", "other": "12.9"},
            "toolkit_files": ["include/cublas_v2.h"],
            "versions": {"driver": {"minimum": "580", "known_bad": []}},
            "memory_required_gib": 99.3,
            "memory_total_gib": 119,
            "memory_staging_gib": 2,
            "memory_residue_gib": 4,
            "memory_serving_mode_gib": 0,
            "disk_needs": [],
            "disk_margin_gib": 2,
            "port": 8000,
            "adopt": False,
            "unit": "ds4.service",
            "lock_path": "/tmp/ds4.lock",
            "commands": {"systemctl": "systemd", "useradd": "passwd"},
            "packages": ["git", "make"],
            "desktop_programs": ["Xorg", "gnome-shell"],
            "timeout_seconds": 20,
            "clock_skew_seconds": 3600,
            "clock_drift_seconds": 60,
        },
    }


def judge(probes: Probes, **extra: Any) -> dict[str, Any]:
    extra.setdefault("now", 1790000000)
    return findings.judge_host(
        probes["gpu"], probes["memory"], probes["host"], probes["policy"], CATALOGUE, name="spark1", **extra
    )


def put(path: str, value: Any) -> Change:
    """Change one value: ``host.clock.epoch``, ``gpu.gpus.0.compute_cap``."""

    def change(probes: Probes) -> None:
        *parents, last = path.split(".")
        place: Any = probes
        for part in parents:
            place = place[int(part)] if part.isdigit() else place[part]
        place[int(last) if last.isdigit() else last] = value

    return change


def engine(**changes: Any) -> dict[str, Any]:
    row = {
        "pid": 812,
        "started_ticks": 1,
        "user": "alice",
        "program": "ds4-server",
        "argv": ["./ds4-server", "--cuda", "-m", "/home/alice/gguf/base.gguf"],
        "cwd": "/home/alice/code/ds4",
        "exe": "/home/alice/code/ds4/ds4-server",
        "unit": "session-3.scope",
        "manager": "",
        "cgroup": "/user.slice/user-1000.slice/session-3.scope",
        "deployment": "",
        "weights": ["/home/alice/gguf/base.gguf"],
        "weights_bytes": 86720111488,
        "resident_kib": GIB,
        "port": 8000,
    }
    return {**row, **changes}


OURS = engine(user="ds4", unit="ds4.service", manager="ds4.service", deployment="abc", argv=["/opt/ds4/x/ds4-server"])
OUR_UNIT = {"name": "ds4.service", "path": "/etc/systemd/system/ds4.service", "exists": True, "ours": True, "found": ""}
LISTENER = {
    "address": "127.0.0.1",
    "port": 8000,
    "inode": 1,
    "pid": 99,
    "user": "bob",
    "command": "/usr/bin/x",
    "unit": "x.service",
}


def disk(path: str = "/var/lib/ds4/weights", **changes: Any) -> dict[str, Any]:
    row = {
        "path": path,
        "exists": False,
        "parent": "/var/lib",
        "device": "259:2",
        "mount": "/",
        "filesystem": "ext4",
        "source": "/dev/nvme0n1p2",
        "total_bytes": 10**12,
        "free_bytes": 200 * 2**30,
        "read_only": False,
    }
    return {**row, **changes}


WEIGHTS = {
    "path": "/var/lib/ds4/weights",
    "bytes": 90 * 2**30,
    "what": "weights",
    "present": ["/var/lib/ds4/weights/base"],
    "variable": "weights_directory",
}
BUILD = {"path": "/opt/ds4/builds", "bytes": 3 * 2**30, "what": "build"}
TOOLKIT_12 = {"nvcc": "/usr/local/cuda/bin/nvcc", "source": "default", "version": "12.8.93", "error": ""}
TOOLKIT_13 = {"nvcc": "/usr/local/cuda-13.0/bin/nvcc", "source": "versioned", "version": "13.0.88", "error": ""}
MULTI = [
    {"name": "NVIDIA GB10", "compute_cap": "12.1", "driver": "580.1", "vbios": "", "uuid": f"GPU-{n}"} for n in (1, 2)
]

# (case, changes, findings expected, words that the message must hold)
CASES: list[tuple[str, list[Change], list[str], list[str]]] = [
    ("a Spark", [], [], []),
    ("another maker's name", [put("gpu.gpus.0.name", "ACME Station G1")], [], []),
    ("no vbios known", [put("gpu.gpus.0.vbios", "")], [], []),
    # system
    ("no root", [put("host.euid", 1000)], ["root"], ["effective user number 1000", "become: true"]),
    ("old python", [put("host.python.version", "3.8.10")], ["python"], ["3.8.10", "3.9 or newer"]),
    ("newer python", [put("host.python.version", "3.13.1")], [], []),
    ("no systemd", [put("host.systemd.running", False)], ["systemd"], ["/run/systemd/system", "container or chroot"]),
    ("a unit failed", [put("host.systemd.state", "degraded")], [], []),
    (
        "systemd in its rescue mode",
        [put("host.systemd.state", "maintenance")],
        ["systemd"],
        ["systemd says maintenance"],
    ),
    ("systemd shuts down", [put("host.systemd.state", "stopping")], ["systemd"], ["systemd says stopping"]),
    ("systemd does not answer", [put("host.systemd.state", "")], ["systemd"], ["run `systemctl is-system-running`"]),
    (
        "x86",
        [put("host.architecture", "x86_64")],
        ["architecture"],
        ["found:    x86_64", "host_verify_allow: [architecture]"],
    ),
    ("architecture unknown", [put("host.architecture", "")], ["architecture"], ["found:    unknown"]),
    ("x86 wanted", [put("host.architecture", "x86_64"), put("policy.architecture", "x86_64")], [], []),
    (
        "no useradd",
        [put("host.missing_commands", ["useradd"])],
        ["commands"],
        ["not there: useradd", "apt-get install passwd"],
    ),
    ("no dpkg", [put("host.missing_packages", None)], ["packages"], ["dpkg-query --show git make"]),
    ("packages to install", [put("host.missing_packages", ["git"])], [], []),
    (
        "apt busy, packages to install",
        [
            put("host.missing_packages", ["git"]),
            put(
                "host.package_locks",
                [{"path": "/var/lib/dpkg/lock", "pid": 9, "user": "root", "command": "apt", "unit": ""}],
            ),
        ],
        ["packages_busy"],
        ["pid 9 of root (apt) holds /var/lib/dpkg/lock; missing: git"],
    ),
    (
        "apt busy, nothing to install",
        [
            put(
                "host.package_locks",
                [{"path": "/var/lib/dpkg/lock", "pid": 9, "user": "root", "command": "apt", "unit": ""}],
            )
        ],
        [],
        [],
    ),
    ("mounted", [put("host.mounts", [{"path": "/data", "mounted": True}])], [], []),
    (
        "not mounted",
        [put("host.mounts", [{"path": "/data", "mounted": False}, {"path": "/kv", "mounted": True}])],
        ["mount"],
        ["no mount on /data", "mounts on /data, /kv"],
    ),
    ("clock a minute off", [put("host.clock.epoch", 1790000060)], [], []),
    (
        "clock years off",
        [put("host.clock.epoch", 1600000000)],
        ["clock"],
        ["-2199.1 d against the controller", "1.0 h apart"],
    ),
    ("clock two hours ahead", [put("host.clock.epoch", 1790007200)], ["clock"], ["+2.0 h"]),
    ("no NTP, and it does not matter yet", [put("host.clock.ntp_synchronized", False)], [], []),
    ("NTP unknown, and it does not matter yet", [put("host.clock.ntp_synchronized", None)], [], []),
    (
        "no NTP, and it drifts",
        [put("host.clock.ntp_synchronized", False), put("host.clock.epoch", 1789999880)],
        ["clock_unsynchronized"],
        ["-2.0 min against the controller"],
    ),
    (
        "NTP unknown, and it drifts",
        [put("host.clock.ntp_synchronized", None), put("host.clock.epoch", 1789999880)],
        ["clock_unsynchronized"],
        ["timedatectl set-ntp true"],
    ),
    ("a slow probe of a synchronised clock", [put("host.clock.epoch", 1789999880)], [], []),
    # names
    ("our unit", [put("host.units", [OUR_UNIT])], [], []),
    (
        "a foreign unit",
        [put("host.units", [{**OUR_UNIT, "ours": False}])],
        ["foreign_unit"],
        ["found:    /etc/systemd/system/ds4.service", "systemctl disable --now ds4.service"],
    ),
    (
        "a masked unit",
        [put("host.units", [{**OUR_UNIT, "ours": False, "found": "/dev/null"}])],
        ["masked_unit"],
        ["found:    ds4.service", "systemctl unmask ds4.service"],
    ),
    ("our account", [put("host.users", [{"name": "ds4", "exists": True, "ours": True, "found": "uid 9"}])], [], []),
    (
        "a foreign account",
        [put("host.users", [{"name": "ds4", "exists": True, "ours": False, "found": "uid 1000"}])],
        ["foreign_user"],
        ["ds4 (uid 1000)", "ds4_user"],
    ),
    (
        "an empty directory",
        [put("host.directories", [{"path": "/opt/ds4", "exists": True, "ours": False, "empty": True, "found": ""}])],
        [],
        [],
    ),
    (
        "a foreign directory",
        [
            put(
                "host.directories",
                [{"path": "/opt/ds4", "exists": True, "ours": False, "empty": False, "found": "owner bob, 3 entries"}],
            )
        ],
        ["foreign_directory"],
        ["/opt/ds4 (owner bob, 3 entries)"],
    ),
    (
        "a foreign launcher",
        [put("host.files", [{"path": "/usr/local/bin/ds4-serve", "exists": True, "ours": False, "found": "/x"}])],
        ["foreign_file"],
        ["/usr/local/bin/ds4-serve (/x)"],
    ),
    # GPU
    (
        "no driver",
        [put("gpu.diagnosis", "no_driver"), put("gpu.gpus", []), put("gpu.text", "gone")],
        ["gpu_no_driver"],
        ["gone"],
    ),
    (
        "mismatch",
        [put("gpu.diagnosis", "mismatch"), put("gpu.gpus", [])],
        ["gpu_mismatch"],
        ["module: 580.95.05", "reboot"],
    ),
    ("no device", [put("gpu.diagnosis", "no_device"), put("gpu.gpus", [])], ["gpu_no_device"], ["Xid".lower()]),
    ("hang", [put("gpu.diagnosis", "timeout"), put("gpu.gpus", [])], ["gpu_timeout"], ["no answer within 20 s"]),
    (
        "garbage",
        [put("gpu.diagnosis", "unparsable"), put("gpu.gpus", [])],
        ["gpu_unparsable"],
        ["--query-gpu=name,compute_cap"],
    ),
    ("two GPUs", [put("gpu.gpus", MULTI)], ["gpu_count"], ["NVIDIA GB10 12.1; NVIDIA GB10 12.1"]),
    (
        "capability 12.0",
        [put("gpu.gpus.0.compute_cap", "12.0")],
        ["compute_cap"],
        ["12.0 (NVIDIA GB10)", "required: 12.1"],
    ),
    ("capability 12.10 is not 12.1", [put("gpu.gpus.0.compute_cap", "12.10")], ["compute_cap"], ["12.10"]),
    (
        "capability unknown",
        [put("gpu.gpus.0.compute_cap", "")],
        ["compute_cap"],
        ["unknown (NVIDIA GB10)", "nvidia-smi --query-gpu"],
    ),
    ("driver 570", [put("gpu.driver", "570.211.01")], ["driver_old"], ["570.211.01", "580 or newer"]),
    ("driver unknown", [put("gpu.driver", "")], ["driver_old"], ["found:    unknown", "--query-gpu=driver_version"]),
    ("driver 610", [put("gpu.driver", "610.10")], [], []),
    (
        "known bad driver",
        [put("policy.versions.driver.known_bad", [{"version": "580.95.*", "reason": "hangs at load"}, "590.1"])],
        ["driver_bad"],
        ["580.95.05 (hangs at load)"],
    ),
    ("another driver is known bad", [put("policy.versions.driver.known_bad", ["580.95"])], [], []),
    # toolkit
    (
        "no toolkit",
        [
            put("gpu.toolkit.nvcc", ""),
            put("gpu.toolkit.version", ""),
            put("gpu.toolkit.text", "no nvcc in /usr/local/cuda"),
        ],
        ["toolkit_missing"],
        ["no nvcc in /usr/local/cuda", "nvcc 13.0 or newer"],
    ),
    (
        "toolkit 12.9",
        [put("gpu.toolkit.version", "12.9.41"), put("gpu.toolkit.release", "12.9")],
        ["toolkit_old"],
        ["12.9.41"],
    ),
    (
        "toolkit old, a newer one is there",
        [put("gpu.toolkit.version", "12.8.93"), put("gpu.toolkit.candidates", [TOOLKIT_12, TOOLKIT_13])],
        ["toolkit_old"],
        ["there is /usr/local/cuda-13.0/bin/nvcc"],
    ),
    (
        "toolkit 12.9 for another Blackwell",
        [
            put("gpu.toolkit.version", "12.9.41"),
            put("gpu.toolkit.release", "12.9"),
            put("policy.compute_cap", "12.0"),
            put("gpu.gpus.0.compute_cap", "12.0"),
        ],
        [],
        [],
    ),
    (
        "toolkit of the operator's minimum",
        [put("policy.cuda_minimum", "13.1")],
        ["toolkit_old"],
        ["required: 13.1 or newer"],
    ),
    (
        "toolkit newer than the driver",
        [put("gpu.toolkit.version", "13.2.1"), put("gpu.toolkit.release", "13.2")],
        ["toolkit_newer"],
        ["toolkit 13.2.1", "driver supports CUDA 13.0"],
    ),
    ("what the driver supports is unknown", [put("gpu.cuda_supported", "")], ["toolkit_newer"], ["run `nvidia-smi`"]),
    (
        "toolkit without headers",
        [put("gpu.toolkit.missing", ["include/cublas_v2.h"])],
        ["toolkit_incomplete"],
        ["not in /usr/local/cuda"],
    ),
    (
        "a toolkit that suits the other Blackwell that is there",
        [
            put("gpu.toolkit.version", "12.9.41"),
            put("gpu.toolkit.release", "12.9"),
            put("gpu.gpus.0.compute_cap", "12.0"),
        ],
        ["compute_cap"],
        [],
    ),
    (
        "toolkit 12.9, and which GPU it is for is unknown",
        [
            put("gpu.toolkit.version", "12.9.41"),
            put("gpu.toolkit.release", "12.9"),
            put("gpu.gpus.0.compute_cap", ""),
        ],
        ["compute_cap", "toolkit_old"],
        ["required: 13.0 or newer"],
    ),
    # memory
    ("the smallest Spark seen", [put("memory.mem_total_kib", 125442416)], [], []),
    ("64 GB", [put("memory.mem_total_kib", 64 * GIB)], ["memory_total"], ["64.0 GiB (MemTotal)"]),
    (
        "98 GiB available",
        [put("memory.mem_available_kib", 98 * GIB)],
        ["memory"],
        ["98.0 GiB MemAvailable", "required: 99.3 GiB", "free 1.3 GiB"],
    ),
    (
        "little free, much cache",
        [put("memory.mem_free_kib", 3 * GIB), put("memory.mem_available_kib", 110 * GIB)],
        [],
        [],
    ),
    (
        "much free, little available",
        [put("memory.mem_free_kib", 110 * GIB), put("memory.mem_available_kib", 3 * GIB)],
        ["memory"],
        ["3.0 GiB MemAvailable", "110.0 GiB are MemFree"],
    ),
    (
        "a desktop holds it",
        [
            put("memory.mem_available_kib", 95 * GIB),
            put("host.display", True),
            put("host.sessions", [{"user": "alice", "graphical": True}]),
        ],
        ["memory"],
        ["serving_mode_target: serving (graphical session of alice)"],
    ),
    (
        "a login screen that nobody uses holds it",
        [put("memory.mem_available_kib", 95 * GIB), put("host.display", True)],
        ["memory"],
        ["serving_mode_target: serving (graphical session of the login screen)"],
    ),
    (
        "a desktop holds it, and will be stripped",
        [
            put("memory.mem_available_kib", 95 * GIB),
            put("host.display", True),
            put("policy.memory_serving_mode_gib", 10),
        ],
        [],
        [],
    ),
    (
        "there is no desktop left to strip",
        [put("memory.mem_available_kib", 95 * GIB), put("policy.memory_serving_mode_gib", 10)],
        ["memory"],
        ["95.0 GiB MemAvailable;", "free 4.3 GiB"],
    ),
    (
        "whether there is a desktop is unknown",
        [
            put("memory.mem_available_kib", 95 * GIB),
            put("host.display", None),
            put("policy.memory_serving_mode_gib", 10),
        ],
        ["memory"],
        ["95.0 GiB MemAvailable;"],
    ),
    (
        "a large process",
        [
            put("memory.mem_available_kib", 50 * GIB),
            put(
                "memory.processes", [{"pid": 7, "user": "bob", "command": "java", "unit": "", "resident_kib": 60 * GIB}]
            ),
            put("memory.tmpfs", [{"path": "/dev/shm", "used_kib": 5 * GIB}]),
        ],
        ["memory"],
        ["pid 7 of bob (java) 60.0 GiB; files in /dev/shm 5.0 GiB"],
    ),
    (
        "another program on the GPU",
        [
            put("memory.mem_available_kib", 50 * GIB),
            put("host.cuda_processes", [{"pid": 8, "user": "bob", "command": "vllm", "unit": "vllm.service"}]),
        ],
        ["memory", "cuda_tenant"],
        ["pid 8 of bob (vllm, in vllm.service) with CUDA memory"],
    ),
    (
        "no room to build",
        [put("memory.mem_available_kib", GIB)],
        ["memory_staging", "memory"],
        ["1.0 GiB (MemAvailable)"],
    ),
    # engines
    (
        "ours serves",
        [
            put("host.ds4_processes", [OURS]),
            put("host.units", [OUR_UNIT]),
            put("host.listeners", [{**LISTENER, "pid": 812}]),
            put("host.engine_lock", [{"pid": 812}]),
            put("memory.mem_available_kib", 8 * GIB),
        ],
        [],
        [],
    ),
    (
        "ours serves, beside another program on the GPU: only the weights count, and that is not enough",
        [
            put("host.ds4_processes", [OURS]),
            put("host.units", [OUR_UNIT]),
            put(
                "host.cuda_processes",
                [{"pid": 812, "command": "x"}, {"pid": 8, "user": "bob", "command": "vllm", "unit": ""}],
            ),
            put("memory.mem_available_kib", 8 * GIB),
        ],
        ["memory", "cuda_tenant"],
        ["8.0 GiB MemAvailable + 81.8 GiB that pid 812 of ds4"],
    ),
    (
        "ours serves, beside a desktop that opens the GPU",
        [
            put("host.ds4_processes", [OURS]),
            put("host.units", [OUR_UNIT]),
            put("host.cuda_processes", [{"pid": 9, "user": "alice", "command": "/usr/lib/xorg/Xorg", "unit": ""}]),
            put("memory.mem_available_kib", 8 * GIB),
        ],
        [],
        [],
    ),
    (
        "the installer's",
        [put("host.ds4_processes", [engine()]), put("host.listeners", [{**LISTENER, "pid": 812}])],
        ["engine"],
        ["pid 812 of alice", "port 8000", "/home/alice/gguf/base.gguf", "engine_service_adopt: true", "kill 812"],
    ),
    (
        "the installer's, to be adopted",
        [
            put("host.ds4_processes", [engine()]),
            put("host.listeners", [{**LISTENER, "pid": 812}]),
            put("policy.adopt", True),
            put("memory.mem_available_kib", 8 * GIB),
        ],
        [],
        [],
    ),
    (
        "the installer's, not to be adopted, holds memory",
        [put("host.ds4_processes", [engine()]), put("memory.mem_available_kib", 8 * GIB)],
        ["engine", "memory"],
        ["8.0 GiB MemAvailable;"],
    ),
    (
        "two of the installer's, to be adopted",
        [put("host.ds4_processes", [engine(), engine(pid=813, port=8001)]), put("policy.adopt", True)],
        ["engine", "engine"],
        ["only a single server can be taken over"],
    ),
    (
        "one that another unit looks after",
        [put("host.ds4_processes", [engine(unit="llm.service", manager="llm.service")])],
        ["engine"],
        ["engine_service_adopt: true", "systemctl disable --now llm.service"],
    ),
    (
        "one that a unit of a person's own manager looks after",
        [put("host.ds4_processes", [engine(unit="user@1000.service", manager="ds4.service")])],
        ["engine"],
        ["`systemctl --user --machine=alice@ disable --now ds4.service`"],
    ),
    (
        "one that another unit looks after, to be adopted",
        [put("host.ds4_processes", [engine(unit="llm.service", manager="llm.service")]), put("policy.adopt", True)],
        [],
        [],
    ),
    (
        "to be adopted, and the port is somebody else's",
        [put("host.ds4_processes", [engine(port=8001)]), put("host.listeners", [LISTENER]), put("policy.adopt", True)],
        ["engine", "port"],
        ["only a single server can be taken over"],
    ),
    (
        "a unit of our name that is not ours serves",
        [put("host.ds4_processes", [OURS]), put("host.units", [{**OUR_UNIT, "ours": False}])],
        ["foreign_unit", "engine"],
        ["systemctl disable --now ds4.service"],
    ),
    (
        "our own, whose unit was removed under it",
        [
            put("host.ds4_processes", [OURS]),
            put("host.units", [{**OUR_UNIT, "exists": False, "ours": False}]),
            put("host.listeners", [{**LISTENER, "pid": OURS["pid"], "unit": "ds4.service"}]),
        ],
        [],
        [],
    ),
    (
        "somebody else's, whose unit was removed under it",
        [
            put("host.ds4_processes", [{**OURS, "deployment": ""}]),
            put("host.units", [{**OUR_UNIT, "exists": False, "ours": False}]),
        ],
        ["engine"],
        [],
    ),
    (
        "the command-line program",
        [put("host.ds4_processes", [engine(program="ds4", argv=["ds4", "-p", "secret words"], port=0)])],
        ["engine"],
        ["wait until it ends, or end it with `kill 812`"],
    ),
    (
        "port taken",
        [put("host.listeners", [LISTENER])],
        ["port"],
        ["pid 99 of bob (/usr/bin/x, in x.service) on 127.0.0.1"],
    ),
    (
        "the port and the lock belong to our unit, whatever its program is called",
        [
            put("host.units", [OUR_UNIT]),
            put("host.listeners", [{**LISTENER, "unit": "ds4.service"}]),
            put("host.engine_lock", [{"pid": 99, "user": "ds4", "command": "x", "unit": "ds4.service"}]),
        ],
        [],
        [],
    ),
    (
        "port taken by who knows",
        [put("host.listeners", [{**LISTENER, "pid": None, "command": "", "unit": ""}])],
        ["port"],
        ["a process that cannot be seen of bob", "ss -ltnp 'sport = :8000'"],
    ),
    (
        "lock held",
        [put("host.engine_lock", [{"pid": 5, "user": "bob", "command": "sleep", "unit": ""}])],
        ["engine_lock"],
        ["pid 5 of bob (sleep)"],
    ),
    (
        "lock held by who knows",
        [put("host.engine_lock", [{"pid": 0, "user": "", "command": "", "unit": ""}])],
        ["engine_lock"],
        ["fuser -v /tmp/ds4.lock"],
    ),
    # disks
    ("room", [put("policy.disk_needs", [WEIGHTS]), put("host.disks", [disk()])], [], []),
    (
        "no room",
        [put("policy.disk_needs", [WEIGHTS]), put("host.disks", [disk(free_bytes=50 * 2**30)])],
        ["disk"],
        [
            "50.0 GiB free",
            "92.0 GiB (weights 90.0 GiB + margin 2.0 GiB)",
            "free 42.0 GiB on / (/dev/nvme0n1p2)",
            "weights_directory",
        ],
    ),
    (
        "room only thanks to what is there",
        [
            put("policy.disk_needs", [WEIGHTS]),
            put("host.disks", [disk(free_bytes=50 * 2**30)]),
            put("host.measured", [{"path": "/var/lib/ds4/weights/base", "bytes": 80 * 2**30, "device": "259:2"}]),
        ],
        [],
        [],
    ),
    (
        "a partial file and the weights of a running engine on the same disk count, each file once",
        [
            put("policy.disk_needs", [WEIGHTS]),
            put("host.disks", [disk(free_bytes=50 * 2**30)]),
            put(
                "host.measured",
                [
                    {"path": "/home/alice/gguf/base", "bytes": 80 * 2**30, "device": "259:2"},
                    {"path": "/var/lib/ds4/weights/.base.part", "bytes": 30 * 2**30, "device": "259:2"},
                    {"path": "/home/alice/gguf/other", "bytes": 80 * 2**30, "device": "259:2"},
                ],
            ),
        ],
        [],
        [],
    ),
    (
        "what is there lies elsewhere",
        [
            put("policy.disk_needs", [WEIGHTS]),
            put("host.disks", [disk(free_bytes=50 * 2**30)]),
            put("host.measured", [{"path": "/var/lib/ds4/weights/base", "bytes": 80 * 2**30, "device": "8:1"}]),
        ],
        ["disk"],
        ["92.0 GiB"],
    ),
    (
        "everything is there and the disk is full",
        [
            put("policy.disk_needs", [WEIGHTS]),
            put("host.disks", [disk(free_bytes=0)]),
            put("host.measured", [{"path": "/var/lib/ds4/weights/base", "bytes": 90 * 2**30, "device": "259:2"}]),
        ],
        [],
        [],
    ),
    (
        "a build that is complete needs nothing more",
        [
            put("policy.disk_needs", [{**BUILD, "complete": "/opt/ds4/builds/x/build.json"}]),
            put(
                "host.disks",
                [
                    disk("/opt/ds4/builds", free_bytes=2**30),
                    disk("/opt/ds4/builds/x/build.json", exists=True, free_bytes=2**30),
                ],
            ),
        ],
        [],
        [],
    ),
    (
        "a build that is not",
        [
            put("policy.disk_needs", [{**BUILD, "complete": "/opt/ds4/builds/x/build.json"}]),
            put(
                "host.disks",
                [disk("/opt/ds4/builds", free_bytes=2**30), disk("/opt/ds4/builds/x/build.json", free_bytes=2**30)],
            ),
        ],
        ["disk"],
        ["5.0 GiB (build 3.0 GiB + margin 2.0 GiB)"],
    ),
    (
        "each fits, both together do not",
        [
            put("policy.disk_needs", [WEIGHTS, BUILD]),
            put("host.disks", [disk(free_bytes=93 * 2**30), disk("/opt/ds4/builds", free_bytes=93 * 2**30)]),
        ],
        ["disk"],
        ["95.0 GiB (weights 90.0 GiB + build 3.0 GiB + margin 2.0 GiB)", "move weights, build"],
    ),
    (
        "short on the weights' file system only",
        [
            put("policy.disk_needs", [WEIGHTS, BUILD]),
            put("host.disks", [disk(device="8:1", mount="/data", free_bytes=2**30), disk("/opt/ds4/builds")]),
        ],
        ["disk"],
        ["The file system /data is too small"],
    ),
    (
        "a small root, a large data disk",
        [
            put("policy.disk_needs", [WEIGHTS, BUILD]),
            put("host.disks", [disk(device="8:1", mount="/data"), disk("/opt/ds4/builds", free_bytes=6 * 2**30)]),
        ],
        [],
        [],
    ),
    (
        "read-only",
        [put("policy.disk_needs", [WEIGHTS]), put("host.disks", [disk(read_only=True)])],
        ["disk_read_only"],
        ["dmesg"],
    ),
    (
        "tmpfs",
        [put("policy.disk_needs", [WEIGHTS]), put("host.disks", [disk(filesystem="tmpfs")])],
        ["disk_in_memory"],
        ["tmpfs on /"],
    ),
    (
        "conversations in memory",
        [
            put(
                "policy.disk_needs",
                [{**WEIGHTS, "what": "KV of conversations", "variable": "kv_budget_mib", "bytes": 0}],
            ),
            put("host.disks", [disk(filesystem="tmpfs")]),
        ],
        ["disk_in_memory"],
        ["KV of conversations would lie in memory"],
    ),
    (
        "NFS",
        [put("policy.disk_needs", [WEIGHTS]), put("host.disks", [disk(filesystem="nfs4")])],
        ["disk_network"],
        ["nfs4 on /"],
    ),
    # versions
    ("BIOS new enough", [put("policy.versions.bios", {"minimum": "5.36"})], [], []),
    ("BIOS old", [put("policy.versions.bios", {"minimum": "5.40"})], ["version_old"], ["The bios version", "5.36"]),
    (
        "BIOS unknown",
        [put("policy.versions.bios", {"minimum": "5.40"}), put("host.firmware.bios_version", "")],
        ["version_old"],
        ["unknown", "Run `dmidecode -s bios-version`"],
    ),
    (
        "kernel known bad",
        [put("policy.versions.kernel", {"known_bad": ["6.17.0-1014*"]})],
        ["version_bad"],
        ["6.17.0-1014-nvidia"],
    ),
    # probes and overrides
    (
        "GPU probe failed",
        [put("gpu", {"msg": "Traceback"})],
        ["probe"],
        ["could not be looked at (gpu)", "Traceback", "ansible HOST -m spark_gpu_info"],
    ),
    (
        "memory probe failed",
        [put("memory", {"msg": "no MemAvailable"})],
        ["probe"],
        ["could not be looked at (memory)", "no MemAvailable"],
    ),
    (
        "host probe failed, and what memory says is told in the same message",
        [
            put("host", {"msg": "Timed out after 60 second(s)."}),
            put("memory.mem_total_kib", 64 * GIB),
            put("memory.mem_available_kib", GIB),
        ],
        ["probe", "memory_total", "memory_staging"],
        ["a network file system that is gone", "64.0 GiB (MemTotal)"],
    ),
    ("no sudo", [put("host", {"msg": "Missing sudo password"})], ["probe"], ["--ask-become-pass"]),
    (
        "no sudo at all",
        [put(probe, {"msg": "Missing sudo password"}) for probe in ("gpu", "memory", "host")],
        ["probe"],
        ["could not be looked at (gpu, memory, host)", "--ask-become-pass"],
    ),
    (
        "sudo is for others",
        [
            put(probe, {"msg": "", "module_stderr": "alice is not in the sudoers file.\n"})
            for probe in ("gpu", "memory", "host")
        ],
        ["probe"],
        ["alice is not in the sudoers file.", "let an administrator"],
    ),
    (
        "sudo wants a terminal",
        [
            put(probe, {"msg": "MODULE FAILURE", "module_stderr": "sudo: sorry, you must have a tty to run sudo\n"})
            for probe in ("gpu", "memory", "host")
        ],
        ["probe"],
        ["MODULE FAILURE sudo: sorry, you must have a tty", "ansible_pipelining: false"],
    ),
    ("misspelt override", [put("policy.allow", ["dsk"])], ["allow"], ["found:    dsk", "architecture, clock"]),
]


@pytest.mark.parametrize(
    ("changes", "expected", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_case(changes: list[Change], expected: list[str], words: list[str]) -> None:
    probes = gb10()
    for change in changes:
        change(probes)
    before = copy.deepcopy(probes)
    result = judge(probes)
    assert [item["id"] for item in result["findings"]] == expected
    assert [word for word in words if word not in result["text"]] == []
    assert bool(result["text"]) == bool(expected)
    phases = {CATALOGUE[identity]["phase"] for identity in expected}
    assert result["ok_stage"] == ("stage" not in phases)
    assert result["ok_switch"] == phases.isdisjoint({"stage", "switch"})
    assert result["summary"]["state"] == ("failed" if "stage" in phases else "ok")
    assert probes == before  # judging changes nothing that it was given


def test_every_finding_of_the_catalogue_is_made_by_a_case() -> None:
    made = {identity for _case, _changes, expected, _words in CASES for identity in expected}
    assert made | {"drift"} == set(CATALOGUE)


@pytest.mark.parametrize("identity", CATALOGUE)
def test_catalogue_entry_is_complete(identity: str) -> None:
    entry = CATALOGUE[identity]
    assert ("cures" in entry) == ("{cures}" in entry["cure"])
    assert set(entry) - {"unknown", "limit", "cures", "allowed_phase"} == {
        "phase",
        "allow",
        "what",
        "found",
        "required",
        "cure",
        "why",
    }
    assert entry["phase"] in findings.PHASES
    assert entry["phase"] != "note" or not entry["allow"]
    assert all(str(entry[key]).strip() for key in ("what", "found", "required", "cure", "why"))


def test_every_cure_that_depends_on_what_was_found_is_given_by_a_case() -> None:
    given = ""
    for _case, changes, _expected, _words in CASES:
        probes = gb10()
        for change in changes:
            change(probes)
        given += judge(probes)["text"]
    sentences = [sentence for entry in CATALOGUE.values() for sentence in entry.get("cures", {}).values()]
    assert len(sentences) > 10
    assert [sentence for sentence in sentences if max(re.split(r"\{\w+\}", sentence), key=len) not in given] == []


def test_an_unknown_value_that_has_a_cure_of_its_own_shows_it() -> None:
    unknown = {identity for identity, entry in CATALOGUE.items() if "unknown" in entry}
    assert unknown == {"systemd", "compute_cap", "driver_old", "toolkit_newer", "port", "engine_lock", "version_old"}


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Kiritimati"])
def test_the_clock_is_judged_alike_in_every_time_zone_of_the_controller(
    monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    def ids(hours: float) -> list[str]:
        probes = gb10()
        probes["host"]["clock"]["epoch"] = round(time.time() + hours * 3600)
        return [item["id"] for item in ds4_findings.ds4_findings(probes, probes["policy"], CATALOGUE)["findings"]]

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert time.timezone == 0 or zone != "UTC"
        assert (ids(0), ids(1.5), ids(-5)) == ([], ["clock"], ["clock"])
    finally:
        monkeypatch.undo()
        time.tzset()


def test_ten_problems_at_once_are_one_message() -> None:
    probes = gb10()
    for change in (
        put("host.architecture", "x86_64"),
        put("host.euid", 1000),
        put("host.systemd.running", False),
        put("gpu.gpus.0.compute_cap", "9.0"),
        put("gpu.driver", "535.1"),
        put("gpu.toolkit.version", "12.0.1"),
        put("memory.mem_total_kib", 60 * GIB),
        put("memory.mem_available_kib", 50 * GIB),
        put("policy.disk_needs", [WEIGHTS]),
        put("host.disks", [disk(free_bytes=1)]),
        put("host.mounts", [{"path": "/data", "mounted": False}]),
        put("host.listeners", [LISTENER]),
    ):
        change(probes)
    result = judge(probes)
    expected = "root systemd architecture mount disk memory_total compute_cap driver_old toolkit_old port memory"
    assert [item["id"] for item in result["findings"]] == expected.split()
    text = result["text"]
    assert text.startswith("spark1: 9 problems; nothing was touched.")
    assert "spark1: 2 problems that would stop the switch" in text
    assert text.count("cure:") == 11
    assert result["summary"]["text"].startswith("9 problems: root, systemd,")
    assert result["text_switch"].count("cure:") == 11


def test_allowed_findings_are_shown_again_and_stop_nothing() -> None:
    probes = gb10()
    put("host.architecture", "x86_64")(probes)
    put("gpu.gpus.0.compute_cap", "9.0")(probes)
    put("host.listeners", [LISTENER])(probes)
    put("policy.allow", "architecture, compute_cap,port")(probes)  # as `-e host_verify_allow=…` gives it
    result = judge(probes)
    assert result["findings"] == []
    assert result["ok_switch"] is True
    assert [item["id"] for item in result["allowed"]] == ["architecture", "port", "compute_cap"]
    assert "overridden by host_verify_allow" in result["text"]
    assert "found: x86_64; required: aarch64" in result["text"]
    assert "OVERRIDDEN: architecture, port, compute_cap" in result["summary"]["text"]


@pytest.mark.parametrize("diagnosis", ["no_driver", "mismatch", "no_device", "timeout", "unparsable"])
def test_a_gpu_that_cannot_be_asked_may_be_allowed_for_staging_and_never_stops_what_serves(diagnosis: str) -> None:
    probes = gb10()
    probes["gpu"].update(diagnosis=diagnosis, gpus=[], cuda_supported="")
    put("host.ds4_processes", [OURS])(probes)
    put("host.units", [OUR_UNIT])(probes)
    put("memory.mem_available_kib", 8 * GIB)(probes)
    refused = judge(probes)
    assert "host_verify_allow: [gpu] (it then stops the switch)" in refused["text"]
    put("policy.allow", ["gpu"])(probes)
    result = judge(probes)
    assert (result["ok_stage"], result["ok_switch"]) == (True, False)
    assert [(item["id"], item["phase"]) for item in result["findings"]] == [(f"gpu_{diagnosis}", "switch")]
    assert "1 problem that will stop the switch" in result["text"]
    assert result["summary"]["text"].endswith(f"stops the switch: gpu_{diagnosis}; OVERRIDDEN: gpu")


def test_a_real_h200_is_refused_and_accepted_with_the_override() -> None:
    probes = gb10()
    probes["gpu"] = json.loads((Path(__file__).parent / "fixtures/gpu/h200.json").read_text())
    result = judge(probes)
    assert [item["id"] for item in result["findings"]] == ["compute_cap"]
    assert "9.0 (NVIDIA H200)" in result["text"]
    assert result["ok_stage"] is False
    put("policy.allow", ["compute_cap"])(probes)
    assert judge(probes)["ok_switch"] is True
    put("policy.allow", [])(probes)
    put("policy.compute_cap", "9.0")(probes)
    assert judge(probes)["ok_switch"] is True


def test_versions_and_product_are_in_the_summary_whatever_was_found() -> None:
    expected = {
        "kernel": "6.17.0-1014-nvidia",
        "dgx": "7.6.0",
        "driver": "580.95.05",
        "bios": "5.36",
        "vbios": "9A.0B.16",
    }
    probes = gb10()
    put("host.euid", 1000)(probes)
    for summary in (judge(gb10())["summary"], judge(probes)["summary"]):
        assert (summary["versions"], summary["product"]) == (expected, "NVIDIA_DGX_Spark")
    put("host", {"msg": "no sudo"})(probes)
    assert judge(probes)["summary"]["versions"] == {
        **dict.fromkeys(expected, ""),
        "driver": "580.95.05",
        "vbios": "9A.0B.16",
    }


def test_twins_with_different_memory_are_both_right_and_the_third_is_told_its_gap() -> None:
    for total in (127535152, 125442416):
        probes = gb10()
        put("memory.mem_total_kib", total)(probes)
        put("memory.mem_available_kib", total - 6 * GIB)(probes)
        assert judge(probes)["findings"] == []
    probes = gb10()
    put("memory.mem_available_kib", 98 * GIB)(probes)
    assert "free 1.3 GiB" in judge(probes)["text"]


def test_bytes_that_are_there_twice_count_once() -> None:
    rows = [
        {"path": "/a/base", "bytes": 60 * 2**30, "device": "259:2"},
        {"path": "/b/.base.part", "bytes": 40 * 2**30, "device": "259:2"},
    ]
    (group,) = findings.disk_groups([WEIGHTS], [disk()], rows)
    assert group["credit"] == 60 * 2**30


def test_no_argument_of_a_foreign_program_is_shown() -> None:
    probes = gb10()
    put("host.ds4_processes", [engine(program="ds4", argv=["ds4", "-p", "secret words"], port=0)])(probes)
    assert "secret words" not in judge(probes)["text"]


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1", True, 1])
def test_yes(word: Any) -> None:
    assert findings.as_bool(word) is True


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0", "", False, 0])
def test_no(word: Any) -> None:
    assert findings.as_bool(word) is False


@pytest.mark.parametrize("word", ["maybe", "tru", 2, None, []])
def test_neither_yes_nor_no(word: Any) -> None:
    with pytest.raises(Ds4Error, match="neither yes nor no"):
        findings.as_bool(word)


@pytest.mark.parametrize("adopt", ["false", False, "no"])
def test_adoption_switched_off_by_a_word_or_by_json_means_the_same(adopt: Any) -> None:
    probes = gb10()
    put("host.ds4_processes", [engine()])(probes)
    put("policy.adopt", adopt)(probes)
    assert [item["id"] for item in judge(probes)["findings"]] == ["engine"]


def test_numbers_given_as_words_are_numbers() -> None:
    probes = gb10()
    for name in (
        "memory_required_gib",
        "memory_total_gib",
        "disk_margin_gib",
        "clock_skew_seconds",
        "memory_residue_gib",
    ):
        probes["policy"][name] = str(probes["policy"][name])
    assert judge(probes)["findings"] == []


# ---------------------------------------------------------------------------------------------------- hold


@pytest.mark.parametrize(
    ("engines", "others", "available_gib", "expected_gib"),
    [
        ([], [], 8, 0.0),  # nothing of ours runs
        ([OURS], [], 8, 121.63 - 8 - (3 - 1) - 4),  # all that is booked nowhere, less the driver's own
        ([OURS], [{"pid": 8}], 8, 80.76 + 1),  # cannot be divided: the weights and its own memory
        ([OURS], [], 115, 0.63),  # the weights are page cache, which counts as available already
        ([OURS], [{"pid": 8}], 115, 0.63),
    ],
)
def test_what_an_engine_gives_back(
    engines: list[Any], others: list[Any], available_gib: float, expected_gib: float
) -> None:
    probes = gb10()
    memory = {**probes["memory"], "mem_available_kib": available_gib * GIB}
    held = findings.engine_hold_kib(memory, others, engines, residue_gib=4)
    assert held / GIB == pytest.approx(expected_gib, abs=0.01)


def test_verification_and_switch_divide_memory_by_the_same_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor and the desktop have the GPU open: both answers count the whole remainder as coming back."""
    probes = gb10()
    put("host.ds4_processes", [OURS])(probes)
    put("host.units", [OUR_UNIT])(probes)
    put("memory.mem_available_kib", 8 * GIB)(probes)
    put("policy.memory_required_gib", 200)(probes)
    seen = {"MemTotal": probes["memory"]["mem_total_kib"], "MemAvailable": 8 * GIB}
    monkeypatch.setattr(switch, "read_meminfo", lambda: seen)
    monkeypatch.setattr(switch, "booked_kib", lambda _seen: probes["memory"]["booked_kib"])
    monkeypatch.setattr(switch, "ds4_processes", lambda: [OURS])
    monitor = {"pid": 9, "user": "root", "command": "/usr/bin/gnome-shell --x", "unit": ""}
    tenant = {"pid": 8, "user": "bob", "command": "/usr/bin/vllm", "unit": ""}
    told = {}
    for name, others in {"none": [], "desktop": [monitor], "tenant": [monitor, tenant]}.items():
        processes = [{"pid": OURS["pid"], "user": "ds4", "command": "ds4-server", "unit": ""}, *others]
        monkeypatch.setattr(switch, "cuda_processes", lambda processes=processes: processes)
        put("host.cuda_processes", processes)(probes)
        policy = {key: probes["policy"][key] for key in ("memory_residue_gib", "desktop_programs")}
        given_back = switch.Machine.given_back_kib(object.__new__(switch.Machine), OURS["pid"], policy)
        assert f"+ {given_back / GIB:.1f} GiB that pid 812" in judge(probes)["text"]
        told[name] = given_back
    assert told["none"] == told["desktop"] > told["tenant"]


# --------------------------------------------------------------------------------------------------- fleet


def probe_of(
    kernel: str = "6.17", bios: str = "1", product: str = "A", vbios: str = "9A", driver: str = "580.1"
) -> Probes:
    return {
        "gpu": {"gpus": [{"vbios": vbios}], "driver": driver},
        "host": {"kernel": kernel, "dgx": {"version": ""}, "firmware": {"bios_version": bios, "product_name": product}},
    }


def test_a_host_that_differs_from_the_majority_is_told() -> None:
    fleet = {name: probe_of() for name in "abc"}
    fleet["d"] = probe_of(kernel="6.14", bios="0", vbios="8F")
    drift = findings.fleet_drift(fleet)
    assert drift["a"] == drift["b"] == drift["c"] == []
    assert drift["d"] == [
        "kernel is 6.14 here, 6.17 on a and 2 more",
        "bios is 0 here, 1 on a and 2 more",
        "vbios is 8F here, 9A on a and 2 more",
    ]


def test_firmware_of_different_products_is_not_compared() -> None:
    fleet = {"a": probe_of(), "b": probe_of(bios="7", product="B", vbios="77")}
    assert findings.fleet_drift(fleet) == {"a": [], "b": []}


def test_unknown_versions_are_no_drift() -> None:
    assert findings.fleet_drift({"a": probe_of(), "b": probe_of(bios="", vbios="", driver="")}) == {"a": [], "b": []}


def test_two_that_differ_tell_the_second() -> None:
    assert findings.fleet_drift({"a": probe_of(), "b": probe_of(driver="590.2")}) == {
        "a": [],
        "b": ["driver is 590.2 here, 580.1 on a"],
    }


def test_probes_that_failed_do_not_break_the_comparison() -> None:
    assert findings.fleet_drift({"a": {"gpu": {"msg": "x"}, "host": {"msg": "y"}}, "b": probe_of()}) == {
        "a": [],
        "b": [],
    }


def test_drift_is_a_note() -> None:
    result = judge(gb10(), drift=["kernel is 6.14 here, 6.17 on a and 2 more"])
    assert [item["id"] for item in result["findings"]] == ["drift"]
    assert result["ok_switch"] is True
    assert "kernel is 6.14 here" in result["text"]
    assert result["summary"]["text"].endswith("notes: drift")
