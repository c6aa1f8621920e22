//! `get contexts`: the contexts of this user.
//!
//! They are in a file of this host, so these commands call nothing.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::json;

use crate::client::contexts::{Context, Contexts, contexts_path};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::list::TableStyle;

    #[test]
    fn current_context_is_marked() {
        let context = |server: &str| Context {
            servers: vec![server.to_owned()],
            ca_certificate_path: None,
            token_path: PathBuf::from("/t"),
        };
        let contexts = Contexts {
            current: Some("b".to_owned()),
            contexts: [("a".to_owned(), context("a:1")), ("b".to_owned(), context("b:1"))].into(),
        };
        let list = list_of(&contexts).unwrap();
        assert_eq!(
            list.to_table(TableStyle { wide: false, headers: true }),
            "NAME  CURRENT  SERVERS  TOKEN\na     -        a:1      /t\nb     *        b:1      /t\n"
        );
        let json = list.to_json().unwrap();
        assert_eq!((&json["current"], &json["contexts"][1]["current"]), (&json!("b"), &json!(true)));
        assert_eq!(json["contexts"][0]["tokenPath"], "/t");
    }
}
