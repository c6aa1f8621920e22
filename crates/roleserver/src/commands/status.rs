//! `roleserver status`: print the state of this machine's role server.
//!
//! It prints everything that can be read: a file that cannot be read is a line of its own, and the rest goes on.

use std::fmt::{Display, Write as _};
use std::path::Path;

use crate::boot_clock::{BootClock as _, HostClock};
use crate::commands::CommandError;
use crate::process::ProcessRecord;
use crate::state_directory::{LastHeartbeat, Lock, StateDirectory};
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
    match state.read_agent_process() {
        Ok(agent) => page.add_line("agent", format_process(agent.as_ref())),
        Err(error) => {
            page.add_line("agent", error);
            if let Some(holder) = state.find_lock_holder(Lock::Agent) {
                page.add_line("agent", format_process(Some(&holder)));
            }
        }
    }
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
    use std::collections::BTreeMap;

    use testkit::damage::Damage;
    use uuid::Uuid;

    use super::*;
    use crate::agent::settings::AgentSettings;
    use crate::enrolment::Enrolment;

    #[test]
    fn last_heartbeat_reads_as_a_sentence() {
        let last = LastHeartbeat {
            boot_id: "b".to_owned(),
            at_milliseconds: 10_000,
            incarnation: Uuid::nil(),
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
    /// An enrolment because of a hint would be a mistake: the role server replaces it.
    #[test]
    fn damaged_hint_has_another_remedy_than_damaged_truth() {
        let enrolment = Enrolment {
            machine_id: "0b1a4a52-4a5c-4b66-8a5e-000000000001".parse().unwrap(),
            bmdb_id: Uuid::nil(),
            fences: BTreeMap::new(),
            holders: BTreeMap::new(),
            settings: AgentSettings::new(&["a:1".to_owned()], &[], 0).unwrap(),
            revision: 1,
        };
        for name in ["learned.json", "agent.json", "supervisor.json", "last_heartbeat.json"] {
            for damage in Damage::ALL {
                let directory = tempfile::tempdir().unwrap();
                let state = StateDirectory::open(directory.path()).unwrap();
                state.write_enrolment(&enrolment).unwrap();
                let _lock = state.acquire_lock(Lock::Agent).unwrap();
                damage.inflict(&directory.path().join(name)).unwrap();
                let (text, exit_code) = render_text(directory.path()).unwrap();
                assert_eq!(exit_code, 0, "{name} {damage:?}: {text}");
                let line = text.lines().find(|line| line.contains(name)).unwrap();
                assert!(line.contains(" is damaged ("), "{name} {damage:?}: {line}");
                assert!(
                    line.contains("replaces it by itself") && !line.contains("enrol this machine"),
                    "{name} {damage:?}: a hint has the remedy of truth: {line}"
                );
                if name == "agent.json" {
                    let expected = format!("runs as process {}\n", std::process::id());
                    assert!(text.contains(&expected) && !text.contains("never ran"), "{damage:?}: {text}");
                }
            }
        }
        let directory = tempfile::tempdir().unwrap();
        Damage::Empty.inflict(&directory.path().join("enrolment.json")).unwrap();
        let (text, _) = render_text(directory.path()).unwrap();
        assert!(text.contains("let the shepherd enrol this machine again"), "{text}");
    }
}
