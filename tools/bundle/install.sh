#!/bin/sh
# Installs Pilotlight from this folder, without a package index: ./install.sh [FOLDER] [--with-tests] [--torch-from PYTHON]
# It finds the Python that the archive is for; install.py does the rest, and -B keeps it from leaving anything in this folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
for name in manifest.json install.py borrowed_torch.py; do
  if [ ! -f "$here/$name" ]; then
    echo "$here/$name is missing: copy the whole folder that \`make bundle\` made." >&2
    exit 1
  fi
done
wanted=$(sed -n 's/^ *"python": *"\([0-9.]*\)".*/\1/p' "$here/manifest.json")
seen=
for python in ${PYTHON:+"$PYTHON"} "python$wanted" python3; do
  command -v "$python" >/dev/null 2>&1 || continue
  is=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if [ "$is" = "$wanted" ]; then exec "$python" -B "$here/install.py" "$@"; fi
  seen="$seen $python is $is;"
done
echo "This archive is for Python $wanted, and there is none here (${seen:- no python3 at all;} set PYTHON to name another)." >&2
echo "Install it (Debian, Ubuntu: apt-get install python$wanted), or make an archive for the Python that you have: make bundle PYTHON=3.11 or 3.12" >&2
exit 1
