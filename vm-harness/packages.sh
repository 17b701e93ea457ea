# What the harness needs of its host, and what goes into the guest beside Debian. Read by `run`.
# shellcheck shell=bash

need_packages() {
    local missing=() package
    command -v apt-get >/dev/null || die "not a Debian host: image and kernel come from its apt sources"
    # To build (clang: the guest's binary has the lease gate), to pack, to boot.
    for package in gcc libc6-dev clang binutils dpkg-dev e2fsprogs \
        qemu-system-x86 mmdebstrap xz-utils zstd lz4; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            missing+=("$package")
    done
    [ ${#missing[@]} != 0 ] || return 0
    [ "${NO_INSTALL:-}" != 1 ] || die "NO_INSTALL=1 is set: run apt-get install ${missing[*]}"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 || die "apt-get update failed: look at its message above"
    apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}" >"$work/apt.log" 2>&1 || {
        cat "$work/apt.log" >&2
        die "apt-get could not install ${missing[*]}"
    }
}

# The path of what cargo built for the target named "$1", from cargo's own messages ("$2").
built() {
    sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" "$2" | tail -n1
}

# The production binary and, if the suite asks for it, the test binary go into the guest stripped:
# under emulation the disk is not free.
build_payload() {
    local payload=$work/payload binary tests
    mkdir -p "$payload"
    (cd "$tree" && cargo build --release --locked --bin overfence --message-format=json-render-diagnostics) \
        >"$work/build.json" || die "the release build failed"
    binary=$(built overfence "$work/build.json")
    strip -o "$payload/overfence" "$binary"
    case $suite in all | kernel | privileged | gate)
        (cd "$tree" && cargo test --no-run --locked --test privileged --message-format=json-render-diagnostics) \
            >"$work/test.json" || die "the privileged suite does not build"
        tests=$(built privileged "$work/test.json")
        strip -o "$payload/privileged" "$tests"
        ;;
    esac
    # There is no cargo in the guest that could make one.
    case $suite in all | kernel | privileged | gate | power-cut)
        (cd "$tree" && packaging/deb.sh "$binary" "$work/deb" --fast) >/dev/null || die "the .deb was not made"
        cp "$work"/deb/overfence_*.deb "$payload/overfence.deb"
        ;;
    esac
    # `git status` is measured where the host has git: the same release of Debian runs it in the guest, and
    # its package would bring Perl.
    case $suite in gate) ! command -v git >/dev/null || cp -L "$(command -v git)" "$payload/git" ;; esac
    cp "$here"/guest/{work,power_cut.py} "$payload/"
    printf '%s\n' "$suite" >"$payload/suite"
    printf '%s\n' "${OVERFENCE_ROUNDS-}" >"$payload/rounds"
    # The command as one line that a shell reads back word by word.
    { [ ${#command[@]} = 0 ] || printf '%q ' "${command[@]}"; } >"$payload/command"
    pack_payload
}

# The payload as a disk.
pack_payload() {
    rm -f "$work/payload.img"
    truncate -s 512M "$work/payload.img"
    mkfs.ext4 -q -F -L payload -d "$work/payload" -O ^has_journal "$work/payload.img"
}
