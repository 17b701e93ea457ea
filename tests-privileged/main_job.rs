//! The main job through the agent's own door, on the real kernel.

use std::time::Duration;

use overfence::agent::Sign;
use overfence::model::code::Code;
use overfence::model::session::CloseMode;
use overfence::model::view::{CloseSession, ExportSession, FenceSession, Opened, ReadmitSession};

use crate::host::{Place, Test, paced};
use crate::rig::{ROOT, has, merged, until, wish, with_agent, writer};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_silent_holder_is_frozen_and_read_only_and_refused", run: silent },
        Test { name: "a_held_descriptor_ends_in_frozen_with_the_holder_named", run: busy },
        Test { name: "a_foreign_thaw_is_noticed_and_frozen_again", run: thawed },
        Test { name: "checkpoint_publishes_and_the_next_session_mounts_it", run: publishes },
        Test { name: "readmit_lets_a_fenced_writer_run_on", run: readmit },
        Test { name: "export_dispose_leaves_nothing", run: dispose },
        Test { name: "close_without_mode_is_refused_with_uncommitted_bytes", run: close_modes },
        Test { name: "a_failed_open_rolls_back_to_nothing", run: failed_open },
    ]
}

/// Writes until a file `pause` is there, so that a test can be sure that no descriptor is open.
const PAUSABLE: &str = "while :; do [ -e pause ] || echo x >> log; sleep 0.01; done";
const SOON: Duration = Duration::from_secs(5);

async fn pause(of: &Opened) {
    let log = merged(of).join("log");
    while !log.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    std::fs::write(merged(of).join("pause"), "").unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn silent(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 1000)).await.unwrap();
        assert_eq!(a.session.generation, 1);
        let mut child = writer(&a.session, PAUSABLE);
        pause(&a).await;
        let a_view = until(&agent, &a.session.id, SOON, |v| has(v, "read-only")).await;
        assert!(has(&a_view, "frozen"), "{a_view:#?}");
        assert_eq!(a_view.state, "PRESERVED");
        assert!(a_view.loss.unwrap().contains("no sign of life"));
        let size = || std::fs::metadata(a.session.upper.path().unwrap().join("log")).unwrap().len();
        let before = size();
        let b = agent.open(&ROOT, wish("w", "b", 5000)).await.unwrap();
        assert_eq!(b.session.generation, 2);
        assert_eq!(b.predecessor.as_ref().unwrap().generation.0, 1);
        std::fs::write(merged(&b).join("b"), "of b").unwrap();
        let done = agent
            .checkpoint(&ROOT, b.session.id.parse().unwrap(), Default::default())
            .await
            .unwrap();
        assert_eq!((done.outcome.as_str(), done.at.version.0), ("committed", 1));
        let refused = agent
            .checkpoint(&ROOT, a.session.id.parse().unwrap(), Default::default())
            .await
            .unwrap_err();
        assert_eq!(refused.code, Code::StaleGeneration);
        assert_eq!(refused.current.unwrap().owner.unwrap().as_str(), "b");
        assert_eq!(size(), before, "a byte landed after read-only was proved");
        let history = agent.history("w", 100).await.unwrap();
        let refused = history.iter().find(|h| h.kind == "refused").expect("it is on record");
        let (code, session) = (&refused.detail["code"], &refused.session);
        assert_eq!((code, session.as_ref()), (&"stale_generation".into(), Some(&a.session.id)));
        agent.discard(&ROOT, a.session.id.parse().unwrap()).await.unwrap();
        child.wait().unwrap();
        agent
            .close(
                &ROOT,
                b.session.id.parse().unwrap(),
                CloseSession { mode: Some(CloseMode::Checkpoint) },
            )
            .await
            .unwrap();
        assert!(agent.sessions().await.unwrap().is_empty());
        // Stored is what the one that held the lease published, once.
        let next = agent.open(&ROOT, wish("w", "c", 5000)).await.unwrap();
        assert_eq!(next.session.base.version.0, 1);
        let names = std::fs::read_dir(merged(&next)).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["b"]);
        assert_eq!(std::fs::read_to_string(merged(&next).join("b")).unwrap(), "of b");
        let id = next.session.id.parse().unwrap();
        agent.close(&ROOT, id, CloseSession::default()).await.unwrap();
        let report = agent.evidence_verify().await.unwrap();
        assert!(report.ok, "{report:?}");
    });
    assert_eq!(std::fs::read_dir(place.dir.join("state/sessions")).unwrap().count(), 0);
}

fn busy(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 60_000)).await.unwrap();
        let mut child = writer(&a.session, "exec 3>held; while :; do echo x >&3; sleep 0.01; done");
        while !merged(&a).join("held").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let fence =
            FenceSession { wait_ms: Some(5000), reason: "test".into(), ..FenceSession::default() };
        let fenced = agent.fence(&ROOT, a.session.id.parse().unwrap(), fence).await.unwrap();
        assert_eq!(fenced.result, "effective");
        let view = until(&agent, &a.session.id, SOON, |v| !v.holders.is_empty()).await;
        assert!(has(&view, "frozen") && !has(&view, "read-only"), "{view:#?}");
        assert_eq!(view.missing.as_deref(), Some("read-only"));
        let holder =
            view.holders.iter().find(|h| h.pid == child.id()).expect("the writer is named");
        assert!(holder.inside && holder.how == "descriptor", "{holder:?}");
        let kill = FenceSession {
            to: Some(overfence::model::facts::Fact::Killed),
            wait_ms: Some(5000),
            ..FenceSession::default()
        };
        agent.fence(&ROOT, a.session.id.parse().unwrap(), kill).await.unwrap();
        let view = until(&agent, &a.session.id, SOON, |v| has(v, "read-only")).await;
        assert!(has(&view, "killed"), "{view:#?}");
        child.wait().unwrap();
        agent.discard(&ROOT, a.session.id.parse().unwrap()).await.unwrap();
    });
}

fn thawed(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 60_000)).await.unwrap();
        let mut child = writer(&a.session, PAUSABLE);
        pause(&a).await;
        agent
            .fence(
                &ROOT,
                a.session.id.parse().unwrap(),
                FenceSession { wait_ms: Some(5000), ..FenceSession::default() },
            )
            .await
            .unwrap();
        let view = until(&agent, &a.session.id, SOON, |v| has(v, "read-only")).await;
        let cgroup = view.cgroup.path().unwrap();
        std::fs::write(cgroup.join("cgroup.freeze"), "0").unwrap();
        let begun = std::time::Instant::now();
        loop {
            let entries =
                agent.evidence(0, 1000, Some(a.session.id.parse().unwrap())).await.unwrap();
            let seen = entries.iter().any(|e| e.draft.detail["event"]["event"] == "foreign_thaw");
            let frozen =
                std::fs::read_to_string(cgroup.join("cgroup.events")).unwrap().contains("frozen 1");
            if seen && frozen {
                break;
            }
            assert!(begun.elapsed() < paced(SOON), "the thaw was not noticed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        agent.discard(&ROOT, a.session.id.parse().unwrap()).await.unwrap();
        child.wait().unwrap();
    });
}

fn publishes(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 60_000)).await.unwrap();
        let id = a.session.id.parse().unwrap();
        std::fs::write(merged(&a).join("one"), "1").unwrap();
        let first = agent.checkpoint(&ROOT, id, Default::default()).await.unwrap();
        assert_eq!(first.at.head.0.len(), 1);
        assert_eq!(
            agent.checkpoint(&ROOT, id, Default::default()).await.unwrap().outcome,
            "unchanged"
        );
        std::fs::write(merged(&a).join("two"), "2").unwrap();
        // A later checkpoint of the same session replaces its own layer.
        let second = agent.checkpoint(&ROOT, id, Default::default()).await.unwrap();
        assert_eq!((second.at.head.0.len(), second.at.version.0), (1, 2));
        let view = agent
            .close(&ROOT, id, CloseSession { mode: Some(CloseMode::Checkpoint) })
            .await
            .unwrap();
        assert_eq!(view.state, "CLOSED");
        let b = agent.open(&ROOT, wish("w", "b", 60_000)).await.unwrap();
        assert_eq!(std::fs::read_to_string(merged(&b).join("one")).unwrap(), "1");
        std::fs::remove_file(merged(&b).join("one")).unwrap();
        agent
            .close(
                &ROOT,
                b.session.id.parse().unwrap(),
                CloseSession { mode: Some(CloseMode::Checkpoint) },
            )
            .await
            .unwrap();
        let c = agent.open(&ROOT, wish("w", "c", 60_000)).await.unwrap();
        assert!(!merged(&c).join("one").exists());
        assert_eq!(std::fs::read_to_string(merged(&c).join("two")).unwrap(), "2");
        agent.close(&ROOT, c.session.id.parse().unwrap(), CloseSession::default()).await.unwrap();
    });
}

fn readmit(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 2000)).await.unwrap();
        let id = a.session.id.parse().unwrap();
        let mut child = writer(&a.session, PAUSABLE);
        pause(&a).await;
        until(&agent, &a.session.id, SOON, |v| has(v, "read-only")).await;
        let wish =
            ReadmitSession { authorised_by: "ann".into(), reason: "it was on holiday".into() };
        let view = agent.readmit(&ROOT, id, wish).await.unwrap();
        assert_eq!((view.state.as_str(), view.generation), ("ACTIVE", 2));
        std::fs::remove_file(merged(&a).join("pause")).unwrap();
        let log = a.session.upper.path().unwrap().join("log");
        let size = std::fs::metadata(&log).unwrap().len();
        let begun = std::time::Instant::now();
        while std::fs::metadata(&log).unwrap().len() == size {
            assert!(begun.elapsed() < paced(SOON), "it does not write again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        agent.beat(id, Sign::Token(a.token.clone())).await.unwrap();
        agent.close(&ROOT, id, CloseSession { mode: Some(CloseMode::Discard) }).await.unwrap();
        child.wait().unwrap();
    });
}

fn dispose(place: &Place) {
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 60_000)).await.unwrap();
        let id = a.session.id.parse().unwrap();
        std::fs::write(merged(&a).join("work"), "precious").unwrap();
        let kept =
            agent.close(&ROOT, id, CloseSession { mode: Some(CloseMode::Keep) }).await.unwrap();
        assert_eq!(kept.state, "PRESERVED");
        let preserved = agent.preserved().await.unwrap();
        assert_eq!((preserved.len(), preserved[0].entries), (1, 1));
        let made =
            agent.export(&ROOT, id, ExportSession { dest: None, dispose: true }).await.unwrap();
        assert!(made.verified && made.stable);
        let bundle =
            overfence::upper::bundle::verify(&made.path.path().unwrap(), &|| false).unwrap();
        assert_eq!(bundle.manifest, made.digest);
        assert!(agent.sessions().await.unwrap().is_empty());
    });
    for dir in ["state/sessions", "state/trash", "run/sessions"] {
        assert_eq!(std::fs::read_dir(place.dir.join(dir)).unwrap().count(), 0, "{dir}");
    }
    assert_eq!(cgroups(place), 0);
}

fn cgroups(place: &Place) -> usize {
    std::fs::read_dir(place.cgroup.join("sessions"))
        .unwrap()
        .flatten()
        .filter(|e| e.file_type().unwrap().is_dir())
        .count()
}

fn close_modes(place: &Place) {
    let layers = place.dir.join("state/layers");
    with_agent(place, |agent| async move {
        let a = agent.open(&ROOT, wish("w", "a", 60_000)).await.unwrap();
        let id = a.session.id.parse().unwrap();
        std::fs::write(merged(&a).join("f"), "x").unwrap();
        let refused = agent.close(&ROOT, id, CloseSession::default()).await.unwrap_err();
        assert_eq!(refused.code, Code::UncommittedBytes);
        assert_eq!(agent.session(id).await.unwrap().state, "ACTIVE");
        agent.close(&ROOT, id, CloseSession { mode: Some(CloseMode::Discard) }).await.unwrap();
        assert_eq!(agent.workspace("w").await.unwrap().version, 0);
        // What a checkpoint published is committed; what came after it is not.
        let b = agent.open(&ROOT, wish("w", "b", 60_000)).await.unwrap();
        let id = b.session.id.parse().unwrap();
        std::fs::write(merged(&b).join("f"), "y").unwrap();
        agent.checkpoint(&ROOT, id, Default::default()).await.unwrap();
        std::fs::write(merged(&b).join("g"), "z").unwrap();
        let stored = || std::fs::read_dir(&layers).unwrap().count();
        let before = stored();
        let refused = agent.close(&ROOT, id, CloseSession::default()).await.unwrap_err();
        assert_eq!(refused.code, Code::UncommittedBytes);
        assert_eq!(stored(), before, "the question left a layer behind");
        agent.checkpoint(&ROOT, id, Default::default()).await.unwrap();
        let closed = agent.close(&ROOT, id, CloseSession::default()).await.unwrap();
        assert_eq!((closed.state.as_str(), closed.expected.version.0), ("CLOSED", 2));
        assert_eq!(agent.workspace("w").await.unwrap().version, 2);
    });
}

fn failed_open(place: &Place) {
    with_agent(place, |agent| async move {
        // The cgroup of a session cannot be made where its parent allows none.
        let most = place.cgroup.join("sessions/cgroup.max.descendants");
        std::fs::write(&most, "0").unwrap();
        let failed = agent.open(&ROOT, wish("w", "a", 60_000)).await;
        assert!(failed.is_err());
        std::fs::write(&most, "max").unwrap();
        let begun = std::time::Instant::now();
        while agent.sessions().await.unwrap().iter().any(|s| s.state != "CLOSED") {
            assert!(begun.elapsed() < paced(SOON), "{:#?}", agent.sessions().await.unwrap());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The lease was given back: the next one opens at once.
        let b = agent.open(&ROOT, wish("w", "b", 60_000)).await.unwrap();
        assert_eq!(b.session.generation, 2);
        agent.close(&ROOT, b.session.id.parse().unwrap(), CloseSession::default()).await.unwrap();
    });
    assert_eq!(std::fs::read_dir(place.dir.join("state/sessions")).unwrap().count(), 0);
    assert_eq!(cgroups(place), 0);
}
