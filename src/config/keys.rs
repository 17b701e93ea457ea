//! Every key with its meaning: what `config default` and `config show` print, and which variable
//! of the environment sets it.

use toml::{Table, Value};

use super::{Config, Loaded};

/// Key, meaning, and an example for keys that have no default.
const KEYS: &[(&str, &str, &str)] = &[
    ("state_dir", "Everything durable of this host; made with mode 0700.", ""),
    ("runtime_dir", "Sockets and whatever a boot may lose.", ""),
    ("socket", "The API's socket. Default: overfence.sock below runtime_dir.", ""),
    (
        "cgroup",
        "Parent of the sessions' cgroups, relative to the cgroup2 root. Default: \
         overfence-sessions.service beside the agent's own unit under systemd, else \
         overfence-sessions.",
        "system.slice/overfence-sessions.service",
    ),
    (
        "high_water_file",
        "The highest generation of each workspace ever seen. Default: below state_dir; better on \
         another disk, so that one restored backup cannot roll both back.",
        "",
    ),
    (
        "evidence_anchor_file",
        "Signed heads of the evidence chain. Default: below state_dir; better on another disk.",
        "",
    ),
    ("keys_dir", "The record key and the ticket key. Default: below state_dir.", ""),
    ("bundles_dir", "Where `preserved export` writes. Default: below state_dir.", ""),
    (
        "reserve_mib",
        "MiB held back in state_dir, so that fences and removals are recorded when workloads have \
         filled the disk; 0 for none.",
        "",
    ),
    ("lease.ttl", "How long a lease lasts without a renewal; a span, 1s to 24h.", ""),
    ("lease.max_lifetime", "Longest life of a lease, however often renewed; a span.", ""),
    (
        "fence.on_fence",
        "After the fence: \"freeze\" keeps the processes frozen; \"read-only-run\" lets them run on and \
         read, so that they can end by themselves, where the lease gate is complete and the session \
         made no writable shared mapping, and else keeps them frozen.",
        "",
    ),
    (
        "fence.on_busy",
        "When a frozen writer still holds a descriptor: \"hold\" stays frozen and goes on trying, \
         \"seal\" sets the immutable flag on the upper after seal_after, \"kill\" kills it after \
         kill_after.",
        "",
    ),
    ("fence.kill_after", "From that refusal to the kill, under on_busy = \"kill\"; a span.", ""),
    ("fence.seal_after", "From that refusal to the seal, under on_busy = \"seal\"; a span.", ""),
    ("fence.freeze_deadline", "How long a freeze may take; a span.", ""),
    (
        "fence.on_slow_freeze",
        "When it takes longer: \"wait\" goes on watching, \"kill\" kills.",
        "",
    ),
    (
        "fence.after_doubt",
        "A session fenced only because the lease was in doubt: \"resume-if-unclaimed\" takes a new \
         generation if nobody else took the workspace, \"hold\" leaves it fenced.",
        "",
    ),
    (
        "fence.gate",
        "\"use\": the kernel compares each write with the lease, where the host can; \"off\": it does \
         not, and the fence stands alone. Read at the start.",
        "",
    ),
    (
        "fence.shared_mappings",
        "Where the lease gate is: \"freeze\" lets sessions map files shared and writable, and the \
         freeze stops who stores into them; \"deny\" refuses such mappings from the start (EACCES), \
         also those of a file that is only open for writing.",
        "",
    ),
    (
        "preserve.grace",
        "How long uncommitted bytes of a stale writer are kept at least; a span of witnessed time \
         (time with the agent down does not count).",
        "",
    ),
    ("preserve.min_notice", "Time after a start before grace deletes anything; a span.", ""),
    (
        "preserve.scrub",
        "From one reading of all stored layers to the next, so that damage is found early; a span.",
        "",
    ),
    ("preserve.sweep", "From one sweep of the reconciler to the next; a span.", ""),
    (
        "checkpoint.max_freeze",
        "How long the agent speaks for a holder that it keeps frozen for a capture; a span. The lease runs out a TTL later.",
        "",
    ),
    (
        "open.predecessor_wait",
        "How long `session open` waits for the former writer on this host to be frozen; a span.",
        "",
    ),
    (
        "open.upper",
        "What uppers lie in: \"directory\", a directory in state_dir, or \"image\", a file system of \
         its own in a sparse file there, which has a size.",
        "",
    ),
    ("open.size", "What an image holds at most, for instance 2G; 16M to 16T.", ""),
    (
        "open.min_free",
        "What stays free of state_dir's file system when a session is opened: a size, a part of it \
         in %, or 0. An image must fit above it.",
        "",
    ),
    ("open.max_sessions", "Most sessions that are mounted at the same time. Default: none.", "200"),
    ("workload.uid", "User that commands run as; a number, not 0.", ""),
    ("workload.gid", "Its group; a number, not 0.", ""),
    (
        "workload.network",
        "\"own\": a network namespace with nothing but loopback. \"host\": the host's network, \
         which opens its abstract sockets and loopback services to the workload.",
        "",
    ),
    (
        "limits.memory",
        "Most memory the processes of a session may use, with the page cache they fill and without \
         swap. Limits need controllers of cgroup v2; one that is missing is an error of each open. \
         Default: none.",
        "2G",
    ),
    ("limits.pids", "Most processes and threads of a session. Default: none.", "500"),
    ("limits.cpu", "Most CPU time of a session, in CPUs. Default: none.", "1.5"),
    ("api.group", "Members operate. That is equivalent to root on this host.", ""),
    ("api.view_group", "Members read.", ""),
    (
        "api.metrics_listen",
        "Loopback address and port of a TCP listener for /metrics and /healthz. Default: none.",
        "127.0.0.1:9464",
    ),
];

/// The variable that sets a key: `lease.ttl` is `OVERFENCE_LEASE_TTL`.
fn variable(key: &str) -> String {
    format!("OVERFENCE_{}", key.replace('.', "_").to_uppercase())
}

/// The key that a variable sets.
pub(super) fn of_variable(name: &str) -> Option<&'static str> {
    KEYS.iter().map(|(key, ..)| *key).find(|key| variable(key) == name)
}

/// Variables that are ours and no keys: those of the command line, of workloads and of the suites.
const OTHERS: [&str; 7] = [
    "OVERFENCE_CONFIG",
    "OVERFENCE_FAILPOINTS",
    "OVERFENCE_GENERATION",
    "OVERFENCE_SESSION",
    "OVERFENCE_WORKSPACE",
    "OVERFENCE_BENCH_*",
    "OVERFENCE_TEST_*",
];

/// Whether a variable is named as ours and is none of them.
pub(super) fn is_strange(name: &str) -> bool {
    let known = |other: &&str| match other.strip_suffix('*') {
        Some(stem) => name.starts_with(stem),
        None => name == *other,
    };
    name.starts_with("OVERFENCE_") && of_variable(name).is_none() && !OTHERS.iter().any(known)
}

/// Whether a key takes a number.
pub(super) fn is_number(key: &str) -> bool {
    let example = KEYS.iter().find(|(known, ..)| *known == key).map(|(.., text)| example(text));
    matches!(value(&Config::default(), key).or(example), Some(Value::Integer(_)))
}

fn example(text: &str) -> Value {
    text.parse::<i64>().map_or_else(|_| Value::from(text), Value::Integer)
}

fn value(config: &Config, key: &str) -> Option<Value> {
    let table = Table::try_from(config).ok()?;
    match key.split_once('.') {
        None => table.get(key).cloned(),
        Some((section, key)) => table.get(section)?.get(key).cloned(),
    }
}

/// Goes through the keys with their section headings; `line` writes one key.
fn listed(
    mut line: impl FnMut(&mut String, &'static (&'static str, &'static str, &'static str)),
) -> String {
    let (mut text, mut present) = (String::new(), "");
    for row in KEYS {
        let section = row.0.split_once('.').map_or("", |(section, _)| section);
        if section != present {
            present = section;
            text.push_str(&format!("\n[{section}]\n"));
        }
        line(&mut text, row);
    }
    text
}

fn name(key: &str) -> &str {
    key.split_once('.').map_or(key, |(_, name)| name)
}

/// The documented default configuration: every key, its meaning and unit, commented out at its
/// default, so that a copy of it changes nothing.
pub fn default_toml() -> String {
    let default = Config::default();
    let head = "# Configuration of overfence. Later wins: default, this file, conf.d/*.toml by name, the\n\
                # environment (lease.ttl is OVERFENCE_LEASE_TTL), flags. A span of time is a number\n\
                # with its unit: \"500ms\", \"30s\", \"72h\". Every key is shown at its default.\n\n";
    let body = listed(|text, (key, meaning, sample)| {
        let value = value(&default, key).unwrap_or_else(|| example(sample));
        for line in wrapped(meaning, 96) {
            text.push_str(&format!("# {line}\n"));
        }
        text.push_str(&format!("#{} = {value}\n", name(key)));
    });
    format!("{head}{body}")
}

/// The effective configuration with who set what.
pub fn show(loaded: &Loaded) -> String {
    listed(|text, (key, ..)| {
        let Some(value) = value(&loaded.config, key) else { return };
        let origin = loaded.origins.get(*key).map_or("default", String::as_str);
        text.push_str(&format!("{} = {value}  # {origin}\n", name(key)));
    })
}

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let full = lines.last().is_some_and(|l| !l.is_empty() && l.len() + 1 + word.len() > width);
        if full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_listed_and_every_listed_key_exists() {
        let mut config = Config::default();
        config.api.metrics_listen = "127.0.0.1:1".parse().ok();
        config.cgroup = Some("c".into());
        config.open.max_sessions = Some(1);
        config.limits = toml::from_str("memory = '1G'\npids = 1\ncpu = '1'").unwrap();
        let table = Table::try_from(&config).unwrap();
        let mut leaves = std::collections::BTreeSet::new();
        for (key, value) in &table {
            match value {
                Value::Table(section) => {
                    leaves.extend(section.keys().map(|k| format!("{key}.{k}")))
                }
                _ => drop(leaves.insert(key.clone())),
            }
        }
        let listed = KEYS.iter().map(|(key, ..)| (*key).to_owned()).collect();
        assert_eq!(leaves, listed);
    }

    const NO_DEFAULT: [&str; 6] = [
        "#metrics_listen = ",
        "#cgroup = ",
        "#max_sessions = ",
        "#memory = ",
        "#pids = ",
        "#cpu = ",
    ];

    #[test]
    fn the_default_text_is_the_default_both_ways() {
        let text = default_toml();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), Config::default());
        let open: String = text
            .lines()
            .filter(|line| !line.starts_with("# "))
            .filter(|line| !NO_DEFAULT.iter().any(|key| line.starts_with(key)))
            .map(|line| format!("{}\n", line.strip_prefix('#').unwrap_or(line)))
            .collect();
        assert_eq!(open.matches(" = ").count(), KEYS.len() - NO_DEFAULT.len());
        assert_eq!(toml::from_str::<Config>(&open).unwrap(), Config::default());
    }
}
