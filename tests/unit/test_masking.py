"""What bears the name of a secret is never shown, and that it changed is."""

from __future__ import annotations

import pytest

from ds4.masking import is_secret, masked, masked_environment, masked_file
from ds4.systemd_text import environment_file


@pytest.mark.parametrize("name", ["HF_TOKEN", "my_secret", "DB_PASSWORD", "--api-key", "hub_token=hf_1", "OPENAI_KEYS"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert masked(name, "hunter2") == "***"
    assert masked(name, "") == ""


@pytest.mark.parametrize(
    "name", ["--kv-cache-min-tokens", "DS4_SERVER_SERIAL_MAX_TOKENS", "--tokenizer", "-c", "DS4_NOTE"]
)
def test_names_of_the_engine_are_none(name: str) -> None:
    assert masked(name, "7") == "7"


def test_a_changed_secret_is_told_without_its_value() -> None:
    old = {"HF_TOKEN": "one", "SAME_KEY": "x", "X": "1"}
    new = {"HF_TOKEN": "two", "SAME_KEY": "x", "X": "2", "NEW_SECRET": "y"}
    assert masked_environment(new, old) == {
        "HF_TOKEN": "*** (another one)",
        "SAME_KEY": "***",
        "X": "2",
        "NEW_SECRET": "***",
    }


def test_an_environment_file_keeps_its_form() -> None:
    old = environment_file({"A_KEY": "one", "B": "x y", "C_TOKEN": 'line\n"next\\" X=1', "D_KEY": "same"})
    new = environment_file({"A_KEY": "two", "B": "x z", "C_TOKEN": 'line\n"next\\" X=1', "D_KEY": "same"})
    assert masked_file(old) == 'A_KEY=***\nB="x y"\nC_TOKEN=***\nD_KEY=***\n'
    assert masked_file(new, old) == 'A_KEY=*** (another one)\nB="x z"\nC_TOKEN=***\nD_KEY=***\n'
