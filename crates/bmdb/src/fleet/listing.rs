//! Listing machines by selector, in pages with a cursor.
//!
//! The order is that of [`crate::fleet::machine_walk`], which reads a page of machines with their phases from an index. The
//! other facts of those in a listed phase are then read by UUID, and a location, a fact or a product is checked in them. How
//! many machines are checked, and for how long, is bounded: a list that hardly any machine matches comes in pages with
//! hardly any machine, and never in a statement that reads the fleet.

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;
use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::fleet::machine_walk::{MachineCursor, list_classes, plan_walks};
use crate::machine::selector_values::{SEPARATE_KEYS, SelectorReads};
use crate::machine::traits::{hardware_from_columns, parse_labels};
use model::access::AccessScope;
use model::label::Labels;
use model::machine_view::MachineName;
use model::phase::Phase;
use model::selector::Selector;
use model::selector::traits::{Hardware, MachineTraits, NO_FACTS};
use model::time::Timestamp;

const OPERATION: &str = "listing machines";
/// Largest page read at once, so that no single statement is long.
const PAGE_SIZE: usize = 1000;
/// How long a page is searched for. The machines found by then are returned, instead of nothing because the read took
/// too long (see `connection/read_pool.rs`).
const PAGE_TIME_LIMIT: Duration = Duration::from_millis(1500);

/// Selects machines. The default selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// The terms that machines must meet.
    pub selector: Selector,
    /// Whether retired machines are left out. It does not count if the selector names that phase.
    pub omit_retired: bool,
}

/// A machine in the list of machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineSummary {
    /// Names of the machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// Phase as it is indexed.
    pub phase: String,
    /// Since when it is in that phase.
    pub phase_since: Timestamp,
    /// Host name or IP literal.
    pub address: Option<String>,
    /// Location as its provider names it; `None` if unknown.
    pub location: Option<String>,
    /// When its agent last reported.
    pub heartbeat_at: Option<Timestamp>,
    /// The process being worked on in the access lane now.
    pub working: Option<String>,
    /// The process it is due for next in the access lane; `null` when nothing is scheduled.
    pub process: Option<String>,
    /// When that process is due; for a healthy machine a lower bound.
    pub ready_at: Option<Timestamp>,
    /// Why that process, and why not earlier.
    pub reason: String,
    /// Labels that operators set.
    pub labels: Labels,
    /// `urgent` or `low`, where an operator put its work before or behind that of others.
    pub priority: Option<String>,
    /// Name of the cluster that it belongs to.
    pub cluster: Option<String>,
    /// The hold on it that is in force.
    pub hold: Option<HoldSummary>,
}

/// A hold on a machine of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HoldSummary {
    /// What the hold stops: `everything`, `power` or `recovery`.
    pub scope: String,
    /// Reason that the operator gave.
    pub reason: String,
    /// Operator who holds the machine.
    pub held_by: String,
    /// When it ends by itself; `None` for never.
    pub until: Option<Timestamp>,
}

/// A machine of a list, with the values it is filtered by.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedMachine {
    /// The machine as lists show it.
    pub summary: MachineSummary,
    /// Its hardware, as its report has it.
    pub hardware: Hardware,
    /// Whether heartbeats postpone its due time without a write.
    pub timer: bool,
}

/// When the search for a page ends, however few machines were found: after a number of rows, or at a moment. A number
/// alone sets no moment.
#[derive(Clone, Copy, Debug)]
pub struct PageBudget {
    /// About how many rows are read.
    pub lines: usize,
    /// The moment, if there is one.
    pub deadline: Option<Instant>,
}

impl From<usize> for PageBudget {
    fn from(lines: usize) -> Self {
        Self { lines, deadline: None }
    }
}

impl PageBudget {
    /// A budget of this many rows, and of `PAGE_TIME_LIMIT` from now on.
    #[must_use]
    pub fn with_time_limit(lines: usize) -> Self {
        Self { lines, deadline: Some(Instant::now() + PAGE_TIME_LIMIT) }
    }

    /// Whether the search ends. A search that has read nothing yet continues, so that each page is further on than the
    /// one before.
    fn is_exhausted(self, looked_at: usize, now: Instant) -> bool {
        looked_at >= self.lines || (looked_at > 0 && self.deadline.is_some_and(|by| now >= by))
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct MachinePage {
    /// Machines that match the filter.
    pub machines: Vec<ListedMachine>,
    /// Where the next page begins; `None` at the end of the list.
    pub next: Option<MachineCursor>,
}

#[derive(Debug)]
struct ListedMachineRow {
    machine_id: Uuid,
    provider: String,
    provider_id: Option<String>,
    address: Option<String>,
    location: Option<String>,
    phase: String,
    phase_since: Timestamp,
    heartbeat_at: Option<Timestamp>,
    working: Option<String>,
    process: Option<String>,
    ready_at: Option<Timestamp>,
    reason: String,
    manufacturer: Option<String>,
    product: Option<String>,
    memory_bytes: Option<i64>,
    cpu_threads: Option<i64>,
    timer: bool,
    labels: Option<serde_json::Value>,
    priority: Option<String>,
    cluster: Option<String>,
    hold_scope: Option<String>,
    hold_reason: Option<String>,
    hold_by: Option<String>,
    hold_until: Option<Timestamp>,
}

impl From<ListedMachineRow> for ListedMachine {
    fn from(row: ListedMachineRow) -> Self {
        let line = MachineSummary {
            name: MachineName {
                machine: row.machine_id,
                provider: Some(row.provider).filter(|provider| !provider.is_empty()),
                provider_id: row.provider_id,
            },
            phase: row.phase,
            phase_since: row.phase_since,
            address: row.address,
            location: row.location,
            heartbeat_at: row.heartbeat_at,
            working: row.working,
            process: row.process,
            ready_at: row.ready_at,
            reason: row.reason,
            labels: parse_labels(row.labels),
            priority: row.priority,
            cluster: row.cluster,
            hold: row.hold_scope.map(|scope| HoldSummary {
                scope,
                reason: row.hold_reason.unwrap_or_default(),
                held_by: row.hold_by.unwrap_or_default(),
                until: row.hold_until,
            }),
        };
        let hardware =
            hardware_from_columns(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads);
        Self { summary: line, hardware, timer: row.timer }
    }
}

impl ListedMachine {
    /// What a selector sees of the machine, without its facts and its cluster.
    fn traits(&self) -> MachineTraits<'_> {
        let line = &self.summary;
        MachineTraits {
            provider: line.name.provider.as_deref(),
            provider_id: line.name.provider_id.as_deref(),
            location: line.location.as_deref(),
            hardware: &self.hardware,
            labels: &line.labels,
            phase: Some(&line.phase),
            cluster: None,
            facts: &NO_FACTS,
            known_facts: &NO_FACTS,
        }
    }
}

impl Filter {
    /// Whether no term excludes a machine.
    #[must_use]
    pub(crate) const fn is_unrestricted(&self) -> bool {
        self.selector.is_empty()
    }

    /// Whether machines of this phase and provider may match.
    #[must_use]
    fn matches_class(&self, phase: &str, provider: &str, scope: &AccessScope) -> bool {
        let provider = Some(provider).filter(|provider| !provider.is_empty());
        let is_left_out = self.omit_retired
            && phase == Phase::Retired.as_str()
            && !self.selector.names_phase(Phase::Retired);
        !is_left_out && self.selector.matches_class(phase, provider) && scope.includes_provider(provider)
    }
}

/// Retains the machines of `listed` that match.
async fn filter_machines(
    tx: &mut PgConnection,
    filter: &Filter,
    reads: &SelectorReads,
    mut listed: Vec<ListedMachine>,
) -> Result<Vec<ListedMachine>, BmdbError> {
    let selector = &filter.selector;
    listed.retain(|one| selector.matches_besides(&one.traits(), &SEPARATE_KEYS));
    let machines: Vec<Uuid> = listed.iter().map(|one| one.summary.name.machine).collect();
    let values = reads.read(tx, &machines).await?;
    listed.retain(|one| selector.matches(&values.complete(one.summary.name.machine, one.traits())));
    Ok(listed)
}

/// Machines after `after`: `limit` at most, or fewer when the budget `enough` is used up.
pub async fn list_machines(
    tx: &mut PgConnection,
    filter: &Filter,
    scope: &AccessScope,
    after: Option<&MachineCursor>,
    limit: usize,
    enough: impl Into<PageBudget>,
) -> Result<MachinePage, BmdbError> {
    let enough = enough.into();
    let reads = SelectorReads::resolve(tx, &filter.selector).await?;
    let (mut found, mut looked_at): (Vec<ListedMachine>, usize) = (Vec::new(), 0);
    // Without more to filter by, each row matches, and no more need be read than are wanted.
    let exact = filter.selector.is_about_class_alone();
    let matches = |phase: &str, provider: &str| filter.matches_class(phase, provider, scope);
    for walk in plan_walks(list_classes(tx).await?, matches) {
        let Some(mut from) = walk.start(after) else { continue };
        let mut route = walk.choose_route(tx).await?;
        let mut size = 0;
        loop {
            // One more than requested shows whether there are more. Where machines in other phases lie between, each page
            // is twice as long as the one before.
            let missing = limit + 1 - found.len();
            size = if exact { missing.max(2 * size).min(PAGE_SIZE) } else { PAGE_SIZE };
            let mut page = walk.read_page(tx, &mut route, &from, size).await?;
            let mut full = page.len() == size;
            looked_at += page.len();
            if exact {
                full |= walk.cut_surplus(&mut page, missing);
            }
            if let Some(last) = page.last() {
                from = walk.place_of(last);
            }
            let selected: Vec<Uuid> =
                page.iter().filter(|one| walk.includes(one)).map(|one| one.machine_id).collect();
            found.extend(read_matching(tx, filter, scope, &reads, &selected).await?);
            if found.len() > limit {
                found.truncate(limit);
                let next = found.last().map(|one| cursor_after(&one.summary));
                return Ok(MachinePage { machines: found, next });
            }
            if enough.is_exhausted(looked_at, Instant::now()) {
                return Ok(MachinePage { machines: found, next: Some(from) });
            }
            if !full {
                break;
            }
        }
    }
    Ok(MachinePage { machines: found, next: None })
}

/// Those of `machines` that match, as lists have them, each once and in the order of `machines`.
pub async fn list_machines_by_id(
    tx: &mut PgConnection,
    filter: &Filter,
    scope: &AccessScope,
    machines: &[Uuid],
) -> Result<Vec<ListedMachine>, BmdbError> {
    let reads = SelectorReads::resolve(tx, &filter.selector).await?;
    read_matching(tx, filter, scope, &reads, machines).await
}

/// Reads those of `machines` that match, in the same order.
async fn read_matching(
    tx: &mut PgConnection,
    filter: &Filter,
    scope: &AccessScope,
    reads: &SelectorReads,
    machines: &[Uuid],
) -> Result<Vec<ListedMachine>, BmdbError> {
    if machines.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query_file_as!(ListedMachineRow, "../../sql/inspect/list_machines_by_id.sql", machines)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let mut read: HashMap<Uuid, ListedMachine> =
        rows.into_iter().map(|row| (row.machine_id, ListedMachine::from(row))).collect();
    let mut listed: Vec<ListedMachine> = machines.iter().filter_map(|machine| read.remove(machine)).collect();
    // A machine may have changed its phase since the walk.
    listed.retain(|one| {
        filter.matches_class(
            &one.summary.phase,
            one.summary.name.provider.as_deref().unwrap_or_default(),
            scope,
        )
    });
    filter_machines(tx, filter, reads, listed).await
}

/// Until when a read of history was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangesUntil {
    /// Until the end of the requested time.
    Complete(Timestamp),
    /// Until this moment: there is more than may be read at once.
    Truncated(Timestamp),
}

/// Machines with a line of history between two moments.
pub async fn list_changed_machines(
    tx: &mut PgConnection,
    (from, to): (Timestamp, Timestamp),
    limit: i64,
) -> Result<(Vec<Uuid>, ChangesUntil), BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_events.sql", from, to, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    let full = i64::try_from(rows.len()).is_ok_and(|found| found >= limit);
    // If a single moment has more lines than one read returns, the rest of that moment is skipped.
    let until = match rows.last() {
        Some(last) if full => ChangesUntil::Truncated(last.at.max(from)),
        _ => ChangesUntil::Complete(to),
    };
    let mut machines: Vec<Uuid> = rows.into_iter().map(|row| row.machine_id).collect();
    machines.sort_unstable();
    machines.dedup();
    Ok((machines, until))
}

/// The place of a machine in the order of lists.
fn cursor_after(line: &MachineSummary) -> MachineCursor {
    MachineCursor {
        provider: line.name.provider.clone().unwrap_or_default(),
        provider_id: line.name.provider_id.clone().unwrap_or_default(),
        machine: line.name.machine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_ends_when_its_budget_is_exhausted_and_makes_progress() {
        let now = Instant::now();
        let later = now + PAGE_TIME_LIMIT;
        for (by, looked_at, reached) in [
            (None, 0, false),
            (None, 99, false),
            (None, 100, true),
            (Some(later), 99, false),
            (Some(later), 100, true),
            (Some(now), 0, false),
            (Some(now), 1, true),
        ] {
            let enough = PageBudget { lines: 100, deadline: by };
            assert_eq!(enough.is_exhausted(looked_at, now), reached, "{enough:?} {looked_at}");
        }
    }

    #[test]
    fn selector_without_terms_excludes_no_machine() {
        for (text, expected) in [("", true), (" , ,", true), ("name=*", false), ("label.row", false)] {
            let filter = Filter { selector: text.parse().unwrap(), omit_retired: false };
            assert_eq!(filter.is_unrestricted(), expected, "{text}");
        }
    }

    #[test]
    fn filter_leaves_out_whole_classes() {
        let filter = |text: &str| Filter { selector: text.parse().unwrap(), omit_retired: false };
        let of_class = filter("phase=ready,provider=a,location=ams*");
        let only_b = AccessScope::from_providers(["b".to_owned()]);
        for (phase, provider, scope, wanted) in [
            ("Ready", "a", &AccessScope::Fleet, true),
            ("Ready", "b", &AccessScope::Fleet, false),
            ("New", "a", &AccessScope::Fleet, false),
            ("Ready", "a", &only_b, false),
        ] {
            assert_eq!(
                of_class.matches_class(phase, provider, scope),
                wanted,
                "{phase} {provider} {scope:?}"
            );
        }
        let present = Filter { omit_retired: true, ..Filter::default() };
        let retired = Filter { omit_retired: true, ..filter("phase=retired") };
        let others = Filter { omit_retired: true, ..filter("phase!=Ready") };
        for (filter, phase, wanted) in [
            (&Filter::default(), "Retired", true),
            (&present, "Retired", false),
            (&present, "Retiring", true),
            (&present, "AsYetUnknown", true),
            (&retired, "Retired", true),
            (&retired, "Ready", false),
            (&others, "Retired", false),
            (&others, "Retiring", true),
        ] {
            assert_eq!(filter.matches_class(phase, "a", &AccessScope::Fleet), wanted, "{phase} {filter:?}");
        }
        assert!(
            !Filter::default().matches_class("Ready", "", &only_b),
            "a machine of no provider is the fleet's"
        );
    }
}
