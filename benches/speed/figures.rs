//! Samples, and how they are printed.

use std::fs;
use std::time::Duration;

/// Times of one thing, ordered.
pub struct Samples(Vec<Duration>);

impl Samples {
    pub fn new(mut all: Vec<Duration>) -> Self {
        assert!(!all.is_empty());
        all.sort_unstable();
        Self(all)
    }

    /// The sample that `percent` of all do not exceed.
    pub fn p(&self, percent: usize) -> Duration {
        self.0[(self.0.len() * percent).div_ceil(100).clamp(1, self.0.len()) - 1]
    }

    pub fn line(&self, what: &str) {
        let [p50, p99, max] = [50, 99, 100].map(|p| text(self.p(p)));
        let n = self.0.len();
        println!("  {what:<58} n={n:<5} p50 {p50:>9}  p99 {p99:>9}  max {max:>9}");
    }
}

/// A time in the unit that fits it.
pub fn text(span: Duration) -> String {
    match span.as_micros() {
        us @ 0..1000 => format!("{us} us"),
        us @ 1000..1_000_000 => format!("{:.2} ms", us as f64 / 1e3),
        us => format!("{:.2} s", us as f64 / 1e6),
    }
}

pub fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

pub fn heading(what: &str) {
    println!("\n{what}   [load {}]", load());
}

/// On what all this is measured.
pub fn machine() {
    let read = |path| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "overfence {} on Linux {}, {cores} core(s), {}, load {}",
        env!("CARGO_PKG_VERSION"),
        read("/proc/sys/kernel/osrelease"),
        jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC"),
        load(),
    );
    println!("a load well below 1 is a quiet machine; latencies of a busy one say little");
}

fn load() -> String {
    let all = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split(' ').next().unwrap_or_default().to_owned()
}
