#!/bin/sh
# The real coding agents for tests/lab/test_clients.py, at the versions it was written with, into .cache/clients (about 1.5 GB).
# Needs npm and python3. Nothing is installed outside that folder; remove it to be rid of them.
set -eu
cd "$(dirname "$0")/.."
folder=.cache/clients
mkdir -p "$folder"
npm install --no-fund --no-audit --loglevel=error --prefix "$folder" \
  @openai/codex@0.171.0 opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.332 \
  @earendil-works/pi-coding-agent@1.6.0 node@24
npm install --no-fund --no-audit --loglevel=error --prefix "$folder/old" @openai/codex@0.144.1
python3 -m venv "$folder/py"
"$folder/py/bin/pip" install --quiet openai==3.57.0 anthropic==2.14.0
echo "Installed into $folder. Now: pytest -m lab tests/lab/test_clients.py"
