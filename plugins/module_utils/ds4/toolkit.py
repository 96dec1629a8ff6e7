# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Find the CUDA toolkit by explicit path: over SSH and sudo its bin folder is not on PATH."""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .command import Ran, run, which

DEFAULT_ROOT = "/usr/local"
_RELEASE = re.compile(r"release (\d+\.\d+), V(\d+(?:\.\d+)+)")

Runner = Callable[..., Ran]


def parse_nvcc(text: str) -> tuple[str, str]:
    """(release, version) of ``nvcc --version``: ``("13.0", "13.0.88")``; empty strings when it says neither."""
    match = _RELEASE.search(text)
    return (match.group(1), match.group(2)) if match else ("", "")


def version_key(text: str) -> tuple[int, ...]:
    """Numbers of a version, for ordering: ``12.10`` is newer than ``12.9``."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _places(cuda_home: str, root: str, find: Callable[[str], str | None]) -> list[tuple[str, str]]:
    """(source, path of nvcc) of every place to look, best first."""
    if cuda_home:
        return [("variable", os.path.join(cuda_home, "bin", "nvcc"))]
    versioned = sorted(
        glob.glob(os.path.join(root, "cuda-*")), key=lambda path: version_key(os.path.basename(path)), reverse=True
    )
    places = [("default", os.path.join(root, "cuda", "bin", "nvcc"))]
    places += [("versioned", os.path.join(path, "bin", "nvcc")) for path in versioned]
    on_path = find("nvcc")
    if on_path:
        places.append(("path", on_path))
    return places


def resolve(
    cuda_home: str = "",
    *,
    required_files: Sequence[str] = (),
    root: str = DEFAULT_ROOT,
    timeout_seconds: float = 20.0,
    runner: Runner = run,
    find: Callable[[str], str | None] = which,
) -> dict[str, Any]:
    """Toolkit to build with: ``cuda_home`` → ``/usr/local/cuda`` → newest ``/usr/local/cuda-*`` → PATH.

    A named ``cuda_home`` is taken or refused, never silently replaced by another one. Otherwise the first place whose
    nvcc answers with a version is taken, whatever the version is: judging it is policy.

    Args:
        cuda_home: folder of the toolkit, "" to search.
        required_files: paths relative to the toolkit that a build of the engine needs (headers).
        root: folder that holds ``cuda`` and ``cuda-*``.
        timeout_seconds: limit for each call of an nvcc.

    Returns:
        ``{home, nvcc, cuobjdump, release, version, source, candidates: [{nvcc, source, version, error}], missing, text}``.
        ``source`` is variable, default, versioned, path, or ``""`` when there is none (then ``text`` says why).
    """
    result: dict[str, Any] = {
        "home": "",
        "nvcc": "",
        "cuobjdump": "",
        "release": "",
        "version": "",
        "source": "",
        "candidates": [],
        "missing": [],
        "text": "",
    }
    seen: set[str] = set()
    for source, nvcc in _places(cuda_home, root, find):
        if not os.path.exists(nvcc):
            continue
        real = os.path.realpath(nvcc)
        if real in seen:  # /usr/local/cuda is usually a link to the newest versioned folder
            continue
        seen.add(real)
        answer = runner([nvcc, "--version"], timeout_seconds=timeout_seconds)
        release, version = parse_nvcc(answer.out) if answer.rc == 0 else ("", "")
        error = "" if version else " ".join((answer.err or answer.out).split())[:200] or f"nvcc ended with {answer.rc}"
        result["candidates"].append({"nvcc": nvcc, "source": source, "version": version, "error": error})
        if version and not result["nvcc"]:
            home = _home(nvcc, real, source)
            beside = os.path.join(home, "bin", "cuobjdump")
            result.update(
                home=home,
                nvcc=nvcc,
                cuobjdump=beside if os.path.exists(beside) else find("cuobjdump") or "",
                release=release,
                version=version,
                source=source,
                missing=[name for name in required_files if not os.path.exists(os.path.join(home, name))],
            )
    if not result["nvcc"]:
        broken = "; ".join(f"{c['nvcc']}: {c['error']}" for c in result["candidates"])
        where = f"{cuda_home}/bin" if cuda_home else f"{root}/cuda, {root}/cuda-* and PATH"
        result["text"] = broken or f"no nvcc in {where}"
    return result


def _home(nvcc: str, real: str, source: str) -> str:
    """Folder above ``bin``; for one on PATH that of the real file, since /usr/bin/nvcc can be a link into a toolkit."""
    return os.path.dirname(os.path.dirname(real if source == "path" else nvcc))


def main(argv: Sequence[str] | None = None) -> int:
    """``python3 -m ds4.toolkit [--json] [--cuda-home DIR]``: 0 when a toolkit was found, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ds4.toolkit", description="Which CUDA toolkit a build here would use."
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--cuda-home", default="", metavar="DIR", help="take this one instead of searching")
    options = parser.parse_args(argv)
    result = resolve(options.cuda_home)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        print(f"{result['nvcc']} {result['version']} ({result['source']})" if result["nvcc"] else result["text"])
    return 0 if result["nvcc"] else 1


if __name__ == "__main__":
    sys.exit(main())
