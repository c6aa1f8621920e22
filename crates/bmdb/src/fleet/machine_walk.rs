//! The order of lists of machines: by provider, then by the provider's id, in both with numbers by value (`sim-2` before
//! `sim-10`), then by UUID.
//!
//! A list walks through this order, provider by provider, and a cursor is a place in it. The walk reads what is necessary
//! to choose machines: their UUIDs and phases. [`crate::fleet::listing`] reads the rest of those that are chosen.
//!
//! Two indexes lead through the machines of a provider. `machine_provided_order` has them in the order of lists, in all
//! phases. `machine_due_phase` has them by phase, in the order of their UUIDs. A list of phases with few machines reads
//! all of these by the second and sorts them, instead of passing by all others in the first.
//!
//! The place of a machine does not depend on its phase, so a machine that changes its phase is neither skipped nor
//! repeated by a list that is read meanwhile.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use model::natural_order::compare_names;
use model::phase::Phase;

const OPERATION: &str = "listing machines";
/// Most machines of the selected phases of a provider that are sorted for a page.
const MAX_SORTED: i64 = 1000;
/// Most machines that are read of a phase to sort them. There were at most half as many when the route was chosen, which
/// leaves room for those that have changed since.
const PHASE_BOUND: i64 = 2 * MAX_SORTED;

/// Where a list of machines continues: after this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineCursor {
    /// Provider of the machine; empty for none.
    pub provider: String,
    /// The provider's id of the machine; empty for none.
    pub provider_id: String,
    /// UUID of the machine.
    pub machine: Uuid,
}

impl MachineCursor {
    /// The cursor as text: the UUID, the length of the provider's name in bytes, that name, and the id.
    #[must_use]
    pub fn encode(&self) -> String {
        format!("{}/{}/{}{}", self.machine, self.provider.len(), self.provider, self.provider_id)
    }

    /// Parses the text that [`MachineCursor::encode`] wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (machine, rest) = text.split_once('/')?;
        let (length, names) = rest.split_once('/')?;
        let (provider, provider_id) = names.split_at_checked(length.parse().ok()?)?;
        Some(Self {
            provider: provider.to_owned(),
            provider_id: provider_id.to_owned(),
            machine: Uuid::try_parse(machine).ok()?,
        })
    }
}

/// A machine of a walk.
#[derive(Debug)]
pub(crate) struct WalkedMachine {
    pub(crate) machine_id: Uuid,
    /// `None` for a machine without a provider.
    provider_id: Option<String>,
    /// Phase as it is indexed; `None` for a machine without a schedule.
    phase: Option<String>,
}

/// The machines of one provider, and which of their phases are listed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProviderWalk {
    /// Name of the provider; empty for machines without one.
    provider: String,
    /// Phases that are listed and have a machine.
    phases: Vec<String>,
    /// Whether these are all phases that have a machine.
    is_whole: bool,
}

/// The index that leads through the machines of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkRoute {
    /// By name, through machines in all phases.
    Names,
    /// By phase, through machines in the listed phases alone.
    Phases,
}

impl WalkRoute {
    /// The route on which a page is complete when a phase has this many machines, counted up to [`PHASE_BOUND`]: that by
    /// phase reads no more of it.
    const fn of_phase_size(machines: i64) -> Self {
        if machines < PHASE_BOUND { Self::Phases } else { Self::Names }
    }
}

impl ProviderWalk {
    /// Whether a machine is in a listed phase.
    pub(crate) fn includes(&self, machine: &WalkedMachine) -> bool {
        machine.phase.as_ref().is_some_and(|phase| self.phases.contains(phase))
    }

    /// Cuts a page after the first `most` machines in a listed phase. Returns whether there were more.
    pub(crate) fn cut_surplus(&self, page: &mut Vec<WalkedMachine>, most: usize) -> bool {
        let included = page.iter().enumerate().filter(|(_, one)| self.includes(one));
        let end = included.take(most).last().map_or(0, |(place, _)| place + 1);
        let is_surplus = page[end..].iter().any(|one| self.includes(one));
        if is_surplus {
            page.truncate(end);
        }
        is_surplus
    }

    /// Where to begin; `None` when the list is past the provider.
    pub(crate) fn start(&self, after: Option<&MachineCursor>) -> Option<MachineCursor> {
        let first = MachineCursor { provider: self.provider.clone(), ..MachineCursor::default() };
        let Some(cursor) = after else { return Some(first) };
        match compare_names(&self.provider, &cursor.provider) {
            Ordering::Less => None,
            Ordering::Equal => Some(cursor.clone()),
            Ordering::Greater => Some(first),
        }
    }

    /// The place of a machine of the provider.
    pub(crate) fn place_of(&self, machine: &WalkedMachine) -> MachineCursor {
        MachineCursor {
            provider: self.provider.clone(),
            provider_id: machine.provider_id.clone().unwrap_or_default(),
            machine: machine.machine_id,
        }
    }

    /// Chooses the index with fewer machines to read.
    pub(crate) async fn choose_route(&self, tx: &mut PgConnection) -> Result<WalkRoute, BmdbError> {
        if self.provider.is_empty() {
            return Ok(WalkRoute::Phases);
        }
        if self.is_whole {
            return Ok(WalkRoute::Names);
        }
        let mut machines = 0;
        for phase in &self.phases {
            machines += count_class(tx, (phase, &self.provider), MAX_SORTED + 1 - machines).await?;
            if machines > MAX_SORTED {
                return Ok(WalkRoute::Names);
            }
        }
        Ok(WalkRoute::Phases)
    }

    /// Reads the machines after a place, `limit` at most. If a phase has grown beyond the bound of its route by now, the rest
    /// of the walk takes the route by name: machines beyond the bound would be missing.
    pub(crate) async fn read_page(
        &self,
        tx: &mut PgConnection,
        route: &mut WalkRoute,
        after: &MachineCursor,
        limit: usize,
    ) -> Result<Vec<WalkedMachine>, BmdbError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        if *route == WalkRoute::Phases {
            let page = self.read_phases(tx, after, limit).await?;
            *route = self.recheck_route(tx).await?;
            if *route == WalkRoute::Phases {
                return Ok(page);
            }
        }
        sqlx::query_file_as!(
            WalkedMachine,
            "../../sql/inspect/list_machine_names.sql",
            self.provider,
            after.provider_id,
            after.machine,
            limit
        )
        .fetch_all(tx)
        .await
        .context(OPERATION)
    }

    /// Reads and sorts the machines in the listed phases.
    async fn read_phases(
        &self,
        tx: &mut PgConnection,
        after: &MachineCursor,
        limit: i64,
    ) -> Result<Vec<WalkedMachine>, BmdbError> {
        // Machines without a provider have no ids, so their UUIDs are their order, and the index has a page of it.
        let (above, bound) =
            if self.provider.is_empty() { (after.machine, limit) } else { (Uuid::nil(), PHASE_BOUND) };
        sqlx::query_file_as!(
            WalkedMachine,
            "../../sql/inspect/list_class_names.sql",
            self.provider,
            self.phases.as_slice(),
            above,
            bound,
            after.provider_id,
            after.machine,
            limit
        )
        .fetch_all(tx)
        .await
        .context(OPERATION)
    }

    /// The route on which a page that was just read by phase is complete.
    async fn recheck_route(&self, tx: &mut PgConnection) -> Result<WalkRoute, BmdbError> {
        if self.provider.is_empty() {
            return Ok(WalkRoute::Phases);
        }
        let mut largest = 0;
        for phase in &self.phases {
            largest = largest.max(count_class(tx, (phase, &self.provider), PHASE_BOUND).await?);
        }
        Ok(WalkRoute::of_phase_size(largest))
    }
}

/// The providers with machines of a class that `matches` accepts, in the order of lists. Each class is a phase and a
/// provider.
pub(crate) fn plan_walks(
    classes: Vec<(String, String)>,
    matches: impl Fn(&str, &str) -> bool,
) -> Vec<ProviderWalk> {
    let mut providers: BTreeMap<String, (Vec<String>, bool)> = BTreeMap::new();
    for (phase, provider) in classes {
        let (phases, is_whole) = providers.entry(provider.clone()).or_insert_with(|| (Vec::new(), true));
        if matches(&phase, &provider) {
            phases.push(phase);
        } else {
            *is_whole = false;
        }
    }
    let mut walks: Vec<ProviderWalk> = providers
        .into_iter()
        .filter(|(_, (phases, _))| !phases.is_empty())
        .map(|(provider, (phases, is_whole))| ProviderWalk { provider, phases, is_whole })
        .collect();
    walks.sort_by(|one, other| compare_names(&one.provider, &other.provider));
    walks
}

/// Every (phase, provider) that has a machine, phases in the order of a machine's life. Phases that
/// only a newer release knows come last.
pub async fn list_classes(tx: &mut PgConnection) -> Result<Vec<(String, String)>, BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/inspect/list_classes.sql").fetch_all(tx).await.context(OPERATION)?;
    let mut classes: Vec<(String, String)> =
        rows.into_iter().map(|row| (row.phase_index, row.provider)).collect();
    classes.sort_by_cached_key(|class| (phase_order(&class.0), class.clone()));
    Ok(classes)
}

/// How many machines a class has, counted up to `bound`.
pub async fn count_class(
    tx: &mut PgConnection,
    (phase, provider): (&str, &str),
    bound: i64,
) -> Result<i64, BmdbError> {
    sqlx::query_file_scalar!("../../sql/inspect/count_class.sql", phase, provider, bound)
        .fetch_one(tx)
        .await
        .context(OPERATION)
}

/// Position of a phase in the order of a machine's life.
#[must_use]
fn phase_order(phase: &str) -> usize {
    Phase::ALL.iter().position(|known| known.as_str() == phase).unwrap_or(Phase::ALL.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(provider: &str, provider_id: &str) -> MachineCursor {
        MachineCursor {
            provider: provider.to_owned(),
            provider_id: provider_id.to_owned(),
            machine: Uuid::from_u128(7),
        }
    }

    #[test]
    fn cursor_reads_back_with_any_names() {
        for (provider, provider_id) in
            [("sim", "sim-7"), ("", ""), ("rack/a", "1/2"), ("é", "3/x"), ("7", "")]
        {
            let cursor = cursor(provider, provider_id);
            assert_eq!(MachineCursor::parse(&cursor.encode()), Some(cursor));
        }
        let machine = Uuid::from_u128(7);
        for text in [
            String::new(),
            machine.to_string(),
            format!("{machine}/3"),
            format!("{machine}/9/sim"),
            format!("{machine}/x/sim"),
            format!("{machine}/1/é"),
            "7/3/sim".to_owned(),
        ] {
            assert_eq!(MachineCursor::parse(&text), None, "{text}");
        }
    }

    #[test]
    fn list_continues_after_its_cursor() {
        let walk = |provider: &str| ProviderWalk {
            provider: provider.to_owned(),
            phases: Vec::new(),
            is_whole: true,
        };
        let cursor = cursor("rack-9", "7");
        let first =
            |provider: &str| MachineCursor { provider: provider.to_owned(), ..MachineCursor::default() };
        for (provider, expected) in [
            ("", None),
            ("rack-2", None),
            ("rack-9", Some(cursor.clone())),
            ("rack-10", Some(first("rack-10"))),
            ("sim", Some(first("sim"))),
        ] {
            assert_eq!(walk(provider).start(Some(&cursor)), expected, "{provider}");
            assert_eq!(walk(provider).start(None), Some(first(provider)), "{provider}");
        }
    }

    #[test]
    fn walk_goes_through_providers_with_matching_machines() {
        let classes = [
            ("New", "rack-10"),
            ("Ready", "rack-10"),
            ("Ready", "rack-9"),
            ("Retired", "sim"),
            ("Ready", ""),
        ];
        let classes = classes.map(|(phase, provider)| (phase.to_owned(), provider.to_owned())).to_vec();
        let walks = plan_walks(classes, |phase, _| phase == "Ready");
        let found: Vec<(&str, &[String], bool)> = walks
            .iter()
            .map(|walk| (walk.provider.as_str(), walk.phases.as_slice(), walk.is_whole))
            .collect();
        let ready = ["Ready".to_owned()];
        assert_eq!(found, [("", &ready[..], true), ("rack-9", &ready, true), ("rack-10", &ready, false)]);
        for (phase, expected) in [(Some("Ready"), true), (Some("New"), false), (None, false)] {
            assert_eq!(walks[2].includes(&machine(phase)), expected, "{phase:?}");
        }
    }

    fn machine(phase: Option<&str>) -> WalkedMachine {
        WalkedMachine { machine_id: Uuid::nil(), provider_id: None, phase: phase.map(str::to_owned) }
    }

    #[test]
    fn phase_that_fills_its_bound_is_walked_by_name() {
        for (machines, expected) in [
            (0, WalkRoute::Phases),
            (MAX_SORTED + 1, WalkRoute::Phases),
            (PHASE_BOUND - 1, WalkRoute::Phases),
            // There may be more, which a read by phase would leave out.
            (PHASE_BOUND, WalkRoute::Names),
        ] {
            assert_eq!(WalkRoute::of_phase_size(machines), expected, "{machines}");
        }
    }

    #[test]
    fn page_is_cut_after_the_machines_that_are_needed() {
        let walk =
            ProviderWalk { provider: "sim".to_owned(), phases: vec!["Ready".to_owned()], is_whole: false };
        for (phases, most, expected) in [
            (&["Ready", "Ready", "Ready"][..], 2, (2, true)),
            (&["Ready", "New", "Ready", "New", "Ready"], 2, (3, true)),
            (&["Ready", "New", "Ready", "New"], 2, (4, false)),
            (&["New", "New"], 1, (2, false)),
            (&[], 1, (0, false)),
        ] {
            let mut page: Vec<WalkedMachine> = phases.iter().map(|phase| machine(Some(*phase))).collect();
            let is_surplus = walk.cut_surplus(&mut page, most);
            assert_eq!((page.len(), is_surplus), expected, "{phases:?} {most}");
        }
    }
}
