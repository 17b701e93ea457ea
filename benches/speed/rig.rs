//! An agent with its API at hand, and idle processes for its sessions.

use std::collections::HashMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use overfence::api::client::{Client, path};
use overfence::kernel::clock;
use overfence::model::facts::Fact;
use overfence::model::time::BootNs;
use overfence::model::view::{Opened, SessionView};
use serde_json::{Value, json};

use crate::agent_process::Host;
use crate::host::Place;

/// An agent of this part's own, without a keeper: what is measured is the agent.
pub struct Rig {
    pub host: Host,
    pub client: Client,
}

impl Rig {
    pub fn new(place: &Place) -> Self {
        Self::named(place, "h")
    }

    /// One of several, one after the other.
    pub fn named(place: &Place, name: &str) -> Self {
        let mut host = Host::new(place, name);
        // As on a host, where /run is memory.
        let run = host.dir.join("run");
        fs::create_dir(&run).unwrap();
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("run"), &run, Some("tmpfs"), none, Some("mode=0755")).unwrap();
        assert!(host.start(None), "the agent died: {}", host.log());
        let client = Client::new(&host.dir.join("run/overfence.sock"), None).unwrap();
        Self { host, client }
    }

    /// Opens a session of a workspace, which is made if it is missing.
    pub fn open(&self, workspace: &str, ttl: Duration, lifetime: Option<Duration>) -> Opened {
        self.open_for("beat", workspace, ttl, lifetime)
    }

    /// Opens a session whose lease follows `holder`.
    pub fn open_for(
        &self,
        holder: &str,
        workspace: &str,
        ttl: Duration,
        lifetime: Option<Duration>,
    ) -> Opened {
        let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap();
        let mut wish = json!({ "workspace": workspace, "holder": holder, "ttl_ms": ms(ttl), "create": { "id": workspace } });
        if let Some(lifetime) = lifetime {
            wish["max_lifetime_ms"] = ms(lifetime).into();
        }
        self.client.post("/v1/sessions", &wish).unwrap()
    }

    pub fn post<T: serde::de::DeserializeOwned>(&self, id: &str, verb: &str, wish: &Value) -> T {
        self.client.post(&path(&["sessions", id, verb]), wish).unwrap()
    }

    /// Lets sessions be removed again after many lost their leases.
    pub fn close_breaker(&self) {
        let _: Value =
            self.client.post("/v1/breaker/reset", &json!({ "reason": "bench" })).unwrap();
    }

    pub fn session(&self, id: &str) -> SessionView {
        self.client.get(&path(&["sessions", id])).unwrap()
    }

    /// Where the workload of a session finds its socket and its state.
    pub fn inside(&self, id: &str) -> PathBuf {
        self.host.dir.join("run/sessions").join(id).join("inside")
    }

    /// The local deadline as the session sees it.
    pub fn deadline(&self, id: &str) -> BootNs {
        let text = fs::read(self.inside(id).join("session.json")).unwrap();
        let shown: Value = serde_json::from_slice(&text).unwrap();
        BootNs(shown["deadline"].as_u64().unwrap())
    }

    /// Waits for a session's freeze to be proved and for policy to be done with it, and gives it up
    /// after that.
    pub fn frozen_then_discard(&self, id: &str) -> BootNs {
        let at = loop {
            let view = self.session(id);
            if let (Some(at), "PRESERVED") = (frozen(&view), view.state.as_str()) {
                break at;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let _: SessionView = self.post(id, "discard", &json!({}));
        at
    }
}

/// When a session was proved frozen, if it was.
pub fn frozen(view: &SessionView) -> Option<BootNs> {
    view.facts.iter().find(|f| f.fact == Fact::Frozen).map(|f| BootNs(f.boot_ns))
}

/// One sleeping process for each session, reaped in the end.
#[derive(Default)]
pub struct Sleepers(HashMap<PathBuf, Child>);

impl Sleepers {
    /// Puts one into a cgroup, and waits until it is there and asleep.
    pub fn add(&mut self, cgroup: &Path) {
        let child = sleeper(cgroup);
        let asleep = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
            stat.contains("(sleep) S")
        };
        while !asleep() {
            std::thread::sleep(Duration::from_micros(200));
        }
        self.0.insert(cgroup.to_owned(), child);
    }

    pub fn add_to(&mut self, session: &SessionView) {
        self.add(&session.cgroup.path().unwrap());
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for child in self.0.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn sleeper(cgroup: &Path) -> Child {
    Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$1\" && exec sleep 1000000", "sh"])
        .arg(cgroup.join("cgroup.procs"))
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// From `then` to now, on CLOCK_BOOTTIME.
pub fn since(then: BootNs) -> Duration {
    clock::now().since(then)
}
