# Cuts the guest's power while overfence works, boots the same disk, and lets it look. Read by `run`.
# shellcheck shell=bash
#
# One disk goes through all cuts: each life begins on what the cuts before it left. What overfence
# acknowledged leaves the guest by a port of its own, a line each, and is here when the guest is not.

# A cut comes after at most so many promises: they count the guest's work, however fast it is.
readonly latest_cut=80

cut_power_often() {
    local all=$results n
    rm -rf "$all"
    mkdir -p "$all"
    : >"$work/payload/promises"
    touch "$work/payload/live"
    for ((n = 1; n <= cuts + 1; n++)); do
        results=$all/boot-$n
        if [ "$n" -gt "$cuts" ]; then
            rm "$work/payload/live"
        fi
        pack_payload
        start_guest
        if [ "$n" -gt "$cuts" ]; then
            await_guest || return
        else
            cut_power "$n" || return
            # The last line may have been cut, too: the next begins on its own.
            { cat "$results/promises.log" && echo; } >>"$work/payload/promises"
        fi
    done
    results=$all
    cp "$work/payload/promises" "$all/promises.log"
    promised_enough
}

# Waits until the guest is at work, and for the moment, and kills it.
cut_power() {
    local promises=1 moment=$at
    if [ -z "$moment" ]; then
        promises=$((1 + RANDOM % latest_cut))
        moment=0.$((RANDOM % 10))
    fi
    until [ "$(promised)" -ge "$promises" ]; do
        # Its look was not pleased, or it never came so far: its answer says.
        if ! alive || [ $((SECONDS - powered_on)) -ge "$deadline" ]; then
            await_guest || return
            die "the guest ended before its power was cut"
        fi
        sleep 0.1
    done
    # The first one says that work began.
    sleep "$moment"
    if ! alive; then
        await_guest || return
        die "the guest ended before its power was cut"
    fi
    kill -KILL "$qemu_pid"
    wait "$qemu_pid" 2>/dev/null || true
    qemu_pid=
    wait "$tail_pid" || true
    say "cut $1 of $cuts, $moment s after promise $promises: $(promised) promised"
}

promised() { cat "$results/promises.log" 2>/dev/null | wc -l; }

# A run in which nothing of a kind was promised has shown nothing about it.
promised_enough() {
    local kind
    for kind in generation head evidence bytes fenced; do
        grep -q "\"kind\": \"$kind\"" "$results/promises.log" ||
            die "no cut came after a promise of the kind $kind: cut later or more often"
    done
}
