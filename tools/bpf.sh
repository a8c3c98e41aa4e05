#!/bin/sh
# Compile the eBPF programs of bpf/ into dpuflow/live/, for any kernel and any little-endian processor:
# they touch nothing but the kernel's user API. Needs clang and the headers of libbpf-dev and linux-libc-dev.
set -eu
cd "$(dirname "$0")/.."

if ! command -v clang >/dev/null; then
    echo "bpf: clang is not installed (packages: clang libbpf-dev)" >&2
    exit 1
fi
for source in bpf/*.bpf.c; do
    object=dpuflow/live/$(basename "$source" .c).o
    if [ -e "$object" ] && [ -z "$(find bpf tools/bpf.sh -newer "$object")" ]; then
        continue # of what it is made of, nothing has changed since
    fi
    # In whatever folder it is compiled, the bytes are the same.
    clang -target bpf -mcpu=v3 -g -O2 -ffile-prefix-map="$PWD=." -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Werror \
        -idirafter "/usr/include/$(uname -m)-linux-gnu" -Ibpf -c "$source" -o "$object.$$"
    mv "$object.$$" "$object"
    echo "bpf: $object"
done
