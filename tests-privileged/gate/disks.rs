//! The ways to change a file on other file systems than the host's: on some a clone or a deduplication
//! is possible that the host's would refuse by itself.

use std::path::Path;
use std::process::Command;

use overfence::kernel::gate::Gate;
use overfence::model::ids::Generation;
use overfence::model::time::BootNs;

use super::table::{Ground, each};
use super::{Scene, gate_of};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, paced_ttl};

/// What only file systems do that can share blocks.
const SHARES: [&str; 3] = ["clone", "dedupe", "copy_file_range"];

/// On the host's own, whichever that is. Guests have ext4: it has each kind of file flags.
pub fn on_the_hosts(place: &Place) {
    const EXT4: u64 = 0xef53;
    let found = rustix::fs::statfs(&place.dir).unwrap().f_type as u64;
    let must: &[&str] = match found {
        EXT4 => &["FS_IOC_FSSETXATTR", "file_setattr"],
        _ => &[],
    };
    rows(&Scene::new(place), must, &[]);
}

fn rows(scene: &Scene, must: &[&str], without: &[&str]) {
    let (open, shut) = (|| scene.open(), || scene.shut());
    each(&Ground { merged: scene.merged(), open: &open, shut: &shut, must, without });
}

fn run(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// A file system of the test's own, mounted; it goes with the test's namespace.
fn disk(place: &Place, make: &[&str]) -> std::path::PathBuf {
    let (image, at) = (place.dir.join("image"), place.dir.join("disk"));
    std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    run(Command::new(make[0]).args(&make[1..]).arg(&image));
    std::fs::create_dir(&at).unwrap();
    run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at));
    at
}

fn over(at: &Path, must: &[&str], without: &[&str]) {
    rows(&Scene::below(at), must, without);
    run(Command::new("umount").arg(at));
}

pub fn on_xfs(place: &Place) {
    let at = disk(place, &["mkfs.xfs", "-q", "-f", "-m", "reflink=1"]);
    over(&at, &[&SHARES[..], &["FS_IOC_FSSETXATTR", "file_setattr"]].concat(), &[]);
}

pub fn on_btrfs(place: &Place) {
    over(&disk(place, &["mkfs.btrfs", "-q", "-f"]), &SHARES, &[]);
}

/// Older ones have no attributes of users and no direct I/O.
pub fn on_tmpfs(place: &Place) {
    let at = place.dir.join("disk");
    std::fs::create_dir(&at).unwrap();
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=256m", "tmpfs"]).arg(&at));
    over(&at, &["copy_file_range"], &["O_DIRECT", "setxattr", "removexattr"]);
}

/// A session whose upper is an image. Its deadline is far: the test moves it in the agent's place.
pub fn on_an_image(place: &Place) {
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let open = ["session", "open", "-w", "w", "--create", "--upper", "image", "--size", "512M"];
    let opened = host.must(&[&open[..], &["--ttl", &paced_ttl(600)]].concat());
    assert_eq!(gate_of(&opened["session"]), ("complete", false), "{opened:#}");
    let merged = path_of(&opened["session"], "merged");
    std::fs::write(merged.join("lower-file"), b"lower").unwrap();
    let gate = Gate::raise().unwrap();
    let entry = gate.find_by_id(id_of(&opened).parse().unwrap()).unwrap();
    each(&Ground {
        merged: &merged,
        open: &|| entry.open(Generation(1), BootNs(u64::MAX)),
        shut: &|| entry.shut(),
        must: &["FS_IOC_FSSETXATTR", "file_setattr"],
        without: &[],
    });
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
}
