//! Footer of a list of machines on a terminal: `20 machines, 20 healthy, 1 retired (not shown)`.

use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::get::{MachineListArgs, PHASE_COLUMN};
use crate::object::list::ObjectList;
use model::phase::Phase;
use proto::fleet::v1;
use proto::fleet::v1::statistics_client::StatisticsClient;

/// Phases of machines that need nothing.
pub(crate) const HEALTHY_PHASES: [Phase; 2] = [Phase::Ready, Phase::Installed];

/// A number of machines, or a lower bound of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetiredCount {
    /// Retired machines that were counted.
    pub machines: i64,
    /// Whether there may be more.
    pub is_lower_bound: bool,
}

/// The line below a list of machines. `retired` are those that the list leaves out, if they were counted.
#[must_use]
pub fn machine_footer(list: &ObjectList, retired: Option<RetiredCount>) -> String {
    let phases = list.objects.iter().filter_map(|object| object.rows.first()?.get(PHASE_COLUMN));
    let healthy = phases.filter(|phase| HEALTHY_PHASES.iter().any(|known| known.as_str() == *phase)).count();
    let count = list.objects.len();
    let noun = if count == 1 { "machine" } else { "machines" };
    let retired = match retired {
        Some(RetiredCount { machines, is_lower_bound }) if machines > 0 => {
            format!(", {machines}{} retired (not shown)", if is_lower_bound { "+" } else { "" })
        }
        _ => String::new(),
    };
    format!("{count} {noun}, {healthy} healthy{retired}")
}

/// The number of retired machines that a list with these filters leaves out. `None` if only a list would show it: no
/// statistics exist by location, label or fact.
pub async fn count_retired(
    client: &FleetClient,
    args: &MachineListArgs,
) -> Result<Option<RetiredCount>, CliError> {
    let Some(providers) = args.filters.providers_alone() else { return Ok(None) };
    let result = StatisticsClient::new(client.channel()).get(v1::GetStatisticsRequest {}).await;
    let counts = result.map_err(status_to_error)?.into_inner().counts;
    Ok(Some(sum_retired(&counts, providers)))
}

fn sum_retired(counts: &[v1::PhaseCount], providers: &[String]) -> RetiredCount {
    let retired = counts.iter().filter(|count| {
        count.phase == Phase::Retired.as_str()
            && (providers.is_empty() || providers.contains(&count.provider))
    });
    retired.fold(RetiredCount { machines: 0, is_lower_bound: false }, |sum, count| RetiredCount {
        machines: sum.machines + count.machines,
        is_lower_bound: sum.is_lower_bound || count.is_lower_bound,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::document::ObjectDocument;
    use crate::object::kind::ObjectKind;
    use crate::object::list::{ListedObject, ObjectNames};
    use serde_json::Value;

    fn list(phases: &[&str]) -> ObjectList {
        let objects = phases.iter().map(|phase| {
            let mut row = vec!["x".to_owned(); PHASE_COLUMN];
            row.push((*phase).to_owned());
            ListedObject {
                names: ObjectNames::of_name("x"),
                rows: vec![row],
                document: ObjectDocument::Local(Value::Null),
            }
        });
        let response = ObjectDocument::Local(Value::Null);
        ObjectList::new(ObjectKind::Machine, response, &[], objects.collect())
    }

    #[test]
    fn footer_counts_what_is_shown_and_what_is_not() {
        let retired = |machines, is_lower_bound| Some(RetiredCount { machines, is_lower_bound });
        for (phases, retired, expected) in [
            (&["Ready", "Installed", "Silent"][..], None, "3 machines, 2 healthy"),
            (&["Ready"], retired(0, false), "1 machine, 1 healthy"),
            (&["New"], retired(1, false), "1 machine, 0 healthy, 1 retired (not shown)"),
            (&["New"], retired(100, true), "1 machine, 0 healthy, 100+ retired (not shown)"),
        ] {
            assert_eq!(machine_footer(&list(phases), retired), expected);
        }
    }

    #[test]
    fn retired_machines_of_the_selected_providers_are_counted() {
        let count = |phase: &str, provider: &str, machines, is_lower_bound| v1::PhaseCount {
            phase: phase.to_owned(),
            provider: provider.to_owned(),
            machines,
            is_lower_bound,
        };
        let counts = [
            count("Retired", "a", 2, false),
            count("Retired", "b", 100, true),
            count("Ready", "a", 7, false),
        ];
        for (providers, expected) in [(&[][..], (102, true)), (&["a".to_owned()], (2, false))] {
            let sum = sum_retired(&counts, providers);
            assert_eq!((sum.machines, sum.is_lower_bound), expected, "{providers:?}");
        }
    }
}
