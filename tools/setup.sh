#!/bin/sh
# Make .venv from the system's Python (3.10 to 3.12) with the system's site packages, so that the
# distribution's python3-bpfcc is seen; install dpuflow into it; compile the kernels into their cache.
# Safe to run again. As root where apt exists, missing packages of the distribution are installed.
set -eu
cd "$(dirname "$0")/.."

apt_updated=
apt_install() { # what for, packages...
    what=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "setup: without root and apt-get, $what is not installed (packages: $*)" >&2
        return 1
    fi
    if [ -z "$apt_updated" ]; then
        apt-get -qq update || true
        apt_updated=yes
    fi
    echo "setup: installing $* ($what)"
    if ! DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null; then
        echo "setup: $* could not be installed ($what)" >&2
        return 1
    fi
}

suits() { # does this interpreter run dpuflow?
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() { # the distribution's own first: python3-bpfcc is made for it
    for python in /usr/bin/python3 /usr/bin/python3.12 /usr/bin/python3.11 /usr/bin/python3.10 \
        python3 python3.12 python3.11 python3.10; do
        if suits "$python"; then
            command -v "$python"
            return
        fi
    done
    return 1
}

python=$(find_python) || {
    apt_install "Python" python3 python3-venv || true
    python=$(find_python) || {
        echo "setup: no Python 3.10 to 3.12 was found; install one and run this again" >&2
        exit 1
    }
}

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    apt_install "venv, which .venv is made with" "$(basename "$(readlink -f "$python")")-venv" ||
    apt_install "venv, which .venv is made with" python3-venv ||
    exit 1

# Only tests and benchmarks use these; without them those parts say so and are skipped.
command -v tshark >/dev/null || apt_install "tshark, which tests and benchmarks compare with" tshark || true
command -v cc >/dev/null || apt_install "a C compiler for the benchmark's peer" gcc libc6-dev || true
[ -e /usr/include/pcap/pcap.h ] || apt_install "libpcap for the benchmark's peer" libpcap-dev || true

command -v openssl >/dev/null || apt_install "openssl, with which tests make certificates" openssl || true
if ! command -v promtool >/dev/null; then
    # Tests start a Prometheus of their own; the package's would listen on port 9090 from now on.
    [ "$(id -u)" != 0 ] || ! command -v systemctl >/dev/null || systemctl -q mask prometheus.service || true
    apt_install "Prometheus, with which tests scrape the agent" prometheus || true
fi

# Live capture: libbpf loads the programs; clang makes them. bpftool shows what is attached, tcpdump checks.
[ -e /usr/include/bpf/bpf_helpers.h ] || apt_install "libbpf for live capture" libbpf-dev || true
command -v clang >/dev/null || apt_install "clang, which makes the eBPF programs" clang || true
/usr/bin/python3 -c 'import bcc' 2>/dev/null || apt_install "bcc, which makes the eBPF programs on the spot" \
    python3-bpfcc "linux-headers-$(dpkg --print-architecture 2>/dev/null)" || true
command -v tcpdump >/dev/null || apt_install "tcpdump, which tests of live capture compare with" tcpdump || true
command -v make >/dev/null || apt_install "make, which tests compile the DOCA adapter with" make || true
command -v ovs-vsctl >/dev/null || RUNLEVEL=1 apt_install "Open vSwitch, which tests mirror with" openvswitch-switch || true
command -v ip >/dev/null || apt_install "ip, with which tests of live capture make networks" iproute2 || true

if ! suits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "setup: making .venv with $python"
    rm -rf .venv
    "$python" -m venv --system-site-packages .venv
fi
echo "setup: installing dpuflow and what it needs into .venv"
.venv/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
# Its binding of Gloo alone, for tests of live capture: what the package itself needs is a hundred times as much.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps 'xoscar>=0.6' ||
    echo "setup: no Gloo: live Gloo jobs are not tested" >&2
echo "setup: compiling the kernels (once)"
.venv/bin/python -c 'from dpuflow.kernels import warm; warm()'
sh tools/bpf.sh || echo "setup: without its programs, dpuflow capture does not work; the rest does" >&2
touch .venv/.ready
echo "setup: done; the command is .venv/bin/dpuflow"
