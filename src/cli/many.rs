//! Orders about the machines that a filter means, and the orders that are the same for one machine and for many:
//! `label`, `unlabel`, `quarantine`.
//!
//! A filter is easily wrong. So the machines are listed first, and whoever orders types how many there are, or
//! has said so with `--yes_count`; the order names that number, and is refused when it is another one by then.

use std::fmt::Write as _;
use std::io::{BufRead as _, IsTerminal as _, Write as _};

use clap::Args;
use serde::Serialize;

use crate::bmdb::action::{Done, Until};
use crate::bmdb::audit::Order;
use crate::bmdb::each::Each;
use crate::bmdb::find::id_of;
use crate::bmdb::selection::{RPC, Selection as Selected};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::filter::Filters;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::operate::{carried, direct, reason_or_none, told, who};
use crate::cli::order_key;
use crate::cli::output::{Format, say};
use crate::cli::remote::refused;
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::access::Scope;
use crate::model::label::{self, Labels};
use crate::model::machine_view::MachineName;
use crate::model::order_limits::count;
use crate::model::power_order::Switch;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::give_orders_request::What;
use crate::proto::fleet::v1::machines_client::MachinesClient;
use crate::proto::fleet::v1::orders_client::OrdersClient;

/// Groups of flags, any of which stands for many machines instead of one.
pub const MANY: [&str; 2] = ["Filters", "Selection"];

/// The machines of an order, instead of one.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Instead of one machine")]
pub struct Selection {
    /// Which.
    #[command(flatten)]
    filters: Filters,
    /// How many machines that is: nothing is done if it is another number, and nobody is asked
    #[arg(long = "yes_count", value_name = "N")]
    pub yes_count: Option<u32>,
    /// Go beyond the policy's limits, or order it of all machines; an admin may
    #[arg(long = "beyond_limits")]
    pub beyond_limits: bool,
}

/// Labels to set.
#[derive(Debug, Args)]
pub struct Label {
    /// The machine
    #[arg(value_name = "M", required_unless_present_any = MANY, conflicts_with_all = MANY)]
    pub machine: Option<String>,
    /// The label; may be given several times
    #[arg(long, value_name = "KEY=VALUE", required = true)]
    pub set: Vec<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Or many.
    #[command(flatten)]
    pub selection: Selection,
}

/// Labels to take away.
#[derive(Debug, Args)]
pub struct Unlabel {
    /// The machine
    #[arg(value_name = "M", required_unless_present_any = MANY, conflicts_with_all = MANY)]
    pub machine: Option<String>,
    /// The label's key; may be given several times
    #[arg(long, value_name = "KEY", required = true)]
    pub key: Vec<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Or many.
    #[command(flatten)]
    pub selection: Selection,
}

/// A quarantine.
#[derive(Debug, Args)]
pub struct Quarantine {
    /// The machine
    #[arg(value_name = "M", required_unless_present_any = MANY, conflicts_with_all = MANY)]
    pub machine: Option<String>,
    /// Why, for whoever asks `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Or many.
    #[command(flatten)]
    pub selection: Selection,
}

/// `label`.
pub async fn label(source: &Source, asked: &Label, format: Format) -> Result<String, CliError> {
    let set = asked.set.iter().map(|text| label::read(text)).collect::<Result<Labels, _>>();
    let each = Each::Label { set: set.map_err(CliError::Wrong)?, remove: Vec::new() };
    let machine = asked.machine.as_deref();
    one_or_many(source, machine, &asked.selection, each, asked.reason.as_deref(), format).await
}

/// `unlabel`.
pub async fn unlabel(source: &Source, asked: &Unlabel, format: Format) -> Result<String, CliError> {
    for key in &asked.key {
        label::check_key(key).map_err(CliError::Wrong)?;
    }
    let each = Each::Label { set: Labels::new(), remove: asked.key.clone() };
    let machine = asked.machine.as_deref();
    one_or_many(source, machine, &asked.selection, each, asked.reason.as_deref(), format).await
}

/// `quarantine`.
pub async fn quarantine(source: &Source, asked: &Quarantine, format: Format) -> Result<String, CliError> {
    if asked.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    let (machine, reason) = (asked.machine.as_deref(), Some(asked.reason.as_str()));
    one_or_many(source, machine, &asked.selection, Each::Quarantine, reason, format).await
}

async fn one_or_many(
    source: &Source,
    machine: Option<&str>,
    selection: &Selection,
    each: Each,
    reason: Option<&str>,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = machine else { return many(source, selection, each, reason, format).await };
    match source {
        Source::Direct(bmdb) => {
            let name = find(bmdb, machine).await?;
            let order = direct(each.rpc(), name.short(), reason);
            told(name.clone(), bmdb.order_each(order, id_of(&name), each, who()).await?.done, format)
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let (mut client, machine) = (MachinesClient::new(service), machine.to_owned());
                match &each {
                    Each::Label { set, remove } => {
                        let (set, remove) = (set.clone(), remove.clone());
                        client.label(v1::LabelRequest { machine, order: Some(order), set, remove }).await
                    }
                    _ => client.quarantine(v1::QuarantineRequest { machine, order: Some(order) }).await,
                }
            };
            carried(again::order(&mut remote.clone(), reason_or_none(reason), give).await?, format)
        }
    }
}

/// What became of an order on one machine.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    done: Done,
    refused: bool,
}

#[derive(Serialize)]
struct Answer {
    machines: Vec<Line>,
}

/// Gives an order about the machines that a filter means.
pub async fn many(
    source: &Source,
    selection: &Selection,
    each: Each,
    reason: Option<&str>,
    format: Format,
) -> Result<String, CliError> {
    if dry_run::asked() {
        return tried(look(source, selection, &each, reason).await?, format);
    }
    let expected = if let Some(expected) = selection.yes_count {
        expected
    } else {
        let Listed { names, refusal } = look(source, selection, &each, reason).await?;
        if let Some(said) = refusal {
            return Err(CliError::Wrong(said));
        }
        if names.is_empty() && format == Format::Table {
            return Ok("no machine is meant; nothing was changed\n".to_owned());
        }
        if names.is_empty() { 0 } else { typed(&names)? }
    };
    let lines = give(source, selection, each, reason, expected).await?;
    if format == Format::Json {
        return json(&Answer { machines: lines });
    }
    let mut text = String::new();
    for line in &lines {
        let _ = writeln!(text, "{} {}", line.name.short(), line.done.said);
    }
    let refused = lines.iter().filter(|line| line.refused).count();
    let changed = lines.iter().filter(|line| line.done.changed).count();
    let _ = write!(text, "{}: {changed} changed", count(lines.len()));
    if refused > 0 {
        let _ = write!(text, ", {refused} refused");
    }
    text.push('\n');
    Ok(text)
}

/// The machines that an order would be about.
struct Listed {
    names: Vec<MachineName>,
    /// Why it would be refused, if it would be.
    refusal: Option<String>,
}

/// What a dry run says: the machines, and whether the order would be given.
fn tried(listed: Listed, format: Format) -> Result<String, CliError> {
    let Listed { names, refusal } = listed;
    if format == Format::Json {
        let mut answer = serde_json::json!({ "machines": names, "refusal": refusal });
        dry_run::mark(&mut answer);
        return json(&answer);
    }
    let mut text = String::new();
    for name in &names {
        let _ = writeln!(text, "{}", name.short());
    }
    let given =
        refusal.map_or_else(|| "the order would be given".to_owned(), |said| format!("refused: {said}"));
    let _ = writeln!(text, "{}", dry_run::line(&format!("this is about {}; {given}", count(names.len()))));
    Ok(text)
}

/// The machines that are meant, and nothing is changed. Whoever said how many they are is told when they are not.
async fn look(
    source: &Source,
    selection: &Selection,
    each: &Each,
    reason: Option<&str>,
) -> Result<Listed, CliError> {
    Ok(match source {
        Source::Direct(bmdb) => {
            let order = Order { dry_run: true, ..order_of(reason, None) };
            let selected = selected(selection, selection.yes_count)?;
            let given = bmdb.order_many(order, selected, each.clone(), who()).await?;
            let names = given.outcomes.into_iter().map(|outcome| outcome.name).collect::<Vec<_>>();
            Listed { names, refusal: given.refusal }
        }
        Source::Api(remote) => {
            let order = v1::Order {
                reason: reason_or_none(reason).to_owned(),
                dry_run: true,
                ..v1::Order::default()
            };
            let request = message(selection, each, order, selection.yes_count);
            let said = OrdersClient::new(remote.service()).give(request).await.map_err(refused)?.into_inner();
            let names = said.outcomes.into_iter().map(|outcome| remote_read::name(outcome.name));
            Listed { names: names.collect::<Result<_, _>>()?, refusal: said.refusal }
        }
    })
}

async fn give(
    source: &Source,
    selection: &Selection,
    each: Each,
    reason: Option<&str>,
    expected: u32,
) -> Result<Vec<Line>, CliError> {
    match source {
        Source::Direct(bmdb) => {
            let order = order_of(reason, Some(order_key::key()));
            let given = bmdb.order_many(order, selected(selection, Some(expected))?, each, who()).await;
            let outcomes = given.map_err(CliError::from)?.outcomes.into_iter();
            Ok(outcomes.map(|one| Line { name: one.name, done: one.done, refused: one.refused }).collect())
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                OrdersClient::new(service).give(message(selection, &each, order, Some(expected))).await
            };
            let said = again::order(&mut remote.clone(), reason_or_none(reason), give).await?;
            let line = |one: v1::OrderOutcome| {
                let done = Done { changed: one.changed, said: one.said };
                Ok(Line { name: remote_read::name(one.name)?, done, refused: one.refused })
            };
            said.outcomes.into_iter().map(line).collect()
        }
    }
}

fn order_of(reason: Option<&str>, idempotency_key: Option<String>) -> Order {
    Order { idempotency_key, ..direct(RPC, "the machines of a filter".to_owned(), reason) }
}

/// Whoever may write to the BMDB directly is believed to be an admin.
fn selected(selection: &Selection, expected: Option<u32>) -> Result<Selected, CliError> {
    Ok(Selected {
        filter: selection.filters.filter()?,
        scope: Scope::Everything,
        expected: expected.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        beyond_limits: selection.beyond_limits,
        admin: true,
    })
}

fn message(
    selection: &Selection,
    each: &Each,
    order: v1::Order,
    expected: Option<u32>,
) -> v1::GiveOrdersRequest {
    v1::GiveOrdersRequest {
        filter: Some(selection.filters.message()),
        order: Some(order),
        machines: expected.map(|count| i32::try_from(count).unwrap_or(i32::MAX)),
        beyond_limits: selection.beyond_limits,
        what: Some(what(each)),
    }
}

fn what(each: &Each) -> What {
    match each {
        Each::Hold { scope, until } => What::Hold(v1::HoldEach {
            scope: scope.as_str().to_owned(),
            until: until.map(|until| match until {
                Until::After(span) => v1::hold_each::Until::After(span.to_string()),
                Until::At(moment) => v1::hold_each::Until::At(prost_types::Timestamp {
                    seconds: moment.timestamp(),
                    nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
                }),
            }),
        }),
        Each::Release { quarantine } => What::Release(v1::ReleaseEach { quarantine: *quarantine }),
        Each::Retry => What::Retry(v1::RetryEach {}),
        Each::Quarantine => What::Quarantine(v1::QuarantineEach {}),
        Each::Retire { wipe } => What::Retire(v1::RetireEach { wipe: *wipe }),
        Each::Power(Switch::Reboot) => What::Reboot(v1::RebootEach {}),
        Each::Power(switch) => What::Power(v1::PowerEach { action: switch.as_str().to_owned() }),
        Each::Prioritize { level, until } => What::Prioritize(v1::PrioritizeEach {
            level: level.as_str().to_owned(),
            until: until.map(|until| match until {
                Until::After(span) => v1::prioritize_each::Until::After(span.to_string()),
                Until::At(moment) => v1::prioritize_each::Until::At(prost_types::Timestamp {
                    seconds: moment.timestamp(),
                    nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
                }),
            }),
        }),
        Each::Label { set, remove } => {
            What::Label(v1::LabelEach { set: set.clone(), remove: remove.clone() })
        }
    }
}

/// Lists the machines, and asks whoever sits there how many they are.
fn typed(listed: &[MachineName]) -> Result<u32, CliError> {
    for name in listed {
        say(&format!("  {}", name.short()));
    }
    let machines = count(listed.len());
    if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
        return Err(CliError::Wrong(format!(
            "this is about {machines}, and nothing was ordered; if these are the ones, give --yes_count {}",
            listed.len()
        )));
    }
    // Whoever cannot be asked types nothing.
    let _ = write!(std::io::stderr().lock(), "This is about {machines}. Type their number to go on: ");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    line.trim()
        .parse()
        .map_err(|_| CliError::Wrong(format!("{:?} is no number; nothing was ordered", line.trim())))
}
