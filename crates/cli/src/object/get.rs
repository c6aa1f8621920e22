//! `get KIND [NAME…]`: print objects as a table, as JSON, or in another output.
//!
//! A name that fits no object does not hide the others: they are printed, standard error has a sentence for that name,
//! and the exit code is that of an object that does not exist. It also says so if a list is empty, which is no error.

use std::io::IsTerminal as _;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::{ExitCode, ExitRecord};
use crate::machine::footer::{count_retired, machine_footer};
use crate::object::command::{GetArgs, KindSelection};
use crate::object::fetch::fetch_objects;
use crate::object::kind::ObjectKind;
use crate::object::list::{ObjectList, TableStyle};
use crate::output::{Format, Output, print_stderr, report_error, unresolved_error};
use crate::target_flags::TargetFlags;

/// Runs `get`: fetches the objects and prints them.
pub(crate) async fn run_get_command(
    context: &CommandContext,
    kind: ObjectKind,
    args: &GetArgs,
    selection: &KindSelection,
) -> Result<String, CliError> {
    let list = fetch_objects(&context.client, kind, args, selection).await?;
    let on_terminal = context.format == Format::Table && std::io::stdout().is_terminal();
    let footer = if kind == ObjectKind::Machine && on_terminal && !list.objects.is_empty() {
        let omits = args.names.is_empty() && selection.machines.omits_retired();
        // Without the number, the list itself is still complete.
        let retired =
            if omits { count_retired(&context.client, &selection.machines).await.ok() } else { None };
        let retired = retired.flatten();
        format!("\n{}\n", machine_footer(&list, retired))
    } else {
        String::new()
    };
    Ok(print_objects(list, args, &context.output, &context.exit_record, &context.target_flags)? + &footer)
}

/// Prints the objects that `args` select, of a list that is sorted and cut. Notes go to standard error.
pub(crate) fn print_objects(
    mut list: ObjectList,
    args: &GetArgs,
    output: &Output,
    exit_record: &ExitRecord,
    target_flags: &TargetFlags,
) -> Result<String, CliError> {
    let problems = list.select(&args.names);
    if let Some(column) = args.sort_by.as_ref().filter(|_| !args.names.is_empty()) {
        // The objects are in the order of their names.
        list.sort_by_column(column)?;
    }
    if let Some(error) = unresolved_error(&problems, output, target_flags) {
        if list.objects.is_empty() {
            return Err(error);
        }
        report_error(&error, output, target_flags);
        exit_record.record(ExitCode::NotFound);
    }
    if let Some(note) = cut_note(&list, args.limit) {
        print_stderr(&format!("shepherdctl: {}", target_flags.qualify(&note)));
    }
    let is_text = matches!(output, Output::Table | Output::Wide | Output::Name | Output::CustomColumns(_));
    if list.objects.is_empty() && is_text {
        print_stderr(&target_flags.qualify(list.kind.row().empty));
    }
    match output {
        Output::Table | Output::Wide => {
            let style = TableStyle { wide: *output == Output::Wide, headers: !args.no_headers };
            Ok(table_with_appendix(&list, style, args.names.is_empty()))
        }
        Output::Name => {
            let names = list.objects.iter().flat_map(|object| [object.names.name.as_str(), "\n"]);
            Ok(names.collect())
        }
        Output::CustomColumns(columns) => {
            let objects = list.objects.iter().map(|object| object.document.to_json());
            Ok(columns.format(&objects.collect::<Result<Vec<_>, _>>()?, !args.no_headers))
        }
        Output::Json | Output::Yaml | Output::JsonPath(_) => {
            output.convert_json(&match list.objects.as_slice() {
                // As in kubectl, one name gives the bare object.
                [object] if args.names.len() == 1 => object.document.to_json()?,
                _ => list.to_json()?,
            })
        }
    }
}

/// The table, with what belongs to the whole list below it.
fn table_with_appendix(list: &ObjectList, style: TableStyle, whole: bool) -> String {
    let mut text = if list.objects.is_empty() { String::new() } else { list.to_table(style) };
    if whole && !list.appendix.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&list.appendix);
    }
    text
}

/// What to say about a list that was cut at its limit.
fn cut_note(list: &ObjectList, limit: Option<u32>) -> Option<String> {
    let limit = limit.filter(|_| list.has_more)?;
    let continued = list.cursor.as_ref().map(|cursor| format!(", or continue with --cursor '{cursor}'"));
    let continued = continued.unwrap_or_default();
    Some(format!("first {limit}, and there are more: raise or omit --limit{continued}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::object::document::ObjectDocument;
    use crate::object::list::{Column, ListedObject, ObjectNames};

    const COLUMNS: [Column; 1] = [Column::always("NAME")];

    fn list() -> ObjectList {
        let object = |name: &str| ListedObject {
            names: ObjectNames::of_name(name),
            rows: vec![vec![name.to_owned()]],
            document: ObjectDocument::Local(json!({ "name": name })),
        };
        let response = ObjectDocument::Local(json!({ "loops": [] }));
        ObjectList {
            appendix: "more\n".to_owned(),
            ..ObjectList::new(ObjectKind::Loop, response, &COLUMNS, vec![object("a"), object("b")])
        }
    }

    fn get(names: &[&str], output: &str) -> (Option<String>, u8) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let (args, record) = (GetArgs { names, ..GetArgs::default() }, ExitRecord::default());
        let (output, flags) = (Output::parse(output).unwrap(), TargetFlags::default());
        match print_objects(list(), &args, &output, &record, &flags) {
            Ok(text) => (Some(text), record.highest()),
            Err(error) => (None, error.exit_code().number()),
        }
    }

    #[test]
    fn what_exists_is_printed_and_what_does_not_decides_the_exit_code() {
        for (names, expected) in [
            (&[][..], (Some("NAME\na\nb\n\nmore\n".to_owned()), 0)),
            (&["b"], (Some("NAME\nb\n".to_owned()), 0)),
            (&["a", "x"], (Some("NAME\na\n".to_owned()), 3)),
            (&["x"], (None, 3)),
            (&["x", "y"], (None, 3)),
        ] {
            assert_eq!(get(names, "table"), expected, "{names:?}");
        }
    }

    #[test]
    fn named_objects_are_in_the_order_of_their_names_or_sorted() {
        for (sort_by, expected) in
            [(None, Some("b\na\n")), (Some("name"), Some("a\nb\n")), (Some("owner"), None)]
        {
            let args = GetArgs {
                names: vec!["b".to_owned(), "a".to_owned()],
                sort_by: sort_by.map(str::to_owned),
                ..GetArgs::default()
            };
            let (record, flags) = (ExitRecord::default(), TargetFlags::default());
            let printed = print_objects(list(), &args, &Output::Name, &record, &flags);
            assert_eq!(printed.ok().as_deref(), expected, "{sort_by:?}");
        }
    }

    #[test]
    fn one_name_gives_the_bare_object() {
        for (names, expected) in [
            (&["a"][..], json!({ "name": "a" })),
            (&["a", "a"], json!({ "loops": [{ "name": "a" }] })),
            (&["a", "x"], json!({ "loops": [{ "name": "a" }] })),
            (&[], json!({ "loops": [{ "name": "a" }, { "name": "b" }] })),
        ] {
            let (text, _) = get(names, "json");
            assert_eq!(serde_json::from_str::<Value>(&text.unwrap()).unwrap(), expected, "{names:?}");
        }
    }

    #[test]
    fn each_output_prints_the_selected_objects() {
        for (names, output, expected) in [
            (&[][..], "name", "a\nb\n"),
            (&["b"], "name", "b\n"),
            (&[], "jsonpath={.loops[*].name}", "a b"),
            (&["b"], "jsonpath={.name}", "b"),
            (&[], "custom-columns=LOOP:.name", "LOOP\na\nb\n"),
            (&["b"], "custom-columns=LOOP:.name", "LOOP\nb\n"),
            (&["b"], "yaml", "name: b\n"),
        ] {
            assert_eq!(get(names, output), (Some(expected.to_owned()), 0), "{names:?} {output}");
        }
    }

    #[test]
    fn cut_list_says_so() {
        let list = ObjectList { has_more: true, ..list() };
        let note = "first 2, and there are more: raise or omit --limit";
        assert_eq!(cut_note(&list, Some(2)).as_deref(), Some(note));
        let list = ObjectList { cursor: Some("New/sim/7".to_owned()), ..list };
        let note = format!("{note}, or continue with --cursor 'New/sim/7'");
        assert_eq!(cut_note(&list, Some(2)), Some(note));
        let whole = ObjectList { has_more: false, ..list };
        assert_eq!(cut_note(&whole, Some(2)), None);
    }
}
