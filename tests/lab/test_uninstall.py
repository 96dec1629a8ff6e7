"""uninstall.yml: afterwards the host's file tree is the one from before, and nothing that is not ours was touched."""

from __future__ import annotations

import pytest

from lab import harness
from lab.api import Host
from lab.served import LIMITS, answers, engines, serving

pytestmark = pytest.mark.lab

# What a running system writes by itself, and where logs of what happened belong.
PRUNED = "/proc /sys /run /dev /tmp /var/log /var/tmp /var/cache /root/.ansible /home/spark/.ansible"


def tree(host: Host) -> list[str]:
    """Every path with type, owner, mode and link target."""
    pruned = " -o ".join(f"-path {path}" for path in PRUNED.split())
    return sorted(host.run(f"find / \\( {pruned} \\) -prune -o -printf '%p %y %U:%G %m %l\\n'").out.splitlines())


def play(host: Host, playbook: str = "site.yml", **extra: object) -> harness.Result:
    return harness.play(host.lab, playbook, extra_vars={**LIMITS, **extra})


def test_nothing_of_ours_is_left_and_a_new_installation_works(spark: Host) -> None:
    before = tree(spark)
    first = play(spark, serving_mode_target="serving")
    assert first.rc == 0, first.text
    served = tree(spark)
    assert served != before

    plan = play(spark, "uninstall.yml")
    assert plan.rc != 0
    assert any("nothing was removed" in text for text in plan.failed("spark1"))
    assert "/etc/systemd/system/ds4.service" in plan.text
    assert tree(spark) == served
    assert answers(spark)

    partly = play(spark, "uninstall.yml", uninstall_confirm=True)
    assert partly.rc == 0, partly.text
    assert engines(spark) == 0
    assert spark.run("ls /var/lib/ds4/weights/*.gguf | wc -l").out.strip() == "2", "weights go only when asked"
    assert spark.run("ls /var/lib/ds4/kv/*/*.kv | wc -l").out.strip() != "0", "conversations go only when asked"

    wholly = play(spark, "uninstall.yml", uninstall_confirm=True, uninstall_weights=True, uninstall_conversations=True)
    assert wholly.rc == 0, wholly.text
    assert tree(spark) == before
    assert spark.run("id ds4", check=False).rc != 0

    again = play(spark)
    assert again.rc == 0, again.text
    assert serving(spark) == "v0.6.5"


def test_what_is_not_ours_stays(spark: Host) -> None:
    assert play(spark).rc == 0
    spark.run(
        "mkdir -p /etc/systemd/system/ds4.service.d && echo '[Service]' >/etc/systemd/system/ds4.service.d/mine.conf"
    )
    spark.run("mkdir /opt/ds4/mine && echo x >/opt/ds4/mine/file && ln -sf /bin/true /usr/local/bin/mine")
    spark.run("cp /var/lib/ds4/weights/DSpark-drafter-Q2K-Q8-0731.gguf /var/lib/ds4/weights/my-own.gguf")
    result = play(spark, "uninstall.yml", uninstall_confirm=True, uninstall_weights=True)
    assert result.rc == 0, result.text
    for path in ("/etc/systemd/system/ds4.service.d/mine.conf", "/opt/ds4/mine/file", "/usr/local/bin/mine"):
        assert spark.exists(path), path
    assert spark.exists("/var/lib/ds4/weights/my-own.gguf"), "no record of ours names it"
    assert "left: " in result.text
