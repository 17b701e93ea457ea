//! Counters and gauges, `overfence_*`, in base units and without session ids.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::session::{Session, State};
use crate::model::step::Event;
use crate::model::time::BootNs;
use crate::model::workspace::PUBLISH_REFUSALS;
use crate::store::reserve::Space;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByKind {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByFact {
    fact: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Missing {
    fact: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByEffect {
    effect: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByState {
    state: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByOp {
    op: &'static str,
}

/// What can be said of each fact of a fence.
const RESULTS: [(Fact, &str); 9] = [
    (Fact::Gated, "proved"),
    (Fact::Frozen, "proved"),
    (Fact::Frozen, "late"),
    (Fact::ReadOnly, "proved"),
    (Fact::ReadOnly, "busy"),
    (Fact::Sealed, "proved"),
    (Fact::UpperFrozen, "proved"),
    (Fact::Killed, "proved"),
    (Fact::Gone, "proved"),
];

/// The agent's metrics.
pub struct Metrics {
    registry: Registry,
    renewal_failures: Counter,
    refused: Family<ByReason, Counter>,
    requests_refused: Family<ByReason, Counter>,
    unresolved: Family<ByKind, Gauge>,
    layers_damaged: Gauge,
    writes_refused: Family<ByOp, Counter>,
    refusals_lost: Counter,
    fences: Family<ByFact, Counter>,
    effects: Family<ByEffect, Counter>,
    fence_seconds: Histogram,
    foreign_thaws: Counter,
    sessions: Family<ByState, Gauge>,
    missing: Family<Missing, Gauge>,
    active: Gauge,
    preserved_bytes: Gauge,
    free_bytes: Gauge,
    reserve_bytes: Gauge,
    reserve_wanted_bytes: Gauge,
    reconciled: Gauge<f64, AtomicU64>,
    bytes_freed: Counter,
    breaker_open: Gauge,
    breaker_openings: Counter,
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("overfence");
        let renewal_failures = Counter::default();
        registry.register(
            "lease_renewal_failures",
            "Renewals without a good answer",
            renewal_failures.clone(),
        );
        let refused = Family::<ByReason, Counter>::default();
        // There from the start: a series that begins at 1 is no increase, and alerts would miss it.
        for code in PUBLISH_REFUSALS {
            drop(refused.get_or_create(&ByReason { reason: code.as_str() }));
        }
        registry.register(
            "publications_refused",
            "Publications the authority refused",
            Family::clone(&refused),
        );
        let requests_refused = Family::<ByReason, Counter>::default();
        for code in [Code::StaleGeneration, Code::TaskTaken] {
            drop(requests_refused.get_or_create(&ByReason { reason: code.as_str() }));
        }
        registry.register(
            "requests_refused",
            "External requests that were not to be sent",
            Family::clone(&requests_refused),
        );
        let unresolved = Family::<ByKind, Gauge>::default();
        for kind in ["publication", "request"] {
            drop(unresolved.get_or_create(&ByKind { kind }));
        }
        registry.register(
            "unresolved",
            "Publications and external requests without a known outcome",
            Family::clone(&unresolved),
        );
        let layers_damaged = Gauge::default();
        registry.register(
            "layers_damaged",
            "Stored layers that a reading found damaged; they are not mounted",
            layers_damaged.clone(),
        );
        let writes_refused = Family::<ByOp, Counter>::default();
        for op in crate::kernel::gate::ways() {
            drop(writes_refused.get_or_create(&ByOp { op }));
        }
        registry.register(
            "writes_refused",
            "Calls that the lease gate refused: of lost sessions, and mappings denied to any",
            Family::clone(&writes_refused),
        );
        let refusals_lost = Counter::default();
        registry.register(
            "write_refusals_lost",
            "Refusals by the lease gate of this host that were to be told and reached nobody",
            refusals_lost.clone(),
        );
        let fences = Family::<ByFact, Counter>::default();
        for (fact, result) in RESULTS {
            drop(fences.get_or_create(&ByFact { fact: fact.name(), result }));
        }
        registry.register("fences", "Facts of fences by result", Family::clone(&fences));
        let effects = Family::default();
        registry.register("effects", "Effects performed by result", Family::clone(&effects));
        let fence_seconds = Histogram::new(exponential_buckets(0.000_05, 2.0, 18));
        registry.register(
            "fence_seconds",
            "From the passed deadline to the proof of frozen",
            fence_seconds.clone(),
        );
        let foreign_thaws = Counter::default();
        registry.register(
            "foreign_thaws",
            "Fenced sessions thawed by somebody else",
            foreign_thaws.clone(),
        );
        let sessions = Family::default();
        registry.register("sessions", "Sessions by state", Family::clone(&sessions));
        let missing = Family::default();
        registry.register(
            "fences_missing",
            "Lost sessions by the strongest fact that their fence goes for and lacks",
            Family::clone(&missing),
        );
        let active = Gauge::default();
        registry.register("active_writer_leases", "Sessions that hold their lease", active.clone());
        let preserved_bytes = Gauge::default();
        registry.register("preserved_bytes", "Bytes in preserved deltas", preserved_bytes.clone());
        let free_bytes = Gauge::default();
        registry.register(
            "state_free_bytes",
            "What root can still write on the file system of the state directory",
            free_bytes.clone(),
        );
        let reserve_bytes = Gauge::default();
        registry.register(
            "reserve_bytes",
            "Room held back for the agent on a full disk",
            reserve_bytes.clone(),
        );
        let reserve_wanted_bytes = Gauge::default();
        registry.register(
            "reserve_wanted_bytes",
            "Room to hold back for the agent; 0 where none is wanted or can be had",
            reserve_wanted_bytes.clone(),
        );
        let reconciled = Gauge::default();
        registry.register(
            "reconcile_last_success_timestamp_seconds",
            "Wall-clock time of the last complete reconcile",
            reconciled.clone(),
        );
        let bytes_freed = Counter::default();
        registry.register("removed_bytes", "Bytes freed by removals", bytes_freed.clone());
        let breaker_open = Gauge::default();
        registry.register(
            "breaker_open",
            "1 while nothing is killed or removed since leases were lost at large",
            breaker_open.clone(),
        );
        let breaker_openings = Counter::default();
        registry.register(
            "breaker_openings",
            "How often the breaker opened",
            breaker_openings.clone(),
        );
        Self {
            registry,
            renewal_failures,
            refused,
            requests_refused,
            unresolved,
            layers_damaged,
            writes_refused,
            refusals_lost,
            fences,
            effects,
            fence_seconds,
            foreign_thaws,
            sessions,
            missing,
            active,
            preserved_bytes,
            free_bytes,
            reserve_bytes,
            reserve_wanted_bytes,
            reconciled,
            bytes_freed,
            breaker_open,
            breaker_openings,
        }
    }

    /// The breaker opened.
    pub fn breaker_opened(&self) {
        self.breaker_openings.inc();
    }

    /// A renewal that was not granted or not answered.
    pub fn renewal_failed(&self) {
        self.renewal_failures.inc();
    }

    /// A publication that the authority refused.
    pub fn refused(&self, code: Code) {
        self.refused.get_or_create(&ByReason { reason: code.as_str() }).inc();
    }

    /// Calls that the lease gate refused.
    pub fn writes_refused(&self, op: &'static str, n: u64) {
        self.writes_refused.get_or_create(&ByOp { op }).inc_by(n);
    }

    /// Refusals by the lease gate that reached nobody.
    pub fn refusals_lost(&self, n: u64) {
        self.refusals_lost.inc_by(n);
    }

    /// An external request that was not to be sent.
    pub fn request_refused(&self, code: Code) {
        self.requests_refused.get_or_create(&ByReason { reason: code.as_str() }).inc();
    }

    /// How many publications and external requests have no known outcome.
    pub fn unresolved(&self, publications: usize, requests: usize) {
        for (kind, n) in [("publication", publications), ("request", requests)] {
            self.unresolved
                .get_or_create(&ByKind { kind })
                .set(i64::try_from(n).unwrap_or(i64::MAX));
        }
    }

    /// How many layers are damaged.
    pub fn layers_damaged(&self, n: usize) {
        self.layers_damaged.set(i64::try_from(n).unwrap_or(i64::MAX));
    }

    /// An effect that was done or failed.
    pub fn effect(&self, effect: &'static str, ok: bool, _took: Duration) {
        let result = if ok { "ok" } else { "failed" };
        self.effects.get_or_create(&ByEffect { effect, result }).inc();
    }

    /// An event of a session.
    pub fn event(&self, event: &Event, from: State, _to: State) {
        let fact = |fact: Fact, result| {
            self.fences.get_or_create(&ByFact { fact: fact.name(), result }).inc();
        };
        let fenced = matches!(from, State::Fencing | State::Fenced | State::Preserved);
        match event {
            Event::Gated { .. } if fenced => fact(Fact::Gated, "proved"),
            Event::Frozen { .. } if fenced => fact(Fact::Frozen, "proved"),
            Event::FreezeLate { .. } if fenced => fact(Fact::Frozen, "late"),
            Event::ReadOnly { .. } if fenced => fact(Fact::ReadOnly, "proved"),
            Event::Busy { .. } if fenced => fact(Fact::ReadOnly, "busy"),
            Event::Sealed { .. } if fenced => fact(Fact::Sealed, "proved"),
            Event::UpperFrozen { .. } if fenced => fact(Fact::UpperFrozen, "proved"),
            Event::Killed { .. } => fact(Fact::Killed, "proved"),
            Event::Gone { .. } => fact(Fact::Gone, "proved"),
            Event::ForeignThaw { .. } => {
                self.foreign_thaws.inc();
            }
            Event::Removed { bytes, .. } => {
                self.bytes_freed.inc_by(*bytes);
            }
            _ => {}
        }
    }

    /// How long after its deadline a session was proved frozen.
    pub fn fenced_after(&self, s: &Session, deadline: BootNs) {
        if let Some(proof) = s.facts.0.get(&Fact::Frozen) {
            self.fence_seconds.observe(proof.at.since(deadline).as_secs_f64());
        }
    }

    /// After a complete reconcile.
    pub fn reconciled(
        &self,
        states: &BTreeMap<State, u64>,
        missing: &BTreeMap<Fact, u64>,
        preserved_bytes: u64,
    ) {
        for fact in Fact::ALL {
            let n = missing.get(&fact).copied().unwrap_or(0);
            self.missing
                .get_or_create(&Missing { fact: fact.name() })
                .set(i64::try_from(n).unwrap_or(i64::MAX));
        }
        self.sessions.clear();
        for (state, n) in states {
            self.sessions
                .get_or_create(&ByState { state: state.to_string().to_lowercase() })
                .set(i64::try_from(*n).unwrap_or(i64::MAX));
        }
        let holding = [State::Opening, State::Active, State::Releasing];
        let active: u64 = holding.iter().filter_map(|s| states.get(s)).sum();
        self.active.set(i64::try_from(active).unwrap_or(i64::MAX));
        self.preserved_bytes.set(i64::try_from(preserved_bytes).unwrap_or(i64::MAX));
        self.reconciled.set(jiff::Timestamp::now().as_duration().as_secs_f64());
    }

    /// OpenMetrics text.
    pub fn text(&self, space: Space, breaker_open: bool) -> String {
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.breaker_open.set(i64::from(breaker_open));
        self.free_bytes.set(gauge(space.free));
        self.reserve_bytes.set(gauge(space.held));
        self.reserve_wanted_bytes.set(gauge(space.wanted));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SPACE: Space = Space { free: 1, held: 2, wanted: 3, room: true };

    /// The names of what may be asked.
    fn known() -> BTreeSet<String> {
        let metrics = Metrics::new();
        // What has no sample until it happens is not even named before.
        metrics.effect("freeze", true, Duration::ZERO);
        metrics.reconciled(&[(State::Active, 1)].into(), &BTreeMap::new(), 0);
        let mut names = BTreeSet::new();
        for line in metrics.text(SPACE, false).lines() {
            let mut words = line.split(' ');
            if let (Some("#"), Some("TYPE"), Some(name), Some(kind)) =
                (words.next(), words.next(), words.next(), words.next())
            {
                let endings: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                names.extend(endings.iter().map(|ending| format!("{name}{ending}")));
            }
        }
        names
    }

    /// The words of a text that look like metrics.
    fn named(text: &str) -> BTreeSet<String> {
        let word = |c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        let words = text.split(word).filter(|word| word.starts_with("overfence_"));
        words.map(str::to_owned).collect()
    }

    const RULES: &str = include_str!("../../packaging/prometheus/overfence.rules.yml");
    const RULE_TESTS: &str = include_str!("../../packaging/prometheus/overfence.rules.test.yml");
    const OPERATIONS: &str = include_str!("../../docs/OPERATIONS.md");

    #[test]
    fn what_can_be_refused_or_proved_is_there_from_the_start() {
        let text = Metrics::new().text(SPACE, false);
        for line in [
            "overfence_publications_refused_total{reason=\"stale_generation\"} 0",
            "overfence_fences_total{fact=\"read-only\",result=\"busy\"} 0",
            "overfence_fence_seconds_count 0",
            "overfence_reserve_wanted_bytes 3",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line:?} in {text}");
        }
    }

    #[test]
    fn i1_every_refusal_of_a_publication_counts_under_its_reason() {
        let metrics = Metrics::new();
        for (n, code) in PUBLISH_REFUSALS.into_iter().enumerate() {
            for _ in 0..=n {
                metrics.refused(code);
            }
        }
        let text = metrics.text(SPACE, false);
        for (n, code) in PUBLISH_REFUSALS.into_iter().enumerate() {
            let line =
                format!("overfence_publications_refused_total{{reason=\"{code}\"}} {}", n + 1);
            assert!(text.lines().any(|l| l == line), "no {line:?} in {text}");
        }
    }

    #[test]
    fn alerts_ask_for_metrics_that_exist_and_name_what_to_read() {
        let known = known();
        let unknown: Vec<_> = named(RULES).into_iter().filter(|n| !known.contains(n)).collect();
        assert!(unknown.is_empty(), "alert rules ask for {unknown:?}");
        let alerts: Vec<_> = RULES.lines().filter_map(|l| l.split_once("- alert: ")).collect();
        assert!(alerts.len() > 10);
        for (_, alert) in alerts {
            assert!(RULE_TESTS.contains(alert), "{alert} has no test");
            assert!(OPERATIONS.contains(&format!("`{alert}`")), "{alert} is not documented");
        }
        let runbooks = RULES.lines().filter_map(|l| l.trim().strip_prefix("runbook: "));
        for heading in runbooks.map(|text| text.trim_matches('"')) {
            let there = OPERATIONS.lines().any(|l| l.trim_start_matches('#').trim() == heading);
            assert!(there, "no heading {heading:?}");
        }
    }

    #[test]
    fn every_metric_is_documented_and_no_other() {
        let documented = named(OPERATIONS);
        let ended = |name: &String| documented.iter().any(|d| name.starts_with(d.as_str()));
        let silent: Vec<_> = known().into_iter().filter(|name| !ended(name)).collect();
        assert!(silent.is_empty(), "not documented: {silent:?}");
        let known = known();
        let made_up: Vec<_> = documented
            .iter()
            .filter(|d| !known.iter().any(|k| k.starts_with(d.as_str())))
            .collect();
        assert!(made_up.is_empty(), "documented, and do not exist: {made_up:?}");
    }
}
