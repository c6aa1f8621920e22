//! What a role server counts of itself, for monitoring.
//!
//! A machine listens on nothing for this: `roleserver metrics` asks the role server that runs, through a socket in its
//! state directory as `roleserver status` does, and prints it in the text format of Prometheus. A collector on the machine
//! that runs as the same user (the textfile collector of `node_exporter` behind a timer, for one) takes it from there.
//!
//! Names of metrics stay; labels are bounded by what is declared to the node and by the parts of the role server.

use std::fmt::Write as _;

use crate::proto::curator::v1::ServiceStatus;
use crate::proto::curator::v1::service_status::Kind;
use crate::roleserver::cluster::facts::Facts;
use crate::supervisor::report::Report;
use crate::supervisor::tree::State;

/// Every state that a runnable can be in.
const STATES: [State; 5] = [State::New, State::Healthy, State::Done, State::Dead, State::Cancelled];
/// Every state that a service can be in.
const KINDS: [Kind; 7] = [
    Kind::Waiting,
    Kind::Starting,
    Kind::Healthy,
    Kind::Unhealthy,
    Kind::BackingOff,
    Kind::Ended,
    Kind::Stopping,
];

/// What is known besides the tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// The version of this program.
    pub version: &'static str,
    /// Id of the cluster that it is a node of.
    pub cluster: Option<String>,
    /// Roles that it has, in order of their names.
    pub roles: Vec<String>,
    /// Whether its curator and its etcd run.
    pub control_plane: bool,
    /// Services that operators declared, as this node has told of them last.
    pub services: Vec<ServiceStatus>,
}

impl Known {
    /// What these facts say just now.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        let roles = facts.roles.latest().map(|roles| roles.names().iter().map(ToString::to_string).collect());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cluster: facts.connection.latest().map(|connection| connection.anchor.cluster.to_string()),
            roles: roles.unwrap_or_default(),
            control_plane: facts.control_plane.latest().flatten().is_some(),
            services: facts.services.latest().unwrap_or_default(),
        }
    }
}

/// All of it as text (Prometheus, exposition format 0.0.4).
#[must_use]
pub fn text(report: &Report, known: &Known) -> String {
    let mut page = Page(String::new());
    page.about("roleserver_info", "gauge", "1, with the version of the program that runs.");
    page.sample("roleserver_info", &[("version", known.version)], 1.0);

    page.about(
        "roleserver_runnable_state",
        "gauge",
        "1 for the state that a part of the role server is in, 0 for the others.",
    );
    for entry in &report.entries {
        for state in STATES {
            let labels = [("path", &*entry.path), ("state", state.word())];
            page.sample("roleserver_runnable_state", &labels, f64::from(u8::from(entry.state == state)));
        }
    }
    page.about("roleserver_runnable_state_seconds", "gauge", "For how long a part has been in its state.");
    for entry in &report.entries {
        page.sample("roleserver_runnable_state_seconds", &[("path", &entry.path)], entry.since.as_secs_f64());
    }
    page.about(
        "roleserver_runnable_starts",
        "gauge",
        "How often a part was started since the part above it was.",
    );
    for entry in &report.entries {
        #[expect(clippy::cast_precision_loss, reason = "nobody starts anything so often")]
        let starts = entry.starts as f64;
        page.sample("roleserver_runnable_starts", &[("path", &entry.path)], starts);
    }

    page.about("roleserver_node_info", "gauge", "1 while the machine is a node, with the id of its cluster.");
    if let Some(cluster) = &known.cluster {
        page.sample("roleserver_node_info", &[("cluster", cluster)], 1.0);
    }
    page.about("roleserver_node_role", "gauge", "1 for each role that the node has.");
    for role in &known.roles {
        page.sample("roleserver_node_role", &[("role", role)], 1.0);
    }
    page.about(
        "roleserver_control_plane_running",
        "gauge",
        "1 while a curator and its etcd run on the node.",
    );
    page.sample("roleserver_control_plane_running", &[], f64::from(u8::from(known.control_plane)));

    page.about(
        "roleserver_service_state",
        "gauge",
        "1 for the state that a service is in, 0 for the others.",
    );
    for service in &known.services {
        for kind in KINDS {
            let labels = [("role", &*service.role), ("service", &*service.service), ("state", word(kind))];
            page.sample("roleserver_service_state", &labels, f64::from(u8::from(service.kind() == kind)));
        }
    }
    page.about("roleserver_service_restarts_total", "counter", "How often a service was started again.");
    for service in &known.services {
        let labels = [("role", &*service.role), ("service", &*service.service)];
        page.sample("roleserver_service_restarts_total", &labels, f64::from(service.restarts));
    }
    page.0
}

const fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Unspecified => "unknown",
        Kind::Waiting => "waiting",
        Kind::Starting => "starting",
        Kind::Healthy => "healthy",
        Kind::Unhealthy => "unhealthy",
        Kind::BackingOff => "backing-off",
        Kind::Ended => "ended",
        Kind::Stopping => "stopping",
    }
}

struct Page(String);

impl Page {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        for (number, (label, value)) in labels.iter().enumerate() {
            let begin = if number == 0 { '{' } else { ',' };
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{begin}{label}=\"{value}\"");
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::supervisor::report::Entry;

    fn entry(path: &str, state: State) -> Entry {
        Entry {
            path: path.into(),
            depth: path.matches('.').count(),
            state,
            since: Duration::from_millis(1500),
            starts: 2,
            starts_in: None,
            waits_for: None,
            last_failure: None,
        }
    }

    #[test]
    fn page_says_what_each_part_and_each_service_does() {
        let report =
            Report { entries: vec![entry("root", State::Healthy), entry("root.cluster", State::Dead)] };
        let web = ServiceStatus {
            role: "web".to_owned(),
            service: "a \"front\"".to_owned(),
            kind: Kind::BackingOff.into(),
            restarts: 3,
            ..Default::default()
        };
        let known = Known {
            version: "1.2.3",
            cluster: Some("5b0c".to_owned()),
            roles: vec!["web".to_owned()],
            control_plane: false,
            services: vec![web],
        };
        let page = text(&report, &known);
        for line in [
            "roleserver_info{version=\"1.2.3\"} 1",
            "roleserver_runnable_state{path=\"root.cluster\",state=\"dead\"} 1",
            "roleserver_runnable_state{path=\"root.cluster\",state=\"healthy\"} 0",
            "roleserver_runnable_state_seconds{path=\"root\"} 1.5",
            "roleserver_runnable_starts{path=\"root.cluster\"} 2",
            "roleserver_node_info{cluster=\"5b0c\"} 1",
            "roleserver_node_role{role=\"web\"} 1",
            "roleserver_control_plane_running 0",
            "roleserver_service_state{role=\"web\",service=\"a \\\"front\\\"\",state=\"backing-off\"} 1",
            "roleserver_service_state{role=\"web\",service=\"a \\\"front\\\"\",state=\"healthy\"} 0",
            "roleserver_service_restarts_total{role=\"web\",service=\"a \\\"front\\\"\"} 3",
        ] {
            assert!(page.lines().any(|said| said == line), "{line} is not in\n{page}");
        }
        // Each family once, and said what it is before its first sample.
        let families: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let mut once = families.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), families.len());
        assert!(text(&Report::default(), &Known::default()).contains("roleserver_control_plane_running 0"));
    }
}
