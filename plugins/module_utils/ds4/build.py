# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From a pinned commit to an immutable build directory: clone, compile, check, publish by rename.

A build is known by its commit: ``<builds>/<tag>-<first 8 digits>``, with ``.2``, ``.3``… for one made beside it (forced,
for another architecture, or because the older one is damaged). The same commit under two tags is two builds, since the
tag is what the engine calls its version. ``build.json`` in the directory is its record (docs/schemas/build.schema.json).

The compiler runs in a transient systemd unit, so a lost connection costs nothing: the next run attaches to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import glob
import hashlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from . import toolkit
from .command import SEARCH_PATH, Ran, run, which
from .errors import Ds4Error
from .files import digest, fsync_directory, is_ours, mark, read_json, write_json
from .memory import read_meminfo
from .pin import COMMIT, TAG

SCHEMA = 1
RECORD = "build.json"
SERVER = "ds4-server"
UNIT = "ds4-build.service"
LOG = "build.log"
LOG_LINES = 40
FETCH_PAUSES = (2.0, 8.0)  # seconds between attempts
_ARCH = re.compile(r"^arch = (\S+)", re.MULTILINE)

Runner = Callable[..., Ran]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Parameters of a build, as module ds4_build documents them."""

    repository: str
    release: str
    commit: str
    builds_dir: str
    state_dir: str
    user: str
    cuda_home: str
    nvcc: str
    cuobjdump: str
    arch: str
    make_target: str
    expected_binaries: Sequence[str]
    expected_sass: str
    jobs: int
    memory_floor_mib: int
    memory_per_job_mib: int
    timeout_seconds: int
    environment: Mapping[str, str]
    force: bool = False

    @property
    def id(self) -> str:
        return f"{self.release or 'untagged'}-{self.commit[:8]}"

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.release or 'commit'} ({self.commit[:8] or 'commit not known yet'})"


def check_parameters(wanted: Wanted) -> None:
    """Refuse what cannot be right, all of it in one message.

    Raises:
        Ds4Error: names, ids or an address that cannot be used.
    """
    wrong = []
    if wanted.release and (not TAG.fullmatch(wanted.release) or ".." in wanted.release):
        wrong.append(f"release {wanted.release!r} is not a tag name")
    if wanted.commit and not COMMIT.fullmatch(wanted.commit):
        wrong.append(f"commit {wanted.commit!r} is not 40 hex digits")
    if not wanted.release and not wanted.commit:
        wrong.append("neither a release nor a commit is given")
    if re.match(r"[a-z+]+://[^/@]*:[^/@]*@", wanted.repository):
        wrong.append("the repository's address contains a password (use the host's git credential helper instead)")
    if wanted.repository.startswith("-"):
        wrong.append(f"repository {wanted.repository!r} is not an address")
    if not re.fullmatch(r"sm_\d+[af]?", wanted.arch):
        wrong.append(f"arch {wanted.arch!r} is not like sm_121")
    if SERVER not in wanted.expected_binaries:
        wrong.append(f"{SERVER} is not among the expected binaries")
    if wrong:
        raise Ds4Error(
            "The engine cannot be built with these parameters",
            found="; ".join(wrong),
            cure="correct ds4_release, ds4_commit or the cuda_build_ variables",
        )


# ------------------------------------------------------------------------------------------------ what is there already


class Found(NamedTuple):
    """A build that serves the purpose. ``touched``: its record or its owner had to be (or would be) put right."""

    record: dict[str, Any]
    touched: bool


class Search(NamedTuple):
    """``found`` is the newest usable build; ``unfit`` tells why others are not; ``name`` is free for a new one."""

    found: Found | None
    unfit: list[str]
    name: str


def search(wanted: Wanted, *, check: bool = False) -> Search:
    """Look for an intact build of the commit, the newest first.

    Costs a few ``stat`` calls: contents are hashed only when size, times, inode or owner differ from the record.

    Raises:
        Ds4Error: a directory with the name of a build is not ours.
    """
    found, unfit = None, []
    names = _names(wanted)
    for name in reversed(names):
        path = os.path.join(wanted.builds_dir, name)
        record = read_json(os.path.join(path, RECORD))
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise Ds4Error(
                f"{path} is not a build of ds4-fleet",
                found=f"no {RECORD} of schema {SCHEMA} in it",
                cure=f"move it away (`mv {path} {path}.foreign`); a foreign checkout is never taken over",
            )
        differences = _mismatch(record, wanted)
        if differences:
            unfit.append(f"{name}: {', '.join(differences)}")
            continue
        differences, touched = _verify(path, record, check=check)
        if differences:
            unfit.append(f"{name}: {', '.join(differences)}")
            continue
        found = Found(record, touched)
        break
    return Search(found, unfit, _free_name(wanted.id, names))


def _names(wanted: Wanted) -> list[str]:
    """Directory names of builds of the commit, in the order in which they were made."""
    pattern = re.compile(re.escape(wanted.id) + r"(?:\.(\d+))?")
    try:
        entries = os.listdir(wanted.builds_dir)
    except FileNotFoundError:
        return []
    numbered = [(int(match.group(1) or 1), name) for name in entries if (match := pattern.fullmatch(name))]
    return [name for _number, name in sorted(numbered)]


def _free_name(build_id: str, names: Sequence[str]) -> str:
    if not names:
        return build_id
    last = names[-1].removeprefix(build_id).lstrip(".")
    return f"{build_id}.{int(last or 1) + 1}"


def _mismatch(record: Mapping[str, Any], wanted: Wanted) -> list[str]:
    pairs = {
        "commit": wanted.commit,
        "arch": wanted.arch,
        "make_target": wanted.make_target,
        "sass": [wanted.expected_sass],
    }
    found = [f"{key} is {record.get(key)}, not {value}" for key, value in pairs.items() if record.get(key) != value]
    missing = [name for name in wanted.expected_binaries if name not in record.get("binaries", {})]
    return found + [f"{name} was not built" for name in missing]


def _figures(path: str) -> dict[str, int]:
    status = os.lstat(path)
    return {
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "uid": status.st_uid,
        "mode": stat.S_IMODE(status.st_mode),
    }


def sha256_file(path: str) -> str:
    """Hex sha256 of a file."""
    value = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            value.update(chunk)
    return value.hexdigest()


def _verify(path: str, record: dict[str, Any], *, check: bool) -> tuple[list[str], bool]:
    """Differences between the binaries and their record, and whether anything but their content had to be put right."""
    differences, stale = [], False
    for name, recorded in record["binaries"].items():
        binary = os.path.join(path, name)
        try:
            figures = _figures(binary)
        except OSError:
            differences.append(f"{name} is gone")
            continue
        if all(figures[key] == recorded.get(key) for key in figures):
            continue
        if not stat.S_ISREG(os.lstat(binary).st_mode) or sha256_file(binary) != recorded["sha256"]:
            differences.append(f"{name} was changed after it was built")
        stale = True
    owner = os.lstat(path)
    stale = stale or owner.st_uid != os.geteuid() or bool(owner.st_mode & 0o022)
    if stale and not differences and not check:
        _seal(path)
        for name, recorded in record["binaries"].items():
            recorded.update(_figures(os.path.join(path, name)))
        write_json(os.path.join(path, RECORD), record)
    return differences, stale


# ---------------------------------------------------------------------------------------------------------- the commit


def recorded_commit(wanted: Wanted) -> str:
    """Commit that this host recorded when it first met the tag; empty when it never did."""
    record = read_json(_releases_path(wanted)) or {}
    return str(record.get(wanted.repository, {}).get(wanted.release, ""))


def record_commit(wanted: Wanted) -> None:
    """Keep ``wanted.commit`` as what the tag means on this host."""
    record = read_json(_releases_path(wanted)) or {}
    record.setdefault(wanted.repository, {})[wanted.release] = wanted.commit
    write_json(_releases_path(wanted), record)


def _releases_path(wanted: Wanted) -> str:
    return os.path.join(wanted.state_dir, "releases.json")


def tag_on_server(wanted: Wanted, *, runner: Runner = run) -> str:
    """The commit that the tag names on the server now.

    Raises:
        Ds4Error: the server cannot be asked, or has no such tag.
    """
    git = Git(wanted, "/", runner)
    listed = git("ls-remote", "--tags", "--", wanted.repository, timeout_seconds=60)
    tags = {}
    for line in listed.splitlines():
        commit, _, name = line.partition("\trefs/tags/")
        if name:  # the peeled line of an annotated tag comes after the tag's own and wins
            tags[name.removesuffix("^{}")] = commit
    if wanted.release not in tags:
        near = difflib.get_close_matches(wanted.release, tags, n=3)
        raise Ds4Error(
            f"The engine's repository has no tag {wanted.release}",
            found=f"{len(tags)} tags in {wanted.repository}" + (f", similar: {', '.join(near)}" if near else ""),
            cure="correct ds4_release, or cuda_build_repository",
        )
    return tags[wanted.release]


def moved(wanted: Wanted, actual: str) -> Ds4Error:
    """The error of a tag that does not name the pinned commit."""
    return Ds4Error(
        f"Tag {wanted.release} does not name the pinned commit; nothing was built",
        found=actual,
        required=wanted.commit,
        cure="a release that is changed after it was published is not to be trusted blindly: compare the two commits, then pin "
        f"the new one with ds4_releases_extra: {{{wanted.release}: {{commit: {actual}, weights: ...}}}}, or choose "
        "another release with ds4_release",
        evidence={"tag": wanted.release, "pinned": wanted.commit, "found": actual, "repository": wanted.repository},
    )


class Git:
    """git as the service user, in a clean environment, without looking into directories above the build's."""

    def __init__(self, wanted: Wanted, cwd: str, runner: Runner = run, home: str = "/nonexistent") -> None:
        self._wanted, self._cwd, self._runner, self._home = wanted, cwd, runner, home

    def __call__(self, *arguments: str, timeout_seconds: float = 60, attempts: int = 1) -> str:
        """Standard output of ``git …``.

        Raises:
            Ds4Error: git failed; with its last words.
        """
        environment = {**environment_of(self._wanted, self._home), "GIT_TERMINAL_PROMPT": "0"}
        ran = Ran(0, "", "")
        for attempt in range(attempts):
            ran = self._runner(
                ["git", *arguments],
                timeout_seconds=timeout_seconds,
                env=environment,
                cwd=self._cwd,
                user=_existing_user(self._wanted.user),
            )
            if ran.rc == 0:
                return ran.out
            if attempt + 1 < attempts:
                time.sleep(FETCH_PAUSES[min(attempt, len(FETCH_PAUSES) - 1)])
        words = next(word for word in arguments if not word.startswith("-"))
        raise Ds4Error(
            f"git {words} failed for {self._wanted.repository}",
            found=" ".join(ran.err.split())[-600:] or f"exit code {ran.rc}",
            cure="if the host needs a proxy or a CA to reach it, set ds4_proxy_url or ds4_ca_file; a mirror is "
            "cuda_build_repository",
        )


def environment_of(wanted: Wanted, home: str) -> dict[str, str]:
    """Variables for git, make and the compiler: nothing is inherited, the toolkit is named."""
    return {
        "PATH": f"{wanted.cuda_home}/bin:{SEARCH_PATH}" if wanted.cuda_home else SEARCH_PATH,
        "HOME": home,
        "CUDA_HOME": wanted.cuda_home,
        "GIT_CEILING_DIRECTORIES": wanted.builds_dir,
        **wanted.environment,
    }


def _existing_user(name: str) -> str | None:
    """The account, or None where it is not there yet: a preview of a host that is still untouched."""
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return None
    return name


# ----------------------------------------------------------------------------------------------------------- the build


def choose_jobs(wanted: Wanted, available_kib: int, cores: int) -> int:
    """How many compilers may run: what was asked for, else what memory and cores allow.

    Raises:
        Ds4Error: less memory is available than the floor. Beside a live engine a build is a guest.
    """
    floor = wanted.memory_floor_mib * 1024
    if available_kib < floor:
        raise Ds4Error(
            "Too little memory is available to compile",
            found=f"{available_kib // 1024} MiB (MemAvailable)",
            required=f"{wanted.memory_floor_mib} MiB",
            cure="wait until the host is less busy, or lower cuda_build_memory_floor_mib",
        )
    return wanted.jobs or max(1, min(cores, (available_kib - floor) // (wanted.memory_per_job_mib * 1024)))


class Builder:
    """One build in a work directory of its own; see ``run_plan`` for how it is used."""

    def __init__(self, wanted: Wanted, name: str, *, runner: Runner = run) -> None:
        self.wanted, self.name, self._runner = wanted, name, runner
        self.work = os.path.join(wanted.builds_dir, f".work-{name}")
        self.source = os.path.join(self.work, "source")
        self._home = os.path.join(self.work, "home")
        self._log_path = os.path.join(self.work, LOG)
        self._deadline = time.monotonic() + wanted.timeout_seconds
        self._stamp = 0

    def __call__(self) -> dict[str, Any]:
        """Build and publish; the record.

        Raises:
            Ds4Error: any step failed. Nothing is published then, and the log is kept under the state directory.
        """
        started = time.monotonic()
        jobs = choose_jobs(self.wanted, read_meminfo()["MemAvailable"], len(os.sched_getaffinity(0)))
        self._prepare()
        try:
            with open(self._log_path, "ab") as log:
                say(f"fetching {self.wanted.label} from {self.wanted.repository}")
                self._checkout()
                say(f"compiling with {jobs} jobs: make {self.wanted.make_target}, {self.wanted.arch}")
                self._make(log, jobs)
            say("checking the binaries")
            version = self._check_version(self._check_binaries())
            sass = self._check_sass()
            self._check_libraries()
            return self._publish(version, sass, jobs, round(time.monotonic() - started, 1))
        except Ds4Error as error:
            error.evidence["log"] = self._keep_log()
            raise
        finally:
            shutil.rmtree(self.work, ignore_errors=True)

    def _prepare(self) -> None:
        for leftover in glob.glob(os.path.join(glob.escape(self.wanted.builds_dir), ".work-*")):
            if is_ours(leftover):  # of a build that was killed; the lock is ours now
                shutil.rmtree(leftover)
        os.mkdir(self.work, 0o755)
        mark(self.work, "a build that is being made")
        for folder in (self.source, self._home, self._temporary):
            os.mkdir(folder, 0o755)
            shutil.chown(folder, self.wanted.user)

    @property
    def _temporary(self) -> str:
        return os.path.join(self.work, "tmp")

    def _left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _run(self, argv: list[str], *, log: IO[bytes] | None = None, timeout_seconds: float | None = None) -> Ran:
        return self._runner(
            argv,
            timeout_seconds=min(timeout_seconds or self._left(), self._left()),
            env={**environment_of(self.wanted, self._home), "TMPDIR": self._temporary},
            cwd=self.source,
            user=self.wanted.user,
            log=log,
        )

    def _checkout(self) -> None:
        """The tag is fetched as a tag: ``git describe`` stamps the version from it."""
        wanted = self.wanted
        git = Git(wanted, self.source, self._runner, self._home)
        git("init", "--quiet")
        what = f"refs/tags/{wanted.release}:refs/tags/{wanted.release}" if wanted.release else wanted.commit
        fetch = ("fetch", "--quiet", "--depth=1", "--no-tags", "--", wanted.repository, what)
        git(*fetch, timeout_seconds=self._left(), attempts=len(FETCH_PAUSES) + 1)
        fetched = f"refs/tags/{wanted.release}" if wanted.release else "FETCH_HEAD"
        actual = git("rev-parse", "--verify", f"{fetched}^{{commit}}").strip()
        if actual != wanted.commit:
            raise moved(wanted, actual)
        git("checkout", "--quiet", "--force", "--detach", actual, timeout_seconds=self._left())
        stamp = os.path.join(self.work, "checked-out")
        with open(stamp, "w", encoding="ascii"):
            pass
        self._stamp = os.stat(stamp).st_mtime_ns

    def _make(self, log: IO[bytes], jobs: int) -> None:
        wanted = self.wanted
        argv = ["make", wanted.make_target, f"-j{jobs}", f"CUDA_HOME={wanted.cuda_home}", f"NVCC={wanted.nvcc}"]
        if wanted.make_target != "cuda-spark":  # which is an alias for one architecture and takes no other
            argv.append(f"CUDA_ARCH={wanted.arch}")
        log.write((" ".join(argv) + "\n").encode())
        log.flush()
        ran = self._run(argv, log=log)
        if ran.rc == 0:
            return
        tail = self._log_tail()
        reason = f"ran longer than {wanted.timeout_seconds} s" if ran.timed_out else f"exit code {ran.rc}"
        raise Ds4Error(
            f"{wanted.label} does not compile: make {wanted.make_target} failed",
            found=f"{reason}; last lines of the log:\n" + "\n".join(tail),
            cure="choose another release with ds4_release, or raise cuda_build_timeout_seconds if it was slow; what serves "
            "now is not affected",
            evidence={"rc": ran.rc, "log_tail": tail},
        )

    def _log_tail(self) -> list[str]:
        with open(self._log_path, encoding="utf-8", errors="replace") as stream:
            return stream.read().splitlines()[-LOG_LINES:]

    def _keep_log(self) -> str:
        path = os.path.join(job_directory(self.wanted), f"{self.name}.log")
        with contextlib.suppress(OSError):
            shutil.copyfile(self._log_path, path)
        return path

    def _check_binaries(self) -> list[str]:
        """Every expected program is there, an ELF, executable and newer than the checkout; its path."""
        wrong, paths = [], []
        for name in self.wanted.expected_binaries:
            path = os.path.join(self.source, name)
            paths.append(path)
            try:
                status = os.lstat(path)
                with open(path, "rb") as stream:
                    magic = stream.read(4)
            except OSError:
                wrong.append(f"{name} is missing")
                continue
            if not stat.S_ISREG(status.st_mode) or magic != b"\x7fELF" or not status.st_mode & 0o100:
                wrong.append(f"{name} is not an executable")
            elif status.st_mtime_ns < self._stamp:
                wrong.append(f"{name} is older than the checkout")
        if wrong:
            raise Ds4Error(
                f"make {self.wanted.make_target} ended without an error but did not build everything",
                found="; ".join(wrong),
                required=", ".join(self.wanted.expected_binaries),
                cure="set cuda_build_make_target to what this release's Makefile offers, or correct "
                "cuda_build_expected_binaries",
                evidence={"log_tail": self._log_tail()},
            )
        return paths

    def _check_version(self, paths: list[str]) -> str:
        server = next(path for path in paths if os.path.basename(path) == SERVER)
        ran = self._run([server, "--version"], timeout_seconds=60)
        line = (ran.out.splitlines() or [""])[0]
        program, _, version = line.partition(" ")
        if ran.rc or program != SERVER or not version:
            raise Ds4Error(
                f"The new {SERVER} does not tell its version",
                found=line or " ".join(ran.err.split())[-300:] or f"exit code {ran.rc}",
                required=f"{SERVER} {self.wanted.release}",
                cure="choose another release with ds4_release",
            )
        wanted = self.wanted.release
        if version.endswith("-dirty") or (wanted and _bare(version) != _bare(wanted)):
            raise Ds4Error(
                f"The new {SERVER} is not the release that was asked for",
                found=version,
                required=wanted or "a version without -dirty",
                cure="the release's own version stamp is wrong: choose another release with ds4_release",
            )
        return version

    def _check_sass(self) -> list[str]:
        """Machine code in the programs: the server has exactly the expected kind, no other has any but that."""
        expected = {self.wanted.expected_sass}
        found = {name: self._sass_of(name) for name in self.wanted.expected_binaries}
        wrong = [name for name, kinds in found.items() if kinds - expected or (name == SERVER and kinds != expected)]
        if wrong:
            raise Ds4Error(
                "The programs were not compiled for this GPU",
                found="; ".join(f"{name}: {', '.join(sorted(found[name])) or 'no GPU code'}" for name in wrong),
                required=f"exactly {self.wanted.expected_sass}",
                cure="the release lost the architecture on its way to the compiler and would run at a fraction of its speed: "
                "choose another release with ds4_release, or check cuda_build_arch and cuda_build_make_target",
                evidence={"log_tail": self._log_tail()},
            )
        return sorted(expected)

    def _sass_of(self, name: str) -> set[str]:
        ran = self._run([self.wanted.cuobjdump, os.path.join(self.source, name)], timeout_seconds=120)
        kinds = set(_ARCH.findall(ran.out))  # all of it is read before anything is judged
        if ran.rc and not (kinds or "does not contain device code" in ran.out + ran.err):
            raise Ds4Error(
                f"cuobjdump cannot read {name}",
                found=" ".join((ran.err or ran.out).split())[-300:] or f"exit code {ran.rc}",
                cure=f"run `{self.wanted.cuobjdump} --version` on the host; the toolkit's cuobjdump is needed",
            )
        return kinds

    def _check_libraries(self) -> None:
        missing = set()
        for name in self.wanted.expected_binaries:
            ran = self._run(["ldd", os.path.join(self.source, name)], timeout_seconds=60)
            missing |= {line.split()[0] for line in ran.out.splitlines() if "not found" in line}
        if missing:
            raise Ds4Error(
                "The programs need libraries that this host does not have",
                found=", ".join(sorted(missing)),
                cure="install them (CUDA runtime and cuBLAS come with the toolkit, libcuda with the driver) and run `ldconfig`",
            )

    def _publish(self, version: str, sass: list[str], jobs: int, seconds: float) -> dict[str, Any]:
        wanted = self.wanted
        target = os.path.join(wanted.builds_dir, self.name)
        shutil.move(self._log_path, os.path.join(self.source, LOG))
        mark(self.source, "an immutable build of the engine")
        _seal(self.source)
        binaries = {}
        for name in wanted.expected_binaries:
            path = os.path.join(self.source, name)
            _fsync(path)
            binaries[name] = {"sha256": sha256_file(path), **_figures(path)}
        nvcc = run([wanted.nvcc, "--version"])
        record = {
            "schema": SCHEMA,
            "id": self.name,
            "path": target,
            "repository": wanted.repository,
            "release": wanted.release,
            "commit": wanted.commit,
            "version": version,
            "arch": wanted.arch,
            "make_target": wanted.make_target,
            "sass": sass,
            "toolchain": {"nvcc": wanted.nvcc, "version": toolkit.parse_nvcc(nvcc.out)[1]},
            "binaries": binaries,
            "jobs": jobs,
            "seconds": seconds,
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "log": os.path.join(target, LOG),
        }
        write_json(os.path.join(self.source, RECORD), record)
        os.rename(self.source, target)
        fsync_directory(wanted.builds_dir)
        return record


def _bare(version: str) -> str:
    return version[1:] if re.match(r"v\d", version) else version


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(directory: str) -> None:
    """Give a finished build to ourselves (root), so that the engine's own account cannot change what it runs."""
    uid, gid = os.geteuid(), os.getegid()
    for folder, _folders, names in os.walk(directory):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            os.lchown(path, uid, gid)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode) and mode & 0o022:
                os.chmod(path, stat.S_IMODE(mode) & ~0o022)


def say(text: str) -> None:
    """One line for the journal."""
    print(f"ds4-build: {text}", flush=True)


# -------------------------------------------------------------------------------- in a unit of its own, and from outside


def job_directory(wanted: Wanted) -> str:
    """Where plans, results and logs of failed builds lie."""
    return os.path.join(wanted.state_dir, "build")


def run_plan(path: str) -> int:
    """Body of the transient unit: build what the plan says and leave the result beside it.

    Returns:
        0 when the build was made, 1 when not (the result says why).
    """
    plan = read_json(path)
    if plan is None:
        say(f"{path} cannot be read")
        return 2
    wanted = Wanted(**plan)
    try:
        with _locked(wanted.builds_dir):
            there = search(wanted, check=True)
            if there.found and not wanted.force:  # published since the caller looked
                record = there.found.record
            else:
                record = Builder(wanted, there.name)()
                say(f"published {record['path']}")
        result: dict[str, Any] = {"build": record}
    except Ds4Error as error:
        say(str(error))
        result = error.result()
    write_json(_result_path(path), result, mode=0o600)
    return 0 if "build" in result else 1


def _result_path(plan_path: str) -> str:
    return plan_path.replace(".plan.json", ".result.json")


@contextlib.contextmanager
def _locked(builds_dir: str) -> Iterator[None]:
    """One build at a time on a host; waits."""
    handle = os.open(os.path.join(builds_dir, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class RunningError(Exception):
    """Not an error of the build: it goes on. The text is its last step."""


class Job:
    """The transient unit as a module sees it: start it or attach to it, wait, take its result."""

    def __init__(self, wanted: Wanted, lib: str, *, runner: Runner = run, pause_seconds: float = 0.3) -> None:
        self._wanted, self._lib, self._runner, self._pause = wanted, lib, runner, pause_seconds
        self._plan = os.path.join(job_directory(wanted), digest(dataclasses.asdict(wanted))[:12] + ".plan.json")

    def __call__(self, wait_seconds: float = 0.0, *, following: bool = False) -> dict[str, Any]:
        """Record of the new build.

        Args:
            wait_seconds: how long to wait for it here; 0 waits until it ends.
            following: the caller started it in an earlier call, so a result that lies there is the answer.

        Raises:
            RunningError: it goes on.
            Ds4Error: the build failed, did not end in time, or ended without a word.
        """
        result_path = _result_path(self._plan)
        os.makedirs(job_directory(self._wanted), mode=0o755, exist_ok=True)
        if not following and not self._active():
            _unlink(result_path)  # an answer to an earlier question
        started = following
        limit = self._wanted.timeout_seconds + 60
        begun = time.monotonic()
        while True:
            if self._active():
                passed = time.monotonic() - begun
                if passed > limit:
                    raise Ds4Error(
                        "The build did not end in time",
                        found=f"{UNIT} still runs after {limit} s",
                        cure=f"`journalctl -u {UNIT}` shows what it does; raise cuda_build_timeout_seconds",
                    )
                if wait_seconds and passed > wait_seconds:
                    raise RunningError(self._journal(1).removeprefix("ds4-build: "))
                time.sleep(self._pause)
                continue
            result = read_json(result_path)
            if result is not None:
                _unlink(result_path)
                _unlink(self._plan)
                return _record_of(result)
            if started:
                raise Ds4Error(
                    "The build ended without a result",
                    found=self._journal(10) or f"nothing in the journal of {UNIT}",
                    cure="somebody stopped it, or the host ran out of memory: run again",
                )
            started = self._start()

    def _active(self) -> bool:
        shown = self._runner(["systemctl", "show", "--property=ActiveState", "--value", UNIT])
        return shown.out.strip() in ("active", "activating", "deactivating", "reloading")

    def _start(self) -> bool:
        """True when the unit was started; False when another one got ahead of us, which is then waited for."""
        write_json(self._plan, dataclasses.asdict(self._wanted), mode=0o600)
        properties = {
            "Nice": "19",
            "IOSchedulingClass": "idle",
            "OOMScoreAdjust": "1000",  # when memory runs out it is the compiler that goes
            "RuntimeMaxSec": str(self._wanted.timeout_seconds + 30),
            "UMask": "0022",
        }
        ran = self._runner(
            [
                *(
                    "systemd-run",
                    "--quiet",
                    "--collect",
                    f"--unit={UNIT}",
                    "--description=Build of the engine (ds4-fleet)",
                ),
                *(f"--property={name}={value}" for name, value in properties.items()),
                f"--setenv=PYTHONPATH={self._lib}",
                *(sys.executable or "/usr/bin/python3", "-m", "ds4.build", "run", self._plan),
            ]
        )
        if ran.rc == 0:
            return True
        if self._active():
            return False
        raise Ds4Error(
            "systemd does not start the build",
            found=" ".join((ran.err or ran.out).split())[-400:] or f"exit code {ran.rc}",
            cure=f"`systemctl status {UNIT}` on the host shows more",
        )

    def _journal(self, lines: int) -> str:
        said = self._runner(["journalctl", "--no-pager", "--output=cat", f"--lines={lines}", f"--unit={UNIT}"])
        return said.out.strip()


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _record_of(result: Mapping[str, Any]) -> dict[str, Any]:
    if "build" in result:
        return dict(result["build"])
    error = result["error"]
    raise Ds4Error(
        error["what"], found=error["found"], required=error["required"], cure=error["cure"], evidence=error["evidence"]
    )


# ------------------------------------------------------------------------------------------------------------ the door


class Outcome(NamedTuple):
    """``record`` of the build (a prediction when ``planned``), what changed, and what an operator should know."""

    record: dict[str, Any]
    changed: bool
    planned: bool
    text: str
    warnings: list[str]


def complete(wanted: Wanted) -> Wanted:
    """Fill in the toolkit's paths where they were left to us.

    Raises:
        Ds4Error: there is no compiler, or nothing to read its output back with.
    """
    if wanted.nvcc and wanted.cuobjdump and wanted.cuda_home:
        return wanted
    found = toolkit.resolve(wanted.cuda_home)
    home = wanted.cuda_home or found["home"]
    nvcc, cuobjdump = wanted.nvcc or found["nvcc"], wanted.cuobjdump or found["cuobjdump"]
    if not nvcc:
        raise Ds4Error(
            "No CUDA compiler was found", found=found["text"], cure="install the toolkit or set cuda_build_cuda_home"
        )
    if not cuobjdump:
        raise Ds4Error(
            "The toolkit has no cuobjdump, without which a build cannot be checked",
            found=f"nothing in {home}/bin and on PATH",
            cure="install the package cuda-cuobjdump of the toolkit, or set cuda_build_cuobjdump",
        )
    return dataclasses.replace(wanted, cuda_home=home, nvcc=nvcc, cuobjdump=cuobjdump)


def ensure(
    wanted: Wanted,
    *,
    check: bool,
    check_tag_always: bool = False,
    following: bool = False,
    make: Callable[[Wanted], dict[str, Any]],
    runner: Runner = run,
) -> Outcome:
    """Have an intact build of the release.

    Args:
        check: only predict.
        check_tag_always: ask the server for the tag even when the build is there.
        following: an earlier call started the build: its result is what is asked for, not what lies there.
        make: makes and publishes a build; not called in check mode.

    Raises:
        Ds4Error: see the steps.
    """
    check_parameters(wanted)
    warnings = []
    first_use = False
    if not wanted.commit:
        known = recorded_commit(wanted)
        first_use = not known
        if first_use and check and which("git") is None:  # to be installed by an earlier step
            text = f"would record the commit of {wanted.release}, then clone and build it"
            return Outcome(_prediction(wanted, f"{wanted.release}-unknown"), True, True, text, [])
        wanted = dataclasses.replace(wanted, commit=known or tag_on_server(wanted, runner=runner))
        if first_use:
            warnings.append(
                f"{wanted.release} is not pinned: its commit {wanted.commit} is recorded on this host and expected from now "
                f"on. Pin it with ds4_releases_extra: {{{wanted.release}: {{commit: {wanted.commit}, weights: ...}}}}."
            )
    if following:
        return _made(make(complete(wanted)), wanted, first_use, warnings)
    if check_tag_always and wanted.release and not first_use:
        actual = tag_on_server(wanted, runner=runner)
        if actual != wanted.commit:
            raise moved(wanted, actual)
    there = search(wanted, check=check)
    warnings += [f"A build is not used: {reason}." for reason in there.unfit]
    if there.found and not wanted.force:
        record, touched = there.found
        text = f"{wanted.label}, {', '.join(record['sass'])}, nvcc {record['toolchain']['version']}"
        if touched:
            text += ", owner and record would be put right" if check else ", owner and record put right"
        return Outcome(record, touched, touched and check, text, warnings)
    if check:
        text = f"would clone and build {wanted.label} for {wanted.arch} (make {wanted.make_target})"
        return Outcome(_prediction(wanted, there.name), True, True, text, warnings)
    if not _existing_user(wanted.user):
        raise Ds4Error(
            f"The user {wanted.user} does not exist",
            cure="run the role host_base first (`ansible-playbook site.yml` does)",
        )
    return _made(make(complete(wanted)), wanted, first_use, warnings)


def _made(record: dict[str, Any], wanted: Wanted, first_use: bool, warnings: list[str]) -> Outcome:
    if first_use:
        record_commit(wanted)
    text = (
        f"built {wanted.label} for {', '.join(record['sass'])} in {record['seconds']:.0f} s with {record['jobs']} jobs"
    )
    return Outcome(record, True, False, text, warnings)


def _prediction(wanted: Wanted, name: str) -> dict[str, Any]:
    path = os.path.join(wanted.builds_dir, name)
    return {
        "schema": SCHEMA,
        "id": name,
        "path": path,
        "repository": wanted.repository,
        "release": wanted.release,
        "commit": wanted.commit,
        "version": wanted.release,
        "arch": wanted.arch,
        "make_target": wanted.make_target,
        "sass": [wanted.expected_sass],
        "toolchain": {"nvcc": wanted.nvcc, "version": ""},
        "binaries": {},
        "jobs": wanted.jobs,
        "seconds": 0.0,
        "built_at": "",
        "log": os.path.join(path, LOG),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """``python3 -m ds4.build run PLAN``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 2 or arguments[0] != "run":
        print("usage: python3 -m ds4.build run PLAN.plan.json", file=sys.stderr)
        return 2
    return run_plan(arguments[1])


if __name__ == "__main__":
    sys.exit(main())
