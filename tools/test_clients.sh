#!/usr/bin/env bash
# Clients' own libraries and tests, pinned, into folders of their own beside the environment; then a whole system asked by them.
set -euo pipefail
cd "$(dirname "$0")/.."
NODE_CLIENT=openai@7.57.0
venv=${VENV:-.venv}
folder=$(pwd)/.venv-clients
if ! command -v npm >/dev/null; then
  echo "npm is missing, for OpenAI's client for Node: install node 20 or later (Debian's names: nodejs, npm)" >&2
  exit 1
fi
stamp=$(cat tests/clients/*.txt "$0" | sha256sum)
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$folder"
  mkdir -p "$folder/node" "$folder/sources"
  for kind in official others; do
    "$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$folder/$kind"
    timeout 600 "$venv/bin/uv" pip install --quiet --python "$folder/$kind/bin/python" -r "tests/clients/$kind.txt"
  done
  for client in openai anthropic; do
    pin=$(grep "^$client==" tests/clients/official.txt)
    timeout 300 "$venv/bin/python" -m pip download --quiet --no-deps --no-binary "$client" -d "$folder/sources" "$pin"
    mkdir "$folder/$client"
    tar -xzf "$folder/sources/$client-${pin#*==}.tar.gz" -C "$folder/$client" --strip-components 1
  done
  timeout 300 npm install --silent --no-audit --no-fund --prefix "$folder/node" "$NODE_CLIENT"
  echo "$stamp" >"$folder/stamp"
fi
PILOTLIGHT_CLIENTS_FOLDER=$folder exec "$venv/bin/python" -m pytest tests/clients -m clients "$@"
