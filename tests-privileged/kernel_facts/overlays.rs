//! Mounting, and read-only.

use super::*;

pub(super) fn tests() -> Vec<Test> {
    tests![
        read_only_is_refused_while_a_descriptor_is_open_for_write,
        read_only_is_refused_while_a_frozen_task_maps_a_file_shared,
        read_only_is_granted_after_the_kill_and_the_probe_is_erofs,
        a_read_only_mount_alone_stops_nobody,
        the_write_probe_leaves_no_copy_up,
        every_style_takes_any_bytes_in_paths,
        no_style_shows_an_overlay_before_it_is_in_place,
        all_lower_layers_are_in_the_mount,
        layers_with_mapped_ids_are_root_on_disk_and_inside,
        a_foreign_mount_is_not_adopted,
        an_upper_on_overlay_is_refused_and_probes_leave_nothing,
        a_work_directory_of_mode_zero_is_removed_by_descriptor,
        a_second_mount_of_an_upper_is_allowed_without_index,
        no_file_of_an_overlay_can_be_swap,
        no_overlay_of_ours_can_be_exported_by_nfsd,
    ]
}

fn read_only_is_refused_while_a_descriptor_is_open_for_write(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    let child = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
    });
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()));
    proved(cgroup.freeze(seconds(2)).unwrap());
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()), "frozen, still open");
    std::fs::write(session.merged("g"), b"a refused request changes nothing").unwrap();
    drop(child);
    let proof = granted(&mounted.root);
    assert_eq!(proof.answer, "ok, EROFS");
}

fn read_only_is_refused_while_a_frozen_task_maps_a_file_shared(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("f"), [0; 4096]).unwrap();
    let _child = Child::start(Some(&cgroup), || map_shared(&session.merged("f")));
    proved(cgroup.freeze(seconds(2)).unwrap());
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()));
}

fn read_only_is_granted_after_the_kill_and_the_probe_is_erofs(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("m"), [0; 4096]).unwrap();
    let _child = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
        map_shared(&session.merged("m"));
    });
    proved(cgroup.freeze(seconds(2)).unwrap());
    proved(cgroup.kill(seconds(5)).unwrap());
    granted(&mounted.root);
    assert!(overlay::is_read_only(&mounted.root).unwrap());
    let refused = std::fs::write(session.merged("g"), b"x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    overlay::remount_rw(&mounted.root).unwrap();
    assert!(!overlay::is_read_only(&mounted.root).unwrap());
    std::fs::write(session.merged("g"), b"x").unwrap();
}

fn a_read_only_mount_alone_stops_nobody(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    let other = place.dir.join("other");
    std::fs::create_dir(&other).unwrap();
    rustix::mount::mount_bind(&session.spec.target, &other).unwrap();
    let flags = rustix::mount::MountFlags::RDONLY | rustix::mount::MountFlags::BIND;
    rustix::mount::mount_remount(&session.spec.target, flags, c"").unwrap();
    assert!(std::fs::write(session.merged("f"), b"x").is_err());
    assert!(!overlay::is_read_only(&mounted.root).unwrap(), "a mount's ro is no fact");
    std::fs::write(other.join("f"), b"x").unwrap();
}

fn the_write_probe_leaves_no_copy_up(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    assert!(!overlay::is_read_only(&mounted.root).unwrap());
    granted(&mounted.root);
    overlay::remount_rw(&mounted.root).unwrap();
    assert_eq!(std::fs::read_dir(&session.spec.upper).unwrap().count(), 0);
}

/// Whether this kernel is to take layers in this style.
fn is_known(style: Style) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let mut next = || numbers.next().unwrap().unwrap();
    let since = match style {
        Style::Descriptors => (6, 13),
        Style::Appended => (6, 8),
        Style::Joined => (0, 0),
    };
    (next(), next()) >= since
}

fn every_style_takes_any_bytes_in_paths(place: &Place) {
    let name = OsStr::from_bytes(b"a:b,c\\d e\nf\xff=g+");
    for (i, style) in [Style::Descriptors, Style::Appended, Style::Joined].into_iter().enumerate() {
        let mut dir = place.dir.join(format!("{i}")).into_os_string().into_vec();
        dir.extend(b"/x:y,z\\ \n\xfe");
        let session = Session::with_lowers(Path::new(&OsString::from_vec(dir)), &[name]);
        let mounted = match overlay::mount_styled(&session.spec, style) {
            Err(Error::TooOld { .. }) if !is_known(style) => continue,
            answer => answer.unwrap_or_else(|e| panic!("{style:?}: {e:?}")),
        };
        assert!(is_known(style), "{style:?} is said to be younger than this kernel");
        assert_eq!(std::fs::read(session.merged("from-0")).unwrap(), b"lower", "{style:?}");
        std::fs::write(session.merged("new"), b"x").unwrap();
        assert_eq!(std::fs::read(session.upper("new")).unwrap(), b"x", "{style:?}");
        let adopted = overlay::open_mounted(&session.spec.target, &session.spec.upper).unwrap();
        assert_eq!(adopted.unwrap().s_dev, mounted.s_dev);
        let options = &mountinfo::at(mountinfo::read(None).unwrap(), &session.spec.target).unwrap();
        assert!(options.options.to_string_lossy().contains("nosuid,nodev"), "{options:?}");
        drop(mounted);
        assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Done);
        assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::NotMounted);
    }
}

/// Who enters it into the lease gate relies on it, and so does who crashes meanwhile. A mount that
/// came and went is told of, too.
fn no_style_shows_an_overlay_before_it_is_in_place(place: &Place) {
    for mapped in [None, Some(IdMap { base: 100_000, count: 65536 })] {
        for style in [Style::Descriptors, Style::Appended, Style::Joined] {
            let dir = place.dir.join(format!("{style:?}-{}", mapped.is_some()));
            let mut session = Session::with_lowers(&dir, &[OsStr::new("lower")]);
            session.spec.mapped = mapped;
            let target = session.spec.target.clone();
            let changes = mountinfo::Changes::new().unwrap();
            let mut asked = false;
            let mounted = overlay::mount_styled_with(&session.spec, style, |_| {
                asked = true;
                assert!(!changes.any().unwrap(), "{style:?}: it was mounted for all to see");
                assert!(mountinfo::at(mountinfo::read(None).unwrap(), &target).is_none());
            });
            match mounted {
                Err(Error::TooOld { .. }) if !is_known(style) => continue,
                answer => drop(answer.unwrap_or_else(|e| panic!("{style:?}: {e:?}"))),
            }
            assert!(asked && changes.any().unwrap(), "{style:?}: changes are not told of");
            assert_eq!(overlay::unmount(&target).unwrap(), Unmount::Done);
        }
    }
}

fn all_lower_layers_are_in_the_mount(place: &Place) {
    let names: Vec<OsString> = (0..120).map(|i| format!("layers/{i:0>60}").into()).collect();
    let names: Vec<&OsStr> = names.iter().map(OsString::as_os_str).collect();
    for (i, style) in [Style::Descriptors, Style::Appended, Style::Joined].into_iter().enumerate() {
        let session = Session::with_lowers(&place.dir.join(format!("{i}")), &names);
        let mounted = match overlay::mount_styled(&session.spec, style) {
            Err(Error::TooOld { .. }) if !is_known(style) => continue,
            answer => answer.unwrap_or_else(|e| panic!("{style:?}: {e:?}")),
        };
        assert!(is_known(style), "{style:?} is said to be younger than this kernel");
        for n in 0..names.len() {
            assert!(session.merged(&format!("from-{n}")).exists(), "{style:?} lacks layer {n}");
        }
        // The last of the list is the topmost.
        assert_eq!(std::fs::read(session.merged("shared")).unwrap(), b"119", "{style:?}");
        drop(mounted);
    }
    let many: Vec<PathBuf> = (0..300).map(|_| place.dir.join("0/s")).collect();
    let spec = Spec { lowers: many, ..Session::new(place).spec };
    let refused = overlay::mount_styled(&spec, Style::Joined).unwrap_err();
    assert!(matches!(refused, Error::Limit { .. }), "{refused:?}");
}

fn layers_with_mapped_ids_are_root_on_disk_and_inside(place: &Place) {
    let mut session = Session::new(place);
    let map = IdMap { base: 100_000, count: 65536 };
    let begun = Instant::now();
    drop(session.mount());
    let plain = begun.elapsed();
    overlay::unmount(&session.spec.target).unwrap();
    session.spec.mapped = Some(map);
    let begun = Instant::now();
    let mounted = session.mount();
    println!("mount: plain {plain:?}, mapped {:?}", begun.elapsed());
    assert_eq!(std::fs::metadata(session.merged("from-0")).unwrap().uid(), 100_000);
    let user_ns = overfence::kernel::idmap::user_namespace(&map).unwrap();
    let target = session.spec.target.clone();
    let child = Child::run(None, || {
        || {
            let kind = rustix::thread::LinkNameSpaceType::User;
            rustix::thread::move_into_link_name_space(user_ns.as_fd(), Some(kind)).unwrap();
            let root = rustix::process::Uid::ROOT;
            rustix::thread::set_thread_res_gid(
                rustix::process::Gid::ROOT,
                rustix::process::Gid::ROOT,
                rustix::process::Gid::ROOT,
            )
            .unwrap();
            rustix::thread::set_thread_res_uid(root, root, root).unwrap();
            assert_eq!(std::fs::metadata(target.join("from-0")).unwrap().uid(), 0);
            std::fs::write(target.join("new"), b"x").unwrap();
            std::fs::write(target.join("from-0"), b"copied up").unwrap();
            std::fs::create_dir(target.join("d")).unwrap();
            std::fs::remove_file(target.join("shared")).unwrap();
            std::os::unix::fs::chown(target.join("d"), Some(1000), Some(1000)).unwrap();
        }
    });
    let status = nix::sys::wait::waitpid(child.0, None).unwrap();
    std::mem::forget(child);
    assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
    for (name, id) in [("new", 0), ("from-0", 0), ("d", 1000)] {
        let meta = std::fs::metadata(session.upper(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (id, id), "{name} on disk");
    }
    let whiteout = walk::stat_path(&session.upper("shared")).unwrap();
    assert!(whiteout.is_whiteout(), "{whiteout:?}");
    let adopted = overlay::open_mounted(&session.spec.target, &session.spec.upper).unwrap();
    assert_eq!(adopted.unwrap().s_dev, mounted.s_dev);
    granted(&mounted.root);
}

fn a_foreign_mount_is_not_adopted(place: &Place) {
    let session = Session::new(place);
    let (target, upper) = (&session.spec.target, &session.spec.upper);
    assert!(overlay::open_mounted(target, upper).unwrap().is_none());
    let mounted = session.mount();
    let other = overlay::open_mounted(target, &session.spec.work);
    assert!(matches!(other, Err(Error::WrongMount { .. })), "{other:?}");
    drop(mounted);
    overlay::unmount(target).unwrap();
    rustix::mount::mount_bind(upper, target).unwrap();
    let other = overlay::open_mounted(target, upper);
    assert!(matches!(other, Err(Error::WrongMount { .. })), "{other:?}");
}

fn an_upper_on_overlay_is_refused_and_probes_leave_nothing(place: &Place) {
    let session = Session::new(place);
    let dir = session.spec.upper.parent().unwrap();
    overlay::preflight(dir, &session.spec.lowers).unwrap();
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 3, "the probe left something");
    let _mounted = session.mount();
    let refused = overlay::preflight(&session.spec.target, &session.spec.lowers).unwrap_err();
    assert!(matches!(refused, Error::BadUpper { .. }), "{refused:?}");
    assert_eq!(std::fs::read_dir(&session.spec.upper).unwrap().count(), 0);
}

fn a_work_directory_of_mode_zero_is_removed_by_descriptor(place: &Place) {
    let session = Session::new(place);
    drop(session.mount());
    overlay::unmount(&session.spec.target).unwrap();
    let inner = session.spec.work.join("work");
    assert_eq!(std::fs::metadata(&inner).unwrap().permissions().mode() & 0o7777, 0);
    let work = walk::Dir::open(&session.spec.work).unwrap();
    assert!(work.child(OsStr::new("work")).unwrap().sorted().unwrap().is_empty());
    rustix::fs::unlinkat(&work, "work", rustix::fs::AtFlags::REMOVEDIR).unwrap();
    assert!(!inner.exists());
}

fn a_second_mount_of_an_upper_is_allowed_without_index(place: &Place) {
    let session = Session::new(place);
    let first = session.mount();
    let second = place.dir.join("second");
    std::fs::create_dir(&second).unwrap();
    let spec = Spec { target: second, ..session.spec.clone() };
    let second = overlay::mount(&spec).unwrap();
    assert_ne!(first.s_dev, second.s_dev, "the kernel does not protect an upper");
}

/// So a swap file is no holder that has to be looked for: overlayfs has no blocks to give away.
fn no_file_of_an_overlay_can_be_swap(place: &Place) {
    let session = Session::new(place);
    let _mounted = session.mount();
    // As mkswap(8) makes it.
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let (page, pages) = (usize::try_from(page).unwrap(), 256_u32);
    let mut bytes = vec![0; page * pages as usize];
    bytes[1024..1028].copy_from_slice(&1_u32.to_ne_bytes());
    bytes[1028..1032].copy_from_slice(&(pages - 1).to_ne_bytes());
    bytes[page - 10..page].copy_from_slice(b"SWAPSPACE2");
    let file = session.merged("swap");
    std::fs::write(&file, bytes).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let path = std::ffi::CString::new(file.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a live string that ends in NUL.
    let answer = unsafe { libc::swapon(path.as_ptr(), 0) };
    let errno = std::io::Error::last_os_error().raw_os_error();
    if answer == 0 {
        // SAFETY: as above.
        unsafe { libc::swapoff(path.as_ptr()) };
    }
    assert_eq!((answer, errno), (-1, Some(libc::EINVAL)));
}

/// nfsd exports only what gives file handles that can be decoded, which is what this asks for; an
/// overlay gives them with `nfs_export=on`, which ours never have. So there is no export to look for.
fn no_overlay_of_ours_can_be_exported_by_nfsd(place: &Place) {
    let session = Session::new(place);
    let _mounted = session.mount();
    let ask = |path: &Path| {
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        let mut handle = [0_u8; 8 + 128];
        handle[..4].copy_from_slice(&128_u32.to_ne_bytes());
        let mut mount = 0;
        // SAFETY: the handle begins with the room that follows its head of 8 bytes; the path ends in
        // NUL; all live longer than the call.
        let answer = unsafe {
            libc::name_to_handle_at(
                libc::AT_FDCWD,
                path.as_ptr(),
                handle.as_mut_ptr().cast(),
                &raw mut mount,
                0,
            )
        };
        (answer, std::io::Error::last_os_error().raw_os_error())
    };
    assert_eq!(ask(&session.spec.target), (-1, Some(libc::EOPNOTSUPP)));
    assert_eq!(ask(&session.merged("from-0")), (-1, Some(libc::EOPNOTSUPP)));
    assert_eq!(ask(&session.spec.upper).0, 0, "the question is a good one where there are handles");
}
