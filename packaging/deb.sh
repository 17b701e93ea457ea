#!/usr/bin/env bash
# Packs a binary that is built already as a .deb, with cargo-deb, and prints its path.
#
#   packaging/deb.sh BINARY OUT [cargo-deb options]
#
# What is packed is laid out in a directory of its own, which cargo-deb takes for the build
# directory. BINARY has to run here: it makes its manual pages.
set -euo pipefail

binary=$(realpath "${1:?usage: packaging/deb.sh BINARY OUT}")
out=$(realpath -m "${2:?usage: packaging/deb.sh BINARY OUT}")
shift 2
cd "$(dirname "$0")/.."
export PATH="$HOME/.cargo/bin:$PATH"

die() {
    printf 'overfence: %s\n' "$1" >&2
    exit 1
}

packaging/cargo-deb.sh
for tool in dpkg-shlibdeps strip; do
    command -v "$tool" >/dev/null || die "$tool is missing: run apt-get install dpkg-dev binutils"
done

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir -p "$made/release" "$out"
strip -o "$made/release/overfence" "$binary"
packaging/generate.sh "$binary" "$made/release/packaging"
gzip -9n "$made"/release/packaging/man/*
# What files are dated: the same commit gives the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)} \
    CARGO_TARGET_DIR=$made cargo deb --quiet --locked --offline --no-build --no-strip --output "$out" "$@"
