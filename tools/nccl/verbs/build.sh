#!/bin/sh
# Build the user-space verbs library and its companion into a folder, for LD_LIBRARY_PATH: sh build.sh FOLDER
# Needs gcc and libibverbs-dev (for <infiniband/verbs.h> alone).
set -eu
if [ $# -ne 1 ]; then
    echo "usage: sh build.sh FOLDER" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")"

gcc -O2 -g -Wall -Wextra -fPIC -shared -fvisibility=hidden -Wl,-soname,libibverbs.so.1 \
    -Wl,--version-script=verbs.map -Wl,-z,nodelete -o "$folder/libibverbs.so.1" verbs.c -lpthread
gcc -O2 -Wall -Wextra -fPIC -shared -Wl,-soname,libmlx5.so.1 \
    -Wl,--version-script=mlx5.map -o "$folder/libmlx5.so.1" mlx5.c
ln -sf libibverbs.so.1 "$folder/libibverbs.so" # NCCL asks for these names first
ln -sf libmlx5.so.1 "$folder/libmlx5.so"
