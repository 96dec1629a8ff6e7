"""Move the pin: resolve a release tag to its commit and edit group_vars/all/release.yml, nothing else.

Usage: tools/bump.py TAG [REPOSITORY]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "group_vars/all/release.yml"
REPOSITORY = "https://github.com/Entrpi/ds4.git"


def resolve(repository: str, tag: str) -> str:
    """Commit of a tag at the remote; an annotated tag is peeled. Raises ValueError with the cure."""
    ran = subprocess.run(
        ["git", "ls-remote", "--tags", repository, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ran.returncode != 0:
        raise ValueError(
            f"{repository} did not answer: {ran.stderr.strip()}. Cure: check the network or name another repository."
        )
    found = {line.split("\t")[1]: line.split("\t")[0] for line in ran.stdout.splitlines()}
    commit = found.get(f"refs/tags/{tag}^{{}}") or found.get(f"refs/tags/{tag}")
    if not commit:
        raise ValueError(f"{repository} has no tag {tag}. Cure: `git ls-remote --tags {repository}` lists them.")
    return commit


def edit(text: str, tag: str, commit: str) -> tuple[str, list[str]]:
    """New text of release.yml and what changed, in words. The weights stay those of the release pinned before."""
    data = yaml.safe_load(text)
    releases, before = data["ds4_releases"], str(data["ds4_release"])
    weights = releases.get(tag, releases[before])["weights"]
    said = []
    known = releases.get(tag, {}).get("commit")
    line = f'  {tag}: {{commit: {commit}, weights: "{weights}"}}\n'
    if known is None:
        text = re.sub(r"^ds4_releases:\n", f"ds4_releases:\n{line}", text, count=1, flags=re.M)
        said.append(f"new release {tag} at {commit}, weights {weights}")
    elif known != commit:
        text = re.sub(rf"^  {re.escape(tag)}:.*\n", line, text, count=1, flags=re.M)
        said.append(f"tag {tag} MOVED: it was {known}, it is {commit} now. Read what changed before you roll it out")
    if before != tag:
        text = re.sub(r"^ds4_release: .*$", f"ds4_release: {tag}", text, count=1, flags=re.M)
        said.append(f"ds4_release: {before} -> {tag}")
    return text, said


def main(arguments: list[str]) -> int:
    if not arguments or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", arguments[0]):
        print("Which release? Cure: make bump TAG=v0.6.6", file=sys.stderr)
        return 2
    tag, repository = arguments[0], arguments[1] if len(arguments) > 1 else REPOSITORY
    try:
        commit = resolve(repository, tag)
    except (ValueError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    text, said = edit(PIN.read_text(encoding="utf-8"), tag, commit)
    if not said:
        print(f"{tag} is pinned at {commit} already.")
        return 0
    PIN.write_text(text, encoding="utf-8")
    print("\n".join(said) + "\nNext: `make plan` shows what it would change, `make apply` rolls it out.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
