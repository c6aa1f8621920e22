//! `get contexts`, `contexts`, `contexts use|delete`: the contexts of this user.
//!
//! They are in a file of this host, so these commands call nothing.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use crate::client::contexts::{Context, Contexts, contexts_path};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::Output;

pub(crate) const CONTEXTS_EXAMPLES: &str = "\
Example:
  shepherdctl contexts                          the same as get contexts";

const USE_EXAMPLES: &str = "\
Example:
  shepherdctl contexts use prod                 later commands use this context";

const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl contexts delete lab               the file of its token stays";

/// Arguments of `contexts`: nothing to list them, or what to do with one.
#[derive(Debug, Args)]
pub struct ContextsArgs {
    /// What to do with one of them
    #[command(subcommand)]
    pub command: Option<ContextsCommand>,
}

/// Subcommands of `contexts`, about one context.
#[derive(Debug, Subcommand)]
pub enum ContextsCommand {
    /// Make a context the current one, which later commands use
    #[command(after_help = USE_EXAMPLES)]
    Use(ContextArg),
    /// Delete a context; the files that it names stay
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(ContextArg),
}

/// The context that a command names.
#[derive(Debug, Args)]
pub struct ContextArg {
    /// Name of the context, as `get contexts` lists it
    #[arg(value_name = "NAME")]
    pub name: String,
}

const COLUMNS: [Column; 4] =
    [Column::always("NAME"), Column::always("CURRENT"), Column::always("SERVERS"), Column::always("TOKEN")];

/// A context in JSON. It has the path of the token, and never the token.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ContextOutput<'a> {
    name: &'a str,
    current: bool,
    servers: &'a [String],
    ca_certificate_path: Option<&'a PathBuf>,
    token_path: &'a PathBuf,
}

/// Lists the contexts, ordered by name.
pub(crate) fn list_contexts() -> Result<ObjectList, CliError> {
    list_of(&Contexts::read(&contexts_path()?)?)
}

fn list_of(contexts: &Contexts) -> Result<ObjectList, CliError> {
    let objects = contexts
        .contexts
        .iter()
        .map(|(name, context)| context_object(name, context, contexts.current.as_ref() == Some(name)));
    let response = ObjectDocument::Local(json!({ "contexts": [], "current": contexts.current }));
    Ok(ObjectList::new(ObjectKind::Context, response, &COLUMNS, objects.collect::<Result<_, _>>()?))
}

fn context_object(name: &str, context: &Context, current: bool) -> Result<ListedObject, CliError> {
    let output = ContextOutput {
        name,
        current,
        servers: &context.servers,
        ca_certificate_path: context.ca_certificate_path.as_ref(),
        token_path: &context.token_path,
    };
    let row = vec![
        name.to_owned(),
        if current { "*".to_owned() } else { "-".to_owned() },
        context.servers.join(","),
        context.token_path.display().to_string(),
    ];
    let document = ObjectDocument::of_value(&output)?;
    Ok(ListedObject { names: ObjectNames::of_name(name), rows: vec![row], document })
}

/// Runs `contexts use` or `contexts delete`: changes the file of contexts.
pub(crate) fn change_contexts(command: &ContextsCommand, output: &Output) -> Result<String, CliError> {
    let path = contexts_path()?;
    let mut contexts = Contexts::read(&path)?;
    let (name, change) = match command {
        ContextsCommand::Use(of) => (&of.name, use_context(&mut contexts, &of.name)?),
        ContextsCommand::Delete(of) => (&of.name, delete_context(&mut contexts, &of.name)?),
    };
    if change.is_changed {
        contexts.write(&path)?;
    }
    match output {
        Output::Table | Output::Wide => Ok(format!("{name} {}\n", change.message)),
        Output::Name => Ok(format!("{name}\n")),
        _ => output.convert_json(&json!({
            "context": name, "changed": change.is_changed, "message": change.message,
        })),
    }
}

/// What a command did to the contexts.
struct ContextChange {
    is_changed: bool,
    /// The rest of a sentence that begins with the name of the context.
    message: String,
}

fn use_context(contexts: &mut Contexts, name: &str) -> Result<ContextChange, CliError> {
    contexts.find(Some(name))?;
    let is_changed = contexts.current.as_deref() != Some(name);
    contexts.current = Some(name.to_owned());
    let word = if is_changed { "now" } else { "already" };
    Ok(ContextChange { is_changed, message: format!("is {word} the current context") })
}

fn delete_context(contexts: &mut Contexts, name: &str) -> Result<ContextChange, CliError> {
    let token = contexts.find(Some(name))?.map(|context| context.token_path.clone()).unwrap_or_default();
    contexts.contexts.remove(name);
    let mut message = format!("is deleted; its token stays in {}", token.display());
    if contexts.current.as_deref() == Some(name) {
        contexts.current = None;
        message.push_str("; choose another context with: shepherdctl contexts use NAME");
    }
    Ok(ContextChange { is_changed: true, message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::list::TableStyle;

    fn contexts() -> Contexts {
        let context = |server: &str| Context {
            servers: vec![server.to_owned()],
            ca_certificate_path: None,
            token_path: PathBuf::from("/t"),
        };
        Contexts {
            current: Some("b".to_owned()),
            contexts: [("a".to_owned(), context("a:1")), ("b".to_owned(), context("b:1"))].into(),
        }
    }

    #[test]
    fn context_is_chosen_and_deleted_by_its_name() {
        let mut contexts = contexts();
        let change = use_context(&mut contexts, "a").unwrap();
        assert_eq!((change.is_changed, change.message.as_str()), (true, "is now the current context"));
        assert!(!use_context(&mut contexts, "a").unwrap().is_changed, "it is already");
        let change = delete_context(&mut contexts, "b").unwrap();
        assert_eq!(change.message, "is deleted; its token stays in /t");
        assert_eq!(contexts.current.as_deref(), Some("a"));
        assert!(delete_context(&mut contexts, "a").unwrap().message.ends_with("contexts use NAME"));
        assert_eq!(contexts, Contexts::default());
        for change in [use_context, delete_context] {
            let error = change(&mut contexts, "a").err();
            assert_eq!(error.map(|error| error.exit_code().number()), Some(3));
            let error = change(&mut contexts, "").err();
            assert_eq!(error.map(|error| error.exit_code().number()), Some(2));
        }
    }

    #[test]
    fn current_context_is_marked() {
        let list = list_of(&contexts()).unwrap();
        assert_eq!(
            list.to_table(TableStyle { wide: false, headers: true }),
            "NAME  CURRENT  SERVERS  TOKEN\na     -        a:1      /t\nb     *        b:1      /t\n"
        );
        let json = list.to_json().unwrap();
        assert_eq!((&json["current"], &json["contexts"][1]["current"]), (&json!("b"), &json!(true)));
        assert_eq!(json["contexts"][0]["tokenPath"], "/t");
    }
}
