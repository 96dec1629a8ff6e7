"""ds4.build: planning with fakes, and real builds of the stand-in engine with the real compiler."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import build
from ds4.command import Ran, which
from ds4.errors import Ds4Error
from ds4.files import mark
from lab.engine import Server, make_repo, releases, runs_here
from lab.engine.repository import Tag, add_release, move_tag

SCHEMA = json.loads(Path("docs/schemas/build.schema.json").read_text())
PROGRAMS = ("ds4", "ds4-server", "ds4-bench", "ds4-eval", "ds4-agent", "ds4_weight_server")
CUDA = next((path for path in ("/usr/local/cuda-13.0", "/usr/local/cuda") if os.path.exists(f"{path}/bin/nvcc")), "")
CUOBJDUMP = next(iter(glob.glob("/var/cache/ds4-lab/cuobjdump-*/bin/cuobjdump")), which("cuobjdump") or "")
NOT_RUN = "not run: needs root, nvcc, cuobjdump and the shared library of /usr/bin/python3 (package libpython3.x)"
CAN_BUILD = os.geteuid() == 0 and CUDA and CUOBJDUMP and runs_here("/usr/bin/python3")
BUILDER = "nobody"  # any account but ours: it must get by without a home and without reading ours


def wanted(root: Path, **changes: Any) -> build.Wanted:
    base = build.Wanted(
        repository="http://127.0.0.1:9/ds4.git",
        release="v0.6.5",
        commit="a" * 40,
        builds_dir=str(root / "builds"),
        state_dir=str(root / "state"),
        user=BUILDER,
        cuda_home=CUDA or "/usr/local/cuda",
        nvcc=f"{CUDA}/bin/nvcc",
        cuobjdump=CUOBJDUMP,
        arch="sm_121",
        make_target="cuda-spark",
        expected_binaries=PROGRAMS,
        expected_sass="sm_121a",
        jobs=0,
        memory_floor_mib=64,
        memory_per_job_mib=512,
        timeout_seconds=120,
        environment={},
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def root() -> Iterator[Path]:
    """Folders as role host_base makes them, reachable by the account that builds."""
    with tempfile.TemporaryDirectory(prefix="ds4-build-") as name:
        path = Path(name)
        path.chmod(0o755)
        for folder in ("builds", "state"):
            (path / folder).mkdir()
            mark(str(path / folder), "test")
        yield path


def refused(call: Any, *arguments: Any, **more: Any) -> Ds4Error:
    with pytest.raises(Ds4Error) as caught:
        call(*arguments, **more)
    return caught.value


# -- planning --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"release": "v0.6/5"}, "not a tag name"),
        ({"release": "v..1"}, "not a tag name"),
        ({"commit": "abc"}, "40 hex digits"),
        ({"release": "", "commit": ""}, "neither a release nor a commit"),
        ({"repository": "https://me:secret@host/ds4.git"}, "contains a password"),
        ({"repository": "--upload-pack=x"}, "not an address"),
        ({"arch": "native"}, "like sm_121"),
        ({"expected_binaries": ["ds4"]}, "not among the expected"),
    ],
)
def test_bad_parameters_are_refused(root: Path, changes: dict[str, Any], why: str) -> None:
    error = refused(build.check_parameters, wanted(root, **changes))
    assert why in error.found
    assert "secret" not in str(error)


def test_all_bad_parameters_in_one_message(root: Path) -> None:
    error = refused(build.check_parameters, wanted(root, commit="x", arch="y"))
    assert "commit" in error.found
    assert "arch" in error.found


@pytest.mark.parametrize(
    ("available_mib", "cores", "asked", "jobs"),
    [(100000, 20, 0, 20), (64 + 512 * 3, 20, 0, 3), (100, 20, 0, 1), (100000, 20, 7, 7)],
)
def test_jobs_follow_memory_and_cores(root: Path, available_mib: int, cores: int, asked: int, jobs: int) -> None:
    assert build.choose_jobs(wanted(root, jobs=asked), available_mib * 1024, cores) == jobs


def test_nothing_is_compiled_below_the_floor(root: Path) -> None:
    error = refused(build.choose_jobs, wanted(root, jobs=4), 63 * 1024, 4)
    assert (error.found, error.required) == ("63 MiB (MemAvailable)", "64 MiB")
    assert "cuda_build_memory_floor_mib" in error.cure


def publish(want: build.Wanted, name: str = "", content: bytes = b"\x7fELF") -> Path:
    """A finished build, without compiling."""
    path = Path(want.builds_dir) / (name or want.id)
    path.mkdir()
    binaries = {}
    for program in want.expected_binaries:
        (path / program).write_bytes(content + program.encode())
        (path / program).chmod(0o755)
        binaries[program] = {
            "sha256": build.sha256_file(str(path / program)),
            **build._figures(str(path / program)),
        }
    record = {
        **build._prediction(want, path.name),
        "binaries": binaries,
        "jobs": 1,
        "toolchain": {"nvcc": want.nvcc, "version": "13.0.88"},
        "built_at": "2026-09-01T00:00:00Z",
    }
    (path / build.RECORD).write_text(json.dumps(record))
    return path


def never(_wanted: build.Wanted) -> dict[str, Any]:
    raise AssertionError("nothing was to be built")


def silent(_argv: Sequence[str], **_more: Any) -> Ran:
    raise AssertionError("no program was to be run")


def test_an_intact_build_costs_nothing(root: Path) -> None:
    want = wanted(root)
    path = publish(want)
    before = (path / build.RECORD).read_bytes()
    outcome = build.ensure(want, check=False, make=never, runner=silent)
    assert (outcome.changed, outcome.record["path"]) == (False, str(path))
    assert outcome.text == "v0.6.5 (aaaaaaaa), sm_121a, nvcc 13.0.88"
    assert (path / build.RECORD).read_bytes() == before


def test_contents_are_read_only_when_figures_differ(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = wanted(root)
    path = publish(want)
    hashed: list[str] = []
    digest_of = build.sha256_file

    def counting(name: str) -> str:
        hashed.append(name)
        return digest_of(name)

    monkeypatch.setattr(build, "sha256_file", counting)
    assert not build.ensure(want, check=False, make=never).changed
    assert hashed == []
    os.utime(path / "ds4", ns=(1, 1))
    assert build.ensure(want, check=True, make=never).changed
    outcome = build.ensure(want, check=False, make=never)
    assert (outcome.changed, "put right" in outcome.text) == (True, True)
    assert set(hashed) == {str(path / "ds4")}
    assert not build.ensure(want, check=False, make=never).changed


def test_a_changed_binary_is_never_used(root: Path) -> None:
    want = wanted(root)
    path = publish(want)
    (path / "ds4-server").write_bytes(b"\x7fELFelse")
    (path / "ds4").unlink()
    found = build.search(want)
    assert found.found is None
    assert found.unfit == ["v0.6.5-aaaaaaaa: ds4 is gone, ds4-server was changed after it was built"]
    assert found.name == "v0.6.5-aaaaaaaa.2"
    outcome = build.ensure(want, check=True, make=never)
    assert (outcome.planned, outcome.record["id"]) == (True, "v0.6.5-aaaaaaaa.2")
    assert outcome.text == "would clone and build v0.6.5 (aaaaaaaa) for sm_121 (make cuda-spark)"
    assert "was changed" in outcome.warnings[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: needs root to give files away")
def test_a_build_whose_owner_changed_is_taken_back(root: Path) -> None:
    want = wanted(root)
    path = publish(want)
    for entry in (path, *path.iterdir()):
        os.chown(entry, 1234, 1234)
    outcome = build.ensure(want, check=False, make=never)
    assert outcome.changed
    assert {entry.stat().st_uid for entry in (path, *path.iterdir())} == {0}
    assert not build.ensure(want, check=False, make=never).changed


def test_the_newest_build_counts_and_names_do_not_collide(root: Path) -> None:
    want = wanted(root)
    publish(want)
    for number in (2, 10):
        publish(want, f"{want.id}.{number}")
    other = wanted(root, release="v0.6.5-rc")
    publish(other)
    found = build.search(want)
    assert found.found is not None
    assert (found.found.record["id"], found.name) == (f"{want.id}.10", f"{want.id}.11")


def test_another_architecture_is_another_build(root: Path) -> None:
    publish(wanted(root))
    other = wanted(root, arch="sm_120", make_target="cuda", expected_sass="sm_120")
    found = build.search(other)
    assert found.found is None
    assert found.unfit == [
        "v0.6.5-aaaaaaaa: arch is sm_121, not sm_120, make_target is cuda-spark, not cuda, sass is ['sm_121a'], not ['sm_120']"
    ]


def test_the_same_commit_under_two_tags_is_two_builds(root: Path) -> None:
    publish(wanted(root))
    assert build.search(wanted(root, release="v0.6.5.1")).found is None


def test_a_foreign_checkout_is_not_taken_over(root: Path) -> None:
    want = wanted(root)
    (root / "builds" / want.id).mkdir()
    (root / "builds" / want.id / "Makefile").touch()
    error = refused(build.ensure, want, check=True, make=never)
    assert "is not a build of ds4-fleet" in error.what
    assert f"mv {root}/builds/{want.id}" in error.cure


def test_virgin_host_predicts_id_and_path(root: Path) -> None:
    want = wanted(root, builds_dir="/nowhere/builds", state_dir="/nowhere/state", user="nobody-of-that-name")
    outcome = build.ensure(want, check=True, make=never, runner=silent)
    assert (outcome.changed, outcome.planned) == (True, True)
    assert outcome.record["path"] == "/nowhere/builds/v0.6.5-aaaaaaaa"
    error = refused(build.ensure, want, check=False, make=never, runner=silent)
    assert "host_base" in error.cure


def test_force_builds_beside(root: Path) -> None:
    want = wanted(root, force=True)
    publish(want)
    assert build.ensure(want, check=True, make=never).record["id"] == "v0.6.5-aaaaaaaa.2"


# -- the unit, with a fake systemd -----------------------------------------------------------------------------------------
class Systemd:
    """Answers systemctl, systemd-run and journalctl; ``states`` are given one after the other."""

    def __init__(self, states: list[str], result: dict[str, Any] | None = None, start_rc: int = 0) -> None:
        self.states, self.result, self.start_rc = states, result, start_rc
        self.started: list[list[str]] = []

    def __call__(self, argv: list[str], **_more: Any) -> Ran:
        if argv[0] == "systemctl":
            return Ran(0, (self.states.pop(0) if len(self.states) > 1 else self.states[0]) + "\n", "")
        if argv[0] == "journalctl":
            return Ran(0, "Killed process 12 (cicc)\n", "")
        self.started.append(argv)
        if self.result is not None:
            Path(argv[-1].replace(".plan.json", ".result.json")).write_text(json.dumps(self.result))
        return Ran(self.start_rc, "", "no")


def job(root: Path, systemd: Systemd) -> build.Job:
    return build.Job(wanted(root), "/opt/ds4/lib/current", runner=systemd, pause_seconds=0)


def test_job_starts_and_takes_the_result(root: Path) -> None:
    systemd = Systemd(["inactive", "inactive", "active", "inactive"], {"build": {"id": "x"}})
    assert job(root, systemd)() == {"id": "x"}
    argv = systemd.started[0]
    assert "--setenv=PYTHONPATH=/opt/ds4/lib/current" in argv
    assert argv[-4:-1] == ["-m", "ds4.build", "run"]
    assert list((root / "state/build").iterdir()) == []


def test_job_attaches_to_a_running_build_of_the_same_plan(root: Path) -> None:
    systemd = Systemd(["active", "active", "inactive"])
    waiting = job(root, systemd)
    (root / "state/build").mkdir()
    Path(build._result_path(waiting._plan)).write_text(json.dumps({"build": {"id": "x"}}))
    assert waiting() == {"id": "x"}
    assert systemd.started == []


def test_job_waits_for_another_build_and_then_starts_its_own(root: Path) -> None:
    systemd = Systemd(["active", "active", "inactive", "active", "inactive"], {"build": {"id": "mine"}})
    assert job(root, systemd)() == {"id": "mine"}
    assert len(systemd.started) == 1


def test_an_old_failure_is_no_answer(root: Path) -> None:
    systemd = Systemd(["inactive"], {"build": {"id": "new"}})
    asking = job(root, systemd)
    (root / "state/build").mkdir()
    Path(build._result_path(asking._plan)).write_text(json.dumps(Ds4Error("old").result()))
    assert asking() == {"id": "new"}


def test_job_can_be_followed_in_several_calls(root: Path) -> None:
    systemd = Systemd(["inactive", "inactive", "active"])
    with pytest.raises(build.RunningError, match="Killed process"):
        job(root, systemd)(0.01)
    Path(systemd.started[0][-1].replace(".plan.json", ".result.json")).write_text(json.dumps({"build": {"id": "x"}}))
    ended = Systemd(["inactive"])
    assert job(root, ended)(0.01, following=True) == {"id": "x"}
    assert ended.started == []
    assert "without a result" in refused(job(root, ended), 0.01, following=True).what


def test_what_is_followed_was_changed_although_it_lies_there_already(root: Path) -> None:
    want = wanted(root, cuda_home="/c", nvcc="/c/nvcc", cuobjdump="/c/cuobjdump")
    path = publish(want)
    record = json.loads((path / build.RECORD).read_text())
    assert build.ensure(want, check=False, following=True, make=lambda _wanted: record).changed


def test_job_tells_what_failed_in_the_unit(root: Path) -> None:
    failure = Ds4Error("does not compile", found="exit code 2", cure="x", evidence={"log_tail": ["a"]}).result()
    error = refused(job(root, Systemd(["inactive"], failure)))
    assert (error.what, error.found, error.evidence) == ("does not compile", "exit code 2", {"log_tail": ["a"]})


def test_job_that_died_quotes_the_journal(root: Path) -> None:
    error = refused(job(root, Systemd(["inactive"])))
    assert "Killed process 12 (cicc)" in error.found


def test_job_that_cannot_start(root: Path) -> None:
    assert "systemd does not start" in refused(job(root, Systemd(["inactive"], start_rc=1))).what


def test_plan_with_proxy_password_is_for_root_only(root: Path) -> None:
    systemd = Systemd(["inactive"])
    want = wanted(root, environment={"https_proxy": "http://me:secret@proxy:1"})
    refused(build.Job(want, "/lib", runner=systemd, pause_seconds=0))
    (plan,) = (root / "state/build").glob("*.plan.json")
    assert stat.S_IMODE(plan.stat().st_mode) == 0o600
    assert "secret" not in json.dumps(systemd.started)
    assert build.Wanted(**json.loads(plan.read_text())).environment == want.environment


# -- real git, make, nvcc and cuobjdump ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine() -> Iterator[Server]:
    if not CAN_BUILD:
        pytest.skip(NOT_RUN)
    with tempfile.TemporaryDirectory(prefix="ds4-engine-") as name:
        make_repo(Path(name) / "ds4.git")
        with Server(Path(name) / "ds4.git") as server:
            yield server


def real(engine: Server, root: Path, tag: str, **changes: Any) -> build.Wanted:
    return wanted(root, repository=engine.url, release=tag, commit=releases()[tag]["commit"], **changes)


def make(want: build.Wanted) -> dict[str, Any]:
    """What the unit does, in this process."""
    path = Path(build.job_directory(want)) / "x.plan.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(want)))
    build.run_plan(str(path))
    return build._record_of(json.loads((path.parent / "x.result.json").read_text()))


def nothing_published(root: Path) -> bool:
    return {entry.name for entry in (root / "builds").iterdir()} <= {".ds4-fleet", ".lock"}


def test_build_publish_and_look_again(engine: Server, root: Path) -> None:
    want = real(engine, root, "v0.6.5")
    leftover = root / "builds/.work-killed"
    leftover.mkdir()
    mark(str(leftover), "a build that is being made")
    outcome = build.ensure(want, check=False, make=make)
    record = outcome.record
    jsonschema.validate(record, SCHEMA)
    path = Path(record["path"])
    assert json.loads((path / "build.json").read_text()) == record
    assert (record["id"], record["version"], record["sass"]) == (want.id, "v0.6.5", ["sm_121a"])
    assert record["toolchain"]["version"].startswith("13.")
    assert set(record["binaries"]) == set(PROGRAMS)
    assert {entry.stat().st_uid for entry in path.rglob("*")} == {0}
    assert not [entry for entry in path.rglob("*") if not entry.is_symlink() and entry.stat().st_mode & 0o022]
    assert "make cuda-spark" in Path(record["log"]).read_text()
    assert not leftover.exists()
    assert sorted(entry.name for entry in (root / "builds").iterdir()) == [".ds4-fleet", ".lock", want.id]
    again = build.ensure(want, check=False, make=never, runner=silent)
    assert (again.changed, again.record) == (False, record)

    assert make(want) == record  # another run published it between looking and building

    forced = build.ensure(dataclasses.replace(want, force=True), check=False, make=make)
    assert forced.record["id"] == f"{want.id}.2"
    assert build.ensure(want, check=False, make=never, runner=silent).record["id"] == f"{want.id}.2"


def test_other_card_by_variables(engine: Server, root: Path) -> None:
    want = real(engine, root, "v0.6.4", arch="sm_120", make_target="cuda", expected_sass="sm_120")
    record = build.ensure(want, check=False, make=make).record
    jsonschema.validate(record, SCHEMA)
    assert (record["sass"], record["version"]) == (["sm_120"], "v0.6.4")


@pytest.mark.parametrize(
    ("tag", "what", "found"),
    [
        ("bad-compile", "does not compile", "undeclared_factor"),
        ("bad-builds-nothing", "did not build everything", "ds4-server is missing"),
        ("bad-arch", "not compiled for this GPU", "ds4-server: sm_"),
        ("bad-version", "not the release that was asked for", "v0.6.2"),
    ],
)
def test_a_bad_release_is_not_published(engine: Server, root: Path, tag: str, what: str, found: str) -> None:
    error = refused(build.ensure, real(engine, root, tag), check=False, make=make)
    assert what in error.what
    assert found in error.found
    assert error.cure
    assert nothing_published(root)
    log = Path(error.evidence["log"])
    assert log.is_file()
    assert log.parent == root / "state/build"
    if tag != "bad-version":
        assert error.evidence["log_tail"] == log.read_text().splitlines()[-40:]


def test_a_moved_tag_stops_everything(root: Path) -> None:
    if not CAN_BUILD:
        pytest.skip(NOT_RUN)
    pinned = make_repo(root / "ds4.git")["v0.6.4"]["commit"]
    with Server(root / "ds4.git") as engine:
        want = real(engine, root, "v0.6.4")
        build.ensure(want, check=False, make=make)
        now = move_tag(root / "ds4.git", "v0.6.4", "v0.6.6", annotated=True)
        assert not build.ensure(want, check=False, make=never).changed  # what was built stays usable
        for error in (
            refused(build.ensure, want, check=True, check_tag_always=True, make=never),
            refused(build.ensure, dataclasses.replace(want, force=True), check=False, make=make),
        ):
            assert (error.found, error.required) == (now, pinned)
            assert f"v0.6.4: {{commit: {now}" in error.cure
        accepted = dataclasses.replace(want, commit=now)
        assert build.ensure(accepted, check=False, make=make).changed
        assert not build.ensure(accepted, check=False, check_tag_always=True, make=never).changed
        # A pin that was never right is the same stop, and it comes before anything is compiled.
        wrong = dataclasses.replace(want, commit="b" * 40)
        assert refused(build.ensure, wrong, check=False, make=make).found == now


def test_first_use_is_recorded_and_said(engine: Server, root: Path) -> None:
    commit = releases()["v0.6.6"]["commit"]
    want = wanted(root, repository=engine.url, release="v0.6.6", commit="")
    preview = build.ensure(want, check=True, make=never)
    assert preview.record["id"] == f"v0.6.6-{commit[:8]}"
    assert not (root / "state/releases.json").exists()
    outcome = build.ensure(want, check=False, make=make)
    assert (outcome.record["commit"], outcome.record["version"]) == (commit, "v0.6.6")
    assert commit in outcome.warnings[0]
    again = build.ensure(want, check=False, make=never, runner=silent)
    assert (again.changed, again.warnings) == (False, [])


def test_an_unknown_tag_names_similar_ones(engine: Server, root: Path) -> None:
    error = refused(
        build.ensure, wanted(root, repository=engine.url, release="v0.6.7", commit=""), check=True, make=never
    )
    assert error.what == "The engine's repository has no tag v0.6.7"
    assert "v0.6.6" in error.found


def test_preview_without_git_and_without_a_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "which", lambda _name: None)
    outcome = build.ensure(wanted(root, commit=""), check=True, make=never, runner=silent)
    assert (outcome.planned, outcome.record["id"]) == (True, "v0.6.5-unknown")
    assert outcome.text == "would record the commit of v0.6.5, then clone and build it"


def test_an_unreachable_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FETCH_PAUSES", (0, 0))
    if not CAN_BUILD:
        pytest.skip(NOT_RUN)
    proxy = {"http_proxy": "http://127.0.0.1:10"}
    error = refused(build.ensure, wanted(root, environment=proxy), check=False, make=make)
    assert "port 10" in error.found
    assert "git fetch failed for http://127.0.0.1:9/ds4.git" in error.what
    assert "ds4_proxy_url" in error.cure
    assert nothing_published(root)


def test_decoys_on_path_and_in_the_environment_are_ignored(
    engine: Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No nvcc of PATH, no caller's variables: what is used is what was named. And a commit needs no tag."""
    decoy = root / "decoy"
    decoy.mkdir()
    for name in ("nvcc", "git", "make"):
        (decoy / name).write_text("#!/bin/sh\nexit 7\n")
        (decoy / name).chmod(0o755)
    monkeypatch.setenv("NVCC", str(decoy / "nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(decoy))
    monkeypatch.setenv("MAKEFLAGS", "CUDA_ARCH=sm_80")
    monkeypatch.setenv("GIT_DIR", str(decoy))
    monkeypatch.setenv("PATH", f"{decoy}:{os.environ['PATH']}")
    want = dataclasses.replace(real(engine, root, "v0.6.3"), release="")
    record = build.ensure(want, check=False, make=make).record
    assert record["sass"] == ["sm_121a"]
    assert (record["id"], record["version"]) == (f"untagged-{want.commit[:8]}", "0.6.3")


def test_missing_library_is_told(engine: Server, root: Path) -> None:
    want = real(engine, root, "v0.6.5")
    builder = build.Builder(want, want.id, runner=lambda argv, **_more: Ran(0, "\tlibcublas.so.13 => not found\n", ""))
    assert refused(builder._check_libraries).found == "libcublas.so.13"


@pytest.mark.parametrize(
    ("recipe", "timeout_seconds", "why"),
    [
        # A release whose repository carries built programs cannot pass them off as ours.
        ("for p in $(PROGRAMS); do cp /bin/true $$p; touch -d 2020-01-01 $$p; done", 60, "ds4-server is older than"),
        ("sleep 30", 2, "ran longer than 2 s"),
    ],
)
def test_odd_makefiles(root: Path, recipe: str, timeout_seconds: int, why: str) -> None:
    if not CAN_BUILD:
        pytest.skip(NOT_RUN)
    make_repo(root / "ds4.git")
    tag = Tag("0.6.7", "0731", edits={"Makefile": (r"\t\$\(MAKE\) -B [^\n]*", f"\t{recipe}")})
    commit = add_release(root / "ds4.git", "v0.6.7", tag)
    with Server(root / "ds4.git") as engine:
        want = wanted(root, repository=engine.url, release="v0.6.7", commit=commit, timeout_seconds=timeout_seconds)
        assert why in refused(build.ensure, want, check=False, make=make).found
    assert nothing_published(root)


def test_toolkit_without_cuobjdump(root: Path) -> None:
    home = root / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (home / "bin/nvcc").chmod(0o755)
    want = wanted(root, cuda_home=str(home), nvcc="", cuobjdump="")
    if shutil.which("cuobjdump"):
        pytest.skip("not run: a cuobjdump is on PATH")
    assert "cuda_build_cuobjdump" in refused(build.complete, want).cure
    error = refused(build.complete, dataclasses.replace(want, cuda_home=str(root / "none")))
    assert "cuda_build_cuda_home" in error.cure
