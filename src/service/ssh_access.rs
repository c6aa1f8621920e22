//! SSH access to machines: the key, the passwords and the role server to install.

use std::collections::HashMap;
use std::path::Path;

use secrecy::SecretString;
use trusted_file::private_file::read_private_file;

use crate::manager::machine_access::MachineAccess;
use crate::model::text_file::decode_text;
use crate::providers::provider::ProviderName;
use crate::server::tls::server_certificate::CaCertificates;
use crate::service::agent_check::{agent_failure, agent_file};
use crate::service::database::OpenDatabase;
use crate::service::failure::{ExitFailure, database_failure};
use crate::service::service_plan::{PasswordSource, ServicePlan};
use crate::takeover::client_key::ClientKey;
use crate::takeover::program_path::TargetPath;
use crate::takeover::session::SshSettings;

/// Loads what machines are reached with, and creates the SSH key if it does not exist.
pub(super) async fn build_machine_access(
    plan: &ServicePlan,
    database: &OpenDatabase,
    authorities: CaCertificates,
) -> Result<MachineAccess, ExitFailure> {
    let flags = &plan.flags;
    let key_path = database.key_path(flags.ssh_key_path.as_deref(), "ssh_key").ok_or_else(|| {
        ExitFailure::usage("give --ssh_key_path FILE: the SSH key to reach machines with, made if absent")
    })?;
    let key = ClientKey::load_or_create(&key_path).map_err(|error| ExitFailure::usage(error.to_string()))?;
    tracing::info!(path = %key_path.display(), public_key = key.authorized_keys_line(), "the SSH key that machines must accept");
    let agent_path = flags.agent_executable_path.clone().ok_or_else(|| {
        ExitFailure::usage("give --agent_executable_path FILE: the role server to put on machines")
    })?;
    // Read once now, so that a wrong file is reported at the start and not for every machine. The flags of this process are
    // in the policy by now.
    let agent_file = agent_file(plan, agent_path);
    let (_, policy) = database.bmdb.policy();
    agent_file.load(policy.allow_unsigned_releases).await.map_err(|error| agent_failure(&error))?;
    let mut ssh = SshSettings::new(key);
    ssh.connect_timeout = flags.agent_ssh_connect_timeout.0;
    ssh.greeting_timeout = flags.agent_ssh_greeting_timeout.0;
    ssh.login_timeout = flags.agent_ssh_login_timeout.0;
    ssh.exec_timeout = flags.agent_ssh_exec_timeout.0;
    Ok(MachineAccess {
        ssh,
        passwords: read_ssh_passwords(plan)?,
        user: flags.ssh_user.clone(),
        agent_file,
        agent_path: flags.agent_target_path.clone().map_or(TargetPath::Chosen, TargetPath::Given),
        endpoints: plan.endpoints.clone(),
        ca_certificates: Box::new(move || authorities.borrow().clone()),
        signing: plan.signing.clone(),
        bmdb_id: database.bmdb.read_identity().await.map_err(database_failure)?,
    })
}

/// Warns about each provider of machines that log in by a password: a host that gets it knows it.
pub(super) fn warn_about_ssh_passwords(plan: &ServicePlan) {
    for (provider, _) in &plan.ssh_passwords {
        tracing::warn!(
            %provider,
            "its machines log in by a password, so anybody who controls one of them can log in to all that accept it; let \
             them accept Shepherd's SSH key instead"
        );
    }
}

/// Reads the passwords of the providers of machines that log in by one, by the names of the providers.
pub(super) fn read_ssh_passwords(plan: &ServicePlan) -> Result<HashMap<String, SecretString>, ExitFailure> {
    let mut passwords = HashMap::new();
    for (provider, source) in &plan.ssh_passwords {
        passwords.insert(provider.as_str().to_owned(), read_ssh_password(provider, source)?);
    }
    Ok(passwords)
}

/// Reads the password of a provider. An error names the flag, or the key in the table of the provider.
fn read_ssh_password(provider: &ProviderName, source: &PasswordSource) -> Result<SecretString, ExitFailure> {
    match source {
        PasswordSource::Flag(path) => {
            read_password_file("--ssh_password_path", path).map_err(ExitFailure::usage)
        }
        PasswordSource::Table(path) => read_password_file("ssh_password_path", path).map_err(|problem| {
            ExitFailure::usage(format!("the configuration file: [[provider]] {provider}: {problem}"))
        }),
        // The error of the library would show the value.
        PasswordSource::Environment => std::env::var("SHEPHERD_SSH_PASSWORD")
            .map(SecretString::from)
            .map_err(|_| ExitFailure::usage("SHEPHERD_SSH_PASSWORD holds something that is no text")),
    }
}

/// Reads a password from a file that `key` names. The error is a sentence.
fn read_password_file(key: &'static str, path: &Path) -> Result<SecretString, String> {
    let content = read_private_file(key, path).map_err(|error| error.to_string())?;
    let text =
        decode_text(&content).map_err(|error| format!("{key} {} cannot be used: {error}", path.display()))?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() {
        return Err(format!("{key} {} holds no password; write it there, and nothing else", path.display()));
    }
    Ok(SecretString::from(password.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use secrecy::ExposeSecret as _;

    use super::*;

    /// Where the path of a password file is configured.
    type Source = fn(PathBuf) -> PasswordSource;

    #[test]
    fn error_of_a_password_file_names_where_the_file_is_configured() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("password");
        let provider: ProviderName = "rack-a".parse().unwrap();
        let sources: [(Source, &str); 2] = [
            (PasswordSource::Flag, "--ssh_password_path FILE"),
            (PasswordSource::Table, "the configuration file: [[provider]] rack-a: ssh_password_path FILE"),
        ];
        for (source, key) in sources {
            let read = || {
                read_ssh_password(&provider, &source(path.clone()))
                    .map(|password| password.expose_secret().to_owned())
                    .map_err(|failure| failure.message.replace(path.to_str().unwrap(), "FILE"))
            };
            let absent = read().unwrap_err();
            assert!(absent.starts_with(&format!("{key} cannot be read: ")), "{absent}");
            for (content, mode, problem) in [
                (&b"secret\n"[..], 0o644, "can be read by other users (mode 0644); run: chmod 600 FILE"),
                (b"\n", 0o600, "holds no password; write it there, and nothing else"),
                (b"caf\xe9\n", 0o600, "cannot be used: it is not UTF-8 from byte 4 on; save it as UTF-8"),
            ] {
                std::fs::write(&path, content).unwrap();
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
                assert_eq!(read(), Err(format!("{key} {problem}")));
            }
            for content in ["secret\n", "\u{feff}secret\r\n"] {
                std::fs::write(&path, content).unwrap();
                assert_eq!(read().as_deref(), Ok("secret"));
            }
            std::fs::remove_file(&path).unwrap();
        }
    }
}
