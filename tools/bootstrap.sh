#!/usr/bin/env bash
# Makes or refreshes the virtual environment: `tools/bootstrap.sh runtime` for running, `tools/bootstrap.sh dev` for tests and checks too.
# Where packages come from is pip's configuration alone (index, find-links): a CPU wheel of torch that pip would find is found, and a
# machine with GPUs gets the build that its index offers.
set -euo pipefail
cd "$(dirname "$0")/.."

want=${1:-runtime}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

package=$(basename "$python")  # as Debian and Ubuntu call it
missing=()
if ! command -v "$python" >/dev/null; then
  missing+=("$package" "$package-venv")
elif ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
  echo "Python 3.11 or 3.12 is needed, and $python is $("$python" -V 2>&1). Name another: make PYTHON=python3.12 ..." >&2
  exit 1
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  missing+=("$package-venv")
fi
if [ ${#missing[@]} -gt 0 ]; then
  echo "Missing: ${missing[*]}. On Debian or Ubuntu, as root: apt-get install -y ${missing[*]}" >&2
  exit 1
fi

# The stamp names everything that decides what is installed, and where: a moved checkout is installed anew.
stamp="$venv/.installed-$want"
sources=(constraints.txt requirements-dev.txt libs/*/pyproject.toml services/*/pyproject.toml)
state=$( (pwd; cat "${sources[@]}") | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

echo "Installing into $venv ($want); the first time takes a minute or more, most of it for torch ..." >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
setting() { pip config get "global.$1" 2>/dev/null || true; }
[ -x "$venv/bin/uv" ] || pip install --quiet "$(grep '^uv==' constraints.txt)"

links=${PIP_FIND_LINKS:-$(setting find-links)}
index=${PIP_INDEX_URL:-$(setting index-url)}
[ -z "$links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$links}"
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"

members=()
for member in libs/*/ services/*/; do members+=(-e "$member"); done
extra=()
[ "$want" = dev ] && extra=(-r requirements-dev.txt)
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode -c constraints.txt "${members[@]}" "${extra[@]}"
echo "$state" >"$stamp"
[ "$want" = dev ] && echo "$state" >"$venv/.installed-runtime"
exit 0
