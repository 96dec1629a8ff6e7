# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Makes the engine's bare git repository: fixed authors and dates, so that commit ids depend on ``source/`` alone."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parent / "source"
FIRST_DATE = 1780000000  # seconds; commits are one day apart

# What may stand in standin/release.json of a tag and in /run/lab-engine/faults.json of a host.
FAULTS = {
    "exit_at_start": "exit code with which the server dies while it loads",
    "never_ready": "true: loads for ever",
    "start_seconds": "how long loading takes (default 0.5)",
    "busy_seconds": "how long after it listens everything is answered with 503",
    "garbage": "true: answers are nonsense",
    "poison_after": "completions after which each further one is a 500",
    "crash_after": "completions after which the process dies with exit code 1",
    "fail_above_bytes": "prompts of more bytes are a 500",
    "refuse_flag": "long name of an option that the server does not know",
    "ignore_sigterm": "true: signals change nothing",
    "drain_seconds": "how much longer stopping takes",
    "hold_memory_seconds": "how long the memory stays taken after the process is gone; -1 until the next boot",
    "speculation_off": "true: drafter loaded, nothing ever drafted",
    "speed": "factor on prefill and decode speed",
    "only": "faults.json only: versions, as --version prints them, to which the file applies",
}


class Tag(NamedTuple):
    """``edits``: regular expressions replaced in files of the source, for faults of the build."""

    version: str
    weights: str
    faults: Mapping[str, Any] = {}
    edits: Mapping[str, tuple[str, str]] = {}
    annotated: bool = False


GOOD = {
    "v0.6.3": Tag("0.6.3", "legacy"),
    "v0.6.4": Tag("0.6.4", "0731", annotated=True),
    "v0.6.5": Tag("0.6.5", "0731"),
    "v0.6.6": Tag("0.6.6", "0731", annotated=True),
}


def _bad(*, edits: Mapping[str, tuple[str, str]] | None = None, **faults: Any) -> Tag:
    return Tag("0.6.6", "0731", faults, edits or {})


BAD = {
    "bad-compile": _bad(edits={"ds4_cuda.cu": (r"\*= factor", "*= undeclared_factor")}),
    "bad-builds-nothing": _bad(edits={"Makefile": (r"\t\$\(MAKE\) -B [^\n]*", "\t@echo nothing to be done")}),
    "bad-arch": _bad(edits={"Makefile": (r"-B \$\(PROGRAMS\) CUDA_ARCH=sm_121", "-B $(PROGRAMS)")}),
    "bad-version": _bad(edits={"Makefile": (r"(?m)^DS4_BUILD_VERSION :=.*", "DS4_BUILD_VERSION := v0.6.2")}),
    "bad-dies-at-start": _bad(exit_at_start=1),
    "bad-never-ready": _bad(never_ready=True),
    "bad-slow-start": _bad(start_seconds=20),
    "bad-busy": _bad(busy_seconds=20),
    "bad-garbage": _bad(garbage=True),
    "bad-poison": _bad(poison_after=3),
    "bad-poison-at-once": _bad(poison_after=0),
    "bad-crash": _bad(crash_after=3),
    "bad-long-prompts": _bad(fail_above_bytes=4096),
    "bad-refuses-flag": _bad(refuse_flag="--kv-disk-dir"),
    "bad-ignores-sigterm": _bad(ignore_sigterm=True),
    "bad-slow-drain": _bad(drain_seconds=20),
    "bad-holds-memory": _bad(hold_memory_seconds=20),
    "bad-holds-memory-forever": _bad(hold_memory_seconds=-1),
    "bad-no-speculation": _bad(speculation_off=True),
    "bad-half-speed": _bad(speed=0.5),
}


def git(repo: str | Path, *arguments: str, stdin: bytes = b"") -> str:
    """Run git on a bare repository, untouched by the caller's configuration and environment."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "HOME": os.devnull,
    }
    ran = subprocess.run(
        ["git", f"--git-dir={repo}", *arguments], input=stdin, env=environment, capture_output=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout.decode().strip()


def make_repo(directory: str | Path) -> dict[str, dict[str, str]]:
    """Create the bare repository ``directory`` with all tags, or leave it alone when it is there.

    Returns:
        ``{tag: {"commit": 40 hex, "weights": generation}}``, as ``ds4_releases`` of an inventory wants it.
    """
    directory = Path(directory)
    if not (directory / "HEAD").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        git(directory, "init", "--quiet", "--bare", "--initial-branch=main", str(directory))
        git(directory, "config", "uploadpack.allowAnySHA1InWant", "true")
        git(directory, "config", "http.receivepack", "false")
        git(directory, "fast-import", "--quiet", stdin=_stream())
        # Served by one user, made by another: the server must not find the ownership dubious.
        (directory / "git-daemon-export-ok").touch()
    return {
        name: {"commit": git(directory, "rev-parse", f"refs/tags/{name}^{{commit}}"), "weights": tag.weights}
        for name, tag in (GOOD | BAD).items()
    }


@functools.cache
def releases() -> dict[str, dict[str, str]]:
    """The tags, their commits and weights, without keeping a repository."""
    with tempfile.TemporaryDirectory() as directory:
        return make_repo(Path(directory) / "ds4.git")


def write_inventory(path: str | Path) -> bool:
    """Pin all tags in a group_vars file of the lab's inventory. True when that changed the file."""
    lines = [
        "# Generated by `python3 -m lab.engine pin`: the tags of the stand-in engine and their commits.",
        "ds4_releases:",
    ]
    for tag, release in releases().items():
        lines.append(f'  {tag}: {{commit: {release["commit"]}, weights: "{release["weights"]}"}}')
    text = "\n".join(lines) + "\n"
    path = Path(path)
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def add_release(
    repo: str | Path, name: str, tag: Tag, *, parent: str = "v0.6.6", annotated: bool | None = None, serial: int = 99
) -> str:
    """Add one commit with its tag to an existing repository and return the commit. ``serial`` keeps the id stable."""
    base = git(repo, "rev-parse", f"{parent}^{{commit}}")
    shown = tag if annotated is None else tag._replace(annotated=annotated)
    lines = _Stream()
    lines.commit(f"refs/heads/side-{name}", f"Release {name}", FIRST_DATE + serial * 86400, _files(tag), parent=base)
    lines.tag(name, shown)
    git(repo, "fast-import", "--quiet", stdin=bytes(lines))
    return git(repo, "rev-parse", f"refs/tags/{name}^{{commit}}")


def move_tag(repo: str | Path, name: str, target: str, *, annotated: bool = False) -> str:
    """Create a tag, or let an existing one point elsewhere, and return the commit that it now means."""
    extra = ["--annotate", f"--message={name}"] if annotated else []
    identity = ["-c", "user.name=ds4", "-c", "user.email=ds4@example.invalid"]
    git(repo, *identity, "tag", "--force", *extra, name, git(repo, "rev-parse", f"{target}^{{commit}}"))
    return git(repo, "rev-parse", f"refs/tags/{name}^{{commit}}")


def _files(tag: Tag) -> dict[str, bytes]:
    files = {
        str(path.relative_to(SOURCE)): path.read_bytes()
        for path in sorted(SOURCE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name, (pattern, replacement) in tag.edits.items():
        text, count = re.subn(pattern, replacement.replace("\\", r"\\"), files[name].decode())
        if count != 1:
            raise ValueError(f"{name}: {pattern} matches {count} times")
        files[name] = text.encode()
    files["VERSION"] = f"{tag.version}\n".encode()
    release = {"version": tag.version, "faults": dict(tag.faults)}
    files["standin/release.json"] = (json.dumps(release, sort_keys=True) + "\n").encode()
    return files


class _Stream:
    """A git fast-import stream."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._mark = 0
        self._when = 0

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def _data(self, content: bytes) -> None:
        self._parts.append(b"data %d\n%b\n" % (len(content), content))

    def _who(self, role: str) -> None:
        self._parts.append(f"{role} ds4 <ds4@example.invalid> {self._when} +0000\n".encode())

    def commit(self, branch: str, message: str, when: int, files: dict[str, bytes], parent: str = "") -> str:
        self._mark += 1
        self._when = when
        self._parts.append(f"commit {branch}\nmark :{self._mark}\n".encode())
        self._who("author")
        self._who("committer")
        self._data(message.encode())
        if parent:
            self._parts.append(f"from {parent}\n".encode())
        self._parts.append(b"deleteall\n")
        for name, content in files.items():
            self._parts.append(f"M 100644 inline {name}\n".encode())
            self._data(content)
        return f":{self._mark}"

    def tag(self, name: str, tag: Tag) -> None:
        """Tag the commit written last."""
        if tag.annotated:
            self._parts.append(f"tag {name}\nfrom :{self._mark}\n".encode())
            self._who("tagger")
            self._data(name.encode())
        else:
            self._parts.append(f"reset refs/tags/{name}\nfrom :{self._mark}\n\n".encode())


def _stream() -> bytes:
    stream = _Stream()
    last = ""
    for number, (name, tag) in enumerate(GOOD.items()):
        last = stream.commit("refs/heads/main", f"Release {name}", FIRST_DATE + number * 86400, _files(tag), last)
        stream.tag(name, tag)
    for number, (name, tag) in enumerate(BAD.items(), start=len(GOOD)):
        stream.commit(f"refs/heads/{name}", name, FIRST_DATE + number * 86400, _files(tag), last)
        stream.tag(name, tag)
    return bytes(stream)
