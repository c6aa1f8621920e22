//! Validation of a service: every field is parsed, and every fault is collected with the field's name.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::curator::v1 as wire;

use crate::node_role;
use crate::role_declaration::privileges::{Capability, Privileges};
use crate::role_declaration::{
    DEFAULT_CHECK_FAILURES, DEFAULT_CHECK_INTERVAL, DEFAULT_CHECK_TIMEOUT, DEFAULT_STOP_TIME, HealthCheck,
    ProbeSpec, ProgramSource, RestartPolicy, ServiceFile, ServiceLimits, ServiceSpec, is_fetchable_url,
    parse_sha256,
};
use crate::template::Template;

const MAX_ENTRIES: usize = 256;
const MAX_STOP_TIME: Duration = Duration::from_hours(1);
const MAX_CHECK_INTERVAL: Duration = Duration::from_hours(1);
const DEFAULT_FILE_MODE: u32 = 0o600;

/// Collects the faults of a declaration.
#[derive(Default)]
pub(super) struct FaultCollector {
    /// The prefix of each fault.
    pub(super) prefix: String,
    /// The faults so far, each with its prefix.
    pub(super) faults: Vec<String>,
}

impl FaultCollector {
    pub(super) fn add(&mut self, field: &str, fault: impl std::fmt::Display) {
        self.faults.push(format!("{}{field}: {fault}", self.prefix));
    }

    pub(super) fn ok_or_add<T, E: std::fmt::Display>(
        &mut self,
        field: &str,
        result: Result<T, E>,
    ) -> Option<T> {
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

pub(super) fn parse_service(declared: &wire::Service, faults: &mut FaultCollector) -> Option<ServiceSpec> {
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
    let privileges = parse_privileges(declared, faults);
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
        privileges,
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
            format!(
                "{name:?} is not a valid name of a variable: letters, digits and underscores, and no digit \
                     at the front"
            ),
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

fn parse_privileges(declared: &wire::Service, faults: &mut FaultCollector) -> Privileges {
    faults.check_count("capabilities", declared.capabilities.len());
    let named = declared.capabilities.iter().map(|name| name.parse::<Capability>());
    let named: Vec<Option<Capability>> =
        named.map(|capability| faults.ok_or_add("capabilities", capability)).collect();
    let capabilities: BTreeSet<Capability> = named.iter().copied().flatten().collect();
    faults.add_unless(
        named.iter().flatten().count() == capabilities.len(),
        "capabilities",
        "it names a capability twice",
    );
    let rooted = matches!(declared.run, Some(wire::service::Run::RootFilesystem(_)));
    let unfiltered_system_calls = match declared.seccomp.as_str() {
        "" => false,
        "unconfined" => {
            faults.add_unless(
                rooted,
                "seccomp",
                "only a service in a root filesystem has a filter of system calls; omit it",
            );
            true
        }
        other => {
            let shown: String = other.chars().take(100).collect();
            faults.add(
                "seccomp",
                format!("{shown:?} is not a profile; write \"unconfined\", or omit it for the default"),
            );
            false
        }
    };
    Privileges { capabilities, unfiltered_system_calls, new_privileges: declared.new_privileges }
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

fn check_absolute_path(path: &str) -> Result<(), String> {
    let shown: String = path.chars().take(100).collect();
    path.strip_prefix('/')
        .filter(|rest| is_plain_path(rest))
        .map(|_| ())
        .ok_or_else(|| format!("{shown:?} is not an absolute path without . and .."))
}

fn is_plain_path(path: &str) -> bool {
    path.len() <= 4000
        && !path.contains('\0')
        && path.split('/').all(|word| !matches!(word, "" | "." | "..") && word.len() <= 255)
}
