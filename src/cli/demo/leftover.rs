//! What a demo that was killed left behind: its processes died with it, but directory, cgroup and
//! the writers in it stay. The next demo removes them: known by their name, with an owner that is
//! dead by pid and by the lock it held, which tells a demo in another pid namespace as well.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::host::{BASES, NAME, clear_cgroup};
use crate::kernel::cgroup;

/// The file that the owner of a throwaway directory holds locked while it lives.
const OWNER: &str = "owner";

/// Takes a throwaway directory.
pub(super) fn own(dir: &Path) -> io::Result<File> {
    let file = File::create(dir.join(OWNER))?;
    file.lock()?;
    Ok(file)
}

/// Removes what dead demos left, their cgroups below `cgroups` among it; what was found, in words.
pub(super) fn clear_all(cgroups: &Path) -> Vec<String> {
    let mut found = vec![];
    for base in BASES {
        for dir in abandoned(Path::new(base)) {
            let done = clear(&dir).map_err(|why| format!("{} is left: {why}", dir.display()));
            found.push(done.err().unwrap_or_else(|| {
                format!("removed {}, left by a demo that was killed", dir.display())
            }));
        }
    }
    // One that was killed before it wrote where its cgroup is.
    for dir in abandoned(cgroups) {
        if let Err(why) = clear_cgroup(&dir) {
            found.push(format!("{} is left: {why}", dir.display()));
        }
    }
    found
}

/// Directories of this name whose owner is dead.
fn abandoned(base: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let dead = named.map(|entry| entry.path()).filter(|dir| pid_of(dir).is_some_and(is_dead));
    dead.filter(|dir| !is_locked(&dir.join(OWNER))).collect()
}

fn pid_of(dir: &Path) -> Option<u32> {
    dir.file_name()?.to_str()?.strip_prefix(NAME)?.parse().ok()
}

fn is_dead(pid: u32) -> bool {
    !Path::new("/proc").join(pid.to_string()).exists()
}

fn is_locked(owner: &Path) -> bool {
    match File::open(owner) {
        Ok(file) => matches!(file.try_lock(), Err(TryLockError::WouldBlock)),
        Err(_) => false,
    }
}

fn clear(dir: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = dir.symlink_metadata().map_err(|e| e.to_string())?;
    if meta.uid() != 0 || meta.mode() & 0o077 != 0 {
        return Err("it is not root's alone".to_owned());
    }
    if let Some(cgroup) = cgroup_of(dir) {
        clear_cgroup(&cgroup)?;
    }
    fs::remove_dir_all(dir).map_err(|e| e.to_string())
}

/// The cgroup that its configuration names, when that is of the same demo.
fn cgroup_of(dir: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(dir.join("config.toml")).ok()?;
    let config: toml::Table = text.parse().ok()?;
    let sessions = Path::new(config.get("cgroup")?.as_str()?).to_owned();
    let own = sessions.parent()?;
    let same = own.file_name() == dir.file_name();
    let plain = own.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    (same && plain).then(|| cgroup::find_root().ok().map(|root| root.join(own))).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_dead_demo_left_is_abandoned() {
        let base = tempfile::tempdir().unwrap();
        let make = |name: String| {
            let dir = base.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        // Above every pid_max.
        let dead = make(format!("{NAME}4194305"));
        let locked = make(format!("{NAME}4194306"));
        let held = own(&locked).unwrap();
        for name in [format!("{NAME}{}", std::process::id()), format!("{NAME}x"), "4194305".into()]
        {
            make(name);
        }
        fs::write(base.path().join(format!("{NAME}4194307")), "a file").unwrap();
        assert_eq!(abandoned(base.path()), std::slice::from_ref(&dead));
        drop(held);
        let mut both = abandoned(base.path());
        both.sort();
        assert_eq!(both, [dead, locked]);
    }

    #[test]
    fn a_configuration_names_no_other_cgroup() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join(format!("{NAME}4194305"));
        fs::create_dir(&dir).unwrap();
        assert_eq!(cgroup_of(&dir), None);
        for (said, taken) in [
            (format!("a/{NAME}4194305/sessions"), true),
            ("system.slice/sessions".into(), false),
            (format!("../a/{NAME}4194305/sessions"), false),
        ] {
            fs::write(dir.join("config.toml"), format!("cgroup = {said:?}")).unwrap();
            let found = cgroup_of(&dir);
            assert_eq!(found.is_some(), taken && cgroup::find_root().is_ok(), "{said}: {found:?}");
        }
    }
}
