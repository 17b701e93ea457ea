//! A session that cannot be stopped delays no other.

use std::time::{Duration, Instant};

use overfence::agent::Agent;
use overfence::model::facts::Fact;
use overfence::model::view::{FenceSession, SessionView};

use super::course::open;
use super::lower;
use super::scene::{Actor, Scene};
use crate::host::{Place, Test, paced};
use crate::rig::{ROOT, has, until, wish, with_agent};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "one_that_no_kill_wakes_delays_no_other_session", run: no_kill },
        Test { name: "one_that_a_kill_wakes_ends_when_it_is_to_be_killed", run: kill },
        Test { name: "a_hung_file_behind_a_loop_device_delays_no_session", run: foreign },
        Test { name: "a_lower_that_hangs_altogether_delays_no_fence", run: hung_lower },
    ]
}

const SOON: Duration = Duration::from_secs(10);

async fn fence(agent: &Agent, id: &str, to: Fact) -> SessionView {
    let wish = FenceSession { to: Some(to), reason: "test".into(), ..FenceSession::default() };
    agent.fence(&ROOT, id.parse().unwrap(), wish).await.unwrap().session
}

/// Opens a session, whose writer hangs, and fences it.
async fn stuck(
    place: &Place,
    agent: &Agent,
    cover: fn(&Place, &std::path::Path) -> Vec<Actor>,
    call: libc::c_long,
) -> (Scene, String) {
    let (opened, outside) = lower::open_covered(place, agent, cover);
    let mut scene = Scene::new(place, &opened, outside);
    super::caught(&mut scene);
    let id = opened.session.id;
    fence(agent, &id, Fact::ReadOnly).await;
    let view = until(agent, &id, SOON, |v| !v.blockers.is_empty()).await;
    let pid = u32::try_from(scene.inside[0].pid().as_raw()).unwrap();
    let blocker = view.blockers.iter().find(|b| b.pid == pid).expect("it is named");
    assert!(blocker.state == "D" && view.facts.is_empty(), "{view:#?}");
    // What it is at, and where in the kernel it sleeps.
    assert!(blocker.syscall.starts_with(&format!("{call} ")), "{blocker:?}");
    assert!(!["", "0"].contains(&&*blocker.wchan), "{blocker:?}");
    fence(agent, &id, Fact::Killed).await;
    (scene, id)
}

/// Fences and removes another session from first to last.
async fn whole_life(place: &Place, agent: &Agent) -> Duration {
    let opened = open(agent, wish("other", "b", 60_000));
    let mut scene = Scene::new(place, &opened, vec![]);
    scene.inside("append", &[&scene.merged.join("own")]);
    end_of_life(agent, &opened.session.id).await
}

/// Fences and removes a session that writes.
async fn end_of_life(agent: &Agent, id: &str) -> Duration {
    let begun = Instant::now();
    fence(agent, id, Fact::ReadOnly).await;
    until(agent, id, SOON, |v| has(v, "frozen")).await;
    let frozen = begun.elapsed();
    let view = until(agent, id, SOON, |v| !v.holders.is_empty()).await;
    assert!(view.holders.iter().all(|h| h.inside && h.how == "descriptor"), "{view:#?}");
    fence(agent, id, Fact::Killed).await;
    until(agent, id, SOON, |v| has(v, "killed") && has(v, "read-only")).await;
    agent.discard(&ROOT, id.parse().unwrap()).await.unwrap();
    println!("frozen after {frozen:?}, and gone after {:?}", begun.elapsed());
    frozen
}

fn no_kill(place: &Place) {
    with_agent(place, |agent| async move {
        let (mut scene, id) = stuck(place, &agent, lower::cover_hung_open, libc::SYS_openat).await;
        for _ in 0..3 {
            let frozen = whole_life(place, &agent).await;
            assert!(frozen < paced(Duration::from_millis(500)), "delayed: {frozen:?}");
        }
        let view = agent.session(id.parse().unwrap()).await.unwrap();
        assert!(view.facts.is_empty(), "nothing is proved of it: {view:#?}");
        println!("{:?} {:?}", view.trouble, view.blockers);
        scene.release();
        until(&agent, &id, SOON, |v| has(v, "killed") && has(v, "read-only")).await;
        agent.discard(&ROOT, id.parse().unwrap()).await.unwrap();
    });
}

fn kill(place: &Place) {
    with_agent(place, |agent| async move {
        let (_scene, id) = stuck(place, &agent, lower::cover_hung_read, libc::SYS_read).await;
        let view = until(&agent, &id, SOON, |v| has(v, "killed") && has(v, "read-only")).await;
        assert!(!has(&view, "frozen"), "it never froze: {view:#?}");
        agent.discard(&ROOT, id.parse().unwrap()).await.unwrap();
    });
}

/// A loop device of somebody else, on a server that answers no longer.
fn foreign(place: &Place) {
    let hung = place.dir.join("hung");
    std::fs::create_dir(&hung).unwrap();
    let server = Actor::start("healthy", None, &[&hung]);
    let _device = Actor::start("loop-hold", None, &[&hung.join("bytes")]);
    nix::sys::signal::kill(server.pid(), nix::sys::signal::Signal::SIGSTOP).unwrap();
    std::thread::scope(|scope| {
        let (over, wait) = std::sync::mpsc::channel::<()>();
        // Whatever hangs in it, also a failing test's own agent, is let go in the end.
        scope.spawn(move || {
            let _ = wait.recv_timeout(paced(Duration::from_secs(40)));
            drop(server);
        });
        with_agent(place, |agent| async move {
            whole_life(place, &agent).await;
            drop(over);
        });
    });
}

/// The session's own lower, asked for nothing any more.
fn hung_lower(place: &Place) {
    with_agent(place, |agent| async move {
        let (opened, outside) = lower::open_covered(place, &agent, lower::cover_healthy);
        let mut scene = Scene::new(place, &opened, outside);
        scene.inside("append", &[&scene.merged.join("own")]);
        let server = scene.outside[0].pid();
        nix::sys::signal::kill(server, nix::sys::signal::Signal::SIGSTOP).unwrap();
        let frozen = end_of_life(&agent, &opened.session.id).await;
        assert!(frozen < paced(Duration::from_millis(500)), "delayed: {frozen:?}");
    });
}
