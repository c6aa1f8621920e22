//! What fits as the next word of a command line, by the grammar of the program.
//!
//! The engine of `clap_complete` walks the grammar and knows subcommands, flags and enumerated values. The grammar that it
//! gets differs from that of the parser in three ways:
//!
//! * The spelling of a flag with underscores is an alias. The engine offers aliases only where nothing else fits, so a user
//!   who begins with underscores continues with them. The parser needs no alias: it gets dashes
//!   ([`model::arguments`][]).
//! * A subcommand has one name, and its others are aliases. So `get mach` becomes `get machines`, although
//!   `get machine` is a command, too.
//! * An argument that names an object records the name that is typed, so that [`crate::completions::names`] can find those
//!   that begin so.

use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};

use clap::{Arg, Command};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, complete};

use crate::command::whole_grammar;
use crate::completions::names::NameQuery;
use crate::completions::shell::Candidate;
use crate::object::kind::ObjectKind;

const FORMATS: &[&str] = &["table", "wide", "json", "yaml", "name", "jsonpath=", "custom-columns="];
const CONDITIONS: &[&str] = &["phase=", "healthy", "retired", "ready", "deleted", "finished"];
const LEVELS: &[&str] = &["urgent", "normal", "low"];
const STAGES: &[&str] = &["wipe", "release"];

/// The values of an argument that the grammar does not list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ValueSource {
    /// The kind of the objects that it names.
    names: Option<ObjectKind>,
    /// Words that it takes besides.
    words: &'static [&'static str],
}

/// The name that the engine comes to; it comes to one at most.
#[derive(Clone, Debug, Default)]
struct QueryRecorder(Arc<Mutex<Option<NameQuery>>>);

impl QueryRecorder {
    fn record(&self, kind: ObjectKind, prefix: &str) {
        if let Ok(mut query) = self.0.lock() {
            *query = Some(NameQuery { kind, prefix: prefix.to_owned() });
        }
    }

    fn take(&self) -> Option<NameQuery> {
        self.0.lock().ok().and_then(|mut query| query.take())
    }
}

/// What fits as the last word, and which names besides. A flag is offered once its dash is typed.
pub(super) fn complete_words(words: &[String]) -> (Vec<Candidate>, Option<NameQuery>) {
    let Some(last) = words.last() else { return (Vec::new(), None) };
    let recorder = QueryRecorder::default();
    let mut grammar = prepare_command(whole_grammar(), &[], &recorder);
    let arguments: Vec<OsString> = words.iter().map(OsString::from).collect();
    let directory = std::env::current_dir().ok();
    let found = complete(&mut grammar, arguments, words.len() - 1, directory.as_deref());
    // An error means that nothing fits.
    let found = found.unwrap_or_default();
    let candidates = found.iter().filter_map(decode_candidate);
    let is_wanted = |candidate: &Candidate| !last.is_empty() || !candidate.word.starts_with('-');
    // The engine takes a flag that is begun for a name, too.
    let query = recorder.take().filter(|query| !query.prefix.starts_with('-'));
    (candidates.filter(is_wanted).collect(), query)
}

/// A candidate of the engine. One that is not UTF-8, such as the name of a file, cannot be offered.
fn decode_candidate(candidate: &CompletionCandidate) -> Option<Candidate> {
    let word = candidate.get_value().to_str()?.to_owned();
    let help = candidate.get_help().map(ToString::to_string);
    Some(Candidate { word, help: help.and_then(|help| help.lines().next().map(str::to_owned)) })
}

/// Prepares a command and those below it; `path` has the words that lead to it, without that of the program.
fn prepare_command(command: Command, path: &[&str], recorder: &QueryRecorder) -> Command {
    let aliases: Vec<String> = command.get_all_aliases().map(str::to_owned).collect();
    let command = command.alias(None::<&'static str>).aliases(aliases);
    let command = command.mut_args(|arg| prepare_arg(arg, path, recorder));
    command.mut_subcommands(|below| {
        let name = below.get_name().to_owned();
        prepare_command(below, &[path, &[name.as_str()]].concat(), recorder)
    })
}

fn prepare_arg(arg: Arg, path: &[&str], recorder: &QueryRecorder) -> Arg {
    let arg = add_underscore_alias(arg);
    let source = value_source(path, arg.get_id().as_str());
    if source != ValueSource::default() {
        let recorder = recorder.clone();
        return arg.add(ArgValueCompleter::new(move |typed: &OsStr| {
            let typed = typed.to_string_lossy();
            if let Some(kind) = source.names {
                recorder.record(kind, &typed);
            }
            let words = source.words.iter().filter(|word| word.starts_with(&*typed));
            words.map(|word| CompletionCandidate::new(*word)).collect::<Vec<_>>()
        }));
    }
    arg
}

/// Makes the spelling of a flag with underscores an alias.
fn add_underscore_alias(arg: Arg) -> Arg {
    let spelling = arg.get_long().filter(|long| long.contains('-')).map(|long| long.replace('-', "_"));
    match spelling {
        Some(spelling) => arg.alias(spelling),
        None => arg,
    }
}

/// Where the values of the argument `id` come from, of the command at `path`.
fn value_source(path: &[&str], id: &str) -> ValueSource {
    let names = match (path, id) {
        (_, "machine" | "machines" | "target_machine") | (["label" | "prioritize"], "words") => {
            Some(ObjectKind::Machine)
        }
        (_, "provider") => Some(ObjectKind::Provider),
        (_, "context") | (["contexts", ..], "name") => Some(ObjectKind::Context),
        (_, "artefact" | "release" | "roleserver_release" | "bundle" | "kubernetes_bundle") => {
            Some(ObjectKind::Artefact)
        }
        (["update", ..], "id") => Some(ObjectKind::Update),
        (["tokens", "revoke"], "credential") => Some(ObjectKind::Token),
        // A cluster is created by a new name.
        (["cluster", "create"], "name") => None,
        (["cluster", ..], "name" | "names") => Some(ObjectKind::Cluster),
        (["get" | "wait", kind], "names") | (["describe", kind], "name") => {
            ObjectKind::find(kind).filter(|kind| has_names(*kind))
        }
        _ => None,
    };
    let words = match (path, id) {
        ([], "output") => FORMATS,
        (["wait"], "condition") => CONDITIONS,
        (["prioritize"], "words") => LEVELS,
        (["retire", "waive"], "stage") => STAGES,
        _ => &[],
    };
    ValueSource { names, words }
}

/// Whether names of this kind are found: those that people give.
const fn has_names(kind: ObjectKind) -> bool {
    matches!(
        kind,
        ObjectKind::Machine
            | ObjectKind::Cluster
            | ObjectKind::Provider
            | ObjectKind::Context
            | ObjectKind::Token
            | ObjectKind::Artefact
            | ObjectKind::Update
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words that are offered for the last word of the line, and the kind and the beginning of the name that is looked
    /// up.
    fn offered(line: &str) -> (Vec<String>, Option<(ObjectKind, String)>) {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let (candidates, query) = complete_words(&words);
        let words = candidates.into_iter().map(|candidate| candidate.word).collect();
        (words, query.map(|query| (query.kind, query.prefix)))
    }

    #[test]
    fn commands_flags_and_values_are_completed() {
        for (line, expected) in [
            ("shepherdctl wh", &["whoami", "why"][..]),
            ("shepherdctl get mach", &["machines"]),
            ("shepherdctl get machine", &["machines"]),
            ("shepherdctl describe mach", &["machine"]),
            ("shepherdctl describe machines", &["machines"]),
            ("shepherdctl contexts ", &["delete", "help", "use"]),
            // Both spellings of a flag, in the one that is begun.
            ("shepherdctl get machines --sort", &["--sort-by"]),
            ("shepherdctl get machines --sort-", &["--sort-by"]),
            ("shepherdctl get machines --sort_", &["--sort_by"]),
            ("shepherdctl hold m --dry", &["--dry-run"]),
            ("shepherdctl hold m --dry_", &["--dry_run"]),
            ("shepherdctl get machines --bmdb-u", &["--bmdb-url"]),
            ("shepherdctl get machines --phase Needs", &["NeedsHuman"]),
            ("shepherdctl get machines -o w", &["wide"]),
            ("shepherdctl --output js", &["json", "jsonpath="]),
            ("shepherdctl wait machines m --for he", &["healthy"]),
            ("shepherdctl prioritize m u", &["urgent"]),
            ("shepherdctl retire waive m w", &["wipe"]),
            ("shepherdctl completions f", &["fish"]),
            ("shepherdctl nothing-begins-so", &[]),
            // Without a dash, flags are not offered.
            ("shepherdctl why ", &[]),
        ] {
            let mut found = offered(line).0;
            found.sort_unstable();
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn names_are_looked_up_where_a_command_takes_them() {
        use ObjectKind::{Artefact, Cluster, Context, Machine, Provider, Token, Update};
        for (line, expected) in [
            ("shepherdctl why si", Some((Machine, "si"))),
            ("shepherdctl get machines a si", Some((Machine, "si"))),
            ("shepherdctl get machine ", Some((Machine, ""))),
            ("shepherdctl get machines --sort-by name si", Some((Machine, "si"))),
            ("shepherdctl hold a b rack/si", Some((Machine, "rack/si"))),
            ("shepherdctl label si", Some((Machine, "si"))),
            ("shepherdctl audit --machine si", Some((Machine, "si"))),
            ("shepherdctl wait machines si", Some((Machine, "si"))),
            ("shepherdctl describe provider ra", Some((Provider, "ra"))),
            ("shepherdctl get machines --provider ra", Some((Provider, "ra"))),
            ("shepherdctl get clusters a", Some((Cluster, "a"))),
            ("shepherdctl cluster scale a", Some((Cluster, "a"))),
            ("shepherdctl cluster kubernetes set a", Some((Cluster, "a"))),
            ("shepherdctl cluster approve ams si", Some((Machine, "si"))),
            ("shepherdctl cluster create a", None),
            ("shepherdctl --context pr", Some((Context, "pr"))),
            ("shepherdctl why m --context pr", Some((Context, "pr"))),
            ("shepherdctl contexts use pr", Some((Context, "pr"))),
            ("shepherdctl tokens revoke 0199", Some((Token, "0199"))),
            ("shepherdctl tokens create le", None),
            ("shepherdctl describe token le", Some((Token, "le"))),
            ("shepherdctl artefacts delete one", Some((Artefact, "one"))),
            ("shepherdctl update -l x --release one", Some((Artefact, "one"))),
            ("shepherdctl update pause 3f", Some((Update, "3f"))),
            ("shepherdctl get machines --so", None),
            ("shepherdctl hold -", None),
            ("shepherdctl get loops re", None),
            ("shepherdctl explain si", None),
            ("shepherdctl hold m --reason si", None),
            ("shepherdctl get machines --phase Re", None),
        ] {
            let expected = expected.map(|(kind, prefix)| (kind, prefix.to_owned()));
            assert_eq!(offered(line).1, expected, "{line}");
        }
    }

    /// The positional arguments without any source of values, each with the command that has it.
    fn without_values(command: &Command, path: &[&str]) -> Vec<String> {
        let sourceless = command.get_positionals().filter(|arg| {
            let is_path = arg.get_value_hint() != clap::ValueHint::Unknown;
            let has_values = !arg.get_possible_values().is_empty();
            !is_path && !has_values && value_source(path, arg.get_id().as_str()) == ValueSource::default()
        });
        let own: Vec<String> = sourceless.map(|arg| format!("{} {}", path.join(" "), arg.get_id())).collect();
        let below = command
            .get_subcommands()
            .flat_map(|below| without_values(below, &[path, &[below.get_name()]].concat()));
        own.into_iter().chain(below).collect()
    }

    #[test]
    fn argument_without_candidates_is_a_new_name_or_nothing_that_is_looked_up() {
        let mut expected = vec![
            "approve approval",
            "cluster create name",
            "cluster credentials revoke credential",
            "cluster undeclare role",
            "describe policy name",
            "explain topic",
            "logs log",
            "tokens create name",
        ];
        let kinds = ["approval", "audit", "brake", "budget", "issue", "loop", "session", "shepherd", "work"];
        let listed: Vec<String> = kinds
            .iter()
            .filter_map(|kind| ObjectKind::find(kind))
            .flat_map(|kind| {
                let row = kind.row();
                [format!("get {} names", row.plural), format!("describe {} name", row.singular)]
            })
            .collect();
        expected.extend(listed.iter().map(String::as_str));
        expected.sort_unstable();
        let mut found = without_values(&whole_grammar(), &[]);
        found.sort_unstable();
        assert_eq!(found, expected);
    }
}
