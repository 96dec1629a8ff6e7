"""The moved variables arrived, and nothing of ours lies where the defaults would have put it."""

from __future__ import annotations

from typing import Any


def running(host: Any) -> tuple[str, str]:
    with host.sudo():
        pid = host.check_output("systemctl show ds4 -p MainPID --value")
        command = host.check_output(f"tr '\\0' ' ' </proc/{pid}/cmdline")
        environment = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ")
    return command, environment


def test_nothing_lies_at_the_default_places(host: Any) -> None:
    for path in ("/opt/ds4", "/var/lib/ds4", "/usr/local/bin/ds4-serve", "/usr/local/bin/ds4-fetch"):
        assert not host.file(path).exists, path
    assert not host.user("ds4").exists


def test_settings_reach_the_process(host: Any, expected: dict[str, Any]) -> None:
    command, environment = running(host)
    settings = expected["settings"]
    for flag, name in (("--port", "port"), ("--ctx", "context_tokens"), ("--mem-floor-gb", "memory_floor_gib")):
        assert f"{flag} {settings[name]} " in command + " "
    assert "DS4_SERVER_WARM=1" in environment
    assert "--reasoning-replay drop" in command or "DS4_REASONING_REPLAY=drop" in environment


def test_plain_mode_has_no_drafter(host: Any) -> None:
    command, _ = running(host)
    assert "--dspark" not in command and ("--no-spec" in command or "--no-dspark" in command)


def test_the_stop_is_as_patient_as_asked(host: Any) -> None:
    assert host.check_output("systemctl show ds4 -p TimeoutStopUSec --value") == "1min 30s"
