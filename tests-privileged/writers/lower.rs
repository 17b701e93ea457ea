//! Sessions whose lower layer is another directory than the one that was captured: large without
//! being packed first, or on a file system that hangs.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use overfence::agent::Agent;
use overfence::model::session::CloseMode;
use overfence::model::view::{CloseSession, Opened};

use super::acts::large;
use super::course::open;
use super::scene::Actor;
use crate::host::Place;
use crate::rig::{ROOT, wish};

/// Opens a session of a workspace with one layer, whose tree `cover` has covered by a mount.
pub fn open_covered(
    place: &Place,
    agent: &Agent,
    cover: fn(&Place, &Path) -> Vec<Actor>,
) -> (Opened, Vec<Actor>) {
    let seed = place.dir.join("seed");
    std::fs::create_dir(&seed).unwrap();
    std::fs::write(seed.join("bytes"), b"lower").unwrap();
    let mut first = wish("w", "a", 60_000);
    first.create.as_mut().unwrap().lowers = vec![overfence::model::view::PathText::of(&seed)];
    let opened = open(agent, first);
    let close = CloseSession { mode: Some(CloseMode::Discard) };
    tokio::task::block_in_place(|| {
        let id = opened.session.id.parse().unwrap();
        tokio::runtime::Handle::current().block_on(agent.close(&ROOT, id, close)).unwrap()
    });
    let actors = cover(place, &tree(&place.dir.join("state")).expect("the layer has a tree"));
    (open(agent, wish("w", "a", 60_000)), actors)
}

/// Covers a tree by a directory with one large file.
pub fn cover_large(place: &Place, tree: &Path) -> Vec<Actor> {
    let large = place.dir.join("large");
    std::fs::create_dir(&large).unwrap();
    let mut file = std::fs::File::create(large.join("bytes")).unwrap();
    let part = vec![0xff; 1 << 20];
    for _ in 0..large::size() >> 20 {
        file.write_all(&part).unwrap();
    }
    rustix::mount::mount_bind(&large, tree).unwrap();
    vec![]
}

/// Covers a tree by a file system whose server never answers an open of its one file.
pub fn cover_hung_open(_: &Place, tree: &Path) -> Vec<Actor> {
    vec![Actor::start("hung-open", None, &[tree])]
}

/// The same where everything is answered.
pub fn cover_healthy(_: &Place, tree: &Path) -> Vec<Actor> {
    vec![Actor::start("healthy", None, &[tree])]
}

/// The same where it is a read that is never answered.
pub fn cover_hung_read(_: &Place, tree: &Path) -> Vec<Actor> {
    vec![Actor::start("hung-read", None, &[tree])]
}

fn tree(dir: &Path) -> Option<PathBuf> {
    let dirs = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).filter(|p| p.is_dir());
    dirs.into_iter().find_map(|dir| if dir.ends_with("tree") { Some(dir) } else { tree(&dir) })
}
