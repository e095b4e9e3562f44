#!/usr/bin/env bash
# Compiles constraints.txt: every version of everything that `make` installs, without torch's local tag.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
cat requirements-dev.txt >"$requirements"
echo "uv" >>"$requirements"
grep -hoE '^    "[^"]+"' libs/*/pyproject.toml services/*/pyproject.toml | tr -d ' "' | grep -v '^pilotlight' | sort -u >>"$requirements"
grep -oE '^nixl = \[.*' libs/dataplane/pyproject.toml | grep -oE '"[^"]+"' | tr -d '"' >>"$requirements"
{
  echo "# Every version, once: what \`make\` installs. Compiled by \`make lock\`. torch has no local tag: pip's configuration decides where it comes from."
  "$venv/bin/uv" pip compile --quiet --python "$venv/bin/python" --python-version 3.11 --no-header --no-annotate \
    --constraint <(grep '^torch==' constraints.txt) "$requirements" | sed -E 's/\+[a-z0-9.]+$//'
} >constraints.new
mv constraints.new constraints.txt
