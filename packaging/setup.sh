#!/usr/bin/env bash
# What `make` needs of a Debian host, checked and, where root may, installed.
#
#   packaging/setup.sh build          compile
#   packaging/setup.sh run            compile, and run overfence here: root, kernel, bubblewrap,
#                                   mkfs.ext4 for uppers in images
#   packaging/setup.sh test           as `run` when root, as `build` otherwise
#   packaging/setup.sh bench          as `run`, and the container engines to measure beside
#
# NO_INSTALL=1 installs nothing: what is missing is listed and the exit code is 1. Every refusal is
# one line that says what to do.
set -euo pipefail

readonly RUST_WANTED=1.95
readonly KERNEL_WANTED=6.1

die() {
    printf 'overfence: %s\n' "$1" >&2
    exit 1
}

# Whether version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1)" = "$2" ]
}

need_root() {
    [ "$(id -u)" = 0 ] || die "this mounts overlays and makes cgroups: run it as root (sudo -i, then make again)"
}

need_kernel() {
    [ "$(uname -s)" = Linux ] || die "overfence runs on Linux only"
    local release
    release=$(uname -r)
    at_least "${release%%[!0-9.]*}" "$KERNEL_WANTED" ||
        die "kernel $release is too old: boot Linux $KERNEL_WANTED or later (Debian 12 has it)"
    awk '$3 == "cgroup2" { found = 1 } END { exit !found }' /proc/mounts ||
        die "no cgroup2 is mounted (a v1-only host cannot freeze reliably): boot with systemd.unified_cgroup_hierarchy=1"
    grep -qw overlay /proc/filesystems || modprobe overlay 2>/dev/null ||
        die "this kernel has no overlay file system: load or build the module 'overlay'"
}

installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ] || elsewhere "$1"
}

# Docker's own packages bring these programs, and conflict with the distribution's.
elsewhere() {
    case $1 in
    docker.io) command -v dockerd >/dev/null ;;
    containerd | runc) command -v "$1" >/dev/null ;;
    *) false ;;
    esac
}

need_packages() {
    local missing=() package
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        echo "overfence: not a Debian host; these must be there: $*"
        return
    fi
    for package in "$@"; do
        installed "$package" || missing+=("$package")
    done
    if [ ${#missing[@]} = 0 ]; then
        echo "overfence: all packages are there: $*"
        return
    fi
    echo "overfence: missing from Debian: ${missing[*]}"
    [ "${NO_INSTALL:-}" != 1 ] || die "NO_INSTALL=1 is set: run apt-get install ${missing[*]}"
    [ "$(id -u)" = 0 ] || die "not root: run apt-get install ${missing[*]} as root, then make again"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=300 update ||
        die "apt-get update failed: look at /etc/apt/sources.list and the network"
    apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}" ||
        die "apt-get could not install ${missing[*]}: see its message above"
}

# Runs a command under which no package starts a service: this host is to get no running dockerd.
without_services() {
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ] && [ "$(id -u)" = 0 ] && [ "${NO_INSTALL:-}" != 1 ]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    "$@"
}

need_rust() {
    local how="install Rust by rustup (https://rustup.rs), then make again" version
    command -v cargo >/dev/null || die "cargo is missing: $how"
    version=$(rustc --version 2>/dev/null | awk '{ print $2 }') || true
    [ -n "$version" ] ||
        die "the toolchain that rust-toolchain.toml names is missing: run 'rustup toolchain install' here"
    at_least "$version" "$RUST_WANTED" || die "Rust $version is too old, $RUST_WANTED is needed: $how"
}

build=(gcc libc6-dev make ca-certificates)
run=(bubblewrap e2fsprogs)
# busybox: the image that every engine runs. The daemons are started by the bench, privately.
bench=(docker.io podman containerd runc busybox-static)
# clang: with it the binary has the lease gate, from the first build on.
test=(clang util-linux python3 jq systemd-container mmdebstrap dpkg-dev binutils podman runc skopeo umoci
    xfsprogs btrfs-progs)

cd "$(dirname "$0")/.."
case ${1:-} in
build)
    need_packages "${build[@]}"
    ;;
run)
    need_root
    need_kernel
    need_packages "${build[@]}" "${run[@]}"
    ;;
bench)
    need_root
    need_kernel
    need_packages "${build[@]}" "${run[@]}"
    without_services need_packages "${bench[@]}"
    ;;
test)
    if [ "$(id -u)" = 0 ]; then
        need_kernel
        need_packages "${build[@]}" "${run[@]}" "${test[@]}"
        tests-privileged/systemd/rootfs.sh >/dev/null
    else
        need_packages "${build[@]}"
    fi
    ;;
*)
    die "usage: packaging/setup.sh build|run|bench|test"
    ;;
esac
need_rust
# The privileged suite installs the package.
if [ "$1" = test ] && [ "$(id -u)" = 0 ]; then
    packaging/cargo-deb.sh
fi
