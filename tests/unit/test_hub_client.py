"""The stand-in hub is faithful: Hugging Face's own client lists and downloads from it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.hub import Hub, weights

pytest.importorskip("huggingface_hub")
SIZES = {"base": 12_000_000, "drafter": 500_000, "mtp": 300_000}  # bytes; the client reads in pieces of 10 MB

# The client reads its endpoint when it is imported, so every case is a process of its own.
SCRIPT = """
import json, sys
import huggingface_hub as hf
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RemoteEntryNotFoundError, RepositoryNotFoundError
case, repo, revision, file, folder = sys.argv[1:6]
try:
    if case == "snapshot":
        print(json.dumps(hf.snapshot_download(repo, revision=revision, local_dir=folder)))
    elif case == "info":
        info = hf.HfApi().model_info(repo, revision=revision, files_metadata=False)
        tree = list(hf.HfApi().list_repo_tree(repo, revision=revision))
        meta = hf.get_hf_file_metadata(hf.hf_hub_url(repo, file, revision=revision))
        print(json.dumps([info.sha, [s.rfilename for s in info.siblings], {e.path: e.lfs.sha256 for e in tree if e.lfs},
                          meta.etag, meta.size, meta.commit_hash]))
    else:
        print(json.dumps(hf.hf_hub_download(repo, file, revision=revision, cache_dir=folder)))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def client(hub: Hub, tmp_path: Path, case: str, repo: str, revision: str, file: str, **env: str) -> object:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("HF_", "HUGGING", "HTTP", "ALL_PROXY"))
    }
    clean.update(
        HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_TELEMETRY="1", **env
    )
    clean.update(HF_HUB_DISABLE_PROGRESS_BARS="1", NO_PROXY="*")
    argv = [sys.executable, "-c", SCRIPT, case, repo, revision, file, str(tmp_path / "files")]
    done = subprocess.run(argv, env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    weights.write(str(folder), SIZES)
    return folder


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_download_by_revision_with_an_interruption(root: Path, tmp_path: Path) -> None:
    file, entry = weights.FILES[0], weights.manifest(SIZES)["0731"]["base"]
    with Hub(root) as hub:
        hub.faults({"fault": "short", "offset": 11_000_000})
        path = client(hub, tmp_path, "download", file.repo, file.revision, file.file)
        assert isinstance(path, str), path
        assert sha256(path) == entry["sha256"]
        stats = hub.stats()
        assert [rule["fired"] for rule in hub.rules()] == [1]
        assert {request["range"] for request in stats["requests"] if request["at"] == "cdn"} >= {"", "bytes=10485760-"}


def test_download_with_a_token_that_stays_at_the_hub(root: Path, tmp_path: Path) -> None:
    file, entry = weights.FILES[1], weights.manifest(SIZES)["0731"]["drafter"]
    with Hub(root, options={"token": "hf_labtoken"}) as hub:
        refused = client(hub, tmp_path, "download", file.repo, "main", file.file)
        assert isinstance(refused, dict)
        assert refused["error"] == "GatedRepoError"
        path = client(hub, tmp_path, "download", file.repo, "main", file.file, HF_TOKEN="hf_labtoken")
        assert isinstance(path, str), path
        assert sha256(path) == entry["sha256"]
        assert hub.stats()["tokens"] == {"hub": 1, "cdn": 0, "proxy": 0}


def test_snapshot_in_the_wrong_letter_case(root: Path, tmp_path: Path) -> None:
    file, entry = weights.FILES[1], weights.manifest(SIZES)["0731"]["drafter"]
    with Hub(root) as hub:
        folder = client(hub, tmp_path, "snapshot", file.repo.lower(), "main", file.file)
        assert isinstance(folder, str), folder
        assert sha256(f"{folder}/{file.file}") == entry["sha256"]


def test_metadata(root: Path, tmp_path: Path) -> None:
    file, manifest = weights.FILES[4], weights.manifest(SIZES)
    with Hub(root) as hub:
        answer = client(hub, tmp_path, "info", file.repo, "main", file.file)
        assert isinstance(answer, list), answer
        sha, files, hashes, etag, size, commit = answer
        assert sha == commit == file.revision
        assert file.file in files
        assert hashes[file.file] == etag == manifest["legacy"]["mtp"]["sha256"]
        assert size == SIZES["mtp"]


@pytest.mark.parametrize(
    ("repo", "revision", "file", "error"),
    [
        (weights.BASE_REPO, "main", "absent.gguf", "RemoteEntryNotFoundError"),
        (weights.BASE_REPO, "0" * 40, "x.gguf", "RevisionNotFoundError"),
        ("nobody/nothing", "main", "x.gguf", "RepositoryNotFoundError"),
    ],
)
def test_refusals_are_understood(root: Path, tmp_path: Path, repo: str, revision: str, file: str, error: str) -> None:
    with Hub(root) as hub:
        answer = client(hub, tmp_path, "download", repo, revision, file)
    assert isinstance(answer, dict)
    assert answer["error"] == error, answer
