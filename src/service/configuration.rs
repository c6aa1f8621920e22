//! Configuration file (TOML): any flag as a key, and providers as tables.
//!
//! ```toml
//! bmdb_url = "postgres://shepherd@db.example/bmdb"
//! initializer_loop_parallelism = 10
//!
//! [[provider]]
//! name = "rack-a"
//! kind = "static"
//! device_list_url = "file:///etc/shepherd/rack-a.json"
//! ```
//!
//! Keys become arguments in front of those of the command line. So there is one parser, and the same error for a wrong
//! value wherever it is set. `model::configuration_value` decides which TOML value a flag takes. A value that cannot be
//! used is rejected with its key and line, also if the command line overrides it.
//!
//! The file decides what this program runs, so it is refused if another user can change it. A `ConfigMap` of Kubernetes
//! and a file that the user's private group may write are accepted. With a password in it, the file is refused if another
//! user can read it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use trusted_file::private_file::read_private_file;
use trusted_file::unchangeable_path::{FileUse, check_unchangeable};

use crate::bmdb::connection::url;
use crate::model::configuration_value::{
    arguments_of_value, claim_key, describe_type, key_lines, locate_problem,
};
use crate::model::plain_text::replace_hidden;
use crate::model::text_file::decode_text;
use crate::service::failure::ExitFailure;
use crate::service::flags::build_command;
use crate::service::provider_configuration::ProviderConfiguration;

/// The parsed configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfigurationFile {
    /// The flags that it sets, as arguments.
    pub arguments: Vec<OsString>,
    /// The providers that it configures.
    pub providers: Vec<ProviderConfiguration>,
    /// The line of each flag in it, by the name of the flag with underscores.
    pub lines: BTreeMap<String, usize>,
}

/// The file that the arguments or the environment name; `None` if neither does.
#[must_use]
pub fn configuration_path(arguments: &[OsString]) -> Option<PathBuf> {
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        let Some(text) = argument.to_str() else { continue };
        if text == "--config" {
            return rest.next().map(PathBuf::from);
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Some(PathBuf::from(path));
        }
        if text == "--" {
            break;
        }
    }
    std::env::var_os("SHEPHERD_CONFIG").map(PathBuf::from)
}

/// Reads the file, leaving out the flags that `given` or the environment set.
pub fn read_configuration(path: &Path, given: &[OsString]) -> Result<ConfigurationFile, ExitFailure> {
    let shown = path.display();
    let unread = |error: &dyn std::fmt::Display| {
        ExitFailure::usage(format!("cannot read the configuration file {shown}: {error}"))
    };
    let content = std::fs::read(path).map_err(|error| unread(&error))?;
    let text = decode_text(&content).map_err(|error| unread(&error))?;
    let wrong = |problem: &str| {
        ExitFailure::usage(format!("the configuration file {shown}: {}", sanitize_problem(problem)))
    };
    check_unchangeable(path, FileUse::Configuration).map_err(|error| wrong(&error.to_string()))?;
    let table = parse_table(text).map_err(|problem| wrong(&problem))?;
    if table.values().any(has_password) {
        read_private_file("the configuration file, in which a URL has a password,", path)
            .map_err(|error| ExitFailure::usage(error.to_string()))?;
    }
    parse_configuration(table, &key_lines(text), &explicit_flags(given)).map_err(|problem| wrong(&problem))
}

/// Whether a text in a value is a URL with a password.
fn has_password(value: &toml::Value) -> bool {
    match value {
        toml::Value::String(text) => url::has_password(text),
        toml::Value::Array(values) => values.iter().any(has_password),
        toml::Value::Table(table) => table.values().any(has_password),
        _ => false,
    }
}

/// The problem without hidden characters and shortened, because it repeats parts of the file.
fn sanitize_problem(problem: &str) -> String {
    replace_hidden(&problem.chars().take(1000).collect::<String>(), &['\n'])
}

/// Names of the flags that take precedence over the file.
fn explicit_flags(given: &[OsString]) -> BTreeSet<String> {
    let on_the_line = given.iter().filter_map(|argument| {
        let name = argument.to_str()?.strip_prefix("--")?;
        Some(name.split('=').next().unwrap_or(name).to_owned())
    });
    let in_the_environment = std::env::vars_os().filter_map(|(name, _)| variable_flag(name.to_str()?));
    on_the_line.chain(in_the_environment).collect()
}

/// The flag that an environment variable sets. The parser reads only names in capitals.
fn variable_flag(name: &str) -> Option<String> {
    let flag = name.strip_prefix("SHEPHERD_")?;
    (!flag.contains(|c: char| c.is_ascii_lowercase())).then(|| flag.to_lowercase())
}

fn parse_table(text: &str) -> Result<toml::Table, String> {
    text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.lines().count().max(1), error.message())
    })
}

fn parse_configuration(
    mut table: toml::Table,
    lines: &BTreeMap<String, usize>,
    taken: &BTreeSet<String>,
) -> Result<ConfigurationFile, String> {
    let mut file = ConfigurationFile::default();
    if let Some(providers) = table.remove("provider") {
        file.providers = parse_providers(providers, lines)?;
    }
    let command = build_command();
    let mut keys = BTreeMap::new();
    for (key, value) in table {
        let located = |problem: String| locate_problem(lines, &key, &problem);
        let name = claim_key(&mut keys, &key).map_err(located)?;
        let flag = command.get_arguments().find(|flag| flag.get_id().as_str() == name);
        let Some(flag) = flag.filter(|_| !matches!(name.as_str(), "config" | "check" | "help" | "version"))
        else {
            return Err(located(format!(
                "{key} is not a key; every flag of `shepherd --help` is one, and [[provider]]"
            )));
        };
        let arguments = arguments_of_value(flag, &value).map_err(located)?;
        if taken.contains(&name) {
            continue;
        }
        file.arguments.extend(arguments);
        file.lines.extend(lines.get(&key).map(|line| (name, *line)));
    }
    Ok(file)
}

/// Parses the tables `[[provider]]`. Their names differ.
fn parse_providers(
    value: toml::Value,
    lines: &BTreeMap<String, usize>,
) -> Result<Vec<ProviderConfiguration>, String> {
    let toml::Value::Array(tables) = value else {
        let problem = match value {
            toml::Value::Table(_) => {
                "provider is one table; write [[provider]], with two brackets, for each".to_owned()
            }
            other => format!("provider is {}; write a table [[provider]] for each", describe_type(&other)),
        };
        return Err(locate_problem(lines, "provider", &problem));
    };
    let mut providers: Vec<ProviderConfiguration> = Vec::new();
    for (index, table) in tables.into_iter().enumerate() {
        let (place, number) = (format!("provider[{index}]"), index + 1);
        check_provider_values(&table).map_err(|(key, problem)| {
            let problem = format!("[[provider]] number {number}: {problem}");
            locate_problem(lines, &format!("{place}.{key}"), &problem)
        })?;
        let provider: ProviderConfiguration = table.try_into().map_err(|error: toml::de::Error| {
            // The only enumeration in such a table is its kind.
            let problem = error.message().replace("unknown variant", "unknown kind");
            locate_problem(lines, &place, &format!("[[provider]] number {number}: {problem}"))
        })?;
        if providers.iter().any(|other| other.name() == provider.name()) {
            let problem = format!(
                "two [[provider]] tables are named {0}; give one of them another name",
                provider.name()
            );
            return Err(locate_problem(lines, &place, &problem));
        }
        providers.push(provider);
    }
    Ok(providers)
}

/// Rejects a value of another type than its key takes: a whole number for `max_machines`, and one text for every other
/// key. The error has the key, and the problem.
fn check_provider_values(table: &toml::Value) -> Result<(), (String, String)> {
    let Some(table) = table.as_table() else { return Ok(()) };
    for (key, value) in table {
        let problem = match value {
            toml::Value::Integer(number) if key == "max_machines" => {
                if *number >= 0 {
                    continue;
                }
                format!("{key} takes a whole number from 0, and this is {number}")
            }
            _ if key == "max_machines" => {
                format!("{key} takes a whole number, and this is {}", describe_type(value))
            }
            toml::Value::String(_) => continue,
            _ => format!("{key} takes one text in quotes, and this is {}", describe_type(value)),
        };
        return Err((key.clone(), problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn parse(text: &str, taken: &BTreeSet<String>) -> Result<ConfigurationFile, String> {
        parse_configuration(parse_table(text)?, &key_lines(text), taken)
    }

    fn arguments(text: &str, taken: &[&str]) -> Result<Vec<String>, String> {
        let taken = taken.iter().map(|name| (*name).to_owned()).collect();
        parse(text, &taken)
            .map(|file| file.arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect())
    }

    #[test]
    fn keys_become_arguments_unless_overridden() {
        let text = "ssh-user = \"admin\"\ninitializer_loop_parallelism = 10\nbmdb_eat_my_data = true\n\
                    agent_endpoint = [\"a:1\", \"b:2\"]\n";
        let all = arguments(text, &[]).unwrap();
        assert_eq!(
            all,
            [
                "--agent_endpoint=a:1",
                "--agent_endpoint=b:2",
                "--bmdb_eat_my_data",
                "--initializer_loop_parallelism=10",
                "--ssh_user=admin"
            ]
        );
        assert_eq!(arguments(text, &["ssh_user", "agent_endpoint"]).unwrap().len(), 2);
    }

    #[test]
    fn file_with_a_password_must_be_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shepherd.toml");
        let rejection = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = read_configuration(&path, &[]).err().map(|failure| failure.message);
            read.map(|text| text.replace(path.to_str().unwrap(), "FILE")).unwrap_or_default()
        };
        let (plain, secret) = ("ssh_user = \"kim\"", "bmdb_url = \"postgres://kim:secret@db/bmdb\"");
        let list =
            "[[provider]]\nname = \"a\"\nkind = \"static\"\ndevice_list_url = \"https://kim:secret@h/x\"";
        assert_eq!(rejection(plain, 0o644), "");
        for text in [secret, list] {
            assert_eq!(rejection(text, 0o600), "");
            assert_eq!(
                rejection(text, 0o644),
                "the configuration file, in which a URL has a password, FILE can be read by other users (mode \
                 0644); run: chmod 600 FILE"
            );
        }
        for text in [plain, secret] {
            assert_eq!(
                rejection(text, 0o646),
                "the configuration file FILE: FILE can be changed by other users (mode 0646); run: chmod go-w FILE"
            );
        }
    }

    #[test]
    fn unknown_key_is_rejected_by_name() {
        assert_eq!(
            arguments("ssh_uesr = \"x\"", &[]).unwrap_err(),
            "line 1: ssh_uesr is not a key; every flag of `shepherd --help` is one, and [[provider]]"
        );
        // Also if the command line overrides it.
        for taken in [&[][..], &["ssh_user"]] {
            assert_eq!(
                arguments("# who logs in\nssh-user = {}", taken).unwrap_err(),
                "line 2: ssh_user takes one text in quotes, and this is a table"
            );
        }
        assert!(arguments("ssh_user = ", &[]).unwrap_err().contains("line 1"));
    }

    #[test]
    fn two_keys_of_one_flag_are_rejected() {
        let problem = arguments("ssh-user = \"a\"\nssh_user = \"b\"", &[]).unwrap_err();
        assert_eq!(problem, "line 2: ssh_user is the same key as ssh-user; keep one of them");
    }

    #[test]
    fn variable_sets_a_flag_only_in_capitals() {
        assert_eq!(variable_flag("SHEPHERD_SSH_USER").as_deref(), Some("ssh_user"));
        assert_eq!(variable_flag("SHEPHERD_ssh_user"), None);
        assert_eq!(variable_flag("SSH_USER"), None);
    }

    #[test]
    fn providers_are_tables_with_a_kind() {
        let text = "[[provider]]\nname = \"rack-a\"\nkind = \"static\"\ndevice_list_url = \"file:///x\"\n\
                    [[provider]]\nname = \"sim\"\nkind = \"simulated\"\nurl = \"http://127.0.0.1:1\"\n";
        let file = parse(text, &BTreeSet::new()).unwrap();
        assert_eq!(file.providers.iter().map(|p| p.name().as_str()).collect::<Vec<_>>(), ["rack-a", "sim"]);
        for (wrong, part) in [
            ("[[provider]]\nname = \"a\"\nkind = \"magic\"", "[[provider]] number 1: unknown kind `magic`"),
            (
                "[[provider]]\nname = \"A\"\nkind = \"static\"\ndevice_list_url = \"\"",
                "\"A\" is not a valid name",
            ),
            ("[provider]\nname = \"a\"", "line 1: provider is one table; write [[provider]]"),
            ("provider = \"static\"", "line 1: provider is a text; write a table [[provider]]"),
            (
                "[[provider]]\nname = 5\nkind = \"static\"",
                "line 2: [[provider]] number 1: name takes one text in quotes, and this is a whole",
            ),
            (
                "[[provider]]\nmax_machines = \"many\"",
                "line 2: [[provider]] number 1: max_machines takes a whole number, and this is a text",
            ),
            (
                "[[provider]]\nmax_machines = -5",
                "line 2: [[provider]] number 1: max_machines takes a whole number from 0, and this is -5",
            ),
            (
                "[[provider]]\nname = \"a\"\nkind = \"simulated\"\nurl = \"\"\ndevice_creation_rate = \"fast\"",
                "[[provider]] number 1: device_creation_rate: \"fast\" is not a rate; write PERIOD,COUNT",
            ),
        ] {
            let problem = parse(wrong, &BTreeSet::new()).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
        let twice = text.replace("sim\"", "rack-a\"");
        let problem = parse(&twice, &BTreeSet::new()).unwrap_err();
        assert!(problem.starts_with("line 5: two [[provider]] tables are named rack-a"), "{problem}");
    }
}
