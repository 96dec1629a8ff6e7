#!/bin/sh
# Make or refresh a virtual environment: tools/venv.sh DIRECTORY operator|test [newest|oldest]
# Picks the newest suitable Python (3.13, 3.12, then 3.11; 3.12+ gets ansible-core 2.21, 3.11 gets 2.19), or, with
# `oldest`, Python 3.11. Exit 3 means: no such Python here (the caller reports "not run").
set -eu
directory=$1 level=$2 want=${3:-newest}
cd "$(dirname "$0")/.."
stamp="$directory/.ds4-$level-$(cat requirements/*.txt tools/venv.sh | cksum | cut -d' ' -f1)"
[ -e "$stamp" ] && exit 0

suitable() { "$1" -c 'import sys, ensurepip, venv; v = sys.version_info[:2]; sys.exit(0 if v in {'"$2"'} else 1)' 2>/dev/null; }
find_python() {
  for version in $1; do
    major=${version%.*} minor=${version#*.}
    for candidate in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python3; do
      path=$(command -v "$candidate" 2>/dev/null) || continue
      if suitable "$path" "($major, $minor)"; then printf '%s\n' "$path"; return 0; fi
    done
  done
  return 1
}

case $want in newest) versions="3.13 3.12 3.11" ;; *) versions="3.11" ;; esac
if ! python=$(find_python "$versions"); then
  if [ "$want" = oldest ]; then echo "No Python 3.11 with venv here." >&2; exit 3; fi
  packages=
  for version in $versions; do  # what the distribution's python3 is does not matter, as long as it has one that suits
    apt-cache show "python$version-venv" >/dev/null 2>&1 && { packages="python$version python$version-venv"; break; }
  done
  if [ -n "$packages" ]; then cure="sudo apt-get install -y $packages"
  elif command -v brew >/dev/null 2>&1; then cure="brew install python@3.13"
  elif command -v uv >/dev/null 2>&1; then cure="uv python install 3.13"
  elif command -v apt-get >/dev/null 2>&1; then cure="sudo apt-get update, then again; where apt has none, uv python install 3.13 (docs.astral.sh/uv)"
  else cure="install Python 3.11, 3.12 or 3.13 with its venv module"; fi
  if [ "$level" = test ] && [ "$(id -u)" = 0 ] && [ -n "$packages" ]; then
    echo "Installing Debian packages: $packages"
    # shellcheck disable=SC2086  # a list of packages on purpose
    apt-get install -y --no-install-recommends $packages >/dev/null
    python=$(find_python "$versions") || { echo "Still no suitable Python. Cure: $cure" >&2; exit 1; }
  else
    echo "No suitable Python found. Required: 3.11, 3.12 or 3.13 with venv. Cure: $cure" >&2; exit 1
  fi
fi
echo "Virtual environment $directory: $("$python" --version) at $python, requirements/$level.txt"
[ -x "$directory/bin/python3" ] && "$directory/bin/python3" -c '' 2>/dev/null || "$python" -m venv --clear "$directory"
"$directory/bin/python3" -m pip install --quiet --disable-pip-version-check -r "requirements/$level.txt"
rm -f "$directory"/.ds4-*
: >"$stamp"
[ "$level" = test ] && : >"$(printf '%s' "$stamp" | sed 's/-test-/-operator-/')"
exit 0
