# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The model catalogue that the engine serves to Codex, computed from the context it serves."""

from __future__ import annotations

import json
from typing import Any

MODEL_ID = "deepseek-v4-flash"

# Codex compacts before its window is full; the engine's own catalogue leaves 16 % (220000 of 262144 tokens).
COMPACT_SHARE = 0.84

# An agent without base instructions works badly. This is what it gets when no others were named.
FALLBACK_INSTRUCTIONS = """\
You are Codex, a coding agent working in a terminal on the user's machine. Work until the task is done, and be exact.

How to work
- Look before you change: read the files concerned, and search with `rg` when it is there, else with `grep` and `find`.
- Run commands through the shell tool. Give each command its working directory rather than using `cd`.
- Edit files with small, focused changes in the style of the code around them. Do not reformat or rename what the task
  does not ask for, and do not add comments, licence headers or new files without need.
- Never throw away changes you did not make. Do not commit, push, or rewrite history unless asked to.
- Follow the instructions in AGENTS.md files. They hold for the folder they lie in and everything below; a deeper one
  wins, and what the user says directly wins over all of them.
- When a command fails, read what it says, find the cause and correct it. Do not repeat the same command unchanged.
- Check your work: run the tests, linters or the program itself when the project has them, the narrow ones first. Report
  failures that have nothing to do with the task instead of mending them.
- Every tool call must be a complete, well-formed call. Do not describe a call in prose instead of making it, and do not
  say that something is done before its result has shown it.
- Ask for approval only when the sandbox refuses something the task needs, and say in one sentence why.

How to answer
- Before a group of commands, say in one short sentence what you are about to do.
- At the end, say briefly what you changed, where (path and line), and what you checked. Do not repeat whole files.
- When something could not be done or could not be checked, say so plainly.
"""


def compact_limit(context: int) -> int:
    """Tokens at which Codex summarises: 84 % of the window, in whole thousands where the window is that large."""
    limit = int(context * COMPACT_SHARE)
    return limit - limit % 1000 if limit >= 10000 else limit


def limits(context: int) -> dict[str, int]:
    """The three numbers of a catalogue entry that follow from the served context, in tokens."""
    return {
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": compact_limit(context),
    }


def codex_catalogue(context: int, base_instructions: str = "") -> dict[str, Any]:
    """Catalogue for ``DS4_CODEX_MODELS_FILE``, the form that the engine's public catalogue has.

    Args:
        context: tokens of context the engine serves (``-c``); the engine warns at boot when the two differ.
        base_instructions: Codex's own agent instructions; a short text of ours when empty.
    """
    return {
        "models": [
            {
                "slug": MODEL_ID,
                "display_name": "DeepSeek V4 Flash",
                "description": "DeepSeek V4 Flash served by ds4 on a DGX Spark",
                "default_reasoning_level": "none",
                "supported_reasoning_levels": [],
                "shell_type": "shell_command",
                "visibility": "list",
                "supported_in_api": True,
                "minimal_client_version": "0.100.0",
                "availability_nux": None,
                "upgrade": None,
                "priority": 0,
                "model_messages": None,
                "base_instructions": base_instructions if base_instructions.strip() else FALLBACK_INSTRUCTIONS,
                "include_skills_usage_instructions": False,
                "supports_reasoning_summaries": False,
                "reasoning_summary_format": "none",
                "default_reasoning_summary": "none",
                "support_verbosity": False,
                "default_verbosity": None,
                "apply_patch_tool_type": None,
                "web_search_tool_type": "text",
                "truncation_policy": {"mode": "tokens", "limit": 10000},
                "supports_image_detail_original": False,
                "input_modalities": ["text"],
                "supports_parallel_tool_calls": False,
                "prefer_websockets": False,
                "tool_mode": None,
                "multi_agent_version": None,
                "use_responses_lite": False,
                "auto_review_model_override": None,
                "additional_speed_tiers": [],
                "service_tiers": [],
                "default_service_tier": None,
                "supports_search_tool": False,
                "experimental_supported_tools": [],
                "effective_context_window_percent": 95,
                **limits(context),
                "comp_hash": "0",
            }
        ]
    }


def catalogue_text(context: int, base_instructions: str = "") -> str:
    """The catalogue as the file's text. The engine reads at most 4 MiB."""
    return json.dumps(codex_catalogue(context, base_instructions), indent=2) + "\n"
