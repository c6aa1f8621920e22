//! Description of a service plan, for people. It has no secrets, as the plan has none.

use std::fmt::Write as _;
use std::path::Path;

use crate::model::adoption::AdoptionLimits;
use crate::model::time::Rate;
use crate::service::flags::{ServiceComponent, ServiceFlags};
use crate::service::service_plan::{Database, ServicePlan};

impl ServicePlan {
    /// The plan as text for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let flags = &self.flags;
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:<12} {value}");
        };
        line(
            "database",
            match &self.database {
                Database::Url(settings) => {
                    format!("{} ({} dialect)", settings.address(), flags.bmdb_dialect.as_str())
                }
                Database::Ephemeral => "a private PostgreSQL, thrown away at the end".to_owned(),
                Database::Directory(directory) => format!("a private PostgreSQL in {}", directory.display()),
            },
        );
        if let Database::Url(settings) = &self.database
            && let Some(direct) = &settings.direct
        {
            line("direct", format!("{}, for renewals and wake-ups", direct.address()));
        }
        for provider in &self.providers {
            let limits = describe_limits(provider.adoption_limits(flags.adoption_settings()));
            line("provider", format!("{}; {limits}", provider.describe()));
        }
        for component in &self.components {
            line("runs", describe_component(*component, flags));
        }
        if !self.endpoints.is_empty() {
            line("endpoints", self.endpoints.join(", "));
        }
        if let Some(agent) = &flags.agent_executable_path {
            let place = flags.agent_target_path.as_deref().unwrap_or("a place that suits the machine");
            line("agent", format!("{} goes to {place}", agent.display()));
        }
        line(
            "ssh",
            format!(
                "as {}, key {}, password {}",
                flags.ssh_user,
                path_text_or(flags.ssh_key_path.as_deref(), "made for this run"),
                if self.ssh_passwords.is_empty() {
                    "none".to_owned()
                } else {
                    let names: Vec<_> = self.ssh_passwords.iter().map(|(name, _)| name.as_str()).collect();
                    format!("for {} (masked)", names.join(", "))
                }
            ),
        );
        line(
            "secrets",
            match &flags.agent_tls_certificate_path {
                Some(certificate) => format!("callback certificate {}", certificate.display()),
                None => format!(
                    "CA sealed in the database by {}",
                    path_text_or(flags.secrets_key_path.as_deref(), "a key made for this run")
                ),
            },
        );
        line(
            "metrics",
            flags
                .metrics_listen_address
                .map_or("not served".to_owned(), |address| format!("http://{address}/metrics")),
        );
        text
    }
}

/// Describes a part of the service and its parallelism.
fn describe_component(component: ServiceComponent, flags: &ServiceFlags) -> String {
    match component {
        ServiceComponent::Provisioner => {
            let rate = describe_rate(flags.provisioner_reconciler_rate);
            format!("provisioner: compares each provider with the database {rate}")
        }
        ServiceComponent::Initializer => {
            describe_loop("initializer", flags.initializer_loop_parallelism, flags.initializer_db_query_rate)
        }
        ServiceComponent::Recoverer => {
            describe_loop("recoverer", flags.recoverer_loop_parallelism, flags.recoverer_db_query_rate)
        }
        ServiceComponent::Updater => {
            describe_loop("updater", flags.updater_loop_parallelism, flags.updater_db_query_rate)
        }
        ServiceComponent::Retirer => {
            describe_loop("retirer", flags.retirer_loop_parallelism, flags.retirer_db_query_rate)
        }
        ServiceComponent::Switcher => {
            describe_loop("switcher", flags.switcher_loop_parallelism, flags.switcher_db_query_rate)
        }
        ServiceComponent::Cluster => match flags.secrets_key_path {
            None if flags.agent_tls_certificate_path.is_some() => {
                "cluster: manages no clusters without --secrets_key_path".to_owned()
            }
            _ => "cluster: creates clusters of machines, and maintains them".to_owned(),
        },
        ServiceComponent::Callback => {
            format!("callback: receives heartbeats on {}", flags.agent_listen_address)
        }
        ServiceComponent::Api => format!("api: serves operators on {}", flags.api_listen_address),
    }
}

/// Describes what bounds the adoption of a provider's machines.
fn describe_limits(limits: AdoptionLimits) -> String {
    let number = match limits.max_machines {
        None => "any number of machines is adopted".to_owned(),
        Some(1) => "1 machine at most is adopted".to_owned(),
        Some(max) => format!("{max} machines at most are adopted"),
    };
    match limits.creation_rate {
        None => format!("{number}, at once"),
        Some(rate) => format!("{number}, one {}", describe_rate(rate)),
    }
}

fn describe_loop(name: &str, workers: usize, rate: Rate) -> String {
    let workers = workers.max(1);
    format!(
        "{name}: {workers} worker{}, looks for work {}",
        if workers == 1 { "" } else { "s" },
        describe_rate(rate)
    )
}

/// Describes a rate in words.
fn describe_rate(rate: Rate) -> String {
    match rate.burst.get() {
        1 => format!("every {} at most", rate.period),
        burst => format!("every {} at most, up to {burst} times at once after a pause", rate.period),
    }
}

fn path_text_or(path: Option<&Path>, otherwise: &str) -> String {
    path.map_or_else(|| otherwise.to_owned(), |path| path.display().to_string())
}
