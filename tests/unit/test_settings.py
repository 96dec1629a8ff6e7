"""Settings of the engine: every name of the data file by table, every combination the engine stumbles over."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4 import settings as mechanism
from plugins.filter.ds4_engine import ds4_engine_config, shipped_catalogue

CATALOGUE = shipped_catalogue()
SETTINGS = CATALOGUE["settings"]
PATHS = {"kv": "/var/lib/ds4/kv", "codex_models": "/opt/ds4/current/codex-models.json"}
MODERN: dict[str, Any] = {
    "generation": "0731",
    "files": {
        "base": {"path": "/w/Flash-0731.gguf", "sha256": "ca22ae2f838e14077c22"},
        "drafter": {"path": "/w/DSpark-drafter-Q2K-Q8-0731.gguf", "sha256": "8fa26956"},
    },
}
LEGACY: dict[str, Any] = {
    "generation": "legacy",
    "files": {
        "base": {"path": "/w/DeepSeek-V4-Flash-x.gguf", "sha256": "efc7ed607ff2"},
        "mtp": {"path": "/w/Flash-MTP.gguf", "sha256": "afd481ee689d"},
    },
}
BARE = {"profiles": {"bare": {"description": "nothing set", "settings": {}}}}


def config(settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A configuration that starts from an empty profile, so that only what a test sets is written."""
    given_options: dict[str, Any] = {
        "profile": "bare",
        "release": "v0.6.5",
        "paths": {"kv": PATHS["kv"]},
        "weights": MODERN,
        "mode": "dspark",
    }
    given_options.update(options)
    return ds4_engine_config(
        settings or {}, {**CATALOGUE, "profiles": {**CATALOGUE["profiles"], **BARE["profiles"]}}, **given_options
    )


FILES = ["-m", "/w/Flash-0731.gguf", "--dspark", "/w/DSpark-drafter-Q2K-Q8-0731.gguf"]
SAFE = ["--no-update-check"]

# name: (a value, what it becomes); the mode's own settings are judged further down.
RENDERED: dict[str, tuple[Any, list[str] | dict[str, str]]] = {
    "host": ("127.0.0.2", ["--host", "127.0.0.2"]),
    "port": (8080, ["--port", "8080"]),
    "cors": (True, ["--cors"]),
    "context_tokens": (262144, ["--ctx", "262144"]),
    "max_output_tokens": (4096, ["--tokens", "4096"]),
    "memory_floor_gib": (2, ["--mem-floor-gb", "2"]),
    "memory_governor": ("observe", {"DS4_MEMGOV": "observe"}),
    "banks": (6, {"DS4_SERVER_COALESCE_MAX": "6"}),
    "admission_band_x1024": (1100, {"DS4_CONT_ADMIT_BAND_X1024": "1100"}),
    "admission_tranche_tokens": (0, {"DS4_CONT_ADMIT_TRANCHE": "0"}),
    "bank_reclaim": (False, {"DS4_BATCH_VMM_TRIM": "0"}),
    "serial_lane": (False, ["--no-serial"]),
    "serial_idle_reap_seconds": (0, {"DS4_SERIAL_IDLE_REAP_S": "0"}),
    "weight_residency": ("lazy", {"DS4_WEIGHT_RESIDENCY": "lazy"}),
    "warm_weights": (True, ["--warm-weights"]),
    "continuous": (True, {"DS4_SERVER_CONTINUOUS": "1"}),
    "prefill_chunk_tokens": (2048, {"DS4_CONT_PREFILL_CHUNK": "2048"}),
    "prefill_chunk_live_tokens": (1024, {"DS4_CONT_PREFILL_CHUNK_LIVE": "1024"}),
    "max_clients": (16, {"DS4_SERVER_MAX_CLIENTS": "16"}),
    "max_queue": (0, {"DS4_SERVER_MAX_QUEUE": "0"}),
    "max_queue_age_seconds": (60, {"DS4_SERVER_MAX_QUEUE_AGE_S": "60"}),
    "full_stack_required": (True, ["--preset", "spark"]),
    "dspark_max_live_requests": (1, {"DS4_DSPARK_MAX_NLIVE": "1"}),
    "dspark_quench": (False, {"DS4_DSPARK_QUENCH": "0"}),
    "dspark_quench_guard": (2.3, {"DS4_DSPARK_SHADOW_GUARD": "2.3"}),
    "dspark_verify_depth": (4, {"DS4_DSPARK_VERIFY_DEPTH": "4"}),
    "dspark_max_kv_tokens": (65536, {"DS4_DSPARK_MAX_KV": "65536"}),
    "mtp_draft_tokens": (2, ["--mtp-draft", "2"]),
    "mtp_margin": (3, ["--mtp-margin", "3"]),
    "kv_persistence": (True, ["--kv-disk-dir", "/var/lib/ds4/kv/ds4-0731-ca22ae2f"]),
    "kv_budget_mib": (512, ["--kv-disk-space-mb", "512"]),
    "kv_min_tokens": (64, ["--kv-cache-min-tokens", "64"]),
    "kv_cold_max_tokens": (0, ["--kv-cache-cold-max-tokens", "0"]),
    "kv_continued_interval_tokens": (5000, ["--kv-cache-continued-interval-tokens", "5000"]),
    "kv_boundary_trim_tokens": (16, ["--kv-cache-boundary-trim-tokens", "16"]),
    "kv_boundary_align_tokens": (4096, ["--kv-cache-boundary-align-tokens", "4096"]),
    "kv_reject_other_quant": (True, ["--kv-cache-reject-different-quant"]),
    "reasoning_effort": ("off", ["--reasoning-effort", "off"]),
    "reasoning_effort_native": (True, ["--reasoning-effort-native"]),
    "reasoning_replay": ("drop", ["--reasoning-replay", "drop"]),
    "tool_call_reminder": (False, ["--tool-call-reminder", "off"]),
    "tool_call_reminder_min_bytes": (0, {"DS4_TOOL_CALL_REMINDER_MIN_BYTES": "0"}),
    "tool_slip_resample": (True, ["--tool-slip-resample"]),
    "tool_slip_dump_directory": ("/var/log/ds4", ["--tool-slip-dump", "/var/log/ds4"]),
    "exact_tool_replay": (False, ["--disable-exact-dsml-tool-replay"]),
    "tool_memory_max_ids": (10, ["--tool-memory-max-ids", "10"]),
    "default_temperature": (0.7, {"DS4_SERVER_DEFAULT_TEMP": "0.7"}),
    "power_percent": (80, ["--power", "80"]),
}
# Switches write nothing in the position that is the engine's own.
SILENT: dict[str, Any] = {
    "cors": False,
    "memory_governor": "enforce",
    "serial_lane": True,
    "warm_weights": False,
    "full_stack_required": False,
    "kv_persistence": False,
    "kv_reject_other_quant": False,
    "reasoning_effort_native": False,
    "tool_slip_resample": False,
    "exact_tool_replay": True,
}
WRONG_TYPE: dict[str, list[Any]] = {
    "int": ["many", 1.5, True, [1], "1e3"],
    "float": ["much", True, [0.5], "nan", "inf"],
    "bool": ["maybe", 2, [], 1.0],
    "choice": ["sometimes", True, 3],
    "ipv4": ["spark.local", "::1", "1.2.3", 8000, "127.0.0.1 ", "224.0.0.1", "255.255.255.255"],
    "path": ["relative/path", "/with\nnewline", 5, ""],
}


def test_the_tables_cover_every_setting() -> None:
    assert set(RENDERED) == set(SETTINGS)
    assert set(SILENT) == {
        name
        for name, spec in SETTINGS.items()
        if spec.get("render", "value") in ("switch_when_true", "switch_when_false", "value_unless", "kv_directory")
    }


@pytest.mark.parametrize("name", RENDERED)
def test_a_right_value_becomes_its_flag_or_variable_and_nothing_else(name: str) -> None:
    value, expected = RENDERED[name]
    settings = {name: value}
    base = list(FILES)
    if name.startswith("kv_") and name != "kv_persistence":
        settings["kv_persistence"] = True
        base += ["--kv-disk-dir", "/var/lib/ds4/kv/ds4-0731-ca22ae2f"]
    result = config(settings)
    assert result["errors"] == []
    if isinstance(expected, dict):
        assert result["args"] == base + SAFE
        assert result["env"] == expected
    else:
        assert result["args"] == base + expected + SAFE
        assert result["env"] == {}


@pytest.mark.parametrize("name", SILENT)
def test_the_engine_s_own_position_writes_nothing(name: str) -> None:
    result = config({name: SILENT[name]})
    assert (result["errors"], result["args"], result["env"]) == ([], FILES + SAFE, {})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, spec in SETTINGS.items() for value in WRONG_TYPE[spec["type"]]]
)
def test_a_wrong_type_is_refused_with_what_is_required(name: str, value: Any) -> None:
    if name == "reasoning_effort" and value is False:
        return
    errors = config({name: value})["errors"]
    assert len(errors) == 1
    assert errors[0].startswith(f"engine_service_settings.{name} has a value that it cannot have. Found: {value!r}")
    assert f"Required: {mechanism.allowed(SETTINGS[name])}." in errors[0]
    assert f"Cure: correct engine_service_settings.{name}." in errors[0]


@pytest.mark.parametrize("name", [name for name, spec in SETTINGS.items() if "range" in spec])
def test_both_ends_of_a_range_are_allowed_and_what_lies_beyond_is_not(name: str) -> None:
    spec = SETTINGS[name]
    lowest, highest = spec["range"]
    step = 1 if spec["type"] == "int" else 0.5
    for inside in (lowest, highest, str(highest)):
        mechanism.read_value(spec, inside)
    for outside in (lowest - step, highest + step, str(lowest - step)):
        result = config({name: outside})
        assert any(
            f"engine_service_settings.{name} has a value that it cannot have" in error for error in result["errors"]
        )
        assert (result["args"], result["env"]) == (FILES + SAFE, {})


@pytest.mark.parametrize("name", [name for name, spec in SETTINGS.items() if spec.get("since")])
def test_a_setting_newer_than_the_pin_is_refused_naming_both_versions(name: str) -> None:
    since = SETTINGS[name]["since"]
    value, _expected = RENDERED[name]
    too_old = config({name: value}, release="v0.1.0")
    assert any(
        error.startswith(
            f"The setting {name} is newer than the pinned engine. Found: engine v0.1.0. Required: engine v{since} or newer."
        )
        for error in too_old["errors"]
    )
    assert config({name: value}, release=f"v{since}")["errors"] == []


def test_a_window_that_the_pinned_engine_cannot_fill_is_refused() -> None:
    errors = config({"context_tokens": 1048576}, release="v0.6.2")["errors"]
    assert (
        "The setting context_tokens has a value that the pinned engine does not serve yet. "
        "Found: 1048576 with engine v0.6.2. Required: at most 1015936, or engine v0.6.3 or newer." in errors[0]
    )
    assert config({"context_tokens": 1015936}, release="v0.6.2")["errors"] == []
    assert config({"context_tokens": 1048576}, release="v0.6.3")["errors"] == []


@pytest.mark.parametrize(
    ("release", "context"), [("v0.6.1", 32768), ("v0.6.2", 262144), ("v0.6.5", 262144), ("main", 262144)]
)
def test_the_context_that_nobody_sets_is_the_pinned_engine_s(release: str, context: int) -> None:
    """Else the catalogue would name another window than the engine serves."""
    assert config({}, release=release)["context"] == context


def test_versions_compare_by_number_and_by_every_part() -> None:
    assert mechanism.version("v0.6.3.1") == (0, 6, 3, 1)
    assert mechanism.version("0.6.5-3-gabcdef") == (0, 6, 5)
    assert mechanism.version("main") is None
    assert mechanism.older((0, 6, 3), "0.6.3.1")
    assert not mechanism.older((0, 6, 10), "0.6.9")
    assert not mechanism.older((0, 6, 3, 0), "0.6.3")


def test_a_release_without_a_number_is_not_judged_but_said() -> None:
    result = config({"tool_call_reminder": True}, release="main")
    assert result["errors"] == []
    assert any("'main' is no release number" in warning for warning in result["warnings"])


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("context_token", "did you mean engine_service_settings.context_tokens"),
        ("mem_floor_gib", "did you mean engine_service_settings.memory_floor_gib"),
        ("ctx", "use engine_service_settings.context_tokens"),
        ("--mem-floor-gb", "use engine_service_settings.memory_floor_gib"),
        ("DS4_SERVER_COALESCE_MAX", "use engine_service_settings.banks"),
        ("DS4_REASONING_REPLAY", "use engine_service_settings.reasoning_replay"),
        ("-c", "use engine_service_settings.context_tokens"),
        ("DS4_CONT_GRACE_S", "put environment variables of the engine into engine_service_extra_env"),
        ("--quality", "put flags of the engine into engine_service_extra_args"),
        ("zzzzzz", "use engine_service_extra_args or engine_service_extra_env for what has no setting"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(name: str, cure: str) -> None:
    errors = config({name: 1})["errors"]
    assert len(errors) == 1
    assert errors[0].startswith(f"engine_service_settings.{name} is not a known setting.")
    assert f"Cure: {cure}." in errors[0]


def test_everything_wrong_comes_at_once() -> None:
    result = config(
        {"context_tokens": "big", "nonsense": 1, "host": "0.0.0.0"},  # noqa: S104
        profile="standrd",
        mode="turbo",
        expose="wan",
        extra_args=["--kv-dir"],
        extra_env={"DS4_CONT_MTP_GATE": 1},
    )
    assert len(result["errors"]) == 7
    assert result["message"].splitlines() == result["errors"]
    assert "Cure: set engine_service_profile: standard, and change single values" in result["message"]


def test_null_takes_a_value_of_the_profile_away() -> None:
    assert "--mem-floor-gb" in config({}, profile="standard")["args"]
    assert "--mem-floor-gb" not in config({"memory_floor_gib": None}, profile="standard")["args"]


def test_a_wrong_value_does_not_fall_back_to_the_profile_s() -> None:
    result = config({"context_tokens": "huge"}, profile="standard")
    assert "--ctx" not in result["args"]


def test_text_counts_as_the_number_or_boolean_that_it_says() -> None:
    assert config({"port": "9000", "cors": "yes", "mtp_margin": "2.5"}, mode="dspark")["args"][4:] == [
        "--port", "9000", "--cors", "--mtp-margin", "2.5", *SAFE,
    ]  # fmt: skip


def test_a_bare_off_in_yaml_is_the_word_off() -> None:
    assert config({"reasoning_effort": False})["args"][4:6] == ["--reasoning-effort", "off"]
    assert config({"reasoning_effort": True})["errors"]


# ------------------------------------------------------------------------------------------------ combinations


@pytest.mark.parametrize(
    ("settings", "mode", "message"),
    [
        ({"banks": 1}, "dspark", "One bank turns off continuous batching, and speculation with it"),
        ({"banks": 1}, "plain", "One bank turns off continuous batching"),
        ({"continuous": False}, "dspark", "Speculation runs in the continuous batch only"),
        ({"continuous": False, "serial_lane": False}, "plain", "no request can be served"),
        ({"full_stack_required": True}, "plain", "full_stack_required demands the drafter"),
        ({"kv_persistence": True, "kv_cold_max_tokens": 100}, "dspark", "The longest first prompt to keep is shorter"),
        ({"kv_persistence": True, "kv_min_tokens": 40000}, "dspark", "The longest first prompt to keep is shorter"),
        ({"port": 80}, "dspark", "The service user may not bind a port below 1024"),
    ],
)
def test_what_the_engine_refuses_or_silently_undoes_is_refused(
    settings: dict[str, Any], mode: str, message: str
) -> None:
    errors = config(settings, mode=mode)["errors"]
    assert len(errors) == 1
    assert message in errors[0]


def test_one_bank_without_batch_and_speculation_is_what_it_says() -> None:
    assert config({"banks": 1, "continuous": False}, mode="plain")["errors"] == []


@pytest.mark.parametrize(
    ("settings", "options", "warning"),
    [
        ({"mtp_draft_tokens": 2}, {}, "mtp_draft_tokens has no effect in mode dspark"),
        ({"dspark_quench": True}, {"mode": "plain"}, "dspark_quench has no effect in mode plain"),
        ({"kv_budget_mib": 100}, {}, "kv_budget_mib have no effect while kv_persistence is false"),
        (
            {"tool_call_reminder": False, "tool_call_reminder_min_bytes": 1},
            {},
            "no effect while tool_call_reminder is false",
        ),
        ({"memory_floor_gib": 0}, {}, "memory_floor_gib: 0 turns off the guard"),
        ({"dspark_max_live_requests": 2}, {}, "reported to crash at 2"),
        ({"max_output_tokens": 300000}, {}, "is cut to the context of 262144 tokens"),
        ({"tool_slip_dump_directory": "/d"}, {}, "whole requests and answers in plain text"),
        ({"reasoning_effort": "max"}, {}, "long thinking can hit the limit"),
        ({}, {"expose": "lan"}, "engine_service_expose: lan has no effect while host is 127.0.0.1"),
        ({"host": "10.0.0.5"}, {"expose": "lan"}, "listens on 10.0.0.5:8000 without authentication"),
        ({}, {"extra_args": ["--trace", "/t"]}, "--trace: it writes prompts in plain text"),
        ({}, {"extra_args": ["--thread", "8"]}, "--thread is not known here (did you mean --threads?)"),
        (
            {},
            {"extra_env": {"DS4_SERVER_WARMM": "0"}},
            "DS4_SERVER_WARMM is not known here (did you mean DS4_SERVER_WARM?)",
        ),
        ({}, {"extra_env": {"DS4_PREFILL_NOFENCE": 1}}, "may crash the engine"),
    ],
)
def test_what_is_legal_but_has_a_catch_is_said(settings: dict[str, Any], options: dict[str, Any], warning: str) -> None:
    result = config(settings, **options)
    assert result["errors"] == []
    assert [text for text in result["warnings"] if warning in text]


def test_a_quiet_configuration_warns_of_nothing() -> None:
    for profile in CATALOGUE["profiles"]:
        assert config({}, profile=profile)["warnings"] == []


# ------------------------------------------------------------------------------------------------ network


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost"])
def test_loopback_needs_no_consent(host: str) -> None:
    result = config({"host": host})
    assert (result["errors"], result["warnings"]) == ([], [])
    assert result["host"] == ("127.0.0.1" if host == "localhost" else host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5"])  # noqa: S104
def test_the_lan_needs_consent_and_is_told_what_that_means(host: str) -> None:
    refused = config({"host": host})
    assert len(refused["errors"]) == 1
    assert f"Found: host: {host}." in refused["errors"][0]
    assert "engine_service_expose: lan" in refused["errors"][0]
    allowed = config({"host": host}, expose="lan")
    assert allowed["errors"] == []
    assert "without authentication or encryption" in allowed["warnings"][0]


# ------------------------------------------------------------------------------------------------ modes and weights


@pytest.mark.parametrize(
    ("mode", "weights", "arguments", "in_force"),
    [
        ("dspark", MODERN, FILES, "dspark"),
        ("auto", MODERN, FILES, "dspark"),
        ("plain", MODERN, ["-m", "/w/Flash-0731.gguf", "--no-spec"], "plain"),
        ("auto", LEGACY, ["-m", "/w/DeepSeek-V4-Flash-x.gguf", "--mtp", "/w/Flash-MTP.gguf", "--no-dspark"], "mtp"),
        ("mtp", LEGACY, ["-m", "/w/DeepSeek-V4-Flash-x.gguf", "--mtp", "/w/Flash-MTP.gguf", "--no-dspark"], "mtp"),
        ("plain", LEGACY, ["-m", "/w/DeepSeek-V4-Flash-x.gguf", "--no-spec"], "plain"),
    ],
)
def test_files_are_named_and_nothing_is_left_to_be_picked_up(
    mode: str, weights: dict[str, Any], arguments: list[str], in_force: str
) -> None:
    result = config({}, mode=mode, weights=weights)
    assert result["errors"] == []
    assert result["args"] == arguments + SAFE
    assert result["mode"] == in_force


def with_files(weights: dict[str, Any], **files: Any) -> dict[str, Any]:
    merged = {**weights["files"], **files}
    return {"generation": weights["generation"], "files": {role: entry for role, entry in merged.items() if entry}}


def test_a_legacy_set_with_its_drafter_serves_with_dspark() -> None:
    weights = with_files(LEGACY, drafter={"path": "/w/DSpark-drafter-Q2K-Q8.gguf"})
    result = config({}, mode="auto", weights=weights)
    assert result["errors"] == []
    files = ["-m", "/w/DeepSeek-V4-Flash-x.gguf", "--dspark", "/w/DSpark-drafter-Q2K-Q8.gguf"]
    assert result["args"] == [*files, "--mtp", "/w/Flash-MTP.gguf", *SAFE]
    alone = config({}, mode="auto", weights=with_files(weights, mtp=None))
    assert alone["args"] == [*files, "--no-mtp", *SAFE]  # one may lie beside the base


def test_the_bytes_of_the_files_that_a_mode_loads() -> None:
    legacy = with_files(
        LEGACY,
        **{
            "base": {"path": "/w/DeepSeek-V4-Flash-x.gguf", "bytes": 100},
            "drafter": {"path": "/w/DSpark-drafter-Q2K-Q8.gguf", "bytes": "10"},
            "mtp": {"path": "/w/Flash-MTP.gguf", "bytes": 1},
        },
    )
    assert config({}, weights=legacy)["weights_bytes"] == 111
    assert config({}, weights=legacy, mode="mtp")["weights_bytes"] == 101
    assert config({}, weights=legacy, mode="plain")["weights_bytes"] == 100
    assert config({}, weights={"generation": "x", "files": {}})["weights_bytes"] == 0


def test_the_full_stack_goes_with_no_switch_against_a_part_of_it() -> None:
    weights = with_files(LEGACY, drafter={"path": "/w/DSpark-drafter-Q2K-Q8.gguf"})
    assert "--mtp" in config({"full_stack_required": True}, weights=weights)["args"]
    own = {"generation": "own", "files": {"base": {"path": "/w/mine.gguf"}, "drafter": {"path": "/w/draft.gguf"}}}
    assert "--no-mtp" in config({}, weights=own)["args"]
    assert "--no-mtp" not in config({"full_stack_required": True}, weights=own)["args"]


def test_the_ladder_says_which_rung_it_stands_on() -> None:
    assert "with MTP speculation" in config({}, mode="auto", weights=LEGACY)["warnings"][0]
    bare = config({}, mode="auto", weights=with_files(LEGACY, mtp=None))
    assert (bare["mode"], bare["errors"]) == ("plain", [])
    assert "without speculation" in bare["warnings"][0]
    modern = config({}, mode="auto", weights=with_files(MODERN, drafter=None, mtp=LEGACY["files"]["mtp"]))
    assert modern["mode"] == "plain"


@pytest.mark.parametrize(
    ("mode", "weights", "message"),
    [
        ("mtp", with_files(MODERN, mtp={"path": "/w/Flash-MTP.gguf"}), "The MTP head belongs to the legacy generation"),
        ("mtp", with_files(LEGACY, mtp=None), "Mode mtp needs a file that generation legacy does not have"),
        ("dspark", LEGACY, "Mode dspark needs a file that generation legacy does not have"),
        (
            "dspark",
            with_files(MODERN, drafter={"path": "/w/DSpark-drafter-Q2K-Q8.gguf"}),
            "trained against another generation",
        ),
        (
            "dspark",
            with_files(LEGACY, drafter={"path": "/w/DSpark-drafter-Q2K-Q8-0731.gguf"}),
            "trained against another generation",
        ),
        (
            "dspark",
            with_files(MODERN, drafter={"path": "/w/DeepSeek-V4-Flash-DSpark-support-0731.gguf"}),
            "made for the upstream engine",
        ),
        (
            "dspark",
            with_files(MODERN, drafter={"path": "/w/DSpark-drafter-Q2K-Q8-vision-exp.gguf"}),
            "(Vision-Exp) with Flash-0731.gguf (0731)",
        ),
        (
            "plain",
            with_files(MODERN, base={"path": "/w/DeepSeek-V4-Flash-Vision-Exp-IQ2.gguf"}),
            "Required: an engine newer than v0.6.5",
        ),
        ("dspark", {"generation": "mine", "files": {}}, "names no base model"),
    ],
)
def test_mixed_or_missing_files_are_refused(mode: str, weights: dict[str, Any], message: str) -> None:
    errors = config({}, mode=mode, weights=weights)["errors"]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_custom_set_keeps_its_names_and_has_a_directory_of_its_own() -> None:
    weights = {
        "generation": "my model/q4",
        "files": {"base": {"path": "/data/a b.gguf", "sha256": "0123456789"}, "drafter": {"path": "/data/d.gguf"}},
    }
    result = config({"kv_persistence": True}, weights=weights)
    assert result["errors"] == []
    assert result["args"][:4] == ["-m", "/data/a b.gguf", "--dspark", "/data/d.gguf"]
    assert result["kv"]["directory"] == "/var/lib/ds4/kv/ds4-my_model_q4-01234567"


def test_a_custom_name_that_tells_nothing_is_not_judged() -> None:
    """An own quantisation of the base with the official drafter, or an own drafter beside the official base."""
    for files in ({"base": {"path": "/data/mine.gguf"}}, {"drafter": {"path": "/data/DraftQ4K.gguf"}}):
        assert config({}, weights=with_files(MODERN, **files))["errors"] == []
    assert (
        config(
            {},
            mode="mtp",
            weights={"generation": "0731-own", "files": {"base": {"path": "/m.gguf"}, "mtp": {"path": "/t"}}},
        )["errors"]
        == []
    )


def test_vision_exp_serves_text_once_the_engine_knows_it() -> None:
    weights = with_files(MODERN, base={"path": "/w/DeepSeek-V4-Flash-Vision-Exp-IQ2.gguf"})
    assert config({}, mode="plain", weights=weights, release="v0.6.6")["errors"] == []
    assert config({}, mode="plain", weights=weights, release="main")["errors"] == []


def test_the_full_stack_of_a_legacy_base_has_an_mtp_file() -> None:
    drafter = {"path": "/w/DSpark-drafter-Q2K-Q8.gguf"}
    assert config({"full_stack_required": True}, weights=with_files(LEGACY, drafter=drafter))["errors"] == []
    errors = config({"full_stack_required": True}, weights=with_files(LEGACY, drafter=drafter, mtp=None))["errors"]
    assert "full_stack_required demands the MTP file as well" in errors[0]


def test_planned_files_are_judged_by_name_before_any_host_is_asked() -> None:
    planned = {"generation": "x", "files": {"base": {"file": "a-0731.gguf"}, "mtp": {"file": "m.gguf"}}}
    assert "fits no 0731 base" in config({}, mode="mtp", weights=planned)["errors"][0]


def test_kept_conversations_survive_an_engine_upgrade_and_never_meet_another_model() -> None:
    def directory(release: str, weights: dict[str, Any], engine: str = "ds4") -> str:
        return str(
            config({"kv_persistence": True}, release=release, weights=weights, mode="auto", engine=engine)["kv"][
                "directory"
            ]
        )

    same = {directory(release, MODERN) for release in ("v0.6.4", "v0.6.5", "main")}
    assert len(same) == 1
    assert len(same | {directory("v0.6.5", LEGACY), directory("v0.6.5", MODERN, "upstream")}) == 3


# ------------------------------------------------------------------------------------------------ extras


@pytest.mark.parametrize("flag", CATALOGUE["refused_flags"])
def test_flags_that_cannot_serve_or_are_decided_elsewhere_are_refused(flag: str) -> None:
    errors = config({}, extra_args=[flag])["errors"]
    assert len(errors) == 1
    assert CATALOGUE["refused_flags"][flag] in errors[0]
    assert "Cure: remove engine_service_extra_args[0]." in errors[0]


@pytest.mark.parametrize("name", CATALOGUE["refused_variables"])
def test_variables_that_cannot_serve_or_are_decided_elsewhere_are_refused(name: str) -> None:
    errors = config({}, extra_env={name: "1"})["errors"]
    assert len(errors) == 1
    assert CATALOGUE["refused_variables"][name].strip() in errors[0]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "full_stack_required"])
def test_what_has_a_setting_comes_in_through_it_only(name: str) -> None:
    spec = SETTINGS[name]
    extra = {"extra_args": [spec["flag"].split(" ")[0]]} if "flag" in spec else {"extra_env": {spec["env"]: "1"}}
    errors = config({}, **extra)["errors"]
    assert len(errors) == 1
    assert f"set engine_service_settings.{name}." in errors[0]


@pytest.mark.parametrize("twin", CATALOGUE["twins"])
def test_a_twin_of_a_setting_names_the_setting(twin: str) -> None:
    extra: dict[str, Any] = {"extra_args": [twin]} if twin.startswith("-") else {"extra_env": {twin: "1"}}
    assert f"set engine_service_settings.{CATALOGUE['twins'][twin]}." in config({}, **extra)["errors"][0]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"extra_args": "--threads 8"}, "engine_service_extra_args is not a list"),
        ({"extra_args": ["--threads=8"]}, "The engine does not understand --threads=value"),
        ({"extra_args": ["a\nb"]}, "engine_service_extra_args[0] is empty or contains control characters"),
        ({"extra_args": [""]}, "engine_service_extra_args[0] is empty"),
        ({"extra_args": [["x"]]}, "engine_service_extra_args[0] is no word"),
        ({"extra_env": ["A=1"]}, "engine_service_extra_env is not a table"),
        ({"extra_env": {"A B": 1}}, "engine_service_extra_env.A B is no name of an environment variable"),
        ({"extra_env": {"A\n": 1}}, "is no name of an environment variable"),
        ({"extra_env": {"A": "x\ny"}}, "engine_service_extra_env.A has a value that no environment can carry"),
        ({"extra_env": {"A": None}}, "engine_service_extra_env.A has a value that no environment can carry"),
        ({"extra_env": {"A": ["x"]}}, "engine_service_extra_env.A has a value that no environment can carry"),
    ],
)
def test_extras_of_a_wrong_form_are_refused(extra: dict[str, Any], message: str) -> None:
    errors = config({}, **extra)["errors"]
    assert len(errors) == 1
    assert message in errors[0]


def test_a_secret_in_the_environment_is_in_no_message() -> None:
    secret = "hunter2\nhunter2"
    result = config({}, extra_env={"MY_TOKEN": secret, "DS4_CONT_MTP_GATE": secret, "DS4_NEW": "hunter2"})
    assert result["errors"]
    assert result["warnings"]
    assert "hunter2" not in " ".join(result["errors"] + result["warnings"])


def test_residency_under_its_old_and_its_new_name_is_a_boot_error() -> None:
    errors = config({"weight_residency": "eager"}, extra_env={"DS4_CUDA_NO_HBM_CACHE": 1})["errors"]
    assert "the engine refuses both together" in errors[0]


def test_residency_of_one_file_under_both_names_is_said() -> None:
    warnings = config({}, extra_env={"DS4_CUDA_NO_HBM_CACHE": 1, "DS4_WEIGHT_RESIDENCY_BASE": "lazy"})["warnings"]
    assert "DS4_CUDA_NO_HBM_CACHE with DS4_WEIGHT_RESIDENCY_BASE" in warnings[0]


@pytest.mark.parametrize("flag", ["--listen", "--role"])
def test_no_second_port_is_opened_past_the_consent(flag: str) -> None:
    result = config({}, extra_args=[flag, "0.0.0.0:9000"])
    assert "a port of its own without authentication" in result["errors"][0]


def test_a_flag_that_came_later_is_refused_until_it_can_be_known() -> None:
    refused = config({}, extra_args=["--vision", "/w/encoder.gguf"])["errors"]
    assert "--vision needs a newer engine. Found: engine v0.6.5. Required: an engine newer than v0.6.5." in refused[0]
    assert config({}, release="v0.6.6", extra_args=["--vision", "/w/encoder.gguf"])["errors"] == []


def test_extras_come_last_as_they_are() -> None:
    result = config(
        {}, extra_args=["--threads", 8, "--quality"], extra_env={"DS4_SERVER_WARM": 0, "B": True, "A": "x y"}
    )
    assert result["args"][-4:] == ["--no-update-check", "--threads", "8", "--quality"]
    assert result["env"] == {"A": "x y", "B": "1", "DS4_SERVER_WARM": "0"}


@given(
    st.lists(st.text(min_size=1, max_size=20), max_size=4),
    st.dictionaries(st.from_regex(r"[A-Z_]{3,8}", fullmatch=True), st.text(max_size=20), max_size=4),
)
def test_an_extra_is_taken_exactly_as_written_or_refused(words: list[str], environment: dict[str, str]) -> None:
    result = config({}, extra_args=words, extra_env=environment)
    if not result["errors"]:
        assert result["args"] == FILES + SAFE + words
        assert result["env"] == environment
        assert all(text.isprintable() for text in [*words, *environment.values()])


# ------------------------------------------------------------------------------------------------ what is always there


def test_nothing_is_written_that_nobody_asked_for() -> None:
    assert config({})["args"] == FILES + SAFE
    assert config({})["env"] == {}


def test_an_engine_from_before_a_safety_flag_does_not_get_it() -> None:
    assert "--no-update-check" not in config({}, release="v0.5.2")["args"]
    old = config({}, release="v0.5.6.1", paths=PATHS)
    assert "DS4_CODEX_MODELS_FILE" not in old["env"]
    assert config({}, paths=PATHS)["env"] == {"DS4_CODEX_MODELS_FILE": PATHS["codex_models"]}


def test_the_same_settings_in_another_order_are_the_same_deployment() -> None:
    one = config({"port": 9000, "banks": 4, "cors": True})
    other = config({"cors": True, "banks": 4, "port": 9000})
    assert (one["args"], one["env"]) == (other["args"], other["env"])


def test_a_filter_called_without_paths_says_so() -> None:
    from ansible.errors import AnsibleFilterError

    with pytest.raises(AnsibleFilterError, match="called wrongly"):
        ds4_engine_config({})


# ------------------------------------------------------------------------------------------------ the data file


def test_the_data_file_is_complete_and_consistent() -> None:
    for name, spec in SETTINGS.items():
        assert spec["type"] in WRONG_TYPE, name
        assert spec["description"].strip().endswith("."), name
        assert spec["source"].strip(), name
        assert ("flag" in spec) != ("env" in spec), name
        assert ("range" in spec) == (spec["type"] in ("int", "float")), name
        assert ("choices" in spec) == (spec["type"] == "choice"), name
        assert ("unit" in spec) == (spec["type"] in ("int", "float")), name
        if spec["default"] is not None:
            assert mechanism.read_value(spec, spec["default"]) == spec["default"], name
        if spec.get("since"):
            assert re.fullmatch(r"\d+(\.\d+)+", spec["since"]), name
    for name, profile in CATALOGUE["profiles"].items():
        for setting, value in profile["settings"].items():
            assert mechanism.read_value(SETTINGS[setting], value) == value, (name, setting)
        assert "context_tokens" in profile["settings"], name
    assert set(CATALOGUE["twins"].values()) <= set(SETTINGS)
