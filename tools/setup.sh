#!/bin/sh
# Make .venv with dpuflow in it. Safe to run again. What is asked for:
#
#   run    what `dpuflow analyze` needs: Python's venv and wheels, nothing else. Kernels compile when they are first used.
#   test   that, and what the tests need: compiled kernels, the eBPF programs, tools of the distribution.
#   live   that, and what live capture needs alone: the eBPF programs and what compiles them.
#
# As root where apt exists, missing packages of the distribution are listed and installed; no service is started,
# stopped, masked or reconfigured. Others are told what to install.
set -eu
cd "$(dirname "$0")/.."
want=${1:-test}
tools=.cache/tools # programs unpacked from packages whose installation would bring a service

as_root() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

missing= # packages, as `need` found them
need() { # command or file, packages...
    thing=$1
    shift
    case $thing in
    /*) [ -e "$thing" ] ;;
    *) command -v "$thing" >/dev/null ;;
    esac || missing="$missing $*"
}

offered() { # packages, or a|b where distributions name one differently: of each the first that this one has
    for choice in "$@"; do
        found=
        for package in $(echo "$choice" | tr '|' ' '); do
            [ -n "$found" ] || ! LC_ALL=C apt-cache policy "$package" | grep -q 'Candidate: [^(]' || found=$package
        done
        if [ -n "$found" ]; then echo "$found"; else echo "setup: not in this distribution: $choice" >&2; fi
    done
}

apt_install() { # packages...; those that cannot be had are named, and the rest goes on
    [ $# -gt 0 ] || return 0
    if ! as_root; then
        echo "setup: not installed, as this needs root and apt-get: $*" >&2
        return 1
    fi
    apt-get -qq update || true
    # shellcheck disable=SC2046 # one word a package
    set -- $(offered "$@")
    [ $# -gt 0 ] || return 0
    echo "setup: installing these packages of the distribution: $*"
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null && return 0
    for package in "$@"; do
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$package" >/dev/null ||
            echo "setup: could not be installed: $package" >&2
    done
}

unpack() { # package, its program: the whole package into .cache/tools/PACKAGE, without installing it
    command -v "$2" >/dev/null || [ -d "$tools/$1" ] || as_root || {
        echo "setup: no $2; its tests are skipped" >&2
        return 0
    }
    if command -v "$2" >/dev/null || [ -d "$tools/$1" ]; then return 0; fi
    echo "setup: unpacking $1 into $tools (not installed: it would bring a service)"
    # shellcheck disable=SC2046 # one word a package
    apt_install $(apt-cache depends "$1" | sed -n 's/^ *Depends: \(lib[^ <]*\)$/\1/p' | grep -v '^libjs-') || true
    room=$(mktemp -d)
    if (cd "$room" && apt-get -qq download "$1" >/dev/null && dpkg -x "$1"_*.deb unpacked); then
        mkdir -p "$tools"
        mv "$room/unpacked" "$tools/$1"
    else
        echo "setup: $1 could not be had; its tests are skipped" >&2
    fi
    rm -rf "$room"
}

suits() { # does this interpreter run dpuflow?
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

find_python() { # the distribution's own first: python3-bpfcc is made for it
    for python in ${PYTHON:-} /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if suits "$python"; then
            command -v "$python"
            return
        fi
    done
    return 1
}

python=$(find_python) || {
    apt_install python3 python3-venv || true
    python=$(find_python) || {
        echo "setup: no Python 3.10 to 3.14 was found; install one and run this again" >&2
        exit 1
    }
}
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv || exit 1

if [ "$want" != run ]; then
    need clang clang
    need /usr/include/bpf/bpf_helpers.h libbpf-dev
    /usr/bin/python3 -c 'import bcc' 2>/dev/null ||
        missing="$missing python3-bpfcc linux-headers-$(dpkg --print-architecture 2>/dev/null || echo none)|linux-headers-generic"
    need ip iproute2
fi
if [ "$want" = test ]; then
    need tshark tshark
    need cc gcc libc6-dev
    need make make
    need /usr/include/pcap/pcap.h libpcap-dev
    need openssl openssl
    need tcpdump tcpdump
    need ethtool ethtool
    need ssh openssh-client
    need tmux tmux
    need bpftool bpftool
    need iptables iptables
    need ovsdb-tool openvswitch-common
fi
# shellcheck disable=SC2086 # one word a package
apt_install $missing || true
if [ "$want" = test ]; then
    unpack prometheus prometheus
    unpack openvswitch-switch ovs-vswitchd
    unpack openssh-server sshd
fi

if ! suits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "setup: making .venv with $python"
    rm -rf .venv
    # With the system's site packages, so that the distribution's python3-bpfcc is seen.
    "$python" -m venv --system-site-packages .venv
fi
pip() { .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"; }
locked() { pip --require-hashes "$@"; } # exactly the files that `make lock` has seen; ranges are in setup.cfg
if [ "$want" = test ]; then
    echo "setup: installing dpuflow and what its tests need into .venv"
    locked -r tools/lock/test.txt
    # Its binding of Gloo alone, for tests of live capture: what the package itself needs is a hundred times as much.
    locked --no-deps -r tools/lock/gloo.txt || echo "setup: no Gloo: live Gloo jobs are not tested" >&2
else
    echo "setup: installing dpuflow into .venv"
    locked -r tools/lock/run.txt
fi
pip --no-deps --no-build-isolation -e .
if [ "$want" = test ]; then
    echo "setup: compiling the kernels (once; about a minute)"
    .venv/bin/python -c 'from dpuflow.kernels import warm; warm()'
fi
if [ "$want" != run ]; then
    sh tools/bpf.sh || echo "setup: without its programs, dpuflow capture does not work; the rest does" >&2
fi
for done in run $want; do touch ".venv/.ready-$done"; done
echo "setup: done; the command is .venv/bin/dpuflow"
