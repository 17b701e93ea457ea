"""The life of a host whose power is cut, and what has to hold afterwards.

    power_cut.py install                 overfence, from its package
    power_cut.py check PROMISES          what was told before the cuts holds now
    power_cut.py live PORT PROMISES      writers, fences, checkpoints, removals, until the cut

`live` writes to PORT, which the machine outside reads, what overfence acknowledged: a promise a line,
as JSON, once the answer is there. `check` knows nothing but these lines and what is on this host.
"""

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

STATE = Path("/var/lib/overfence")
RUNTIME = Path("/run/overfence")
CGROUPS = Path("/sys/fs/cgroup/system.slice/overfence-sessions.service")
# How long anything may take to come about, in seconds, on an emulated host.
PATIENCE = 90
PASSING = {"OPENING", "FENCING", "DELETING", "RELEASING", "CLOSED"}


class Refused(Exception):
    """A verb did not end with 0, or something did not come about."""


def ask(*words, codes=(0,)):
    """The JSON answer of a verb."""
    done = subprocess.run(
        ["overfence", "-o", "json", "--timeout", f"{PATIENCE}s", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode not in codes:
        raise Refused(f"{' '.join(words)}: exit {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout) if done.stdout.strip() else None


def until(what, look):
    """Waits for `look` to give something."""
    begun, last = time.monotonic(), None
    while time.monotonic() - begun < PATIENCE:
        try:
            if seen := look():
                return seen
        except Refused as refusal:
            last = refusal
        time.sleep(0.1)
    raise Refused(f"waited in vain: {what}: {last or ''}")


# ---------------------------------------------------------------- before the cut


class Life:
    """What goes on at once; each loop is a thread."""

    def __init__(self, port, number):
        self.port = os.open(port, os.O_WRONLY)
        self.number = number
        self.one = threading.Lock()
        self.preserved = []

    def promise(self, kind, **fact):
        """Tells the machine outside; when this returns, it has it."""
        line = json.dumps({"kind": kind, **fact}) + "\n"
        with self.one:
            os.write(self.port, line.encode())

    def open(self, workspace):
        opened = ask("session", "open", "-w", workspace, "--create", "--ttl", "10m")["session"]
        self.promise("generation", workspace=workspace, generation=opened["generation"])
        return opened

    def bytes(self, session, path, text):
        """Writes durably through the overlay: the upper has it from then on."""
        with open(path, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.promise("bytes", session=session["id"], file=path.name, text=text)

    def publish(self):
        """Checkpoints, one after the other, by one session after the other."""
        n = 0
        # A head has some hundred layers at most.
        workspace = f"published-{self.number // 4}"
        while True:
            opened = self.open(workspace)
            merged = Path(opened["merged"])
            for _ in range(3):
                n += 1
                name = f"{self.number}-{n}"
                (merged / name).write_text(name)
                at = ask("session", "checkpoint", opened["id"])["at"]
                self.promise("head", workspace=workspace, file=name, **at)
                time.sleep(0.3)
            ask("session", "close", opened["id"], "--checkpoint")

    def fence(self):
        """Writers that lose their lease while they write; every second one is readmitted first."""
        n = 0
        while True:
            n += 1
            opened = self.open("fenced")
            merged = Path(opened["merged"])
            with subprocess.Popen(
                    ["overfence", "session", "exec", opened["id"], "--", "sh", "-c",
                     "while :; do echo x >> log; sleep 0.05; done"],
                    stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                # So that a removal takes a while.
                (merged / "bulk").mkdir()
                for k in range(300):
                    (merged / "bulk" / str(k)).write_text("x")
                self.bytes(opened, merged / "precious", f"{self.number}-{n}")
                ask("fence", opened["id"], "--reason", "test", "--wait", codes=(0, 8))
                self.promise("fenced", session=opened["id"])
                if n % 2 == 0:
                    until("fenced", lambda: self.is_stopped(opened["id"]))
                    again = ask("readmit", opened["id"], "--authorised-by", "test", "--reason", "test")
                    self.promise("generation", workspace="fenced", generation=again["generation"])
                    ask("fence", opened["id"], "--to", "killed", "--reason", "test", "--wait", codes=(0, 8))
                self.preserved.append(opened["id"])
                if n > 1:
                    # A frozen writer stays for the cut; those before it are removed.
                    self.discard()

    @staticmethod
    def is_stopped(session):
        return ask("session", "inspect", session)["state"] in ("FENCED", "PRESERVED")

    def discard(self):
        session = self.preserved.pop(0)
        until("fenced", lambda: self.is_stopped(session))
        self.promise("discarding", session=session)
        ask("preserved", "discard", session, "--yes", codes=(0, 8))
        until("removed", lambda: all(s["id"] != session for s in ask("session", "list")))
        self.promise("discarded", session=session)

    def write(self):
        """A writer that is never asked anything: the cut finds it at work."""
        script = "while :; do i=$((i+1)); echo $i > n$i && sync n$i && echo $i; sleep 0.2; done"
        with subprocess.Popen(
                ["overfence", "run", "-w", "steady", "--create", "--ttl", "20s", "--", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as child:
            first = child.stdout.readline()
            (session,) = [s for s in ask("session", "list")
                          if s["workspace"] == "steady" and s["state"] == "ACTIVE"]
            self.promise("generation", workspace="steady", generation=session["generation"])
            for line in itertools.chain([first], child.stdout):
                self.promise("bytes", session=session["id"], file=f"n{line.strip()}", text=line.strip())
        raise Refused(f"the steady writer ended with {child.returncode}")

    def witness(self):
        """The head of the evidence as it grows."""
        while True:
            (last,) = ask("evidence", "show", "--last", "1")
            self.promise("evidence", seq=last["seq"], hash=last["hash"])
            time.sleep(0.3)

    def forever(self, loop):
        try:
            loop()
        except Exception as trouble:  # whatever it is, it is not what a living host does
            self.promise("trouble", of=loop.__name__, what=repr(trouble))


def live(port, promises):
    life = Life(port, sum(p["kind"] == "alive" for p in promises))
    discarded = {p["session"] for p in promises if p["kind"] == "discarding"}
    # What earlier lives left goes first: it is removed beside everything else.
    life.preserved = [p["session"] for p in ask("preserved", "list")
                      if p["workspace"] == "fenced" or p["session"] in discarded]
    loops = [life.publish, life.fence, life.write, life.witness]
    if life.preserved:
        loops.append(lambda: [life.discard() for _ in list(life.preserved)])
        loops[-1].__name__ = "discard"
    threads = [threading.Thread(target=life.forever, args=[loop]) for loop in loops]
    life.promise("alive", boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit("power-cut: the life ended by itself")


# ---------------------------------------------------------------- after the cut


class Check:
    """Every wrong thing is said; what held is counted."""

    def __init__(self, promises):
        self.promises = promises
        self.wrong = []
        self.held = {}

    def of(self, kind):
        return [p for p in self.promises if p["kind"] == kind]

    def holds(self, what, good, otherwise):
        self.held[what] = self.held.get(what, 0) + bool(good)
        if not good:
            self.wrong.append(f"{what}: {otherwise}")

    def run(self):
        until("ready", lambda: ask("status")["ready"])
        until("every session settles", lambda: not any(
            s["state"] in PASSING or s["work"] or s["unknown"] for s in ask("session", "list")))
        sessions = {s["id"]: s for s in ask("session", "list")}
        workspaces = {w["id"]: w for w in ask("workspace", "list")}
        for told in self.of("trouble"):
            self.wrong.append(f"before the cut: {told}")
        self.generations(workspaces)
        self.heads(workspaces)
        self.leases(sessions)
        self.bytes(sessions)
        self.evidence()
        self.nothing_unexplained()
        self.goes_on(workspaces)

    def generations(self, workspaces):
        for told in self.of("generation"):
            now = workspaces.get(told["workspace"], {}).get("generation", 0)
            self.holds("generations", now >= told["generation"], f"{told}, now {now}")

    def heads(self, workspaces):
        for told in self.of("head"):
            now = workspaces.get(told["workspace"], {"version": 0, "head": []})
            # A later checkpoint of the same session puts a new layer in the place of its last one.
            below = told["head"][:-1]
            good = now["version"] > told["version"] and now["head"][:len(below)] == below
            good = good or (now["version"], now["head"]) == (told["version"], told["head"])
            self.holds("publications", good, f"{told}, now {now['version']} {now['head']}")
        for workspace in workspaces.values():
            for layer in workspace["head"]:
                self.holds("layers", *self.layer(layer))

    @staticmethod
    def layer(diff_id):
        """Whether a layer is whole: its tar has the digest that names it."""
        digest = diff_id.rpartition(":")[2]
        place = STATE / "layers" / digest
        blob = place / "layer.tar.zst"
        with subprocess.Popen(["zstd", "-dcq", str(blob)], stdout=subprocess.PIPE) as zstd:
            got = hashlib.sha256()
            while chunk := zstd.stdout.read(1 << 20):
                got.update(chunk)
        info = json.loads((place / "layer.json").read_text()) if (place / "layer.json").exists() else {}
        good = zstd.returncode == 0 and got.hexdigest() == digest and info.get("diff_id") == diff_id
        return good, f"{diff_id}: zstd {zstd.returncode}, its tar is {got.hexdigest()}, {info}"

    def leases(self, sessions):
        for lease in ask("lease", "list"):
            self.holds("ended leases", lease["state"] not in ("ACTIVE", "RELEASING"), f"{lease}")
        for session in sessions.values():
            good = session["state"] in ("PRESERVED", "FENCED") and not session["may_publish"]
            self.holds("stopped sessions", good, f"{session}")

    def bytes(self, sessions):
        discarding = {p["session"] for p in self.of("discarding")}
        for told in self.of("bytes"):
            session = sessions.get(told["session"])
            if session is None and told["session"] in discarding:
                continue
            file = session and Path(session["upper"], told["file"])
            good = file and file.exists() and file.read_text().strip() == told["text"]
            self.holds("files of stale writers", good, f"{told}, session {session and session['state']}")
        for told in self.of("discarded"):
            gone = told["session"] not in sessions and not (STATE / "sessions" / told["session"]).exists()
            events = [e.get("detail", {}).get("event", {}).get("event")
                      for e in ask("evidence", "show", "--session", told["session"])]
            self.holds("removals", gone and "disposed" in events, f"{told}, gone: {gone}, {events}")

    def evidence(self):
        self.holds("evidence", *(lambda report: (report and report["ok"], report))(
            ask("evidence", "verify", codes=(0, 1))))
        chain = {e["seq"]: e["hash"] for e in ask("evidence", "show")}
        for told in self.of("evidence"):
            self.holds("evidence heads", chain.get(told["seq"]) == told["hash"],
                       f"{told}, now {chain.get(told['seq'])} of {len(chain)}")

    def nothing_unexplained(self):
        known = {s["id"] for s in ask("session", "list")}

        def left():
            found = []
            for place in (STATE / "sessions", RUNTIME / "sessions", CGROUPS):
                with contextlib.suppress(FileNotFoundError):
                    found += [str(e) for e in place.iterdir() if e.is_dir() and e.name not in known]
            for place in (STATE / "trash", STATE / "exports"):
                with contextlib.suppress(FileNotFoundError):
                    found += [str(e) for e in place.iterdir()]
            found += [str(e) for e in (STATE / "layers").glob(".tmp-*")]
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                at = line.split(" ")[4]
                if at.startswith(f"{STATE}/sessions/") and not any(i in at for i in known):
                    found.append(line)
            return found

        begun = time.monotonic()
        while (found := left()) and time.monotonic() - begun < PATIENCE:
            time.sleep(0.2)
        self.holds("nothing unexplained", not found, found)
        for session in known:
            place = STATE / "sessions" / session
            whole = [n for n in ("upper", "work", "merged") if not (place / n).is_dir()]
            good = not whole and (place / "marker").is_symlink()
            self.holds("whole sessions", good, f"{session}: no {whole or 'marker'}")

    def goes_on(self, workspaces):
        """A new writer gets a generation above all, and sees what was published."""
        for name in workspaces:
            most = max((p["generation"] for p in self.of("generation") if p["workspace"] == name), default=0)
            opened = ask("session", "open", "-w", name, "--ttl", "10m")["session"]
            self.holds("new generations", opened["generation"] > most, f"{opened['generation']}, told {most}")
            for told in (p for p in self.of("head") if p["workspace"] == name):
                file = Path(opened["merged"], told["file"])
                good = file.exists() and file.read_text() == told["file"]
                self.holds("published files", good, f"{told}")
            ask("session", "close", opened["id"])


def check(promises):
    looked = Check(promises)
    try:
        looked.run()
    except Refused as refused:
        looked.wrong.append(str(refused))
    print("power-cut: held: " + ", ".join(f"{n} {what}" for what, n in looked.held.items()))
    for wrong in looked.wrong:
        print(f"power-cut: WRONG: {wrong}")
    sys.exit(1 if looked.wrong else 0)


def read(path):
    """The promises of all lives; the last line of each may have been cut, too."""
    found = []
    for line in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def main():
    match sys.argv[1:]:
        case ["install", package]:
            subprocess.run(["dpkg", "--install", package], check=True)
            until("ready", lambda: ask("status")["ready"])
            # The image's dpkg does not wait for the disk, and this is not what is to be found out.
            os.sync()
        case ["check", promises]:
            check(read(promises))
        case ["live", port, promises]:
            live(port, read(promises))
        case _:
            sys.exit(__doc__)


main()
