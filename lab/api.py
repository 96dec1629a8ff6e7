"""The lab as Python objects: ``Lab`` is a named instance, ``Host`` one simulated Spark of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from . import emulation, hosts, image, memory, network, services, system
from .hub import Control
from .system import LabError, Ran

BOOT_SECONDS = 60.0
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,39}")


class Host:
    """One simulated Spark.

    Attributes:
        name: inventory name, ``spark1`` …
        address: IPv4 address on the instance's bridge.
        user: login account of the operator.
        directory: its files on this machine, see lab/hosts.py.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = hosts.directory(lab.name, name)
        info = json.loads(system.read(os.path.join(self.directory, "host.json")))
        self.number: int = info["number"]
        self.address: str = info["address"]
        self._subnet: int = info["subnet"]
        self.options = hosts.HostOptions(**info["options"])
        self.user = self.options.user
        self._used = os.path.join(self.directory, "used")
        self._machine = hosts.machine_name(self._subnet, name)
        self._cgroup = system.cgroup(lab.name, name)

    def __repr__(self) -> str:
        return f"<Host {self.lab.name}/{self.name} {self.address}>"

    @property
    def used(self) -> bool:
        """Whether a test had it since its last reset."""
        return os.path.exists(self._used)

    @used.setter
    def used(self, value: bool) -> None:
        if value:
            system.write(self._used, "")
        elif self.used:
            os.unlink(self._used)

    # --- life

    @property
    def leader(self) -> int | None:
        """Pid of its init on this machine; None while it is down."""
        return hosts.leader(self.lab.name, self.name)

    def wait_ready(self, *, timeout: float = BOOT_SECONDS, not_leader: int | None = None, clean: bool = False) -> None:
        """Wait until systemd says that the boot is over (sshd runs then) and its network answers.

        Args:
            timeout: seconds.
            not_leader: of a later boot than that of this init.
            clean: a failed unit is an error.
        """

        def booted() -> str:
            leader = self.leader
            if leader is None or leader == not_leader:
                return ""
            if self.options.architecture:
                emulation.give_address(leader, self.address)
            state = self.run(["systemctl", "is-system-running"], check=False).out.strip()
            return state if state in ("running", "degraded") and self._reachable() else ""

        try:
            state = system.wait(booted, f"{self.name} is ready", timeout=timeout)
        except LabError as error:
            console = system.read(os.path.join(self.directory, "console.log"))[-1500:]
            raise LabError(f"{error} Its console ends with:\n{console}") from error
        if clean and state == "degraded":
            failed = self.run("systemctl --failed --no-legend --plain; journalctl --no-pager -p warning -n 20").out
            raise LabError(f"{self.name} booted with failed units:\n{failed}")

    def _reachable(self) -> bool:
        """Whether its network answers: by a refusal, which leaves no trace in its journal, or by sshd's greeting."""
        for port, seconds in ((1, 0.3), (22, 0.5)):
            try:
                with socket.create_connection((self.address, port), timeout=seconds):
                    return True
            except ConnectionRefusedError:
                return True
            except OSError:
                continue
        return False

    def reboot(self, *, wait: bool = True) -> None:
        """Reboot it from inside, as ``systemctl reboot`` does; its disk stays."""
        before = self.leader
        self.run(["systemctl", "reboot"], check=False)
        if wait:
            self.wait_ready(not_leader=before)

    def power_off(self) -> None:
        """Cut its power: everything in it is gone at once, its disk stays."""
        hosts.stop(self.lab.name, self.name)

    def power_on(self, *, wait: bool = True) -> None:
        """Boot it again after power_off()."""
        hosts.start(self.lab.name, self.name)
        if wait:
            self.wait_ready()

    def pause(self) -> None:
        """Freeze every process of it, as a suspended laptop or a stuck kernel would."""
        system.write(os.path.join(self._cgroup, "cgroup.freeze"), "1")
        events = os.path.join(self._cgroup, "cgroup.events")
        system.wait(lambda: "frozen 1" in system.read(events), f"{self.name} is frozen", timeout=10)

    def resume(self) -> None:
        """Let it go on after pause()."""
        system.write(os.path.join(self._cgroup, "cgroup.freeze"), "0")

    def snapshot(self, name: str = "snapshot") -> None:
        """Save its disk under ``name``, for reset(name). It stands still meanwhile; memory is not saved."""
        path = os.path.join(self.directory, "snapshots", name)
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        running = self.leader is not None
        if running:
            self.pause()
        try:
            system.run(["cp", "-a", "--reflink=auto", os.path.join(self.directory, "upper"), path], timeout=300)
        finally:
            if running:
                self.resume()

    def reset(self, name: str | None = None, *, wait: bool = True, options: hosts.HostOptions | None = None) -> None:
        """Power it off, put back its disk (as saved under ``name``; None: as it was made), and boot it.

        GPU and memory go back to its options, cable and pause to normal. With ``options`` it becomes a host of those.
        """
        self.power_off()
        self.lab.forget_connections(self)
        if options is not None and options != self.options:
            self.options, self.user = options, options.user
        hosts.prepare(self.lab.name, self.name, self.number, self._subnet, self.options, self.lab.public_key)
        if name is not None:
            upper = os.path.join(self.directory, "upper")
            shutil.rmtree(upper)
            saved = os.path.join(self.directory, "snapshots", name)
            system.run(["cp", "-a", "--reflink=auto", saved, upper], timeout=300)
        self.used = False
        self.power_on(wait=wait)

    # --- commands and files

    def run(
        self,
        command: str | Sequence[str],
        *,
        check: bool = True,
        user: str | None = None,
        timeout: float = 60.0,
        stdin: str | None = None,
    ) -> Ran:
        """Run a command in the host.

        Args:
            command: argument list, or a text for /bin/sh.
            check: raise LabError when it fails.
            user: None or root: directly, without ssh. One of its login accounts: in a real ssh session.
                Another account: directly, as that account.
            timeout: seconds before it is killed; ``rc`` is 124 then.
            stdin: text for standard input.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if user in (self.user, hosts.GUARDED_USER):
            full = [*self.ssh_command(user), shlex.join(argv)]
        else:
            full = self.enter_command(argv, user)
        ran = system.run(full, check=False, timeout=timeout, stdin=stdin)
        if check and ran.rc != 0:
            raise LabError(f"{self.name}: {shlex.join(argv)} failed with {ran.rc}: {(ran.err or ran.out).strip()}")
        return ran

    def enter_command(self, argv: Sequence[str], user: str | None = None) -> list[str]:
        """Argument list that runs ``argv`` in the host from this machine, without ssh."""
        leader = self.leader
        if leader is None:
            raise LabError(f"{self.name} is down. Cure: python3 -m lab status --name {self.lab.name}")
        # In a control group of the host, so that it ends, freezes and is seen with it.
        group = os.path.join(self._cgroup, "payload", "lab.scope")
        os.makedirs(group, exist_ok=True)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        become = [] if user in (None, "root") else ["runuser", "-u", str(user), "--"]
        home = "/root" if not become else "/"
        return [
            *("/bin/sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', group),
            *(
                "nsenter",
                "--target",
                str(leader),
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--cgroup",
                "--root",
                "--wd",
            ),
            *("/usr/bin/env", "-i", f"PATH={path}", f"HOME={home}", "LANG=C.UTF-8", "TERM=dumb", *become, *argv),
        ]

    def ssh_command(self, user: str | None = None) -> list[str]:
        """``ssh …`` up to the host name, with the instance's key and known_hosts."""
        return [
            *("ssh", "-q", "-i", self.lab.private_key, "-o", f"UserKnownHostsFile={self.lab.known_hosts}"),
            *("-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
            *("-l", user or self.user, self.address),
        ]

    def path(self, path: str) -> str:
        """Where this machine sees the running host's ``path`` (symbolic links in it are this machine's business)."""
        return f"/proc/{self.leader}/root/{path.lstrip('/')}"

    def put(self, path: str, text: str, mode: int | str = 0o644) -> None:
        """Write a file as root, making its folder."""
        octal = mode if isinstance(mode, str) else f"{mode:04o}"
        self.run(["sh", "-c", 'mkdir -p "$(dirname "$0")" && cat >"$0" && chmod "$1" "$0"', path, octal], stdin=text)

    def read(self, path: str) -> str:
        """Text of a file."""
        return self.run(["cat", path]).out

    def exists(self, path: str) -> bool:
        """Whether the path exists (a dangling link does)."""
        return self.run(["sh", "-c", 'test -e "$0" || test -L "$0"', path], check=False).rc == 0

    def journal(self, unit: str | None = None, *, since: float | None = None) -> str:
        """Messages of the host's journal: of one unit or all, from ``since`` (seconds since the epoch) on."""
        argv = ["journalctl", "--no-pager", "-o", "short-precise"]
        argv += ["-u", unit] if unit else []
        argv += ["--since", f"@{since:.6f}"] if since is not None else []
        return self.run(argv).out

    def module_executions(self, since: float = 0.0) -> list[str]:
        """Names of the Ansible modules the host ran since that time (seconds since the epoch), from its own journal.

        Without collection: ``command``, ``stat``, ``ds4_build``.
        """
        argv = [
            "journalctl",
            "--no-pager",
            "-o",
            "json",
            "--all",  # else a long message, which that of a module with many arguments is, is left out
            "--output-fields=SYSLOG_IDENTIFIER,MESSAGE",
            "--since",
            f"@{since:.6f}",
        ]
        found = []
        for line in self.run(argv).out.splitlines():
            entry = json.loads(line)
            identifier, message = entry.get("SYSLOG_IDENTIFIER") or "", entry.get("MESSAGE") or ""
            text = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
            if identifier.startswith("ansible-") and text.startswith("Invoked"):
                found.append(identifier.removeprefix("ansible-").rpartition(".")[2])
        return found

    # --- hardware

    def link_down(self) -> None:
        """Pull the network cable."""
        network.link(self._machine, up=False)

    def link_up(self) -> None:
        """Plug the network cable in again."""
        network.link(self._machine, up=True)

    def link_rate(self, limit: str | None) -> None:
        """Limit what it receives (``100mbit``); None lifts the limit. A reboot lifts it too."""
        network.rate(self._machine, limit)

    def gpu(self, **control: Any) -> None:
        """Set what nvidia-smi says: keys of hosts.GPU_CONTROL over the standard one. ``gpu()`` makes it sound again."""
        file = "/usr/bin/nvidia-smi"
        hosts.write_gpu(os.path.join(self.directory, "lab", "gpu.json"), control)
        if control.get("state") == "absent":
            self.run(["rm", "-f", file])
        elif not self.exists(file):
            self.put(file, system.read(os.path.join(image.guest(), file.lstrip("/"))), 0o755)

    def memory(self, **settings: Any) -> None:
        """Set the memory's scene in kB: keys of memory.DEFAULTS over its options, and ``fields``. Takes effect in 0.2 s."""
        path = os.path.join(self.directory, "lab")
        hosts.write_memory(os.path.join(path, "memory.json"), {**self.options.memory, **settings})
        with contextlib.suppress(OSError), contextlib.closing(memory.Tenants(f"/proc/{self.leader}/root")) as tenants:
            memory.update(path, tenants.held())

    def meminfo(self) -> dict[str, int]:
        """What /proc/meminfo says in the host (kB)."""
        lines = [line.split() for line in self.read("/proc/meminfo").splitlines()]
        return {words[0].rstrip(":"): int(words[1]) for words in lines}

    def tenant(self, name: str, kib: int) -> None:
        """Let something called ``name`` hold ``kib`` of memory; 0 gives it back."""
        path = f"/run/lab-tenants/{name}"
        if kib:
            self.put(path, f"{kib}\n")
        else:
            self.run(["rm", "-f", path])

    def mount_small_disk(self, path: str, mib: int) -> None:
        """Mount a fresh ext4 file system of ``mib`` MiB at ``path`` in the running host; gone after a reboot.

        A disk that stays is the host option ``disks``.
        """
        self.run(["mkdir", "-p", path])
        file = os.path.join(self.directory, "disks", f"live-{time.monotonic_ns()}.ext4")
        hosts._make_disk(file, mib)
        device = system.run(["losetup", "--find", "--show", file]).out.strip()
        try:
            code = "import sys; from lab.api import mount_into; mount_into(*sys.argv[1:])"
            leader = str(self.leader)
            system.run([sys.executable, "-c", code, device, leader, path], cwd=system.REPOSITORY)
        finally:
            # Lazily: the device goes when the last mount of it goes.
            system.run(["losetup", "--detach", device])


def mount_into(device: str, pid: str, path: str) -> None:
    """Mount the ext4 ``device`` of this machine at ``path`` of the mount namespace of process ``pid``.

    Enters that namespace for good, so run it in a process of its own. The device is opened before, the mount is attached
    after entering: in there the device does not exist.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    move_mount, fsopen, fsconfig, fsmount = 429, 430, 431, 432
    at_fdcwd, set_string, create, from_empty_path = -100, 1, 6, 4

    def call(*arguments: Any) -> int:
        result = int(libc.syscall(*arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), f"system call {arguments[0]}: {os.strerror(ctypes.get_errno())}")
        return result

    context = call(fsopen, b"ext4", 0)
    call(fsconfig, context, set_string, b"source", device.encode(), 0)
    call(fsconfig, context, create, None, None, 0)
    mounted = call(fsmount, context, 0, 0)
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the mount namespace of {pid}")
    os.fchdir(root)
    os.chroot(".")
    call(move_mount, mounted, b"", at_fdcwd, path.encode(), from_empty_path)


class Lab:
    """A named instance: hosts on a bridge of their own, with an inventory, keys, and the services beside them.

    Attributes:
        name: 1 to 40 lower-case letters, digits and hyphens.
        directory: its files.
        inventory: directory for ``ansible-playbook -i``.
        known_hosts, private_key: for ssh.
    """

    def __init__(self, name: str = "demo") -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise LabError(f"{name!r} is no name for an instance. Required: {NAME_PATTERN.pattern}")
        self.name = name
        self.directory = hosts.instance_dir(name)
        self.inventory = os.path.join(self.directory, "inventory")
        self.known_hosts = os.path.join(self.directory, "known_hosts")
        self.private_key = os.path.join(self.directory, "id_ed25519")
        self._control_dir = os.path.join(self.directory, "cp")

    # --- what is there

    @property
    def info(self) -> dict[str, Any]:
        """``subnet``, ``gateway`` and the services' addresses; empty when the instance does not exist."""
        try:
            loaded: dict[str, Any] = json.loads(system.read(os.path.join(self.directory, "instance.json")))
        except OSError:
            return {}
        return loaded

    @property
    def hosts(self) -> list[Host]:
        """Its hosts in the order of their numbers."""
        return [Host(self, os.path.basename(path)) for path in hosts.directories(self.name)]

    def host(self, name: str) -> Host:
        """The host of that name."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts) or "none"
        raise LabError(f"There is no host {name} in the instance {self.name}. Known: {known}.")

    @property
    def running(self) -> bool:
        """Whether the instance exists and every host of it is up."""
        return bool(self.info) and bool(self.hosts) and all(host.leader for host in self.hosts)

    @property
    def hub(self) -> Control:
        """The stand-in hub: its addresses, faults, options and log."""
        return services.control(self.directory)

    @property
    def engine(self) -> services.Engine:
        """The stand-in engine's repository of this instance."""
        return services.Engine(services.engine_url(self.info["gateway"]), services.repository_path(self.directory))

    @property
    def public_key(self) -> str:
        """Public part of the key that opens its hosts."""
        return system.read(self.private_key + ".pub")

    # --- up and down

    def up(self, count: int = 1, *, replace: bool = False, **options: Any) -> Lab:
        """Boot ``count`` hosts in parallel and wait until all are ready.

        Args:
            count: number of hosts, 1 to 99.
            replace: take down a running instance of this name first (a crashed one is always cleaned up).
            options: fields of hosts.HostOptions for every host; ``per_host={"spark2": {…}}`` for single ones.
        """
        system.require()
        os.umask(0o022)
        if not 1 <= count <= 99:
            raise LabError(f"Number of hosts. Found: {count}. Required: 1 to 99.")
        per_host: dict[str, dict[str, Any]] = options.pop("per_host", {})
        known = list(hosts.HostOptions.__dataclass_fields__)
        for given in (options, *per_host.values()):
            if set(given) - set(known):
                raise LabError(f"Unknown host options {sorted(set(given) - set(known))}. Known: {', '.join(known)}.")
        for architecture in {str(given.get("architecture", "")) for given in (options, *per_host.values())} | {""}:
            emulation.require(architecture)
            image.layers(architecture)
            image.toolkit(architecture)
        with system.lock(f"instance-{self.name}"):
            if self.running and not replace:
                raise LabError(f"The instance {self.name} runs. Cure: python3 -m lab down --name {self.name}")
            self._clean()
            subnet = self._claim_subnet()
            self._make(count, subnet, options, per_host)
            for host in self.hosts:
                hosts.start(self.name, host.name)
            services.start(self.name, self.directory, network.gateway(subnet))
            for host in self.hosts:
                host.wait_ready(clean=True)
            self._check_services()
        return self

    def _check_services(self) -> None:
        """A firewall of this machine is the one thing that keeps hosts from the services beside them."""
        url = services.hub_url(self.info["gateway"])
        ran = self.hosts[0].run(
            ["curl", "-s", "-o", "/dev/null", "--max-time", "5", "--noproxy", "*", url], check=False
        )
        if ran.rc != 0:
            raise LabError(
                f"Hosts do not reach {url} (curl: {ran.rc}): a firewall of this machine drops it. Cure: allow what comes from "
                f"{network.PREFIX}.0.0/16, for example ufw allow from {network.PREFIX}.0.0/16"
            )

    def down(self) -> None:
        """End the instance and remove all of it. Also right after a crash, and when it does not exist."""
        system.require()
        with system.lock(f"instance-{self.name}"):
            self._clean()

    def _claim_subnet(self) -> int:
        with system.lock("subnets"):
            taken = {int(lab.info["subnet"]) for lab in instances() if lab.info}
            subnet = network.pick_subnet(taken)
            gateway = network.gateway(subnet)
            info = {"name": self.name, "subnet": subnet, "gateway": gateway}
            system.write(os.path.join(self.directory, "instance.json"), json.dumps(info, indent=1))
            system.raise_limits()
        network.create_bridge(subnet)
        return subnet

    def _make(self, count: int, subnet: int, options: dict[str, Any], per_host: dict[str, dict[str, Any]]) -> None:
        system.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {self.name}", "-f", self.private_key])
        os.makedirs(self._control_dir, mode=0o700)
        for number in range(1, count + 1):
            name = f"spark{number}"
            host_options = hosts.HostOptions(**{**options, **per_host.get(name, {})})
            hosts.prepare(self.name, name, number, subnet, host_options, self.public_key)
        self.write_inventory()
        system.spawn(
            [sys.executable, "-m", "lab.memory", self.name],
            group=system.cgroup(self.name, "memory"),
            log=os.path.join(self.directory, "memory.log"),
        )

    def grow(self, count: int) -> None:
        """Prepare further standard hosts, not booted, until there are ``count``."""
        with system.lock(f"instance-{self.name}"):
            for number in range(len(self.hosts) + 1, count + 1):
                subnet = int(self.info["subnet"])
                hosts.prepare(self.name, f"spark{number}", number, subnet, hosts.HostOptions(), self.public_key)
            self.write_inventory()

    def write_inventory(self, members: Sequence[Host] | None = None) -> None:
        """Write the inventory, as an operator would, of ``members`` (None: all hosts), and known_hosts of all.

        Group variables are those of inventory/lab.
        """
        lines = []
        for host in self.hosts:
            key = system.read(os.path.join(host.directory, "ssh_host_ed25519_key.pub")).split()[:2]
            lines.append(f"{host.address} {' '.join(key)}\n")
        system.write(self.known_hosts, "".join(lines))
        common = [f"-o UserKnownHostsFile={self.known_hosts}", "-o StrictHostKeyChecking=yes"]
        variables = {
            "ansible_ssh_private_key_file": self.private_key,
            "ansible_ssh_common_args": " ".join(common),
            "ansible_control_path_dir": self._control_dir,
            "ansible_python_interpreter": "/usr/bin/python3",
            "lab_hub_url": services.hub_url(self.info["gateway"]),
            "lab_engine_url": services.engine_url(self.info["gateway"]),
        }
        chosen = self.hosts if members is None else members
        listed = {host.name: {"ansible_host": host.address, "ansible_user": host.user} for host in chosen}
        # JSON is YAML: no need for a YAML library here.
        text = json.dumps({"sparks": {"hosts": listed, "vars": variables}}, indent=2)
        system.write(os.path.join(self.inventory, "hosts.yml"), text + "\n")
        link = os.path.join(self.inventory, "group_vars")
        if not os.path.lexists(link):
            os.symlink(os.path.join(system.REPOSITORY, "inventory", "lab", "group_vars"), link)

    def forget_connections(self, host: Host | None = None) -> None:
        """Close ssh's shared connections, which would outlive a host's end."""
        if not os.path.isdir(self._control_dir):
            return
        for name in os.listdir(self._control_dir):
            path = os.path.join(self._control_dir, name)
            system.run(
                ["ssh", "-o", f"ControlPath={path}", "-O", "exit", host.address if host else "x"],
                check=False,
                timeout=5,
            )

    def _clean(self) -> None:
        info = self.info
        self.forget_connections()
        system.cgroup_kill(system.cgroup(self.name))
        if info:
            network.delete_bridge(int(info["subnet"]))
        shutil.rmtree(self.directory, ignore_errors=True)
        with system.lock("subnets"):
            if not instances():
                system.restore_limits()
                with contextlib.suppress(OSError):
                    os.rmdir(system.STATE_DIR)
        if os.path.isdir(self.directory):
            raise LabError(f"{self.directory} cannot be removed: something of it is still mounted or open.")


def instances() -> list[Lab]:
    """All instances on this machine, running or not."""
    try:
        names = sorted(os.listdir(system.STATE_DIR))
    except OSError:
        return []
    return [Lab(name) for name in names if NAME_PATTERN.fullmatch(name)]
