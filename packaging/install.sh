#!/usr/bin/env bash
# Puts the binary and what systemd needs of it below DESTDIR.
#
#   packaging/install.sh BINARY [DESTDIR] [PREFIX]
#
# PREFIX (/usr/local) is for the binary; units, sysusers.d and tmpfiles.d go where systemd looks for
# what is installed: below /usr/lib with PREFIX=/usr, else below /usr/local/lib and, since systemd
# reads no other prefix, never elsewhere.
set -euo pipefail

binary=${1:?usage: packaging/install.sh BINARY [DESTDIR] [PREFIX]}
destdir=${2:-}
prefix=${3:-/usr/local}
case $prefix in
/usr) lib=/usr/lib ;;
*) lib=/usr/local/lib ;;
esac
units=$(dirname "$0")/systemd

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
for unit in "$units"/*.service "$units"/*.socket; do
    put "$unit" "$lib/systemd/system/${unit##*/}"
done
put "$units/overfence.sysusers" "$lib/sysusers.d/overfence.conf"
put "$units/overfence.tmpfiles" "$lib/tmpfiles.d/overfence.conf"
