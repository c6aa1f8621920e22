//! Whether systemd keeps the agent running, so that nothing else may.
//!
//! Two supervisors would start two agents, which fight for the lock of the state directory. So a detached supervisor takes
//! the place of a unit only if the unit does not run. `systemctl` may have failed for a reason that does not concern the
//! unit itself, or have been given up while its job continues.

use crate::init_system::systemd::{Systemd, UNIT};
use crate::state_directory::StateDirectory;

/// Decides whether the unit runs or is being started (pure). `shown` is what systemd prints about its state; `None` if
/// systemd does not answer. Then the control groups of a running agent count (`/proc/PID/cgroup`), if there is one.
fn decide_whether_unit_runs(shown: Option<&str>, agent_cgroups: Option<&str>) -> bool {
    let state = shown.and_then(|shown| shown.lines().find_map(|line| line.strip_prefix("ActiveState=")));
    match state.map(str::trim) {
        Some(state) => !matches!(state, "" | "inactive" | "failed"),
        None => agent_cgroups.unwrap_or_default().lines().any(is_in_unit),
    }
}

/// Whether a line of `/proc/PID/cgroup` names the group of the unit, or one inside it.
fn is_in_unit(line: &str) -> bool {
    line.splitn(3, ':').nth(2).is_some_and(|path| path.split('/').any(|part| part == UNIT))
}

/// Whether the unit runs or is being started. Blocks.
pub(super) fn is_unit_running(systemd: &Systemd, state: &StateDirectory) -> bool {
    let shown = systemd.show_unit("ActiveState").ok();
    let agent = state.find_agent_process().filter(|agent| agent.is_alive());
    let cgroups = agent.and_then(|agent| std::fs::read_to_string(format!("/proc/{}/cgroup", agent.pid)).ok());
    decide_whether_unit_runs(shown.as_deref(), cgroups.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_runs_by_its_state_or_by_the_group_of_its_agent() {
        let inside = "0::/user.slice/user-7.slice/user@7.service/app.slice/roleserver.service\n";
        let agent = "1:name=systemd:/user.slice/user@7.service/roleserver.service/agent\n0::/x\n";
        let outside = "0::/user.slice/user-7.slice/session-3.scope\n";
        for (shown, cgroups, expected) in [
            (Some("ActiveState=active\n"), None, true),
            (Some("ActiveState=activating\n"), None, true),
            (Some("ActiveState=deactivating\n"), Some(outside), true),
            (Some("ActiveState=inactive\n"), Some(outside), false),
            (Some("ActiveState=failed\n"), None, false),
            (Some("ActiveState=\n"), None, false),
            // systemd does not answer.
            (None, Some(inside), true),
            (None, Some(agent), true),
            (None, Some(outside), false),
            (None, None, false),
            (Some(""), Some(inside), true),
        ] {
            assert_eq!(decide_whether_unit_runs(shown, cgroups), expected, "{shown:?} {cgroups:?}");
        }
    }
}
