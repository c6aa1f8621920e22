//! `wait KIND [NAME…] --for CONDITION`: wait until objects meet a condition.
//!
//! The objects are selected once. A name that no object has is an error at once, with one exception: a cluster that
//! does not exist is deleted.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::machine::fetch::fetch_machine_pages;
use crate::machine::named::fetch_named_machines;
use crate::machine::selection::MachineFilters;
use crate::object::command::GetArgs;
use crate::object::get::print_objects;
use crate::object::kind::ObjectKind;
use crate::object::list::{ListedObject, ObjectList, ObjectNames};
use crate::order::expiry::encode_timestamp;
use crate::output::{Format, Output, unresolved_error};
use crate::target_flags::TargetFlags;
use crate::wait::condition::{ClusterGoal, MachineGoal, WaitGoal, describe_missing_condition};
use crate::wait::fetch::Subject;
use crate::wait::follow::{MetObjects, WaitReport, Waiting, follow_objects};
use model::time::Span;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;
use proto::fleet::v1::updates_client::UpdatesClient;

pub(crate) const WAIT_EXAMPLES: &str = "\
Examples:
  shepherdctl wait machine sim-0007 --for phase=Ready --timeout 10m
  shepherdctl wait machines -l label.row=7 --for healthy
  shepherdctl wait cluster prod --for ready && shepherdctl describe cluster prod
  shepherdctl wait update 3f9a12bc --for finished --timeout 2h";

const WAIT_MACHINES_EXAMPLES: &str = "\
Examples:
  shepherdctl wait machines sim-0007 sim-0008 --for phase=Ready
  shepherdctl wait machines -l label.row=7 --for healthy --timeout 30m
  shepherdctl wait machines sim-0007 --for retired

phase=PHASE is met in that phase, healthy in Ready and Installed, retired when only the record remains.";

const WAIT_CLUSTERS_EXAMPLES: &str = "\
Examples:
  shepherdctl wait clusters prod --for ready
  shepherdctl wait clusters prod --for deleted --timeout 1h

ready is met when the cluster has its desired machines, has converged, and is not being upgraded.";

const WAIT_UPDATES_EXAMPLES: &str = "\
Examples:
  shepherdctl wait updates 3f9a12bc --for finished --timeout 2h

An update that is paused is waited for, because it may be resumed.";

/// Arguments of `wait`: the condition, the kind and the objects.
#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Condition to wait for, for example phase=Ready, healthy, retired, ready, deleted or finished
    #[arg(long = "for", value_name = "CONDITION", global = true)]
    pub condition: Option<String>,
    /// How long to wait; 0 checks once
    #[arg(long, value_name = "SPAN", default_value = "5m", global = true)]
    pub timeout: Span,
    /// Kind of the objects
    #[command(subcommand)]
    pub objects: WaitObjects,
}

/// The objects that `wait` is about, by kind.
#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "a process has one")]
pub enum WaitObjects {
    /// Wait until machines are in a phase, healthy or retired
    #[command(visible_alias = "machine", after_help = WAIT_MACHINES_EXAMPLES)]
    Machines(WaitMachines),
    /// Wait until clusters are ready or deleted
    #[command(visible_alias = "cluster", after_help = WAIT_CLUSTERS_EXAMPLES)]
    Clusters(WaitNames),
    /// Wait until updates have finished
    #[command(visible_alias = "update", after_help = WAIT_UPDATES_EXAMPLES)]
    Updates(WaitNames),
}

/// Arguments of `wait machines`: names, or filters.
#[derive(Debug, Args)]
pub struct WaitMachines {
    /// Machines to wait for, each by its UUID or the beginning of it, its provider's id, or PROVIDER/ID; omit them to
    /// select by filters
    #[arg(
        value_name = "M",
        conflicts_with = "MachineFilters",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub names: Vec<String>,
    /// Filters that select the machines, once.
    #[command(flatten)]
    pub filters: MachineFilters,
}

/// Arguments of `wait` for other kinds: names.
#[derive(Debug, Args)]
pub struct WaitNames {
    /// Names of the objects to wait for, as `get` lists them; omit them to wait for all
    #[arg(value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub names: Vec<String>,
}

impl WaitArgs {
    /// The goal that the condition names. The error is that of a wrong command.
    pub fn parse_goal(&self) -> Result<WaitGoal, CliError> {
        let kind = match self.objects {
            WaitObjects::Machines(_) => ObjectKind::Machine,
            WaitObjects::Clusters(_) => ObjectKind::Cluster,
            WaitObjects::Updates(_) => ObjectKind::Update,
        };
        let condition =
            self.condition.as_deref().ok_or_else(|| CliError::Invalid(describe_missing_condition()))?;
        WaitGoal::parse(kind, condition).map_err(|error| CliError::Invalid(format!("--for: {error}")))
    }

    fn names(&self) -> &[String] {
        match &self.objects {
            WaitObjects::Machines(machines) => &machines.names,
            WaitObjects::Clusters(named) | WaitObjects::Updates(named) => &named.names,
        }
    }
}

/// Runs `wait`, and returns the objects in the output of the command line. People read each object when it has met the
/// condition, so for them nothing is left.
pub(crate) async fn run_wait_command(context: &CommandContext, args: &WaitArgs) -> Result<String, CliError> {
    let goal = args.parse_goal()?;
    let client = &context.client;
    let names_report = ReportOptions { output: &context.output, target_flags: &context.target_flags };
    let subjects = match &args.objects {
        WaitObjects::Machines(machines) if machines.names.is_empty() => {
            select_machines(client, &machines.filters, goal).await?
        }
        WaitObjects::Machines(machines) => find_machines(client, &machines.names, names_report).await?,
        WaitObjects::Clusters(named) => find_clusters(client, &named.names, goal, names_report).await?,
        WaitObjects::Updates(named) => find_updates(client, &named.names, names_report).await?,
    };
    if subjects.is_empty() {
        let message = format!("no {} is selected, so there is nothing to wait for", goal.kind().row().noun);
        return Err(CliError::Ended { exit: ExitCode::NotFound, message });
    }
    let report = if context.format == Format::Table { WaitReport::Met } else { WaitReport::Silent };
    let waiting = Waiting {
        goal,
        subjects,
        timeout: args.timeout.0,
        report,
        colors: context.colors,
        target_flags: context.target_flags.clone(),
    };
    let met = follow_objects(client, waiting).await?;
    if report == WaitReport::Met {
        return Ok(String::new());
    }
    print_met_objects(context, args, goal.kind(), met)
}

/// The objects as `get` prints them.
fn print_met_objects(
    context: &CommandContext,
    args: &WaitArgs,
    kind: ObjectKind,
    met: MetObjects,
) -> Result<String, CliError> {
    let read_at = Some(encode_timestamp(met.now));
    let objects = met.objects.into_iter().filter_map(|object| {
        Some(ListedObject {
            names: ObjectNames::of_name(object.name),
            rows: Vec::new(),
            document: object.document?,
        })
    });
    let objects = objects.collect();
    let list = match kind {
        ObjectKind::Cluster => {
            let response = v1::ListClustersResponse { read_at, ..v1::ListClustersResponse::default() };
            ObjectList::of_response(kind, &response, &[], objects)
        }
        ObjectKind::Update => {
            let response = v1::ListUpdatesResponse { read_at, ..v1::ListUpdatesResponse::default() };
            ObjectList::of_response(kind, &response, &[], objects)
        }
        _ => {
            let response = v1::ListMachinesResponse { read_at, ..v1::ListMachinesResponse::default() };
            ObjectList::of_response(kind, &response, &[], objects)
        }
    };
    // They are selected already.
    let list = ObjectList { unresolved: Some(Vec::new()), ..list };
    let args = GetArgs { names: args.names().to_vec(), ..GetArgs::default() };
    print_objects(list, &args, &context.output, &context.exit_record, &context.target_flags)
}

/// How problems with names are reported.
#[derive(Clone, Copy)]
struct ReportOptions<'a> {
    output: &'a Output,
    /// The flags that name the fleet, for commands in messages.
    target_flags: &'a TargetFlags,
}

/// An error if there are problems with names.
fn require_resolved(problems: &[String], report: ReportOptions<'_>) -> Result<(), CliError> {
    unresolved_error(problems, report.output, report.target_flags).map_or(Ok(()), Err)
}

async fn find_machines(
    client: &FleetClient,
    names: &[String],
    report: ReportOptions<'_>,
) -> Result<Vec<Subject>, CliError> {
    let named = fetch_named_machines(client, names).await?;
    require_resolved(&named.unresolved, report)?;
    named.machines.into_iter().map(decode_subject).collect()
}

/// The machines that match the filters now. Retired ones only if a filter or the goal names their phase.
async fn select_machines(
    client: &FleetClient,
    filters: &MachineFilters,
    goal: WaitGoal,
) -> Result<Vec<Subject>, CliError> {
    let waits_for_retired = goal == WaitGoal::Machine(MachineGoal::Retired);
    let request = v1::ListMachinesRequest {
        selector: filters.selector_text(),
        omit_retired: !waits_for_retired && !filters.selects_retired(),
        ..v1::ListMachinesRequest::default()
    };
    let pages = fetch_machine_pages(client, request, None, usize::MAX, |response| {
        std::mem::take(&mut response.machines).into_iter().map(decode_subject).collect()
    })
    .await?;
    Ok(pages.lines)
}

fn decode_subject(machine: v1::Machine) -> Result<Subject, CliError> {
    let name = decode_machine_name(machine.name)?;
    Ok(Subject::new(name.machine.to_string(), name.short_name()))
}

/// The clusters of these names, or all of them.
async fn find_clusters(
    client: &FleetClient,
    names: &[String],
    goal: WaitGoal,
    report: ReportOptions<'_>,
) -> Result<Vec<Subject>, CliError> {
    let request = v1::ListClustersRequest { name: String::new() };
    let result = ClustersClient::new(client.channel()).list(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let found = response.clusters.into_iter().map(|cluster| Subject::new(cluster.id, cluster.name)).collect();
    let may_be_absent = goal == WaitGoal::Cluster(ClusterGoal::Deleted);
    select_subjects(found, names, ObjectKind::Cluster, may_be_absent, report)
}

/// The updates with these ids, or all that are under way.
async fn find_updates(
    client: &FleetClient,
    names: &[String],
    report: ReportOptions<'_>,
) -> Result<Vec<Subject>, CliError> {
    let request = v1::ListUpdatesRequest { id: String::new() };
    let result = UpdatesClient::new(client.channel()).list(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let updates = response.updates.into_iter();
    let selected = updates.filter(|update| !names.is_empty() || update.outcome.is_none());
    let found = selected.map(|update| Subject::new(update.id.clone(), update.id)).collect();
    select_subjects(found, names, ObjectKind::Update, false, report)
}

/// Those of `found` that have one of the names or ids, each once, or all of them. With `may_be_absent`, a name that
/// none has is one of a cluster that does not exist.
fn select_subjects(
    found: Vec<Subject>,
    names: &[String],
    kind: ObjectKind,
    may_be_absent: bool,
    report: ReportOptions<'_>,
) -> Result<Vec<Subject>, CliError> {
    if names.is_empty() {
        return Ok(found);
    }
    let (mut subjects, mut problems): (Vec<Subject>, Vec<String>) = (Vec::new(), Vec::new());
    for name in names {
        let has_name = |subject: &&Subject| subject.name == *name || subject.id.as_ref() == Some(name);
        match found.iter().find(has_name) {
            Some(subject) if subjects.iter().any(|known| known.name == subject.name) => {}
            Some(subject) => subjects.push(subject.clone()),
            None if may_be_absent => subjects.push(Subject::cluster(name)),
            None => {
                let row = kind.row();
                problems
                    .push(format!("there is no {} {name:?}; run: shepherdctl get {}", row.noun, row.plural));
            }
        }
    }
    require_resolved(&problems, report)?;
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Cli, Command, FleetCommand, grammar};
    use clap::FromArgMatches as _;

    fn parse(line: &[&str]) -> Option<WaitArgs> {
        let line = ["shepherdctl"].iter().chain(line);
        let parsed = grammar().try_get_matches_from(line).ok()?;
        match Cli::from_arg_matches(&parsed).ok()?.command {
            Command::Fleet(command) => match *command {
                FleetCommand::Wait(args) => Some(args),
                _ => None,
            },
            _ => None,
        }
    }

    #[test]
    fn flags_are_before_or_after_the_kind() {
        for (line, goal, minutes) in [
            (&["wait", "machine", "sim-0007", "--for=phase=Ready", "--timeout=7m"][..], "phase=Ready", 7),
            (&["wait", "--for=healthy", "machine", "sim-0007"], "healthy", 5),
            (&["wait", "--for", "retired", "--timeout", "1m", "machines", "sim-0007"], "retired", 1),
            (&["wait", "--timeout", "1m", "machines", "sim-0007", "--for", "retired"], "retired", 1),
            (&["wait", "machines", "--phase", "silent", "--for", "healthy"], "healthy", 5),
            (&["wait", "machines", "-l", "label.row=7", "--for", "healthy"], "healthy", 5),
            (&["wait", "cluster", "prod", "--for", "deleted"], "deleted", 5),
            (&["wait", "updates", "--for", "finished", "--timeout", "0"], "finished", 0),
        ] {
            let args = parse(line).unwrap();
            assert_eq!(args.parse_goal().unwrap().condition().as_deref(), Some(goal), "{line:?}");
            assert_eq!(args.timeout, Span::minutes(minutes), "{line:?}");
        }
    }

    #[test]
    fn wrong_command_is_rejected() {
        for line in [
            &["wait"][..],
            &["wait", "--for", "ready"],
            &["wait", "nodes", "--for", "ready"],
            &["wait", "machine", "", "--for", "healthy"],
            &["wait", "machine", "a", "--phase", "Ready", "--for", "healthy"],
            &["wait", "machine", "a", "-l", "label.row=7", "--for", "healthy"],
            &["wait", "machines", "-l", "row=7", "--for", "healthy"],
            &["wait", "machine", "a", "--for", "healthy", "--timeout", "-1s"],
        ] {
            assert!(parse(line).is_none(), "{line:?}");
        }
        for (line, part) in [
            (&["wait", "machine", "a"][..], "`wait` needs a condition: give --for with phase=PHASE"),
            (&["wait", "cluster", "a", "--for", "healthy"], "\"healthy\" is no condition of clusters"),
        ] {
            let error = parse(line).unwrap().parse_goal().unwrap_err();
            assert_eq!(error.exit_code(), ExitCode::WrongCommand);
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn subjects_are_selected_once_by_name_or_id() {
        let found = || vec![Subject::new("1", "ams"), Subject::new("2", "fra")];
        for (names, may_be_absent, expected) in [
            (&[][..], false, Some(vec!["ams", "fra"])),
            (&["fra", "2", "ams"], false, Some(vec!["fra", "ams"])),
            (&["fra", "nowhere"], false, None),
            (&["fra", "nowhere"], true, Some(vec!["fra", "nowhere"])),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let report = ReportOptions { output: &Output::Table, target_flags: &TargetFlags::default() };
            let selected = select_subjects(found(), &names, ObjectKind::Cluster, may_be_absent, report);
            let selected =
                selected.map(|subjects| subjects.into_iter().map(|subject| subject.name).collect::<Vec<_>>());
            let expected = expected.map(|names| names.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(selected.ok(), expected, "{names:?}");
        }
    }
}
