"""What is true when no variable was moved."""

from __future__ import annotations

from typing import Any

FOREIGN = "/usr/local /etc /opt /var/lib /home /root"


def test_everything_of_ours_bears_our_marker(host: Any) -> None:
    with host.sudo():
        for directory in ("/opt/ds4", "/var/lib/ds4"):
            assert host.file(f"{directory}/.ds4-fleet").exists
        for unit in host.check_output("ls /etc/systemd/system").split():
            if unit.startswith("ds4"):
                assert "ds4-fleet" in host.file(f"/etc/systemd/system/{unit}").content_string


def test_it_listens_on_loopback_only(host: Any) -> None:
    assert host.socket("tcp://127.0.0.1:8000").is_listening
    assert not host.socket("tcp://0.0.0.0:8000").is_listening


def test_speculation_is_armed_and_counts(host: Any) -> None:
    text = host.check_output("curl -sS http://127.0.0.1:8000/metrics")
    drafts = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("ds4_spec_drafts_total")]
    assert sum(drafts) > 0
