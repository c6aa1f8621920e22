//! Render the role server's metrics in the Prometheus text format.
//!
//! A machine opens no port for this. `roleserver metrics` connects to the running role server through a socket in its
//! state directory, as `roleserver status` does, and prints the text. A collector on the machine that runs as the same
//! user (the textfile collector of `node_exporter` behind a timer, for one) takes it from there.
//!
//! Names of metrics stay the same; labels are bounded by what is declared to the node, by the parts of the role server and
//! by the directories that it writes to.

use std::fmt::Write as _;

use curator::service::gate_monitor::GateNumbers;
use hardening::own_usage::{self, OpenFiles};
use model::storage_level::{FileSystemUsage, MeasuredFileSystem};
use proto::curator::v1::ServiceStatus;
use proto::curator::v1::service_status::Kind;
use supervisor::report::TreeReport;
use supervisor::state::RunnableState;

use crate::cluster::node_facts::{EtcdSpaceStatus, NodeFacts};

/// Every state of a runnable.
const RUNNABLE_STATES: [RunnableState; 5] = [
    RunnableState::New,
    RunnableState::Healthy,
    RunnableState::Done,
    RunnableState::Dead,
    RunnableState::Cancelled,
];
/// Every state of a service.
const SERVICE_KINDS: [Kind; 7] = [
    Kind::Waiting,
    Kind::Starting,
    Kind::Healthy,
    Kind::Unhealthy,
    Kind::BackingOff,
    Kind::Ended,
    Kind::Stopping,
];

/// What is rendered besides the tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsInputs {
    /// The version of this program.
    pub version: &'static str,
    /// Id of the cluster that it is a node of; `None` outside a cluster.
    pub cluster: Option<String>,
    /// The node's roles, sorted by name.
    pub roles: Vec<String>,
    /// Whether this node runs a curator and an etcd.
    pub control_plane: bool,
    /// Services that operators declared, as this node last reported them.
    pub services: Vec<ServiceStatus>,
    /// The gate of this node's curator.
    pub curator_gate: GateNumbers,
    /// The database file of this node's etcd; `None` without an etcd that answers.
    pub etcd_space: Option<EtcdSpaceStatus>,
    /// The file systems that are written to.
    pub file_systems: Vec<MeasuredFileSystem>,
    /// The open files of this process; `None` if they cannot be counted.
    pub open_files: Option<OpenFiles>,
}

impl MetricsInputs {
    /// The current values of these facts.
    #[must_use]
    pub fn from_facts(facts: &NodeFacts) -> Self {
        let roles = facts.roles.latest().map(|roles| roles.names().iter().map(ToString::to_string).collect());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cluster: facts.connection.latest().map(|connection| connection.anchor.cluster.to_string()),
            roles: roles.unwrap_or_default(),
            control_plane: facts.control_plane.latest().flatten().is_some(),
            services: facts.services.latest().unwrap_or_default(),
            curator_gate: facts.curator_gate.numbers(),
            etcd_space: facts.etcd_space.latest().flatten(),
            file_systems: facts.file_systems.latest().unwrap_or_default(),
            open_files: own_usage::count_open_files().ok(),
        }
    }
}

/// Renders all metrics as text (Prometheus, exposition format 0.0.4).
#[must_use]
pub fn render_text(report: &TreeReport, known: &MetricsInputs) -> String {
    let mut page = MetricsPage(String::new());
    page.add_family("roleserver_info", "gauge", "1, with the version of the program that runs.");
    page.add_sample("roleserver_info", &[("version", known.version)], 1.0);

    page.add_family(
        "roleserver_runnable_state",
        "gauge",
        "1 for the state that a part of the role server is in, 0 for the others.",
    );
    for entry in &report.entries {
        for state in RUNNABLE_STATES {
            let labels = [("path", &*entry.path), ("state", state.as_str())];
            page.add_sample("roleserver_runnable_state", &labels, f64::from(u8::from(entry.state == state)));
        }
    }
    page.add_family(
        "roleserver_runnable_state_seconds",
        "gauge",
        "For how long a part has been in its state.",
    );
    for entry in &report.entries {
        page.add_sample(
            "roleserver_runnable_state_seconds",
            &[("path", &entry.path)],
            entry.state_age.as_secs_f64(),
        );
    }
    page.add_family(
        "roleserver_runnable_starts",
        "gauge",
        "How often a part was started since the part above it was.",
    );
    for entry in &report.entries {
        #[expect(clippy::cast_precision_loss, reason = "nobody starts anything so often")]
        let starts = entry.start_count as f64;
        page.add_sample("roleserver_runnable_starts", &[("path", &entry.path)], starts);
    }

    page.add_family(
        "roleserver_node_info",
        "gauge",
        "1 while the machine is a node, with the id of its cluster.",
    );
    if let Some(cluster) = &known.cluster {
        page.add_sample("roleserver_node_info", &[("cluster", cluster)], 1.0);
    }
    page.add_family("roleserver_node_role", "gauge", "1 for each role that the node has.");
    for role in &known.roles {
        page.add_sample("roleserver_node_role", &[("role", role)], 1.0);
    }
    page.add_family(
        "roleserver_control_plane_running",
        "gauge",
        "1 while a curator and its etcd run on the node.",
    );
    page.add_sample("roleserver_control_plane_running", &[], f64::from(u8::from(known.control_plane)));
    add_etcd_space(&mut page, known.etcd_space.as_ref());
    add_curator_gate(&mut page, &known.curator_gate);
    add_file_systems(&mut page, &known.file_systems);
    add_open_files(&mut page, known.open_files);

    page.add_family(
        "roleserver_service_state",
        "gauge",
        "1 for the state that a service is in, 0 for the others.",
    );
    for service in &known.services {
        for kind in SERVICE_KINDS {
            let labels =
                [("role", &*service.role), ("service", &*service.service), ("state", kind_label(kind))];
            page.add_sample("roleserver_service_state", &labels, f64::from(u8::from(service.kind() == kind)));
        }
    }
    page.add_family("roleserver_service_restarts_total", "counter", "How often a service was started again.");
    for service in &known.services {
        let labels = [("role", &*service.role), ("service", &*service.service)];
        page.add_sample("roleserver_service_restarts_total", &labels, f64::from(service.restarts));
    }
    page.0
}

fn add_etcd_space(page: &mut MetricsPage, space: Option<&EtcdSpaceStatus>) {
    let Some(space) = space else { return };
    let alarms = [("nospace", space.full_members), ("corrupt", space.corrupt_members)];
    for (name, help, bytes) in [
        ("roleserver_etcd_database_bytes", "Size of the database file of the node's etcd.", space.file_bytes),
        (
            "roleserver_etcd_database_used_bytes",
            "The part of the database file of the node's etcd that has data.",
            space.bytes_in_use,
        ),
        (
            "roleserver_etcd_quota_bytes",
            "Size of the database file from which etcd accepts no writes.",
            space.quota_bytes,
        ),
    ] {
        page.add_family(name, "gauge", help);
        page.add_sample(name, &[], as_value(bytes));
    }
    page.add_family(
        "roleserver_etcd_alarms",
        "gauge",
        "Members of the cluster's etcd with an alarm, by alarm; while one has nospace, etcd accepts no writes.",
    );
    for (alarm, members) in alarms {
        page.add_sample("roleserver_etcd_alarms", &[("alarm", alarm)], as_value(members as u64));
    }
    page.add_family(
        "roleserver_etcd_defragmentations_total",
        "counter",
        "How often the database file of the node's etcd was defragmented because it was full.",
    );
    page.add_sample("roleserver_etcd_defragmentations_total", &[], as_value(space.defragmentations));
}

fn add_curator_gate(page: &mut MetricsPage, gate: &GateNumbers) {
    page.add_family(
        "roleserver_curator_connections",
        "gauge",
        "Connections to the curator, by whether a certificate of the cluster was accepted; such connections never give way.",
    );
    for (authenticated, count) in [("true", gate.proven), ("false", gate.unproven)] {
        page.add_sample(
            "roleserver_curator_connections",
            &[("authenticated", authenticated)],
            as_value(count as u64),
        );
    }
    page.add_family(
        "roleserver_curator_connections_closed_total",
        "counter",
        "Connections that the gate of the curator closed or did not get, by reason.",
    );
    for (reason, count) in &gate.closed {
        page.add_sample(
            "roleserver_curator_connections_closed_total",
            &[("reason", reason)],
            as_value(*count),
        );
    }
    page.add_family(
        "roleserver_curator_rejected_calls_total",
        "counter",
        "Calls to the curator that were rejected because a key without a certificate made too many.",
    );
    page.add_sample("roleserver_curator_rejected_calls_total", &[], as_value(gate.rejected_calls));
}

fn add_file_systems(page: &mut MetricsPage, systems: &[MeasuredFileSystem]) {
    type Field = fn(&FileSystemUsage) -> u64;
    let families: [(&str, &str, Field); 4] = [
        (
            "roleserver_file_system_size_bytes",
            "Size of a file system that the role server or its programs write to.",
            |usage| usage.bytes,
        ),
        ("roleserver_file_system_available_bytes", "What may still be written to it.", |usage| {
            usage.available_bytes
        }),
        (
            "roleserver_file_system_inodes",
            "Most files and directories of it; 0 where it has no limit.",
            |usage| usage.inodes,
        ),
        ("roleserver_file_system_available_inodes", "How many more may be created.", |usage| {
            usage.available_inodes
        }),
    ];
    for (name, help, field) in families {
        page.add_family(name, "gauge", help);
        for system in systems {
            page.add_sample(
                name,
                &[("path", &system.path.to_string_lossy())],
                as_value(field(&system.usage)),
            );
        }
    }
}

fn add_open_files(page: &mut MetricsPage, files: Option<OpenFiles>) {
    let numbers = [
        ("roleserver_open_files", "Files that the role server has open.", files.map(|files| files.used)),
        (
            "roleserver_open_files_limit",
            "Files that it may have open; absent without a limit.",
            files.and_then(|files| files.limit),
        ),
    ];
    for (name, help, number) in numbers {
        page.add_family(name, "gauge", help);
        if let Some(number) = number {
            page.add_sample(name, &[], as_value(number));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a gauge shows a size of petabytes well enough")]
const fn as_value(count: u64) -> f64 {
    count as f64
}

const fn kind_label(kind: Kind) -> &'static str {
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

struct MetricsPage(String);

impl MetricsPage {
    fn add_family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn add_sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
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

    use model::storage_level::FileSystemLevels;
    use supervisor::report::ReportEntry;

    use super::*;

    fn entry(path: &str, state: RunnableState) -> ReportEntry {
        ReportEntry {
            path: path.into(),
            depth: path.matches('.').count(),
            state,
            state_age: Duration::from_millis(1500),
            start_count: 2,
            restart_in: None,
            waits_for: None,
            last_failure: None,
        }
    }

    #[test]
    fn page_has_the_state_of_each_runnable_and_service() {
        let report = TreeReport {
            entries: vec![entry("root", RunnableState::Healthy), entry("root.cluster", RunnableState::Dead)],
        };
        let web = ServiceStatus {
            role: "web".to_owned(),
            service: "a \"front\"".to_owned(),
            kind: Kind::BackingOff.into(),
            restarts: 3,
            ..Default::default()
        };
        let known = MetricsInputs {
            version: "1.2.3",
            cluster: Some("5b0c".to_owned()),
            roles: vec!["web".to_owned()],
            control_plane: false,
            services: vec![web],
            curator_gate: GateNumbers {
                proven: 4,
                unproven: 1,
                closed: [("timeout", 7), ("full", 0)].into(),
                rejected_calls: 3,
                ..GateNumbers::default()
            },
            etcd_space: Some(EtcdSpaceStatus {
                file_bytes: 3000,
                bytes_in_use: 1000,
                quota_bytes: 4000,
                full_members: 1,
                corrupt_members: 0,
                defragmentations: 2,
            }),
            file_systems: vec![MeasuredFileSystem {
                path: "/state".into(),
                contents: vec!["state"],
                device: 7,
                usage: FileSystemUsage {
                    bytes: 4096,
                    available_bytes: 1024,
                    inodes: 40,
                    available_inodes: 3,
                },
                levels: FileSystemLevels::default(),
            }],
            open_files: Some(OpenFiles { used: 12, limit: Some(1024) }),
        };
        let page = render_text(&report, &known);
        for line in [
            "roleserver_info{version=\"1.2.3\"} 1",
            "roleserver_runnable_state{path=\"root.cluster\",state=\"dead\"} 1",
            "roleserver_runnable_state{path=\"root.cluster\",state=\"healthy\"} 0",
            "roleserver_runnable_state_seconds{path=\"root\"} 1.5",
            "roleserver_runnable_starts{path=\"root.cluster\"} 2",
            "roleserver_node_info{cluster=\"5b0c\"} 1",
            "roleserver_node_role{role=\"web\"} 1",
            "roleserver_control_plane_running 0",
            "roleserver_curator_connections{authenticated=\"true\"} 4",
            "roleserver_curator_connections{authenticated=\"false\"} 1",
            "roleserver_curator_connections_closed_total{reason=\"timeout\"} 7",
            "roleserver_curator_connections_closed_total{reason=\"full\"} 0",
            "roleserver_curator_rejected_calls_total 3",
            "roleserver_etcd_database_bytes 3000",
            "roleserver_etcd_database_used_bytes 1000",
            "roleserver_etcd_quota_bytes 4000",
            "roleserver_etcd_alarms{alarm=\"nospace\"} 1",
            "roleserver_etcd_alarms{alarm=\"corrupt\"} 0",
            "roleserver_etcd_defragmentations_total 2",
            "roleserver_file_system_size_bytes{path=\"/state\"} 4096",
            "roleserver_file_system_available_bytes{path=\"/state\"} 1024",
            "roleserver_file_system_inodes{path=\"/state\"} 40",
            "roleserver_file_system_available_inodes{path=\"/state\"} 3",
            "roleserver_open_files 12",
            "roleserver_open_files_limit 1024",
            "roleserver_service_state{role=\"web\",service=\"a \\\"front\\\"\",state=\"backing-off\"} 1",
            "roleserver_service_state{role=\"web\",service=\"a \\\"front\\\"\",state=\"healthy\"} 0",
            "roleserver_service_restarts_total{role=\"web\",service=\"a \\\"front\\\"\"} 3",
        ] {
            assert!(page.lines().any(|text| text == line), "{line} is not in\n{page}");
        }
        // Each family exists once, with its type before its first sample.
        let families: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let mut once = families.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), families.len());
        assert!(
            render_text(&TreeReport::default(), &MetricsInputs::default())
                .contains("roleserver_control_plane_running 0")
        );
    }
}
