#!/bin/sh
# What a newcomer meets: a bare Debian or Ubuntu in a folder of its own, in it README's commands, and what they took.
# As root: tools/bare.sh [SUITE [TARGET...]]   e.g. tools/bare.sh bookworm demo; tools/bare.sh noble demo test
#
# The system (mmdebstrap) has git, make and python3-venv, as README asks for, and this checkout's last commit. It shares
# nothing with the machine but its network, pip's cache (kept in .cache/bare/pip: the second run has a warm one) and
# /etc/pip.conf. Each command's time is printed: wall, and CPU of all its processes.
set -eu
cd "$(dirname "$0")/.."
suite=${1:-bookworm}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- demo
home=$(pwd)/.cache/bare
image=$home/$suite.tar
[ "$(id -u)" = 0 ] || { echo "bare: needs root" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { echo "bare: mmdebstrap is not installed (package: mmdebstrap)" >&2; exit 1; }
mkdir -p "$home/pip"
# A mirror that stands still is good enough here, so an index may be past its date; its signature counts.
make_system() { mmdebstrap --quiet --aptopt='Acquire::Check-Valid-Until "false"' --format=tar "$@"; }
keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg
case $suite in
    bookworm | trixie | forky | sid) keys= && set -- main "$@" ;;
    *) # Ubuntu has python3-venv in universe, which its images have switched on
        set -- main,universe "$@"
        [ -e "$keys" ] || { # Debian has its keys as a package, which is not installed but unpacked
            [ -e "$home/keys.tar" ] || make_system --variant=extract --include=ubuntu-keyring sid "$home/keys.tar"
            tar -C "$home" -xf "$home/keys.tar" ".$keys"
            keys=$home$keys
        } ;;
esac
components=$1
shift
[ -e "$image" ] || {
    make_system --variant=minbase --components="$components" ${keys:+--keyring="$keys"} \
        --include=apt,git,make,python3-venv,ca-certificates "$suite" "$image.part"
    mv "$image.part" "$image"
}
room=$(mktemp -d "$home/$suite.XXXXXX")
trap 'rm -rf "$room"' EXIT
tar -C "$room" -xf "$image"
cp /etc/resolv.conf "$room/etc/"
# As installers leave it; mmdebstrap writes none, and glibc does not know the name by itself.
[ -e "$room/etc/hosts" ] || printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >"$room/etc/hosts"
for file in /etc/pip.conf "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}"; do # this network's, where it has its own
    if [ -e "$file" ]; then install -D "$file" "$room$file"; fi
done
git clone -q --no-local . "$room/srv/dpuflow" # where others than root may read it, as some tests do
export room home
for target in "$@"; do
    export target
    # What is mounted vanishes with the namespace, what is left running ends with it.
    unshare --mount --pid --fork --kill-child sh -eu <<'INSIDE'
mkdir -p "$room/root/.cache/pip"
mount --bind "$room" "$room" # as the root of a system is one, too
mount -t proc proc "$room/proc"
mount --rbind /sys "$room/sys"
mount --rbind /dev "$room/dev"
mount --bind "$home/pip" "$room/root/.cache/pip"
packages() { chroot "$room" dpkg-query -f '${Package}\n' -W | sort; }
packages >"$home/before"
env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    chroot "$room" bash -c "cd /srv/dpuflow && TIMEFORMAT='bare: make $target: %R s wall, %U + %S s CPU' && time make $target"
packages >"$home/after"
echo "bare: make $target installed $(comm -13 "$home/before" "$home/after" | wc -l) packages of the distribution"
INSIDE
done
