//! Work that may wait: it gets a processor and the disk when nobody else wants them.
#![allow(unsafe_code)]

use std::panic::resume_unwind;

/// `IOPRIO_CLASS_IDLE << IOPRIO_CLASS_SHIFT`, linux/ioprio.h.
const IDLE: libc::c_int = 3 << 13;
/// `IOPRIO_WHO_PROCESS`; 0 is then the calling thread.
const THREAD: libc::c_int = 1;

/// Runs `work` on a thread of its own at the lowest priority of processor and disk, and waits for it. A
/// scheduler that knows no priorities of the disk takes it as any other.
///
/// # Errors
/// No thread can be had.
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> std::io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("background".to_owned()).spawn_scoped(
            scope,
            || {
                // What cannot be lowered is done all the same.
                let _ = rustix::process::setpriority_process(None, 19);
                // SAFETY: it takes three integers and changes the calling thread alone.
                let _ = unsafe { libc::syscall(libc::SYS_ioprio_set, THREAD, 0, IDLE) };
                work()
            },
        )?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_of_lowest_priority_and_its_caller_is_not() {
        let priorities = || {
            // SAFETY: it takes two integers and changes nothing.
            let disk = unsafe { libc::syscall(libc::SYS_ioprio_get, THREAD, 0) };
            (rustix::process::getpriority_process(None).unwrap(), disk)
        };
        let before = priorities();
        assert_eq!(run(priorities).unwrap(), (19, i64::from(IDLE)));
        assert_eq!(priorities(), before);
    }
}
