//! `describe KIND NAME`: the page of one object.
//!
//! Machines, clusters and updates have pages of their own. Every other kind gets the generic page with each field
//! ([`crate::object::page`]).

use std::time::SystemTime;

use serde_json::Value;

use crate::cluster::describe::describe_cluster;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::machine::describe::describe_machine;
use crate::object::command::{DescribeCommand, GetArgs, KindSelection};
use crate::object::fetch::fetch_objects;
use crate::object::get::print_objects;
use crate::object::kind::ObjectKind;
use crate::object::list::ObjectList;
use crate::object::page::format_page;
use crate::output::Output;
use crate::output::table::terminal_width;
use crate::update::describe_update;
use model::time::Timestamp;

/// Runs `describe`: fetches the object and prints its page.
pub(crate) async fn run_describe_command(
    context: &CommandContext,
    command: &DescribeCommand,
) -> Result<String, CliError> {
    let (client, format, output) = (&context.client, context.format, &context.output);
    let name = command.name.as_deref().unwrap_or_default();
    match command.kind {
        // A name is that of the list.
        kind if *output == Output::Name => {
            let args = GetArgs { names: command.name.iter().cloned().collect(), ..GetArgs::default() };
            let list = fetch_objects(client, kind, &args, &KindSelection::default()).await?;
            print_objects(list, &args, output, &context.exit_record, &context.target_flags)
        }
        ObjectKind::Machine => convert_object(output, describe_machine(client, name, format).await?),
        ObjectKind::Cluster => convert_object(output, describe_cluster(client, name, format).await?),
        ObjectKind::Update => convert_object(output, describe_update(client, name, format).await?),
        kind => {
            let (args, selection) = (GetArgs::default(), KindSelection::default());
            let list = fetch_objects(client, kind, &args, &selection).await?;
            print_page(list, command, output)
        }
    }
}

/// Converts what a command rendered of one object: a table has one row for it, not one for each of its parts.
fn convert_object(output: &Output, rendered: String) -> Result<String, CliError> {
    match output {
        Output::CustomColumns(columns) => Ok(columns.format([&serde_json::from_str(&rendered)?], true)),
        _ => output.convert(rendered),
    }
}

/// Prints the generic page of the object that the command names, or the object in another output.
pub(crate) fn print_page(
    mut list: ObjectList,
    command: &DescribeCommand,
    output: &Output,
) -> Result<String, CliError> {
    let names: Vec<String> = command.name.iter().cloned().collect();
    if let Some(message) = list.select(&names).pop() {
        return Err(CliError::Ended { exit: ExitCode::NotFound, message });
    }
    let Some(object) = list.objects.first() else {
        return Err(CliError::Ended { exit: ExitCode::NotFound, message: list.kind.row().empty.to_owned() });
    };
    let json = object.document.to_json()?;
    match output {
        Output::Table | Output::Wide => {
            let shown = if list.kind == ObjectKind::Issue { with_explanation(json) } else { json };
            Ok(format_page(&shown, read_time(&list)?, terminal_width()))
        }
        Output::Name => Ok(format!("{}\n", object.names.name)),
        Output::CustomColumns(columns) => Ok(columns.format([&json], true)),
        Output::Json | Output::Yaml | Output::JsonPath(_) => output.convert_json(&json),
    }
}

/// An issue as people see it: instead of its page in the source, the command that prints it.
fn with_explanation(mut issue: Value) -> Value {
    let id = issue.get("id").and_then(Value::as_str).unwrap_or_default();
    let command = format!("shepherdctl explain {id}");
    if let Value::Object(fields) = &mut issue {
        fields.insert("page".to_owned(), Value::String(command));
    }
    issue
}

/// When the list was read, or now for a list that was read on this host or does not say.
fn read_time(list: &ObjectList) -> Result<Timestamp, CliError> {
    let response = list.response.to_json()?;
    let read_at =
        response.get("readAt").and_then(Value::as_str).and_then(|text| text.parse::<Timestamp>().ok());
    Ok(read_at.unwrap_or_else(|| Timestamp::from(SystemTime::now())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::object::document::ObjectDocument;
    use crate::object::list::{ListedObject, ObjectNames};

    #[test]
    fn page_of_an_issue_is_the_command_that_prints_it() {
        let shown = with_explanation(json!({ "id": "brake", "page": "docs/issues/brake.md" }));
        assert_eq!(shown, json!({ "id": "brake", "page": "shepherdctl explain brake" }));
    }

    fn page(name: Option<&str>, output: &str) -> Result<String, CliError> {
        let object = |name: &str| ListedObject {
            names: ObjectNames::of_name(name),
            rows: Vec::new(),
            document: ObjectDocument::Local(json!({ "name": name })),
        };
        let response = ObjectDocument::Local(json!({ "loops": [], "readAt": "2026-11-20T18:00:07Z" }));
        let list = ObjectList::new(ObjectKind::Loop, response, &[], vec![object("a"), object("b")]);
        let command = DescribeCommand { kind: ObjectKind::Loop, name: name.map(str::to_owned) };
        print_page(list, &command, &Output::parse(output).unwrap())
    }

    #[test]
    fn object_with_a_list_is_one_row() {
        let rendered = || json!({ "id": "u1", "machines": [{ "id": "a" }, { "id": "b" }] }).to_string();
        let columns = Output::parse("custom-columns=ID:.id").unwrap();
        assert_eq!(convert_object(&columns, rendered()).unwrap(), "ID\nu1\n");
        let path = Output::parse("jsonpath={.machines[*].id}").unwrap();
        assert_eq!(convert_object(&path, rendered()).unwrap(), "a b");
    }

    #[test]
    fn named_object_is_printed_alone() {
        for (output, expected) in [
            ("table", "name  b\n"),
            ("json", "{\n  \"name\": \"b\"\n}\n"),
            ("yaml", "name: b\n"),
            ("name", "b\n"),
            ("jsonpath={.name}", "b"),
            ("custom-columns=LOOP:.name", "LOOP\nb\n"),
        ] {
            assert_eq!(page(Some("b"), output).unwrap(), expected, "{output}");
        }
        assert_eq!(page(None, "table").unwrap(), "name  a\n", "a kind with one object has no names");
        assert_eq!(page(Some("c"), "table").unwrap_err().exit_code(), ExitCode::NotFound);
    }
}
