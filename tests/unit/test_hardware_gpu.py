"""On a machine with an NVIDIA GPU: the probe and the real driver understand each other. Not run elsewhere."""

from __future__ import annotations

import pytest

from ds4 import gpu, toolkit
from ds4.command import run, which

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(which("nvidia-smi") is None, reason="not run: no NVIDIA driver on this machine"),
]


def test_the_driver_answers_every_question() -> None:
    result = gpu.probe()
    assert result["diagnosis"] == "ok", result["text"]
    assert result["cuda_supported"]
    assert result["driver"] == result["kernel_module"]
    listed = run(["nvidia-smi", "--list-gpus"]).out.splitlines()
    assert len(result["gpus"]) == len(listed)
    for row, line in zip(result["gpus"], listed):
        assert row["name"] in line
        assert row["uuid"] in line
        assert row["compute_cap"]


@pytest.mark.skipif(toolkit.resolve()["nvcc"] == "", reason="not run: no CUDA toolkit on this machine")
def test_the_toolkit_is_found() -> None:
    found = toolkit.resolve()
    assert found["version"].startswith(found["release"])
    assert run([found["nvcc"], "--version"]).rc == 0
