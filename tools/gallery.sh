#!/bin/sh
# The pictures of docs/gallery.md: bundled captures and scripted jobs analysed, their pages seen through Chromium
# (1280 pixels wide). Needs chromium and pngquant. `make gallery` runs it; look at the pictures before you commit them.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
browser=${BROWSER:-chromium}
for each in "$browser" pngquant; do
    command -v "$each" >/dev/null || { echo "gallery: no $each here (apt-get install chromium pngquant)" >&2; exit 1; }
done
mkdir -p docs/gallery build/gallery
shoot() { # name, height, captures...
    name=$1 height=$2
    shift 2
    "$python" -m dpuflow analyze "$@" --quiet --html "build/gallery/$name.html"
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="1280,$height" \
        --screenshot="build/gallery/$name.png" "file://$PWD/build/gallery/$name.html" 2>/dev/null
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
