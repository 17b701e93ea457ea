#!/usr/bin/env bash
# promtool of the host, or else out of Debian's package `prometheus`, fetched once and kept outside the
# tree: below OVERFENCE_PROMTOOL_CACHE or ~/.cache/overfence-promtool. The package is unpacked and not
# installed: it would bring a daemon and start it.
set -euo pipefail

tool=$(command -v promtool || true)
cache=${OVERFENCE_PROMTOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/overfence-promtool}
if [ -z "$tool" ] && [ ! -x "$cache/promtool" ] && [ "${NO_INSTALL:-}" != 1 ] && command -v apt-get >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    echo "fetching promtool, once, into $cache" >&2
    # Root's apt would fetch as a user that may not write here. Old lists name versions that are gone.
    fetch() { (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download prometheus >&2); }
    if fetch || { [ "$(id -u)" = 0 ] && apt-get -qq update >&2 && fetch; }; then
        dpkg -x "$work"/prometheus_*.deb "$work/root"
        mkdir -p "$cache"
        install -m 0755 "$work/root/usr/bin/promtool" "$cache/promtool.$$"
        mv "$cache/promtool.$$" "$cache/promtool"
    fi
    rm -rf "$work"
fi
[ -n "$tool" ] || tool=$cache/promtool
if [ ! -x "$tool" ]; then
    echo 'overfence: promtool is missing: install a package that has it (Debian: prometheus)' >&2
    exit 69
fi
exec "$tool" "$@"
