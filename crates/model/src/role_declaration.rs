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

use crate::node_role::{self, DeclaredRole};
use crate::template::Template;

/// Time for a service to stop, unless declared.
pub const DEFAULT_STOP_TIME: Duration = Duration::from_secs(10);
/// Time between two health checks, unless declared.
pub const DEFAULT_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit of a health check, unless declared.
pub const DEFAULT_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Consecutive failures that make a service unhealthy, unless declared.
pub const DEFAULT_CHECK_FAILURES: u32 = 3;

const MAX_SERVICES: usize = 64;
const MAX_ENTRIES: usize = 256;
/// Largest encoded declaration, in bytes; etcd accepts values of 1.5 MiB.
const MAX_BYTES: usize = 1 << 20;
const MAX_STOP_TIME: Duration = Duration::from_hours(1);
const MAX_CHECK_INTERVAL: Duration = Duration::from_hours(1);
const DEFAULT_FILE_MODE: u32 = 0o600;

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
    /// A TCP connection to this port.
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
                format!("it has {size} bytes, and {MAX_BYTES} can be kept; make files artefacts"),
            );
        }
        let mut services = BTreeMap::new();
        for declared in &declared.services {
            let name = declared.name.clone();
            faults.prefix = format!("service {:?}: ", name.chars().take(100).collect::<String>());
            let Some(service) = service(declared, &mut faults) else { continue };
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

/// Collects the faults of a declaration.
#[derive(Default)]
struct FaultCollector {
    /// The prefix of each fault.
    prefix: String,
    faults: Vec<String>,
}

impl FaultCollector {
    fn add(&mut self, field: &str, fault: impl std::fmt::Display) {
        self.faults.push(format!("{}{field}: {fault}", self.prefix));
    }

    fn ok_or_add<T, E: std::fmt::Display>(&mut self, field: &str, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.add(field, error)).ok()
    }

    fn add_unless(&mut self, fits: bool, field: &str, fault: impl std::fmt::Display) {
        if !fits {
            self.add(field, fault);
        }
    }

    fn check_count(&mut self, field: &str, count: usize) {
        self.add_unless(count <= MAX_ENTRIES, field, format!("it has {count}; {MAX_ENTRIES} are enough"));
    }
}

fn service(declared: &wire::Service, faults: &mut FaultCollector) -> Option<ServiceSpec> {
    let before = faults.faults.len();
    faults.add_unless(
        node_role::is_role_name(&declared.name),
        "name",
        "it has 1 to 63 lower-case letters, digits and dashes, begins with a letter and does not end with a dash",
    );
    let run = parse_program(declared, faults);
    faults.check_count("arguments", declared.arguments.len());
    let arguments = parse_templates("arguments", &declared.arguments, faults);
    let environment = parse_environment(declared, faults);
    let files = parse_files(declared, faults);
    check_user(declared, faults);
    let depends_on: BTreeSet<String> = declared.depends_on.iter().cloned().collect();
    faults.add_unless(
        depends_on.len() == declared.depends_on.len(),
        "depends_on",
        "it names a service twice",
    );
    let health_check = declared.health_check.as_ref().map(|check| parse_health_check(check, faults));
    let stop_time = duration_or_default(declared.stop_time_ms, DEFAULT_STOP_TIME);
    faults.add_unless(stop_time <= MAX_STOP_TIME, "stop_time_ms", "it is more than an hour");
    let restart = match wire::RestartPolicy::try_from(declared.restart) {
        Ok(wire::RestartPolicy::Unspecified | wire::RestartPolicy::Always) => RestartPolicy::Always,
        Ok(wire::RestartPolicy::OnFailure) => RestartPolicy::OnFailure,
        Ok(wire::RestartPolicy::Never) => RestartPolicy::Never,
        Err(_) => {
            faults.add("restart", format!("{} is no policy", declared.restart));
            RestartPolicy::Always
        }
    };
    let limits = declared.limits.unwrap_or_default();
    let service = ServiceSpec {
        name: declared.name.clone(),
        run: run?,
        arguments,
        environment,
        files,
        user: declared.user.clone(),
        limits: ServiceLimits {
            memory: Some(limits.memory_bytes).filter(|limit| *limit > 0),
            processor_milli: Some(limits.processor_milli).filter(|limit| *limit > 0),
            tasks: Some(limits.tasks).filter(|limit| *limit > 0),
        },
        depends_on,
        health_check: match health_check {
            None => None,
            Some(check) => Some(check?),
        },
        restart,
        stop_time,
    };
    (faults.faults.len() == before).then_some(service)
}

fn parse_program(declared: &wire::Service, faults: &mut FaultCollector) -> Option<ProgramSource> {
    match &declared.run {
        Some(wire::service::Run::Program(wire::Program { source: Some(source), url })) => match source {
            wire::program::Source::Path(path) => {
                faults.add_unless(
                    url.is_empty(),
                    "program.url",
                    "a program of the node is fetched from nowhere",
                );
                faults
                    .ok_or_add("program.path", check_absolute_path(path))
                    .map(|()| ProgramSource::Path(path.clone()))
            }
            wire::program::Source::Artefact(digest) => {
                faults.add_unless(
                    url.is_empty() || is_fetchable_url(url),
                    "program.url",
                    "it is http://, a host and a path, of at most 2000 printable characters",
                );
                let digest = faults.ok_or_add("program.artefact", parse_sha256(digest));
                digest.map(|digest| ProgramSource::Artefact { digest, url: url.clone() })
            }
        },
        Some(wire::service::Run::RootFilesystem(root)) => {
            let archive = faults.ok_or_add("root_filesystem.archive", parse_sha256(&root.archive));
            let program = faults.ok_or_add("root_filesystem.program", check_absolute_path(&root.program));
            program
                .and(archive)
                .map(|archive| ProgramSource::RootFilesystem { archive, program: root.program.clone() })
        }
        Some(wire::service::Run::Program(wire::Program { source: None, .. })) | None => {
            faults.add("run", "it says neither a program nor a root filesystem");
            None
        }
    }
}

fn parse_templates(field: &str, texts: &[String], faults: &mut FaultCollector) -> Vec<Template> {
    texts.iter().filter_map(|text| parse_template(field, text, faults)).collect()
}

fn parse_template(field: &str, text: &str, faults: &mut FaultCollector) -> Option<Template> {
    // No argument, variable or file name of a process can contain it.
    faults.add_unless(!text.contains('\0'), field, "it has a character of value 0");
    faults.ok_or_add(field, Template::parse(text))
}

fn parse_environment(declared: &wire::Service, faults: &mut FaultCollector) -> BTreeMap<String, Template> {
    faults.check_count("environment", declared.environment.len());
    let mut environment = BTreeMap::new();
    for (name, value) in &declared.environment {
        let fits = !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        faults.add_unless(
            fits,
            "environment",
            format!("{name:?} is no name of a variable: letters, digits and underscores, and no digit at the front"),
        );
        let value = parse_template(&format!("environment {name}"), value, faults);
        environment.extend(value.map(|value| (name.clone(), value)));
    }
    environment
}

fn parse_files(declared: &wire::Service, faults: &mut FaultCollector) -> Vec<ServiceFile> {
    faults.check_count("files", declared.files.len());
    let rooted = matches!(declared.run, Some(wire::service::Run::RootFilesystem(_)));
    let (mut files, mut paths) = (Vec::new(), BTreeSet::new());
    for file in &declared.files {
        let field = format!("file {:?}", file.path.chars().take(100).collect::<String>());
        let relative = file.path.strip_prefix('/').filter(|_| rooted).unwrap_or(&file.path);
        // A file anywhere else on a node would belong to another service or to the host.
        faults.add_unless(
            is_plain_path(relative),
            &field,
            if rooted {
                "its path has words between slashes, none of which is . or .."
            } else {
                "its path is below the service's own directory: words between slashes, none of which is . or .."
            },
        );
        faults.add_unless(paths.insert(relative), &field, "another file has this path");
        faults.add_unless(
            file.mode <= 0o777,
            &field,
            format!("its mode is {:o} in octal; the highest is 777", file.mode),
        );
        let contents = faults.ok_or_add(&field, Template::parse(&file.contents));
        files.extend(contents.map(|contents| ServiceFile {
            path: file.path.clone(),
            contents,
            mode: if file.mode == 0 { DEFAULT_FILE_MODE } else { file.mode },
        }));
    }
    files
}

fn check_user(declared: &wire::Service, faults: &mut FaultCollector) {
    let number = !declared.user.is_empty() && declared.user.chars().all(|c| c.is_ascii_digit());
    if declared.user.is_empty() {
        faults.add("user", "it is empty; say who the service runs as, even if that is root");
    } else if number {
        // The highest number means "no change" to the kernel.
        let fits = declared.user.parse::<u32>().is_ok_and(|user| user < u32::MAX);
        faults.add_unless(fits, "user", format!("{} is too high a number", declared.user));
    } else if matches!(declared.run, Some(wire::service::Run::RootFilesystem(_))) && declared.user != "root" {
        faults.add("user", "in a root filesystem it is a number, because the node does not know its names");
    } else {
        let fits = declared.user.len() <= 32
            && declared.user.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            && declared
                .user
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c));
        faults.add_unless(fits, "user", format!("{:?} is no name of a user", declared.user));
    }
}

fn parse_health_check(check: &wire::HealthCheck, faults: &mut FaultCollector) -> Option<HealthCheck> {
    let probe = match &check.probe {
        Some(wire::health_check::Probe::Exec(exec)) => {
            faults.add_unless(!exec.command.is_empty(), "health_check.exec", "it says no program");
            faults.check_count("health_check.exec", exec.command.len());
            Some(ProbeSpec::Exec(parse_templates("health_check.exec", &exec.command, faults)))
        }
        Some(wire::health_check::Probe::Tcp(tcp)) => {
            faults.ok_or_add("health_check.tcp.port", parse_port(tcp.port)).map(ProbeSpec::Tcp)
        }
        Some(wire::health_check::Probe::Http(http)) => {
            // The path is part of a request line.
            let fits = http.path.starts_with('/') && http.path.chars().all(|c| c.is_ascii_graphic());
            faults.add_unless(fits, "health_check.http.path", "it begins with a slash and has no spaces");
            let port = faults.ok_or_add("health_check.http.port", parse_port(http.port));
            port.map(|port| ProbeSpec::Http { port, path: http.path.clone() })
        }
        None => {
            faults.add("health_check", "it says neither exec nor tcp nor http");
            None
        }
    };
    let interval = duration_or_default(check.interval_ms, DEFAULT_CHECK_INTERVAL);
    let timeout = duration_or_default(check.timeout_ms, DEFAULT_CHECK_TIMEOUT.min(interval));
    faults.add_unless(interval <= MAX_CHECK_INTERVAL, "health_check.interval_ms", "it is more than an hour");
    faults.add_unless(
        timeout <= interval,
        "health_check.timeout_ms",
        format!("{} ms is longer than the interval, {} ms", timeout.as_millis(), interval.as_millis()),
    );
    let failures = if check.failures == 0 { DEFAULT_CHECK_FAILURES } else { check.failures };
    probe.map(|probe| HealthCheck { probe, interval, timeout, failures })
}

fn duration_or_default(milliseconds: u64, default: Duration) -> Duration {
    if milliseconds == 0 { default } else { Duration::from_millis(milliseconds) }
}

fn parse_port(port: u32) -> Result<u16, String> {
    u16::try_from(port)
        .ok()
        .filter(|port| *port > 0)
        .ok_or_else(|| format!("{port} is no port: 1 to 65535 are"))
}

/// Parses a SHA-256 digest: 64 lower-case hexadecimal digits. The error is a sentence.
pub fn parse_sha256(text: &str) -> Result<Sha256, String> {
    let refused = || {
        let shown: String = text.chars().take(100).collect();
        format!("{shown:?} is no SHA-256: it has 64 lower-case hexadecimal digits")
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

fn check_absolute_path(path: &str) -> Result<(), String> {
    let shown: String = path.chars().take(100).collect();
    path.strip_prefix('/')
        .filter(|rest| is_plain_path(rest))
        .map(|_| ())
        .ok_or_else(|| format!("{shown:?} is no absolute path without . and .."))
}

fn is_plain_path(path: &str) -> bool {
    path.len() <= 4000
        && !path.contains('\0')
        && path.split('/').all(|word| !matches!(word, "" | "." | "..") && word.len() <= 255)
}

/// The names in an order in which each comes after those that it depends on. The error is a cycle: each name depends on
/// the next one, and the last is the first again.
fn start_order(depends_on: &BTreeMap<&str, BTreeSet<&str>>) -> Result<Vec<String>, Vec<String>> {
    let mut placed: Vec<&str> = Vec::new();
    loop {
        let waiting = || depends_on.iter().filter(|(name, _)| !placed.contains(name));
        let ready = waiting().find(|(_, wanted)| wanted.iter().all(|wanted| placed.contains(wanted)));
        let next = ready.map(|(name, _)| *name);
        let Some(next) = next else {
            let Some((first, _)) = waiting().next() else { break };
            return Err(find_cycle(first, &placed, depends_on));
        };
        placed.push(next);
    }
    Ok(placed.into_iter().map(str::to_owned).collect())
}

/// Follows dependencies until a name is repeated.
fn find_cycle(from: &str, placed: &[&str], depends_on: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<String> {
    let mut path = vec![from];
    loop {
        let last = path.last().copied().unwrap_or(from);
        let wanted = depends_on.get(last).into_iter().flatten().find(|wanted| !placed.contains(wanted));
        let Some(wanted) = wanted.copied() else { break };
        path.push(wanted);
        if let Some(begin) = path[..path.len() - 1].iter().position(|name| *name == wanted) {
            path.drain(..begin);
            break;
        }
    }
    path.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> wire::service::Run {
        let source = Some(wire::program::Source::Path("/usr/bin/server".to_owned()));
        wire::service::Run::Program(wire::Program { source, url: String::new() })
    }

    fn rootfs() -> wire::service::Run {
        wire::service::Run::RootFilesystem(wire::RootFilesystem {
            archive: "ab".repeat(32),
            program: "/bin/server".to_owned(),
        })
    }

    fn service(name: &str, depends_on: &[&str]) -> wire::Service {
        wire::Service {
            name: name.to_owned(),
            run: Some(program()),
            user: "daemon".to_owned(),
            depends_on: depends_on.iter().map(|name| (*name).to_owned()).collect(),
            ..Default::default()
        }
    }

    fn role(services: impl IntoIterator<Item = wire::Service>) -> wire::Declaration {
        wire::Declaration { role: "web".to_owned(), services: services.into_iter().collect(), revision: 0 }
    }

    fn check(probe: wire::health_check::Probe) -> wire::HealthCheck {
        wire::HealthCheck { probe: Some(probe), ..Default::default() }
    }

    fn faults(declared: wire::Declaration) -> Vec<String> {
        RoleDeclaration::new(declared).unwrap_err().faults
    }

    #[test]
    fn declaration_is_accepted_with_defaults_filled_in() {
        let mut declared = service("server", &[]);
        declared.arguments = vec!["--bind".to_owned(), "{{node.address}}:80".to_owned()];
        declared.environment = BTreeMap::from([("NODE".to_owned(), "{{node.id}}".to_owned())]);
        declared.files =
            vec![wire::File { path: "etc/server.conf".to_owned(), contents: "x".to_owned(), mode: 0 }];
        declared.health_check = Some(check(wire::health_check::Probe::Tcp(wire::TcpCheck { port: 80 })));
        let declaration = RoleDeclaration::new(role([declared])).unwrap();
        let service = declaration.service("server").unwrap();
        assert_eq!(service.run, ProgramSource::Path("/usr/bin/server".to_owned()));
        assert_eq!((service.arguments.len(), service.environment.len()), (2, 1));
        assert_eq!((service.files[0].mode, service.restart), (0o600, RestartPolicy::Always));
        assert_eq!((service.stop_time, service.limits), (DEFAULT_STOP_TIME, ServiceLimits::default()));
        let expected = HealthCheck {
            probe: ProbeSpec::Tcp(80),
            interval: DEFAULT_CHECK_INTERVAL,
            timeout: DEFAULT_CHECK_TIMEOUT,
            failures: 3,
        };
        assert_eq!(service.health_check, Some(expected));
    }

    #[test]
    fn short_interval_shortens_the_default_timeout() {
        let tcp = wire::health_check::Probe::Tcp(wire::TcpCheck { port: 80 });
        let health_check = Some(wire::HealthCheck { interval_ms: 500, ..check(tcp) });
        let declaration =
            RoleDeclaration::new(role([wire::Service { health_check, ..service("a", &[]) }])).unwrap();
        let timeout = declaration.service("a").unwrap().health_check.as_ref().unwrap().timeout;
        assert_eq!(timeout, Duration::from_millis(500));
    }

    #[test]
    fn every_fault_names_its_field() {
        use wire::health_check::Probe as P;
        let base = || service("a", &[]);
        let file = |path: &str| wire::File { path: path.to_owned(), ..Default::default() };
        let run = |run| wire::Service { run: Some(run), ..base() };
        let path = |path: &str| {
            run(wire::service::Run::Program(wire::Program {
                source: Some(wire::program::Source::Path(path.to_owned())),
                url: String::new(),
            }))
        };
        let artefact = |digest: &str| {
            run(wire::service::Run::Program(wire::Program {
                source: Some(wire::program::Source::Artefact(digest.to_owned())),
                url: String::new(),
            }))
        };
        let checked = |check| wire::Service { health_check: Some(check), ..base() };
        let tcp = |port| check(P::Tcp(wire::TcpCheck { port }));
        let http = |path: &str| check(P::Http(wire::HttpCheck { port: 1, path: path.to_owned() }));
        let environment = |name: &str| wire::Service {
            environment: BTreeMap::from([(name.to_owned(), String::new())]),
            ..base()
        };
        for (field, declared) in [
            ("name", wire::Service { name: "A".to_owned(), ..base() }),
            ("run", wire::Service { run: None, ..base() }),
            ("run", run(wire::service::Run::Program(wire::Program { source: None, url: String::new() }))),
            ("program.path", path("bin/server")),
            ("program.path", path("/bin/../server")),
            ("program.path", path("/")),
            ("program.artefact", artefact("ab")),
            ("program.artefact", artefact(&"AB".repeat(32))),
            (
                "root_filesystem.program",
                wire::Service {
                    user: "0".to_owned(),
                    ..run(wire::service::Run::RootFilesystem(wire::RootFilesystem {
                        archive: "ab".repeat(32),
                        program: "server".to_owned(),
                    }))
                },
            ),
            ("arguments", wire::Service { arguments: vec!["{{node.name}}".to_owned()], ..base() }),
            ("arguments", wire::Service { arguments: vec!["a\0".to_owned()], ..base() }),
            ("arguments", wire::Service { arguments: vec![String::new(); 257], ..base() }),
            ("environment", environment("A=B")),
            ("environment", environment("1A")),
            ("environment", environment("")),
            ("file \"../a\"", wire::Service { files: vec![file("../a")], ..base() }),
            ("file \"/etc/passwd\"", wire::Service { files: vec![file("/etc/passwd")], ..base() }),
            ("file \"\"", wire::Service { files: vec![file("")], ..base() }),
            ("file \"a\"", wire::Service { files: vec![file("a"), file("a")], ..base() }),
            ("file \"a\"", wire::Service { files: vec![wire::File { mode: 0o4755, ..file("a") }], ..base() }),
            (
                "file \"a\"",
                wire::Service {
                    files: vec![wire::File { contents: "{{x}}".to_owned(), ..file("a") }],
                    ..base()
                },
            ),
            ("user", wire::Service { user: String::new(), ..base() }),
            ("user", wire::Service { user: "a b".to_owned(), ..base() }),
            ("user", wire::Service { user: u32::MAX.to_string(), ..base() }),
            ("user", wire::Service { run: Some(rootfs()), ..base() }),
            ("depends_on", service("a", &["b"])),
            ("health_check", checked(wire::HealthCheck::default())),
            ("health_check.exec", checked(check(P::Exec(wire::ExecCheck { command: vec![] })))),
            ("health_check.tcp.port", checked(tcp(0))),
            ("health_check.tcp.port", checked(tcp(65_536))),
            ("health_check.http.path", checked(http("health"))),
            ("health_check.http.path", checked(http("/a b"))),
            ("health_check.timeout_ms", checked(wire::HealthCheck { timeout_ms: 5001, ..tcp(1) })),
            ("health_check.interval_ms", checked(wire::HealthCheck { interval_ms: 3_600_001, ..tcp(1) })),
            ("restart", wire::Service { restart: 9, ..base() }),
            ("stop_time_ms", wire::Service { stop_time_ms: 3_600_001, ..base() }),
        ] {
            let begins = format!("service {:?}: {field}", declared.name);
            let messages = faults(role([declared]));
            assert!(messages.len() == 1 && messages[0].starts_with(&begins), "{begins}: {messages:?}");
        }
        assert_eq!(faults(role([])), ["services: it has none; a role runs at least one"]);
        assert_eq!(faults(role((0..65).map(|n| service(&format!("s{n}"), &[])))).len(), 1);
        let big = wire::File { contents: "x".repeat(MAX_BYTES), ..file("a") };
        assert!(faults(role([wire::Service { files: vec![big], ..base() }]))[0].starts_with("size"));
    }

    #[test]
    fn all_faults_are_reported_at_once() {
        let wrong = wire::Service { user: String::new(), run: None, ..service("a", &["c"]) };
        let declared = wire::Declaration {
            role: "kubernetes-worker".to_owned(),
            ..role([wrong, service("b", &[]), service("b", &[])])
        };
        let error = RoleDeclaration::new(declared).unwrap_err();
        let fields = [
            "role: ",
            "service \"a\": run",
            "service \"a\": user",
            "service \"b\": name",
            "service \"a\": depends_on",
        ];
        assert_eq!(error.faults.len(), fields.len(), "{error}");
        for field in fields {
            assert!(error.faults.iter().any(|fault| fault.starts_with(field)), "{field}: {error}");
        }
        assert!(error.to_string().starts_with("role \"kubernetes-worker\" was not declared: "), "{error}");
    }

    #[test]
    fn services_start_after_their_dependencies() {
        let names = |services: Vec<wire::Service>| {
            let declaration = RoleDeclaration::new(role(services)).unwrap();
            let started: Vec<_> = declaration.in_start_order().map(|service| service.name.clone()).collect();
            let mut stopped: Vec<_> =
                declaration.in_start_order().rev().map(|service| service.name.clone()).collect();
            stopped.reverse();
            assert_eq!(stopped, started);
            started
        };
        assert_eq!(names(vec![service("c", &[]), service("a", &[]), service("b", &[])]), ["a", "b", "c"]);
        let chain = vec![service("a", &["b"]), service("b", &["c"]), service("c", &[])];
        assert_eq!(names(chain), ["c", "b", "a"]);
        let diamond = vec![
            service("web", &["cache", "database"]),
            service("cache", &["disk"]),
            service("database", &["disk"]),
            service("disk", &[]),
        ];
        assert_eq!(names(diamond), ["disk", "cache", "database", "web"]);
    }

    #[test]
    fn dependency_cycle_is_reported_by_names() {
        let declared = role([
            service("an-entry", &["web"]),
            service("web", &["cache"]),
            service("cache", &["database"]),
            service("database", &["web"]),
            service("free", &[]),
        ]);
        let messages = faults(declared);
        assert_eq!(messages.len(), 1);
        // Names that only lead into the cycle are left out.
        assert!(messages[0].contains(" web → cache → database → web:"), "{messages:?}");
        assert!(!messages[0].contains("an-entry"), "{messages:?}");
        assert!(faults(role([service("a", &["a"])]))[0].contains(" a → a:"));
    }

    #[test]
    fn same_declaration_keeps_the_revision_and_another_raises_it() {
        let first =
            RoleDeclaration::new(role([service("a", &[])])).unwrap().into_next_revision(None).unwrap();
        assert_eq!(first.revision(), 1);
        assert_eq!(
            RoleDeclaration::new(role([service("a", &[])])).unwrap().into_next_revision(Some(&first)),
            None
        );
        let claims = wire::Declaration { revision: 99, ..role([service("a", &[])]) };
        assert_eq!(
            RoleDeclaration::new(claims).unwrap().into_next_revision(Some(&first)),
            None,
            "what it claims is not looked at"
        );
        let second = RoleDeclaration::new(role([service("b", &[])]))
            .unwrap()
            .into_next_revision(Some(&first))
            .unwrap();
        assert_eq!(second.revision(), 2);
    }

    #[test]
    fn artefact_has_an_http_url_or_none() {
        let with = |source: wire::program::Source, url: &str| wire::Service {
            run: Some(wire::service::Run::Program(wire::Program {
                source: Some(source),
                url: url.to_owned(),
            })),
            ..service("a", &[])
        };
        let artefact = || wire::program::Source::Artefact("ab".repeat(32));
        for url in ["", "http://10.0.0.1/a", "http://store:8080/a/b?c=d"] {
            let declaration = RoleDeclaration::new(role([with(artefact(), url)])).unwrap();
            let expected = ProgramSource::Artefact { digest: Sha256([0xab; 32]), url: url.to_owned() };
            assert_eq!(declaration.service("a").unwrap().run, expected);
        }
        for url in [
            "https://store/a",
            "http:///a",
            "http://store",
            "http://u:p@store/a",
            "http://s/a b",
            "ftp://s/a",
            "/a",
        ] {
            assert!(faults(role([with(artefact(), url)]))[0].contains("program.url: it is http://"), "{url}");
        }
        let path = wire::program::Source::Path("/bin/server".to_owned());
        assert!(faults(role([with(path, "http://store/a")]))[0].contains("from nowhere"));
    }

    #[test]
    fn restart_follows_the_policy() {
        for (policy, ended_well, failed, killed) in [
            (RestartPolicy::Always, true, true, true),
            (RestartPolicy::OnFailure, false, true, true),
            (RestartPolicy::Never, false, false, false),
        ] {
            let again =
                (policy.restarts_after(Some(0)), policy.restarts_after(Some(1)), policy.restarts_after(None));
            assert_eq!(again, (ended_well, failed, killed), "{policy:?}");
        }
    }

    #[test]
    fn root_filesystem_runs_as_a_number_and_may_have_files_anywhere_in_it() {
        let file = wire::File { path: "/etc/server.conf".to_owned(), ..Default::default() };
        let rooted = wire::Service {
            run: Some(rootfs()),
            user: "1000".to_owned(),
            files: vec![file.clone()],
            ..service("a", &[])
        };
        assert!(RoleDeclaration::new(role([rooted.clone()])).is_ok());
        let relative = wire::File { path: "etc/server.conf".to_owned(), ..file.clone() };
        let twice = wire::Service { files: vec![file, relative], ..rooted };
        assert!(faults(role([twice]))[0].contains("another file has this path"));
    }
}
