#!/usr/bin/env bash
# Clients' own libraries and tests, pinned, into folders of their own beside the environment; then a whole system asked by them.
set -euo pipefail
cd "$(dirname "$0")/.."
NODE_CLIENT=openai@7.57.0
# Of vLLM (Apache-2.0) only the tests of its server are taken: its source, as it would have to be built to be installed.
VLLM=https://files.pythonhosted.org/packages/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz
VLLM_SHA256=f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112
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
  curl --fail --silent --show-error --location --max-time 600 --output "$folder/sources/vllm.tar.gz" "$VLLM"
  echo "$VLLM_SHA256  $folder/sources/vllm.tar.gz" | sha256sum --check --quiet
  mkdir "$folder/vllm"
  tar -xzf "$folder/sources/vllm.tar.gz" -C "$folder/vllm" --strip-components 1 --wildcards '*/tests/entrypoints/openai/*'
  timeout 300 npm install --silent --no-audit --no-fund --prefix "$folder/node" "$NODE_CLIENT"
  echo "$stamp" >"$folder/stamp"
fi
PILOTLIGHT_CLIENTS_FOLDER=$folder exec "$venv/bin/python" -m pytest tests/clients -m clients "$@"
