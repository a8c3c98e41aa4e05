#!/bin/sh
# The pictures of docs/gallery.md: bundled captures and scripted jobs analysed, their pages seen through Chromium
# (1280 pixels wide). Needs chromium and pngquant. `make gallery` runs it; look at the pictures before you commit them.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
for each in chromium pngquant; do
    command -v "$each" >/dev/null || { echo "gallery: no $each here (apt-get install chromium pngquant)" >&2; exit 1; }
done
mkdir -p docs/gallery build/gallery
shoot() { # name, height, captures...; name#part: that part of the page
    name=${1%%#*} part=${1#"${1%%#*}"} height=$2
    shift 2
    "$python" -m dpuflow analyze "$@" --quiet --html "build/gallery/$name.html"
    PYTHONPATH=tests "$python" - "build/gallery/$name" "$height" "$part" <<'END'
import sys, tempfile
from pathlib import Path

from browser import chromium

name, height, part = sys.argv[1:]
with chromium(Path(tempfile.mkdtemp())) as browser:
    browser.open(Path(f"{name}.html"), height=int(height))
    if part:
        browser.value(f"document.querySelector({part!r}).scrollIntoView()")
    Path(f"{name}.png").write_bytes(browser.picture())
END
    pngquant --force --speed 1 --strip --output "docs/gallery/$name.png" 192 "build/gallery/$name.png"
}
play() { # scenario
    "$python" -m dpuflow synth "$1" -o "build/gallery/$1" 2>/dev/null
}
shoot straggler 2050 traces/gloo-allreduce-n4/node*.pcap.gz
shoot mpi 560 traces/mpi-allreduce-n4/node*.pcap.gz
shoot not-judged 620 traces/nccl-allreduce-n2/node*.pcap.gz
play decode
shoot decode 640 build/gallery/decode/node*.pcap.gz
play flap
shoot flap 700 build/gallery/flap/node*.pcap.gz
play pipeline
shoot pipeline#pipelines 640 build/gallery/pipeline/node*.pcap.gz
play kvwrite
shoot kvwrite 780 build/gallery/kvwrite/node*.pcap.gz
# The bundled job without what comes after rank 2 should have entered its last operation.
rm -rf build/gallery/hang && mkdir -p build/gallery/hang
PYTHONPATH=tests:. "$python" -c "
from pathlib import Path
from test_hang import LATE_NS, stopped
stopped(Path('build/gallery/hang'), LATE_NS, go_on=True)"
shoot hang 740 build/gallery/hang/node*.pcap
