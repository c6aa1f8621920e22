//! `get KIND --watch` for kinds without a stream in the API: list the objects again and again, and print what changed.
//!
//! An object has changed if its JSON has, moments aside: a session is renewed every few seconds, and that is no news. A
//! list that nobody answers is repeated at the next server of the context.
//!
//! What a watch costs is bounded. A record of the audit never changes, so the audit is read once, and then only what is
//! newer. Lists of other kinds are read whole, and the longer that takes, the longer the watch waits before the next one.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::{Instant, sleep};

use crate::audit::list::list_newer_audit;
use crate::client::fleet_client::FleetClient;
use crate::client::reconnect::PersistentReader;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::command::GetCommand;
use crate::object::fetch::fetch_objects;
use crate::object::kind::ObjectKind;
use crate::object::list::{ListedObject, ObjectList, TableStyle};
use crate::object::watch_table::WatchTable;
use crate::output::color::SeverityColors;
use crate::output::table::terminal_width;
use crate::output::{Format, Output, print_chunk, print_stderr, report_error, unresolved_error};
use crate::target_flags::TargetFlags;
use model::time::Timestamp;

/// Shortest time between two lists.
const INTERVAL: Duration = Duration::from_secs(2);
/// How many times as long as a list took a watch waits before the next one. So the servers are busy with it for at most a
/// fifth of the time.
const WAIT_PER_LIST: u32 = 4;

/// Prints the objects that the command selects, and then each change, until standard output is closed.
pub(crate) async fn watch_objects(context: &CommandContext, command: &GetCommand) -> Result<(), CliError> {
    let (output, target_flags) = (&context.output, &context.target_flags);
    output.require_endless()?;
    let colors = if output.format() == Format::Table { context.colors } else { SeverityColors::Off };
    let mut reader = PersistentReader::new(context.client.clone());
    let (mut printed, mut table) = (PrintedObjects::default(), None);
    let (mut is_first, mut since) = (true, None);
    loop {
        let read = async |client: FleetClient| {
            // An outage before this attempt does not count.
            let begun_at = Instant::now();
            let (list, next) = read_list(&client, command, since).await?;
            Ok::<_, CliError>((list, next, begun_at.elapsed()))
        };
        let (mut list, next_since, list_time) = reader.read(None, read).await?;
        since = next_since;
        if list.kind == ObjectKind::Audit && !is_first {
            // Later lines are in the order of time.
            list.objects.reverse();
        }
        let problems = list.select(&command.args.names);
        if is_first {
            report_problems(&list, &problems, output, target_flags)?;
        }
        let changes = printed.record_list(&list)?;
        let text = format_changes(&changes, &list, command, output, &mut table)?;
        if !print_chunk(&colors.apply(text))? {
            return Ok(());
        }
        is_first = false;
        sleep(pause_after(list_time)).await;
    }
}

/// Reads the next list of a watch, and what the one after it needs: the whole list or, of the audit, what is not older than
/// `since`.
async fn read_list(
    client: &FleetClient,
    command: &GetCommand,
    since: Option<Timestamp>,
) -> Result<(ObjectList, Option<Timestamp>), CliError> {
    if command.kind == ObjectKind::Audit {
        let (list, next) = list_newer_audit(client, &command.selection.audit, since).await?;
        return Ok((list, Some(next)));
    }
    let list = fetch_objects(client, command.kind, &command.args, &command.selection).await?;
    Ok((list, None))
}

/// How long to wait after a list that took this long.
fn pause_after(list_time: Duration) -> Duration {
    INTERVAL.max(list_time.saturating_mul(WAIT_PER_LIST))
}

/// Reports names that select no object, and a list without any object. If all names do, that is an error.
fn report_problems(
    list: &ObjectList,
    problems: &[String],
    output: &Output,
    target_flags: &TargetFlags,
) -> Result<(), CliError> {
    match unresolved_error(problems, output, target_flags) {
        Some(error) if list.objects.is_empty() => return Err(error),
        Some(error) => report_error(&error, output, target_flags),
        None if list.objects.is_empty() => print_stderr(&target_flags.qualify(list.kind.row().empty)),
        None => {}
    }
    Ok(())
}

/// A change of a list since it was printed.
#[derive(Debug)]
enum ObjectChange {
    /// The object is new, or is other than it was.
    Changed(ListedObject),
    /// The object of this name is not in the list any more.
    Removed(String),
}

/// The objects that were printed, by their ids or names.
#[derive(Debug, Default)]
struct PrintedObjects {
    objects: HashMap<String, PrintedObject>,
}

#[derive(Debug)]
struct PrintedObject {
    name: String,
    /// Its JSON without moments.
    steady: Value,
}

impl PrintedObjects {
    /// Records a list, and returns what is other than in the list before it: in the order of the list, and then what is
    /// gone, by name. Records of the audit are not gone: a list has those that are new.
    fn record_list(&mut self, list: &ObjectList) -> Result<Vec<ObjectChange>, CliError> {
        let (mut changes, mut present) = (Vec::new(), HashMap::new());
        for object in &list.objects {
            let names = &object.names;
            let key = names.id.as_ref().unwrap_or(&names.name).clone();
            let steady = without_moments(&object.document.to_json()?);
            let former = self.objects.remove(&key);
            if former.is_none_or(|former| former.steady != steady) {
                changes.push(ObjectChange::Changed(object.clone()));
            }
            present.insert(key, PrintedObject { name: names.name.clone(), steady });
        }
        let former = std::mem::replace(&mut self.objects, present);
        if list.kind == ObjectKind::Audit {
            return Ok(changes);
        }
        let mut removed: Vec<String> = former.into_values().map(|object| object.name).collect();
        removed.sort_unstable();
        changes.extend(removed.into_iter().map(ObjectChange::Removed));
        Ok(changes)
    }
}

/// A document in which every moment is absent.
fn without_moments(document: &Value) -> Value {
    match document {
        Value::String(text) if text.parse::<Timestamp>().is_ok() => Value::Null,
        Value::Array(values) => Value::Array(values.iter().map(without_moments).collect()),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (name.clone(), without_moments(value)));
            Value::Object(fields.collect::<Map<_, _>>())
        }
        other => other.clone(),
    }
}

/// The changes in the output of the command. `table` is the table that was begun; the first rows begin it.
fn format_changes(
    changes: &[ObjectChange],
    list: &ObjectList,
    command: &GetCommand,
    output: &Output,
    table: &mut Option<WatchTable>,
) -> Result<String, CliError> {
    match output {
        Output::Table | Output::Wide => {
            let style = TableStyle { wide: *output == Output::Wide, headers: !command.args.no_headers };
            Ok(format_rows(changes, list, style, table))
        }
        Output::Name => {
            let name = |change: &ObjectChange| match change {
                ObjectChange::Changed(object) => format!("{}\n", object.names.name),
                ObjectChange::Removed(name) => format!("{name}\n"),
            };
            Ok(changes.iter().map(name).collect())
        }
        _ => changes.iter().map(|change| output.format_line(&change_json(change, list)?)).collect(),
    }
}

fn format_rows(
    changes: &[ObjectChange],
    list: &ObjectList,
    style: TableStyle,
    table: &mut Option<WatchTable>,
) -> String {
    let terminal = terminal_width();
    let Some(table) = table else {
        let changed = changes.iter().filter_map(|change| match change {
            ObjectChange::Changed(object) => Some(&object.rows),
            ObjectChange::Removed(_) => None,
        });
        let rows: Vec<Vec<String>> = changed.flatten().cloned().collect();
        if rows.is_empty() {
            return String::new();
        }
        let (begun, text) = WatchTable::new(list.columns, &rows, style, terminal);
        *table = Some(begun);
        return text;
    };
    let line = |change: &ObjectChange| match change {
        ObjectChange::Changed(object) => {
            object.rows.iter().map(|row| table.format_row(row, terminal)).collect::<String>()
        }
        ObjectChange::Removed(name) => table.format_removed(name, terminal),
    };
    changes.iter().map(line).collect()
}

/// A change as JSON, in the form of the changes of machines: `{"cluster": …}` or `{"removedCluster": "prod"}`.
fn change_json(change: &ObjectChange, list: &ObjectList) -> Result<Value, CliError> {
    let kind = list.kind.row().singular;
    let (key, value) = match change {
        ObjectChange::Changed(object) => (kind.to_owned(), object.document.to_json()?),
        ObjectChange::Removed(name) => {
            let (initial, rest) = kind.split_at(1);
            (format!("removed{}{rest}", initial.to_ascii_uppercase()), Value::String(name.clone()))
        }
    };
    Ok(Value::Object(Map::from_iter([(key, value)])))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::exit_code::ExitCode;
    use crate::object::command::{GetArgs, KindSelection};
    use crate::object::document::ObjectDocument;
    use crate::object::list::{Column, ObjectNames};

    const COLUMNS: [Column; 2] = [Column::always("NAME"), Column::always("STAGE")];

    fn list(objects: &[(&str, &str, &str)]) -> ObjectList {
        let objects = objects.iter().map(|(name, stage, at)| ListedObject {
            names: ObjectNames::of_name(*name),
            rows: vec![vec![(*name).to_owned(), (*stage).to_owned()]],
            document: ObjectDocument::Local(
                json!({ "name": name, "stage": stage, "at": { "polledAt": at } }),
            ),
        });
        let response = ObjectDocument::Local(json!({ "clusters": [] }));
        ObjectList::new(ObjectKind::Cluster, response, &COLUMNS, objects.collect())
    }

    const LISTS: [&[(&str, &str, &str)]; 4] = [
        &[("a", "founding", "2026-11-20T18:00:00Z"), ("prod", "changing", "2026-11-20T18:00:00Z")],
        // Only a moment is other.
        &[("a", "founding", "2026-11-20T18:00:02Z"), ("prod", "changing", "2026-11-20T18:00:00Z")],
        &[("a", "converged", "2026-11-20T18:00:02Z"), ("new", "founding", "2026-11-20T18:00:00Z")],
        &[],
    ];

    fn printed(output: &str) -> Vec<String> {
        let output = Output::parse(output).unwrap();
        let (args, selection) = (GetArgs::default(), KindSelection::default());
        let command = GetCommand { kind: ObjectKind::Cluster, args, selection, watch: true };
        let (mut printed, mut table) = (PrintedObjects::default(), None);
        let text = |objects| {
            let list = list(objects);
            let changes = printed.record_list(&list).unwrap();
            format_changes(&changes, &list, &command, &output, &mut table).unwrap()
        };
        LISTS.into_iter().map(text).collect()
    }

    #[test]
    fn each_change_is_printed_once() {
        let rows = [
            "NAME  STAGE\na     founding\nprod  changing\n",
            "",
            "a     converged\nnew   founding\nprod  gone, or no longer selected\n",
            "a     gone, or no longer selected\nnew   gone, or no longer selected\n",
        ];
        assert_eq!(printed("table"), rows);
        assert_eq!(printed("name"), ["a\nprod\n", "", "a\nnew\nprod\n", "a\nnew\n"]);
        let json = printed("json");
        let cluster =
            r#"{"cluster":{"at":{"polledAt":"2026-11-20T18:00:00Z"},"name":"a","stage":"founding"}}"#;
        assert_eq!(json[0].lines().next(), Some(cluster));
        assert_eq!(json[2].lines().last(), Some(r#"{"removedCluster":"prod"}"#));
        assert_eq!(printed("jsonpath={.cluster.name}{\"\\n\"}")[0], "a\nprod\n");
    }

    #[test]
    fn long_lists_are_read_less_often() {
        for (list_millis, expected_millis) in [(0, 2_000), (500, 2_000), (501, 2_004), (10_000, 40_000)] {
            let pause = pause_after(Duration::from_millis(list_millis));
            assert_eq!(pause, Duration::from_millis(expected_millis), "after {list_millis} ms");
        }
    }

    #[test]
    fn records_of_the_audit_are_printed_once_and_are_never_gone() {
        let (first, second) = (("a", "one", "2026-11-20T18:00:00Z"), ("b", "two", "2026-11-20T18:00:02Z"));
        let mut printed = PrintedObjects::default();
        let mut count = |objects: &[(&str, &str, &str)]| {
            let list = ObjectList { kind: ObjectKind::Audit, ..list(objects) };
            printed.record_list(&list).unwrap().len()
        };
        assert_eq!([count(&[first]), count(&[first, second]), count(&[second]), count(&[])], [1, 1, 0, 0]);
    }

    #[test]
    fn unknown_names_are_an_error_if_none_is_left() {
        for (objects, names, expected) in [
            (LISTS[0], &["a"][..], None),
            (LISTS[0], &["a", "x"], None),
            (LISTS[0], &["x", "y"], Some(ExitCode::NotFound)),
            (LISTS[3], &[], None),
        ] {
            let mut list = list(objects);
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let problems = list.select(&names);
            let reported = report_problems(&list, &problems, &Output::Table, &TargetFlags::default());
            let reported = reported.err().map(|error| error.exit_code());
            assert_eq!(reported, expected, "{names:?}");
        }
    }
}
