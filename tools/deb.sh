#!/bin/sh
# Build dist/dpuflow_VERSION~RELEASE_ARCH.deb. Usage: tools/deb.sh RELEASE ARCH, RELEASE being jammy (Ubuntu 22.04),
# noble (24.04) or bookworm (Debian 12), ARCH amd64 or arm64. Either builds anywhere: Python libraries come as wheels for
# the target, the eBPF objects are the same for all processors, and kernels come compiled for any processor of
# this machine's kind; for the other kind they are compiled where the package is installed. Needs debhelper, clang
# and libbpf-dev.
set -eu
cd "$(dirname "$0")/.."
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)} # the same sources give the same bytes
export SOURCE_DATE_EPOCH

release=${1:?which release: jammy, noble or bookworm} arch=${2:?which processor: amd64 or arm64}
python=${PYTHON:-.venv/bin/python}
case $release in # its Python, and the next, which cannot load what was made for this one
    jammy) abi=3.10 next=3.11 ;;
    bookworm) abi=3.11 next=3.12 ;;
    noble) abi=3.12 next=3.13 ;;
    *) echo "deb: no release $release: jammy, noble or bookworm" >&2; exit 1 ;;
esac
case $arch in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *) echo "deb: no processor $arch: amd64 or arm64" >&2; exit 1 ;;
esac
command -v dh >/dev/null || { # what it builds with: nothing of it is a service
    echo "deb: installing debhelper"
    [ "$(id -u)" = 0 ] && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
        --no-install-recommends debhelper dpkg-dev >/dev/null || {
        echo "deb: debhelper is not installed: as root, apt-get install debhelper dpkg-dev" >&2
        exit 1
    }
}

version=$("$python" -c 'import dpuflow; print(dpuflow.__version__)')
build=build/deb/$release-$arch
rm -rf "$build"
mkdir -p "$build" dist
cp -r deploy/debian "$build/debian"
rm "$build"/debian/agent.yaml "$build"/debian/warm.py "$build"/debian/dpuflow.launcher "$build"/debian/control.in

payload=$build/payload
library=$payload/usr/lib/dpuflow
mkdir -p "$library" "$payload/usr/bin" "$payload/etc/dpuflow" "$payload/usr/share/doc/dpuflow"

sh tools/bpf.sh
git ls-files -z dpuflow | xargs -0 cp --parents -t "$library"
cp dpuflow/live/*.bpf.o "$library/dpuflow/live/"
if [ "$machine" = "$(uname -m)" ]; then # for another processor they are compiled where the package is installed
    cp "$("$python" -m dpuflow.kernels._build)" "$library/dpuflow/kernels/"
fi
cp deploy/debian/warm.py "$library/"
install -m 755 deploy/debian/dpuflow.launcher "$payload/usr/bin/dpuflow"
install -m 644 deploy/debian/agent.yaml "$payload/etc/dpuflow/agent.yaml"
install -m 644 README.md docs/*.md "$payload/usr/share/doc/dpuflow/"
install -m 644 -D -t "$payload/usr/share/doc/dpuflow/theory" docs/theory/*.md
install -m 644 -D -t "$payload/usr/share/man/man1" deploy/man/*.1
gzip -9n "$payload"/usr/share/man/man1/*.1
install -m 644 -D -t "$payload/usr/share/bash-completion/completions" deploy/completion/bash/dpuflow
install -m 644 -D -t "$payload/usr/share/zsh/vendor-completions" deploy/completion/zsh/_dpuflow
install -m 644 -D -t "$payload/usr/share/fish/vendor_completions.d" deploy/completion/fish/dpuflow.fish
# The DOCA adapter can only be compiled where DOCA is: its sources come along (docs/bluefield.md).
mkdir -p "$payload/usr/share/dpuflow/doca_bindings"
cp doca_bindings/Makefile doca_bindings/*.c doca_bindings/*.h doca_bindings/*.sh "$payload/usr/share/dpuflow/doca_bindings/"

# What setup.cfg names, of the agent's parts too, as locked, for the target's Python and processor.
# What suits that Python was seen to when it was locked: pip before 23.1 asks this Python whether it suits.
platforms=$(for glibc in 2_17 2_27 2_28 2_31 2_34 2_35; do printf -- '--platform manylinux_%s_%s ' "$glibc" "$machine"; done)
# shellcheck disable=SC2086  # a list of options
"$python" -m pip install -q --disable-pip-version-check --no-compile --only-binary=:all: \
    --ignore-requires-python --implementation cp --python-version "$abi" $platforms --platform "manylinux2014_$machine" \
    --require-hashes --no-deps --target "$library" -r "tools/lock/deb-$abi.txt"
# What it brings of others', with versions and hashes (CycloneDX), told by a tool that is no part of it.
"$python" -m venv "$build/sbom"
"$build/sbom/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r tools/lock/sbom.txt
"$build/sbom/bin/cyclonedx-py" requirements --output-reproducible --of JSON \
    -o "$payload/usr/share/doc/dpuflow/sbom.cdx.json" "tools/lock/deb-$abi.txt"
rm -rf "$build/sbom"
# Programs of libraries, whose first line names this folder, are left out, and their lines in lists of files.
sed -i '/^\.\.\/\.\.\/bin\//d' "$library"/*.dist-info/RECORD
rm -rf "$library/bin" "$library"/numba/tests "$library"/numba/*/tests "$library"/numpy/*/tests "$library"/numpy/tests

# Ubuntu 22.04's libbpf is too old; Debian 12's needs nothing newer than glibc 2.28, so it comes along.
bpf='libbpf1 (>= 1:1.0), '
if [ "$release" = jammy ]; then
    bpf=
    state=$(pwd)/$build/apt
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    (cd "$state" && for what in update "download libbpf1:$arch"; do
        # shellcheck disable=SC2086  # a command and its argument
        apt-get -qq -o APT::Sandbox::User=root -o APT::Architecture="$arch" -o APT::Architectures="$arch" \
            -o Dir::State::lists="$state/lists" -o Dir::Cache="$state/cache" $what
    done && dpkg-deb -x libbpf1_*.deb libbpf)
    cp -L "$state"/libbpf/usr/lib/*/libbpf.so.1 "$library/dpuflow/live/"
    rm -rf "$state"
fi

# Only the service's own name differs from that in the repository.
cp deploy/systemd/dpuflow-agent.service "$build/debian/dpuflow.dpuflow-agent.service"
mail=${DEBEMAIL:-root@localhost} # as Debian's own tools take it
sed -e "s/@PYTHON_NEXT@/$next/; s/@PYTHON@/$abi/; s/@BPF@/$bpf/; s/@MAIL@/$mail/" deploy/debian/control.in >"$build/debian/control"
date=$(git log -1 --format=%aD)
printf 'dpuflow (%s~%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- The dpuflow authors <%s>  %s\n' \
    "$version" "$release" "$mail" "$date" >"$build/debian/changelog"
printf '3.0 (native)\n' >"$build/debian/source-format"

(cd "$build" && DEB_BUILD_OPTIONS=nocheck dpkg-buildpackage --build=binary --no-sign --no-check-builddeps --host-arch "$arch" >build.log 2>&1) || {
    tail -20 "$build/build.log" >&2
    echo "deb: the package could not be built; see $build/build.log" >&2
    exit 1
}
mv "$build/../dpuflow_${version}~${release}_$arch.deb" dist/
rm -f "$build/../dpuflow_${version}~${release}_$arch".*
echo "deb: dist/dpuflow_${version}~${release}_$arch.deb"
