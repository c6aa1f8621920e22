//! The tables of flags, keys, parameters and variables have what the programs have.
//!
//! The table [`FILE_FLAGS`] is compared with the command lines of the programs: a new flag that names a file, and is
//! not in the table, fails the test. Its author must decide whether the program believes the file.
//!
//! The table [`PROVIDER_KEYS`] has all keys of the tables `[[provider]]` in the configuration file. Nearly all of them
//! take a text, so nothing but this table states which of them name files. A new key that is not in it fails the test.
//!
//! [`TEXTS_WITHOUT_FILES`] classifies every other flag that takes a text: a type and a name do not always show that a flag
//! names a file. [`URL_FILES`] has the parameters of a URL of the database that name files, and [`VARIABLES`] the
//! environment variables that the source code names. A new one that is not in its table fails the test.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Arg, Command, CommandFactory as _};
use shepherd::bmdb::connection::tls_files::file_parameters;
use shepherd::service::configuration::read_configuration;

use crate::file_flags::{FILE_FLAGS, FileUse, PROVIDER_KEYS, URL_FILES};
use crate::harness::aloud::TestResult;
use crate::harness::program::Place;
use crate::harness::source;

/// Flags and arguments of all programs that take a text, and that no text of which names a file.
const TEXTS_WITHOUT_FILES: &[&str] = &[
    "access",
    "action",
    "actor",
    "add_on",
    "add_roles",
    "agent_endpoint",
    "api_endpoint",
    "approval",
    "artefact",
    "before",
    "bundle",
    // What `roleserver authority` prints, and no path.
    "certificate",
    "cluster_domain",
    "condition",
    "confirm",
    "context",
    "credential",
    "curators",
    "cursor",
    "fact",
    "fail_on",
    "fingerprint",
    "holder",
    "id",
    "keys",
    "kind",
    "kubernetes_bundle",
    "location",
    "log",
    "machine",
    "machines",
    "manufacturer",
    "name",
    "names",
    "otlp_endpoint",
    "phase",
    "pod_range",
    "process",
    "product",
    "provider",
    "provider_name",
    "reason",
    "release",
    "remove_add_on",
    "remove_roles",
    "role",
    "roleserver_release",
    "rpc",
    "save_context",
    "scope",
    "service_range",
    "since",
    "snapshot",
    "sort_by",
    "ssh_user",
    "stage",
    "static_device_list_sha256",
    "storage_driver",
    "target_machine",
    "topic",
    "until",
    "url",
    "words",
];

/// Beginnings of the names of variables that are looked for in the source code.
const VARIABLE_PREFIXES: [&str; 6] = ["OTEL_", "PG", "ROLESERVER_", "SHEPHERD_", "SSL_", "XDG_"];

/// Environment variables that the source code names, apart from those that set flags and have their uses.
const VARIABLES: &[(&str, FileUse)] = &[
    ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", FileUse::NoFile),
    ("OTEL_BSP_MAX_QUEUE_SIZE", FileUse::NoFile),
    ("OTEL_BSP_SCHEDULE_DELAY", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", FileUse::Address),
    ("OTEL_EXPORTER_OTLP_HEADERS", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", FileUse::Address),
    ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", FileUse::NoFile),
    ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", FileUse::NoFile),
    ("OTEL_SDK_DISABLED", FileUse::NoFile),
    ("OTEL_SERVICE_NAME", FileUse::NoFile),
    ("OTEL_TRACES_EXPORTER", FileUse::NoFile),
    ("OTEL_TRACES_SAMPLER", FileUse::NoFile),
    ("OTEL_TRACES_SAMPLER_ARG", FileUse::NoFile),
    ("PGPASSWORD", FileUse::NoFile),
    ("PGSSLCERT", FileUse::Trusted),
    ("PGSSLKEY", FileUse::Private),
    ("PGSSLMODE", FileUse::NoFile),
    ("PGSSLROOTCERT", FileUse::Trusted),
    // A file in the directory of a PostgreSQL, and no variable.
    ("PG_VERSION", FileUse::NoFile),
    ("ROLESERVER_ALLOWED_FAULTS", FileUse::NoFile),
    ("ROLESERVER_LOG", FileUse::NoFile),
    ("ROLESERVER_STATE_DIR", FileUse::State),
    ("ROLESERVER_SUPERVISION", FileUse::NoFile),
    ("SHEPHERD_BMDB_DIALECT", FileUse::NoFile),
    ("SHEPHERD_BMDB_URL", FileUse::Address),
    ("SHEPHERD_CONFIG", FileUse::Configuration),
    ("SHEPHERD_CONTEXT", FileUse::NoFile),
    // An operator's own file. The files of tokens that it names are private.
    ("SHEPHERD_CONTEXTS", FileUse::Content),
    ("SHEPHERD_FAILPOINT", FileUse::NoFile),
    ("SHEPHERD_INTENT_ID", FileUse::NoFile),
    // Set for a child, with what is in its files.
    ("SHEPHERD_MATERIAL", FileUse::NoFile),
    // Its programs run as the user who sets the variable.
    ("SHEPHERD_POSTGRES_BIN", FileUse::Content),
    ("SHEPHERD_SERVICE", FileUse::NoFile),
    ("SHEPHERD_SIMULATOR_URL", FileUse::Address),
    ("SHEPHERD_SSH_PASSWORD", FileUse::NoFile),
    ("XDG_CONFIG_HOME", FileUse::Content),
    // systemd makes it for the user.
    ("XDG_RUNTIME_DIR", FileUse::Content),
];

/// Whether an argument names a file, by its type, by the name of its value, or by its own name.
fn names_a_file(arg: &Arg) -> bool {
    let by_type = arg.get_value_parser().type_id() == TypeId::of::<PathBuf>();
    let values = arg.get_value_names().unwrap_or_default();
    // A value can have several words: `NAME=FILE`.
    let mut words = values.iter().flat_map(|name| name.as_str().split(|c: char| !c.is_ascii_alphabetic()));
    let by_value = words
        .any(|word| matches!(word, "FILE" | "FILES" | "DIR" | "DIRECTORY" | "PATH" | "PATHS" | "PROGRAM"));
    let id = arg.get_id().as_str().trim_end_matches('s');
    let by_name = ["_path", "_file", "_dir", "_url"].iter().any(|end| id.ends_with(end));
    by_type || by_value || by_name
}

/// Whether an argument takes a text, which can be anything.
fn takes_text(arg: &Arg) -> bool {
    let value = arg.get_value_parser().type_id();
    arg.get_action().takes_values() && (value == TypeId::of::<String>() || value == TypeId::of::<OsString>())
}

/// The chosen arguments of a command line, as `program subcommand`, `flag`.
fn flags_of(name: &str, command: &Command, chosen: fn(&Arg) -> bool, found: &mut BTreeSet<(String, String)>) {
    let flags = command.get_arguments().filter(|arg| chosen(arg));
    found.extend(flags.map(|arg| (name.to_owned(), arg.get_id().as_str().to_owned())));
    for subcommand in command.get_subcommands() {
        flags_of(&format!("{name} {}", subcommand.get_name()), subcommand, chosen, found);
    }
}

/// The chosen arguments of all programs.
fn all_flags(chosen: fn(&Arg) -> bool) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (name, command) in [
        ("roleserver", shepherd::roleserver::program::build_command()),
        ("shepherd", shepherd::service::flags::build_command()),
        ("shepherdctl", shepherd::cli::command::Cli::command()),
    ] {
        flags_of(name, &command, chosen, &mut found);
    }
    found
}

#[test]
fn each_flag_that_takes_a_text_is_classified() {
    let files: BTreeSet<_> = FILE_FLAGS.iter().map(|(name, flag, _)| (*name, *flag)).collect();
    let texts: BTreeSet<_> = TEXTS_WITHOUT_FILES.iter().copied().collect();
    let found = all_flags(takes_text);
    let others = found.iter().filter(|(name, flag)| !files.contains(&(name.as_str(), flag.as_str())));
    let others: BTreeSet<_> = others.map(|(_, flag)| flag.as_str()).collect();
    let missing: Vec<_> = others.difference(&texts).collect();
    assert!(
        missing.is_empty(),
        "add these to FILE_FLAGS if they name files, or to TEXTS_WITHOUT_FILES: {missing:?}"
    );
    let gone: Vec<_> = texts.difference(&others).collect();
    assert!(gone.is_empty(), "TEXTS_WITHOUT_FILES has flags that no program has: {gone:?}");
}

#[test]
fn each_parameter_of_a_url_and_each_variable_is_classified() -> TestResult {
    let table: BTreeMap<_, _> = URL_FILES.iter().copied().collect();
    let variables: BTreeMap<_, _> = VARIABLES.iter().copied().collect();
    let found: BTreeSet<_> = file_parameters().map(|(parameter, _)| parameter).collect();
    let expected: BTreeSet<_> = table.keys().copied().collect();
    assert_eq!(found, expected, "URL_FILES has other parameters than a URL");
    for (parameter, variable) in file_parameters() {
        assert_eq!(table.get(parameter), variables.get(variable), "{parameter} and {variable}");
    }
    let mut found = BTreeSet::new();
    for path in source::rust_files()? {
        let text = source::read(&path)?;
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        found.extend(code.split('"').filter(|word| is_variable(word)).map(str::to_owned));
    }
    let found: BTreeSet<_> = found.iter().map(String::as_str).collect();
    let table: BTreeSet<_> = variables.keys().copied().collect();
    let missing: Vec<_> = found.difference(&table).collect();
    assert!(missing.is_empty(), "add these to VARIABLES, and decide what their files must be: {missing:?}");
    let gone: Vec<_> = table.difference(&found).collect();
    assert!(gone.is_empty(), "VARIABLES has names that are not in the source code: {gone:?}");
    Ok(())
}

/// Whether a text of the source code has the form of the name of a variable.
fn is_variable(word: &str) -> bool {
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    word.chars().all(is_name)
        && VARIABLE_PREFIXES.iter().any(|prefix| word.len() > prefix.len() && word.starts_with(prefix))
}

#[test]
fn each_flag_that_names_a_file_is_in_the_table() {
    let found = all_flags(names_a_file);
    let table: BTreeSet<_> =
        FILE_FLAGS.iter().map(|(name, flag, _)| ((*name).to_owned(), (*flag).to_owned())).collect();
    let missing: Vec<_> = found.difference(&table).collect();
    assert!(
        missing.is_empty(),
        "add these to FILE_FLAGS, and decide who may read and change the files: {missing:?}"
    );
    let gone: Vec<_> = table.difference(&found).collect();
    assert!(gone.is_empty(), "FILE_FLAGS has flags that no program has: {gone:?}");
}

/// The words in backquotes in the error that rejects a table of a provider.
fn words_of_rejection(place: &Place, table: &str) -> anyhow::Result<Vec<String>> {
    let path = place.write("shepherd.toml", format!("[[provider]]\n{table}"))?;
    let Err(failure) = read_configuration(&path, &[]) else { bail!("it was accepted: {table}") };
    Ok(failure.message.split('`').skip(1).step_by(2).map(str::to_owned).collect())
}

/// All keys of providers, by kind. The program lists them when it rejects another kind and another key. The first word
/// of its error is the one that it rejects.
fn provider_keys(place: &Place) -> anyhow::Result<BTreeSet<(String, String)>> {
    let mut found = BTreeSet::new();
    for kind in words_of_rejection(place, "kind = \"none\"\n")?.into_iter().skip(1) {
        let keys = words_of_rejection(place, &format!("kind = {kind:?}\nnone = \"\"\n"))?;
        found.extend(keys.into_iter().skip(1).map(|key| (kind.clone(), key)));
    }
    Ok(found)
}

#[test]
fn each_key_of_a_provider_is_in_the_table() -> TestResult {
    let found = provider_keys(&Place::new()?)?;
    let table: BTreeSet<_> =
        PROVIDER_KEYS.iter().map(|(kind, key, _)| ((*kind).to_owned(), (*key).to_owned())).collect();
    let missing: Vec<_> = found.difference(&table).collect();
    assert!(
        missing.is_empty(),
        "add these to PROVIDER_KEYS, and decide who may read and change the files that they name: {missing:?}"
    );
    let gone: Vec<_> = table.difference(&found).collect();
    assert!(gone.is_empty(), "PROVIDER_KEYS has keys that no provider has: {gone:?}");
    Ok(())
}

#[test]
fn new_flag_that_names_a_file_is_noticed() {
    for (arg, expected) in [
        (Arg::new("license").long("license").value_name("FILE"), true),
        (Arg::new("license").long("license").value_parser(clap::value_parser!(PathBuf)), true),
        (Arg::new("license_path").long("license_path"), true),
        (Arg::new("license_paths").long("license_paths"), true),
        (Arg::new("license").long("license").value_name("NAME=FILE"), true),
        (Arg::new("license").long("license").value_name("TEXT"), false),
    ] {
        assert_eq!(names_a_file(&arg), expected, "{arg:?}");
    }
    assert!(takes_text(&Arg::new("license_keys").long("license_keys")));
    assert!(!takes_text(&Arg::new("license").long("license").action(clap::ArgAction::SetTrue)));
    assert!(is_variable("SHEPHERD_LICENSE") && is_variable("PGPASSFILE") && !is_variable("SHEPHERD_"));
}
