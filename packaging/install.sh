#!/usr/bin/env bash
# Puts the binary, what it generates and what systemd and Prometheus need of it below DESTDIR.
#
#   packaging/install.sh BINARY [DESTDIR] [PREFIX]
#
# PREFIX (/usr/local) is for the binary and what is below share; units, sysusers.d and tmpfiles.d go
# where systemd looks for what is installed: below /usr/lib with PREFIX=/usr, else below /usr/local/lib
# and, since systemd reads no other prefix, never elsewhere. /etc is not touched: every key has a
# default, and share/doc/overfence/examples/config.toml shows them. BINARY has to run here.
set -euo pipefail

binary=${1:?usage: packaging/install.sh BINARY [DESTDIR] [PREFIX]}
destdir=${2:-}
prefix=${3:-/usr/local}
case $prefix in
/usr) lib=/usr/lib ;;
*) lib=/usr/local/lib ;;
esac
here=$(dirname "$0")
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$here/generate.sh" "$binary" "$made"

put() { # FILE PLACE: with the binary's place written in
    install -d "$destdir${2%/*}"
    sed "s,/usr/bin/overfence,$prefix/bin/overfence,g" "$1" >"$destdir$2.new"
    chmod 0644 "$destdir$2.new"
    mv "$destdir$2.new" "$destdir$2"
}

# Renamed over the old one: what runs goes on with its own copy until it is restarted.
install -d "$destdir$prefix/bin"
install -m 0755 "$binary" "$destdir$prefix/bin/overfence.new"
mv "$destdir$prefix/bin/overfence.new" "$destdir$prefix/bin/overfence"
for unit in "$here"/systemd/*.service "$here"/systemd/*.socket; do
    put "$unit" "$lib/systemd/system/${unit##*/}"
done
put "$here/systemd/overfence.sysusers" "$lib/sysusers.d/overfence.conf"
put "$here/systemd/overfence.tmpfiles" "$lib/tmpfiles.d/overfence.conf"

share=$prefix/share
for page in "$made"/man/*; do
    put "$page" "$share/man/man1/${page##*/}"
done
put "$made/completions/overfence.bash" "$share/bash-completion/completions/overfence"
put "$made/completions/_overfence" "$share/zsh/site-functions/_overfence"
put "$made/completions/overfence.fish" "$share/fish/vendor_completions.d/overfence.fish"
put "$made/config.toml" "$share/doc/overfence/examples/config.toml"
put "$here/prometheus/overfence.rules.yml" "$share/overfence/prometheus/overfence.rules.yml"
