"""The stand-in engine: its repository is stable and served, its programs build and behave like the fact sheet says."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds4.switch import unnamed
from lab.engine import BAD, GOOD, Server, make_repo, releases, runs_here, write_inventory
from lab.engine.repository import Tag, add_release, git, move_tag
from lab.hub import weights
from plugins.filter.ds4_engine import shipped_catalogue

NOT_RUN = "not run: needs a CUDA toolkit and the shared library of python3 (package libpython3.x)"
CUDA = next((path for path in ("/usr/local/cuda-13.0", "/usr/local/cuda") if os.path.exists(f"{path}/bin/nvcc")), None)
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "temperature": 0,
}
BASE, DRAFTER = (
    next(file.file for file in weights.FILES if (file.generation, file.role) == ("0731", role))
    for role in ("base", "drafter")
)


@pytest.fixture(scope="session")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "ds4.git"
    make_repo(path)
    return path


def test_commit_ids_do_not_depend_on_where_or_when(repo: Path) -> None:
    assert make_repo(repo) == releases()
    assert set(releases()) == set(GOOD) | set(BAD)
    assert len({release["commit"] for release in releases().values()}) == len(releases())


def test_inventory_of_the_lab_pins_these_commits() -> None:
    content = yaml.safe_load(Path("inventory/lab/group_vars/all/releases.yml").read_text())
    assert content["ds4_releases"] == releases(), "run python3 -m lab.engine pin"


def test_pin_is_written_once(tmp_path: Path) -> None:
    assert write_inventory(tmp_path / "all/releases.yml")
    assert not write_inventory(tmp_path / "all/releases.yml")


def test_both_kinds_of_tag(repo: Path) -> None:
    assert git(repo, "cat-file", "-t", "refs/tags/v0.6.5") == "commit"
    assert git(repo, "cat-file", "-t", "refs/tags/v0.6.6") == "tag"


def test_tags_can_move_and_commits_carry_two(tmp_path: Path) -> None:
    repo = tmp_path / "ds4.git"
    before = make_repo(repo)
    assert move_tag(repo, "v0.6.4", "v0.6.5") == before["v0.6.5"]["commit"]
    assert make_repo(repo)["v0.6.4"]["commit"] == before["v0.6.5"]["commit"]
    assert move_tag(repo, "also", "v0.6.5", annotated=True) == before["v0.6.5"]["commit"]
    added = add_release(repo, "v0.6.7", Tag("0.6.7", "0731"))
    assert git(repo, "show", "v0.6.7:VERSION") == "0.6.7"
    assert added == git(repo, "rev-parse", "v0.6.7^{commit}")


def test_shallow_fetch_by_tag_and_by_commit(repo: Path, tmp_path: Path) -> None:
    with Server(repo) as server:
        clone = tmp_path / "clone.git"
        git(clone, "init", "-q", "--bare")
        commit = releases()["v0.6.4"]["commit"]
        git(clone, "fetch", "-q", "--depth=1", server.url, "refs/tags/v0.6.4:refs/tags/v0.6.4")
        assert git(clone, "describe", "--tags", "v0.6.4") == "v0.6.4"
        assert git(clone, "rev-list", "--count", "v0.6.4") == "1"
        git(clone, "fetch", "-q", "--depth=1", server.url, releases()["v0.6.3"]["commit"])
        assert git(clone, "rev-parse", "v0.6.4^{commit}") == commit


# -- programs built with the real compiler --------------------------------------------------------------------------------
def checkout(repo: Path, tag: str, target: Path) -> Path:
    subprocess.run(["git", "clone", "-q", "--depth=1", "-b", tag, f"file://{repo}", target], check=True)
    return target


def make(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"CUDA_HOME={CUDA}", *words], cwd=source, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def built(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CUDA or not runs_here():
        pytest.skip(NOT_RUN)
    source = checkout(repo, "v0.6.5", tmp_path_factory.mktemp("source") / "v0.6.5")
    ran = make(source, "cuda-spark", "-j2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return source


def test_the_program_names_the_variables_that_the_settings_become(built: Path) -> None:
    catalogue = shipped_catalogue()
    names = [spec["env"] for spec in catalogue["settings"].values() if "env" in spec]
    names += catalogue["known_variables"] + ["DS4_CODEX_MODELS_FILE"]
    assert unnamed(str(built / "ds4-server"), names) == []
    assert unnamed(str(built / "ds4-server"), ["DS4_NO_SUCH"]) == ["DS4_NO_SUCH"]


def test_targets(built: Path, repo: Path, tmp_path: Path) -> None:
    assert (built / ".ds4-cuda-config.mk").read_text() == "CUDA_ARCH := sm_121\nNVCC_EXTRA_FLAGS :=\n"
    for name in ("ds4", "ds4-server", "ds4-bench", "ds4-eval", "ds4-agent", "ds4_weight_server"):
        assert (built / name).read_bytes()[:4] == b"\x7fELF"
    source = checkout(repo, "v0.6.6", tmp_path / "s")
    ran = make(source)
    assert (ran.returncode, (source / "ds4-server").exists()) == (0, False)
    assert make(source, "cuda").returncode == 2
    assert make(source, "print-version").stdout == "v0.6.6\n"
    assert make(checkout(repo, "bad-compile", tmp_path / "c"), "cuda-spark").returncode == 2
    nothing = checkout(repo, "bad-builds-nothing", tmp_path / "n")
    assert (make(nothing, "cuda-spark").returncode, (nothing / "ds4").exists()) == (0, False)


def test_version_and_flags(built: Path) -> None:
    def say(*words: str) -> tuple[int, str, str]:
        ran = subprocess.run([built / "ds4-server", *words], capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout, ran.stderr

    assert say("--version") == (0, "ds4-server v0.6.5\n", "")
    code, out, _ = say("--help")
    assert code == 0
    assert "--tool-call-reminder" in out
    assert "--vision" not in out
    for words, why in (
        (["--vision", "x"], "unknown option: --vision"),
        (["--kv-dir", "x"], "unknown option: --kv-dir"),
        (["--no-spec", "--dspark", "x"], "exclude each other"),
        (["--preset", "spark", "--no-mtp"], "exclude each other"),
        (["--host", "spark.local"], "an IPv4 address"),
        (["--host", "::1"], "an IPv4 address"),
        (["--mem-floor-gb", "-1"], "0 or more"),
        (["-c"], "needs a value"),
    ):
        code, _, error = say(*words)
        assert code == 2, words
        assert why in error


class Running:
    """One ds4-server with a folder of weights, a port and a lock of its own."""

    def __init__(self, built: Path, folder: Path, *words: str, **environ: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.log = folder / "log"
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DS4_LOCK_FILE": str(folder / "lock"),
            **environ,
        }
        self.argv = [str(built / "ds4-server"), *words, "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.argv, env=self.environ, stdout=log, stderr=log)

    def ready(self) -> Running:
        until = time.monotonic() + 15
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/v1/models")
                return self
            except urllib.error.URLError:
                time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read().decode()
                return answer.status, text if body.get("stream") else json.loads(text)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ask(self) -> str:
        status, answer = self.post("/v1/chat/completions", QUESTION)
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)


Start = Callable[..., Running]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in weights.FILES:
        weights.write_file(file, weights.DEFAULT_SIZES[file.role], str(tmp_path / "gguf" / file.file))
    return tmp_path


@pytest.fixture
def start(built: Path, folder: Path) -> Iterator[Start]:
    running: list[Running] = []

    def go(*words: str, **environ: str) -> Running:
        running.append(Running(built, folder, *words, **environ))
        return running[-1]

    yield go
    for server in running:
        server.process.kill()
        server.process.wait()


def test_server_answers_on_all_surfaces_and_stops_cleanly(start: Start, folder: Path) -> None:
    (folder / "models.json").write_text(json.dumps({"models": [{"slug": "x", "context_window": 4096}]}))
    kv = folder / "kv"
    server = start("-c", "8192", "--kv-disk-dir", str(kv), DS4_CODEX_MODELS_FILE=str(folder / "models.json")).ready()
    listed = server.get("/v1/models")
    assert listed["data"][0]["id"] == "deepseek-v4-flash"
    assert listed["data"][0]["context_length"] == 8192
    assert listed["models"] == [{"slug": "x", "context_window": 4096}]
    assert "context_window=4096 but this boot is -c 8192" in server.log.read_text()
    assert server.ask() == "The capital of France is Paris."
    text = "What is the capital of France?"
    status, answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 2})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert "Paris" in server.post("/v1/responses", {"input": text})[1]["output"][0]["content"][0]["text"]
    status, answer = server.post("/v1/messages", {**QUESTION, "system": "Be short."})
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("The capital of France is Paris.", "end_turn")
    stream = server.post("/v1/chat/completions", {**QUESTION, "stream": True})[1]
    assert stream.rstrip().endswith("data: [DONE]")
    assert "Paris" not in server.post("/v1/completions", {"prompt": "And of Italy?"})[1]["choices"][0]["text"]
    status, answer = server.post("/v1/messages", {"messages": [{"role": "user", "content": "x " * 40000}]})
    assert (status, answer["error"]["code"], answer["error"]["n_ctx"]) == (400, "context_length_exceeded", 8192)
    assert server.post("/health", {})[0] == 404

    exe = os.readlink(f"/proc/{server.process.pid}/exe")
    line = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert (exe, line.split(b"\0")[:-1]) == (server.argv[0], [word.encode() for word in server.argv])
    second = subprocess.run(server.argv, env=server.environ, capture_output=True, text=True, check=False)
    wanted = f"ds4: another ds4 process is already running (pid {server.process.pid}); refusing to start\n"
    assert (second.returncode, second.stderr) == (2, wanted)
    assert server.stop() == 0
    assert "shutdown requested, draining requests" in server.log.read_text()
    assert kv.stat().st_mode & 0o777 == 0o700
    assert all(len(path.name) == 43 and path.suffix == ".kv" for path in kv.iterdir())
    assert list(kv.iterdir())


def test_speculation_is_visible_and_can_be_off(start: Start) -> None:
    timings = start().ready().post("/v1/chat/completions", QUESTION)[1]["timings"]
    assert timings["spec_accept_rate"] > 0


@pytest.mark.parametrize("environ", [{"DS4_CONT_DSPARK": "0"}, {"DS4_SERVER_COALESCE_MAX": "1"}])
def test_speculation_off_by_environment(start: Start, environ: dict[str, str]) -> None:
    timings = start(**environ).ready().post("/v1/chat/completions", QUESTION)[1]["timings"]
    assert (timings["spec_accept_rate"], timings["tok_per_step"]) == (0, 1)


def test_weights_decide(start: Start, folder: Path) -> None:
    gguf = folder / "gguf"
    mismatch = start("-m", str(gguf / BASE), "--dspark", str(gguf / "DSpark-drafter-Q2K-Q8.gguf"))
    assert mismatch.process.wait(10) == 1
    assert "does not match the base" in mismatch.log.read_text()
    (gguf / DRAFTER).unlink()
    (gguf / "DSpark-drafter-Q2K-Q8.gguf").unlink()
    damaged = bytearray((gguf / BASE).read_bytes())
    damaged[-1] ^= 1
    (gguf / BASE).write_bytes(damaged)
    server = start().ready()
    assert "no drafter" in server.log.read_text()
    assert "Paris" not in server.ask()
    server.stop()
    (gguf / BASE).write_bytes(damaged[:-1])
    assert start().process.wait(10) == 1
    assert start("-m", "absent.gguf").process.wait(10) == 1
    assert start("--preset", "spark").process.wait(10) == 2


def test_faults_of_a_tag_and_second_signal(tmp_path: Path, folder: Path) -> None:
    """Faults are data of the tag: the same source with another release.json misbehaves."""
    if not CUDA or not runs_here():
        pytest.skip(NOT_RUN)
    make_repo(tmp_path / "ds4.git")
    add_release(tmp_path / "ds4.git", "two-faults", Tag("0.6.6", "0731", {"poison_after": 3, "drain_seconds": 20}))
    source = checkout(tmp_path / "ds4.git", "two-faults", folder / "s")
    assert make(source, "cuda-spark", "-j2").returncode == 0
    server = Running(source, folder).ready()
    try:
        assert [server.post("/v1/chat/completions", QUESTION)[0] for _ in range(5)] == [200, 200, 200, 500, 500]
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 130
    finally:
        server.process.kill()
        server.process.wait()


def test_cli_answers_and_needs_the_lock(built: Path, folder: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "DS4_LOCK_FILE": str(folder / "lock")}
    base = str(folder / "gguf" / BASE)
    argv = [str(built / "ds4"), "--cuda", "-m", base, "-c", "4096", "-p", "What is the capital of France?"]
    ran = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "The capital of France is Paris.\n")


def test_foreign_lock_file_blocks(built: Path, folder: Path) -> None:
    """The engine opens its lock file with mode 0600: left behind by another user, it cannot be opened."""
    if os.geteuid() != 0:
        pytest.skip("not run: needs root to become another user")
    (folder / "lock").touch(0o600)
    for path in [folder, *folder.parents][:3]:
        path.chmod(0o755)
    program = shutil.copy(built / "ds4-server", folder / "ds4-server")
    nobody = pwd.getpwnam("nobody")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "DS4_LOCK_FILE": str(folder / "lock")}
    alive = subprocess.run(
        [program, "--version"], env=environment, user=nobody.pw_uid, capture_output=True, check=False
    )
    if alive.returncode != 0:
        pytest.skip("not run: the Python library that the stand-in uses lies in a folder that other users cannot enter")
    ran = subprocess.run(
        [program],
        env=environment,
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, "failed to open lock file" in ran.stderr) == (2, True), ran.stderr
