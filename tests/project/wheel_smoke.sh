#!/usr/bin/env bash
# Builds the wheel as a user would (pip wheel, build requirements and all), installs it where there is nothing but pip and no
# compiler on the PATH, and plans a graph there.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_CONSTRAINT="$root/constraints.txt" PIP_BUILD_CONSTRAINT="$root/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1

"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet pip
"$work/env/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
ls -l "$work"/*.whl

without_compiler() { env -u CC -u CXX PATH="$work/env/bin" "$@"; }
for tool in c++ g++ clang++ cmake ninja; do
  if without_compiler python -c "import shutil, sys; sys.exit(shutil.which('$tool') is None)"; then
    echo "wheel_smoke.sh: $tool is on the restricted PATH, so this proves nothing" >&2
    exit 1
  fi
done
without_compiler python -m pip install --quiet --only-binary :all: "$work"/*.whl
cd "$work"
without_compiler python "$root/tests/project/wheel_check.py"
# What a user gets who pins nothing: wheels of highspy later than the pinned one bring no shared library of HiGHS.
unset PIP_CONSTRAINT
without_compiler python -m pip install --quiet --only-binary :all: --upgrade highspy
without_compiler python "$root/tests/project/wheel_check.py"
