//! Role declarations: services that operators declare, parsed and validated.
//!
//! A declaration lists the services that a node with the role runs. It is validated completely when it is declared, and
//! all faults are reported at once, a sentence each, with the service concerned, so that a person corrects a file once
//! and not ten times. Every node with the role runs what passes here. So everything that can be found out here is found
//! out here: every `{{fact}}` is known, every dependency exists, and no service waits for itself.
//!
//! Services start in the order of their dependencies and stop in the opposite one. Services that do not depend on each
//! other are ordered by name, on every node and at every start.
//!
//! A service cannot run an image of a registry: a root filesystem is a tar archive, identified by its digest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use prost::Message as _;
use proto::curator::v1 as wire;

use crate::node_role::DeclaredRole;
use crate::role_declaration::privileges::Privileges;
use crate::role_declaration::start_order::start_order;
use crate::role_declaration::validation::{FaultCollector, parse_service};
use crate::template::Template;

pub mod privileges;
mod start_order;
mod validation;

/// Time for a service to stop, unless declared.
pub const DEFAULT_STOP_TIME: Duration = Duration::from_secs(10);
/// Time between two health checks, unless declared.
pub const DEFAULT_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit of a health check, unless declared.
pub const DEFAULT_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Consecutive failures that make a service unhealthy, unless declared.
pub const DEFAULT_CHECK_FAILURES: u32 = 3;

const MAX_SERVICES: usize = 64;
/// Largest encoded declaration, in bytes; etcd accepts values of 1.5 MiB.
const MAX_BYTES: usize = 1 << 20;

/// SHA-256 of an artefact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sha256(pub [u8; 32]);

/// The program that a service runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramSource {
    /// A program of the node, by its absolute path.
    Path(String),
    /// A program that is downloaded.
    Artefact {
        /// Digest of the program file.
        digest: Sha256,
        /// URL to download it from; empty when somebody puts it on the node.
        url: String,
    },
    /// A program in a root filesystem, run with runc.
    RootFilesystem {
        /// Digest of the tar archive.
        archive: Sha256,
        /// Absolute path of the program in it.
        program: String,
    },
}

/// A file that is written for a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceFile {
    /// Path of the file: below the service's directory, or in its root filesystem.
    pub path: String,
    /// Its contents, with facts to fill in.
    pub contents: Template,
    /// Its permission bits, at most 0o777.
    pub mode: u32,
}

/// Limits of a service and all its processes together. `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ServiceLimits {
    /// Most memory, in bytes.
    pub memory: Option<u64>,
    /// Most processor time, in thousandths of a processor.
    pub processor_milli: Option<u32>,
    /// Most processes and threads.
    pub tasks: Option<u32>,
}

/// How a health check tests a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeSpec {
    /// A program with its arguments; the exit status must be 0.
    Exec(Vec<Template>),
    /// A TCP connection to this port, of a loopback address or of the node's address.
    Tcp(u16),
    /// An HTTP request to this port and path.
    Http {
        /// Port of the service.
        port: u16,
        /// Path of the request.
        path: String,
    },
}

/// Health check of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The test to perform.
    pub probe: ProbeSpec,
    /// Time from one test to the next.
    pub interval: Duration,
    /// Time limit of a test; not longer than the interval.
    pub timeout: Duration,
    /// Consecutive failures that make the service unhealthy.
    pub failures: u32,
}

/// What happens when a service ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartPolicy {
    /// The service is started again.
    Always,
    /// The service is started again unless its exit status was 0.
    OnFailure,
    /// The service is not started again.
    Never,
}

impl RestartPolicy {
    /// Whether a service with this exit status is started again. `None` means that a signal ended it.
    #[must_use]
    pub const fn restarts_after(self, status: Option<i32>) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => !matches!(status, Some(0)),
            Self::Never => false,
        }
    }
}

/// A service that runs for as long as a node has the role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSpec {
    /// Its name, unique in the role.
    pub name: String,
    /// The program to run.
    pub run: ProgramSource,
    /// Arguments of the program.
    pub arguments: Vec<Template>,
    /// All of its environment.
    pub environment: BTreeMap<String, Template>,
    /// Files that are written before it starts.
    pub files: Vec<ServiceFile>,
    /// User that it runs as: a name or a number.
    pub user: String,
    /// Resource limits of the service and its processes.
    pub limits: ServiceLimits,
    /// Services that must be healthy before it starts.
    pub depends_on: BTreeSet<String>,
    /// Its health check, if it has one.
    pub health_check: Option<HealthCheck>,
    /// Whether it is started again when it ends.
    pub restart: RestartPolicy,
    /// How long it has to stop.
    pub stop_time: Duration,
    /// Privileges that it requests beyond the default confinement.
    pub privileges: Privileges,
}

/// A validated role declaration. No other value of this type can be made.
#[derive(Clone, Debug, PartialEq)]
pub struct RoleDeclaration {
    role: DeclaredRole,
    services: BTreeMap<String, ServiceSpec>,
    start_order: Vec<String>,
    declaration: wire::Declaration,
}

/// All faults of a declaration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role {role:?} was not declared: {}", faults.join("; "))]
pub struct DeclarationError {
    /// Name of the role, as declared.
    pub role: String,
    /// A part of a sentence for each fault; never empty.
    pub faults: Vec<String>,
}

impl RoleDeclaration {
    /// Validates a declaration as it was sent.
    pub fn new(declared: wire::Declaration) -> Result<Self, DeclarationError> {
        let mut faults = FaultCollector::default();
        let role = faults.ok_or_add("role", declared.role.parse::<DeclaredRole>());
        if declared.services.is_empty() {
            faults.add("services", "it has none; a role runs at least one");
        }
        if declared.services.len() > MAX_SERVICES {
            faults.add("services", format!("it has {}; {MAX_SERVICES} are enough", declared.services.len()));
        }
        if declared.encoded_len() > MAX_BYTES {
            let size = declared.encoded_len();
            faults.add(
                "size",
                format!("it has {size} bytes, and {MAX_BYTES} is the maximum; upload files as artefacts"),
            );
        }
        let mut services = BTreeMap::new();
        for declared in &declared.services {
            let name = declared.name.clone();
            faults.prefix = format!("service {:?}: ", name.chars().take(100).collect::<String>());
            let Some(service) = parse_service(declared, &mut faults) else { continue };
            if services.insert(name, service).is_some() {
                faults.add("name", "another service has it");
            }
        }
        faults.prefix.clear();
        // A service that depends on a faulty service is not faulty for that.
        let names: BTreeSet<&str> = declared.services.iter().map(|service| service.name.as_str()).collect();
        for declared in &declared.services {
            faults.prefix = format!("service {:?}: ", declared.name);
            for wanted in declared.depends_on.iter().filter(|wanted| !names.contains(wanted.as_str())) {
                faults.add("depends_on", format!("there is no service {wanted:?} in this role"));
            }
        }
        faults.prefix.clear();
        let depends_on = declared.services.iter().map(|service| {
            let wanted =
                service.depends_on.iter().map(String::as_str).filter(|wanted| names.contains(wanted));
            (service.name.as_str(), wanted.collect::<BTreeSet<_>>())
        });
        let start_order = start_order(&depends_on.collect()).unwrap_or_else(|cycle| {
            let cycle = cycle.join(" → ");
            faults.add("depends_on", format!("{cycle}: each waits for the next, so none would ever start"));
            Vec::new()
        });
        match role {
            Some(role) if faults.faults.is_empty() => {
                Ok(Self { role, services, start_order, declaration: declared })
            }
            _ => Err(DeclarationError {
                role: declared.role.chars().take(100).collect(),
                faults: faults.faults,
            }),
        }
    }

    /// Name of the role.
    #[must_use]
    pub const fn role(&self) -> &DeclaredRole {
        &self.role
    }

    /// Revision of the declaration.
    #[must_use]
    pub const fn revision(&self) -> u64 {
        self.declaration.revision
    }

    /// The service of that name.
    #[must_use]
    pub fn service(&self, name: &str) -> Option<&ServiceSpec> {
        self.services.get(name)
    }

    /// All services, each after those that it depends on. They stop in the opposite order.
    #[must_use]
    pub fn in_start_order(&self) -> impl DoubleEndedIterator<Item = &ServiceSpec> {
        self.start_order.iter().filter_map(|name| self.services.get(name))
    }

    /// What in the declaration makes its author root on a node, or lets a program of theirs run beside those of the node: a
    /// part of a sentence for each. Empty: every service is a program of its own, under a user without privileges.
    #[must_use]
    pub fn list_privileges(&self) -> Vec<String> {
        let mut found = Vec::new();
        for service in self.in_start_order() {
            let name = &service.name;
            if service.user == "root" || service.user.parse::<u32>() == Ok(0) {
                found.push(format!("{name} runs as root"));
            }
            if let ProgramSource::Path(path) = &service.run {
                found.push(format!("{name} runs the program {path} of the node"));
            }
            if !service.privileges.is_default() {
                found.push(format!("{name} requests privileges beyond the default confinement"));
            }
        }
        found
    }

    /// The declaration as it is sent.
    #[must_use]
    pub const fn to_wire(&self) -> &wire::Declaration {
        &self.declaration
    }

    /// This declaration as the successor of `present`; `None` when both are equal.
    ///
    /// Revisions only grow, so that a node can distinguish an older declaration from a newer one.
    #[must_use]
    pub fn into_next_revision(mut self, present: Option<&Self>) -> Option<Self> {
        let revision = present.map_or(0, Self::revision);
        self.declaration.revision = revision;
        if present.is_some_and(|present| present.declaration == self.declaration) {
            return None;
        }
        self.declaration.revision = revision + 1;
        Some(self)
    }
}

/// Parses a SHA-256 digest: 64 lower-case hexadecimal digits. The error is a sentence.
pub fn parse_sha256(text: &str) -> Result<Sha256, String> {
    let refused = || {
        let shown: String = text.chars().take(100).collect();
        format!("{shown:?} is not a SHA-256: it has 64 lower-case hexadecimal digits")
    };
    let mut digest = [0; 32];
    hex::decode_to_slice(text, &mut digest).map_err(|_| refused())?;
    if hex::encode(digest) == text { Ok(Sha256(digest)) } else { Err(refused()) }
}

/// Whether a node can download from this URL: `http://HOST/PATH`, without a user name or a password.
#[must_use]
pub fn is_fetchable_url(url: &str) -> bool {
    let rest = url.strip_prefix("http://").and_then(|rest| rest.split_once('/'));
    rest.is_some_and(|(host, _)| !host.is_empty() && !host.contains('@'))
        && url.len() <= 2000
        && url.chars().all(|c| c.is_ascii_graphic() && c != '#')
}

#[cfg(test)]
pub(crate) mod tests;
