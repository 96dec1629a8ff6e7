"""The plan of a fetch: what it says, what makes it unusable, and the schema it is held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4 import plan as plans
from ds4.errors import Ds4Error
from ds4.plan import Plan, PlanFile, source_urls

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"


def a_file(**changes: Any) -> PlanFile:
    values: dict[str, Any] = {
        "role": "base", "file": "sub/base.gguf", "target": "base.gguf", "bytes": 10, "sha256": "ab" * 32, "sources": ["https://h/x"],
    }  # fmt: skip
    return PlanFile(**{**values, **changes})


def a_plan(*files: PlanFile, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "generation": "0731", "directory": "/w", "user": "ds4", "files": list(files or [a_file()]), "status_file": "/w/status",
    }  # fmt: skip
    return Plan(**{**values, **changes})


def test_round_trip_and_schema(tmp_path: Path) -> None:
    plan = a_plan(
        a_file(), a_file(role="drafter", target="d.gguf", bytes=None, sha256=""), mount={"path": "/w", "uuid": ""}
    )
    plan.write(str(tmp_path / "plan.json"))
    loaded = plans.load(str(tmp_path / "plan.json"))
    assert loaded == plan
    schema = json.loads((SCHEMAS / "weights-plan.schema.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "plan.json").read_text()), schema)
    assert set(schema["properties"]) == set(plan.as_json())
    assert set(schema["properties"]["files"]["items"]["properties"]) == set(plan.as_json()["files"][0])


def test_the_id_is_about_what_is_wanted() -> None:
    plan = a_plan()
    assert a_plan(drop_cache=True, memory_floor_kib=5, adopt=["/x"]).id == plan.id
    for changes in ({"connections": 4}, {"generation": "legacy"}, {"directory": "/x"}):
        assert a_plan(**changes).id != plan.id
    assert a_plan(a_file(sha256="cd" * 32)).id != plan.id


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (a_plan(a_file(target="../base.gguf")), "not a plain file name"),
        (a_plan(a_file(target=".hidden")), "not a plain file name"),
        (a_plan(a_file(target="")), "not a plain file name"),
        (a_plan(a_file(sha256="AB" * 32)), "not 64 lower-case hex digits"),
        (a_plan(a_file(bytes=0)), "base: 0 bytes"),
        (a_plan(a_file(sources=[])), "no source"),
        (a_plan(a_file(sources=["ftp://x/y", "http://x/y"])), "weights_sources holds ftp, not http"),
        (a_plan(a_file(), a_file(target="other.gguf")), "role base appears twice"),
        (a_plan(a_file(), a_file(role="drafter")), "target base.gguf appears twice"),
        (a_plan(directory="weights"), "not absolute"),
        (a_plan(proxy_url="socks5://proxy:1080"), "http://host:port"),
        (a_plan(proxy_url="http://me:secret@proxy:3128"), "weights_proxy_credentials_file"),
        (a_plan(a_file(sources=["http://nas:port/x"])), "weights_sources holds http://nas:port/x, which is no address"),
        (a_plan(a_file(sources=["http://[::1/x"])), "weights_sources holds http://[::1/x, which is no"),
        (a_plan(proxy_url="http://proxy:port"), "http://host:port"),
        (a_plan(connections=0), "between 1 and 64"),
        (a_plan(connections=65), "between 1 and 64"),
    ],
)
def test_what_makes_a_plan_unusable(plan: Plan, found: str) -> None:
    (problem,) = plans.errors(plan)
    assert found in problem
    assert "secret" not in problem


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    a_plan(a_file(bytes=-1, sources=[]), connections=0).write(path)
    with pytest.raises(Ds4Error) as caught:
        plans.load(path)
    assert caught.value.found.count(";") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "There is no plan"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"schema": 2}', "another version"),
        ('{"schema": 1}', "damaged"),
        ('{"schema": 1, "files": [{"wrong": 1}]}', "damaged"),
        ('{"schema": 1, "files": 7}', "damaged"),
    ],
)
def test_a_plan_that_cannot_be_read(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(Ds4Error, match=said) as caught:
        plans.load(str(tmp_path / "plan.json"))
    assert "site.yml" in caught.value.cure


@pytest.mark.parametrize(
    ("sources", "hosts"),
    [
        (["https://huggingface.co"], ["huggingface.co"]),
        (["http://nas.lan/m/{name}", "https://mirror.lan", "https://huggingface.co"], ["huggingface.co"]),
        (["/mnt/usb", "http://nas.lan/m/{name}", "https://mirror.lan:8443", "https://other.lan"], ["mirror.lan"]),
        (["file:///srv", "http://nas.lan/m/{name}"], ["nas.lan"]),
        (["/mnt/usb", "http://nas:port"], []),
    ],
)
def test_the_token_is_meant_for_the_hub(sources: list[str], hosts: list[str]) -> None:
    assert plans.token_hosts(sources) == hosts


def test_addresses_of_a_file() -> None:
    urls = source_urls(
        ["https://huggingface.co/", "http://nas.lan/models/{name}", "http://x/{repo}@{revision}/{file}?a={other}", "/mnt/usb disk/", "file:///srv"],
        "owner/name",
        "1cd7",
        "sub/a b.gguf",
    )  # fmt: skip
    assert urls == [
        "https://huggingface.co/owner/name/resolve/1cd7/sub/a%20b.gguf",
        "http://nas.lan/models/a%20b.gguf",
        "http://x/owner/name@1cd7/sub/a%20b.gguf?a={other}",
        "file:///mnt/usb%20disk/a%20b.gguf",
        "file:///mnt/usb%20disk/owner/name/sub/a%20b.gguf",
        "file:///srv/a%20b.gguf",
        "file:///srv/owner/name/sub/a%20b.gguf",
    ]
    assert source_urls(["https://h"], "o/n", "", "f") == ["https://h/o/n/resolve/main/f"]
