//! Role file (TOML) of `cluster declare`: services of a role, as in `shepherdctl cluster declare ams web.toml`.
//!
//! This module defines only the syntax, and rejects anything in the file that it does not read. What a role may
//! contain is checked by the same rules as in the curators ([`model::role_declaration`]). A file that a service
//! needs may be next to the role file (`from`), and becomes part of the declaration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::error::CliError;
use model::byte_size::parse_bytes;
use model::cluster::declaration::check_declaration_size;
use model::role_declaration::RoleDeclaration;
use model::text_file::decode_text;
use model::time::Span;
use proto::curator::v1 as wire;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RoleFile {
    role: String,
    #[serde(default)]
    service: Vec<ServiceTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceTable {
    name: String,
    program: Option<String>,
    artefact: Option<String>,
    archive: Option<String>,
    url: Option<String>,
    #[serde(default)]
    arguments: Vec<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    file: Vec<FileTable>,
    user: String,
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    depends_on: Vec<String>,
    health: Option<HealthTable>,
    restart: Option<RestartSetting>,
    stop_time: Option<String>,
    #[serde(default)]
    capabilities: Vec<String>,
    seccomp: Option<String>,
    #[serde(default)]
    new_privileges: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    path: String,
    contents: Option<String>,
    from: Option<PathBuf>,
    mode: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    memory: Option<String>,
    processors: Option<f64>,
    tasks: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HealthTable {
    http: Option<HttpTable>,
    tcp: Option<u16>,
    exec: Option<Vec<String>>,
    interval: Option<String>,
    timeout: Option<String>,
    failures: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpTable {
    port: u16,
    path: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RestartSetting {
    Always,
    OnFailure,
    Never,
}

/// Reads a role file and checks it. The error names the file and every fault of the role.
pub fn read_role_file(path: &Path) -> Result<RoleDeclaration, CliError> {
    let wrong = |error: &dyn std::fmt::Display| CliError::Invalid(format!("{}: {error}", path.display()));
    let unread =
        |error: &dyn std::fmt::Display| CliError::Invalid(format!("cannot read {}: {error}", path.display()));
    let content = std::fs::read(path).map_err(|error| unread(&error))?;
    let text = decode_text(&content).map_err(|error| unread(&error))?;
    let file: RoleFile = toml::from_str(text).map_err(|error| wrong(&error))?;
    let beside = path.parent().unwrap_or_else(|| Path::new("."));
    let declared = file.into_wire(beside).map_err(|reason| wrong(&reason))?;
    check_declaration_size(&declared).map_err(|reason| wrong(&reason))?;
    RoleDeclaration::new(declared).map_err(|error| wrong(&error))
}

impl RoleFile {
    /// Converts the role into the message for the curators. The error is a sentence that names the service.
    fn into_wire(self, beside: &Path) -> Result<wire::Declaration, String> {
        let services = self.service.into_iter().map(|service| {
            let name = service.name.clone();
            service.into_wire(beside).map_err(|reason| format!("service {name:?}: {reason}"))
        });
        let services = services.collect::<Result<_, _>>()?;
        Ok(wire::Declaration { role: self.role, services, ..wire::Declaration::default() })
    }
}

impl ServiceTable {
    fn into_wire(self, beside: &Path) -> Result<wire::Service, String> {
        let url = self.url.unwrap_or_default();
        let of = |source, url| wire::service::Run::Program(wire::Program { source: Some(source), url });
        let run = match (self.program, self.artefact, self.archive) {
            (Some(path), None, None) => of(wire::program::Source::Path(path), url),
            (None, Some(digest), None) => of(wire::program::Source::Artefact(digest), url),
            (Some(program), None, Some(archive)) if url.is_empty() => {
                wire::service::Run::RootFilesystem(wire::RootFilesystem { archive, program })
            }
            (_, _, Some(_)) => {
                let text = "a service with an archive needs a program (absolute path in the archive), and neither an artefact \
                            nor a url: nodes have archives from the shepherds (shepherdctl artefacts add)";
                return Err(text.to_owned());
            }
            _ => {
                let text = "it has either a program, by its absolute path on the node, or an artefact, by its SHA-256";
                return Err(text.to_owned());
            }
        };
        let restart = match self.restart {
            None => wire::RestartPolicy::Unspecified,
            Some(RestartSetting::Always) => wire::RestartPolicy::Always,
            Some(RestartSetting::OnFailure) => wire::RestartPolicy::OnFailure,
            Some(RestartSetting::Never) => wire::RestartPolicy::Never,
        };
        Ok(wire::Service {
            name: self.name,
            run: Some(run),
            arguments: self.arguments,
            environment: self.environment,
            files: self.file.into_iter().map(|file| file.into_wire(beside)).collect::<Result<_, _>>()?,
            user: self.user,
            limits: Some(self.limits.into_wire()?),
            depends_on: self.depends_on,
            health_check: self.health.map(HealthTable::into_wire).transpose()?,
            restart: restart.into(),
            stop_time_ms: parse_milliseconds("stop_time", self.stop_time.as_deref())?,
            capabilities: self.capabilities,
            seccomp: self.seccomp.unwrap_or_default(),
            new_privileges: self.new_privileges,
        })
    }
}

impl FileTable {
    fn into_wire(self, beside: &Path) -> Result<wire::File, String> {
        let contents = match (self.contents, self.from) {
            (Some(contents), None) => contents,
            (None, Some(from)) => {
                let from = beside.join(from);
                let unread = |error: &dyn std::fmt::Display| {
                    format!("cannot read its file {}: {error}", from.display())
                };
                let content = std::fs::read(&from).map_err(|error| unread(&error))?;
                decode_text(&content).map_err(|error| unread(&error))?;
                // The service gets it as it is, also with a mark.
                String::from_utf8_lossy(&content).into_owned()
            }
            _ => {
                return Err(format!(
                    "its file {:?} has either contents or from, a file beside this one",
                    self.path
                ));
            }
        };
        let mode = match &self.mode {
            None => 0,
            Some(text) => u32::from_str_radix(text, 8).map_err(|_| {
                format!(
                    "its file {:?} has the mode {text:?}; write it in octal digits, as \"0400\"",
                    self.path
                )
            })?,
        };
        Ok(wire::File { path: self.path, contents, mode })
    }
}

impl LimitsTable {
    fn into_wire(self) -> Result<wire::Limits, String> {
        let memory_bytes = match &self.memory {
            None => 0,
            Some(text) => parse_bytes(text)
                .filter(|bytes| *bytes > 0)
                .ok_or_else(|| format!("its limit of memory is {text:?}; write it as 64MiB"))?,
        };
        let processor_milli = match self.processors {
            None => 0,
            Some(processors) if (0.001..=1_000_000.0).contains(&processors) => {
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "it is between 1 and 10⁹ by the line above"
                )]
                let milli = (processors * 1_000.0).round() as u32;
                milli
            }
            Some(processors) => {
                return Err(format!("its limit of processors is {processors}; half of one is 0.5"));
            }
        };
        let tasks = match self.tasks {
            Some(0) => return Err("its limit of tasks is 0, so that it could never start".to_owned()),
            tasks => tasks.unwrap_or(0),
        };
        Ok(wire::Limits { memory_bytes, processor_milli, tasks })
    }
}

impl HealthTable {
    fn into_wire(self) -> Result<wire::HealthCheck, String> {
        let probe = match (self.http, self.tcp, self.exec) {
            (Some(http), None, None) => {
                wire::health_check::Probe::Http(wire::HttpCheck { port: http.port.into(), path: http.path })
            }
            (None, Some(port), None) => wire::health_check::Probe::Tcp(wire::TcpCheck { port: port.into() }),
            (None, None, Some(command)) => wire::health_check::Probe::Exec(wire::ExecCheck { command }),
            _ => return Err("its health check has one of http, tcp and exec".to_owned()),
        };
        Ok(wire::HealthCheck {
            probe: Some(probe),
            interval_ms: parse_milliseconds("interval", self.interval.as_deref())?,
            timeout_ms: parse_milliseconds("timeout", self.timeout.as_deref())?,
            failures: self.failures.unwrap_or(0),
        })
    }
}

fn parse_milliseconds(what: &str, text: Option<&str>) -> Result<u64, String> {
    let Some(text) = text else { return Ok(0) };
    let span: Span = text
        .parse()
        .map_err(|_| format!("its {what} is {text:?}, which is not a duration; write for example 10s"))?;
    let span = Duration::from(span);
    if span.is_zero() {
        return Err(format!("its {what} is {text:?}, which is too short; omit it for the default"));
    }
    u64::try_from(span.as_millis()).map_err(|_| format!("its {what} is {text:?}, which is too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPLETE_FILE: &str = r#"
role = "web"

[[service]]
name = "server"
program = "/usr/bin/perl"
arguments = ["server.pl", "{{node.address}}"]
environment = { PATH = "/usr/bin:/bin" }
user = "nobody"
limits = { memory = "64MiB", processors = 0.5, tasks = 20 }
restart = "on-failure"
stop_time = "3s"
capabilities = ["NET_ADMIN"]
new_privileges = true
health = { http = { port = 8080, path = "/" }, interval = "2s", timeout = "1s", failures = 2 }

[[service.file]]
path = "server.pl"
from = "server.pl"
mode = "0400"

[[service]]
name = "helper"
artefact = "abababababababababababababababababababababababababababababababab"
url = "http://10.0.0.1/helper"
user = "root"
depends_on = ["server"]
health = { tcp = 53 }
"#;

    fn read_text(text: &str) -> Result<RoleDeclaration, String> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("server.pl"), "print 1;\n").unwrap();
        let path = directory.path().join("web.toml");
        std::fs::write(&path, text).unwrap();
        read_role_file(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn complete_file_is_read() {
        let declaration = read_text(COMPLETE_FILE).unwrap();
        let declared = declaration.to_wire();
        let [server, helper] = declared.services.as_slice() else { panic!("{declared:?}") };
        assert_eq!(server.files[0].contents, "print 1;\n");
        assert_eq!((server.files[0].mode, server.stop_time_ms), (0o400, 3_000));
        let limits = server.limits.unwrap();
        assert_eq!((limits.memory_bytes, limits.processor_milli, limits.tasks), (64 << 20, 500, 20));
        let check = server.health_check.clone().unwrap();
        assert_eq!((check.interval_ms, check.timeout_ms, check.failures), (2_000, 1_000, 2));
        assert_eq!(server.restart(), wire::RestartPolicy::OnFailure);
        assert!(server.new_privileges && server.capabilities == ["NET_ADMIN"] && server.seccomp.is_empty());
        assert_eq!(helper.depends_on, ["server"]);
        let Some(wire::service::Run::Program(program)) = &helper.run else { panic!("{helper:?}") };
        assert_eq!(program.url, "http://10.0.0.1/helper");
    }

    #[test]
    fn file_that_windows_saved_is_read_and_utf16_is_named() {
        let windows = format!("\u{feff}{}", COMPLETE_FILE.replace('\n', "\r\n"));
        assert_eq!(read_text(&windows).unwrap().to_wire().services.len(), 2);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.toml");
        let utf16: Vec<u8> = COMPLETE_FILE.encode_utf16().flat_map(u16::to_le_bytes).collect();
        std::fs::write(&path, utf16).unwrap();
        let error = read_role_file(&path).unwrap_err().to_string();
        assert!(error.contains("web.toml: it is UTF-16"), "{error}");
    }

    #[test]
    fn archive_is_a_root_filesystem() {
        let text = |program: &str| {
            let archive = "ab".repeat(32);
            format!(
                "role = \"box\"\n[[service]]\nname = \"server\"\narchive = \"{archive}\"\nuser = \"7\"\n{program}"
            )
        };
        let declaration = read_text(&text("program = \"/bin/server\"\n")).unwrap();
        let Some(wire::service::Run::RootFilesystem(root)) = &declaration.to_wire().services[0].run else {
            panic!("{declaration:?}")
        };
        assert_eq!((root.program.as_str(), root.archive.len()), ("/bin/server", 64));
        for wrong in ["", "artefact = \"x\"\n", "program = \"/bin/server\"\nurl = \"http://10.0.0.1/x\"\n"] {
            let output = read_text(&text(wrong)).unwrap_err();
            assert!(output.contains("a service with an archive needs a program"), "{wrong}: {output}");
        }
    }

    #[test]
    fn examples_of_manual_and_help_are_valid() {
        let manual = include_str!("../../../../docs/nodes.md");
        let (_, shown) = manual.split_once("```toml\n").unwrap();
        let (shown, _) = shown.split_once("```").unwrap();
        let shown = shown.replace("<SHA-256 of the program>", &"ab".repeat(32));
        assert_eq!(read_text(&shown).unwrap().to_wire().services.len(), 2);
        let (_, shown) = crate::cluster::declare::DECLARE_EXAMPLES.split_once("web.toml:\n").unwrap();
        let (shown, _) = shown.split_once("\n\nA service may").unwrap();
        let declaration = read_text(shown).unwrap();
        assert_eq!(declaration.to_wire().services[0].files[0].contents, "print 1;\n");
    }

    #[test]
    fn errors_name_the_service() {
        for (from, to, text) in [
            ("user = \"nobody\"\n", "", "missing field `user`"),
            ("stop_time = \"3s\"", "stop_tme = \"3s\"", "unknown field `stop_tme`"),
            ("stop_time = \"3s\"", "stop_time = \"soon\"", "service \"server\": its stop_time is \"soon\""),
            ("\"64MiB\"", "\"64 apples\"", "its limit of memory is \"64 apples\""),
            ("processors = 0.5", "processors = 0", "its limit of processors is 0"),
            ("tasks = 20", "tasks = 0", "its limit of tasks is 0"),
            ("mode = \"0400\"", "mode = \"0900\"", "write it in octal digits"),
            ("from = \"server.pl\"", "from = \"else.pl\"", "cannot read its file"),
            ("program = \"/usr/bin/perl\"\n", "", "either a program"),
            ("{ tcp = 53 }", "{ }", "its health check has one of http, tcp and exec"),
            // Faults that the curators would report, reported here already.
            ("depends_on = [\"server\"]", "depends_on = [\"sever\"]", "there is no service \"sever\""),
            ("{{node.address}}", "{{node.adress}}", "node.adress"),
            ("[\"NET_ADMIN\"]", "[\"net\"]", "\"net\" is not a capability"),
            ("role = \"web\"", "role = \"consensus-member\"", "consensus-member"),
        ] {
            assert!(COMPLETE_FILE.contains(from), "{from}");
            let error = read_text(&COMPLETE_FILE.replace(from, to)).unwrap_err();
            assert!(error.contains(text) && error.contains("web.toml"), "{text}: {error}");
        }
    }
}
