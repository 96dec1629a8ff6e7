"""The catalogue that the engine serves to Codex, against the form of the engine's public one."""

from __future__ import annotations

import json

import pytest

from ds4.catalogue import FALLBACK_INSTRUCTIONS, catalogue_text, codex_catalogue, compact_limit
from plugins.filter.ds4_engine import ds4_codex_catalogue

# Keys of the public catalogue, in its order.
KEYS = """slug display_name description default_reasoning_level supported_reasoning_levels shell_type visibility supported_in_api
minimal_client_version availability_nux upgrade priority model_messages base_instructions include_skills_usage_instructions
supports_reasoning_summaries reasoning_summary_format default_reasoning_summary support_verbosity default_verbosity
apply_patch_tool_type web_search_tool_type truncation_policy supports_image_detail_original input_modalities
supports_parallel_tool_calls prefer_websockets tool_mode multi_agent_version use_responses_lite auto_review_model_override
additional_speed_tiers service_tiers default_service_tier supports_search_tool experimental_supported_tools
effective_context_window_percent context_window max_context_window auto_compact_token_limit comp_hash"""


def test_the_catalogue_has_the_form_that_codex_reads() -> None:
    (entry,) = codex_catalogue(262144)["models"]
    assert list(entry) == KEYS.split()
    assert entry["slug"] == "deepseek-v4-flash"
    assert entry["supported_reasoning_levels"] == []


@pytest.mark.parametrize(
    ("context", "compact"),
    [(4096, 3440), (16384, 13000), (65536, 55000), (262144, 220000), (524288, 440000), (1048576, 880000)],
)
def test_the_three_numbers_follow_the_context(context: int, compact: int) -> None:
    (entry,) = codex_catalogue(context)["models"]
    assert entry["context_window"] == entry["max_context_window"] == context
    assert entry["auto_compact_token_limit"] == compact == compact_limit(context)
    assert compact < context * entry["effective_context_window_percent"] / 100


def test_the_engine_finds_the_served_context_first() -> None:
    # It compares the first "context_window" of the file with its own, so no other number may come before it.
    text = catalogue_text(524288)
    assert int(text.split('"context_window":', 1)[1].split(",", 1)[0]) == 524288
    assert len(text.encode()) < 4 * 1024 * 1024


@pytest.mark.parametrize("given", ["", "  \n"])
def test_instructions_are_never_empty(given: str) -> None:
    (entry,) = codex_catalogue(524288, given)["models"]
    assert entry["base_instructions"] == FALLBACK_INSTRUCTIONS
    assert len(FALLBACK_INSTRUCTIONS.split()) > 200


def test_instructions_of_the_operator_are_taken_as_they_are() -> None:
    (entry,) = json.loads(ds4_codex_catalogue("65536", 'Say "hi"\n  and ü'))["models"]
    assert entry["base_instructions"] == 'Say "hi"\n  and ü'
    assert entry["context_window"] == 65536
