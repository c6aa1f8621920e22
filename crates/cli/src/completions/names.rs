//! Names of objects that begin with what is typed.
//!
//! Contexts are in a file of this host. The names of other kinds come from the API of the context that the command would
//! use, by one call for at most a page, within a time limit. If anything fails, there are no names and no error.

use std::path::PathBuf;
use std::time::Duration;

use crate::artefacts::get::list_artefacts;
use crate::client::backend::{BackendFlags, BackendKind, ContextSource, choose_backend};
use crate::client::contexts::{Context, Contexts, contexts_path};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::cluster::get::list_clusters;
use crate::error::CliError;
use crate::object::kind::ObjectKind;
use crate::object::list::{ListedObject, ObjectNames};
use crate::providers::list_providers;
use crate::tokens::get::list_tokens;
use crate::update::list_updates;
use model::selector::compose::quote_prefix;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// How long a shell waits for names of the API, with the time to connect.
pub const NAME_TIME_LIMIT: Duration = Duration::from_millis(300);

/// Most machines of an answer: a page of the API.
const MAX_MACHINES: i32 = 500;
/// Most credentials of an answer: so many fit into one message.
const MAX_TOKENS: u32 = 50;

/// Which names are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameQuery {
    /// The kind of the objects.
    pub kind: ObjectKind,
    /// What is typed of the name.
    pub prefix: String,
}

/// What the environment of a process has about fleets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameEnvironment {
    /// Path of the contexts file; `None` without a home directory.
    pub contexts_path: Option<PathBuf>,
    /// The context that `SHEPHERD_CONTEXT` names.
    pub context: Option<String>,
    /// Whether `SHEPHERD_BMDB_URL` names a database.
    pub has_database: bool,
}

impl NameEnvironment {
    /// The environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        Self {
            contexts_path: contexts_path().ok(),
            context: std::env::var("SHEPHERD_CONTEXT").ok(),
            has_database: std::env::var_os("SHEPHERD_BMDB_URL").is_some(),
        }
    }
}

/// The fleet that a command line names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct FleetWords {
    direct: bool,
    context: Option<String>,
    has_database: bool,
}

impl FleetWords {
    /// The fleet of these words. The last one is still typed.
    fn of_words(words: &[String]) -> Self {
        let mut found = Self::default();
        let typed = words.len().saturating_sub(1);
        let mut before = words.iter().take(typed).map(String::as_str).take_while(|word| *word != "--");
        while let Some(word) = before.next() {
            match word.split_once('=').map_or((word, None), |(flag, value)| (flag, Some(value))) {
                ("--context", value) => found.context = value.or_else(|| before.next()).map(str::to_owned),
                ("--bmdb-url", _) => found.has_database = true,
                ("--direct", _) => found.direct = true,
                _ => {}
            }
        }
        found
    }

    /// How a command with these words would find its context.
    fn backend_flags(&self, environment: &NameEnvironment, contexts: &Contexts) -> BackendFlags {
        BackendFlags {
            direct: self.direct,
            bmdb: self.has_database || environment.has_database,
            context: match (&self.context, &environment.context) {
                (Some(_), _) => ContextSource::ByFlag,
                (None, Some(_)) => ContextSource::ByEnvironment,
                (None, None) => ContextSource::Unset,
            },
            has_current_context: contexts.current.is_some(),
        }
    }
}

/// The names that begin with the prefix of the query, of the fleet that `words` or the environment name. Empty if they are
/// not known within `limit`.
pub(super) async fn find_names(
    query: &NameQuery,
    words: &[String],
    environment: &NameEnvironment,
    limit: Duration,
) -> Vec<String> {
    let contexts = environment.contexts_path.as_deref().and_then(|path| Contexts::read(path).ok());
    let Some(contexts) = contexts else { return Vec::new() };
    if query.kind == ObjectKind::Context {
        let names = contexts.contexts.into_keys();
        return names.filter(|name| name.starts_with(&query.prefix)).collect();
    }
    let fleet = FleetWords::of_words(words);
    let Some((name, context)) = find_context(&fleet, environment, &contexts) else {
        return Vec::new();
    };
    match tokio::time::timeout(limit, fetch_names(query, name, context)).await {
        Ok(Ok(names)) => names,
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// The context that a command with these words would use; `None` if it would use a database, or fail.
fn find_context<'a>(
    fleet: &'a FleetWords,
    environment: &'a NameEnvironment,
    contexts: &'a Contexts,
) -> Option<(&'a str, &'a Context)> {
    let backend = choose_backend(fleet.backend_flags(environment, contexts)).ok()?;
    if backend != BackendKind::Api {
        return None;
    }
    let named = fleet.context.as_deref().or(environment.context.as_deref());
    let name = named.or(contexts.current.as_deref())?;
    Some((name, contexts.find(Some(name)).ok()??))
}

async fn fetch_names(query: &NameQuery, name: &str, context: &Context) -> Result<Vec<String>, CliError> {
    let client = FleetClient::connect(name, context).await?;
    let list = match query.kind {
        ObjectKind::Machine => return fetch_machine_names(&client, &query.prefix).await,
        ObjectKind::Cluster => list_clusters(&client).await?,
        ObjectKind::Provider => list_providers(&client).await?,
        ObjectKind::Token => list_tokens(&client, Some(MAX_TOKENS)).await?,
        ObjectKind::Artefact => list_artefacts(&client).await?,
        ObjectKind::Update => list_updates(&client, &[]).await?,
        _ => return Ok(Vec::new()),
    };
    let has_ids = matches!(query.kind, ObjectKind::Token | ObjectKind::Artefact);
    Ok(object_names(&list.objects, &query.prefix, has_ids))
}

async fn fetch_machine_names(client: &FleetClient, prefix: &str) -> Result<Vec<String>, CliError> {
    let selector = if prefix.is_empty() { String::new() } else { format!("name={}", quote_prefix(prefix)) };
    let request = v1::ListMachinesRequest {
        selector,
        page_size: MAX_MACHINES,
        omit_retired: true,
        ..v1::ListMachinesRequest::default()
    };
    let response = MachinesClient::new(client.channel()).list(request).await.map_err(status_to_error)?;
    let machines = response.into_inner().machines.into_iter();
    Ok(machine_names(machines.filter_map(|machine| machine.name), prefix))
}

/// The names of machines that begin with `prefix`: the provider's ids, or `PROVIDER/ID` once a slash is typed.
fn machine_names(names: impl Iterator<Item = v1::MachineName>, prefix: &str) -> Vec<String> {
    let shown = names.filter_map(|name| match (name.provider, name.provider_id?) {
        (provider, id) if prefix.contains('/') => Some(format!("{}/{id}", provider?)),
        (_, id) => Some(id),
    });
    distinct(shown, prefix)
}

/// The names of other objects that begin with `prefix`. With `has_ids` an id is one of them once it is typed: nobody
/// chooses among ids.
fn object_names(objects: &[ListedObject], prefix: &str, has_ids: bool) -> Vec<String> {
    let offers_ids = has_ids && !prefix.is_empty();
    let shown = objects.iter().flat_map(|object| {
        let ObjectNames { name, others, id } = &object.names;
        let names = std::iter::once(name).filter(move |name| id.as_ref() != Some(*name)).chain(others);
        names.chain(id.iter().filter(move |_| offers_ids)).cloned()
    });
    distinct(shown, prefix)
}

/// Those that begin with `prefix`, each once and in their order.
fn distinct(names: impl Iterator<Item = String>, prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    for name in names.filter(|name| !name.is_empty() && name.starts_with(prefix)) {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::document::ObjectDocument;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn contexts() -> Contexts {
        let context = |server: &str| Context {
            servers: vec![server.to_owned()],
            ca_certificate_path: None,
            token_path: "/t".into(),
        };
        Contexts {
            current: Some("home".to_owned()),
            contexts: [("home".to_owned(), context("h:1")), ("prod".to_owned(), context("p:1"))].into(),
        }
    }

    #[test]
    fn names_are_those_of_the_fleet_that_the_command_would_use() {
        for (line, context, has_database, expected) in [
            ("shepherdctl hold s", None, false, Some("home")),
            ("shepherdctl hold --context prod s", None, false, Some("prod")),
            ("shepherdctl --context=prod hold s", None, true, Some("prod")),
            ("shepherdctl hold s", Some("prod"), false, Some("prod")),
            ("shepherdctl hold s", Some("prod"), true, Some("prod")),
            ("shepherdctl hold s", Some("nowhere"), false, None),
            ("shepherdctl hold s", None, true, None),
            ("shepherdctl --bmdb-url u hold s", None, false, None),
            ("shepherdctl --direct hold s", None, true, None),
            ("shepherdctl --direct hold s", None, false, None),
            ("shepherdctl --direct --context prod hold s", None, true, None),
            // What is still typed decides nothing.
            ("shepherdctl hold --direct", None, false, Some("home")),
            ("shepherdctl hold -- --direct s", None, false, Some("home")),
        ] {
            let context = context.map(str::to_owned);
            let environment = NameEnvironment { contexts_path: None, context, has_database };
            let (fleet, contexts) = (FleetWords::of_words(&words(line)), contexts());
            let found = find_context(&fleet, &environment, &contexts);
            assert_eq!(found.map(|(name, _)| name), expected, "{line}: {environment:?}");
        }
        assert!(
            find_context(&FleetWords::default(), &NameEnvironment::default(), &Contexts::default()).is_none()
        );
    }

    #[tokio::test]
    async fn contexts_are_read_from_their_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("contexts.toml");
        let find = async |prefix: &str| {
            let query = NameQuery { kind: ObjectKind::Context, prefix: prefix.to_owned() };
            let environment =
                NameEnvironment { contexts_path: Some(path.clone()), context: None, has_database: true };
            find_names(&query, &words("shepherdctl contexts use x"), &environment, Duration::ZERO).await
        };
        assert_eq!(find("").await, Vec::<String>::new(), "there is no file");
        contexts().write(&path).unwrap();
        assert_eq!(find("").await, ["home", "prod"]);
        assert_eq!(find("p").await, ["prod"]);
        std::fs::write(&path, "no contexts").unwrap();
        assert_eq!(find("").await, Vec::<String>::new(), "the file is damaged");
    }

    #[test]
    fn machine_has_its_provider_once_a_slash_is_typed() {
        let name = |provider: Option<&str>, id: Option<&str>| v1::MachineName {
            machine: "0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90".to_owned(),
            provider: provider.map(str::to_owned),
            provider_id: id.map(str::to_owned),
        };
        let fleet = [
            name(Some("a"), Some("sim-2")),
            name(Some("a"), Some("sim-10")),
            name(Some("b"), Some("sim-2")),
            name(None, None),
            name(Some("b"), Some("web-1")),
        ];
        for (prefix, expected) in [
            ("", &["sim-2", "sim-10", "web-1"][..]),
            ("sim", &["sim-2", "sim-10"]),
            ("b/", &["b/sim-2", "b/web-1"]),
            ("b/w", &["b/web-1"]),
            ("0d9e", &[]),
        ] {
            assert_eq!(machine_names(fleet.iter().cloned(), prefix), expected, "{prefix}");
        }
    }

    #[test]
    fn id_is_offered_once_it_is_typed() {
        let object = |names: ObjectNames| ListedObject {
            names,
            rows: Vec::new(),
            document: ObjectDocument::Local(serde_json::Value::Null),
        };
        let token =
            |name: &str, id: &str| ObjectNames { others: vec![name.to_owned()], ..ObjectNames::of_id(id) };
        let artefact =
            ObjectNames { name: "1.4".to_owned(), others: Vec::new(), id: Some("abcdef".to_owned()) };
        let objects = [token("lee", "0199"), token("lee", "0200"), artefact, ObjectNames::of_id("abc123")];
        let objects = objects.map(object);
        for (prefix, expected) in [
            ("", &["lee", "1.4"][..]),
            ("l", &["lee"]),
            ("0", &["0199", "0200"]),
            ("1", &["1.4"]),
            ("abc", &["abcdef", "abc123"]),
            ("x", &[]),
        ] {
            assert_eq!(object_names(&objects, prefix, true), expected, "{prefix}");
        }
        let updates = [object(ObjectNames::of_name("3f9a12bc"))];
        assert_eq!(object_names(&updates, "", false), ["3f9a12bc"], "the id of an update is its name");
        let cluster =
            ObjectNames { name: "ams".to_owned(), others: Vec::new(), id: Some("abcdef".to_owned()) };
        assert_eq!(object_names(&[object(cluster)], "a", false), ["ams"], "commands take no id of a cluster");
    }
}
