//! One write each by aio and by io_uring, and its answer.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use io_uring::{IoUring, opcode, types};

use super::stamps::stamp;

/// linux/aio_abi.h: IOCB_CMD_PWRITE.
const PWRITE: u16 = 1;

fn answer(n: i64) -> io::Result<()> {
    match i32::try_from(n) {
        Ok(errno) if errno < 0 => Err(io::Error::from_raw_os_error(-errno)),
        _ => Ok(()),
    }
}

pub fn aio(file: &File) -> io::Result<()> {
    let mut context: libc::c_ulong = 0;
    // SAFETY: the kernel writes the context's id.
    let made = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
    assert_eq!(made, 0, "{}", io::Error::last_os_error());
    let bytes = *b"new";
    // SAFETY: plain numbers, of which all zeros is a value.
    let mut block: libc::iocb = unsafe { std::mem::zeroed() };
    block.aio_lio_opcode = PWRITE;
    block.aio_fildes = file.as_raw_fd().try_into().unwrap();
    block.aio_buf = bytes.as_ptr() as u64;
    block.aio_nbytes = 3;
    let mut list = [&raw mut block];
    // `struct io_event`: data, obj, res, res2.
    let mut event = [0_i64; 4];
    stamp();
    // SAFETY: block, bytes and event live until the answer came.
    let answered = unsafe {
        match libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()) {
            1 => {
                let none = std::ptr::null_mut::<libc::timespec>();
                let at = event.as_mut_ptr();
                let n = libc::syscall(libc::SYS_io_getevents, context, 1, 1, at, none);
                assert_eq!(n, 1, "{}", io::Error::last_os_error());
                answer(event[2])
            }
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the context is ours and has nothing under way.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    answered
}

pub fn uring(file: &File) -> io::Result<()> {
    let mut ring = IoUring::new(2)?;
    let bytes = *b"new";
    let write = opcode::Write::new(types::Fd(file.as_raw_fd()), bytes.as_ptr(), 3).build();
    // SAFETY: the bytes live until the answer came.
    unsafe { ring.submission().push(&write) }.unwrap();
    stamp();
    ring.submit_and_wait(1)?;
    let done = ring.completion().next().unwrap();
    answer(done.result().into())
}
