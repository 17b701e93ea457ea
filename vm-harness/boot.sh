# Starts the guest, shows what it says, and ends it. Read by `run`.
# shellcheck shell=bash

# The disks: a copy of the root, what is to be run, and the root as it was, for tests that boot a host of
# their own on it. A kernel finds disks of one kind in any order: the root is the only one of the kind
# that is built in, and so always /dev/nvme0n1. A guest whose power is cut loses its own cache; what it
# wrote survives in the host's. Not cache=unsafe: QEMU 7.2 then fails the forced writes of 7.3.
disk_arguments() {
    printf '%s\n' \
        -drive "if=none,id=root,format=raw,file=$work/disk.img,cache=writeback" \
        -device nvme,drive=root,serial=root \
        -drive "if=none,id=payload,format=raw,file=$work/payload.img,read-only=on" \
        -device virtio-blk-pci,drive=payload,serial=payload \
        -drive "if=none,id=pristine,format=raw,file=$image/disk.img,read-only=on" \
        -device virtio-blk-pci,drive=pristine,serial=pristine
}

# /dev/kvm may be there and not work, or work only half (nested hosts): only a kernel that got as
# far as looking for its root, which takes a second, shows that it does.
accelerator() {
    if [ -w /dev/kvm ] && timeout 4 qemu-system-x86_64 -accel kvm -cpu host -M pc -m 256 -display none \
        -nodefaults -no-user-config -no-reboot -serial "file:$work/trial.log" -kernel "$image/vmlinux" \
        -append 'console=ttyS0 panic=-1' >/dev/null 2>&1 && grep -q 'Unable to mount root' "$work/trial.log"; then
        printf '%s\n' -accel kvm -cpu host
    else
        # The gate patches the kernel's code while the other processor runs it. QEMU 7.2 may then keep its
        # translation of the breakpoint that stands there for a moment, and both trap for ever.
        local threads=multi
        case $suite in gate | power-cut) threads=single ;; esac
        # cx16=off: without it QEMU 7.2 brings 6.12 down early.
        printf '%s\n' -accel "tcg,thread=$threads" -cpu qemu64,+rdrand,cx16=off
    fi
}

# An emulated guest counts time by the host's time stamp counter. How fast that is it finds out as it starts, and
# on a busy host wrongly: its clock was seen to run nine times too fast. Without frequency scaling the host says.
host_tsc() {
    [ -e /sys/devices/system/cpu/cpu0/cpufreq ] ||
        awk -F: '/^cpu MHz/ { printf " tsc_early_khz=%d", $2 * 1000; exit }' /proc/cpuinfo
}

fresh_disk() { cp --sparse=always --reflink=auto "$image/disk.img" "$work/disk.img"; }

# Boots what is on the disk, whoever wrote it there; sets qemu_pid and powered_on.
start_guest() {
    local arguments acceleration append
    mapfile -t acceleration < <(accelerator)
    mapfile -t arguments < <(disk_arguments)
    say "kernel $kernel_version, ${acceleration[1]}, at most $deadline s"
    append='root=/dev/nvme0n1 rw rootwait console=ttyS0 mitigations=off nokaslr tsc=reliable no_timer_check'
    append+=' random.trust_cpu=on audit=0 panic=-1 quiet systemd.show_status=0 rcupdate.rcu_expedited=1'
    # Emulated code is translated for the address at which it runs: a process whose addresses are drawn
    # anew has all of it translated anew, which took more than half of a guest's time.
    [ "${acceleration[1]}" = kvm ] || append+=" norandmaps$(host_tsc)"
    if [ "$keep" = 1 ]; then
        append+=' overfence.keep'
    fi
    rm -rf "$results"
    mkdir -p "$results"
    rm -f "$work/status" "$work/files.tar"
    : >"$results/output.log"
    # A harness that is killed itself takes the guest along.
    setpriv --pdeathsig KILL qemu-system-x86_64 "${acceleration[@]}" -M pc,hpet=off,smm=off,vmport=off -m 2048 -smp 2 -display none \
        -nodefaults -no-user-config -no-reboot "${arguments[@]}" \
        -chardev "socket,id=console,path=$work/console.sock,server=on,wait=off,logfile=$results/console.log" \
        -serial chardev:console \
        -device virtio-serial-pci \
        -chardev "file,id=output,path=$results/output.log" -device virtserialport,chardev=output,name=output \
        -chardev "file,id=status,path=$work/status" -device virtserialport,chardev=status,name=status \
        -chardev "file,id=files,path=$work/files.tar" -device virtserialport,chardev=files,name=files \
        -chardev "file,id=promises,path=$results/promises.log" -device virtserialport,chardev=promises,name=promises \
        -kernel "$image/vmlinux" -append "$append" </dev/null &
    qemu_pid=$!
    powered_on=$SECONDS
    tail -c +1 -f -s 0.2 --pid="$qemu_pid" "$results/output.log" &
    tail_pid=$!
    if [ "$keep" = 1 ]; then
        say "the guest stays until it is powered off or this is interrupted; a root shell:"
        say "  socat -,raw,echo=0,escape=0x1d UNIX-CONNECT:$work/console.sock"
        deadline=
    fi
}

# Waits for the guest's end; its answer is this function's.
await_guest() {
    local late=0
    wait_for_end || late=1
    qemu_pid=
    wait "$tail_pid" || true
    tar -xf "$work/files.tar" -C "$results" 2>/dev/null || true
    [ "$late" = 0 ] || {
        say "the guest did not end within $deadline s and was ended; the last of its console:"
        tail -n 20 "$results/console.log" >&2
        return 124
    }
    [ -s "$work/status" ] || {
        say "the guest ended without an answer; the last of its console:"
        tail -n 20 "$results/console.log" >&2 || true
        return 125
    }
    return "$(cat "$work/status")"
}

# Fails when the guest had to be ended at its deadline. Not in a subshell: a signal to the harness would
# then wait as long as the guest lives.
wait_for_end() {
    while alive; do
        if [ -n "$deadline" ] && [ $((SECONDS - powered_on)) -ge "$deadline" ]; then
            end_guest
            return 1
        fi
        sleep 0.2
    done
}

# A child that ended and was not waited for yet is a zombie, not alive.
alive() {
    local state
    state=$(sed 's/.*) //; s/ .*//' "/proc/$qemu_pid/stat" 2>/dev/null) && [ "$state" != Z ]
}

end_guest() {
    if [ -z "$qemu_pid" ] || ! alive; then
        return 0
    fi
    kill -TERM "$qemu_pid" 2>/dev/null || true
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        alive || return 0
        sleep 0.2
    done
    kill -KILL "$qemu_pid" 2>/dev/null || true
}
