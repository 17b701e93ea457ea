//! A container on the same host that has nothing to do with overfence, on an overlay of its own as
//! engines have it: whatever becomes of the gate, its writes go on. By systemd-nspawn, since guests have no
//! engine; to the gate it is the same, an overlay that nobody entered.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use overfence::kernel::clock;
use overfence::kernel::gate::Gate;
use rustix::io::Errno;

use super::{Scene, own_bpffs, write};
use crate::host::{Place, paced};
use crate::systemd::machine::Machine;

/// Changes files in several ways for as long as it may, and tells of each time.
const WRITER: &str = r#"
while [ ! -e /end ]; do
    if echo x >> /log && echo x > /file && mkdir /dir && mv /file /dir/file && chmod 600 /dir/file &&
        rm -r /dir
    then echo wrote; else echo refused; fi
done
"#;

/// Ended with the test, whatever it did.
struct Container(Child);

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn left_alone(place: &Place) {
    let pins = own_bpffs();
    let machine = Machine::bare(place);
    let said = place.dir.join("said");
    let cgroup = place.cgroup.join("container");
    std::fs::create_dir(&cgroup).unwrap();
    let child = Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
        .arg(cgroup.join("cgroup.procs"))
        .args(["systemd-nspawn", "--quiet", "--machine=c", "--private-network", "--register=no"])
        .args(["--keep-unit", "--as-pid2"])
        .arg(format!("--directory={}", machine.root.display()))
        .args(["/bin/sh", "-c", WRITER])
        .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
        .stdin(Stdio::null())
        .stdout(File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let mut container = Container(child);
    let writes_on = |when: &str| {
        let all = || std::fs::read_to_string(&said).unwrap();
        let (before, until) =
            (all().matches("wrote").count(), clock::now().plus(paced(Duration::from_secs(20))));
        // The one that is under way may have begun before.
        while all().matches("wrote").count() < before + 3 {
            assert!(clock::now() < until, "{when}: it stands still: {}", all());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!all().contains("refused"), "{when}");
    };
    writes_on("without a gate");
    let scene = Scene::below(&place.dir.join("session"));
    scene.open();
    let file = File::create(scene.merged().join("file")).unwrap();
    assert_eq!(write(&file), Ok(1));
    writes_on("beside a good lease");
    scene.shut();
    assert_eq!(write(&file), Err(Errno::ROFS));
    writes_on("beside a lost lease");
    // Other programs take over, as after an upgrade.
    let sets = std::fs::read_dir(pins.join("layout-2")).unwrap().map(|e| e.unwrap().path());
    let own = sets.into_iter().find(|path| path.is_dir()).unwrap();
    std::fs::rename(&own, own.with_file_name("0".repeat(16))).unwrap();
    assert!(Gate::raise().unwrap().stands());
    assert_eq!(write(&file), Err(Errno::ROFS));
    writes_on("under other programs");
    drop(file);
    drop(scene);
    assert!(Gate::raise().unwrap().lower().unwrap());
    writes_on("after it was taken away");
    std::fs::write(machine.root.join("end"), "").unwrap();
    assert!(container.0.wait().unwrap().success());
    assert!(!std::fs::read_to_string(&said).unwrap().contains("refused"));
}
