#!/usr/bin/env bash
# Installs cargo-deb by cargo when it is missing; it is no dependency of the crate. NO_INSTALL=1 installs
# nothing.
set -euo pipefail

export PATH="$HOME/.cargo/bin:$PATH"
! command -v cargo-deb >/dev/null || exit 0
if [ "${NO_INSTALL:-}" = 1 ]; then
    echo 'overfence: NO_INSTALL=1 is set: run cargo install --locked cargo-deb' >&2
    exit 1
fi
echo 'overfence: installing cargo-deb, once' >&2
# Without the optimisation of its release profile, which takes longer than it ever saves here.
env -u CARGO_TARGET_DIR CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
    CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo install --quiet --locked cargo-deb >&2 || {
    echo 'overfence: cargo-deb could not be installed: see its message above' >&2
    exit 1
}
