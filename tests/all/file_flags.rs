//! Every flag of the three programs and every key of a provider that names a file, and what each file must be.
//!
//! The table [`FILE_FLAGS`] is compared with the command lines of the programs: a new flag that names a file, and is
//! not in the table, fails the test. Its author must decide whether the program believes the file.
//!
//! The table [`PROVIDER_KEYS`] has all keys of the tables `[[provider]]` in the configuration file. Each of them takes
//! a text, so nothing but this table states which of them name files. A new key that is not in it fails the test.
//!
//! [`TEXTS_WITHOUT_FILES`] classifies every other flag that takes a text: a type and a name do not always show that a flag
//! names a file. [`URL_FILES`] has the parameters of a URL of the database that name files, and [`VARIABLES`] the
//! environment variables that the source code names. A new one that is not in its table fails the test.
//!
//! Each private file is tried with modes in which other users can read or write it, and each trusted one with modes in
//! which they can change it. The program must refuse it in one sentence. `crates/trusted-file` has the decisions, with tests
//! of owners, directories and links.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail};
use clap::{Arg, Command, CommandFactory as _};
use rcgen::{CertificateParams, KeyPair};
use shepherd::bmdb::connection::tls_files::file_parameters;
use shepherd::model::program_mark::ROLE_SERVER_MARK;
use shepherd::service::configuration::read_configuration;
use trusted_file::private_group::read_private_group;

use crate::harness::aloud::TestResult;
use crate::harness::child::guarded;
use crate::harness::program::{Place, ProgramOutput};
use crate::harness::source;

/// What a program does with the file that a flag names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileUse {
    /// A key or password: refused if other users can read or write it.
    Private,
    /// Flags and providers: refused if other users can change it, or read a password in it.
    Configuration,
    /// A device list: its commands are refused if other users can change it.
    Commands,
    /// What machines run as root or trust: refused if other users can change it.
    Trusted,
    /// The state of a machine: refused if other users can write to the directory.
    State,
    /// Programs or data with content that is checked or belongs to the caller.
    Content,
    /// Written by the program.
    Output,
    /// A path on a machine: a takeover checks it there.
    OnTheMachine,
    /// An address, never a file.
    Address,
    /// A name or a digest, never a file.
    NoFile,
}

/// Program and subcommand, flag, and the use of the file.
const FILE_FLAGS: &[(&str, &str, FileUse)] = &[
    ("roleserver enroll", "state_dir", FileUse::State),
    ("roleserver authority", "state_dir", FileUse::State),
    ("roleserver follow-authority", "state_dir", FileUse::State),
    ("roleserver metrics", "state_dir", FileUse::State),
    ("roleserver plan", "state_dir", FileUse::State),
    ("roleserver run", "state_dir", FileUse::State),
    ("roleserver status", "state_dir", FileUse::State),
    ("roleserver supervise", "state_dir", FileUse::State),
    ("roleserver watch-update", "state_dir", FileUse::State),
    ("shepherd", "agent_endpoint_ca_certificate_path", FileUse::Trusted),
    ("shepherd", "agent_executable_path", FileUse::Trusted),
    ("shepherd", "agent_target_path", FileUse::OnTheMachine),
    ("shepherd", "agent_tls_certificate_path", FileUse::Trusted),
    ("shepherd", "agent_tls_key_path", FileUse::Private),
    // PostgreSQL itself checks the directory of its data.
    ("shepherd", "bmdb_dir", FileUse::Content),
    ("shepherd", "bmdb_direct_url", FileUse::Address),
    ("shepherd", "bmdb_url", FileUse::Address),
    ("shepherd", "config", FileUse::Configuration),
    ("shepherd", "key_rotation_path", FileUse::Trusted),
    ("shepherd", "secrets_key_path", FileUse::Private),
    ("shepherd", "signing_keys_path", FileUse::Trusted),
    ("shepherd", "simulated_url", FileUse::Address),
    ("shepherd", "ssh_key_path", FileUse::Private),
    ("shepherd", "ssh_password_path", FileUse::Private),
    ("shepherd", "static_device_list_url", FileUse::Commands),
    ("shepherd demo", "build_shepherdctl", FileUse::Content),
    ("shepherd demo", "state_dir", FileUse::Content),
    ("shepherd simulator", "roleserver_path", FileUse::Content),
    ("shepherd simulator", "state_path", FileUse::Output),
    ("shepherdctl", "bmdb_url", FileUse::Address),
    ("shepherdctl artefacts add", "file", FileUse::Content),
    ("shepherdctl artefacts add", "signature", FileUse::Content),
    ("shepherdctl cluster credentials issue", "output_dir", FileUse::Output),
    ("shepherdctl cluster declare", "file", FileUse::Content),
    ("shepherdctl cluster declare", "output_file", FileUse::Output),
    ("shepherdctl cluster declare", "signature", FileUse::Content),
    ("shepherdctl cluster kubeconfig", "output_file", FileUse::Output),
    ("shepherdctl debug bundle", "output_file", FileUse::Output),
    ("shepherdctl manual", "directory", FileUse::Output),
    ("shepherdctl plan", "diff", FileUse::Content),
    ("shepherdctl tokens bootstrap", "output_file", FileUse::Output),
    ("shepherdctl tokens create", "certificate", FileUse::Content),
    ("shepherdctl tokens create", "output_file", FileUse::Output),
];

/// Kind of the provider, key of its table in the configuration file, and the use of the file.
const PROVIDER_KEYS: &[(&str, &str, FileUse)] = &[
    ("simulated", "name", FileUse::NoFile),
    ("simulated", "url", FileUse::Address),
    ("static", "device_list_sha256", FileUse::NoFile),
    ("static", "device_list_url", FileUse::Commands),
    ("static", "name", FileUse::NoFile),
    ("static", "node_address", FileUse::NoFile),
    ("static", "ssh_password_path", FileUse::Private),
];

/// Flags and arguments of all programs that take a text, and that no text of which names a file.
const TEXTS_WITHOUT_FILES: &[&str] = &[
    "access",
    "action",
    "add_on",
    "add_roles",
    "agent_endpoint",
    "api_endpoint",
    "approval",
    "artefact",
    "bundle",
    // What `roleserver authority` prints, and no path.
    "certificate",
    "cluster_domain",
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
    "key",
    "keys",
    "kind",
    "kubernetes_bundle",
    "label",
    "level",
    "location",
    "log",
    "machine",
    "manufacturer",
    "name",
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
    "save_context",
    "scope",
    "selector",
    "service_range",
    "set",
    "snapshot",
    "ssh_user",
    "stage",
    "static_device_list_sha256",
    "storage_driver",
    "target_machine",
    "until",
    "url",
];

/// Parameters of a URL of the database that name files.
const URL_FILES: &[(&str, FileUse)] =
    &[("sslcert", FileUse::Trusted), ("sslkey", FileUse::Private), ("sslrootcert", FileUse::Trusted)];

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

/// The name of the provider in the configuration files here.
const PROVIDER: &str = "rack-a";

/// Modes in which other users can read or write a file.
const MODES_OF_OTHERS: [u32; 6] = [0o640, 0o620, 0o604, 0o602, 0o644, 0o666];

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

/// A program that is accepted for machines, as small as that of simulated ones. The directories on the way to the programs
/// of this build may be writable for others.
pub(crate) fn write_agent(place: &Place) -> anyhow::Result<PathBuf> {
    place.write("agent", [fs::read("/bin/sh")?.as_slice(), &ROLE_SERVER_MARK].concat())
}

/// Flags of `shepherd` with which a check of everything succeeds, and needs no database.
pub(crate) fn complete(place: &Place) -> anyhow::Result<Vec<(String, String)>> {
    let list = place.write("devices.json", r#"[{"ID": "a", "Addr": "192.0.2.1"}]"#)?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["127.0.0.1".to_owned()])?.self_signed(&key)?.pem();
    let path = |name: &str, content: String| -> anyhow::Result<String> {
        Ok(place.write(name, content)?.display().to_string())
    };
    Ok([
        ("provider", "static".to_owned()),
        ("static_device_list_url", format!("file://{}", list.display())),
        ("agent_executable_path", write_agent(place)?.display().to_string()),
        ("agent_endpoint", "127.0.0.1:8443".to_owned()),
        ("agent_listen_address", "127.0.0.1:0".to_owned()),
        ("ssh_key_path", place.path("ssh_key").display().to_string()),
        ("secrets_key_path", place.path("secrets.key").display().to_string()),
        ("agent_tls_certificate_path", path("certificate.pem", certificate)?),
        ("agent_tls_key_path", path("key.pem", key.serialize_pem())?),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into())
}

/// Runs `shepherd --check` with one flag replaced.
fn check_with(
    place: &Place,
    flags: &[(String, String)],
    flag: &str,
    path: &Path,
) -> anyhow::Result<ProgramOutput> {
    let others =
        flags.iter().filter(|(name, _)| name != flag).map(|(name, value)| format!("--{name}={value}"));
    let own = ["--check".to_owned(), "--bmdb_eat_my_data".to_owned(), format!("--{flag}={}", path.display())];
    place.run(others.chain(own))
}

#[test]
fn private_file_that_others_can_read_or_write_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let private = FILE_FLAGS.iter().filter(|(_, _, file_use)| *file_use == FileUse::Private);
    for (program, flag, _) in private {
        assert_eq!(*program, "shepherd", "write a case for --{flag} of another program");
        let key = place.write(flag, "of no use\n")?;
        for mode in MODES_OF_OTHERS {
            fs::set_permissions(&key, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, flag, &key)?;
            let sentence = format!("by other users (mode {mode:04o}); run: chmod 600 {}\n", key.display());
            assert!(
                reported.code == Some(2) && reported.stderr.ends_with(&sentence),
                "--{flag} with mode {mode:o}: {reported:?}"
            );
        }
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let reported = check_with(&place, &flags, flag, &key)?;
        assert!(!reported.stderr.contains("other users"), "--{flag}: {reported:?}");
    }
    Ok(())
}

#[test]
fn trusted_file_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let directory = place.path("trusted");
    fs::create_dir(&directory)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
    let agent = fs::read(write_agent(&place)?)?;
    let trusted = FILE_FLAGS.iter().filter(|(_, _, file_use)| *file_use == FileUse::Trusted);
    for (program, flag, _) in trusted {
        assert_eq!(*program, "shepherd", "write a case for --{flag} of another program");
        // The content of others is not looked at before.
        let content =
            if *flag == "agent_executable_path" { agent.as_slice() } else { b"of no use\n".as_slice() };
        let file = place.write(&format!("trusted/{flag}"), content)?;
        // A file that only the private group of this user may write is accepted: root has none.
        let metadata = fs::metadata(&file)?;
        let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
        for (part, safe, modes) in [
            (&file, 0o644, [(0o600, true), (0o644, true), (0o664, is_private), (0o646, false)]),
            (&directory, 0o755, [(0o700, true), (0o755, true), (0o775, is_private), (0o757, false)]),
        ] {
            for (mode, is_safe) in modes {
                fs::set_permissions(part, fs::Permissions::from_mode(mode))?;
                let reported = check_with(&place, &flags, flag, &file)?;
                let sentence = format!(
                    "shepherd: --{flag} {} cannot be trusted: {1} can be changed by other users (mode {mode:04o}); \
                     run: chmod go-w {1}\n",
                    file.display(),
                    part.display()
                );
                let is_refused = reported.code == Some(2) && reported.stderr.ends_with(&sentence);
                assert!(
                    if is_safe { !reported.stderr.contains("other users") } else { is_refused },
                    "--{flag}, {} with mode {mode:o}: {reported:?}",
                    part.display()
                );
            }
            fs::set_permissions(part, fs::Permissions::from_mode(safe))?;
        }
    }
    Ok(())
}

/// Checks the service with a URL of the database that names this file, or with the variable that stands in for it.
fn check_with_url(
    place: &Place,
    parameter: &str,
    file: &Path,
    in_url: bool,
) -> anyhow::Result<ProgramOutput> {
    let variables: BTreeMap<_, _> = file_parameters().collect();
    let variable = variables.get(parameter).context("no variable")?;
    let list = place.write("devices.json", "[]")?;
    // Nothing listens there.
    let url = "--bmdb_url=postgres://kim@127.0.0.1:1/bmdb?sslmode=verify-full".to_owned();
    let url = if in_url { format!("{url}&{parameter}={}", file.display()) } else { url };
    let list = format!("--static_device_list_url=file://{}", list.display());
    let arguments = ["--check", "--components=updater", "--provider=static", &list, &url];
    let mut command = place.program(arguments);
    if !in_url {
        command.env(variable, file);
    }
    Place::finish(command.spawn()?)
}

/// Requires that a file of the URL was refused in a sentence with these words.
fn require_refusal(reported: &ProgramOutput, parameter: &str, file: &Path, words: &str, mode: u32) {
    let shown = file.display();
    let begin = format!("shepherd: the file {shown} of {parameter} in the BMDB URL cannot be used: ");
    let last = reported.stderr.lines().last().unwrap_or_default();
    assert!(
        reported.code == Some(2) && last.starts_with(&begin) && last.contains(words),
        "{parameter} with mode {mode:o}: {reported:?}"
    );
}

/// Requires that the files of the URL were accepted, and that the connection failed.
fn require_connection(reported: &ProgramOutput, parameter: &str, mode: u32) {
    assert!(
        reported.code == Some(1) && reported.stderr.contains("cannot reach the BMDB"),
        "{parameter} with mode {mode:o}: {reported:?}"
    );
}

/// libpq refuses such a key. The library that is used here would read it.
#[test]
fn private_file_of_the_database_url_that_others_can_read_or_write_is_refused() -> TestResult {
    let place = Place::new()?;
    let key = place.write("database.key", KeyPair::generate()?.serialize_pem())?;
    let private = URL_FILES.iter().filter(|(_, file_use)| *file_use == FileUse::Private);
    for (parameter, _) in private {
        for in_url in [true, false] {
            for mode in MODES_OF_OTHERS {
                fs::set_permissions(&key, fs::Permissions::from_mode(mode))?;
                let reported = check_with_url(&place, parameter, &key, in_url)?;
                let words = format!("by other users (mode {mode:04o}); run: chmod 600 {}", key.display());
                require_refusal(&reported, parameter, &key, &words, mode);
            }
            fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
            require_connection(&check_with_url(&place, parameter, &key, in_url)?, parameter, 0o600);
        }
    }
    Ok(())
}

/// A user who can change the CA file can answer in place of the database.
#[test]
fn trusted_file_of_the_database_url_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let directory = place.path("trusted");
    fs::create_dir(&directory)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
    let certificate = CertificateParams::new(["localhost".to_owned()])?.self_signed(&KeyPair::generate()?)?;
    let file = place.write("trusted/database.pem", certificate.pem())?;
    // A file that only the private group of this user may write is accepted: root has none.
    let metadata = fs::metadata(&file)?;
    let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
    let trusted = URL_FILES.iter().filter(|(_, file_use)| *file_use == FileUse::Trusted);
    for (parameter, _) in trusted {
        for (part, safe, modes) in [
            (&file, 0o644, [(0o600, true), (0o644, true), (0o664, is_private), (0o646, false)]),
            (&directory, 0o755, [(0o700, true), (0o755, true), (0o775, is_private), (0o757, false)]),
        ] {
            for (mode, is_safe) in modes {
                fs::set_permissions(part, fs::Permissions::from_mode(mode))?;
                for in_url in [true, false] {
                    let reported = check_with_url(&place, parameter, &file, in_url)?;
                    if is_safe {
                        require_connection(&reported, parameter, mode);
                    } else {
                        let part = part.display();
                        let words = format!(
                            "{part} can be changed by other users (mode {mode:04o}); run: chmod go-w {part}"
                        );
                        require_refusal(&reported, parameter, &file, &words, mode);
                    }
                }
            }
            fs::set_permissions(part, fs::Permissions::from_mode(safe))?;
        }
    }
    Ok(())
}

/// A configuration file with a provider of this kind: with the keys that it must have, and with this one.
fn write_provider(place: &Place, kind: &str, key: &str, value: &str) -> anyhow::Result<PathBuf> {
    let list = place.write("rack-a.json", r#"[{"ID": "b", "Addr": "192.0.2.2"}]"#)?;
    let mut keys = BTreeMap::from([("name", PROVIDER.to_owned()), ("kind", kind.to_owned())]);
    match kind {
        "static" => keys.insert("device_list_url", format!("file://{}", list.display())),
        "simulated" => keys.insert("url", "http://127.0.0.1:9".to_owned()),
        _ => bail!("write the keys of a provider of the kind {kind}"),
    };
    keys.insert(key, value.to_owned());
    let lines: Vec<String> = keys.iter().map(|(key, value)| format!("{key} = {value:?}\n")).collect();
    place.write("shepherd.toml", format!("[[provider]]\n{}", lines.concat()))
}

/// The flag has nothing to do with it, so a person who looks for it in the error would look in the wrong place.
#[test]
fn private_file_of_a_provider_is_refused_by_its_key_in_the_configuration() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let private = PROVIDER_KEYS.iter().filter(|(.., file_use)| *file_use == FileUse::Private);
    let mut count = 0;
    for (kind, key, _) in private {
        let file = place.write(key, "secret\n")?;
        let config = write_provider(&place, kind, key, &file.display().to_string())?;
        let path = file.display();
        for mode in MODES_OF_OTHERS {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, "config", &config)?;
            let begin =
                format!("shepherd: the configuration file: [[provider]] {PROVIDER}: {key} {path} can be ");
            let end = format!(" by other users (mode {mode:04o}); run: chmod 600 {path}\n");
            let text = &reported.stderr;
            assert!(
                reported.code == Some(2)
                    && text.starts_with(&begin)
                    && text.ends_with(&end)
                    && text.lines().count() == 1,
                "{key} of a {kind} provider with mode {mode:o}: {reported:?}"
            );
        }
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        let reported = check_with(&place, &flags, "config", &config)?;
        assert!(
            reported.code == Some(0) && !reported.stderr.contains("other users"),
            "{key} of a {kind} provider: {reported:?}"
        );
        count += 1;
    }
    assert!(count > 0, "no key of a provider names a private file");
    Ok(())
}

#[test]
fn commands_of_a_provider_of_the_configuration_that_others_can_change_are_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let commands = PROVIDER_KEYS.iter().filter(|(.., file_use)| *file_use == FileUse::Commands);
    let mut count = 0;
    for (kind, key, _) in commands {
        let list =
            place.write(key, r#"[{"ID": "b", "Addr": "192.0.2.2", "PowerCommand": ["/bin/true"]}]"#)?;
        let config = write_provider(&place, kind, key, &format!("file://{}", list.display()))?;
        for (mode, is_safe) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&list, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, "config", &config)?;
            let begin = format!("shepherd: provider {PROVIDER}: the device list {}: ", list.display());
            let end = format!("(mode {mode:04o}); run: chmod go-w {}\n", list.display());
            let is_refused = reported.stderr.starts_with(&begin) && reported.stderr.ends_with(&end);
            assert_eq!(
                (reported.code, is_refused),
                (Some(if is_safe { 0 } else { 2 }), !is_safe),
                "{key} of a {kind} provider with mode {mode:o}: {reported:?}"
            );
        }
        count += 1;
    }
    assert!(count > 0, "no key of a provider names a file with commands");
    Ok(())
}

#[test]
fn configuration_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let config = place.write("shepherd.toml", "ssh_user = \"kim\"\n")?;
    // A file that only the private group of this user may write is accepted: root has none.
    let metadata = fs::metadata(&config)?;
    let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
    let by_group = (!is_private).then_some("0664");
    for (mode, expected) in [(0o600, None), (0o644, None), (0o664, by_group), (0o646, Some("0646"))] {
        fs::set_permissions(&config, fs::Permissions::from_mode(mode))?;
        let reported = check_with(&place, &flags, "config", &config)?;
        let path = config.display();
        let sentence = expected.map(|mode| {
            format!(
                "shepherd: the configuration file {path}: {path} can be changed by other users (mode {mode}); run: \
                 chmod go-w {path}\n"
            )
        });
        assert!(
            reported.stderr == sentence.clone().unwrap_or_default()
                && reported.code == Some(if sentence.is_some() { 2 } else { 0 }),
            "mode {mode:o}: {reported:?}"
        );
    }
    Ok(())
}

#[test]
fn commands_that_others_can_change_are_refused() -> TestResult {
    let place = Place::new()?;
    let mut flags = complete(&place)?;
    let list =
        place.write("list.json", r#"[{"ID": "a", "Addr": "192.0.2.1", "PowerCommand": ["/bin/true"]}]"#)?;
    flags.retain(|(name, _)| name != "static_device_list_url");
    flags.push(("static_device_list_url".to_owned(), format!("file://{}", list.display())));
    for (mode, is_safe) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
        fs::set_permissions(&list, fs::Permissions::from_mode(mode))?;
        let reported = check_with(&place, &flags, "ssh_user", Path::new("root"))?;
        let path = list.display();
        let sentence = format!(
            "shepherd: provider static: the device list {path}: line 1, field \"PowerCommand\": commands and host keys \
             are accepted only from a file that nobody else can change, and {path} can be changed by other users \
             (mode {mode:04o}); run: chmod go-w {path}\n"
        );
        assert!(
            (reported.code, reported.stderr.as_str())
                == if is_safe { (Some(0), "") } else { (Some(2), sentence.as_str()) },
            "mode {mode:o}: {reported:?}"
        );
    }
    Ok(())
}

#[test]
fn state_directory_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let state = place.path("state");
    fs::create_dir(&state)?;
    for mode in [0o775, 0o757, 0o777] {
        fs::set_permissions(&state, fs::Permissions::from_mode(mode))?;
        let child = guarded(env!("CARGO_BIN_EXE_roleserver"))
            .arg("run")
            .arg(format!("--state_dir={}", state.display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("roleserver")?;
        let reported = Place::finish(child)?;
        let path = state.display();
        let sentence =
            format!("{path} can be changed by other users (mode {mode:04o}); run: chmod go-w {path}");
        assert!(
            reported.code != Some(0) && reported.stderr.contains(&sentence),
            "mode {mode:o}: {reported:?}"
        );
    }
    Ok(())
}
