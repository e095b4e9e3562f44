#!/usr/bin/env bash
# `make test-compose`: runs tests/compose with the engine and the images that there are; where there are none, and no registry, makes
# them (tools/local_images.sh). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

engine()   { docker version -f '{{.Server.Version}}' >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; }
registry() { timeout 20 docker manifest inspect nats:2-alpine >/dev/null 2>&1; }

if engine && registry; then
  tools/local_images.sh remove  # they have the names of real images, and would be taken for them
  export COMPOSE_FILE=docker-compose.yml
else
  if engine; then echo "No registry answers: running with images made here." >&2
  elif [ "$(id -u)" = 0 ] && [ -f /etc/apt/sources.list.d/debian.sources ]; then
    echo "There is no Docker engine: installing one." >&2
    trap 'tools/local_images.sh stop' EXIT
  else
    echo "No Docker engine with the compose plugin answers. Start one; or run this as root on Debian 12, and one is installed." >&2
    exit 1
  fi
  tools/local_images.sh status >/dev/null || tools/local_images.sh
  export COMPOSE_FILE=docker-compose.yml:compose.standin.yml
fi

# Wheels that pip would find here are used in the images too: torch for this machine.
links=${PILOTLIGHT_WHEELS:-${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}}
if [ -d "$links" ]; then export PILOTLIGHT_WHEELS="$links"; fi

"$venv/bin/python" -m pytest tests/compose -m compose "$@"
