# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From a release tag to its commit and its weights generation; every doubt is a finding, never a guess."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
# git check-ref-format, without the slash: a release tag is also a folder name.
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def resolve_pin(
    release: str,
    releases: Mapping[str, Mapping[str, Any]],
    commit: str = "",
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Resolve the wanted release.

    Args:
        release: tag, for example ``v0.6.5``.
        releases: tag → {commit: 40 hex, weights: generation}, ours and the operator's together.
        commit: explicit commit for a release that is not listed; must agree with the list otherwise.
        weights: known generations, to refuse one that does not exist.

    Returns:
        ``release``, ``commit`` (empty: recorded at first use), ``listed``, ``generation`` (weights that belong to the
        release; empty when unknown) and ``errors``, a list of sentences.
    """
    errors: list[str] = []
    release, commit = str(release), str(commit or "").lower()
    entry = releases.get(release)
    if not TAG.fullmatch(release) or ".." in release:
        errors.append(f"ds4_release is {release!r}, which is no release tag. Cure: a tag such as v0.6.5.")
    if commit and not COMMIT.fullmatch(commit):
        errors.append(
            f"ds4_commit is {commit!r}; required: 40 hex digits or nothing. Cure: `git ls-remote` shows the full id."
        )
    listed = str((entry or {}).get("commit", "")).lower()
    if entry is not None and not COMMIT.fullmatch(listed):
        errors.append(
            f"ds4_releases.{release}.commit is {listed!r}; required: 40 hex digits. Cure: `make bump TAG={release}`."
        )
    if listed and commit and listed != commit:
        errors.append(
            f"Release {release} is pinned to {listed}, but ds4_commit says {commit}. "
            "Cure: remove ds4_commit, or correct the entry in ds4_releases_extra."
        )
    generation = str((entry or {}).get("weights", "")) if entry is not None else ""
    if entry is None and not generation and weights:
        generation = next(
            iter(weights)
        )  # an unlisted release starts from the current generation; the operator can say otherwise
    if generation and weights is not None and generation not in weights:
        near = difflib.get_close_matches(generation, list(weights), n=1)
        errors.append(
            f"Release {release} wants weights generation {generation!r}; known: {', '.join(weights) or 'none'}. "
            f"Cure: {'write ' + near[0] if near else 'describe it in ds4_weights_extra'}."
        )
    return {
        "release": release,
        "commit": commit or listed,
        "listed": entry is not None,
        "generation": generation,
        "errors": errors,
    }


def generation_files(weights: Mapping[str, Any], generation: str) -> list[dict[str, Any]]:
    """Files of one generation as a list with ``role``; an unknown generation gives an empty list (the pin reports it)."""
    files: Mapping[str, Any] = weights.get(str(generation)) or {}
    return [{"role": role, **dict(entry)} for role, entry in files.items()]


def known_files(weights: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Files of all generations, each with ``generation`` and ``role``: what may be recognised on a host."""
    return [
        {"generation": generation, **file} for generation in weights for file in generation_files(weights, generation)
    ]


def generation_errors(weights: Mapping[str, Any], generation: str) -> list[str]:
    """What is wrong with the description of one generation, as sentences."""
    if str(generation) not in weights:
        near = difflib.get_close_matches(str(generation), list(weights), n=1)
        return [
            f"weights_generation is {str(generation)!r}; known: {', '.join(weights) or 'none'}. "
            f"Cure: {'write ' + near[0] if near else 'describe it in ds4_weights_extra'}."
        ]
    errors = []
    for file in generation_files(weights, generation):
        where = f"ds4_weights.{generation}.{file['role']}"
        missing = [key for key in ("repo", "revision", "file") if not file.get(key)]
        if missing:
            errors.append(f"{where} lacks {', '.join(missing)}. Cure: add them, as in group_vars/all/release.yml.")
        if file.get("sha256") and not SHA256.fullmatch(str(file["sha256"])):
            errors.append(
                f"{where}.sha256 is not 64 hex digits. Cure: correct it, or leave it out to record it at first use."
            )
    if not any(file["role"] == "base" for file in generation_files(weights, generation)):
        errors.append(f"ds4_weights.{generation} has no base file. Cure: add one, as in group_vars/all/release.yml.")
    return errors
