#!/usr/bin/env bash
# The S3 tests against Ceph's server: installs it from Debian's packages where it is missing and we may, then runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
PACKAGES=(ceph-mon ceph-osd radosgw ceph-common)
PROGRAMS=(ceph ceph-mon ceph-osd monmaptool radosgw radosgw-admin)
for program in "${PROGRAMS[@]}"; do
  if ! command -v "$program" >/dev/null; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
      echo "$program is missing: install ${PACKAGES[*]} (Debian's names), or run this as root where apt-get is" >&2
      exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    timeout 300 apt-get update -qq
    timeout 600 apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null
    break
  fi
done
for program in "${PROGRAMS[@]}"; do
  command -v "$program" >/dev/null || { echo "$program is missing, although ${PACKAGES[*]} are installed" >&2; exit 1; }
done
exec timeout 600 "${VENV:-.venv}/bin/python" -m pytest tests/conformance -m ceph "$@"
