use std::ffi::OsString;
use std::fs;

use super::*;

fn layered(files: &[(&str, &str)], environment: &[(&str, &str)]) -> Result<Loaded, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("conf.d")).unwrap();
    fs::write(dir.path().join("config.toml"), "").unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let environment = environment.iter().map(|(k, v)| (OsString::from(k), OsString::from(v)));
    Loaded::read(Some(&dir.path().join("config.toml")), environment)
        .map_err(|fault| fault.to_string().replace(&dir.path().display().to_string(), "D"))
}

fn refused(files: &[(&str, &str)], environment: &[(&str, &str)]) -> String {
    layered(files, environment).expect_err("it was taken")
}

#[test]
fn an_unknown_key_names_file_and_line() {
    let text = "state_dir = \"/s\"\n\n[lease]\nttl = \"1m\"\nttll = \"2m\"\n";
    let said = refused(&[("config.toml", text)], &[]);
    assert!(said.starts_with("D/config.toml:5: unknown field `ttll`"), "{said}");
    assert!(said.contains("`overfence config default` shows every key"), "{said}");
    let said = refused(&[("conf.d/x.toml", "a = 1")], &[]);
    assert!(said.starts_with("D/conf.d/x.toml:1: unknown field `a`"), "{said}");
    let said = refused(&[("config.toml", "\n[leese]\nttl = \"1m\"\n")], &[]);
    assert!(said.starts_with("D/config.toml:2: unknown field `leese`"), "{said}");
}

#[test]
fn faults_name_the_line() {
    for (text, line, part) in [
        ("[lease]\nttl = \"30\"", 2, "\"30\" is not a span of time"),
        ("[lease]\nttl = 30", 2, "invalid type"),
        ("\n\nx = = 1", 3, ""),
        ("[fence]\non_busy = \"wait\"", 2, "unknown variant `wait`"),
        ("[api]\nmetrics_listen = \"here\"", 2, "invalid socket address"),
    ] {
        let said = refused(&[("config.toml", text)], &[]);
        assert!(said.starts_with(&format!("D/config.toml:{line}: ")), "{text}: {said}");
        assert!(said.contains(part), "{text}: {said}");
    }
}

#[test]
fn the_later_word_wins_key_by_key() {
    let files = [
        ("config.toml", "runtime_dir = \"/r\"\n[lease]\nttl = \"10s\"\nmax_lifetime = \"1h\""),
        ("conf.d/20.toml", "[lease]\nttl = \"30s\""),
        ("conf.d/10.toml", "[lease]\nttl = \"20s\"\n[fence]\non_busy = \"kill\""),
        ("conf.d/30.toml.off", "nonsense"),
    ];
    let Loaded { config, origins, .. } = layered(&files, &[]).unwrap();
    assert_eq!(config.lease.ttl, Duration::from_secs(30));
    assert_eq!(config.lease.max_lifetime, Duration::from_secs(3600));
    assert_eq!(config.policy().on_busy, OnBusy::Kill);
    assert_eq!(config.socket, Path::new("/r/overfence.sock"));
    assert!(origins["lease.ttl"].ends_with("conf.d/20.toml"));

    let set = [("OVERFENCE_LEASE_TTL", "40s"), ("OVERFENCE_WORKLOAD_UID", "7"), ("HOME", "x")];
    let Loaded { config, origins, .. } = layered(&files, &set).unwrap();
    assert_eq!((config.lease.ttl, config.workload.uid), (Duration::from_secs(40), 7));
    assert_eq!(origins["lease.ttl"], "OVERFENCE_LEASE_TTL");
}

#[test]
fn paths_follow_the_state_directory_unless_said() {
    let text = "state_dir = \"/s\"\nkeys_dir = \"/k\"";
    let config = layered(&[("config.toml", text)], &[]).unwrap().config;
    assert_eq!(config.bundles_dir, Path::new("/s/bundles"));
    assert_eq!(config.high_water_file, Path::new("/s/high-water"));
    assert_eq!(config.keys_dir, Path::new("/k"));
}

#[test]
fn values_that_cannot_be_are_refused_with_their_origin() {
    for (variable, value, part) in [
        ("OVERFENCE_LEASE_TTL", "25h", "lease.ttl (from OVERFENCE_LEASE_TTL): a TTL of"),
        ("OVERFENCE_LEASE_TTL", "soon", "\"soon\" is not a span of time"),
        ("OVERFENCE_LEASE_MAX_LIFETIME", "2s", "shorter than lease.ttl"),
        ("OVERFENCE_STATE_DIR", "s", "not absolute"),
        ("OVERFENCE_RUNTIME_DIR", "/var/lib/overfence", "is in the other"),
        ("OVERFENCE_RUNTIME_DIR", "/var", "is in the other"),
        ("OVERFENCE_CGROUP", "/a", "without a leading slash"),
        ("OVERFENCE_CGROUP", "a/../..", "without a leading slash"),
        ("OVERFENCE_WORKLOAD_UID", "0", "host's root"),
        ("OVERFENCE_WORKLOAD_UID", "root", "invalid type"),
        ("OVERFENCE_PRESERVE_SWEEP", "0s", "it is zero"),
        ("OVERFENCE_API_METRICS_LISTEN", "0.0.0.0:9", "not a loopback address"),
    ] {
        let said = refused(&[], &[(variable, value)]);
        assert!(said.contains(part) && said.contains(variable), "{variable}={value}: {said}");
    }
    let loopback = [("OVERFENCE_API_METRICS_LISTEN", "[::1]:9")];
    assert!(layered(&[], &loopback).unwrap().config.api.metrics_listen.is_some());
}

#[test]
fn a_variable_that_sets_nothing_is_noticed() {
    let environment = [
        ("OVERFENCE_LEASE_TLL", "1m"),
        ("OVERFENCE_LEASE_TTL", "1m"),
        ("OVERFENCE_ABC", ""),
        ("OVERFENCE_SOCKET", "/s"),
        ("OVERFENCE_CONFIG", "/c"),
        ("OVERFENCE_SESSION", "s-1"),
        ("OVERFENCE_TEST_CHILD", "x"),
        ("OVERFENCER", "x"),
        ("PATH", "/bin"),
    ];
    let loaded = layered(&[], &environment).unwrap();
    assert_eq!(loaded.strangers, ["OVERFENCE_ABC", "OVERFENCE_LEASE_TLL"]);
    assert_eq!(loaded.config.lease.ttl, Duration::from_secs(60));
}

#[test]
fn a_named_file_must_exist() {
    let missing = Path::new("/nonexistent/config.toml");
    assert!(matches!(Loaded::read(Some(missing), []), Err(Error::Read { .. })));
}

#[test]
fn the_digest_follows_the_content_and_not_its_place() {
    let a = layered(&[("config.toml", "[lease]\nttl = \"60s\"")], &[]).unwrap().config;
    let b = layered(&[("conf.d/1.toml", "[lease]\nttl = \"1m\"")], &[]).unwrap().config;
    assert_eq!(a.digest(), b.digest());
    assert_ne!(a.digest(), Config::default().digest());
}

#[test]
fn the_default_policy_is_the_models() {
    assert_eq!(Config::default().policy(), Policy::default());
}

#[test]
fn limits_are_read_with_their_units() {
    use crate::model::limits::{Cpus, Size};
    let text = "[limits]\nmemory = \"512M\"\ncpu = \"1.5\"";
    let loaded = layered(&[("config.toml", text)], &[("OVERFENCE_LIMITS_PIDS", "300")]).unwrap();
    let limits = loaded.config.limits;
    assert_eq!((limits.memory, limits.cpu), (Some(Size(512 << 20)), Some(Cpus(1500))));
    assert_eq!(limits.pids, Some(300));
    let said = refused(&[("config.toml", "[limits]\nmemory = \"lots\"")], &[]);
    assert!(said.starts_with("D/config.toml:2: \"lots\" is not a size"), "{said}");
    let said = refused(&[("config.toml", "[limits]\npids = 0")], &[]);
    assert!(said.starts_with("limits.pids (from D/config.toml): "), "{said}");
}
