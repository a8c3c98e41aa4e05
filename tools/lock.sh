#!/bin/sh
# Write tools/lock/*.txt anew: every wheel, with its hashes, that the ranges in setup.cfg come to, for all Pythons.
# The index is whatever pip's is here; no host is named in what is written.
set -eu
cd "$(dirname "$0")/.."
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python=${PYTHON:-.venv/bin/python}
"$python" -m venv "$room/venv"
"$room/venv/bin/python" -m pip install -q --disable-pip-version-check uv
lock() { # name, options of uv...; requirements on standard input
    name=$1
    shift
    cat >"$room/$name.in"
    SSL_CERT_FILE=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}} "$room/venv/bin/uv" pip compile -q \
        --generate-hashes --no-emit-index-url --no-header --no-annotate "$@" \
        --output-file "tools/lock/$name.txt" "$room/$name.in"
}

rm -rf tools/lock
mkdir tools/lock
needed() { "$python" tools/requirements.py "$@"; }
{ needed && needed --build; } | lock run --universal --python-version 3.10
{ needed dev && needed --build; } | lock test --universal --python-version 3.10
echo 'xoscar>=0.6' | lock gloo --no-deps --python-version 3.10 # its binding of Gloo alone, for tests
echo 'cyclonedx-bom>=5' | lock sbom --universal --python-version 3.10 # for `make deb` alone
for python_of in 3.10 3.11 3.12; do # pip takes markers for those of its own Python, so a file each
    needed agent doca | lock "deb-$python_of" --python-version "$python_of" --python-platform linux
done
