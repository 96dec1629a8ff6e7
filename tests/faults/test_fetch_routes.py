"""Proxies, authorities and tokens: what leads to the hub, and what must never be told to anybody else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.fetching import Fetcher, Finished
from lab.hub import Hub
from tests.faults.conftest import HUB_OPTIONS, SIZES, judge

SIZE = SIZES["base"]
Make = Callable[..., Fetcher]
TOKEN = "hf_" + "s3cr3t" * 5
CREDENTIALS = "ann:pr0xyw0rd"
FOREIGN = "127.0.0.3"


def secret(folder: Path, name: str, text: str, mode: int = 0o600) -> str:
    path = folder / name
    path.write_text(text + "\n")
    path.chmod(mode)
    return str(path)


def assert_untold(fetcher: Fetcher, finished: Finished, words: str) -> None:
    """The words are in no output, argument or file but their own."""
    assert words not in finished.text
    assert not [word for word in finished.argv if words in word]
    keepers = {fetcher.plan.token_file, fetcher.plan.proxy_credentials_file}
    for path in fetcher.folder.rglob("*"):
        if path.is_file() and str(path) not in keepers:
            assert words.encode() not in path.read_bytes(), f"{path} tells the secret"


def test_proxy_is_the_only_route(hub: Hub, base: Make) -> None:
    hub.options(only_proxy=True)
    fetcher = base(proxy_url=hub.proxy_url)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert hub.stats()["refused_direct"] == 0


def test_without_the_proxy_there_is_no_way(hub: Hub, base: Make) -> None:
    hub.options(only_proxy=True)
    fetcher = base(retries=2)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc != 0
    assert hub.stats()["refused_direct"] > 0


def test_no_proxy_names_hosts_that_are_reached_directly(hub: Hub, base: Make) -> None:
    fetcher = base(proxy_url=hub.proxy_url, no_proxy="127.0.0.2")
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0
    assert {
        request["path"].split("/")[2].partition(":")[0]
        for request in hub.stats()["requests"]
        if request["at"] == "proxy"
    } == {"127.0.0.1"}


@pytest.mark.parametrize("tls", [False, True])
def test_proxy_with_credentials(hub: Hub, tls_hub: Hub, tmp_path: Path, manifest: Any, tls: bool) -> None:
    chosen = tls_hub if tls else hub
    chosen.options(only_proxy=True, proxy_credentials=CREDENTIALS)
    files = {"base": manifest["0731"]["base"]}
    path = secret(tmp_path, "proxy", CREDENTIALS)
    fetcher = Fetcher(tmp_path, chosen, files, proxy_url=chosen.proxy_url, proxy_credentials_file=path)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert_untold(fetcher, finished, CREDENTIALS.partition(":")[2])
    without = Fetcher(tmp_path / "without", chosen, files, proxy_url=chosen.proxy_url)
    finished = without.run()
    judge(without, finished)
    assert finished.rc == 2
    assert "407" in finished.text
    assert "weights_proxy_credentials_file" in finished.text


@pytest.mark.parametrize("tls", [False, True])
def test_proxy_that_does_not_lead_to_the_cdn(hub: Hub, tls_hub: Hub, tmp_path: Path, manifest: Any, tls: bool) -> None:
    chosen = tls_hub if tls else hub
    chosen.options(only_proxy=True, proxy_hosts=["127.0.0.1"])
    files = {"base": manifest["0731"]["base"]}
    fetcher = Fetcher(tmp_path, chosen, files, proxy_url=chosen.proxy_url, retries=2)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc != 0
    assert "127.0.0.2" in finished.text, finished.text


def test_authority_of_the_network(tls_hub: Hub, tmp_path: Path, manifest: Any) -> None:
    files = {"base": manifest["0731"]["base"]}
    fetcher = Fetcher(tmp_path / "with", tls_hub, files)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    for name, ca_file, word in (
        ("without", "", "weights_ca_file"),
        ("absent", str(tmp_path / "absent.pem"), "absent.pem"),
        ("rubbish", secret(tmp_path, "rubbish.pem", "no certificate"), "rubbish.pem"),
    ):
        fetcher = Fetcher(tmp_path / name, tls_hub, files, ca_file=ca_file)
        finished = fetcher.run()
        judge(fetcher, finished)
        assert finished.rc == 2, "a wrong certificate does not get better by asking again"
        assert word in finished.text, finished.text


def test_token_is_used_and_told_to_nobody(hub: Hub, base: Make, tmp_path: Path) -> None:
    hub.options(token=TOKEN, total_rate=16 * 1024 * 1024)
    hub.faults({"fault": "expire", "offset": SIZE // 2 + 1})
    fetcher = base(token_file=secret(tmp_path, "token", TOKEN))
    running = fetcher.start()
    assert running.ended(0.3) is None
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{running.pid}/{name}").read_bytes()
    finished = running.wait()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert hub.stats()["tokens"]["hub"] >= 2
    assert_untold(fetcher, finished, TOKEN)


def test_token_stays_at_the_hub_when_the_cdn_is_another_port_of_the_same_host(
    hub_root: Path, tmp_path: Path, manifest: Any
) -> None:
    with Hub(hub_root, cdn_address="127.0.0.1", options={**HUB_OPTIONS, "token": TOKEN}) as hub:
        token_file = secret(tmp_path, "token", TOKEN)
        fetcher = Fetcher(tmp_path, hub, {"base": manifest["0731"]["base"]}, token_file=token_file)
        finished = fetcher.run()
        judge(fetcher, finished)
        assert finished.rc == 0, finished.text


def test_token_does_not_go_to_a_foreign_host(hub: Hub, hub_root: Path, base: Make, tmp_path: Path) -> None:
    with Hub(hub_root, FOREIGN, options=HUB_OPTIONS) as foreign:
        file = base().plan.files[0]
        url = f"{foreign.url}/{file.repo}/resolve/{file.revision}/{file.file}"
        hub.options(token=TOKEN)
        hub.faults({"fault": "redirect", "url": url, "count": -1})
        fetcher = base(token_file=secret(tmp_path, "token", TOKEN), allowed_hosts=[FOREIGN])
        finished = fetcher.run()
        judge(fetcher, finished)
        assert finished.rc == 0, finished.text
        stats = foreign.stats()
        assert stats["tokens"] == {"hub": 0, "cdn": 0, "proxy": 0}
        assert stats["bytes"]["cdn"] == SIZE
        assert_untold(fetcher, finished, TOKEN)


def test_token_goes_to_the_hub_and_to_no_other_source(hub: Hub, hub_root: Path, base: Make, tmp_path: Path) -> None:
    with Hub(hub_root, FOREIGN, options=HUB_OPTIONS) as mirror:
        hub.options(token=TOKEN)
        hub.faults({"fault": "status", "status": 500, "count": -1, "after": 8})
        settings = {"sources": [hub.url, mirror.url], "token_file": secret(tmp_path, "token", TOKEN), "retries": 2}
        fetcher = base(**settings, allowed_hosts=[FOREIGN, "127.0.0.2"])
        finished = fetcher.run()
        judge(fetcher, finished)
        assert finished.rc == 0, finished.text
        assert hub.stats()["tokens"]["hub"] > 0
        assert mirror.stats()["tokens"] == {"hub": 0, "cdn": 0, "proxy": 0}
        assert mirror.stats()["requests"]


@pytest.mark.parametrize(
    ("token", "mode", "word"),
    [
        ("", 0, "weights_token_file"),
        ("hf_other", 0o600, "weights_token_file"),
        (TOKEN, 0o644, "0600"),
        ("", 0o600, "empty"),
    ],
    ids=["none", "wrong", "readable by others", "empty"],
)
def test_token_problems(hub: Hub, base: Make, tmp_path: Path, token: str, mode: int, word: str) -> None:
    hub.options(token=TOKEN)
    fetcher = base(token_file=secret(tmp_path, "token", token, mode) if mode else "")
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert word in finished.text, finished.text
    assert len(hub.stats()["requests"]) <= fetcher.plan.connections
    if token:
        assert_untold(fetcher, finished, token)


def test_token_from_a_systemd_credential(hub: Hub, base: Make, tmp_path: Path) -> None:
    hub.options(token=TOKEN)
    folder = tmp_path / "credentials"
    folder.mkdir()
    secret(folder, "hf_token", TOKEN, 0o440)
    fetcher = base(token_file=str(tmp_path / "not readable by the service user"))
    finished = fetcher.run(env={"CREDENTIALS_DIRECTORY": str(folder)})
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text


def test_signatures_of_links_are_told_to_nobody(hub: Hub, base: Make) -> None:
    hub.faults(
        {"fault": "cut", "count": 5}, {"fault": "wrong_range", "after": 5, "count": 2}, {"fault": "expire", "after": 7}
    )
    fetcher = base()
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0
    assert_untold(fetcher, finished, "Signature=")


def test_no_other_program_is_needed(hub: Hub, base: Make, tmp_path: Path) -> None:
    """The fetcher finds no curl, wget or aria2 and does not miss them."""
    fetcher = base()
    fetcher.prefix = ["/usr/bin/env", f"PATH={tmp_path}"]
    assert (
        subprocess.run(
            ["/usr/bin/env", f"PATH={tmp_path}", "curl", "--version"], capture_output=True, check=False
        ).returncode
        == 127
    )
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0
