"""docs/verify.md says what the findings say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tools import gen_verify_docs

FINDINGS = yaml.safe_load(gen_verify_docs.SOURCE.read_text())["__host_verify_findings"]


def test_the_page_in_the_repository_is_current() -> None:
    assert gen_verify_docs.main(["--check"]) == 0


def test_a_change_of_the_data_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gen_verify_docs, "ROOT", tmp_path)
    monkeypatch.setattr(gen_verify_docs, "PAGE", tmp_path / "verify.md")
    changed = {**FINDINGS, "root": {**FINDINGS["root"], "cure": "something else"}}
    source = tmp_path / "findings.yml"
    source.write_text(yaml.safe_dump({"__host_verify_findings": FINDINGS}))
    monkeypatch.setattr(gen_verify_docs, "SOURCE", source)
    assert gen_verify_docs.main([]) == 0
    assert gen_verify_docs.main(["--check"]) == 0
    source.write_text(yaml.safe_dump({"__host_verify_findings": changed}))
    assert gen_verify_docs.main(["--check"]) == 1
    assert "verify.md is not what findings.yml says" in capsys.readouterr().out


def test_every_finding_has_its_section_cure_and_override() -> None:
    text = gen_verify_docs.PAGE.read_text()
    for name, entry in FINDINGS.items():
        section = text.partition(f"### {name}\n")[2].partition("\n### ")[0]
        assert "- Cure: " in section
        assert ("Override: none" in section) == (not entry["allow"] and entry["phase"] != "note")
        assert not entry["allow"] or f"host_verify_allow: [{entry['allow']}]" in section
        assert "{" not in section.replace("`{}`", "")
