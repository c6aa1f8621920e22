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
//! value wherever it is set.
//!
//! The file decides what this program runs, so it is refused if another user can change it. A `ConfigMap` of Kubernetes
//! and a file that the user's private group may write are accepted. With a password in it, the file is refused if another
//! user can read it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use trusted_file::private_file::read_private_file;
use trusted_file::unchangeable_path::{FileUse, check_unchangeable};

use crate::bmdb::connection::url::password_warning;
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
    let text = std::fs::read_to_string(path).map_err(|error| {
        ExitFailure::usage(format!("cannot read the configuration file {shown}: {error}"))
    })?;
    let wrong = |problem: &str| {
        ExitFailure::usage(format!("the configuration file {shown}: {}", sanitize_problem(problem)))
    };
    check_unchangeable(path, FileUse::Configuration).map_err(|error| wrong(&error.to_string()))?;
    let table = parse_table(&text).map_err(|problem| wrong(&problem))?;
    if table.values().any(has_password) {
        read_private_file("the configuration file, in which a URL has a password,", path)
            .map_err(|error| ExitFailure::usage(error.to_string()))?;
    }
    parse_configuration(table, &explicit_flags(given)).map_err(|problem| wrong(&problem))
}

/// Whether a text in a value is a URL with a password.
fn has_password(value: &toml::Value) -> bool {
    match value {
        toml::Value::String(text) => password_warning(text).is_some(),
        toml::Value::Array(values) => values.iter().any(has_password),
        toml::Value::Table(table) => table.values().any(has_password),
        _ => false,
    }
}

/// The problem without control characters and shortened, because it repeats parts of the file.
fn sanitize_problem(problem: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    problem.chars().map(shown).take(1000).collect()
}

/// Names of the flags that take precedence over the file.
fn explicit_flags(given: &[OsString]) -> BTreeSet<String> {
    let on_the_line = given.iter().filter_map(|argument| {
        let name = argument.to_str()?.strip_prefix("--")?;
        Some(name.split('=').next().unwrap_or(name).to_owned())
    });
    let in_the_environment = std::env::vars_os()
        .filter_map(|(name, _)| Some(name.to_str()?.strip_prefix("SHEPHERD_")?.to_lowercase()));
    on_the_line.chain(in_the_environment).collect()
}

fn parse_table(text: &str) -> Result<toml::Table, String> {
    text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.lines().count().max(1), error.message())
    })
}

fn parse_configuration(
    mut table: toml::Table,
    taken: &BTreeSet<String>,
) -> Result<ConfigurationFile, String> {
    let mut file = ConfigurationFile::default();
    if let Some(providers) = table.remove("provider") {
        let toml::Value::Array(providers) = providers else {
            return Err("provider is one table; write [[provider]], with two brackets, for each".to_owned());
        };
        for (number, provider) in providers.into_iter().enumerate() {
            let provider = provider.try_into().map_err(|error: toml::de::Error| {
                // The only enumeration in such a table is its kind.
                let problem = error.message().replace("unknown variant", "unknown kind");
                format!("[[provider]] number {}: {problem}", number + 1)
            })?;
            file.providers.push(provider);
        }
    }
    let known: BTreeSet<String> =
        build_command().get_arguments().map(|argument| argument.get_id().as_str().to_owned()).collect();
    for (key, value) in table {
        let name = key.replace('-', "_");
        if !known.contains(&name) || matches!(name.as_str(), "config" | "check" | "help" | "version") {
            return Err(format!(
                "{key} is not a key; every flag of `shepherd --help` is one, and [[provider]]"
            ));
        }
        if taken.contains(&name) {
            continue;
        }
        push_argument(&mut file.arguments, &name, &value)?;
    }
    let mut names = BTreeSet::new();
    for provider in &file.providers {
        if !names.insert(provider.name()) {
            return Err(format!(
                "two [[provider]] tables are named {0}; give one of them another name",
                provider.name()
            ));
        }
    }
    Ok(file)
}

fn push_argument(arguments: &mut Vec<OsString>, name: &str, value: &toml::Value) -> Result<(), String> {
    let text = match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(true) => {
            arguments.push(format!("--{name}").into());
            return Ok(());
        }
        toml::Value::Boolean(false) => return Ok(()),
        toml::Value::Array(values) => {
            return values.iter().try_for_each(|value| push_argument(arguments, name, value));
        }
        toml::Value::Table(_) | toml::Value::Datetime(_) => {
            return Err(format!("{name} takes a text, a number, true or false, or a list of those"));
        }
    };
    arguments.push(format!("--{name}={text}").into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn parse(text: &str, taken: &BTreeSet<String>) -> Result<ConfigurationFile, String> {
        parse_configuration(parse_table(text)?, taken)
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
            "ssh_uesr is not a key; every flag of `shepherd --help` is one, and [[provider]]"
        );
        assert!(arguments("ssh_user = {}", &[]).unwrap_err().starts_with("ssh_user takes a text"));
        assert!(arguments("ssh_user = ", &[]).unwrap_err().contains("line 1"));
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
            ("[provider]\nname = \"a\"", "write [[provider]]"),
        ] {
            let problem = parse(wrong, &BTreeSet::new()).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
        let twice = text.replace("sim\"", "rack-a\"");
        let problem = parse(&twice, &BTreeSet::new()).unwrap_err();
        assert!(problem.starts_with("two [[provider]] tables are named rack-a"), "{problem}");
    }
}
