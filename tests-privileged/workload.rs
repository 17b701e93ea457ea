//! What a command may expect of the place it runs in: its exit code, its streams, its terminal,
//! its signals, an init that reaps, and a lease that follows its life.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use overfence::kernel::clock;
use overfence::kernel::launch::{Fork, exit_now, fork};
use overfence::workload::{self, Command, Exit, Holder, Place, Standing};
use overfence::workload::{Beats, exec, live_init, run};

use crate::host;
use crate::room::{Room, sh};

pub fn tests() -> Vec<host::Test> {
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { vec![$(host::Test { name: stringify!($name), run: $name }),*] };
    }
    tests![
        exit_codes_are_the_commands_own,
        streams_pass_through_and_end_with_the_command,
        a_signal_to_the_client_reaches_the_command,
        a_terminal_interrupts_once_and_stops_the_job,
        a_daemon_keeps_the_init_and_orphans_are_reaped,
        a_command_outlives_its_client,
        concurrent_execs_start_one_init,
        a_start_into_a_frozen_session_can_be_given_up,
        a_shell_has_job_control,
        a_killed_session_is_told_from_an_answer,
        a_client_leaves_a_session_only_when_it_is_frozen_for_good,
        a_client_of_a_stopped_session_leaves_on_a_signal_at_once,
        the_init_beats_while_its_command_runs,
        a_second_run_is_refused,
        start_time_is_small,
    ]
}

type Start = fn(&Place, &Command) -> overfence::workload::Result<Exit>;

/// Waits for a state, with a deadline.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < host::paced(Duration::from_secs(15)), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// A client in a process of its own; it ends with the command's code.
fn client(start: Start, place: &Place, command: &Command) -> Pid {
    match fork().unwrap() {
        Fork::Parent(pid) => pid,
        Fork::Child => match start(place, command) {
            Ok(exit) => exit_now(exit.code()),
            Err(e) => {
                eprintln!("{e}");
                exit_now(125)
            }
        },
    }
}

fn populated(place: &Place) -> bool {
    let events = std::fs::read_to_string(place.cgroup.join("cgroup.events")).unwrap();
    events.contains("populated 1")
}

/// The process of the session whose command line holds `what`.
fn find(place: &Place, what: &str) -> Option<Pid> {
    let procs = std::fs::read_to_string(place.cgroup.join("cgroup.procs")).unwrap();
    procs
        .lines()
        .find(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.windows(what.len()).any(|w| w == what.as_bytes()))
        })
        .map(|pid| Pid::from_raw(pid.parse().unwrap()))
}

fn exit_codes_are_the_commands_own(host: &host::Place) {
    let room = Room::new(host);
    let program = |argv: &[&str], cwd: Option<&str>| Command {
        argv: argv.iter().map(Into::into).collect(),
        env: vec![],
        cwd: cwd.map(Into::into),
    };
    for start in [run as Start, exec] {
        let cases = [
            (sh("exit 0"), Exit::Code(0)),
            (sh("exit 37"), Exit::Code(37)),
            (sh("exit 255"), Exit::Code(255)),
            (sh("kill -KILL $$"), Exit::Signal(9)),
            // Neither blocked nor ignored by what was before the command.
            (sh("kill -TERM $$"), Exit::Signal(15)),
            (sh("kill -PIPE $$"), Exit::Signal(13)),
            (program(&["no-such-program"], None), Exit::Code(127)),
            (program(&["/etc/passwd"], None), Exit::Code(126)),
            (program(&["true"], Some("/no/such/directory")), Exit::Code(126)),
            (program(&["sh", "-c", "test $PWD = /tmp"], Some("/tmp")), Exit::Code(0)),
            (program(&["sh", "-c", "test $PWD = /workspace"], None), Exit::Code(0)),
        ];
        for (command, expected) in cases {
            // One right after the other: an init that leaves is in nobody's way.
            assert_eq!(start(&room.place, &command).unwrap(), expected, "{command:?}");
        }
    }
    assert_eq!([Exit::Signal(15).code(), Exit::Lost.code(), Exit::Code(3).code()], [143, 137, 3]);
    let nothing = run(&room.place, &program(&[], None));
    assert!(matches!(nothing, Err(overfence::workload::Error::NoCommand)));
}

fn streams_pass_through_and_end_with_the_command(host: &host::Place) {
    let room = Room::new(host);
    for start in [exec as Start, run] {
        let (input, mut feed) = std::io::pipe().unwrap();
        let (mut output, output_end) = std::io::pipe().unwrap();
        let (mut errors, errors_end) = std::io::pipe().unwrap();
        let place = &room.place;
        let pid = match fork().unwrap() {
            Fork::Parent(pid) => pid,
            Fork::Child => {
                rustix::stdio::dup2_stdin(&input).unwrap();
                rustix::stdio::dup2_stdout(&output_end).unwrap();
                rustix::stdio::dup2_stderr(&errors_end).unwrap();
                drop((feed, output, errors, input, output_end, errors_end));
                // A daemon of its own manners: it lets go of the streams.
                let script = "cat; echo wrong >&2; (exec sleep 1000 <&- >&- 2>&-) & exit 4";
                exit_now(start(place, &sh(script)).unwrap().code());
            }
        };
        drop((input, output_end, errors_end));
        feed.write_all(b"through and through").unwrap();
        drop(feed);
        let (mut out, mut err) = (String::new(), String::new());
        // Neither the monitor nor the init may keep these open.
        output.read_to_string(&mut out).unwrap();
        errors.read_to_string(&mut err).unwrap();
        assert_eq!((out.as_str(), err.as_str()), ("through and through", "wrong\n"));
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 4));
        assert!(populated(place), "the daemon is gone");
        std::fs::write(place.cgroup.join("cgroup.kill"), "1").unwrap();
        until("the session is empty", || !populated(place));
    }
}

const TRAPS: &str = "trap 'echo int >> out' INT; trap 'echo term >> out; exit 42' TERM; \
    trap 'echo usr1 >> out' USR1; echo ready > ready; while :; do sleep 0.05; done";

fn a_signal_to_the_client_reaches_the_command(host: &host::Place) {
    for (name, start) in [("a", run as Start), ("b", exec)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let pid = client(start, &room.place, &sh(TRAPS));
        let out = room.place.merged.join("out");
        let lines = || std::fs::read_to_string(&out).unwrap_or_default();
        until("the traps are set", || room.place.merged.join("ready").exists());
        kill(pid, Signal::SIGINT).unwrap();
        until("INT arrives", || lines() == "int\n");
        kill(pid, Signal::SIGUSR1).unwrap();
        until("USR1 arrives", || lines() == "int\nusr1\n");
        kill(pid, Signal::SIGTERM).unwrap();
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 42));
        assert_eq!(lines(), "int\nusr1\nterm\n");
    }
}

fn a_terminal_interrupts_once_and_stops_the_job(host: &host::Place) {
    let terminal = terminal();
    let mut keys = std::fs::File::from(terminal.master);
    for (name, start) in [("a", run as Start), ("b", exec)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let job = job(&terminal.slave, start, &room.place, &sh(TRAPS));
        let merged = room.place.merged.clone();
        let lines = || std::fs::read_to_string(merged.join("out")).unwrap_or_default();
        until("the traps are set", || merged.join("ready").exists());

        keys.write_all(&[3]).unwrap();
        until("INT arrives", || !lines().is_empty());
        // A second one would have been passed on by the client at the same time.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(lines(), "int\n", "{name}");

        keys.write_all(&[26]).unwrap();
        let stopped = waited(job, WaitPidFlag::WUNTRACED);
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
        let state = |pid: Pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
        };
        let command = find(&room.place, "echo ready").unwrap();
        until("the command is stopped", || state(command) == 'T');
        nix::sys::signal::killpg(job, Signal::SIGCONT).unwrap();
        until("the command goes on", || state(command) != 'T');
        kill(job, Signal::SIGTERM).unwrap();
        let ended = waited(job, WaitPidFlag::empty());
        assert_eq!(ended, WaitStatus::Exited(job, 42), "{name}");
    }
}

/// Waits for a child, and says what it and its job do if nothing comes of it.
fn waited(pid: Pid, flag: WaitPidFlag) -> WaitStatus {
    let begun = Instant::now();
    loop {
        match waitpid(pid, Some(flag | WaitPidFlag::WNOHANG)).unwrap() {
            WaitStatus::StillAlive => {}
            status => return status,
        }
        if begun.elapsed() > host::paced(Duration::from_secs(20)) {
            let list = ["-eo", "pid,ppid,pgid,tpgid,stat,wchan:20,args"];
            let list = std::process::Command::new("ps").args(list).output().unwrap();
            panic!("{pid} does not end:\n{}", String::from_utf8_lossy(&list.stdout));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn a_daemon_keeps_the_init_and_orphans_are_reaped(host: &host::Place) {
    let room = Room::new(host);
    let script = "(sleep 0.01 & sleep 0.01 &); setsid sleep 7777 > /dev/null 2>&1 & \
        sleep 0.2; ps -eo stat= > stats";
    assert_eq!(run(&room.place, &sh(script)).unwrap(), Exit::Code(0));
    let stats = room.out("stats");
    assert!(stats.lines().count() >= 3 && !stats.contains('Z'), "{stats}");
    let init = live_init(&room.place).unwrap().expect("the daemon keeps the init");
    assert_eq!(exec(&room.place, &sh("pgrep -f '^sleep 7777' > daemon")).unwrap(), Exit::Code(0));
    assert_eq!(live_init(&room.place).unwrap(), Some(init), "exec joined another init");
    kill(find(&room.place, "7777").unwrap(), Signal::SIGKILL).unwrap();
    until("the init leaves after its last process", || !populated(&room.place));
    assert_eq!(live_init(&room.place).unwrap(), None);
}

fn a_command_outlives_its_client(host: &host::Place) {
    for (name, start) in [("a", run as Start), ("b", exec)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let pid = client(start, &room.place, &sh("echo x > ready; sleep 0.3; echo done > done"));
        until("it runs", || room.place.merged.join("ready").exists());
        kill(pid, Signal::SIGKILL).unwrap();
        waitpid(pid, None).unwrap();
        until("the command ends by itself", || room.place.merged.join("done").exists());
    }
}

fn concurrent_execs_start_one_init(host: &host::Place) {
    let room = Room::new(host);
    let clients: Vec<Pid> = (0..4)
        .map(|n| client(exec, &room.place, &sh(&format!("readlink /proc/self/ns/pid > out{n}"))))
        .collect();
    for pid in clients {
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
    }
    let first = room.out("out0");
    assert!(first.starts_with("pid:["), "{first}");
    for n in 1..4 {
        assert_eq!(room.out(&format!("out{n}")), first);
    }
    assert!(populated(&room.place), "an init for exec stays until the session is closed");
}

fn a_start_into_a_frozen_session_can_be_given_up(host: &host::Place) {
    let room = Room::new(host);
    let freeze = room.place.cgroup.join("cgroup.freeze");
    for start in [run as Start, exec] {
        if start as usize == exec as Start as usize {
            assert_eq!(exec(&room.place, &sh("true")).unwrap(), Exit::Code(0));
        }
        std::fs::write(&freeze, "1").unwrap();
        let pid = client(start, &room.place, &sh("echo > ran"));
        until("it is in the cgroup", || find(&room.place, "privileged").is_some());
        std::thread::sleep(Duration::from_millis(50));
        kill(pid, Signal::SIGTERM).unwrap();
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 143));
        std::fs::write(&freeze, "0").unwrap();
        until("what was started is gone", || find(&room.place, "privileged").is_none());
        assert!(!room.place.merged.join("ran").exists());
    }
}

/// This process becomes the leader of a session with a terminal; what is typed goes to the first
/// end.
fn terminal() -> nix::pty::OpenptyResult {
    let terminal = nix::pty::openpty(None, None).unwrap();
    rustix::process::setsid().unwrap();
    rustix::process::ioctl_tiocsctty(&terminal.slave).unwrap();
    // A shell in the background of its own terminal is stopped by this unless it ignores it, and
    // hung up when the terminal goes, as it does at the end of the test.
    let ignored: nix::sys::signal::SigSet = [Signal::SIGTTOU, Signal::SIGHUP].into_iter().collect();
    ignored.thread_block().unwrap();
    terminal
}

/// A client as the foreground job of the terminal.
fn job(terminal: &std::os::fd::OwnedFd, start: Start, place: &Place, command: &Command) -> Pid {
    match fork().unwrap() {
        Fork::Parent(pid) => {
            let _ = nix::unistd::setpgid(pid, pid);
            nix::unistd::tcsetpgrp(terminal.as_fd(), pid).unwrap();
            pid
        }
        Fork::Child => {
            nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0)).unwrap();
            rustix::stdio::dup2_stdin(terminal).unwrap();
            rustix::stdio::dup2_stdout(terminal).unwrap();
            rustix::stdio::dup2_stderr(terminal).unwrap();
            nix::sys::signal::SigSet::empty().thread_set_mask().unwrap();
            until("the foreground", || {
                nix::unistd::tcgetpgrp(terminal.as_fd()).unwrap() == Pid::this()
            });
            exit_now(start(place, command).unwrap().code());
        }
    }
}

fn a_shell_has_job_control(host: &host::Place) {
    let terminal = terminal();
    let mut keys = std::fs::File::from(terminal.master);
    for (name, start) in [("a", run as Start), ("b", exec)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let shell = Command {
            argv: ["bash", "--norc", "--noprofile", "-i"].map(Into::into).into(),
            env: vec![("TERM".into(), "dumb".into())],
            cwd: None,
        };
        let pid = job(&terminal.slave, start, &room.place, &shell);
        let mut screen = String::new();
        let mut typed = |keys: &mut std::fs::File, text: &[u8], seen: &str| {
            keys.write_all(text).unwrap();
            let mut piece = [0; 512];
            while !screen.contains(seen) {
                let n = keys.read(&mut piece).unwrap();
                screen.push_str(&String::from_utf8_lossy(&piece[..n]));
            }
            assert!(!screen.contains("no job control"), "{screen}");
        };
        // Quotes, so that the echo of what is typed is not taken for the answer.
        typed(&mut keys, b"sleep 1000\n", "sleep 1000");
        until("it sleeps", || find(&room.place, "1000").is_some());
        typed(&mut keys, &[26], "Stopped");
        typed(&mut keys, b"jobs; echo in the b'ack'\n", "in the back");
        typed(&mut keys, b"kill %1; wait; tty; echo on'e'\n", "one");
        keys.write_all(b"exit 9\n").unwrap();
        assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 9), "{screen}");
        println!("{screen}");
    }
}

fn a_killed_session_is_told_from_an_answer(host: &host::Place) {
    for (name, start) in [("a", run as Start), ("b", exec)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let place = &room.place;
        let killer = match fork().unwrap() {
            Fork::Parent(pid) => pid,
            Fork::Child => {
                until("it runs", || place.merged.join("ready").exists());
                std::fs::write(place.cgroup.join("cgroup.freeze"), "1").unwrap();
                std::fs::write(place.cgroup.join("cgroup.kill"), "1").unwrap();
                exit_now(0);
            }
        };
        assert_eq!(start(place, &sh("echo > ready; sleep 1000")).unwrap(), Exit::Lost);
        waitpid(killer, None).unwrap();
        until("the session is empty", || !populated(place));
        std::fs::write(place.cgroup.join("cgroup.freeze"), "0").unwrap();
        assert_eq!(live_init(place).unwrap(), None);
    }
}

fn a_client_leaves_a_session_only_when_it_is_frozen_for_good(host: &host::Place) {
    type Start = fn(&Place, &Command, &mut dyn FnMut() -> Standing) -> workload::Result<Exit>;
    for (name, start) in [("a", workload::run_until as Start), ("b", workload::exec_until)] {
        let room = Room::with(host, name, overfence::workload::User::default(), false);
        let place = &room.place;
        let freeze = |wish: &str| std::fs::write(place.cgroup.join("cgroup.freeze"), wish).unwrap();
        let freezer = match fork().unwrap() {
            Fork::Parent(pid) => pid,
            Fork::Child => {
                until("it runs", || place.merged.join("ready").exists());
                freeze("1");
                exit_now(0);
            }
        };
        // Frozen and asked: no (a checkpoint, say); thawed; frozen again in doubt, then for good.
        let mut asked = 0;
        let mut lost = || {
            asked += 1;
            if asked == 2 {
                freeze("0");
                until("it goes on", || place.merged.join("again").exists());
                freeze("1");
            }
            match asked {
                1 | 2 => Standing::Passing,
                3 => Standing::Stopped,
                _ => Standing::Lost,
            }
        };
        let command = sh("echo > ready; sleep 0.2; echo > again; sleep 1000");
        assert_eq!(start(place, &command, &mut lost).unwrap(), Exit::Lost);
        waitpid(freezer, None).unwrap();
        assert_eq!(asked, 4);
        assert!(find(place, "sleep").is_some(), "the frozen command is left as it stands");
        std::fs::write(place.cgroup.join("cgroup.kill"), "1").unwrap();
        until("the session is empty", || !populated(place));
        freeze("0");
    }
}

fn a_client_of_a_stopped_session_leaves_on_a_signal_at_once(host: &host::Place) {
    let room = Room::with(host, "a", overfence::workload::User::default(), false);
    let place = &room.place;
    let freeze = |wish: &str| std::fs::write(place.cgroup.join("cgroup.freeze"), wish).unwrap();
    let client = nix::unistd::getpid();
    let other = match fork().unwrap() {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            until("it runs", || place.merged.join("ready").exists());
            freeze("1");
            std::thread::sleep(Duration::from_millis(700));
            kill(client, Signal::SIGTERM).unwrap();
            exit_now(0);
        }
    };
    let mut asked = 0;
    let mut ask = || {
        asked += 1;
        Standing::Stopped
    };
    let command = sh("trap 'echo > told; exit 3' TERM; echo > ready; while :; do sleep 0.1; done");
    let begun = Instant::now();
    assert_eq!(workload::run_until(place, &command, &mut ask).unwrap(), Exit::Signal(15));
    assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
    assert!(asked >= 2, "it stayed while the session stood stopped: {asked}");
    waitpid(other, None).unwrap();
    assert!(populated(place) && !place.merged.join("told").exists());
    freeze("0");
    until("the command heard of it once it ran again", || place.merged.join("told").exists());
    until("the session is empty", || !populated(place));
}

fn the_init_beats_while_its_command_runs(host: &host::Place) {
    let mut room = Room::new(host);
    room.place.holder = Holder::Process;
    room.place.ttl = Duration::from_millis(300);
    let record = room.place.record.clone();
    let pid = client(run, &room.place, &sh(TRAPS));
    let sign = || Beats::of(&record)?.last().filter(|sign| sign.0 > 0);
    until("the first sign", || sign().is_some());
    let (first, begun) = (sign().unwrap(), Instant::now());
    let mut signs = BTreeSet::from([first]);
    until("three more signs", || {
        signs.extend(sign());
        signs.len() > 3
    });
    assert!(begun.elapsed() > room.place.ttl / 2, "beats come faster than three in a TTL");
    until("the traps are set", || room.place.merged.join("ready").exists());

    // Whether there is a sign that is given after now, within two thirds of a TTL and more.
    let news = || {
        let now = clock::now();
        std::thread::sleep(Duration::from_millis(500));
        sign().is_some_and(|sign| sign > now)
    };
    until("a beat of a running command", news);
    let command = find(&room.place, "echo ready").unwrap();
    kill(command, Signal::SIGSTOP).unwrap();
    let stat = || std::fs::read_to_string(format!("/proc/{command}/stat")).unwrap();
    until("it stands stopped", || stat().contains(") T "));
    // One may have been on its way.
    std::thread::sleep(Duration::from_millis(50));
    assert!(!news(), "a stopped command holds no lease");
    // The client stopped itself, too, as a shell expects of a job; both are continued.
    kill(pid, Signal::SIGCONT).unwrap();
    kill(command, Signal::SIGCONT).unwrap();
    until("a beat after it was continued", news);

    // Nobody but the init has the file: not the command, to which nothing is handed on, and it is
    // not among what the session sees.
    let init = live_init(&room.place).unwrap().expect("it beats, so it lives").pid;
    let holders = |pid: u32| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
            .filter(|file| *file == record.with_extension("beat"))
            .count()
    };
    assert_eq!(holders(init), 1);
    assert_eq!(holders(command.as_raw().cast_unsigned()), 0);
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 42));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!news(), "the dead hold no lease");
}

fn a_second_run_is_refused(host: &host::Place) {
    let room = Room::new(host);
    let script = "(exec sleep 1000 > /dev/null 2>&1) & exit 0";
    assert_eq!(run(&room.place, &sh(script)).unwrap(), Exit::Code(0));
    let second = run(&room.place, &sh("echo > /workspace/ran"));
    assert!(matches!(second, Err(overfence::workload::Error::Running { .. })), "{second:?}");
    assert!(!room.place.merged.join("ran").exists());
}

fn start_time_is_small(host: &host::Place) {
    let room = Room::new(host);
    let program = Command { argv: vec!["/bin/true".into()], env: vec![], cwd: None };
    let median = |mut one: Box<dyn FnMut() + '_>| {
        let mut times: Vec<Duration> = (0..21)
            .map(|_| {
                let begun = Instant::now();
                one();
                begun.elapsed()
            })
            .collect();
        times.sort();
        times[10]
    };
    let plain = median(Box::new(|| {
        assert!(std::process::Command::new("/bin/true").status().unwrap().success());
    }));
    let start = median(Box::new(|| {
        assert_eq!(run(&room.place, &program).unwrap(), Exit::Code(0));
    }));
    assert_eq!(exec(&room.place, &program).unwrap(), Exit::Code(0));
    let join = median(Box::new(|| {
        assert_eq!(exec(&room.place, &program).unwrap(), Exit::Code(0));
    }));
    println!("plain exec {plain:?}, run {start:?}, exec {join:?} (median of 21, /bin/true)");
    // Generous: a loaded machine must not fail this, a lost lock or a timeout must.
    let bound = |ms| host::paced(Duration::from_millis(ms));
    assert!(start < bound(500) && join < bound(200));
}
