#!/usr/bin/env bash
# Puts the wheels of a folder into another one as they are released: on Linux with the tag of the oldest glibc that they run
# on, libraries from elsewhere included; of the stable ABI only if nothing but its symbols is used.
#   wheel_repair.sh FROM INTO
set -euo pipefail
from=$1 into=$2
mkdir -p "$into"
for wheel in "$from"/*.whl; do
  if [[ $wheel == *-abi3-* ]]; then
    abi3audit --strict "$wheel"
  fi
  if [[ $(uname -s) == Linux ]]; then
    auditwheel repair --wheel-dir "$into" "$wheel"
  else
    cp "$wheel" "$into"
  fi
done
ls -l "$into"
