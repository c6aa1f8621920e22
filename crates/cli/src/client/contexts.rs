//! Contexts file: servers, CA certificate and token of each fleet.
//!
//! The contexts are in one TOML file, `~/.config/shepherd/contexts.toml` or the path in `SHEPHERD_CONTEXTS`. It
//! contains no secret: each token is in a file of its own that only its owner can read, and the contexts file has the
//! path of that file. `tokens bootstrap --save-context` writes both, for an operator with write access to the BMDB.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use trusted_file::private_file::read_private_file;

use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::output::file::{create_parent_dir, write_file_atomic};
use model::text_file::decode_text;

/// The content of the contexts file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    /// Name of the context that is used if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The contexts by their names.
    #[serde(default)]
    pub contexts: BTreeMap<String, Context>,
}

/// The API of one fleet: servers, CA certificate, token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// `HOST:PORT` of its servers, tried in turn.
    pub servers: Vec<String>,
    /// Path of the CA certificate (PEM) that verifies the servers; `None` uses the trust store of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificate_path: Option<PathBuf>,
    /// Path of the file that contains the token.
    pub token_path: PathBuf,
}

/// The path of the contexts file.
pub fn contexts_path() -> Result<PathBuf, CliError> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = variable("SHEPHERD_CONTEXTS") {
        return Ok(path);
    }
    let directory = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
    let directory = directory.ok_or_else(|| {
        CliError::Invalid(
            "there is no home directory to read contexts from; name their file by SHEPHERD_CONTEXTS"
                .to_owned(),
        )
    })?;
    Ok(directory.join("shepherd").join("contexts.toml"))
}

impl Contexts {
    /// Reads the contexts file; without a file there are no contexts.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let unread = |error: &dyn std::fmt::Display| {
            CliError::Invalid(format!("cannot read the contexts in {}: {error}", path.display()))
        };
        let content = match std::fs::read(path) {
            Ok(content) => content,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(unread(&error)),
        };
        let text = decode_text(&content).map_err(|error| unread(&error))?;
        toml::from_str(text).map_err(|error| {
            CliError::Invalid(format!("{} is not a valid contexts file: {error}", path.display()))
        })
    }

    /// Writes the contexts file, and creates its directory.
    pub fn write(&self, path: &Path) -> Result<(), CliError> {
        let text = toml::to_string_pretty(self)
            .map_err(|error| CliError::Failed(format!("cannot write the contexts as TOML: {error}")))?;
        write_file_atomic(path, text.as_bytes(), 0o644)
    }

    /// Finds the context of that name, or the current one; `None` if neither a name nor a current context is set. An empty
    /// name is one that is wrong: a shell makes it of a variable that is not set.
    pub fn find(&self, name: Option<&str>) -> Result<Option<&Context>, CliError> {
        let Some(name) = name.or(self.current.as_deref()) else { return Ok(None) };
        if name.is_empty() {
            let message = "the name of the context is empty; `shepherdctl get contexts` lists the names";
            return Err(CliError::Invalid(message.to_owned()));
        }
        self.contexts.get(name).map(Some).ok_or_else(|| {
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let message = if known.is_empty() {
                // A name that no context can have is not repeated in a command. Any other one needs no quotes.
                let suggested = check_context_name(name).map_or("NAME", |()| name);
                format!(
                    "there is no context {name:?}; create one with `shepherdctl tokens bootstrap --save-context \
                     {suggested}`"
                )
            } else {
                format!("there is no context {name:?}; the contexts are {}", known.join(", "))
            };
            CliError::Ended { exit: ExitCode::NotFound, message }
        })
    }
}

impl Context {
    /// Reads the token from its file.
    pub fn read_token(&self) -> Result<SecretString, CliError> {
        let refuse =
            |problem: &str| CliError::Invalid(format!("the token {} {problem}", self.token_path.display()));
        let content = read_private_file("the token", &self.token_path)
            .map_err(|error| CliError::Invalid(error.to_string()))?;
        let text = decode_text(&content).map_err(|error| refuse(&format!("cannot be used: {error}")))?;
        let token = text.trim();
        if token.is_empty() {
            return Err(refuse("is empty; `shepherdctl tokens create` and `tokens bootstrap` create one"));
        }
        Ok(SecretString::from(token.to_owned()))
    }
}

/// Rejects a context name that could not be used as the name of its files.
pub fn check_context_name(name: &str) -> Result<(), CliError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
        return Err(CliError::Invalid(format!(
            "{name:?} is not a valid context name; use letters, digits, dashes, dots and underscores"
        )));
    }
    Ok(())
}

/// Writes a token into a new file that only its owner can read. Fails if the file exists.
pub fn write_token(path: &Path, token: &SecretString) -> Result<(), CliError> {
    let failed = |error: std::io::Error| {
        CliError::Failed(format!("cannot write the token to {}: {error}", path.display()))
    };
    create_parent_dir(path)?;
    let mut file = create_token_file(path).map_err(failed)?;
    file.write_all(format!("{}\n", token.expose_secret()).as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(failed)
}

/// Checks that a token could be written to this path, before the token is created and would then be lost.
pub fn check_token_writable(path: &Path) -> Result<(), CliError> {
    if path.exists() {
        return Err(CliError::Invalid(format!(
            "{} exists, and may contain a token in use; name another file, or remove it first",
            path.display()
        )));
    }
    create_parent_dir(path)?;
    // The only way to know whether a file can be created in a directory is to create one.
    create_token_file(path).and_then(|_| std::fs::remove_file(path)).map_err(|error| {
        CliError::Invalid(format!(
            "cannot write a token to {}: {error}; no token was created",
            path.display()
        ))
    })
}

fn create_token_file(path: &Path) -> std::io::Result<std::fs::File> {
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn context(directory: &Path) -> Context {
        Context {
            servers: vec!["shepherd.example:8444".into()],
            ca_certificate_path: Some(directory.join("ca.pem")),
            token_path: directory.join("token"),
        }
    }

    #[test]
    fn token_and_contexts_are_read_as_editors_save_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("contexts.toml");
        std::fs::write(&path, "\u{feff}[contexts.b]\r\nservers = [\"b:8444\"]\r\ntoken_path = \"/b\"\r\n")
            .unwrap();
        assert!(Contexts::read(&path).unwrap().contexts.contains_key("b"));
        let context = context(directory.path());
        let write_token = |content: &[u8]| {
            std::fs::write(&context.token_path, content).unwrap();
            let mode = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(&context.token_path, mode).unwrap();
        };
        write_token("\u{feff}shepherd_x\r\n".as_bytes());
        assert_eq!(secrecy::ExposeSecret::expose_secret(&context.read_token().unwrap()), "shepherd_x");
        write_token(b"s\0h\0e\0");
        let error = context.read_token().unwrap_err().to_string();
        assert!(error.contains("cannot be used: it is UTF-16"), "{error}");
    }

    #[test]
    fn contexts_are_read_as_they_were_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep").join("contexts.toml");
        assert_eq!(Contexts::read(&path).unwrap(), Contexts::default());
        let mut contexts = Contexts { current: Some("a".into()), ..Contexts::default() };
        contexts.contexts.insert("a".into(), context(directory.path()));
        contexts.write(&path).unwrap();
        let read = Contexts::read(&path).unwrap();
        assert_eq!(read, contexts);
        assert!(read.find(None).unwrap().is_some());
        let bare = "[contexts.b]\nservers = [\"b:8444\"]\ntoken_path = \"/b.token\"\n";
        std::fs::write(&path, bare).unwrap();
        let bare = Contexts::read(&path).unwrap();
        assert_eq!(bare.contexts["b"].ca_certificate_path, None);
        bare.write(&path).unwrap();
        assert_eq!(Contexts::read(&path).unwrap(), bare);
        assert_eq!(
            read.find(Some("b")).unwrap_err().to_string(),
            "there is no context \"b\"; the contexts are a"
        );
        assert_eq!(Contexts::default().find(None).unwrap(), None);
        for (name, exit, part) in [
            ("b", 3, "`shepherdctl tokens bootstrap --save-context b`"),
            ("a b", 3, "there is no context \"a b\"; create one with `shepherdctl"),
            ("a b", 3, "`shepherdctl tokens bootstrap --save-context NAME`"),
            ("$(reboot)", 3, "`shepherdctl tokens bootstrap --save-context NAME`"),
            ("", 2, "the name of the context is empty"),
        ] {
            let error = Contexts::default().find(Some(name)).unwrap_err();
            assert_eq!(error.exit_code().number(), exit, "{name}: {error}");
            assert!(error.to_string().contains(part), "{name}: {error}");
        }
        assert_eq!(read.find(Some("")).unwrap_err().exit_code().number(), 2);
        for (name, fits) in [("prod-1.b", true), ("", false), ("../a", false), ("a/b", false), (".a", false)]
        {
            assert_eq!(check_context_name(name).is_ok(), fits, "{name}");
        }
    }

    #[test]
    fn token_readable_by_others_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let context = context(directory.path());
        write_token(&context.token_path, &SecretString::from("t".to_owned())).unwrap();
        assert_eq!(context.read_token().unwrap().expose_secret(), "t");
        let mut permissions = std::fs::metadata(&context.token_path).unwrap().permissions();
        assert_eq!(permissions.mode() & 0o777, 0o600);
        permissions.set_mode(0o640);
        std::fs::set_permissions(&context.token_path, permissions).unwrap();
        assert!(context.read_token().unwrap_err().to_string().contains("chmod 600"));
        assert!(check_token_writable(&context.token_path).is_err(), "a token is never written over");
        let other = directory.path().join("other");
        check_token_writable(&other).unwrap();
        assert!(!other.exists(), "the check creates no file");
        let impossible = context.token_path.join("below-a-file");
        assert!(check_token_writable(&impossible).is_err());
    }
}
