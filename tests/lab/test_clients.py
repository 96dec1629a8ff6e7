"""Real coding agents answer through the files that we write, with no network but a loopback.

They talk to the stand-in engine, in a network namespace of its own. A program that is not installed is reported as not run:
tools/install_clients.sh installs them all into .cache/clients.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomllib
import yaml

from ds4 import clients
from ds4.catalogue import FALLBACK_INSTRUCTIONS, catalogue_text
from lab.engine import make_repo
from lab.hub import weights

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("DS4_CLIENTS_DIR", ROOT / ".cache/clients"))
PORT = 8000
CONTEXT = 131072
QUESTION = "What is the capital of France?"
PROMPT_BYTES = 20903
# Plain output, and no waiting for servers that cannot be reached here.
ALWAYS = {"NO_COLOR": "1", "TERM": "dumb", "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


class Engine(NamedTuple):
    """The stand-in engine behind a loopback that leads nowhere else."""

    inside: Callable[..., subprocess.CompletedProcess[str]]
    log: Path

    def models(self) -> Any:
        script = (
            f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{PORT}/v1/models').read().decode())"
        )
        return json.loads(self.inside(["python3", "-c", script]).stdout)


def program(*path: str) -> list[str]:
    """Command of a client, or a skip that says what was not run."""
    found = TOOLS.joinpath(*path)
    if not found.exists():
        pytest.skip(f"not run: {path[-1]} is not installed; tools/install_clients.sh installs it")
    return [str(found)]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come up in {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.skip("not run: a network namespace needs root")
    folder = tmp_path_factory.mktemp("engine")
    make_repo(folder / "ds4.git")
    subprocess.run(
        ["git", "clone", "-q", "--depth=1", "-b", "v0.6.5", f"file://{folder}/ds4.git", folder / "src"], check=True
    )
    subprocess.run(["make", "-s", "cpu"], cwd=folder / "src", check=True, capture_output=True)
    files = {}
    for file in weights.FILES:
        if file.generation == "0731":
            files[file.role] = weights.write_file(file, 1 << 20, str(folder / file.file))
    catalogue = folder / "codex-models.json"
    catalogue.write_text(catalogue_text(CONTEXT))

    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep 3600"])
    enter = ["nsenter", "--target", str(holder.pid), "--net"]
    mine = os.readlink("/proc/self/ns/net")
    wait_for(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != mine, "a network of its own")
    wait_for(
        lambda: (
            "UP"
            in subprocess.run(
                [*enter, "ip", "-o", "link", "show", "lo"], capture_output=True, text=True, check=False
            ).stdout
        ),
        "loopback",
    )

    def inside(
        argv: Sequence[str | Path], *, home: Path | None = None, check: bool = True, **more: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**ALWAYS, "PATH": os.environ["PATH"], "HOME": str(home or folder), **more}
        ran = subprocess.run(
            [*enter, *argv],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
            cwd=home or folder,
        )
        assert not check or ran.returncode == 0, (
            f"{argv}: exit {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}"
        )
        return ran

    log = folder / "log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*enter, folder / "src/ds4-server", "-m", files["base"], "--dspark", files["drafter"], "--ctx", str(CONTEXT), "--port", str(PORT), "--no-update-check"],
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "DS4_LOCK_FILE": str(folder / "lock"), "DS4_CODEX_MODELS_FILE": str(catalogue)},
            stderr=stream,
            stdout=stream,
        )  # fmt: skip
    try:
        wait_for(lambda: "listening on" in log.read_text() or server.poll() is not None, "the engine")
        assert server.poll() is None, log.read_text()
        yield Engine(inside, log)
    finally:
        for process in (server, holder):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def home(engine: Engine, tmp_path: Path) -> Path:
    """The home of somebody who has configuration of their own already, with the Spark as default on top."""
    theirs = {
        ".codex/config.toml": '# mine\nmodel = "gpt-x"\n\n[tui]\nnotifications = false\n',
        ".config/opencode/opencode.json": '{\n  // mine\n  "autoupdate": false\n}\n',
        ".pi/agent/settings.json": '{"defaultProvider": "mine"}\n',
    }
    for name, text in theirs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    served = clients.served(engine.models())
    target = clients.endpoint("ds4", "ds4 on spark1", f"http://127.0.0.1:{PORT}", served.pop("context"), **served)
    clients.configure(str(tmp_path), "home", "ds4", target, default=True)
    return tmp_path


def test_the_engine_finds_nothing_to_say_about_the_catalogue(engine: Engine) -> None:
    log = engine.log.read_text()
    assert "codex models catalog spliced into /v1/models" in log
    assert "declares context_window" not in log


def test_the_loopback_leads_nowhere(engine: Engine) -> None:
    """Otherwise the tests below would not show that the clients need no network."""
    script = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 2)\nexcept OSError as error: print(error.errno)"
    assert engine.inside(["python3", "-c", script]).stdout.strip() == "101"  # ENETUNREACH


# -- Codex -----------------------------------------------------------------------------------------------------------
CODEX = pytest.mark.parametrize("where", ["node_modules", "old/node_modules"], ids=["0.171.0", "0.144.1"])


@CODEX
@pytest.mark.parametrize("profile", [False, True], ids=["default", "profile"])
def test_codex_answers(engine: Engine, home: Path, where: str, profile: bool) -> None:
    codex = program(where, ".bin/codex")
    chosen = ["-p", "ds4"] if profile else []
    ran = engine.inside([*codex, "exec", "--strict-config", *chosen, "--skip-git-repo-check", QUESTION], home=home)
    assert "Paris" in ran.stdout
    assert "provider: ds4" in ran.stderr
    assert "Model metadata" not in ran.stderr  # "… not found. Defaulting to fallback metadata"


@CODEX
def test_codex_knows_the_served_window_and_has_instructions(engine: Engine, home: Path, where: str) -> None:
    codex = program(where, ".bin/codex")
    listed = json.loads(engine.inside([*codex, "debug", "models"], home=home).stdout)
    (entry,) = [model for model in listed["models"] if model["slug"] == "deepseek-v4-flash"]
    assert (entry["context_window"], entry["auto_compact_token_limit"]) == (CONTEXT, 110000)
    assert entry["base_instructions"] == FALLBACK_INSTRUCTIONS


def test_codex_asks_the_engine_when_told_to(engine: Engine, tmp_path: Path) -> None:
    codex = program("node_modules", ".bin/codex")
    target = clients.endpoint("ds4", "ds4 on spark1", f"http://127.0.0.1:{PORT}", CONTEXT)
    clients.configure(str(tmp_path), "home", "ds4", target, ["codex"], default=True, served_catalogue=True)
    ran = engine.inside([*codex, "exec", "--skip-git-repo-check", QUESTION], home=tmp_path)
    assert "Paris" in ran.stdout
    assert "Model metadata" not in ran.stderr


@CODEX
def test_what_codex_writes_itself_stays(engine: Engine, home: Path, where: str) -> None:
    """It puts a new table where its TOML writer does: before the comment that ends our block."""
    codex = program(where, ".bin/codex")
    config = home / ".codex/config.toml"
    engine.inside([*codex, "mcp", "add", "mine", "--", "echo", "hi"], home=home)
    target = clients.endpoint("ds4", "ds4 on spark1", f"http://127.0.0.1:{PORT}", CONTEXT)
    clients.configure(str(home), "home", "ds4", target, default=True)
    assert "mine" in engine.inside([*codex, "mcp", "list"], home=home).stdout
    assert "ds4" in tomllib.loads(config.read_text())["model_providers"]
    clients.configure(str(home), "home", "ds4", None)
    assert tomllib.loads(config.read_text()) == {
        "model": "gpt-x",
        "tui": {"notifications": False},
        "mcp_servers": {"mine": {"command": "echo", "args": ["hi"]}},
    }


def test_codex_runs_from_the_folder_on_the_controller(engine: Engine, tmp_path: Path) -> None:
    codex = program("node_modules", ".bin/codex")
    target = clients.endpoint("ds4", "ds4 on spark1", f"http://127.0.0.1:{PORT}", CONTEXT)
    clients.configure(str(tmp_path / "spark1"), "folder", "ds4", target, default=True)
    ran = engine.inside(
        [*codex, "exec", "--skip-git-repo-check", QUESTION], home=tmp_path, CODEX_HOME=str(tmp_path / "spark1/codex")
    )
    assert "Paris" in ran.stdout
    assert "Model metadata" not in ran.stderr


@CODEX
def test_the_pinned_prompt_is_the_one_that_codex_has(where: str) -> None:
    """The checksum in the role's defaults, against the prompt inside the published program."""
    program(where, ".bin/codex")
    defaults = yaml.safe_load((ROOT / "roles/agent_clients/defaults/main.yml").read_text())
    assert defaults["agent_clients_codex_instructions_url"].endswith("/rust-v0.171.0/codex-rs/models-manager/prompt.md")
    (binary,) = [
        path for path in (TOOLS / where / "@openai").rglob("codex") if path.is_file() and path.stat().st_size > 1e7
    ]
    content = binary.read_bytes()
    start = content.index(b"You are a coding agent running in the Codex CLI, a terminal-based")
    text = content[start : start + PROMPT_BYTES]
    assert hashlib.sha256(text).hexdigest() == defaults["agent_clients_codex_instructions_sha256"]


# -- the others ------------------------------------------------------------------------------------------------------
def test_claude_code_answers_through_the_wrapper(engine: Engine, home: Path) -> None:
    claude = program("node_modules", ".bin/claude")
    path = f"{Path(claude[0]).parent}:{os.environ['PATH']}"
    ran = engine.inside(
        [home / ".local/bin/claude-ds4", "-p", QUESTION], home=home, PATH=path, ANTHROPIC_API_KEY="sk-theirs"
    )
    assert "Paris" in ran.stdout
    assert "MAX_CONTEXT_TOKENS" not in ran.stderr  # its complaint about a value that it does not take


def test_opencode_answers(engine: Engine, home: Path) -> None:
    opencode = program("node_modules", ".bin/opencode")
    listed = engine.inside([*opencode, "models"], home=home).stdout
    assert "ds4/deepseek-v4-flash" in listed.split()
    assert "Paris" in engine.inside([*opencode, "run", "--agent", "ds4", QUESTION], home=home).stdout


def test_pi_answers(engine: Engine, home: Path) -> None:
    pi = [
        *program("node_modules", "node/bin/node"),
        *program("node_modules", "@earendil-works/pi-coding-agent/dist/cli.js"),
    ]
    assert "Paris" in engine.inside([*pi, "-p", QUESTION], home=home, PI_OFFLINE="1").stdout
    listed = engine.inside([*pi, "--list-models"], home=home, check=False, PI_OFFLINE="1")
    assert "deepseek-v4-flash" in listed.stdout + listed.stderr


LIBRARIES = {
    "openai": f"""
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:{PORT}/v1", api_key="dsv4-local")
(model,) = client.models.list().data
assert model.context_length == {CONTEXT}, model
ask = [{{"role": "user", "content": "{QUESTION}"}}]
print(client.chat.completions.create(model=model.id, messages=ask, max_tokens=64).choices[0].message.content)
print("".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(model=model.id, messages=ask, stream=True)))
print(client.completions.create(model=model.id, prompt="{QUESTION}", max_tokens=64).choices[0].text)
print(client.responses.create(model=model.id, input="{QUESTION}").output_text)
with client.responses.stream(model=model.id, input="{QUESTION}") as stream:
    print(stream.get_final_response().output_text)
""",
    "anthropic": f"""
import anthropic
client = anthropic.Anthropic(base_url="http://127.0.0.1:{PORT}", auth_token="dsv4-local")
ask = dict(model="deepseek-v4-flash", max_tokens=64, messages=[{{"role": "user", "content": "{QUESTION}"}}])
print(client.messages.create(**ask).content[0].text)
with client.messages.stream(**ask) as stream:
    print(stream.get_final_text())
""",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_answer_on_every_surface(engine: Engine, library: str) -> None:
    python = program("py", "bin/python")
    if subprocess.run([*python, "-c", f"import {library}"], capture_output=True, check=False).returncode:
        pytest.skip(f"not run: {library} is not installed; tools/install_clients.sh installs it")
    lines = engine.inside([*python, "-c", LIBRARIES[library]]).stdout.strip().splitlines()
    assert len(lines) == {"openai": 5, "anthropic": 2}[library]
    assert [line for line in lines if "Paris" not in line] == []
