//! What tests need of the host beyond what every supported host has, and where that may be missing.
//!
//! A need is a feature of `overfence doctor`, whose answer for this host decides, or one of
//! [`beside_doctor`]. A test whose need is missing fails, unless `skips.toml` lists the need, with its
//! reason, for this kind of host.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use caps::Capability;
use serde::Deserialize;

const IMAGES: &[&str] = &["loop-devices", "image-uppers", "user-namespace", "idmapped-layers"];

/// Tests by their full name, or all of a room by `room::`. A test that is not here runs everywhere.
const NEEDS: &[(&str, &[&str])] = &[
    ("confinement::i10_no_way_out_for_a_user", &["unconfined-root"]),
    (
        "confinement::i10_no_way_out_for_a_mapped_root",
        &["unconfined-root", "user-namespace", "idmapped-layers"],
    ),
    ("confinement::i10_capabilities_and_filters_are_as_decided", &["unconfined-root"]),
    ("full_disk::a_filler_on_ext4_stops_nobody_else", &["loop-devices"]),
    ("image::", IMAGES),
    ("restart::i8_every_effect_on_an_image_has_a_failpoint", IMAGES),
    ("restart::i8_killed_at_every_effect_on_an_image_1", IMAGES),
    ("restart::i8_killed_at_every_effect_on_an_image_2", IMAGES),
    ("restart::i8_killed_at_every_effect_on_an_image_3", IMAGES),
    ("restart::i8_killed_at_every_effect_on_an_image_4", IMAGES),
    ("kept::a_loop_device_on_a_file_without_a_name_is_named", &["loop-devices"]),
    // They go through what an image adds, too.
    ("faults::every_effect_can_be_made_to_fail", IMAGES),
    ("faults::eio_at_every_effect_is_told_and_survived", IMAGES),
    ("faults::emfile_at_every_call_is_told_and_survived", IMAGES),
    ("kept::who_hangs_on_a_dead_server_delays_no_search_for_holders", &["fuse"]),
    // Otherwise it is the engine's filter that answers.
    ("kernel_facts::no_file_of_an_overlay_can_be_swap", &["unconfined-root"]),
    ("kernel_facts::what_a_real_time_thread_starts_is_not_real_time", &["real-time"]),
    // File handles, by which a replaced file is known, are refused by the engines' filters.
    ("delta::a_diff_names_every_kind_of_change", &["unconfined-root"]),
    ("leases::a_mapped_root_is_root_in_the_layer", &["user-namespace", "idmapped-layers"]),
    ("writers::loop-device", &["loop-devices"]),
    ("writers::io-uring-sqpoll", &["io-uring"]),
    ("writers::io-uring-workers", &["io-uring"]),
    ("writers::io-uring-registered", &["io-uring"]),
    ("writers::hung-open", &["fuse"]),
    ("writers::hung-read", &["fuse"]),
    ("writers::a_hung_file_behind_a_loop_device_delays_no_session", &["fuse", "loop-devices"]),
    ("writers::a_lower_that_hangs_altogether_delays_no_fence", &["fuse"]),
    ("writers::one_that_no_kill_wakes_delays_no_other_session", &["fuse"]),
    ("writers::one_that_a_kill_wakes_ends_when_it_is_to_be_killed", &["fuse"]),
    ("gate::who_has_a_loop_device_stays_frozen", &["bpf-lsm", "lease-gate", "loop-devices"]),
    (
        "gate::restart_reload_and_upgrade_refuse_no_good_write",
        &["bpf-lsm", "lease-gate", "own-systemd"],
    ),
    ("gate::a_container_beside_it_is_left_alone", &["bpf-lsm", "lease-gate", "systemd-nspawn"]),
    ("gate::each_way_to_change_a_file_on_xfs", &["bpf-lsm", "lease-gate", "loop-devices", "xfs"]),
    (
        "gate::each_way_to_change_a_file_on_btrfs",
        &["bpf-lsm", "lease-gate", "loop-devices", "btrfs"],
    ),
    (
        "gate::each_way_to_change_a_file_in_an_image",
        &["bpf-lsm", "lease-gate", "loop-devices", "image-uppers"],
    ),
    ("gate::", &["bpf-lsm", "lease-gate"]),
    ("container::a_hybrid_host_gives_a_part_of_the_hierarchy", &["podman", "hybrid-cgroups"]),
    ("container::", &["podman"]),
    ("delta::a_diff_is_what_podman_says_where_it_answers", &["podman"]),
    ("outside::skopeo_and_umoci_unpack_what_was_mounted", &["skopeo", "umoci"]),
    ("outside::skopeo_reads_a_bundle_and_copies_it_whole", &["skopeo"]),
    ("seal::on_xfs_an_open_descriptor_goes_on_and_the_proof_says_so", &["loop-devices", "xfs"]),
    ("seal::on_btrfs_an_open_descriptor_goes_on_and_the_proof_says_so", &["loop-devices", "btrfs"]),
    ("reflink::on_btrfs_the_session_runs_before_its_layer_is_made", &["loop-devices", "btrfs"]),
    ("reflink::on_btrfs_any_tree_gives_the_layer_of_one_step", &["loop-devices", "btrfs"]),
    ("reflink::on_btrfs_a_file_that_has_no_clone_is_read", &["loop-devices", "btrfs"]),
    ("reflink::on_ext4_the_session_waits_for_its_layer", &["loop-devices"]),
    ("reflink::", &["loop-devices", "xfs"]),
    ("sealed::", &["loop-devices"]),
    // An ext4 of their own; and the flag needs a capability that a container does not have.
    ("seal::", &["loop-devices"]),
    ("round_trip::an_upper_comes_back_as_the_model_on_ext4", &["loop-devices"]),
    ("round_trip::an_upper_comes_back_as_the_model_on_xfs", &["loop-devices", "xfs"]),
    ("round_trip::an_upper_comes_back_as_the_model_on_btrfs", &["loop-devices", "btrfs"]),
    (
        "systemd::an_engine_with_the_systemd_driver_is_fenced_in_its_slice",
        &["systemd-nspawn", "podman"],
    ),
    ("systemd::limits_bound_a_session", &["systemd-nspawn", "controllers"]),
    ("systemd::limits_that_cannot_be_had_are_refused", &["systemd-nspawn", "hybrid-cgroups"]),
    ("systemd::", &["systemd-nspawn"]),
    ("package::", &["systemd-nspawn"]),
];

const SKIPS: &str = include_str!("skips.toml");
/// Says what kind of host this is; without it, it is `development`, or `hybrid` where cgroup v1 has
/// controllers.
const HOST: &str = "OVERFENCE_TEST_HOST";

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Development,
    Hybrid,
    Guest,
    Docker,
    Podman,
    HybridContainer,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Skips {
    #[serde(default)]
    skip: Vec<Skip>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Skip {
    hosts: Vec<Kind>,
    need: String,
    reason: String,
    /// Only some hosts of this kind lack it.
    #[serde(default)]
    some: bool,
}

#[derive(Deserialize)]
struct Doctor {
    features: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    feature: String,
    ok: bool,
    detail: String,
}

/// What tests need and overfence does not.
fn beside_doctor() -> [(String, (bool, String)); 13] {
    let there = |path: &str| (Path::new(path).exists(), format!("{path} is missing"));
    let status = std::fs::read_to_string("/proc/self/status").expect("the status of this process");
    let field =
        |name| status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    let have = u64::from_str_radix(field("CapEff:"), 16).expect("a set of capabilities");
    let lacks = UNCONFINED.into_iter().find(|cap| have & cap.bitmask() == 0);
    let unconfined = field("Seccomp:") == "0" && lacks.is_none();
    let offered = crate::systemd::machine::offered();
    let controllers = offered.len() == crate::systemd::machine::CONTROLLERS.len();
    let detail = format!("root is confined: seccomp mode {}, lacks {lacks:?}", field("Seccomp:"));
    [
        ("podman", there("/usr/bin/podman")),
        ("skopeo", there("/usr/bin/skopeo")),
        ("umoci", there("/usr/bin/umoci")),
        ("systemd-nspawn", there("/usr/bin/systemd-nspawn")),
        ("own-systemd", own_systemd()),
        ("loop-devices", there("/dev/loop-control")),
        ("fuse", there("/dev/fuse")),
        // Also refused where kernel.io_uring_disabled says so.
        (
            "io-uring",
            io_uring::IoUring::new(1)
                .map_or_else(|e| (false, e.to_string()), |_| (true, String::new())),
        ),
        ("xfs", file_system("xfs")),
        ("btrfs", file_system("btrfs")),
        ("unconfined-root", (unconfined, detail)),
        ("controllers", (controllers, format!("its cgroup v2 has {offered:?}"))),
        ("hybrid-cgroups", (is_hybrid(), "its cgroup v2 has all controllers".to_owned())),
    ]
    .map(|(need, answer)| (need.to_owned(), answer))
}

/// Whether one can be made and mounted: the kernel has it or a module of it, and there is its mkfs.
fn file_system(name: &str) -> (bool, String) {
    // Built in, or no modules here: the list of what is registered decides.
    let _ = Command::new("modprobe").args(["-q", name]).status();
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let known = known.lines().any(|line| line.split_whitespace().last() == Some(name));
    let make = ["/usr/sbin", "/sbin"]
        .iter()
        .any(|dir| Path::new(dir).join(format!("mkfs.{name}")).exists());
    (known && make, format!("the kernel has {name}: {known}, mkfs.{name} is there: {make}"))
}

/// A systemd that a test may give units to and run anew: a guest's, which has nothing else to do.
fn own_systemd() -> (bool, String) {
    let guest = std::env::var(HOST).is_ok_and(|kind| kind == "guest");
    let runs = Path::new("/run/systemd/system").is_dir();
    (guest && runs, format!("this is a guest: {guest}, and systemd runs it: {runs}"))
}

fn is_hybrid() -> bool {
    crate::host::cgroup2_root() != Path::new("/sys/fs/cgroup")
}

/// What root has on a host, and in no container but a privileged one: ways out of a session are
/// first shown to be open to it.
const UNCONFINED: [Capability; 3] =
    [Capability::CAP_DAC_READ_SEARCH, Capability::CAP_SYS_PACCT, Capability::CAP_SYSLOG];

/// What is to be done with a test.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Run,
    /// Listed: with the reason.
    Skip(String),
    /// A need is missing and not listed.
    Fail(String),
}

/// The host's answers beside what may be missing on its kind.
pub struct Needs {
    kind: Kind,
    /// By feature: whether it is there, and the details.
    answers: BTreeMap<String, (bool, String)>,
    skips: Vec<Skip>,
}

impl Needs {
    /// Asks this host. It panics if the host cannot be asked, or if a file of ours is wrong.
    pub fn of_this_host() -> Self {
        let usual = if is_hybrid() { "hybrid" } else { "development" };
        let kind = std::env::var(HOST).unwrap_or_else(|_| usual.into());
        let out = Command::new(crate::host::binary())
            .args(["doctor", "-o", "json"])
            .output()
            .expect("doctor can be started");
        let doctor = String::from_utf8(out.stdout).expect("doctor speaks UTF-8");
        let mut needs = Self::new(&kind, &doctor, SKIPS);
        needs.answers.extend(beside_doctor());
        needs
    }

    fn new(kind: &str, doctor: &str, skips: &str) -> Self {
        let kind = Kind::deserialize(
            serde::de::value::StrDeserializer::<serde::de::value::Error>::new(kind),
        )
        .unwrap_or_else(|e| panic!("{HOST}: {e}"));
        let doctor: Doctor = serde_json::from_str(doctor).expect("doctor's JSON");
        let skips: Skips = toml::from_str(skips).unwrap_or_else(|e| panic!("skips.toml: {e}"));
        Self {
            kind,
            answers: doctor.features.into_iter().map(|a| (a.feature, (a.ok, a.detail))).collect(),
            skips: skips.skip,
        }
    }

    /// What is to be done with the test of this full name.
    pub fn verdict(&self, test: &str) -> Verdict {
        let needs = NEEDS.iter().find(|(name, _)| covers(name, test)).map_or(&[][..], |(_, n)| n);
        self.judge(needs)
    }

    fn judge(&self, needs: &[&str]) -> Verdict {
        for need in needs {
            let Some((ok, detail)) = self.answers.get(*need) else {
                return Verdict::Fail(format!("doctor knows no feature {need:?}"));
            };
            if *ok {
                continue;
            }
            let listed =
                self.skips.iter().find(|s| s.hosts.contains(&self.kind) && s.need == *need);
            return match listed {
                Some(skip) => Verdict::Skip(format!("{need}: {}", skip.reason)),
                None => Verdict::Fail(format!(
                    "this host lacks {need} ({detail}), and skips.toml does not list it for a {:?} host",
                    self.kind
                )),
            };
        }
        Verdict::Run
    }

    /// Lines of `skips.toml` that must not be there, and needs of tests that do not exist.
    pub fn wrong(&self, tests: &[String]) -> Vec<String> {
        let mut wrong = vec![];
        for skip in &self.skips {
            let needed = NEEDS.iter().any(|(_, needs)| needs.contains(&&*skip.need));
            if !needed {
                wrong.push(format!("skips.toml lists {}, which no test needs", skip.need));
            }
            if skip.reason.trim().is_empty() {
                wrong.push(format!("skips.toml lists {} without a reason", skip.need));
            }
            let here = skip.hosts.contains(&self.kind)
                && !skip.some
                && self.answers.get(&skip.need).is_some_and(|a| a.0);
            if here {
                wrong.push(format!("skips.toml lists {}, which this host has", skip.need));
            }
        }
        for (test, _) in NEEDS {
            if !tests.iter().any(|t| covers(test, t)) {
                wrong.push(format!("needs.rs names the test {test}, which does not exist"));
            }
        }
        wrong
    }
}

/// Whether a line of [`NEEDS`] is about a test.
fn covers(name: &str, test: &str) -> bool {
    name == test || (name.ends_with("::") && test.starts_with(name))
}

/// The rule itself, on made-up answers.
pub fn the_rule_holds() {
    let doctor = r#"{ "features": [
        { "feature": "there", "ok": true, "detail": "" },
        { "feature": "missing", "ok": false, "detail": "ENOSYS" },
        { "feature": "idmapped-layers", "ok": true, "detail": "" }
    ] }"#;
    let skips = r#"
        [[skip]]
        hosts = ["docker", "podman"]
        need = "missing"
        reason = "because"
        [[skip]]
        hosts = ["docker"]
        need = "idmapped-layers"
        reason = " "
    "#;
    let container = Needs::new("docker", doctor, skips);
    assert_eq!(container.judge(&[]), Verdict::Run);
    assert_eq!(container.judge(&["there"]), Verdict::Run);
    assert_eq!(container.judge(&["there", "missing"]), Verdict::Skip("missing: because".into()));
    assert!(matches!(container.judge(&["there", "unheard-of"]), Verdict::Fail(_)));
    // One that only some hosts of the kind lack is run where it is there, and no fault of the list.
    let some = skips.replace(r#"reason = " ""#, "reason = \"some\"\n        some = true");
    let some = Needs::new("docker", doctor, &some);
    assert_eq!(some.judge(&["idmapped-layers"]), Verdict::Run);
    assert!(!some.wrong(&existing()).iter().any(|w| w.contains("idmapped-layers")));
    // Listed for another kind of host only.
    let guest = Needs::new("guest", doctor, skips);
    assert!(matches!(guest.judge(&["missing"]), Verdict::Fail(_)));
    assert_eq!(guest.wrong(&existing()).len(), 2, "{:?}", guest.wrong(&existing()));
    let wrong = container.wrong(&existing());
    assert_eq!(
        wrong,
        [
            "skips.toml lists missing, which no test needs",
            "skips.toml lists idmapped-layers without a reason",
            "skips.toml lists idmapped-layers, which this host has",
        ]
    );
    assert_eq!(container.wrong(&[]).len(), wrong.len() + NEEDS.len());
    // A guest's kernel is chosen: the gate is there.
    let gate = |need: &str| ["bpf-lsm", "lease-gate"].contains(&need);
    let own = Needs::new("guest", doctor, SKIPS);
    assert!(!own.skips.iter().any(|s| s.hosts.contains(&Kind::Guest) && gate(&s.need)));
}

fn existing() -> Vec<String> {
    NEEDS.iter().map(|(name, _)| (*name).to_owned()).collect()
}
