"""What nvidia-smi can say, one recorded answer per case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds4 import gpu
from ds4.command import Ran

FIXTURES = Path(__file__).parent / "fixtures/gpu"


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


class Smi:
    """Stand-in for command.run: answers by argument, remembers what was asked."""

    def __init__(self, query: Ran, version: Ran | None = None, table: Ran | None = None) -> None:
        self.answers = {
            "query": query,
            "version": version or Ran(0, text("version_gb10"), ""),
            "table": table or Ran(0, "", ""),
        }
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], *, timeout_seconds: float) -> Ran:
        assert argv[0] == "nvidia-smi"
        kind = "query" if "--query-gpu" in " ".join(argv) else "version" if "--version" in argv else "table"
        self.asked.append(kind)
        return self.answers[kind]


def probe(answer: Ran, **more: Any) -> dict[str, Any]:
    return gpu.probe(runner=Smi(answer, **more), kernel_module_path=str(FIXTURES / "kernel_module.txt"))


def test_the_question_names_no_memory_field() -> None:
    assert gpu.QUERY == (
        "nvidia-smi",
        "--query-gpu=name,compute_cap,driver_version,vbios_version,uuid",
        "--format=csv,noheader",
    )


def test_gb10() -> None:
    assert probe(Ran(0, text("gb10"), "")) == {
        "gpus": [
            {
                "name": "NVIDIA GB10",
                "compute_cap": "12.1",
                "driver": "580.95.05",
                "vbios": "9A.0B.16.00.00",
                "uuid": "GPU-6c3a1d52-8f0e-4b7c-9d11-2f7c0b5a9e10",
            }
        ],
        "driver": "580.95.05",
        "kernel_module": "580.95.05",
        "cuda_supported": "13.0",
        "diagnosis": "ok",
        "text": "",
    }


def test_recorded_on_a_real_driver() -> None:
    """What an H200 with driver 580.159.04 said, and what the probe made of it there."""
    smi = Smi(Ran(0, text("h200"), ""), version=Ran(0, text("version_h200"), ""), table=Ran(0, text("table_h200"), ""))
    result = gpu.probe(runner=smi, kernel_module_path=str(FIXTURES / "kernel_module_h200.txt"))
    recorded = json.loads((FIXTURES / "h200.json").read_text())
    recorded.pop("toolkit")
    assert result == recorded
    assert (result["gpus"][0]["compute_cap"], result["cuda_supported"]) == ("9.0", "13.0")
    assert gpu.parse_cuda_supported(text("table_h200")) == "13.0"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gb10_na", [("NVIDIA GB10", "12.1", "")]),
        ("gb10_other_name", [("ACME Station G1, with GB10", "12.1", "9A.0B.1A.00.01")]),
        ("other_card", [("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", "98.02.55.00.05")]),
        ("two", [("NVIDIA GB10", "12.1", "9A.0B.16.00.00")] * 2),
        ("capability_unknown", [("NVIDIA GB10", "", "")]),
        ("capability_garbage", [("NVIDIA GB10", "", "9A")]),
    ],
)
def test_rows(name: str, rows: list[tuple[str, str, str]]) -> None:
    result = probe(Ran(0, text(name), ""))
    assert result["diagnosis"] == "ok"
    assert [(row["name"], row["compute_cap"], row["vbios"]) for row in result["gpus"]] == rows


@pytest.mark.parametrize(
    ("answer", "diagnosis", "word"),
    [
        (Ran(127, "", "nvidia-smi: command not found"), "no_driver", "command not found"),
        (Ran(9, text("not_communicating"), ""), "no_driver", "couldn't communicate"),
        (Ran(255, text("not_loaded"), ""), "no_driver", "Not Loaded"),
        (Ran(12, text("no_library"), ""), "no_driver", "libnvidia-ml.so"),
        (Ran(18, text("mismatch"), ""), "mismatch", "NVML library version: 580.126"),
        (Ran(6, text("no_devices"), ""), "no_device", "No devices were found"),
        (Ran(0, text("no_devices"), ""), "no_device", "No devices were found"),
        (Ran(15, text("lost"), ""), "no_device", "GPU is lost"),
        (Ran(124, "", "nvidia-smi: no answer within 20 s"), "timeout", "no answer within 20 s"),
        (Ran(255, text("unknown_error"), ""), "unparsable", "Unknown Error"),
        (Ran(2, text("field_unknown"), ""), "unparsable", "not a valid field"),
        (Ran(0, text("garbage"), ""), "unparsable", "<html>"),
        (Ran(0, text("half_garbage"), ""), "unparsable", "infoROM"),
        (Ran(0, text("empty"), ""), "unparsable", "said nothing"),
        (Ran(-11, "", ""), "unparsable", "said nothing"),
    ],
)
def test_diagnosis(answer: Ran, diagnosis: str, word: str) -> None:
    smi = Smi(answer)
    result = gpu.probe(runner=smi, kernel_module_path=str(FIXTURES / "kernel_module.txt"))
    assert result["diagnosis"] == diagnosis
    assert word in result["text"]
    assert result["gpus"] == []
    assert result["driver"] == "580.95.05"  # of the loaded kernel module
    assert smi.asked == ["query"]  # nothing more is asked of a driver that does not answer


def test_long_answers_are_shortened_and_printable() -> None:
    assert len(probe(Ran(0, "\x1b[31m" + "x" * 5000, ""))["text"]) <= 410
    assert probe(Ran(0, "a\x00b\nc", ""))["text"] == "a b c"


def test_cuda_of_the_driver_from_the_table_when_version_does_not_say() -> None:
    old = Ran(1, "", "Invalid argument")
    assert (
        probe(Ran(0, text("gb10"), ""), version=old, table=Ran(0, text("table_gb10"), ""))["cuda_supported"] == "13.0"
    )


def test_cuda_of_the_driver_unknown() -> None:
    assert (
        probe(Ran(0, text("gb10"), ""), version=Ran(1, "", ""), table=Ran(0, "CUDA Version: N/A", ""))["cuda_supported"]
        == ""
    )


def test_a_hang_of_the_second_question_ends_the_questions() -> None:
    smi = Smi(Ran(0, text("gb10"), ""), version=Ran(124, "", ""))
    assert gpu.probe(runner=smi)["cuda_supported"] == ""
    assert smi.asked == ["query", "version"]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("CUDA Version: 13.0", "13.0"),
        ("CUDA Version        : 12.8", "12.8"),
        ("CUDA UMD Version: 13.2", "13.2"),
        ("CUDA Version: N/A", ""),
        ("Driver Version: 580.95", ""),
    ],
)
def test_cuda_version(line: str, version: str) -> None:
    assert gpu.parse_cuda_supported(line) == version


def test_kernel_module_unknown() -> None:
    assert gpu.parse_kernel_module("") == ""


def test_stand_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("ds4.command.SEARCH_PATH", str(tmp_path))
    assert gpu.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnosis"] == "no_driver"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nexec /bin/cat {FIXTURES}/gb10.txt\n")
    smi.chmod(0o755)
    assert gpu.main([]) == 0
    assert "NVIDIA GB10  compute_cap 12.1" in capsys.readouterr().out


def test_a_hanging_program_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.probe(timeout_seconds=0.2)["diagnosis"] == "timeout"
