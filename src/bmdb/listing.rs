//! Lists of machines: which are meant, and where a list goes on.
//!
//! A list goes by phase in the order of a machine's life, then provider, then id, through the index of
//! those three, a page at a time. What the index does not know (a location, a tag, a product) is looked at
//! in the lines of a page, and how many lines are looked at, and for how long, is bounded: a list for which
//! hardly any machine is meant comes in pages with hardly any, and never in a statement that reads the fleet.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use crate::bmdb::audit::understood;
use crate::bmdb::connection::Doing as _;
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::MachineLine;
use crate::bmdb::tags::TagTables;
use crate::model::access::Scope;
use crate::model::label::Wanted;
use crate::model::machine_view::MachineName;
use crate::model::phase::Phase;
use crate::model::time::Timestamp;

const WHAT: &str = "listing machines";
/// Largest page read at once, so that no single statement is long.
const PAGE: usize = 1000;
/// How long a page is looked for: what was found by then is told, instead of nothing because the look took
/// too long (see `look.rs`).
pub const LONG_ENOUGH: Duration = Duration::from_millis(1500);

/// Which machines are meant. What is empty leaves out none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Phases, in any case.
    pub phases: Vec<String>,
    /// Providers.
    pub providers: Vec<String>,
    /// Beginnings of locations.
    pub locations: Vec<String>,
    /// Facts there must all be, by their tables' names without `machine_`.
    pub tags: Vec<String>,
    /// Manufacturers.
    pub manufacturers: Vec<String>,
    /// Products.
    pub products: Vec<String>,
    /// Labels there must all be.
    pub labels: Vec<Wanted>,
}

/// A machine of a list, with what it is filtered by.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    /// The line.
    pub line: MachineLine,
    /// Who made it, as its hardware report says.
    pub manufacturer: Option<String>,
    /// As what.
    pub product: Option<String>,
    /// Whether heartbeats put off what it is due for, without that being written.
    pub timer: bool,
}

/// Where a list of machines goes on: after this machine of this phase and provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Phase.
    pub phase: String,
    /// Provider.
    pub provider: String,
    /// Id.
    pub machine: Uuid,
}

/// When a page is looked for no longer, however few machines were found: after so many lines, or from a
/// moment on. A number alone sets no moment.
#[derive(Clone, Copy, Debug)]
pub struct Enough {
    /// Lines, about.
    pub lines: usize,
    /// The moment.
    pub by: Option<Instant>,
}

impl From<usize> for Enough {
    fn from(lines: usize) -> Self {
        Self { lines, by: None }
    }
}

impl Enough {
    /// So many lines, and [`LONG_ENOUGH`] from now on.
    #[must_use]
    pub fn soon(lines: usize) -> Self {
        Self { lines, by: Some(Instant::now() + LONG_ENOUGH) }
    }

    /// Whether it is enough. What looked at nothing yet goes on, so that each page is further on than the one
    /// before.
    fn is_reached(self, looked_at: usize, now: Instant) -> bool {
        looked_at >= self.lines || (looked_at > 0 && self.by.is_some_and(|by| now >= by))
    }
}

/// A part of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// The machines.
    pub machines: Vec<Listed>,
    /// Where it goes on; `None` at its end.
    pub next: Option<Cursor>,
}

#[derive(Debug)]
struct Row {
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
    timer: bool,
    labels: Option<serde_json::Value>,
    priority: Option<String>,
}

impl From<Row> for Listed {
    fn from(row: Row) -> Self {
        let line = MachineLine {
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
            labels: understood(row.labels),
            priority: row.priority,
        };
        Self { line, manufacturer: row.manufacturer, product: row.product, timer: row.timer }
    }
}

impl Filter {
    /// Whether it leaves out nobody.
    #[must_use]
    pub fn means_everybody(&self) -> bool {
        *self == Self::default()
    }

    /// Whether machines of this phase and provider may be meant.
    #[must_use]
    pub fn wants_class(&self, phase: &str, provider: &str, scope: &Scope) -> bool {
        (self.phases.is_empty() || self.phases.iter().any(|asked| asked.eq_ignore_ascii_case(phase)))
            && (self.providers.is_empty() || self.providers.iter().any(|asked| asked == provider))
            && scope.holds(Some(provider).filter(|provider| !provider.is_empty()))
    }

    /// Whether this machine is meant, its tags aside.
    fn wants(&self, listed: &Listed) -> bool {
        let among = |asked: &[String], found: Option<&String>| {
            asked.is_empty() || found.is_some_and(|found| asked.contains(found))
        };
        let location = listed.line.location.as_deref();
        let located = self.locations.is_empty()
            || location.is_some_and(|at| self.locations.iter().any(|asked| at.starts_with(asked.as_str())));
        located
            && among(&self.manufacturers, listed.manufacturer.as_ref())
            && among(&self.products, listed.product.as_ref())
            && self.labels.iter().all(|wanted| wanted.holds(&listed.line.labels))
    }
}

/// Leaves of `listed` those that are meant.
async fn meant(
    tx: &mut PgConnection,
    filter: &Filter,
    tables: &TagTables,
    mut listed: Vec<Listed>,
) -> Result<Vec<Listed>, BmdbError> {
    listed.retain(|one| filter.wants(one));
    let having = tables.having(tx, listed.iter().map(|one| one.line.name.machine).collect()).await?;
    listed.retain(|one| having.contains(&one.line.name.machine));
    Ok(listed)
}

/// Machines from the one after `after`, `limit` at the most, or fewer when that took `enough`.
pub async fn machines(
    tx: &mut PgConnection,
    filter: &Filter,
    scope: &Scope,
    after: Option<&Cursor>,
    limit: usize,
    enough: impl Into<Enough>,
) -> Result<Page, BmdbError> {
    let enough = enough.into();
    let Some(tables) = TagTables::find(tx, &filter.tags).await? else {
        return Ok(Page { machines: Vec::new(), next: None });
    };
    let (mut found, mut looked_at): (Vec<Listed>, usize) = (Vec::new(), 0);
    // Without more to filter by, each line is meant, and no more need be read than are wanted.
    let exact = filter.locations.is_empty()
        && filter.tags.is_empty()
        && filter.manufacturers.is_empty()
        && filter.products.is_empty()
        && filter.labels.is_empty();
    for (phase, provider) in classes(tx).await? {
        let Some(mut from) =
            start_of(&phase, &provider, after).filter(|_| filter.wants_class(&phase, &provider, scope))
        else {
            continue;
        };
        loop {
            // One more than asked for tells whether there are more.
            let wanted = if exact { (limit + 1 - found.len()).min(PAGE) } else { PAGE };
            let page = of_class(tx, (&phase, &provider), from, wanted).await?;
            let full = page.len() == wanted;
            looked_at += page.len();
            from = page.last().map_or(from, |one| one.line.name.machine);
            found.extend(meant(tx, filter, &tables, page).await?);
            if found.len() > limit {
                found.truncate(limit);
                let next = found.last().map(|one| cursor_of(&one.line));
                return Ok(Page { machines: found, next });
            }
            if enough.is_reached(looked_at, Instant::now()) {
                return Ok(Page { machines: found, next: Some(Cursor { phase, provider, machine: from }) });
            }
            if !full {
                break;
            }
        }
    }
    Ok(Page { machines: found, next: None })
}

/// Those of `machines` that are meant, as lists have them.
pub async fn lines(
    tx: &mut PgConnection,
    filter: &Filter,
    scope: &Scope,
    machines: &[Uuid],
) -> Result<Vec<Listed>, BmdbError> {
    let Some(tables) = TagTables::find(tx, &filter.tags).await? else { return Ok(Vec::new()) };
    let rows = sqlx::query_file_as!(Row, "sql/inspect/list_machines_by_id.sql", machines)
        .fetch_all(&mut *tx)
        .await
        .doing(WHAT)?;
    let mut listed: Vec<Listed> = rows.into_iter().map(Listed::from).collect();
    listed.retain(|one| {
        filter.wants_class(&one.line.phase, one.line.name.provider.as_deref().unwrap_or_default(), scope)
    });
    meant(tx, filter, &tables, listed).await
}

/// Up to when a look at history saw everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Up to the end of what was asked for.
    Now(Timestamp),
    /// Up to this moment: there is more than may be read at once.
    More(Timestamp),
}

/// Machines of which something was written into history from one moment to another.
pub async fn changed(
    tx: &mut PgConnection,
    (from, to): (Timestamp, Timestamp),
    limit: i64,
) -> Result<(Vec<Uuid>, Until), BmdbError> {
    let rows =
        sqlx::query_file!("sql/inspect/list_events.sql", from, to, limit).fetch_all(tx).await.doing(WHAT)?;
    let full = i64::try_from(rows.len()).is_ok_and(|found| found >= limit);
    // Should more than a whole read be of one moment, what is left of that moment is passed over.
    let until = match rows.last() {
        Some(last) if full => Until::More(last.at.max(from)),
        _ => Until::Now(to),
    };
    let mut machines: Vec<Uuid> = rows.into_iter().map(|row| row.machine_id).collect();
    machines.sort_unstable();
    machines.dedup();
    Ok((machines, until))
}

/// Every (phase, provider) that has a machine, phases in the order of a machine's life. Phases that
/// only a newer release knows come last.
pub async fn classes(tx: &mut PgConnection) -> Result<Vec<(String, String)>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_classes.sql").fetch_all(tx).await.doing(WHAT)?;
    let mut classes: Vec<(String, String)> =
        rows.into_iter().map(|row| (row.phase_index, row.provider)).collect();
    classes.sort_by_cached_key(|class| (order_of(&class.0), class.clone()));
    Ok(classes)
}

/// How many machines a class has, counted up to `bound`.
pub async fn count(
    tx: &mut PgConnection,
    (phase, provider): (&str, &str),
    bound: i64,
) -> Result<i64, BmdbError> {
    sqlx::query_file_scalar!("sql/inspect/count_class.sql", phase, provider, bound)
        .fetch_one(tx)
        .await
        .doing(WHAT)
}

/// Where a phase stands in lists.
#[must_use]
pub fn order_of(phase: &str) -> usize {
    Phase::ALL.iter().position(|known| known.as_str() == phase).unwrap_or(Phase::ALL.len())
}

/// A page of the machines of one phase and provider, from the one after `after`.
async fn of_class(
    tx: &mut PgConnection,
    (phase, provider): (&str, &str),
    after: Uuid,
    limit: usize,
) -> Result<Vec<Listed>, BmdbError> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = sqlx::query_file_as!(Row, "sql/inspect/list_machines.sql", phase, provider, after, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows.into_iter().map(Listed::from).collect())
}

/// Where to begin in a class, or `None` when the list has passed it.
fn start_of(phase: &str, provider: &str, after: Option<&Cursor>) -> Option<Uuid> {
    let Some(cursor) = after else { return Some(Uuid::nil()) };
    let class = (order_of(phase), phase, provider);
    match class.cmp(&(order_of(&cursor.phase), cursor.phase.as_str(), cursor.provider.as_str())) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => Some(cursor.machine),
        std::cmp::Ordering::Greater => Some(Uuid::nil()),
    }
}

fn cursor_of(line: &MachineLine) -> Cursor {
    Cursor {
        phase: line.phase.clone(),
        provider: line.name.provider.clone().unwrap_or_default(),
        machine: line.name.machine,
    }
}

impl Cursor {
    /// The cursor as text, for people to go on with.
    #[must_use]
    pub fn write(&self) -> String {
        format!("{}/{}/{}", self.phase, self.provider, self.machine)
    }

    /// Reads what [`Cursor::write`] wrote. A provider's name may hold anything, the other two parts no slash.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let (phase, rest) = text.split_once('/')?;
        let (provider, machine) = rest.rsplit_once('/')?;
        let machine = Uuid::try_parse(machine).ok()?;
        Some(Self { phase: phase.to_owned(), provider: provider.to_owned(), machine })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_reads_back_whatever_the_provider_is_called() {
        let machine = Uuid::from_u128(7);
        for provider in ["sim", "", "rack/a", "é"] {
            let cursor = Cursor { phase: "Ready".into(), provider: provider.into(), machine };
            assert_eq!(Cursor::read(&cursor.write()), Some(cursor));
        }
        for text in ["", "Ready", "Ready/sim", "Ready/sim/7"] {
            assert_eq!(Cursor::read(text), None, "{text}");
        }
    }

    #[test]
    fn list_goes_on_after_its_cursor() {
        let machine = Uuid::from_u128(7);
        let cursor = Cursor { phase: "Provided".into(), provider: "b".into(), machine };
        for (phase, provider, expected) in [
            ("New", "z", None),
            ("Provided", "a", None),
            ("Provided", "b", Some(machine)),
            ("Provided", "c", Some(Uuid::nil())),
            ("Ready", "a", Some(Uuid::nil())),
            ("AsYetUnknown", "a", Some(Uuid::nil())),
        ] {
            assert_eq!(start_of(phase, provider, Some(&cursor)), expected, "{phase} {provider}");
        }
        assert_eq!(start_of("New", "a", None), Some(Uuid::nil()));
    }

    #[test]
    fn page_ends_where_it_is_enough_and_further_on_than_it_began() {
        let now = Instant::now();
        let later = now + LONG_ENOUGH;
        for (by, looked_at, reached) in [
            (None, 0, false),
            (None, 99, false),
            (None, 100, true),
            (Some(later), 99, false),
            (Some(later), 100, true),
            (Some(now), 0, false),
            (Some(now), 1, true),
        ] {
            let enough = Enough { lines: 100, by };
            assert_eq!(enough.is_reached(looked_at, now), reached, "{enough:?} {looked_at}");
        }
    }

    #[test]
    fn filter_leaves_out_whole_classes() {
        let filter =
            Filter { phases: vec!["ready".into()], providers: vec!["a".into()], ..Filter::default() };
        let only_b = Scope::of(["b".to_owned()]);
        for (phase, provider, scope, wanted) in [
            ("Ready", "a", &Scope::Everything, true),
            ("Ready", "b", &Scope::Everything, false),
            ("New", "a", &Scope::Everything, false),
            ("Ready", "a", &only_b, false),
        ] {
            assert_eq!(filter.wants_class(phase, provider, scope), wanted, "{phase} {provider} {scope:?}");
        }
        assert!(
            !Filter::default().wants_class("Ready", "", &only_b),
            "a machine of no provider is the fleet's"
        );
    }
}
