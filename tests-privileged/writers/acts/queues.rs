//! Writers that leave the writing to the kernel: aio and io_uring.

use std::os::fd::AsRawFd as _;

use io_uring::{IoUring, opcode, squeue, types};

use super::*;

/// How many writes are under way at once.
const DEPTH: usize = 8;

pub fn aio(path: &Path) -> ! {
    const PWRITE: u16 = 1;
    let file = open_direct(path);
    let mut context: libc::c_ulong = 0;
    // SAFETY: the kernel writes the context's id.
    let made = unsafe { libc::syscall(libc::SYS_io_setup, DEPTH, &raw mut context) };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    let mut pages: Vec<Page> = (0..DEPTH).map(|_| Page([0; 4096])).collect();
    // SAFETY: plain numbers, of which all zeros is a value.
    let mut blocks: Vec<libc::iocb> = vec![unsafe { std::mem::zeroed() }; DEPTH];
    // linux/aio_abi.h: struct io_event, which is data, obj, res and res2.
    let mut events = [[0_u64; 4]; DEPTH];
    let submit = |block: &mut libc::iocb| {
        let mut list = [std::ptr::from_mut(block)];
        // SAFETY: block and page live until the process ends.
        let n = unsafe { libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()) };
        assert_eq!(n, 1, "{}", std::io::Error::last_os_error());
    };
    for n in 0..DEPTH {
        pages[n].0[..8].copy_from_slice(&stamp());
        blocks[n].aio_lio_opcode = PWRITE;
        blocks[n].aio_fildes = file.as_raw_fd().try_into().unwrap();
        blocks[n].aio_buf = pages[n].0.as_ptr() as u64;
        blocks[n].aio_nbytes = 4096;
        blocks[n].aio_offset = (n * 4096).try_into().unwrap();
        blocks[n].aio_data = n as u64;
        submit(&mut blocks[n]);
    }
    ready();
    loop {
        let (at, none) = (events.as_mut_ptr(), std::ptr::null_mut::<libc::timespec>());
        // SAFETY: there is room for that many events.
        let n = unsafe { libc::syscall(libc::SYS_io_getevents, context, 1, DEPTH, at, none) };
        let n = match usize::try_from(n) {
            Ok(n) => n,
            // The freezer interrupts it.
            Err(_) => continue,
        };
        for [data, _, res, _] in &events[..n] {
            assert_eq!(*res, 4096);
            let n = usize::try_from(*data).unwrap();
            pages[n].0[..8].copy_from_slice(&stamp());
            submit(&mut blocks[n]);
        }
    }
}

/// What a ring is told.
pub struct Ring {
    /// A kernel thread takes the requests.
    pub sqpoll: bool,
    /// Kernel workers do them.
    pub workers: bool,
    /// The file is the ring's, and has no descriptor any more.
    pub registered: bool,
}

pub fn ring(path: &Path, how: &Ring) -> ! {
    let file = open(path);
    let mut builder = IoUring::builder();
    if how.sqpoll {
        builder.setup_sqpoll(2000);
    }
    let mut ring: IoUring = builder.build(DEPTH.try_into().unwrap()).unwrap();
    let mut file = Some(file);
    if how.registered {
        ring.submitter().register_files(&[file.as_ref().unwrap().as_raw_fd()]).unwrap();
        file = None;
    }
    let mut slots = [[0_u8; 8]; DEPTH];
    let mut told = false;
    for turn in (0..64_u64).cycle() {
        for (n, slot) in slots.iter_mut().enumerate() {
            *slot = stamp();
            let at = (turn * DEPTH as u64 + n as u64) * 8;
            let entry = match &file {
                Some(file) => opcode::Write::new(types::Fd(file.as_raw_fd()), slot.as_ptr(), 8)
                    .offset(at)
                    .build(),
                None => opcode::Write::new(types::Fixed(0), slot.as_ptr(), 8).offset(at).build(),
            };
            let flags = if how.workers { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
            // SAFETY: the slot is not touched until its completion was seen, and outlives the ring.
            unsafe { ring.submission().push(&entry.flags(flags)).unwrap() };
        }
        let mut done = 0;
        while done < DEPTH {
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => panic!("{e}"),
            }
            for completed in ring.completion() {
                assert_eq!(completed.result(), 8);
                done += 1;
            }
        }
        if !told {
            ready();
            told = true;
        }
        breathe();
    }
    unreachable!()
}
