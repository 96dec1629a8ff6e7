"""Hosts of an instance: what is written into each before it boots, and starting and finding its container.

A host is a directory ``<instance>/hosts/<name>``::

    host.json    its options (HostOptions) and address
    upper work   the writable overlay layer (everything the host ever changed)
    lab          mounted read-only at /run/lab: meminfo, memory.json, gpu.json, sysfs-class
    boot.sh      mounts the overlay in a mount namespace of its own and keeps systemd-nspawn running over reboots
    console.log  what the container printed
    snapshots    saved upper layers
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from . import desktop, emulation, image, memory, network, system

GUARDED_USER = "guarded"
SUDO_PASSWORD = "simulated-spark"

GPU: dict[str, Any] = {
    "name": "NVIDIA GB10",
    "compute_cap": "12.1",
    "uuid": "GPU-5b1cd2b0-0000-4000-8000-00000000001d",
    "vbios_version": "9A.0B.1D.00.00",
    "pci.bus_id": "0000000F:01:00.0",
    "persistence_mode": "Enabled",
    "pstate": "P8",
    "temperature.gpu": "41",
    "utilization.gpu": "0",
    "power.draw": "4.12",
    "clocks.sm": "208",
    "clocks.gr": "208",
    "compute_mode": "Default",
}
GPU_CONTROL: dict[str, Any] = {
    "state": "ok",
    "driver": "580.95.05",
    "cuda": "13.0",
    "library": "580.126",
    "delay_seconds": 0.0,
    "rc": 0,
    "text": "",
    "gpus": [GPU],
    "processes": [],
}
GPU_STATES = ("ok", "absent", "mismatch", "no_driver", "no_device", "hang", "garbage", "rc")

DMI = {
    "product_name": "NVIDIA_DGX_Spark",
    "product_family": "DGX Spark",
    "product_serial": "LAB0000000000",
    "sys_vendor": "NVIDIA",
    "board_vendor": "NVIDIA",
    "board_name": "P4242",
    "bios_vendor": "American Megatrends International, LLC.",
    "bios_version": "5.36_0ACUM018",
    "bios_date": "08/07/2025",
}


@dataclasses.dataclass
class HostOptions:
    """How one simulated Spark differs from the standard one.

    Attributes:
        user: login account with the instance's key.
        sudo: ``nopasswd``, ``password`` (SUDO_PASSWORD) or ``none``.
        requiretty: sudo refuses without a terminal.
        without: Debian packages purged before the first boot (``acl``, ``make`` …); the host's own package source has
            those of image.SPARE_PACKAGES.
        desktop: simulated DGX desktop units are enabled and the graphical target is the default.
        cuda: the toolkit is mounted at /usr/local/cuda-13.0 with the link /usr/local/cuda.
        gpu: laid over GPU_CONTROL, see lab/guest/usr/bin/nvidia-smi; ``state: absent`` removes nvidia-smi.
        memory: laid over memory.DEFAULTS (kB).
        dmi: laid over DMI.
        disks: mount point → size (MiB) of an ext4 file system of its own there.
        architecture: Debian's name of it, ``arm64``, run under emulation (slow); empty for this machine's own.
    """

    user: str = "spark"
    sudo: str = "nopasswd"
    requiretty: bool = False
    without: list[str] = dataclasses.field(default_factory=list)
    desktop: bool = True
    cuda: bool = True
    gpu: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    dmi: dict[str, str] = dataclasses.field(default_factory=dict)
    disks: dict[str, int] = dataclasses.field(default_factory=dict)
    architecture: str = ""


def instance_dir(instance: str) -> str:
    """Directory of an instance."""
    return os.path.join(system.STATE_DIR, instance)


def directory(instance: str, name: str) -> str:
    """Directory of a host."""
    return os.path.join(instance_dir(instance), "hosts", name)


def directories(instance: str) -> list[str]:
    """Directories of all hosts of an instance, in the order of their numbers."""
    parent = os.path.join(instance_dir(instance), "hosts")
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    return [os.path.join(parent, name) for name in sorted(names, key=lambda name: (len(name), name))]


def leader(instance: str, name: str) -> int | None:
    """Pid, on this machine, of the running host's init; None while it is down."""
    payload = os.path.join(system.cgroup(instance, name), "payload")
    for path in (os.path.join(payload, "init.scope"), payload):
        try:
            pids = system.read(os.path.join(path, "cgroup.procs")).split()
        except OSError:
            continue
        for pid in pids:
            with contextlib.suppress(OSError):
                found = re.search(r"^NSpid:.*\t1$", system.read(f"/proc/{pid}/status"), re.MULTILINE)
                if found and int(pid) > 0:
                    return int(pid)
    return None


def machine_name(subnet: int, name: str) -> str:
    """Name of the container: unique on this machine and short enough for its cable's name."""
    return f"l{subnet}-{name}"


def write_gpu(path: str, given: Mapping[str, Any]) -> None:
    """Write the control file of the simulated nvidia-smi; refuses unknown keys and states."""
    unknown = set(given) - set(GPU_CONTROL)
    if unknown or given.get("state", "ok") not in GPU_STATES:
        raise system.LabError(
            f"gpu(): unknown {sorted(unknown) or given.get('state')}. Known: {sorted(GPU_CONTROL)}, states {GPU_STATES}."
        )
    control = {**GPU_CONTROL, **given}
    control["gpus"] = [{**GPU, **gpu} for gpu in control["gpus"]]
    _replace(path, json.dumps(control, indent=1))


def write_memory(path: str, given: Mapping[str, Any]) -> None:
    """Write the settings of the memory simulator; refuses unknown keys."""
    unknown = set(given) - set(memory.DEFAULTS) - {"fields"}
    if unknown:
        raise system.LabError(f"memory(): unknown {sorted(unknown)}. Known: {sorted(memory.DEFAULTS)}, fields.")
    _replace(path, json.dumps(dict(given)))


def _replace(path: str, text: str) -> None:
    system.write(path + ".new", text)
    os.replace(path + ".new", path)


def prepare(instance: str, name: str, number: int, subnet: int, options: HostOptions, public_key: str) -> None:
    """Make the directory of a host, ready to start. Its ssh host key is made once and survives resets."""
    path = directory(instance, name)
    lab = os.path.join(path, "lab")
    os.makedirs(lab, exist_ok=True)
    info = {"name": name, "number": number, "subnet": subnet, "address": network.address(subnet, number)}
    system.write(
        os.path.join(path, "host.json"), json.dumps({**info, "options": dataclasses.asdict(options)}, indent=1)
    )
    key = os.path.join(path, "ssh_host_ed25519_key")
    if not os.path.exists(key):
        system.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key])
    for field, text in {**DMI, **options.dmi}.items():
        system.write(os.path.join(lab, "sysfs-class", "dmi", "id", field), text + "\n")
    for mount_point, mib in options.disks.items():
        _make_disk(_disk_file(path, mount_point), mib)
    seed(instance, name, public_key)
    system.write(os.path.join(path, "boot.sh"), _boot_script(instance, name, subnet, options), mode=0o755)


def seed(instance: str, name: str, public_key: str) -> None:
    """Write the clean writable layer of a host: what makes it this host, over the shared image."""
    path = directory(instance, name)
    info = json.loads(system.read(os.path.join(path, "host.json")))
    options = HostOptions(**info["options"])
    upper = os.path.join(path, "upper")
    for leftover in (upper, os.path.join(path, "work")):
        shutil.rmtree(leftover, ignore_errors=True)
        os.makedirs(leftover)
    write_gpu(os.path.join(path, "lab", "gpu.json"), options.gpu)
    write_memory(os.path.join(path, "lab", "memory.json"), options.memory)
    memory.update(os.path.join(path, "lab"), {})

    def put(file: str, text: str, mode: int = 0o644) -> None:
        system.write(os.path.join(upper, file), text, mode=mode)

    put("etc/hostname", name + "\n")
    # Its own name must resolve without a name server, or sudo waits for one.
    put(
        "etc/hosts",
        f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n{network.gateway(info['subnet'])} lab-services\n",
    )
    put("etc/machine-id", hashlib.sha256(f"{instance}/{name}".encode()).hexdigest()[:32] + "\n", 0o444)
    put(
        "etc/systemd/network/10-host0.network",
        f"[Match]\nName=host0\n\n[Network]\nAddress={info['address']}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
        "ConfigureWithoutCarrier=yes\n",
    )
    for suffix, mode in (("", 0o600), (".pub", 0o644)):
        put(
            f"etc/ssh/ssh_host_ed25519_key{suffix}",
            system.read(os.path.join(path, "ssh_host_ed25519_key" + suffix)),
            mode,
        )
    put("etc/ssh/sshd_config.d/lab.conf", "HostKey /etc/ssh/ssh_host_ed25519_key\nUseDNS no\n")
    _accounts(upper, options, public_key)
    if not options.desktop:
        for unit in desktop.SERVICES:
            _whiteout(upper, f"etc/systemd/system/{unit.wanted_by}.wants/{unit.name}")
        put("etc/systemd/system/.keep", "")
        os.symlink("/lib/systemd/system/multi-user.target", os.path.join(upper, "etc/systemd/system/default.target"))
    if options.architecture:  # networkd does not start under emulation; lab/emulation.py gives the address
        _whiteout(upper, "etc/systemd/system/multi-user.target.wants/systemd-networkd.service")
        for file, text in emulation.files().items():
            put(file, text)
        emulation.native_programs(upper)
    if not options.cuda:
        _whiteout(upper, "usr/local/cuda")
        _whiteout(upper, image.CUDA_HOME.lstrip("/"))
    if options.gpu.get("state") == "absent":
        _whiteout(upper, "usr/bin/nvidia-smi")
    if options.without:
        _purge(path, options)


def _accounts(upper: str, options: HostOptions, public_key: str) -> None:
    """Two logins with the same key: the operator's, and one whose sudo asks for a password."""
    base = image.base(options.architecture)
    texts = {name: system.read(os.path.join(base, "etc", name)) for name in ("passwd", "shadow", "group", "gshadow")}
    password = system.run(["openssl", "passwd", "-6", "-salt", "simulated", "-stdin"], stdin=SUDO_PASSWORD).out.strip()
    for uid, user in ((1000, options.user), (1001, GUARDED_USER)):
        texts["passwd"] += f"{user}:x:{uid}:{uid}:{user}:/home/{user}:/bin/bash\n"
        texts["shadow"] += f"{user}:{password}:20000:0:99999:7:::\n"
        texts["group"] += f"{user}:x:{uid}:\n"
        texts["gshadow"] += f"{user}:!::\n"
        home = os.path.join(upper, "home", user)
        system.write(os.path.join(home, ".ssh", "authorized_keys"), public_key, mode=0o600)
        shutil.copy(os.path.join(base, "etc", "skel", ".bashrc"), home)
        for directory_path, _, names in os.walk(home):
            for entry in (directory_path, *(os.path.join(directory_path, name) for name in names)):
                os.chown(entry, uid, uid)
        os.chmod(home, 0o750)
        os.chmod(os.path.join(home, ".ssh"), 0o700)
    for name, mode in (("passwd", 0o644), ("shadow", 0o640), ("group", 0o644), ("gshadow", 0o640)):
        file = os.path.join(upper, "etc", name)
        system.write(file, texts[name], mode=mode)
        if mode == 0o640:
            os.chown(file, 0, os.stat(os.path.join(base, "etc", name)).st_gid)
    rules = {"nopasswd": "ALL=(ALL) NOPASSWD: ALL", "password": "ALL=(ALL) ALL", "none": ""}
    if options.sudo not in rules:
        raise system.LabError(f"sudo: unknown {options.sudo!r}. Known: {', '.join(rules)}.")
    lines = [f"{options.user} {rules[options.sudo]}" if rules[options.sudo] else "", f"{GUARDED_USER} ALL=(ALL) ALL"]
    lines += ["Defaults requiretty"] if options.requiretty else []
    system.write(os.path.join(upper, "etc/sudoers.d/lab"), "\n".join(lines) + "\n", mode=0o440)


def _whiteout(upper: str, file: str) -> None:
    """Hide a file of the lower layers."""
    path = os.path.join(upper, file)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.mknod(path, 0o020000, os.makedev(0, 0))


def _purge(path: str, options: HostOptions) -> None:
    """Remove packages from a host that does not run, by its own dpkg."""
    script = (
        'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root" && '
        'dir="$2/root" && shift 2 && '
        'chroot "$dir" env DEBIAN_FRONTEND=noninteractive dpkg --purge --force-depends --force-remove-protected "$@"'
    )
    os.makedirs(os.path.join(path, "root"), exist_ok=True)
    system.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            ":".join(image.layers(options.architecture)),
            path,
            *options.without,
        ]
    )


def _disk_file(path: str, mount_point: str) -> str:
    return os.path.join(path, "disks", mount_point.strip("/").replace("/", "-") + ".ext4")


def _make_disk(file: str, mib: int) -> None:
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "wb") as handle:
        handle.truncate(mib << 20)
    # No reserved blocks and no lazy work: what it says is free is free.
    system.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", file])


def _boot_script(instance: str, name: str, subnet: int, options: HostOptions) -> str:
    path = directory(instance, name)
    root = os.path.join(path, "root")
    os.makedirs(root, exist_ok=True)
    lower = ":".join(image.layers(options.architecture))
    nspawn = [
        *("setpriv", "--pdeathsig", "KILL", "systemd-nspawn", "--quiet", "--boot", "--console=read-only"),
        *(f"--directory={root}", f"--machine={machine_name(subnet, name)}", f"--hostname={name}"),
        f"--uuid={hashlib.sha256(f'{instance}/{name}'.encode()).hexdigest()[:32]}",
        *("--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        # Init may raise limits, as on a real host, and starts from the usual ones.
        *("--capability=CAP_SYS_RESOURCE", "--rlimit=NOFILE=1024:524288"),
        *(f"--network-bridge={network.bridge_name(subnet)}", f"--bind-ro={path}/lab:/run/lab"),
    ]
    mounts = []
    if options.cuda:
        os.makedirs(os.path.join(path, "cuda"), exist_ok=True)
        mounts.append(
            f"mount -t overlay overlay -o ro,lowerdir={':'.join(image.toolkit(options.architecture))} {path}/cuda"
        )
        nspawn.append(f"--bind-ro={path}/cuda:{image.CUDA_HOME}")
    for mount_point in options.disks:
        file = _disk_file(path, mount_point)
        mounts.append(
            f"mkdir -p {shlex.quote(file[:-5])} && mount -o loop {shlex.quote(file)} {shlex.quote(file[:-5])}"
        )
        nspawn.append(f"--bind={file[:-5]}:{mount_point}")
    return "\n".join(
        [
            "#!/bin/sh",
            "# Keeps one simulated Spark running. All its mounts are in this script's own namespace and end with it.",
            "set -e",
            "mount -t tmpfs -o mode=755 tmpfs /run",
            "mkdir -p /run/systemd/nspawn",
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={path}/upper,workdir={path}/work {root}",
            *mounts,
            "export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1",
            "set +e",
            "while :; do",
            f"  {shlex.join(nspawn)}",
            "  rc=$?",
            "  # 133 is a reboot. Anything else is the end, also for a payload that outlived systemd-nspawn.",
            f'  [ "$rc" = 133 ] || echo 1 >{system.cgroup(instance, name)}/cgroup.kill',
            "done",
            "",
        ]
    )


def start(instance: str, name: str) -> None:
    """Boot a prepared host; returns before it is reachable."""
    path = directory(instance, name)
    system.spawn(
        ["unshare", "--mount", "--propagation", "private", os.path.join(path, "boot.sh")],
        group=system.cgroup(instance, name),
        log=os.path.join(path, "console.log"),
        cwd="/",
    )


def stop(instance: str, name: str) -> None:
    """Cut a host's power."""
    system.cgroup_kill(system.cgroup(instance, name))
