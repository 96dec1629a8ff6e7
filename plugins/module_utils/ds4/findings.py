# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judge a host by what the probes read: pure functions, run on the controller. The texts are in findings.yml."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from .errors import Ds4Error
from .files import human_bytes
from .gpu import QUERY
from .toolkit import version_key

PHASES = ("stage", "switch", "note")
PYTHON_MINIMUM = "3.9"
_GIB_KIB = 1024 * 1024
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_SYSTEMD_AT_WORK = ("starting", "running", "degraded")  # the other states take no new work, or none that lasts
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph")
# Where the number of each recorded version is asked by hand.
_VERSION_COMMANDS = {
    "kernel": "uname -r",
    "bios": "dmidecode -s bios-version",
    "vbios": "nvidia-smi --query-gpu=vbios_version --format=csv",
    "dgx": "cat /etc/dgx-release",
}

Row = Mapping[str, Any]


def as_bool(value: Any) -> bool:
    """The one place where a policy's yes or no is read: ``-e x=false`` is a word, ``-e '{"x": false}'`` is not.

    Raises:
        Ds4Error: neither yes nor no.
    """
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1", "y", "t", "1.0"):
        return True
    if word in ("false", "no", "off", "0", "n", "f", "0.0", ""):
        return False
    raise Ds4Error("A value is neither yes nor no", found=repr(value), required="true or false", cure="correct it")


def as_names(value: Any) -> list[str]:
    """A list of names; a single string may hold several, separated by commas."""
    if value is None:
        return []
    items = value.split(",") if isinstance(value, str) else value
    return [name for item in items if (name := str(item).strip())]


def _gib(kib: float) -> str:
    return f"{kib / _GIB_KIB:.1f} GiB"


def _process(row: Row) -> str:
    """``pid 812 of alice (/usr/bin/x, in x.service)``; a word for each part that is unknown."""
    text = f"pid {row['pid']}" if row.get("pid") else "a process that cannot be seen"
    text += f" of {row['user']}" if row.get("user") else ""
    inside = [str(row[key]) for key in ("command",) if row.get(key)] + (
        [f"in {row['unit']}"] if row.get("unit") else []
    )
    return text + (f" ({', '.join(inside)})" if inside else "")


def _listed(items: Iterable[str], limit: int = 6) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


# ---------------------------------------------------------------------------------------------------- memory


def cuda_tenants(processes: Iterable[Row], engines: Iterable[int], desktop_programs: Iterable[str]) -> list[Row]:
    """Programs with CUDA memory that are neither ``engines`` (pids) nor of the desktop, which holds little of it."""
    engines, desktop = set(engines), set(desktop_programs)
    return [
        row
        for row in processes
        if row["pid"] not in engines and str(row["command"]).partition(" ")[0].rpartition("/")[2] not in desktop
    ]


def engine_hold_kib(memory: Row, tenants: Sequence[Row], engines: Sequence[Row], residue_gib: float) -> int:
    """Memory in KiB that ``engines`` will give back when they end, as far as it can be known on unified memory.

    On GB10 an engine's weights and KV were allocated by the GPU driver. They are in no resident set and under no name
    in meminfo: they are the unavailable memory that is not booked elsewhere, less ``residue_gib`` that the driver and
    the firmware keep in any case. When other programs (``tenants``) hold CUDA memory too, that remainder cannot be
    divided; then only the size of the weights files counts, a lower bound.
    """
    if not engines:
        return 0
    unavailable = int(memory["mem_total_kib"]) - int(memory["mem_available_kib"])
    own = sum(int(engine["resident_kib"]) for engine in engines)
    booked_elsewhere = max(0, int(memory["booked_kib"]) - own)
    remainder = max(0, unavailable - booked_elsewhere - round(residue_gib * _GIB_KIB))
    if tenants:
        weights = sum(int(engine["weights_bytes"]) for engine in engines) // 1024
        return min(remainder, weights + own)
    return remainder


# ------------------------------------------------------------------------------------------------------ disks


def disk_groups(needs: Sequence[Row], disks: Sequence[Row], measured: Sequence[Row]) -> list[dict[str, Any]]:
    """Add needs up per file system, with credit for bytes that are already there.

    Args:
        needs: ``{path, bytes, what, present: [paths], complete, variable}``; ``present`` names files and folders whose
            bytes already count, if they lie on the same file system; once the path ``complete`` exists, nothing more is
            written; ``variable`` is what moves the path.
        disks, measured: of ``spark_host_info``. A measured file counts for a need when its name is one of ``present``,
            wherever it lies: weights of a running engine are adopted by a link.

    Returns:
        One row per file system, in the order of the needs: ``{disk, needs, bytes, credit}``.
    """
    by_path = {row["path"]: row for row in disks}
    groups: dict[str, dict[str, Any]] = {}
    for need in needs:
        disk = by_path[need["path"]]
        names = {_stem(path) for path in need.get("present") or []}
        there: dict[str, int] = {}  # a file that is there twice (partial, elsewhere) counts once
        for row in measured:
            stem = _stem(row["path"])
            if stem in names and row["device"] == disk["device"]:
                there[stem] = max(there.get(stem, 0), int(row["bytes"]))
        group = groups.setdefault(str(disk["device"]), {"disk": disk, "needs": [], "bytes": 0, "credit": 0})
        group["needs"].append(need)
        group["bytes"] += int(need["bytes"])
        complete = bool(need.get("complete")) and by_path[need["complete"]]["exists"]
        group["credit"] += int(need["bytes"]) if complete else min(int(need["bytes"]), sum(there.values()))
    return list(groups.values())


def _stem(path: str) -> str:
    """Name of a file, the same for its hidden partial copy (``.NAME.part``)."""
    return str(path).rstrip("/").rpartition("/")[2].removeprefix(".").removesuffix(".part")


# ------------------------------------------------------------------------------------------------------ fleet


def versions_of(gpu: Row, host: Row) -> dict[str, str]:
    """The recorded versions of a host, ``""`` where unknown: kernel, dgx, driver, bios, vbios."""
    gpus = gpu.get("gpus") or [{}]
    return {
        "kernel": str(host.get("kernel", "")),
        "dgx": str((host.get("dgx") or {}).get("version", "")),
        "driver": str(gpu.get("driver", "")),
        "bios": str((host.get("firmware") or {}).get("bios_version", "")),
        "vbios": str(gpus[0].get("vbios", "")),
    }


def fleet_drift(probes: Mapping[str, Mapping[str, Row]]) -> dict[str, list[str]]:
    """Which hosts differ from the majority of their fleet, and in what.

    Args:
        probes: host → ``{gpu, host}``, the results of the probes.

    Returns:
        host → sentences such as ``kernel is 6.14 here, 6.17 on spark-b and 2 more``. BIOS and VBIOS are compared among
        hosts of the same product only. Unknown values are left out. A tie is told to all but the first host's side.
    """
    drift: dict[str, list[str]] = {name: [] for name in probes}
    for component in ("kernel", "dgx", "driver", "bios", "vbios"):
        classes: dict[str, dict[str, str]] = {}
        for name, probe in probes.items():
            value = versions_of(probe["gpu"], probe["host"])[component]
            product = str((probe["host"].get("firmware") or {}).get("product_name", ""))
            if value:
                classes.setdefault(product if component in ("bios", "vbios") else "", {})[name] = value
        for values in classes.values():
            usual, _count = Counter(values.values()).most_common(1)[0]  # ties: the first seen wins
            majority = [name for name, value in values.items() if value == usual]
            for name, value in values.items():
                if value != usual:
                    more = f" and {len(majority) - 1} more" if len(majority) > 1 else ""
                    drift[name].append(f"{component} is {value} here, {usual} on {majority[0]}{more}")
    return drift


# ------------------------------------------------------------------------------------------------------ judge


class _Judge:
    """Collects findings of one host; each ``_x`` method judges one area and never stops another."""

    def __init__(self, gpu: Row, memory: Row, host: Row, policy: Row, catalogue: Mapping[str, Row]) -> None:
        self.gpu, self.memory, self.host, self.policy, self.catalogue = gpu, memory, host, policy, catalogue
        self.findings: list[dict[str, Any]] = []
        self.replaced: list[Row] = []  # engines that the switch will end, so their memory comes back

    def add(self, identity: str, *, unknown: bool = False, cures: Sequence[str] = (), **words: Any) -> None:
        """Make a finding; ``cures`` are names out of the entry's ``cures``, where what helps depends on what was found."""
        entry = self.catalogue[identity]
        cure = entry["unknown"] if unknown else entry["cure"]
        if cures:
            words["cures"] = ", or ".join(str(entry["cures"][name]).format(**words) for name in cures)
        self.findings.append(
            {
                "id": identity,
                "phase": entry["phase"],
                "allow": entry["allow"],
                "allowed_phase": entry.get("allowed_phase", ""),
                "what": str(entry["what"]).format(**words),
                "found": str(entry["found"]).format(**words),
                "required": str(entry["required"]).format(**words),
                "cure": str(cure).format(**words),
            }
        )

    def judge(self, now: float | None, drift: Sequence[str]) -> None:
        self._allow()
        gpu, memory, host = (key in result for key, result in self._probes())
        self._unanswered()
        if host:
            self._system()
            self._names()
            self._disks()
            self._clock(now)
            self._engines()
        if memory:
            self._memory_now()
            if host:
                self._memory_then()
        if gpu:
            self._gpu()
            self._toolkit()
        self._versions()
        if drift:
            self.add("drift", found=_listed(drift))

    def _probes(self) -> tuple[tuple[str, Row], ...]:
        """A key that every sound result has, and the result."""
        return (("diagnosis", self.gpu), ("mem_available_kib", self.memory), ("architecture", self.host))

    def _unanswered(self) -> None:
        """One finding for each reason why probes failed: a missing password stops all of them."""
        silent: dict[str, list[str]] = {}
        for name, (key, result) in zip(("gpu", "memory", "host"), self._probes()):
            if key not in result:
                parts = [str(result.get(part) or "").strip()[-400:] for part in ("msg", "module_stderr")]
                silent.setdefault(" ".join(filter(None, parts)) or "no result", []).append(name)
        for said, names in silent.items():
            self.add(
                "probe",
                probe=", ".join(names),
                first=names[0],
                found=" ".join(said.split()),
                cures=[_way_in(said)],
            )

    def _allow(self) -> None:
        known = sorted({str(entry["allow"]) for entry in self.catalogue.values() if entry["allow"]})
        unknown = [name for name in as_names(self.policy["allow"]) if name not in known]
        if unknown:
            self.add("allow", found=", ".join(unknown), required=", ".join(known))

    # -------------------------------------------------------------------------------------- system and names

    def _system(self) -> None:
        host, policy = self.host, self.policy
        if host["euid"] != 0:
            self.add("root", found=host["euid"])
        if version_key(host["python"]["version"]) < version_key(PYTHON_MINIMUM):
            python = host["python"]
            self.add("python", found=f"{python['version']} ({python['executable']})", required=PYTHON_MINIMUM)
        systemd = host["systemd"]
        if not systemd["running"]:
            self.add("systemd", found="no /run/systemd/system", cures=["no_init"])
        elif systemd["state"] not in _SYSTEMD_AT_WORK:
            found = f"systemd says {systemd['state']}" if systemd["state"] else "no answer of systemd"
            self.add("systemd", found=found, cures=["state"], unknown=not systemd["state"])
        if host["architecture"] != policy["architecture"]:
            self.add("architecture", found=host["architecture"] or "unknown", required=policy["architecture"])
        if host["missing_commands"]:
            bring: Row = policy["commands"]
            missing = [str(name) for name in host["missing_commands"]]
            packages = " ".join(dict.fromkeys(str(bring[name]) for name in missing))
            self.add("commands", found=", ".join(missing), required=", ".join(bring), packages=packages)
        if host["missing_packages"] is None:
            names = as_names(policy["packages"])
            self.add("packages", required=", ".join(names), names=" ".join(names))
        elif host["missing_packages"] and host["package_locks"]:
            holders = _listed(f"{_process(row)} holds {row['path']}" for row in host["package_locks"])
            self.add("packages_busy", found=holders, missing=", ".join(host["missing_packages"]))
        absent = [str(row["path"]) for row in host["mounts"] if not row["mounted"]]
        if absent:
            required = ", ".join(str(row["path"]) for row in host["mounts"])
            self.add("mount", found=", ".join(absent), required=f"mounts on {required}", first=absent[0])

    def _names(self) -> None:
        units = [row for row in self.host["units"] if row["exists"] and not row["ours"]]
        masked = [str(row["name"]) for row in units if row["found"] == os.devnull]
        if masked:
            self.add("masked_unit", found=_listed(masked), names=" ".join(masked))
        units = [row for row in units if row["name"] not in masked]
        if units:
            names = " ".join(str(row["name"]) for row in units)
            self.add("foreign_unit", found=_listed(str(row["path"]) for row in units), names=names)
        users = [row for row in self.host["users"] if row["exists"] and not row["ours"]]
        if users:
            self.add("foreign_user", found=_listed(f"{row['name']} ({row['found']})" for row in users))
        for identity, key in (("foreign_directory", "directories"), ("foreign_file", "files")):
            rows = [row for row in self.host[key] if row["exists"] and not row["ours"] and not row.get("empty")]
            if rows:
                self.add(identity, found=_listed(f"{row['path']} ({row['found']})" for row in rows))

    def _clock(self, now: float | None) -> None:
        clock = self.host["clock"]
        limit = int(self.policy["clock_skew_seconds"])
        skew = 0 if now is None else round(clock["epoch"] - now)
        if abs(skew) > limit:
            self.add("clock", found=clock["utc"], skew=_duration(skew), required=_duration(limit).lstrip("+"))
        elif abs(skew) > int(self.policy["clock_drift_seconds"]) and clock["ntp_synchronized"] is not True:
            self.add("clock_unsynchronized", found=f"{_duration(skew)} against the controller")

    # ----------------------------------------------------------------------------------------- GPU, toolkit

    def _gpu(self) -> None:
        gpu, policy = self.gpu, self.policy
        diagnosis = gpu["diagnosis"]
        if diagnosis != "ok":
            self.add(
                f"gpu_{diagnosis}",
                found=gpu["text"],
                module=gpu["kernel_module"] or "unknown",
                seconds=policy["timeout_seconds"],
                command=" ".join(QUERY),
            )
            return
        if len(gpu["gpus"]) > 1:
            self.add(
                "gpu_count", found=_listed(f"{row['name']} {row['compute_cap'] or 'unknown'}" for row in gpu["gpus"])
            )
        wanted = str(policy["compute_cap"])
        wrong = [row for row in gpu["gpus"] if row["compute_cap"] != wanted]
        if wrong:
            found = _listed(f"{row['compute_cap'] or 'unknown'} ({row['name']})" for row in wrong)
            self.add("compute_cap", found=found, required=wanted, unknown=not wrong[0]["compute_cap"])
        self._driver()

    def _driver(self) -> None:
        driver = str(self.gpu["driver"])
        limits: Row = self.policy["versions"].get("driver") or {}
        minimum = str(limits.get("minimum") or "")
        if minimum and version_key(driver) < version_key(minimum):
            self.add("driver_old", found=driver or "unknown", required=minimum, unknown=not driver)
        bad = _known_bad(driver, limits)
        if bad is not None:
            self.add("driver_bad", found=driver, reason=bad)

    def _toolkit(self) -> None:
        toolkit = self.gpu["toolkit"]
        table: Row = self.policy["cuda_minimums"]
        known = [row["compute_cap"] for row in self.gpu["gpus"] if row["compute_cap"]]
        capability = str(known[0] if len(known) == 1 else self.policy["compute_cap"])
        minimum = str(self.policy["cuda_minimum"] or table.get(capability) or table["other"])
        if not toolkit["nvcc"]:
            self.add("toolkit_missing", found=toolkit["text"], required=minimum)
            return
        version = str(toolkit["version"])
        found = f"{version} ({toolkit['nvcc']})"
        others = [str(c["nvcc"]) for c in toolkit["candidates"] if c["version"] and c["nvcc"] != toolkit["nvcc"]]
        if version_key(version) < version_key(minimum):
            fit = [c["nvcc"] for c in toolkit["candidates"] if version_key(c["version"]) >= version_key(minimum)]
            self.add("toolkit_old", found=found, required=minimum, hint=f" (there is {fit[0]})" if fit else "")
        elif toolkit["missing"]:
            missing = ", ".join(map(str, toolkit["missing"]))
            wanted = ", ".join(as_names(self.policy["toolkit_files"]))
            self.add("toolkit_incomplete", home=toolkit["home"], found=missing, required=wanted)
        supported = str(self.gpu["cuda_supported"])
        if self.gpu["diagnosis"] == "ok" and not supported:
            self.add("toolkit_newer", found=found, driver="unknown", hint="", unknown=True)
        elif supported and version_key(str(toolkit["release"])) > version_key(supported):
            hint = f" (there is {', '.join(others)})" if others else ""
            self.add("toolkit_newer", found=found, driver=supported, hint=hint)

    # --------------------------------------------------------------------------------------- engines, memory

    def _ours(self, process: Row) -> bool:
        unit = str(self.policy["unit"])
        if process["unit"] != unit:
            return False
        rows = [row for row in self.host["units"] if row["name"] == unit]
        return any(
            row["ours"] or (process.get("deployment") and not row["exists"]) for row in rows
        )  # its unit may be lost

    def _engines(self) -> None:
        host, policy = self.host, self.policy
        adopt = as_bool(policy["adopt"])
        engines = {row["pid"]: row for row in host["ds4_processes"]}
        ours = [row for row in engines.values() if self._ours(row)]
        foreign = [row for row in engines.values() if not self._ours(row)]
        taken, holders = (
            [row for row in host[key] if row["pid"] not in engines and not self._ours(row)]
            for key in ("listeners", "engine_lock")
        )
        # Exactly one server can be taken over: which of several serves, and what would come back after a failure?
        single = len(foreign) == 1 and foreign[0]["program"] == "ds4-server" and not taken and not holders
        adopted = foreign if adopt and single else []
        self.replaced = ours + adopted
        for row in foreign:
            if row not in adopted:
                self.add(
                    "engine",
                    found=self._engine_text(row),
                    unit=policy["unit"],
                    cures=self._engine_cures(row, single),
                    pid=row["pid"],
                    user=row["user"],
                    manager=row["manager"],
                )
        if taken:
            where = _listed(dict.fromkeys(f"{_process(row)} on {row['address']}" for row in taken))
            self.add("port", port=policy["port"], found=where, unknown=any(row["pid"] is None for row in taken))
        if holders:
            unknown = any(not row["pid"] for row in holders)
            self.add("engine_lock", found=_listed(map(_process, holders)), path=policy["lock_path"], unknown=unknown)

    @staticmethod
    def _engine_text(row: Row) -> str:
        command = row["argv"][0] if row["argv"] else row["program"]
        parts = [_process({**row, "command": command})]
        if row["port"]:
            parts.append(f"port {row['port']}")
        if row["weights"]:
            parts.append(f"weights {_listed(map(str, row['weights']), 2)}")
        return ", ".join(parts)

    @staticmethod
    def _engine_cures(row: Row, single: bool) -> list[str]:
        end = "end"
        if row["manager"]:
            end = "user_unit" if str(row["unit"]).startswith("user@") else "unit"
        if row["program"] != "ds4-server":
            return ["wait", end]
        return ["take_over" if single else "others", end]

    def _memory_now(self) -> None:
        memory, policy = self.memory, self.policy
        total, available = int(memory["mem_total_kib"]), int(memory["mem_available_kib"])
        minimum = float(policy["memory_total_gib"]) * _GIB_KIB
        if total < minimum:
            self.add("memory_total", found=_gib(total), required=_gib(minimum))
        floor = float(policy["memory_staging_gib"]) * _GIB_KIB
        if available < floor:
            who = self._holders()
            self.add("memory_staging", found=_gib(available), required=_gib(floor), holders=f" ({who})" if who else "")

    def _memory_then(self) -> None:
        """Memory once the engines that will be replaced have ended and the desktop has gone, if it is to go."""
        memory, policy = self.memory, self.policy
        tenants = self._tenants()
        staying = [row for row in self.host["ds4_processes"] if row not in self.replaced]
        hold = engine_hold_kib(memory, tenants + staying, self.replaced, float(policy["memory_residue_gib"]))
        gain = round(float(policy["memory_serving_mode_gib"]) * _GIB_KIB) if self.host["display"] else 0
        required = float(policy["memory_required_gib"]) * _GIB_KIB
        short = required - int(memory["mem_available_kib"]) - hold - gain
        if short > 0:
            self._memory_short(short, hold, gain, required)
        if tenants:
            self.add("cuda_tenant", found=_listed(map(_process, tenants)))

    def _tenants(self) -> list[Row]:
        engines = [row["pid"] for row in self.host.get("ds4_processes", [])]
        return cuda_tenants(self.host.get("cuda_processes", []), engines, as_names(self.policy["desktop_programs"]))

    def _memory_short(self, short: float, hold: int, gain: int, required: float) -> None:
        memory = self.memory
        found = f"{_gib(memory['mem_available_kib'])} MemAvailable"
        if hold:
            found += f" + {_gib(hold)} that {_listed(_process(row) for row in self.replaced)} will give back"
        if gain:
            found += f" + {_gib(gain)} expected from serving mode"
        found += (
            f"; of {_gib(memory['mem_total_kib'])} MemTotal, {_gib(memory['mem_free_kib'])} are MemFree and "
            f"{_gib(memory['cached_kib'])} page cache"
        )
        desktop = [row for row in self.host["sessions"] or [] if row["graphical"]]
        who = self._holders()
        cures = ["holders"] if who else []
        if (desktop or self.host["remote_desktops"] or self.host["display"]) and not gain:
            cures.append("desktop")
        people = ", ".join(dict.fromkeys(str(row["user"]) for row in desktop))
        self.add(
            "memory",
            found=found,
            required=_gib(required),
            short=_gib(short),
            cures=[*cures, "smaller"],
            who=who,
            people=people or ("a remote desktop" if self.host["remote_desktops"] else "the login screen"),
        )

    def _holders(self) -> str:
        """The largest holders of memory that are no engine we replace: CUDA programs first, their figure is unknown."""
        replaced = {row["pid"] for row in self.replaced}
        cuda = [f"{_process(row)} with CUDA memory" for row in self._tenants()]
        large = [
            f"{_process(row)} {_gib(row['resident_kib'])}"
            for row in self.memory["processes"]
            if row["pid"] not in replaced and row["resident_kib"] >= _GIB_KIB
        ]
        files = [
            f"files in {row['path']} {_gib(row['used_kib'])}"
            for row in self.memory["tmpfs"]
            if row["used_kib"] >= _GIB_KIB
        ]
        return _listed(cuda + large + files, 4)

    # ------------------------------------------------------------------------------------------------- disks

    def _disks(self) -> None:
        margin = round(float(self.policy["disk_margin_gib"]) * 1024**3)
        for group in disk_groups(self.policy["disk_needs"], self.host["disks"], self.host["measured"]):
            disk, needs = group["disk"], group["needs"]
            named = list(dict.fromkeys(str(need["variable"]) for need in needs if need.get("variable")))
            words = {
                "mount": disk["mount"],
                "source": disk["source"] or "unknown device",
                "filesystem": disk["filesystem"] or "unknown file system",
                "what": ", ".join(dict.fromkeys(str(need["what"]) for need in needs)),
                "variables": f" ({', '.join(named)})" if named else "",
            }
            if disk["read_only"]:
                self.add("disk_read_only", **words)
            if disk["filesystem"] in _MEMORY_FILESYSTEMS:
                self.add("disk_in_memory", **words)
            if disk["filesystem"] in _NETWORK_FILESYSTEMS:
                self.add("disk_network", **words)
            missing = group["bytes"] - group["credit"]
            needed = missing + margin if missing else 0  # a host that has everything needs no reserve to stay as it is
            if disk["free_bytes"] < needed:
                parts = [f"{need['what']} {human_bytes(int(need['bytes']))}" for need in needs]
                parts.append(f"margin {human_bytes(margin)}")
                there = f", less {human_bytes(group['credit'])} already there" if group["credit"] else ""
                words["found"] = human_bytes(disk["free_bytes"])
                words["required"] = f"{human_bytes(needed)} ({' + '.join(parts)}{there})"
                words["short"] = human_bytes(needed - disk["free_bytes"])
                self.add("disk", **words)

    # ---------------------------------------------------------------------------------------------- versions

    def _versions(self) -> None:
        found = versions_of(self.gpu, self.host)
        for component, command in _VERSION_COMMANDS.items():
            limits: Row = self.policy["versions"].get(component) or {}
            minimum = str(limits.get("minimum") or "")
            version = found[component]
            if minimum and version_key(version) < version_key(minimum):
                words = {"component": component, "command": command, "required": minimum}
                self.add("version_old", found=version or "unknown", unknown=not version, **words)
            bad = _known_bad(version, limits)
            if bad is not None:
                self.add("version_bad", component=component, found=version, reason=bad)


def _way_in(said: str) -> str:
    """Which cure fits what Ansible or sudo said when no probe could run."""
    words = said.lower()
    if "timed out after" in words:
        return "slow"
    if "must have a tty" in words:
        return "terminal"
    if any(part in words for part in ("not in the sudoers", "is not allowed to", "may not run sudo")):
        return "sudoers"
    return "password" if "password" in words or "sudo" in words else "look"


def _known_bad(version: str, limits: Row) -> Optional[str]:
    """Reason (`` (…)`` or ``""``) when a version is on the list, else None. Entries may use ``*``."""
    for item in limits.get("known_bad") or []:
        entry = item if isinstance(item, Mapping) else {"version": item}
        if version and fnmatch.fnmatchcase(version, str(entry["version"])):
            return f" ({entry['reason']})" if entry.get("reason") else ""
    return None


def _duration(seconds: float) -> str:
    amount = abs(seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if amount >= size:
            return f"{seconds / size:+.1f} {unit}"
    return f"{seconds:+.0f} s"


# -------------------------------------------------------------------------------------------------------- text


def render(name: str, findings: Sequence[Row], *, heading: str) -> str:
    """Findings of one host as one message."""
    lines = [f"{name}: {heading}"]
    for number, item in enumerate(findings, 1):
        lines.append(f"  {number}. {item['what']}.")
        lines.append(f"     found:    {item['found']}")
        lines.append(f"     required: {item['required']}")
        lines.append(f"     cure:     {item['cure']}.")
        if item["allow"]:
            still = f" (it then stops the {item['allowed_phase']})" if item["allowed_phase"] else ""
            lines.append(f"     override: host_verify_allow: [{item['allow']}]{still}")
    return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def judge_host(
    gpu: Row,
    memory: Row,
    host: Row,
    policy: Row,
    catalogue: Mapping[str, Row],
    *,
    name: str = "this host",
    now: float | None = None,
    drift: Sequence[str] = (),
) -> dict[str, Any]:
    """Judge one host.

    Args:
        gpu, memory, host: results of ``spark_gpu_info``, ``spark_memory_info`` and ``spark_host_info``; one that failed
            is a finding of its own.
        policy: limits and names, the variables of host_verify without their prefix.
        catalogue: content of findings.yml.
        name: of the host, for the message.
        now: seconds since 1970 on the controller; None leaves the clock's value unjudged.
        drift: sentences of ``fleet_drift`` for this host.

    Returns:
        ``findings`` (``{id, phase, what, found, required, cure, allow, allowed_phase}``, without the allowed ones, or
        with the phase that stays), ``allowed`` (the overridden ones), ``ok_stage``, ``ok_switch``, ``stop`` (whether the host must not go on), ``text`` (everything, ``""`` when there is nothing to say),
        ``text_switch`` (what stops the switch), ``versions``, ``summary`` (a ``ds4_summary``).
    """
    work = _Judge(gpu, memory, host, policy, catalogue)
    work.judge(now, drift)
    allowed_names = set(as_names(policy["allow"]))
    allowed = [
        item for item in work.findings if item["allow"] and item["allow"] in allowed_names and item["phase"] != "note"
    ]
    kept = [item for item in work.findings if item not in allowed]
    # What may be allowed for building and fetching can still keep every engine from starting.
    kept += [{**item, "phase": item["allowed_phase"], "allow": ""} for item in allowed if item["allowed_phase"]]
    kept.sort(key=lambda item: PHASES.index(item["phase"]))
    by_phase = {phase: [item for item in kept if item["phase"] == phase] for phase in PHASES}
    stage, switch, notes = (by_phase[phase] for phase in PHASES)
    parts = []
    if stage:
        parts.append(render(name, stage, heading=f"{_count(len(stage), 'problem')}; nothing was touched."))
    if switch:
        more = "would stop the switch." if stage else "will stop the switch; building and fetching can go on."
        heading = f"{_count(len(switch), 'problem')} that {more}"
        parts.append(render(name, switch, heading=heading))
    if allowed:
        lines = [f"  - {item['what']} (found: {item['found']}; required: {item['required']})" for item in allowed]
        parts.append("\n".join([f"{name}: overridden by host_verify_allow.", *lines]))
    if notes:
        lines = [
            f"  - {item['what']}: {item['found']}. {item['cure'][:1].upper()}{item['cure'][1:]}." for item in notes
        ]
        parts.append("\n".join([f"{name}: {_count(len(notes), 'note')}.", *lines]))
    return {
        "findings": kept,
        "allowed": allowed,
        "ok_stage": not stage,
        "stop": bool(stage),
        "ok_switch": not stage and not switch,
        "text": "\n".join(parts),
        "text_switch": render(name, stage + switch, heading="cannot be switched.") if stage or switch else "",
        "versions": versions_of(gpu, host),
        "summary": {
            **_summary(gpu, memory, stage, switch, notes, allowed),
            "product": str((host.get("firmware") or {}).get("product_name", "")),
            "versions": versions_of(gpu, host),
        },
    }


def _summary(
    gpu: Row, memory: Row, stage: Sequence[Row], switch: Sequence[Row], notes: Sequence[Row], allowed: Sequence[Row]
) -> dict[str, Any]:
    if stage:
        text = f"{_count(len(stage), 'problem')}: {', '.join(str(item['id']) for item in stage)}"
    else:
        card = (gpu.get("gpus") or [{}])[0]
        text = f"{card.get('name') or 'no GPU'} {card.get('compute_cap', '')}, driver {gpu.get('driver') or 'unknown'}"
        text += f", {_gib(memory.get('mem_available_kib', 0))} available"
    if switch:
        text += f"; stops the switch: {', '.join(str(item['id']) for item in switch)}"
    if allowed:
        text += f"; OVERRIDDEN: {', '.join(dict.fromkeys(str(item['allow']) for item in allowed))}"
    if notes:
        text += f"; notes: {', '.join(dict.fromkeys(str(item['id']) for item in notes))}"
    return {
        "room": "host_verify",
        "state": "failed" if stage else "ok",
        "text": text,
        "findings": [str(item["id"]) for item in (*stage, *switch, *notes)],
        "allowed": list(dict.fromkeys(str(item["allow"]) for item in allowed)),
    }
