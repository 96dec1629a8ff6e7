"""Where the CUDA toolkit is looked for, with real programs in a folder of our own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ds4 import toolkit
from ds4.command import Ran

NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:57:39_PM_PDT_2025
Cuda compilation tools, release {release}, V{version}
Build cuda_13.0.r13.0/compiler.36424714_0
"""


def program(path: Path, version: str, *, fails: bool = False) -> Path:
    """An nvcc that says ``version``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = NVCC.format(release=version.rpartition(".")[0], version=version)
    path.write_text("#!/bin/sh\necho broken >&2\nexit 1\n" if fails else f"#!/bin/sh\ncat <<'X'\n{answer}X\n")
    path.chmod(0o755)
    return path


def nobody(_name: str) -> None:
    return None


def test_nvcc_text() -> None:
    assert toolkit.parse_nvcc(NVCC.format(release="13.0", version="13.0.88")) == ("13.0", "13.0.88")
    assert toolkit.parse_nvcc("gcc 13") == ("", "")


def test_the_text_of_a_real_machine() -> None:
    text = (Path(__file__).parent / "fixtures/toolkit/nvcc_h200.txt").read_text(encoding="utf-8")
    assert toolkit.parse_nvcc(text) == ("13.0", "13.0.88")


@pytest.mark.parametrize(
    ("older", "newer"), [("12.9", "12.10"), ("9.2", "13.0"), ("cuda-9.9", "cuda-13"), ("13.0", "13.0.88")]
)
def test_order_of_versions(older: str, newer: str) -> None:
    assert toolkit.version_key(older) < toolkit.version_key(newer)


def test_the_default_folder_comes_first(tmp_path: Path) -> None:
    program(tmp_path / "cuda/bin/nvcc", "13.0.88")
    program(tmp_path / "cuda-13.1/bin/nvcc", "13.1.1")
    program(tmp_path / "cuda/bin/cuobjdump", "13.0.88")
    found = toolkit.resolve(root=str(tmp_path), find=nobody)
    assert (found["version"], found["release"], found["source"]) == ("13.0.88", "13.0", "default")
    assert found["home"] == str(tmp_path / "cuda")
    assert found["cuobjdump"] == str(tmp_path / "cuda/bin/cuobjdump")
    assert [row["version"] for row in found["candidates"]] == ["13.0.88", "13.1.1"]


def test_the_newest_versioned_folder_wins_over_an_older_one_on_path(tmp_path: Path) -> None:
    for version in ("9.2.1", "12.9.41", "13.0.88"):
        program(tmp_path / f"cuda-{version.rpartition('.')[0]}/bin/nvcc", version)
    decoy = program(tmp_path / "usr/bin/nvcc", "12.0.140")
    found = toolkit.resolve(root=str(tmp_path), find=lambda name: str(decoy) if name == "nvcc" else None)
    assert (found["version"], found["source"]) == ("13.0.88", "versioned")
    assert [row["source"] for row in found["candidates"]] == ["versioned", "versioned", "versioned", "path"]


def test_path_is_the_last_resort_and_a_link_leads_to_its_folder(tmp_path: Path) -> None:
    real = program(tmp_path / "opt/cuda/bin/nvcc", "13.0.88")
    link = tmp_path / "bin/nvcc"
    link.parent.mkdir()
    link.symlink_to(real)
    found = toolkit.resolve(root=str(tmp_path / "none"), find=lambda name: str(link) if name == "nvcc" else None)
    assert (found["source"], found["home"], found["nvcc"]) == ("path", str(tmp_path / "opt/cuda"), str(link))


def test_a_folder_that_is_a_link_to_another_is_asked_once(tmp_path: Path) -> None:
    program(tmp_path / "cuda-13.0/bin/nvcc", "13.0.88")
    (tmp_path / "cuda").symlink_to("cuda-13.0")
    assert len(toolkit.resolve(root=str(tmp_path), find=nobody)["candidates"]) == 1


def test_a_named_folder_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "cuda/bin/nvcc", "13.0.88")
    program(tmp_path / "mine/bin/nvcc", "12.9.41")
    found = toolkit.resolve(str(tmp_path / "mine"), root=str(tmp_path), find=nobody)
    assert (found["version"], found["source"]) == ("12.9.41", "variable")


def test_a_named_folder_without_nvcc_is_refused_and_not_replaced(tmp_path: Path) -> None:
    program(tmp_path / "cuda/bin/nvcc", "13.0.88")
    found = toolkit.resolve(str(tmp_path / "mine"), root=str(tmp_path), find=nobody)
    assert found["nvcc"] == ""
    assert found["text"] == f"no nvcc in {tmp_path}/mine/bin"


def test_one_that_does_not_answer_is_passed_over_and_told(tmp_path: Path) -> None:
    program(tmp_path / "cuda/bin/nvcc", "13.0.88", fails=True)
    program(tmp_path / "cuda-12.9/bin/nvcc", "12.9.41")
    found = toolkit.resolve(root=str(tmp_path), find=nobody)
    assert found["version"] == "12.9.41"
    assert found["candidates"][0]["error"] == "broken"


def test_a_dangling_link_and_a_file_that_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").symlink_to(tmp_path / "gone")
    broken = tmp_path / "cuda-13.0/bin/nvcc"
    broken.parent.mkdir(parents=True)
    broken.write_text("no program")
    found = toolkit.resolve(root=str(tmp_path), find=nobody)
    assert found["nvcc"] == ""
    assert str(broken) in found["text"]


def test_a_hang_is_told() -> None:
    found = toolkit.resolve("/", runner=lambda argv, *, timeout_seconds: Ran(124, "", "no answer"), find=nobody)
    assert found["nvcc"] == ""


def test_nothing_anywhere(tmp_path: Path) -> None:
    found = toolkit.resolve(root=str(tmp_path), find=nobody)
    assert found["text"] == f"no nvcc in {tmp_path}/cuda, {tmp_path}/cuda-* and PATH"
    assert found["candidates"] == []


def test_files_that_a_build_needs(tmp_path: Path) -> None:
    program(tmp_path / "cuda/bin/nvcc", "13.0.88")
    (tmp_path / "cuda/include").mkdir()
    (tmp_path / "cuda/include/a.h").touch()
    found = toolkit.resolve(root=str(tmp_path), find=nobody, required_files=["include/a.h", "include/b.h"])
    assert found["missing"] == ["include/b.h"]


def test_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "bin/nvcc", "13.0.88")
    assert toolkit.main(["--json", "--cuda-home", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "13.0.88"
    assert toolkit.main(["--cuda-home", os.path.join(str(tmp_path), "none")]) == 1
    assert "no nvcc" in capsys.readouterr().out
