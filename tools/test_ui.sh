#!/usr/bin/env bash
# The tests of the dashboard in a browser: installs Debian's Chromium where it is missing and we may, and Playwright into the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
PLAYWRIGHT=playwright==1.65.2
venv=${VENV:-.venv}
if ! command -v chromium >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium is missing: install chromium and fonts-dejavu-core (Debian's names), or run this as root where apt-get is" >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 apt-get update -qq
  timeout 600 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
"$venv/bin/python" -c "import importlib.metadata as m; assert 'playwright==' + m.version('playwright') == '$PLAYWRIGHT'" 2>/dev/null ||
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$PLAYWRIGHT"
exec timeout 900 "$venv/bin/python" -m pytest tests/ui -m browser "$@"
