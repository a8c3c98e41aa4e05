#!/bin/sh
# Run the tests with the lowest and the highest Python from 3.10 to 3.14 that is here (on PATH, or pyenv's), each in a
# virtual environment of its own under .cache/pythons. Usage: tools/pythons.sh [pytest's arguments]
set -eu
cd "$(dirname "$0")/.."
found=
for minor in 10 11 12 13 14; do
    for python in "$(command -v "python3.$minor" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
        if [ -x "$python" ] && "$python" -c "import sys, ensurepip, venv; sys.exit(sys.version_info[1] != $minor)" 2>/dev/null; then
            found="$found $python"
            break
        fi
    done
done
[ -n "$found" ] || { echo "pythons: no Python 3.10 to 3.14 is here" >&2; exit 1; }
# shellcheck disable=SC2086 # one word a Python
set -- "$(printf '%s\n' $found | head -1)" "$(printf '%s\n' $found | tail -1)" "$@"
low=$1 high=$2
shift 2
[ "$low" != "$high" ] || high=
failed=
for python in $low $high; do
    room=.cache/pythons/$("$python" -c 'import platform; print(platform.python_version())')
    echo "pythons: $room"
    [ -x "$room/bin/python" ] || "$python" -m venv "$room"
    "$room/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r tools/lock/test.txt
    NUMBA_CACHE_DIR=$(pwd)/$room/numba
    export NUMBA_CACHE_DIR
    "$room/bin/python" -c 'from dpuflow.kernels import warm; warm()' # else tests would see that it compiles
    "$room/bin/python" -m pytest -q --ignore=tests/root "$@" || failed="$failed $room"
done
[ -z "$failed" ] || { echo "pythons: tests failed in$failed" >&2; exit 1; }
