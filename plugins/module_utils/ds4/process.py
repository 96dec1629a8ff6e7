# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One process, read from /proc. Every reader answers with an empty value when the process is gone or not ours to read."""

from __future__ import annotations

import os
import re

_INTERPRETER = re.compile(r"^(python[\d.]*|bash|dash|sh|node|perl|ruby|java)$")
_UNIT = re.compile(r"\.(service|scope|socket|mount|swap)$")

_NO_MANAGER = re.compile(r"^(user@\d+|ssh|sshd|ssh@.*|sshd@.*|cron|crond|atd)\.service$")


def is_number(name: str) -> bool:
    """True for the names of process directories."""
    return name.isascii() and name.isdigit()


def user_name(uid: int) -> str:
    """Name of an account, or its number when it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def unit_of_cgroup(cgroup: str) -> str:
    """Unit of the *system* manager that a control group belongs to, ``""`` for none.

    ``/system.slice/ds4.service/worker`` → ``ds4.service``; ``/user.slice/user-1000.slice/session-3.scope`` →
    ``session-3.scope``; units of a user's own manager give that manager, ``user@1000.service``.
    """
    for part in cgroup.split("/"):
        if _UNIT.search(part):
            return part
    return ""


def manager_of_cgroup(cgroup: str) -> str:
    """Service that looks after a process and may start it again, ``""`` for none: the innermost one.

    Logins, cron and a user's own manager start processes without looking after them.
    """
    services = [part for part in cgroup.split("/") if part.endswith(".service")]
    if not services or _NO_MANAGER.match(services[-1]) or cgroup.rstrip("/").endswith(".scope"):
        return ""
    return services[-1]


class Process:
    """Lazy view of ``/proc/PID``; nothing is cached, since processes come and go."""

    def __init__(self, pid: int, *, proc: str = "/proc") -> None:
        self.pid = pid
        self.directory = f"{proc}/{pid}"

    def _bytes(self, name: str) -> bytes:
        try:
            with open(f"{self.directory}/{name}", "rb") as stream:
                return stream.read()
        except OSError:
            return b""

    def _link(self, name: str) -> str:
        try:
            return os.readlink(f"{self.directory}/{name}")
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        """True while the process exists and is no zombie."""
        return self.state not in ("", "Z", "X")

    @property
    def _stat_fields(self) -> list[str]:
        # The name in brackets may hold blanks and brackets: what follows the last bracket is regular.
        return self._bytes("stat").decode(errors="replace").rpartition(")")[2].split()

    @property
    def state(self) -> str:
        """One letter (``R``, ``S``, ``D``, ``Z``…), ``""`` when gone."""
        fields = self._stat_fields
        return fields[0] if fields else ""

    @property
    def parent(self) -> int:
        """Pid of the parent, 0 when gone."""
        fields = self._stat_fields
        return int(fields[1]) if len(fields) > 1 else 0

    def lineage(self) -> list[int]:
        """Its own pid, its parent's, and so on up to the first process."""
        pids: list[int] = []
        process = self
        while process.pid > 0 and process.pid not in pids:
            pids.append(process.pid)
            process = Process(process.parent, proc=os.path.dirname(self.directory))
        return pids

    @property
    def started_ticks(self) -> int:
        """Start time in clock ticks since boot: with the pid, the identity of a process."""
        fields = self._stat_fields
        return int(fields[19]) if len(fields) > 19 else 0

    @property
    def uid(self) -> int:
        """Owner's real number, -1 when gone."""
        match = re.search(r"^Uid:\s+(\d+)", self._bytes("status").decode(errors="replace"), re.M)
        return int(match.group(1)) if match else -1

    @property
    def user(self) -> str:
        """Owner's name, ``""`` when gone."""
        uid = self.uid
        return user_name(uid) if uid >= 0 else ""

    @property
    def argv(self) -> list[str]:
        """Full command line. Can hold secrets of other people's programs: show ``program`` instead."""
        text = self._bytes("cmdline").decode(errors="replace").removesuffix("\0")  # a last word may be empty
        return text.split("\0") if text else []

    @property
    def name(self) -> str:
        """Last path component of argv[0], as ``ps`` users know the program; the kernel's name for kernel threads."""
        argv = self.argv
        return os.path.basename(argv[0]) if argv else self._bytes("comm").decode(errors="replace").strip()

    @property
    def program(self) -> str:
        """What runs, without its arguments (they can hold secrets): path, and the script of an interpreter."""
        argv = self.argv
        if not argv:
            return self.name
        if not _INTERPRETER.match(os.path.basename(argv[0])):
            return argv[0]
        for index, word in enumerate(argv[1:], 1):
            if word in ("-m", "-jar") and index + 1 < len(argv):
                return f"{argv[0]} {word} {argv[index + 1]}"
            if word in ("-c", "-e"):  # program text: never shown
                return f"{argv[0]} {word} …"
            if not word.startswith("-"):
                return f"{argv[0]} {word}"
        return argv[0]

    @property
    def executable(self) -> str:
        """Path of the running file, `` (deleted)`` kept when it was replaced; ``""`` when unreadable."""
        return self._link("exe")

    @property
    def cwd(self) -> str:
        """Working directory, ``""`` when unreadable."""
        return self._link("cwd")

    @property
    def cgroup(self) -> str:
        """Control group path in the hierarchy that systemd uses."""
        paths = {}
        for line in self._bytes("cgroup").decode(errors="replace").splitlines():
            _number, controllers, path = [*line.split(":", 2), "", ""][:3]
            paths[controllers] = path
        named = [paths.get(controllers, "") for controllers in ("name=systemd", "")]
        # On a hybrid host, or in a container of one, the hierarchy that nobody uses says "/".
        return next((path for path in named if path.strip("/")), named[0] or named[1])

    @property
    def unit(self) -> str:
        """See ``unit_of_cgroup``."""
        return unit_of_cgroup(self.cgroup)

    @property
    def manager(self) -> str:
        """See ``manager_of_cgroup``."""
        return manager_of_cgroup(self.cgroup)

    def environment(self, *names: str) -> dict[str, str]:
        """The named variables of its environment that are set. Only named ones are ever returned."""
        found = {}
        for item in self._bytes("environ").decode(errors="replace").split("\0"):
            key, _equals, value = item.partition("=")
            if key in names:
                found[key] = value
        return found

    def status_kib(self, field: str) -> int:
        """A size from ``status`` (``RssAnon``, ``RssShmem``…) in KiB, 0 when absent."""
        match = re.search(rf"^{field}:\s+(\d+) kB", self._bytes("status").decode(errors="replace"), re.M)
        return int(match.group(1)) if match else 0

    def descriptors(self) -> list[tuple[str, str]]:
        """(number, target) of every open descriptor; empty without permission."""
        folder = f"{self.directory}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        return [(name, target) for name in names if (target := self._link(f"fd/{name}"))]

    def mapped_files(self, suffix: str) -> list[str]:
        """Paths of mapped files that end in ``suffix``, each once, sorted; empty without permission."""
        paths = set()
        for line in self._bytes("maps").decode(errors="replace").splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].endswith(suffix):
                paths.add(fields[5])
        return sorted(paths)
