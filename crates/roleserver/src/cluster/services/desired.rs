//! Desired services: declarations rendered with this node's facts (pure).
//!
//! A fact that is unknown becomes a sentence in the service that needs it; no other service waits for it.
//! [`RenderedService::digest`] covers what a service is started with on this node: program, arguments, environment,
//! files, user, privileges. A running service with another digest is restarted, so another revision of a declaration restarts
//! nothing if the result is the same. It does not cover what can be changed meanwhile: limits, dependencies, health
//! check, restart policy, stop time. What only another release renders differently counts from the next start.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::label::Labels;
use model::node_role::DeclaredRole;
use model::role_declaration::privileges::Privileges;
use model::role_declaration::{self, ProgramSource, RestartPolicy, RoleDeclaration, ServiceSpec, Sha256};
use model::template::{self, Template, TemplateFact};
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::child::spec::ResourceLimits;
use crate::cluster::services::rootfs::limits_with_runc;
use crate::cluster::services::workdir::WorkdirFile;

/// Longest name of a child of the role server, in bytes.
const MAX_CHILD_NAME: usize = 64;

/// Source of the findings about declarations that this machine refuses.
pub const REFUSED_DECLARATIONS: &str = "declarations";

/// Declarations of the roles that this node has.
pub type DeclarationMap = BTreeMap<DeclaredRole, Arc<RoleDeclaration>>;

/// Names of roles that this node has, and of which it had accepted no declaration when it refused one or could not read one.
/// What runs of such a role continues. A role stays here until the node loses it.
pub type RetainedRoles = BTreeSet<String>;

/// Identifies one service of one role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServiceId {
    /// Name of the role.
    pub role: String,
    /// Name of the service in its role.
    pub service: String,
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.role, self.service)
    }
}

impl ServiceId {
    /// Its name among the children of the role server. Names of roles and services have no underscore, so the separator
    /// is unique.
    #[must_use]
    pub fn child_name(&self) -> String {
        let plain = format!("{}_{}", self.role, self.service);
        if plain.len() <= MAX_CHILD_NAME {
            return plain;
        }
        let digest = hex::encode(digest::digest(&digest::SHA256, plain.as_bytes()));
        let short = |name: &str| name.chars().take(20).collect::<String>();
        format!("{}_{}_{}", short(&self.role), short(&self.service), &digest[..16])
    }

    /// The service with this child name; `None` if the name was shortened or is not that of a service.
    #[must_use]
    pub fn from_child_name(name: &str) -> Option<Self> {
        let (role, service) = name.split_once('_')?;
        let whole = !role.is_empty() && !service.is_empty() && !service.contains('_');
        whole.then(|| Self { role: role.to_owned(), service: service.to_owned() })
    }
}

/// What the node's record contains about it besides roles.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// UUID of its machine; empty if none is recorded.
    pub machine: String,
    /// Labels of the node.
    pub labels: Labels,
}

/// Facts of this node for rendering; `None` for an unknown fact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderInputs {
    /// ID of the node.
    pub node: String,
    /// UUID of its cluster.
    pub cluster: String,
    /// Address at which other nodes connect to it.
    pub address: Option<IpAddr>,
    /// Machine and labels in the node's record.
    pub node_info: Option<NodeInfo>,
    /// Addresses of all curators, `host:port` each.
    pub curators: Option<BTreeSet<String>>,
}

/// What a service is started with on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedService {
    /// Program that is started: a path, an artefact or a root filesystem.
    pub run: ProgramSource,
    /// Arguments of the program, without its name.
    pub arguments: Vec<String>,
    /// The complete environment; nothing is inherited.
    pub environment: BTreeMap<String, String>,
    /// Files that are written before it starts.
    pub files: Vec<WorkdirFile>,
    /// Name or number of the user that it runs as.
    pub user: String,
    /// Privileges that the declaration requests.
    pub privileges: Privileges,
}

impl RenderedService {
    /// The artefact that it is made of; `None` for a program of the host.
    #[must_use]
    pub const fn artefact(&self) -> Option<Sha256> {
        match &self.run {
            ProgramSource::Path(_) => None,
            ProgramSource::Artefact { digest, .. }
            | ProgramSource::RootFilesystem { archive: digest, .. } => Some(*digest),
        }
    }

    /// SHA-256 of everything that it is started with; a service that runs with another digest is restarted.
    #[must_use]
    pub fn digest(&self) -> String {
        let run = match &self.run {
            ProgramSource::Path(path) => ("path", path.clone(), String::new()),
            // The URL does not matter: the digest identifies the file.
            ProgramSource::Artefact { digest, .. } => ("artefact", hex::encode(digest.0), String::new()),
            ProgramSource::RootFilesystem { archive, program } => {
                ("root", hex::encode(archive.0), program.clone())
            }
        };
        let reported = (run, &self.arguments, &self.environment, &self.files, &self.user);
        let mut bytes =
            serde_json::to_vec(&reported).unwrap_or_else(|_| format!("{reported:?}").into_bytes());
        // A declaration that requests nothing has the digest of the releases before, or each such service would be
        // restarted by the update.
        if !self.privileges.is_default() {
            let more = serde_json::to_vec(&self.privileges);
            bytes.extend(more.unwrap_or_else(|_| format!("{:?}", self.privileges).into_bytes()));
        }
        hex::encode(digest::digest(&digest::SHA256, &bytes))
    }
}

/// The probe of a health check, as rendered on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenderedProbe {
    /// A program with its arguments, which must exit with 0.
    Exec(Vec<String>),
    /// A TCP connection to one of these addresses: the service may listen at any of them.
    Tcp(Vec<SocketAddr>),
    /// A connection to this UNIX socket.
    Unix(PathBuf),
    /// An HTTP request to one of these addresses: the service may listen at any of them.
    Http {
        /// Addresses in the order in which they are tried.
        addresses: Vec<SocketAddr>,
        /// Path of the request.
        path: String,
    },
    /// An HTTPS request that accepts any server certificate.
    Https {
        /// Address of this node, and port.
        at: SocketAddr,
        /// Path of the request.
        path: String,
        /// Files of the client certificate and its key, read for each request; `None` to present no certificate.
        client_certificate: Option<(PathBuf, PathBuf)>,
    },
}

/// How the health of a service is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedHealthCheck {
    /// Probe that decides about one check.
    pub probe: RenderedProbe,
    /// Time from one probe to the next.
    pub interval: Duration,
    /// Time after which a probe has failed.
    pub timeout: Duration,
    /// Number of consecutive failures that make it unhealthy.
    pub failures: u32,
}

/// A service that should run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredService {
    /// Role and name of the service.
    pub id: ServiceId,
    /// Revision of its declaration.
    pub revision: u64,
    /// What it is started with and its [`RenderedService::digest`], or a sentence why it cannot be rendered.
    pub rendered: Result<(RenderedService, String), String>,
    /// Digest of what the rendering follows from; `None` if the release adds nothing to what operators declare.
    pub declared: Option<String>,
    /// Digest of what a release without such digests rendered for the same declaration, if it differs.
    pub former: Option<String>,
    /// Limits of its control group.
    pub limits: ResourceLimits,
    /// Services that must be healthy before it starts.
    pub depends_on: BTreeSet<ServiceId>,
    /// Its health check; `None` if it counts as healthy while it runs.
    pub check: Option<RenderedHealthCheck>,
    /// Whether it is restarted when it exits.
    pub restart: RestartPolicy,
    /// Whether it is a one-shot: services that depend on it wait for its end, and not only for its start.
    pub is_task: bool,
    /// Time that it has to exit after SIGTERM.
    pub stop_time: Duration,
}

impl DesiredService {
    /// The limits of the control group that it runs in, which has runc, too, if it has a root filesystem.
    #[must_use]
    pub fn group_limits(&self) -> ResourceLimits {
        match &self.rendered {
            Ok((RenderedService { run: ProgramSource::RootFilesystem { .. }, .. }, _)) => {
                limits_with_runc(self.limits)
            }
            _ => self.limits,
        }
    }

    /// The digest of what it is started with; `None` if it cannot be rendered.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        self.rendered.as_ref().ok().map(|(_, digest)| digest.as_str())
    }
}

/// All services that should run on this node.
#[must_use]
pub fn desired_services(
    declared: &DeclarationMap,
    known: &RenderInputs,
) -> BTreeMap<ServiceId, DesiredService> {
    let services = declared.values().flat_map(|declaration| {
        declaration.in_start_order().map(|service| {
            let wanted = desired_service(declaration, service, known);
            (wanted.id.clone(), wanted)
        })
    });
    services.collect()
}

fn desired_service(
    declaration: &RoleDeclaration,
    service: &ServiceSpec,
    known: &RenderInputs,
) -> DesiredService {
    let role = declaration.role().to_string();
    let id = |service: &String| ServiceId { role: role.clone(), service: service.clone() };
    let renderer = ServiceRenderer {
        inputs: known,
        facts: template::TemplateFacts {
            node_id: known.node.clone(),
            node_address: known.address.map(|address| address.to_string()).unwrap_or_default(),
            node_machine: known.node_info.as_ref().map(|about| about.machine.clone()).unwrap_or_default(),
            node_labels: known.node_info.as_ref().map(|about| about.labels.clone()).unwrap_or_default(),
            cluster_id: known.cluster.clone(),
            cluster_curators: known.curators.iter().flatten().cloned().collect(),
            role_name: role.clone(),
            role_revision: declaration.revision(),
            service_name: service.name.clone(),
        },
    };
    let made = service.health_check.as_ref().map(|check| renderer.render_check(check)).transpose();
    let (check, rendered) = match (made, renderer.render_service(service)) {
        (Ok(check), Ok(rendered)) => {
            let digest = rendered.digest();
            (check, Ok((rendered, digest)))
        }
        (Err(error), _) | (_, Err(error)) => (None, Err(error)),
    };
    DesiredService {
        id: id(&service.name),
        revision: declaration.revision(),
        rendered,
        declared: None,
        former: None,
        limits: ResourceLimits {
            memory_bytes: service.limits.memory,
            cpu_millis: service.limits.processor_milli.map(u64::from),
            tasks: service.limits.tasks.map(u64::from),
        },
        depends_on: service.depends_on.iter().map(id).collect(),
        check,
        restart: service.restart,
        is_task: false,
        stop_time: service.stop_time,
    }
}

/// Where a service of this node may listen: a declaration has the port of its health check, and the service chooses the
/// address, which may be that of the node. The loopback addresses come first.
fn listen_addresses(port: u16, node: Option<IpAddr>) -> Vec<SocketAddr> {
    let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    let node = node.filter(|address| !loopback.contains(address));
    loopback.into_iter().chain(node).map(|address| SocketAddr::new(address, port)).collect()
}

struct ServiceRenderer<'k> {
    inputs: &'k RenderInputs,
    facts: template::TemplateFacts,
}

impl ServiceRenderer<'_> {
    fn render_text(&self, template: &Template) -> Result<String, String> {
        for fact in template.facts() {
            let known = match fact {
                TemplateFact::NodeAddress | TemplateFact::NodeUrlHost => self.inputs.address.is_some(),
                TemplateFact::ClusterCurators => self.inputs.curators.is_some(),
                TemplateFact::NodeMachine | TemplateFact::NodeLabel(_) => self.inputs.node_info.is_some(),
                TemplateFact::NodeId
                | TemplateFact::ClusterId
                | TemplateFact::RoleName
                | TemplateFact::RoleRevision
                | TemplateFact::ServiceName => true,
            };
            if !known {
                return Err(format!("{fact} is not known on this node until a curator has answered"));
            }
        }
        template.render(&self.facts).map_err(|error| error.to_string())
    }

    fn render_texts(&self, templates: &[Template]) -> Result<Vec<String>, String> {
        templates.iter().map(|template| self.render_text(template)).collect()
    }

    fn render_service(&self, service: &ServiceSpec) -> Result<RenderedService, String> {
        let environment =
            service.environment.iter().map(|(name, value)| Ok((name.clone(), self.render_text(value)?)));
        let files = service.files.iter().map(|file| {
            Ok(WorkdirFile {
                path: file.path.clone(),
                contents: self.render_text(&file.contents)?,
                mode: file.mode,
            })
        });
        Ok(RenderedService {
            run: service.run.clone(),
            arguments: self.render_texts(&service.arguments)?,
            environment: environment.collect::<Result<_, String>>()?,
            files: files.collect::<Result<_, String>>()?,
            user: service.user.clone(),
            privileges: service.privileges.clone(),
        })
    }

    fn render_check(&self, check: &role_declaration::HealthCheck) -> Result<RenderedHealthCheck, String> {
        let probe = match &check.probe {
            role_declaration::ProbeSpec::Exec(command) => RenderedProbe::Exec(self.render_texts(command)?),
            role_declaration::ProbeSpec::Tcp(port) => {
                RenderedProbe::Tcp(listen_addresses(*port, self.inputs.address))
            }
            role_declaration::ProbeSpec::Http { port, path } => RenderedProbe::Http {
                addresses: listen_addresses(*port, self.inputs.address),
                path: path.clone(),
            },
        };
        Ok(RenderedHealthCheck {
            probe,
            interval: check.interval,
            timeout: check.timeout,
            failures: check.failures,
        })
    }
}

#[cfg(test)]
pub(super) mod tests;
