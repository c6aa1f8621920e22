//! `roleserver status`: print the state of this machine's role server.
//!
//! It prints everything that can be read: a file that cannot be read is a line of its own, and the rest goes on.

use std::fmt::{Display, Write as _};
use std::path::Path;

use crate::boot_clock::{BootClock as _, HostClock};
use crate::commands::CommandError;
use crate::process::ProcessRecord;
use crate::state_directory::{LastHeartbeat, StateDirectory};
use crate::state_error::StateError;
use crate::status_socket;

/// The exit code on a machine that is not enrolled.
const NOT_ENROLLED: u8 = 3;

/// The status as text, one fact a line, with the tree of the agent's runnables; and the exit code for it.
pub fn render_text(state_directory: &Path) -> Result<(String, u8), CommandError> {
    let clock = HostClock::read().map_err(CommandError::from_error)?;
    let state = StateDirectory::from_path(state_directory.to_owned());
    let mut page = StatusPage(String::new());
    page.add_line("state directory", state.path().display());
    let exit_code = match state.read_enrolment() {
        Ok(Some(enrolment)) => {
            page.add_line("machine", enrolment.machine_id);
            page.add_line("database", enrolment.bmdb_id);
            for (lane, fence) in &enrolment.fences {
                page.add_line("fence", format_args!("{lane} {fence}"));
            }
            let learned =
                page.value_or_line("learned settings", state.read_learned_settings(enrolment.revision));
            let settings = learned.map_or(enrolment.settings, |learned| learned.settings);
            page.add_line("endpoints", settings.endpoints.join(", "));
            let trust = match settings.ca_certificates.len() {
                0 => "this machine's own trust store".to_owned(),
                1 => "1 certificate".to_owned(),
                count => format!("{count} certificates"),
            };
            page.add_line("trusts", trust);
            page.add_line("interval", format_args!("{} s", settings.heartbeat_interval().as_secs()));
            0
        }
        Ok(None) => {
            page.add_line("machine", "not enrolled; a shepherd enrols it");
            NOT_ENROLLED
        }
        Err(error) => {
            page.add_line("machine", error);
            1
        }
    };
    if let Some(identity) = page.value_or_line("public key", state.read_identity()) {
        page.add_line("public key", hex::encode(identity.public_key()));
    }
    let agent = page.value_or_line("agent", state.read_agent_process());
    page.add_line("agent", format_process(agent.as_ref()));
    if let Some(supervisor) = page.value_or_line("supervisor", state.read_supervisor_process()) {
        page.add_line("supervisor", format_process(Some(&supervisor)));
    }
    if let Some(last) = page.value_or_line("heartbeat", state.read_last_heartbeat()) {
        page.add_line("heartbeat", format_heartbeat(&last, &clock.boot_id(), clock.milliseconds()));
    }
    if let Ok(tree) = status_socket::read_page(state.path(), status_socket::STATUS_SOCKET) {
        let _ = write!(page.0, "\n{tree}");
    }
    Ok((page.0, exit_code))
}

struct StatusPage(String);

impl StatusPage {
    fn add_line(&mut self, name: &str, value: impl Display) {
        let _ = writeln!(self.0, "{name:<16} {value}");
    }

    fn value_or_line<T>(&mut self, name: &str, read: Result<Option<T>, StateError>) -> Option<T> {
        read.unwrap_or_else(|error| {
            self.add_line(name, error);
            None
        })
    }
}

fn format_process(process: Option<&ProcessRecord>) -> String {
    match process {
        Some(process) if process.is_alive() => format!("runs as process {}", process.pid),
        Some(_) => "does not run".to_owned(),
        None => "never ran".to_owned(),
    }
}

fn format_heartbeat(last: &LastHeartbeat, boot_id: &str, now: u64) -> String {
    if last.boot_id != boot_id {
        return "none since this boot".to_owned();
    }
    let ago = |then: u64| format!("{} s ago", now.saturating_sub(then) / 1000);
    match (&last.error, last.delivered_at_milliseconds) {
        (None, _) => format!("delivered {} to {}", ago(last.at_milliseconds), last.endpoint),
        (Some(error), Some(delivered)) => format!(
            "not delivered {} to {}: {error} (last delivered {})",
            ago(last.at_milliseconds),
            last.endpoint,
            ago(delivered)
        ),
        (Some(error), None) => format!(
            "not delivered {} to {}: {error} (none delivered by this start of the agent)",
            ago(last.at_milliseconds),
            last.endpoint
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_heartbeat_reads_as_a_sentence() {
        let last = LastHeartbeat {
            boot_id: "b".to_owned(),
            at_milliseconds: 10_000,
            incarnation: uuid::Uuid::nil(),
            endpoint: "a:1".to_owned(),
            error: None,
            delivered_at_milliseconds: Some(10_000),
        };
        assert_eq!(format_heartbeat(&last, "b", 12_500), "delivered 2 s ago to a:1");
        assert_eq!(format_heartbeat(&last, "c", 12_500), "none since this boot");
        let failed = LastHeartbeat { error: Some("no".to_owned()), ..last };
        assert_eq!(
            format_heartbeat(&failed, "b", 70_000),
            "not delivered 60 s ago to a:1: no (last delivered 60 s ago)"
        );
    }

    #[test]
    fn damaged_file_does_not_hide_the_rest() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("agent.json"), "{").unwrap();
        let (text, exit_code) = render_text(directory.path()).unwrap();
        assert!(text.contains("not enrolled") && exit_code == 3, "{exit_code}: {text}");
        assert!(text.contains("agent.json is damaged"), "{text}");
        std::fs::write(directory.path().join("enrolment.json"), "{").unwrap();
        let (text, exit_code) = render_text(directory.path()).unwrap();
        assert!(text.contains("enrolment.json is damaged") && exit_code == 1, "{exit_code}: {text}");
    }
}
