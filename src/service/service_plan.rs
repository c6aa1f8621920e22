//! Service plan: validated flags and configuration.
//!
//! All mistakes that can be found before anything is started are found here. `--check` prints the plan
//! (`plan_description.rs`). A plan contains no secrets: it has the paths of keys, never keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bmdb::connection::access::Access;
use crate::bmdb::connection::budget::ConnectionsBeside;
use crate::bmdb::connection::dialect::Dialect;
use crate::bmdb::connection::settings::ConnectionSettings;
use crate::model::adoption::AdoptionLimits;
use crate::model::signed_artefact::signing_configuration::SigningConfiguration;
use crate::providers::provider::ProviderName;
use crate::service::configuration::ConfigurationFile;
use crate::service::failure::ExitFailure;
use crate::service::flags::{ServiceComponent, ServiceFlags};
use crate::service::provider_configuration::{NodeAddressSource, ProviderConfiguration};
use crate::service::signing_keys::read_signing_keys;

/// The API's connections to the database: for queries, and for authentication, which many watches must not delay.
pub(super) const API_DATABASE_CONNECTIONS: u32 = 4;
pub(super) const API_AUTH_CONNECTIONS: u32 = 2;

/// The database of the plan.
#[derive(Clone)]
pub enum Database {
    /// A server that the operator runs.
    Url(Box<ConnectionSettings>),
    /// A private server whose data is removed at the end.
    Ephemeral,
    /// A private server with persistent data in this directory.
    Directory(PathBuf),
}

/// A complete and consistent service, as far as that can be verified without starting it.
#[derive(Clone)]
pub struct ServicePlan {
    /// The flags as given, configuration file included.
    pub flags: ServiceFlags,
    /// Which database is used.
    pub database: Database,
    /// All configured providers, in order.
    pub providers: Vec<ProviderConfiguration>,
    /// The parts that run in this process.
    pub components: BTreeSet<ServiceComponent>,
    /// `host:port` of each callback server that machines call.
    pub endpoints: Vec<String>,
    /// Providers of machines that log in by an SSH password, each with the source of the password.
    pub ssh_passwords: Vec<(ProviderName, PasswordSource)>,
    /// Public keys that releases must be signed with.
    pub signing: Arc<SigningConfiguration>,
}

/// Where an SSH password comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PasswordSource {
    /// The file of `--ssh_password_path`, which holds it and nothing else.
    Flag(PathBuf),
    /// The file of `ssh_password_path` in the `[[provider]]` table.
    Table(PathBuf),
    /// The environment variable `SHEPHERD_SSH_PASSWORD`.
    Environment,
}

impl ServicePlan {
    /// How many connections to the database this process uses beside the common pool.
    #[must_use]
    pub fn connections_beside_pool(&self) -> ConnectionsBeside {
        // One for renewals, one for wake-ups, one that each direct one is compared with, and one for the metrics.
        let single = 1
            + u32::from(self.flags.bmdb_dialect.notifies())
            + u32::from(self.flags.bmdb_direct_url.is_some())
            + u32::from(self.flags.metrics_listen_address.is_some());
        if !self.components.contains(&ServiceComponent::Api) {
            return ConnectionsBeside { wanted: single, least: single };
        }
        // Two pools, and one more that answers health checks.
        ConnectionsBeside {
            wanted: single + API_DATABASE_CONNECTIONS + API_AUTH_CONNECTIONS + 1,
            least: single + 2 + 1,
        }
    }

    /// What bounds the adoption of the machines of a provider of the plan.
    pub(super) fn adoption_limits(&self, name: &ProviderName) -> AdoptionLimits {
        let flags = self.flags.adoption_settings();
        let provider = self.providers.iter().find(|provider| provider.name() == name);
        provider
            .map_or(AdoptionLimits::CAUTIOUS.override_with(flags), |provider| provider.adoption_limits(flags))
    }
}

/// Validates everything that needs no database, provider or machine.
pub fn plan_service(flags: ServiceFlags, file: ConfigurationFile) -> Result<ServicePlan, ExitFailure> {
    let database = plan_database(&flags)?;
    let providers = plan_providers(&flags, file.providers)?;
    let components: BTreeSet<ServiceComponent> = flags.components.iter().copied().collect();
    let reaches_machines = components.contains(&ServiceComponent::Initializer)
        || components.contains(&ServiceComponent::Recoverer);
    let endpoints =
        plan_endpoints(&flags, reaches_machines || components.contains(&ServiceComponent::Callback))?;
    let anywhere = flags.api_listen_address.ip().is_unspecified();
    if components.contains(&ServiceComponent::Api) && anywhere && flags.api_endpoint.is_empty() {
        return Err(ExitFailure::usage(
            "give --api_endpoint HOST:PORT: where operators reach --api_listen_address of this shepherd",
        ));
    }
    if flags.session_interval.0 < std::time::Duration::from_secs(1) {
        return Err(ExitFailure::usage(format!(
            "--session_interval {} is too short to be renewed in time; give at least 1s",
            flags.session_interval
        )));
    }
    let throw_away = matches!(database, Database::Ephemeral);
    if reaches_machines {
        let agent = require_path(
            flags.agent_executable_path.as_deref(),
            "--agent_executable_path",
            "the role server to put on machines",
        )?;
        check_is_file("--agent_executable_path", agent)?;
        if !throw_away {
            require_path(
                flags.ssh_key_path.as_deref(),
                "--ssh_key_path",
                "the SSH key to reach machines with, made if absent",
            )?;
        }
    }
    check_certificate_pair(&flags)?;
    flags.policy.validate().map_err(ExitFailure::usage)?;
    let own_certificate = flags.agent_tls_certificate_path.is_some();
    let needs_authority = reaches_machines
        || components.contains(&ServiceComponent::Callback)
        || components.contains(&ServiceComponent::Api);
    if needs_authority && !own_certificate && !throw_away {
        require_path(
            flags.secrets_key_path.as_deref(),
            "--secrets_key_path",
            "the key that seals the servers' CA in the database, made if absent (or give --agent_tls_certificate_path)",
        )?;
    }
    for (flag, path) in [
        ("--agent_tls_certificate_path", &flags.agent_tls_certificate_path),
        ("--agent_tls_key_path", &flags.agent_tls_key_path),
        ("--agent_endpoint_ca_certificate_path", &flags.agent_endpoint_ca_certificate_path),
        ("--ssh_password_path", &flags.ssh_password_path),
    ] {
        if let Some(path) = path {
            check_is_file(flag, path)?;
        }
    }
    let in_environment = std::env::var_os("SHEPHERD_SSH_PASSWORD").is_some();
    let ssh_passwords =
        if reaches_machines { plan_ssh_passwords(&flags, &providers, in_environment)? } else { Vec::new() };
    let signing = read_signing_keys(flags.signing_keys_path.as_deref(), &flags.key_rotation_path)?;
    let signing = Arc::new(signing.with_signed_declarations(flags.require_signed_declarations));
    Ok(ServicePlan { flags, database, providers, components, endpoints, ssh_passwords, signing })
}

/// Which providers' machines log in by an SSH password. Those of the flags are the machines of `--provider`, which is the
/// last of `providers`.
fn plan_ssh_passwords(
    flags: &ServiceFlags,
    providers: &[ProviderConfiguration],
    in_environment: bool,
) -> Result<Vec<(ProviderName, PasswordSource)>, ExitFailure> {
    let mut sources: Vec<_> = providers
        .iter()
        .filter_map(|provider| {
            let path = provider.ssh_password_path()?.to_owned();
            Some((provider.name().clone(), PasswordSource::Table(path)))
        })
        .collect();
    let source = match &flags.ssh_password_path {
        Some(path) => PasswordSource::Flag(path.clone()),
        None if in_environment => PasswordSource::Environment,
        None => return Ok(sources),
    };
    match providers.last() {
        Some(provider @ ProviderConfiguration::Static { .. }) if flags.provider.is_some() => {
            sources.push((provider.name().clone(), source));
            Ok(sources)
        }
        _ => Err(ExitFailure::usage(
            "--ssh_password_path and SHEPHERD_SSH_PASSWORD are for the machines of --provider static, and there is \
             none; give ssh_password_path in the [[provider]] table of the machines that log in by a password",
        )),
    }
}

/// A certificate and its key must be given together.
fn check_certificate_pair(flags: &ServiceFlags) -> Result<(), ExitFailure> {
    let (certificate, key) = (&flags.agent_tls_certificate_path, &flags.agent_tls_key_path);
    let lacks = |given: &str, path: &Path, lacking: &str| {
        Err(ExitFailure::usage(format!(
            "{given} {} is of no use alone; give {lacking} FILE, too",
            path.display()
        )))
    };
    match (certificate, key, &flags.agent_endpoint_ca_certificate_path) {
        (Some(certificate), None, _) => {
            lacks("--agent_tls_certificate_path", certificate, "--agent_tls_key_path")
        }
        (None, Some(key), _) => lacks("--agent_tls_key_path", key, "--agent_tls_certificate_path"),
        (None, None, Some(authority)) => {
            lacks("--agent_endpoint_ca_certificate_path", authority, "--agent_tls_certificate_path")
        }
        _ => Ok(()),
    }
}

fn require_path<'a>(path: Option<&'a Path>, flag: &str, what: &str) -> Result<&'a Path, ExitFailure> {
    path.ok_or_else(|| ExitFailure::usage(format!("give {flag} FILE: {what}")))
}

fn check_is_file(flag: &str, path: &Path) -> Result<(), ExitFailure> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(ExitFailure::usage(format!("{flag} {} is no file", path.display()))),
        Err(error) => Err(ExitFailure::usage(format!("{flag} {} cannot be read: {error}", path.display()))),
    }
}

fn plan_database(flags: &ServiceFlags) -> Result<Database, ExitFailure> {
    if flags.bmdb_eat_my_data {
        return Ok(Database::Ephemeral);
    }
    if let Some(directory) = &flags.bmdb_dir {
        return Ok(Database::Directory(directory.clone()));
    }
    let Some(url) = &flags.bmdb_url else {
        return Err(ExitFailure::usage(
            "no database is given. Give --bmdb_url postgres://USER@HOST:5432/DATABASE, or --bmdb_dir DIR for a \
             private PostgreSQL that keeps its data there, or --bmdb_eat_my_data for one that is thrown away. \
             To see Shepherd work, run `shepherd demo`",
        ));
    };
    let mut settings = ConnectionSettings::from_url(url, "shepherd")
        .map_err(|error| ExitFailure::usage(error.to_string()))?;
    settings.max_connections = flags.bmdb_max_connections;
    settings.dialect = flags.bmdb_dialect;
    settings.access = Access::ReadWrite;
    settings.direct = flags.bmdb_direct_url.as_deref().map(|url| plan_direct(url, flags)).transpose()?;
    Ok(Database::Url(Box::new(settings)))
}

/// The settings of the direct URL. Whether it leads to the same server is verified where connections are opened.
fn plan_direct(url: &str, flags: &ServiceFlags) -> Result<Box<ConnectionSettings>, ExitFailure> {
    if flags.bmdb_dialect != Dialect::Postgres {
        return Err(ExitFailure::usage(format!(
            "--bmdb_direct_url works with --bmdb_dialect postgres alone, because a database of the dialect {} has no locks by \
             which two URLs can be compared; leave it out",
            flags.bmdb_dialect.as_str()
        )));
    }
    let settings = ConnectionSettings::from_url(url, "shepherd")
        .map_err(|error| ExitFailure::usage(format!("--bmdb_direct_url: {error}")))?;
    Ok(Box::new(settings))
}

fn plan_providers(
    flags: &ServiceFlags,
    mut providers: Vec<ProviderConfiguration>,
) -> Result<Vec<ProviderConfiguration>, ExitFailure> {
    if let Some(given) = &flags.provider {
        let kind = given.to_ascii_lowercase();
        let name: ProviderName = flags
            .provider_name
            .as_deref()
            .unwrap_or(&kind)
            .parse()
            .map_err(|error| ExitFailure::usage(format!("--provider_name: {error}")))?;
        let provider = match kind.as_str() {
            "static" => ProviderConfiguration::Static {
                name,
                device_list_sha256: flags.static_device_list_sha256.clone(),
                // That of the flags can come from the environment, too.
                ssh_password_path: None,
                node_address: NodeAddressSource::List,
                // Those of the flags count for all providers.
                max_machines: None,
                device_creation_rate: None,
                device_list_url: flags.static_device_list_url.clone().ok_or_else(|| {
                    ExitFailure::usage("--provider static needs --static_device_list_url file:///PATH or http(s)://HOST/PATH")
                })?,
            },
            "simulated" => ProviderConfiguration::Simulated {
                name,
                url: flags
                    .simulated_url
                    .clone()
                    .ok_or_else(|| ExitFailure::usage("--provider simulated needs --simulated_url http://HOST:PORT"))?,
                max_machines: None,
                device_creation_rate: None,
            },
            _ => {
                return Err(ExitFailure::usage(format!(
                    "--provider {given} is not a kind of provider; the kinds are static and simulated"
                )));
            }
        };
        if providers.iter().any(|known| known.name() == provider.name()) {
            return Err(ExitFailure::usage(format!(
                "provider {} is given by flags and in the configuration file; give --provider_name NAME",
                provider.name()
            )));
        }
        providers.push(provider);
    }
    if providers.is_empty() {
        return Err(ExitFailure::usage(
            "no provider is given. Give --provider static --static_device_list_url file:///PATH, or [[provider]] \
             tables in the file named by --config",
        ));
    }
    Ok(providers)
}

fn plan_endpoints(flags: &ServiceFlags, needed: bool) -> Result<Vec<String>, ExitFailure> {
    for endpoint in &flags.agent_endpoint {
        check_endpoint("--agent_endpoint", endpoint)?;
    }
    for endpoint in &flags.api_endpoint {
        check_endpoint("--api_endpoint", endpoint)?;
    }
    if needed && flags.agent_endpoint.is_empty() {
        return Err(ExitFailure::usage(
            "give --agent_endpoint HOST:PORT: where machines reach --agent_listen_address of this shepherd",
        ));
    }
    Ok(flags.agent_endpoint.clone())
}

fn check_endpoint(flag: &str, endpoint: &str) -> Result<(), ExitFailure> {
    let wrong = || {
        ExitFailure::usage(format!(
            "{flag} {endpoint:?} is not a HOST:PORT; write for example shepherd.example:8443 or [2001:db8::1]:8443"
        ))
    };
    let (host, port) = endpoint.rsplit_once(':').ok_or_else(wrong)?;
    let host_is_right = match host.strip_prefix('[') {
        Some(bracketed) => {
            bracketed.strip_suffix(']').is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok())
        }
        None => !host.is_empty() && !host.contains(['/', ':', '@', ' ']),
    };
    if !host_is_right || port.parse::<u16>().ok().is_none_or(|port| port == 0) {
        return Err(wrong());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::flags::parse_flags_without_environment;

    #[test]
    fn password_is_for_one_provider() {
        let provider = |name: &str, password: Option<&str>| ProviderConfiguration::Static {
            name: name.parse().unwrap(),
            device_list_url: "file:///x".to_owned(),
            device_list_sha256: None,
            ssh_password_path: password.map(PathBuf::from),
            node_address: NodeAddressSource::List,
            max_machines: None,
            device_creation_rate: None,
        };
        let simulated = ProviderConfiguration::Simulated {
            name: "sim".parse().unwrap(),
            url: "http://h".to_owned(),
            max_machines: None,
            device_creation_rate: None,
        };
        let planned = |flags: &[&str], providers: &[ProviderConfiguration], in_environment: bool| {
            let arguments = ["shepherd"].iter().chain(flags).map(Into::into).collect();
            let flags = parse_flags_without_environment(arguments).unwrap().service;
            let planned =
                plan_ssh_passwords(&flags, providers, in_environment).map_err(|error| error.message);
            planned.map(|found| {
                let text = |(name, source): (ProviderName, PasswordSource)| match source {
                    PasswordSource::Flag(path) => format!("{name}={} of the flag", path.display()),
                    PasswordSource::Table(path) => format!("{name}={}", path.display()),
                    PasswordSource::Environment => format!("{name} from the environment"),
                };
                found.into_iter().map(text).collect::<Vec<_>>().join(", ")
            })
        };
        let (flag, static_provider) = ("--ssh_password_path=/f", "--provider=static");
        let tables = [provider("a", Some("/a")), provider("b", None), provider("c", None)];
        assert_eq!(planned(&[], &tables, false).unwrap(), "a=/a");
        assert_eq!(planned(&[static_provider, flag], &tables, false).unwrap(), "a=/a, c=/f of the flag");
        assert_eq!(planned(&[static_provider, flag], &tables, true).unwrap(), "a=/a, c=/f of the flag");
        assert_eq!(planned(&[static_provider], &tables, true).unwrap(), "a=/a, c from the environment");
        for (flags, providers, in_environment) in [
            (&[flag][..], &tables[..], false),
            (&[], &tables, true),
            (&["--provider=simulated", flag], &[simulated], false),
        ] {
            let error = planned(flags, providers, in_environment).unwrap_err();
            assert!(error.contains("give ssh_password_path in the [[provider]] table"), "{error}");
        }
    }

    #[test]
    fn case_of_a_provider_kind_does_not_count() {
        for (flags, expected) in [
            (["--provider=static", "--static_device_list_url=file:///x"], Ok("static")),
            (["--provider=STATIC", "--static_device_list_url=file:///x"], Ok("static")),
            (["--provider=Simulated", "--simulated_url=http://h"], Ok("simulated")),
            (["--provider=Redfish", "--provider_name=a"], Err("--provider Redfish is not a kind")),
        ] {
            let arguments = ["shepherd"].iter().chain(&flags).map(Into::into).collect();
            let parsed = parse_flags_without_environment(arguments).unwrap().service;
            match (plan_providers(&parsed, Vec::new()), expected) {
                (Ok(providers), Ok(name)) => assert_eq!(providers[0].name().as_str(), name, "{flags:?}"),
                (Err(error), Err(part)) => assert!(error.message.starts_with(part), "{}", error.message),
                (found, _) => panic!("{flags:?}: {}", found.is_ok()),
            }
        }
    }

    #[test]
    fn direct_url_is_for_postgresql_alone() {
        let planned = |flags: &[&str]| {
            let arguments = ["shepherd", "--bmdb_url=postgres://pooler/bmdb"].iter().chain(flags);
            let flags = parse_flags_without_environment(arguments.map(Into::into).collect()).unwrap().service;
            match plan_database(&flags).map_err(|failure| failure.message) {
                Ok(Database::Url(settings)) => Ok(settings.direct.map(|direct| direct.address())),
                Ok(_) => panic!("the database has a URL"),
                Err(message) => Err(message),
            }
        };
        assert_eq!(planned(&[]), Ok(None));
        let flag = "--bmdb_direct_url=postgres://kim:secret@db/bmdb";
        assert_eq!(planned(&[flag]), Ok(Some("db:5432/bmdb".to_owned())));
        for (flags, part) in [
            (&[flag, "--bmdb_dialect=cockroachdb"][..], "works with --bmdb_dialect postgres alone"),
            (&["--bmdb_direct_url=mysql://kim:secret@db/bmdb"], "--bmdb_direct_url: the BMDB URL is not"),
        ] {
            let refused = planned(flags).unwrap_err();
            assert!(refused.contains(part) && !refused.contains("secret"), "{refused}");
        }
    }

    #[test]
    fn endpoint_is_a_host_and_a_port() {
        for good in ["shepherd.example:8443", "192.0.2.1:1", "[2001:db8::1]:8443"] {
            check_endpoint("--agent_endpoint", good).unwrap();
        }
        for bad in [
            "shepherd.example",
            "2001:db8::1:8443",
            ":8443",
            "h:0",
            "h:99999",
            "https://h:1",
            "[h]:1",
            "u@h:1",
        ] {
            assert_eq!(check_endpoint("--agent_endpoint", bad).unwrap_err().code, 2, "{bad}");
        }
    }
}
