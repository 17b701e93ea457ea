#!/usr/bin/env bash
# What an installation has beside the binary and is made by it: manual pages, completions, the
# configuration with every key at its default.
#
#   packaging/generate.sh BINARY DIR
set -euo pipefail

binary=$(realpath "${1:?usage: packaging/generate.sh BINARY DIR}")
dir=${2:?usage: packaging/generate.sh BINARY DIR}
mkdir -p "$dir/man" "$dir/completions"
"$binary" man --dir "$dir/man"
"$binary" completions bash >"$dir/completions/overfence.bash"
"$binary" completions zsh >"$dir/completions/_overfence"
"$binary" completions fish >"$dir/completions/overfence.fish"
"$binary" config default >"$dir/config.toml"
