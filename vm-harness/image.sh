# The guest's disk and kernel, made of Debian packages and kept by content. Read by `run`.
# shellcheck shell=bash
#
# ${XDG_CACHE_HOME:-/var/cache}/overfence-vm/
#   lock                     held while an image is looked up or made
#   apt/                     private lists of packages: the host's own apt is not touched
#   rootfs-<digest>.tar      a minimal Debian of the host's release
#   <digest>/vmlinux         an uncompressed kernel, disk.img, the root file system with its modules,
#            version         and the kernel's version
#   run.XXXXXX/              one run's files, locked by it and its guest; removed at its end, or a day
#                            later by another run if it was killed
#
# A digest covers every input: the recipe, the sources, the kernel package's version.

# What the suite and the units need beside `minbase`.
readonly rootfs_packages=systemd,systemd-sysv,dbus,udev,util-linux,kmod,e2fsprogs,xfsprogs,btrfs-progs,procps,bubblewrap,python3,jq,sqlite3,iproute2,zstd,systemd-container

# Units that a guest of some minutes would only wait for, or that would run beside its tests.
readonly masked_units=(serial-getty@ttyS0.service getty@tty1.service systemd-random-seed.service
    systemd-update-utmp.service e2scrub_reap.service e2scrub_all.timer apt-daily.timer
    apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer)

# apt with lists and archives of its own; the first word says which sources.
private_apt() {
    local sources=$1 tool=$2 dir=$cache/apt
    shift 2
    mkdir -p "$dir/lists/partial" "$dir/archives/partial"
    "$tool" -o Dir::State::Lists="$dir/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$dir" \
        -o Dir::Etc::SourceList="$sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Acquire::Languages=none -o APT::List-Cleanup=false -o APT::Sandbox::User=root "$@"
}

# Where this host has Debian from, asked of apt itself; other releases are at the same place.
debian_uri() {
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Identifier: Packages' |
        awk -v release="$1" '$1 == release && $2 == "main" { print $3; exit }'
}

# A sources file for the release "$1" at this host's mirror.
sources_of() {
    local file=$work/$1.list
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "$uri" "$1" >"$file"
    printf '%s\n' "$file"
}

# The names of the packages a cloud kernel is made of: the image and, on new kernels, its base, binary and
# modules, which it depends on.
kernel_packages() {
    private_apt "$1" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
        --no-breaks --no-replaces --no-enhances linux-image-cloud-amd64 |
        grep -E '^linux-(image|base|binary|modules)-[0-9].*-cloud-amd64$' | sort -u
}

prepare_image() {
    local codename sources packages versions digest
    # One at a time: apt's lists, and what two runs would both make.
    exec 9>"$cache/lock"
    flock 9
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || die "/etc/os-release names no release of Debian"
    uri=$(debian_uri "$codename")
    [ -n "$uri" ] || die "apt has no source of Debian $codename: look at /etc/apt/sources.list.d"
    case $kernel in
    6.1) sources=$(sources_of bookworm) ;;
    6.12) sources=$(sources_of trixie) ;;
    newest) sources=$(sources_of trixie-backports) ;;
    esac
    # What is cached needs no network.
    private_apt "$sources" apt-get -qq update >&2 ||
        say "apt-get update failed for $(cat "$sources"): going on with the lists that are there"
    packages=$(kernel_packages "$sources") || packages=
    [ -n "$packages" ] || die "apt knows no cloud kernel in $(cat "$sources"): look at its messages above"
    # shellcheck disable=SC2086 # one word a package
    versions=$(private_apt "$sources" apt-cache show --no-all-versions $packages | grep -E '^(Package|Version|SHA256):')
    kernel_version=$(sed -n '1s/linux-[a-z]*-\(.*\)/\1/p' <<<"$packages")
    digest=$({ cat "$here/image.sh" "$here/guest/unit" "$sources" && printf '%s\n' "$codename" "$versions"; } | digest_of)
    image=$cache/$digest
    if [ ! -e "$image/version" ]; then
        say "making the image of kernel $kernel_version in $image"
        make_rootfs "$codename"
        make_image "$sources" "$packages"
    fi
    touch "$image" "$image/version"
    # What nobody used for a month was made of older packages.
    find "$cache" -mindepth 1 -maxdepth 1 ! -name apt ! -name lock ! -name 'run.*' -mtime +30 -exec rm -rf {} +
    clear_killed
    exec 9>&-
}

# Removes the files of runs that were killed, after a day: one that has just begun may not hold its lock yet.
clear_killed() {
    find "$cache" -mindepth 1 -maxdepth 1 -name 'run.*' -mtime +0 -exec flock --nonblock {} rm -rf {} \;
}

digest_of() { sha256sum | cut -c1-20; }

# The packages of the guest, unpacked and configured; all kernels share them.
make_rootfs() {
    local sources
    sources=$(sources_of "$1")
    rootfs=$cache/rootfs-$(cat "$sources" "$here/image.sh" "$here/guest/unit" | digest_of).tar
    if [ -e "$rootfs" ]; then
        touch "$rootfs"
        return 0
    fi
    # Without manuals: under emulation the disk is not free. Without our locks: its shell knows no descriptor
    # above 9.
    mmdebstrap --quiet --variant=minbase --include="$rootfs_packages" --format=tar \
        --dpkgopt='force-unsafe-io' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook="upload $here/guest/unit /etc/systemd/system/overfence-vm.service" \
        --customize-hook='chroot "$1" systemctl --quiet enable overfence-vm.service' \
        --customize-hook="chroot \"\$1\" systemctl --quiet mask ${masked_units[*]}" \
        --customize-hook='printf "/dev/nvme0n1 / ext4 defaults 0 0\n" >"$1/etc/fstab"; printf "guest\n" >"$1/etc/hostname"' \
        "$1" "$work/rootfs.tar" "$(cat "$sources")" >"$work/mmdebstrap.log" 2>&1 8<&- 9>&- || {
        cat "$work/mmdebstrap.log" >&2
        die "mmdebstrap could not make the guest's root"
    }
    mv "$work/rootfs.tar" "$rootfs"
}

make_image() {
    local part=$work/image root=$work/root packages deb modules
    mkdir -p "$part" "$root" "$work/kernel" "$work/debs"
    read -r -d '' -a packages <<<"$2" || true
    (cd "$work/debs" && private_apt "$1" apt-get -qq download "${packages[@]}") >&2 || die "a kernel package could not be had"
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/kernel"
    done
    # In /boot, or from 7.x on beside the modules.
    uncompress_kernel "$(find "$work/kernel" -type f -name 'vmlinuz*' | head -n1)" "$part/vmlinux"
    tar -xf "$rootfs" -C "$root" --exclude='./dev/*'
    mkdir -p "$root/usr/lib/modules/$kernel_version"
    for modules in "$work"/kernel/{,usr/}lib/modules/"$kernel_version"; do
        [ ! -d "$modules" ] || cp -a "$modules/." "$root/usr/lib/modules/$kernel_version/"
    done
    chroot "$root" depmod "$kernel_version"
    # Sparse: what tests write is in it, and a run's copy costs only what is used.
    truncate -s 6G "$part/disk.img"
    mkfs.ext4 -q -F -L root -d "$root" -E lazy_itable_init=1,lazy_journal_init=1 "$part/disk.img"
    printf '%s\n' "$kernel_version" >"$part/version"
    rm -rf "$root" "$work/kernel" "$work/debs"
    rm -rf "$image"
    mv "$part" "$image"
}

# QEMU starts an uncompressed kernel directly (PVH): under emulation its own decompression would
# take longer than the rest of the boot. Where the compressed one lies, the boot protocol's header
# says: payload_offset and payload_length, counted from the end of the setup sectors.
uncompress_kernel() {
    local start length tool
    start=$((($(number "$1" 0x1f1 1) + 1) * 512 + $(number "$1" 0x248 4)))
    length=$(number "$1" 0x24c 4)
    case $(od -An -j "$start" -N 4 -tx1 "$1" | tr -d ' ') in
    fd377a58) tool=xz ;;
    28b52ffd) tool=zstd ;;
    02214c18) tool=lz4 ;;
    1f8b08*) tool=gzip ;;
    *) die "no way is known to unpack $1" ;;
    esac
    # The last four bytes are the unpacked size, which the tools take for garbage.
    head -c $((start + length - 4)) "$1" | tail -c +$((start + 1)) | $tool -dc >"$2" || die "$tool could not unpack $1"
}

# The little-endian number of $3 bytes at offset $2 of file $1.
number() { od -An -j "$2" -N "$3" -t "u$3" "$1" | tr -d ' '; }
