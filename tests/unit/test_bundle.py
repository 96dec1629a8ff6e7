"""make bundle: what is packed is what a host without Internet can use."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds4 import plan as plans

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("bundle", ROOT / "tools/bundle.py")
assert _SPEC and _SPEC.loader
bundle = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bundle)

CONTENT = b"GGUF\3\0\0\0" + b"\1\0\0\0\0\0\0\0" * 2 + bytes(1000)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Variables of an operator whose sources lie on this machine."""
    source = tmp_path / "engine"
    source.mkdir()
    git(source, "init", "-q")
    for text in ("one", "two"):
        (source / "ds4.c").write_text(text)
        git(source, "add", ".")
        git(source, "commit", "-q", "-m", text)
    git(source, "tag", "-a", "-m", "release", "v9.9.9")
    commit = git(source, "rev-parse", "HEAD").strip()
    usb = tmp_path / "usb"
    usb.mkdir()
    (usb / "base.gguf").write_bytes(CONTENT)
    import hashlib

    entry = {
        "repo": "o/n",
        "revision": "1" * 40,
        "file": "base.gguf",
        "bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return {
        "ds4_release": "v9.9.9",
        "ds4_releases": {"v9.9.9": {"commit": commit, "weights": "test"}},
        "ds4_weights": {"test": {"base": entry}},
        "cuda_build_repository": str(source),
        "weights_sources": [str(usb)],
    }


def run(tmp_path: Path, settings: dict[str, Any], *more: str) -> int:
    (tmp_path / "vars.yml").write_text(yaml.safe_dump(settings))
    return int(bundle.main([str(tmp_path / "out"), "--vars", str(tmp_path / "vars.yml"), *more]))


def test_the_build_can_use_the_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert run(tmp_path, settings) == 0
    out = tmp_path / "out"
    target = tmp_path / "clone"
    target.mkdir()
    git(target, "init", "-q")
    tag = "refs/tags/v9.9.9"
    git(target, "fetch", "--quiet", "--depth=1", "--no-tags", "--", str(out / "engine.bundle"), f"{tag}:{tag}")
    commit = settings["ds4_releases"]["v9.9.9"]["commit"]
    assert git(target, "rev-parse", f"{tag}^{{commit}}").strip() == commit
    assert tag in git(target, "ls-remote", "--tags", "--", str(out / "engine.bundle"))
    assert git(target, "describe", "--tags", commit).strip() == "v9.9.9"
    use = yaml.safe_load((out / "bundle.yml").read_text())
    assert use["cuda_build_repository"] == "/srv/ds4-bundle/engine.bundle"
    assert use["weights_sources"] == ["/srv/ds4-bundle/weights"]
    assert "not here" in (out / "README.txt").read_text()
    assert "git" in (out / "packages.txt").read_text().split()


def test_the_weights_can_be_packed_too(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, settings, "--weights", "--path", "/mnt/x") == 0
    weights = tmp_path / "out/weights"
    assert (weights / "base.gguf").read_bytes() == CONTENT
    assert (
        subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=weights, capture_output=True, check=False).returncode == 0
    )
    plan = plans.load(str(weights / "plan.json"))
    assert plan.files[0].sources == (weights / "addresses.txt").read_text().split()
    urls = plans.source_urls(
        yaml.safe_load((tmp_path / "out/bundle.yml").read_text())["weights_sources"], "o/n", "1", "base.gguf"
    )
    assert "file:///mnt/x/weights/base.gguf" in urls
    assert (
        json.loads(capsys.readouterr().out.splitlines()[-1])["commit"] == settings["ds4_releases"]["v9.9.9"]["commit"]
    )
    assert run(tmp_path, settings, "--weights") == 0, "again, with nothing to do"


def test_a_moved_tag_is_not_packed(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings["ds4_releases"]["v9.9.9"]["commit"] = "1" * 40
    assert run(tmp_path, settings) == 1
    assert "does not name the pinned commit" in capsys.readouterr().err
    assert not (tmp_path / "out/engine.bundle").exists()


def test_a_repository_that_is_not_there(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings["cuda_build_repository"] = str(tmp_path / "none")
    assert run(tmp_path, settings) == 1
    assert "git clone failed" in capsys.readouterr().err


def test_weights_that_do_not_arrive(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings["weights_sources"] = [str(tmp_path / "nowhere")]
    assert run(tmp_path, settings, "--weights") == 2


def test_the_operators_settings_of_a_fetch_count_here_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    token.chmod(0o600)
    drafter = {**settings["ds4_weights"]["test"]["base"], "file": "drafter.gguf"}
    settings["ds4_weights"]["test"]["drafter"] = drafter
    settings.update(
        weights_drafter=False,
        weights_token_file=str(token),
        weights_token_hosts=["hub.lan"],
        ds4_proxy_url="http://proxy.lan:3128",
        ds4_ca_file="/etc/ssl/lan.pem",
        weights_connections=3,
        weights_bandwidth_mib_per_second=2,
    )
    assert run(tmp_path, settings, "--weights") == 0
    plan = plans.load(str(tmp_path / "out/weights/plan.json"))
    assert [item.role for item in plan.files] == ["base"]
    assert (plan.token_file, plan.token_hosts) == (str(token), ["hub.lan"])
    assert (plan.proxy_url, plan.ca_file) == ("http://proxy.lan:3128", "/etc/ssl/lan.pem")
    assert (plan.connections, plan.bandwidth_bytes_per_second) == (3, 2 * 1024**2)
    assert yaml.safe_load((tmp_path / "out/bundle.yml").read_text())["weights_drafter"] is False
    assert "hf_secret" not in (tmp_path / "out/weights/plan.json").read_text()
    token.chmod(0o644)
    assert run(tmp_path, settings, "--weights") == 1, "as on a host"


def test_packages_come_with_what_they_need(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = subprocess.run, []

    def apt(argv: Any, *args: Any, **more: Any) -> Any:
        if argv[0] != "apt-get":
            return real(argv, *args, **more)
        asked.append(argv)
        return subprocess.CompletedProcess(argv, len(asked) - 1, "", "E: no network")

    monkeypatch.setattr(bundle.subprocess, "run", apt)
    assert run(tmp_path, settings, "--packages") == 0
    assert asked[0][:3] == ["apt-get", "install", "--download-only"] and "git" in asked[0]
    assert f"--option=Dir::Cache::archives={tmp_path}/out/packages" in asked[0]
    assert "apt-get install /srv/ds4-bundle/packages/*.deb" in (tmp_path / "out/README.txt").read_text()
    assert run(tmp_path, settings, "--packages") == 1
