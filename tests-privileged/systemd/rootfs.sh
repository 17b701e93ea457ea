#!/usr/bin/env bash
# Prints the place of a minimal Debian with systemd for systemd-nspawn, made once for each list of
# packages and kept outside the tree: below OVERFENCE_NSPAWN_CACHE or /var/cache/overfence-nspawn.
# Nothing is written into it afterwards; each test boots an overlay of it. OVERFENCE_TEST_NSPAWN_ROOT names
# one that is there already, for hosts without a network.
set -euo pipefail

if [ -n "${OVERFENCE_TEST_NSPAWN_ROOT:-}" ]; then
    echo "$OVERFENCE_TEST_NSPAWN_ROOT"
    exit
fi

cache=${OVERFENCE_NSPAWN_CACHE:-/var/cache/overfence-nspawn}
# podman and what it needs are for the engine with the systemd driver.
packages=systemd,systemd-sysv,dbus,bubblewrap,e2fsprogs,podman,runc
# The binary is linked against this host's C library, so the same release or a later one.
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")
# Ubuntu has podman in universe.
components=main$(. /etc/os-release && [ "${ID:-}" != ubuntu ] || echo ,universe)
digest=$(printf '%s %s 1' "$suite" "$packages" | sha256sum | cut -c1-16)
root=$cache/$digest

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -d "$root" ]; then
    echo "making $root, once: $packages of $suite" >&2
    new=$root.new
    rm -rf "$new"
    mmdebstrap --quiet --variant=minbase --components="$components" --include="$packages" \
        --dpkgopt='force-unsafe-io' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$suite" "$new" >&2
    # What a boot for a few seconds needs not.
    for unit in systemd-update-utmp systemd-update-utmp-runlevel console-getty \
        podman podman-restart podman-auto-update; do
        ln -sf /dev/null "$new/etc/systemd/system/$unit.service"
    done
    for unit in apt-daily apt-daily-upgrade dpkg-db-backup e2scrub_all systemd-tmpfiles-clean podman-auto-update; do
        ln -sf /dev/null "$new/etc/systemd/system/$unit.timer"
    done
    : >"$new/etc/machine-id"
    mv "$new" "$root"
fi
echo "$root"
