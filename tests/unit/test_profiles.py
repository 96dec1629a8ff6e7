"""What a profile means on a host, against the figures that the engine's author measured."""

from __future__ import annotations

from typing import Any

import pytest

from ds4 import profiles
from plugins.filter.ds4_engine import ds4_engine_config, ds4_profile_arithmetic, shipped_catalogue

CATALOGUE = shipped_catalogue()
FIGURES = CATALOGUE["figures"]
GIB = 1024**3
PAIR = 86720111488 + 6971241504
SPARK_KIB = 127535152  # MemTotal of a founders' box


def config(profile: str = "standard", settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return ds4_engine_config(
        settings or {},
        profile=profile,
        release="v0.6.5",
        paths={"kv": "/var/lib/ds4/kv"},
        weights={
            "generation": "0731",
            "files": {
                "base": {"path": "/w/b-0731.gguf", "sha256": "ca22ae2f8", "bytes": 86720111488},
                "drafter": {"path": "/w/d.gguf", "bytes": 6971241504},
            },
        },
        **options,
    )


# Every bundle in full: a changed number here is a changed promise.
BUNDLES: dict[str, dict[str, Any]] = {
    "standard": {"context_tokens": 524288, "memory_floor_gib": 4, "kv_persistence": True, "kv_budget_mib": 16384},
    "full_window": {"context_tokens": 1048576, "memory_floor_gib": 4, "kv_persistence": True, "kv_budget_mib": 16384},
    "three_million": {
        "context_tokens": 786432,
        "memory_floor_gib": 1,
        "banks": 6,
        "bank_reclaim": False,
        "kv_persistence": True,
        "kv_budget_mib": 32768,
    },
    "shared_desktop": {"context_tokens": 131072, "memory_floor_gib": 8, "kv_persistence": True, "kv_budget_mib": 8192},
    "agents": {
        "context_tokens": 524288,
        "memory_floor_gib": 4,
        "reasoning_replay": "drop",
        "tool_slip_resample": True,
        "kv_persistence": True,
        "kv_budget_mib": 16384,
    },
}


def test_the_table_covers_every_profile() -> None:
    assert set(BUNDLES) == set(CATALOGUE["profiles"])


@pytest.mark.parametrize("name", BUNDLES)
def test_a_profile_is_its_bundle_and_serves(name: str) -> None:
    result = config(name)
    assert result["errors"] == []
    assert result["settings"] == BUNDLES[name]


def test_the_recipe_for_three_million_is_the_published_one() -> None:
    result = config("three_million")
    assert result["args"][4:8] == ["--ctx", "786432", "--mem-floor-gb", "1"]
    assert result["env"] == {"DS4_SERVER_COALESCE_MAX": "6", "DS4_BATCH_VMM_TRIM": "0"}


def test_the_recipe_for_three_million_needs_serving_mode() -> None:
    assert config("three_million")["requires_serving_mode"] is True
    assert config("three_million", serving_mode="serving")["errors"] == []
    for mode in ("unmanaged", "desktop"):
        errors = config("three_million", serving_mode=mode)["errors"]
        assert len(errors) == 1
        assert f"Found: serving_mode_target: {mode}. Required: serving_mode_target: serving." in errors[0]
    assert config("standard", serving_mode="desktop")["errors"] == []


def test_a_profile_newer_than_the_engine_is_refused() -> None:
    errors = ds4_engine_config(
        {"tool_slip_resample": None, "reasoning_replay": None},
        profile="agents",
        release="v0.6.3",
        paths={"kv": "/k"},
        weights={"generation": "0731", "files": {"base": {"path": "/b-0731"}}},
        mode="plain",
    )["errors"]
    assert len(errors) == 1
    assert (
        "The profile agents needs a newer engine. Found: engine v0.6.3. Required: engine v0.6.4 or newer." in errors[0]
    )


@pytest.mark.parametrize(
    ("context", "low", "high", "basis"),
    [
        (4096, 32, 32, "measured"),
        (16384, 32, 32, "measured"),
        (131072, 9, 32, "between measurements"),
        (262144, 9, 9, "measured"),
        (524288, 6, 6, "measured"),
        (786432, 4, 6, "between measurements"),
        (1048576, 3, 6, "between measurements"),
    ],
)
def test_banks_to_expect(context: int, low: int, high: int, basis: str) -> None:
    assert profiles.expected_banks(context, None, FIGURES) == {"low": low, "high": high, "basis": basis}


def test_banks_that_are_set_are_taken_at_their_word() -> None:
    assert profiles.expected_banks(786432, 6, FIGURES) == {"low": 6, "high": 6, "basis": "set"}


def test_figures_of_the_standard_profile() -> None:
    sums = ds4_profile_arithmetic(config())
    assert sums["gib_per_context"] == 2.15  # 524288 × 4.3 KiB
    assert sums["charge_tokens"] == 32768
    assert sums["charge_gib"] == 0.13
    assert sums["prompt_tokens_without_limit"] == 524288 - 32768
    assert sums["disk_tokens"] == 3647220  # 16 GiB at 4.6 KiB
    assert (sums["free_gib"], sums["contexts_that_fit"], sums["warnings"]) == (None, None, [])


def test_three_million_tokens_are_four_contexts_of_the_recipe() -> None:
    sums = ds4_profile_arithmetic(config("three_million"))
    # The proving run held 3019176 tokens in about 13 GiB.
    assert 4 * sums["gib_per_context"] == pytest.approx(3019176 * 4.3 / 1024**2, rel=0.05)


def test_memory_of_a_fresh_spark_before_and_after_loading() -> None:
    before = ds4_profile_arithmetic(config(), mem_available_kib=118 * 1024**2)
    # 118 GiB − pair 87.3 − start-up cache 8.2 − margin 2 − floor 4
    assert before["free_gib"] == pytest.approx(118 - PAIR / GIB - 8.2 - 2 - 4, abs=0.1)
    assert before["contexts_that_fit"] == 7
    after = ds4_profile_arithmetic(config(), mem_available_kib=15 * 1024**2, loaded=True, banks_total=6)
    assert after["free_gib"] == 11.0
    assert after["banks"]["total"] == 6
    assert "; the engine reports 6" in after["lines"][1]


def test_only_the_files_of_the_mode_are_counted() -> None:
    assert config()["weights_bytes"] == PAIR
    assert config(mode="plain")["weights_bytes"] == 86720111488
    available = 118 * 1024**2
    plain, pair = (
        ds4_profile_arithmetic(config(mode=mode), mem_available_kib=available) for mode in ("plain", "dspark")
    )
    assert plain["free_gib"] - pair["free_gib"] == pytest.approx(6971241504 / GIB, abs=0.1)


def test_banks_follow_the_memory_of_a_host_that_has_less() -> None:
    sums = ds4_profile_arithmetic(config("full_window"), mem_available_kib=114 * 1024**2)
    assert (sums["contexts_that_fit"], sums["banks"]["low"], sums["banks"]["high"]) == (2, 2, 2)
    assert sums["lines"][1] == "banks to expect: 2 (estimate, by this host's memory)"
    served = ds4_profile_arithmetic(config("full_window"), mem_available_kib=9 * 1024**2, loaded=True)
    assert (served["banks"]["low"], served["banks"]["high"]) == (
        3,
        6,
    )  # what is left beside it tells nothing about banks
    recipe = ds4_profile_arithmetic(config("three_million"), mem_available_kib=104 * 1024**2)
    assert recipe["lines"][1] == "banks to expect: 6 (as set)"


def test_prompts_on_disk_are_said_to_be_in_plain_text() -> None:
    kept = ds4_profile_arithmetic(config())["lines"][-1]
    assert "in plain text" in kept and kept.endswith("kv_persistence: false keeps none")


def test_a_box_that_is_too_full_is_warned_of_with_the_cure() -> None:
    sums = ds4_profile_arithmetic(config("full_window"), mem_available_kib=104 * 1024**2)
    assert sums["contexts_that_fit"] == 0
    assert "Not one full context of 1048576 tokens is likely to fit" in sums["warnings"][0]
    assert "engine_service_settings.context_tokens" in sums["warnings"][0]


@pytest.mark.parametrize(
    ("settings", "charged"),
    [
        ({"admission_tranche_tokens": 8192}, 8192),
        ({"admission_tranche_tokens": 0}, 393216),  # the engine's longest answer, not the context
        ({"admission_tranche_tokens": 0, "context_tokens": 262144}, 262144),
        ({"admission_tranche_tokens": 0, "max_output_tokens": 1000}, 1000),
        ({"max_output_tokens": 1000}, 1000),
        ({"context_tokens": 16384}, 16384),
    ],
)
def test_what_a_request_without_a_limit_is_charged(settings: dict[str, Any], charged: int) -> None:
    sums = ds4_profile_arithmetic(config(settings=settings))
    assert sums["charge_tokens"] == charged
    assert sums["prompt_tokens_without_limit"] == config(settings=settings)["context"] - charged


def test_lines_are_marked_as_estimates() -> None:
    lines = ds4_profile_arithmetic(config(), mem_available_kib=SPARK_KIB)["lines"]
    assert lines[0] == "profile standard: context 524288 tokens, about 2.15 GiB when full"
    assert lines[1] == "banks to expect: 6 (estimate, measured elsewhere)"
    assert "about" in lines[2]
    assert "after loading: about" in lines[3]
    assert "/var/lib/ds4/kv/ds4-0731-ca22ae2f" in lines[4]


def test_every_figure_names_its_source() -> None:
    for name, figure in FIGURES.items():
        assert figure["source"].strip(), name


def test_a_disk_budget_below_one_context_is_warned_of() -> None:
    sums = ds4_profile_arithmetic(config(settings={"kv_budget_mib": 512}))
    assert "512 MiB, about 113975 tokens) holds less than one full context of 524288 tokens" in sums["warnings"][0]
    off = ds4_profile_arithmetic(config(settings={"kv_budget_mib": 512, "kv_persistence": False}))
    assert (off["warnings"], off["disk_tokens"], len(off["lines"])) == ([], None, 3)
