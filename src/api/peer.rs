//! Who asks, as the kernel says, and what they may do.

use std::ffi::CString;

use nix::unistd::{Gid, Group as HostGroup, Uid, User};
use tokio::net::UnixStream;

use crate::agent::failure::Caller;
use crate::config::ApiKeys;

/// What a peer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rights {
    /// Nothing.
    None,
    /// Ask.
    View,
    /// Ask and change. Equivalent to root.
    Operate,
}

/// A group as the host knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Its number.
    pub gid: u32,
}

/// The two groups of the configuration; one that the host does not know has no members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roster {
    /// Its members operate.
    pub operate: Option<Group>,
    /// Its members read.
    pub view: Option<Group>,
}

impl Roster {
    /// Looks both groups up.
    pub fn of(keys: &ApiKeys) -> Self {
        let find = |name: &String| {
            let found = HostGroup::from_name(name).ok().flatten();
            found.map(|group| Group { name: name.clone(), gid: group.gid.as_raw() })
        };
        Self { operate: find(&keys.group), view: find(&keys.view_group) }
    }
}

/// What a peer with this uid and these groups may do.
pub fn rights(uid: u32, groups: &[u32], roster: &Roster) -> Rights {
    let member =
        |group: &Option<Group>| group.as_ref().is_some_and(|group| groups.contains(&group.gid));
    if uid == 0 || member(&roster.operate) {
        Rights::Operate
    } else if member(&roster.view) {
        Rights::View
    } else {
        Rights::None
    }
}

/// The peer's credentials (SO_PEERCRED: those at its `connect`).
///
/// # Errors
/// The kernel does not say.
pub(super) fn caller(stream: &UnixStream) -> std::io::Result<Caller> {
    let peer = stream.peer_cred()?;
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    Ok(Caller::of(peer.uid(), peer.gid(), pid))
}

/// The groups of a user in the host's database, with `gid`. Asked by uid: what `/proc` says of a
/// pid may be said of another process by then. May block on a directory service.
pub(super) fn groups(uid: u32, gid: u32) -> Vec<u32> {
    let listed = || {
        let user = User::from_uid(Uid::from_raw(uid)).ok().flatten()?;
        let name = CString::new(user.name).ok()?;
        nix::unistd::getgrouplist(&name, Gid::from_raw(gid)).ok()
    };
    let mut groups: Vec<u32> =
        listed().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
    groups.push(gid);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_members_get_in() {
        let group = |name: &str, gid| Some(Group { name: name.into(), gid });
        let both = Roster { operate: group("overfence", 10), view: group("overfence-view", 20) };
        let neither = Roster { operate: None, view: None };
        for (uid, groups, roster, expected) in [
            (0, &[0][..], &neither, Rights::Operate),
            (1000, &[1000, 10], &both, Rights::Operate),
            (1000, &[1000, 20, 10], &both, Rights::Operate),
            (1000, &[1000, 20], &both, Rights::View),
            (1000, &[1000], &both, Rights::None),
            (1000, &[0], &both, Rights::None),
            (1000, &[10, 20], &neither, Rights::None),
        ] {
            assert_eq!(rights(uid, groups, roster), expected, "uid {uid} groups {groups:?}");
        }
    }

    #[test]
    fn a_group_that_does_not_exist_has_no_members() {
        let mut keys = ApiKeys { group: "no-such-group-here".into(), ..ApiKeys::default() };
        keys.view_group = "root".into();
        let roster = Roster::of(&keys);
        assert_eq!(roster.operate, None);
        assert_eq!(roster.view, Some(Group { name: "root".into(), gid: 0 }));
    }

    #[tokio::test]
    async fn the_kernel_names_the_peer() {
        let (here, _there) = UnixStream::pair().unwrap();
        let caller = caller(&here).unwrap();
        assert_eq!(caller.pid, std::process::id());
        assert_eq!(caller.uid, nix::unistd::geteuid().as_raw());
        assert!(groups(caller.uid, caller.gid).contains(&caller.gid));
    }
}
