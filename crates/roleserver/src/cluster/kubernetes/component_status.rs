//! Kubernetes status as it is reported to the curator (pure).
//!
//! It reports what components run with, and never what they should run with.

use std::collections::BTreeSet;

use proto::curator::v1 as wire;
use proto::curator::v1::service_status::Kind;

use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::component_revisions::{ComponentRevision, RevisionHistory};
use crate::cluster::kubernetes::components::api_server;
use crate::cluster::kubernetes::desired::is_one_shot;
use crate::cluster::kubernetes::reconciler_runner::ControllerReadiness;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::services::status::truncate_message;

/// Builds the status; `None` if the node has no Kubernetes role and runs no component.
#[must_use]
pub fn kubernetes_status(
    startup: &KubernetesStartup,
    statuses: &[wire::ServiceStatus],
    runs: &RevisionHistory,
    gate: &ControllerReadiness,
    held: &InstalledBundle,
) -> Option<wire::KubernetesStatus> {
    // A one-shot that has ended is not a component whose health matters.
    let done = |status: &&wire::ServiceStatus| status.kind() == Kind::Ended && is_one_shot(&status.service);
    let statuses: Vec<wire::ServiceStatus> =
        statuses.iter().filter(|status| !done(status)).cloned().collect();
    let statuses = statuses.as_slice();
    let parts = [&startup.controller, &startup.worker];
    if statuses.is_empty() && parts.iter().all(|part| **part == RoleStartup::Off(None)) {
        return None;
    }
    let oldest = oldest_revision(statuses, runs);
    let mut waits: BTreeSet<String> =
        parts.iter().filter_map(|part| part.wait_reason().map(str::to_owned)).collect();
    waits.extend(held.message.clone());
    if startup.controller == RoleStartup::On && !gate.is_ready {
        waits.insert(gate.wait_message());
    }
    let ill = |status: &&wire::ServiceStatus| {
        status.service == api_server::NAME && matches!(status.kind(), Kind::BackingOff | Kind::Unhealthy)
    };
    waits.extend(statuses.iter().find(ill).map(|status| {
        let name = runs.get(status.declaration_revision).map_or("", |run| run.bundle.as_str());
        format!(
            "the API server of bundle {} does not become ready: {}",
            &name[..name.len().min(12)],
            status.message
        )
    }));
    let mut components: Vec<wire::KubernetesComponentStatus> = statuses
        .iter()
        .map(|status| wire::KubernetesComponentStatus {
            name: status.service.clone(),
            kind: status.kind,
            since_ms: status.since_ms,
            restarts: status.restarts,
            message: status.message.clone(),
        })
        .collect();
    components.sort_by(|one, other| one.name.cmp(&other.name));
    Some(wire::KubernetesStatus {
        bundle: oldest.map(|run| run.bundle.clone()).unwrap_or_default(),
        version: oldest.map(|run| run.version.clone()).unwrap_or_default(),
        generation: common_generation(statuses, runs),
        components,
        wait_reason: truncate_message(waits.into_iter().collect::<Vec<_>>().join("; ")),
        is_reconciler: gate.is_leader,
        conflicts: gate.conflicts.clone(),
    })
}

/// The providers of Secrets that the API server works with: those that it was started with, once it is healthy. Without an
/// API server, those that it would be started with. `None` while an API server starts or ends.
#[must_use]
pub fn running_secrets(
    statuses: &[wire::ServiceStatus],
    runs: &RevisionHistory,
    next_start: &str,
) -> Option<String> {
    let Some(status) = statuses.iter().find(|status| status.service == api_server::NAME) else {
        return Some(next_start.to_owned());
    };
    let run = runs.get(status.declaration_revision).filter(|_| status.kind() == Kind::Healthy);
    run.map(|run| run.secrets.clone())
}

/// The oldest revision that a component runs with: a node has a new bundle only when all components have it.
fn oldest_revision<'r>(
    statuses: &[wire::ServiceStatus],
    runs: &'r RevisionHistory,
) -> Option<&'r ComponentRevision> {
    let run = |status: &wire::ServiceStatus| {
        matches!(status.kind(), Kind::Healthy | Kind::Unhealthy | Kind::Starting | Kind::Stopping)
    };
    let numbers = statuses.iter().filter(|status| run(status)).map(|status| status.declaration_revision);
    runs.get(numbers.min_by_key(|number| runs.position(*number))?)
}

/// The lowest generation that all components run with; 0 if one is not healthy or of an unknown revision.
fn common_generation(statuses: &[wire::ServiceStatus], runs: &RevisionHistory) -> u64 {
    let of = |status: &wire::ServiceStatus| match status.kind() {
        Kind::Healthy => runs.get(status.declaration_revision).map_or(0, |run| run.generation),
        _ => 0,
    };
    statuses.iter().map(of).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::setup::tests::setup;

    fn status(service: &str, kind: Kind, revision: u64) -> wire::ServiceStatus {
        wire::ServiceStatus {
            role: "kubernetes-controller".to_owned(),
            service: service.to_owned(),
            kind: kind.into(),
            message: if kind == Kind::BackingOff { "it ended".to_owned() } else { String::new() },
            declaration_revision: revision,
            ..Default::default()
        }
    }

    fn on() -> KubernetesStartup {
        KubernetesStartup {
            controller: RoleStartup::On,
            worker: RoleStartup::Off(None),
            setup: Some(setup()),
        }
    }

    #[test]
    fn node_without_a_role_reports_nothing_once_nothing_runs() {
        let off = KubernetesStartup {
            controller: RoleStartup::Off(None),
            worker: RoleStartup::Off(None),
            setup: None,
        };
        let say = |startup: &KubernetesStartup, statuses: &[wire::ServiceStatus]| {
            kubernetes_status(
                startup,
                statuses,
                &RevisionHistory::default(),
                &ControllerReadiness::default(),
                &InstalledBundle::default(),
            )
        };
        assert_eq!(say(&off, &[]), None);
        assert!(say(&off, &[status("kube-scheduler", Kind::Stopping, 1)]).is_some());
        let needed = KubernetesStartup { controller: RoleStartup::Off(Some("no etcd".to_owned())), ..off };
        assert_eq!(say(&needed, &[]).unwrap().wait_reason, "no etcd");
    }

    #[test]
    fn only_an_unfinished_image_import_is_reported() {
        let mut runs = RevisionHistory::default();
        let run = runs.revision_for(3, "aa", "1.20.2", "", 0);
        let worker = KubernetesStartup {
            controller: RoleStartup::Off(None),
            worker: RoleStartup::On,
            setup: Some(setup()),
        };
        for (image, names, generation) in [
            (Kind::Ended, vec!["kubelet"], 3),
            (Kind::BackingOff, vec!["image-pause", "kubelet"], 0),
            (Kind::Waiting, vec!["image-pause", "kubelet"], 0),
        ] {
            let statuses = [status("kubelet", Kind::Healthy, run), status("image-pause", image, run)];
            let reported = kubernetes_status(
                &worker,
                &statuses,
                &runs,
                &ControllerReadiness::default(),
                &InstalledBundle::default(),
            )
            .unwrap();
            let messages: Vec<&str> =
                reported.components.iter().map(|component| component.name.as_str()).collect();
            assert_eq!((messages, reported.generation), (names, generation), "{image:?}");
            assert_eq!((reported.bundle.as_str(), reported.wait_reason.as_str()), ("aa", ""));
        }
    }

    #[test]
    fn reported_keys_of_secrets_are_those_that_the_api_server_was_started_with() {
        let mut runs = RevisionHistory::default();
        let old = runs.revision_for(3, "aa", "1.20.2", "key1-a", 0);
        let new = runs.revision_for(3, "aa", "1.20.2", "key2-b key1-a", 0);
        let api = api_server::NAME;
        for (statuses, expected) in [
            (vec![], Some("key2-b key1-a")),
            (vec![status("kubelet", Kind::Healthy, new)], Some("key2-b key1-a")),
            (vec![status(api, Kind::Healthy, old)], Some("key1-a")),
            (vec![status(api, Kind::Starting, new)], None),
            (vec![status(api, Kind::BackingOff, new)], None),
            (vec![status(api, Kind::Healthy, new)], Some("key2-b key1-a")),
            (vec![status(api, Kind::Healthy, 99)], None),
        ] {
            let running = running_secrets(&statuses, &runs, "key2-b key1-a");
            assert_eq!(running.as_deref(), expected, "{statuses:?}");
        }
    }

    #[test]
    fn generation_and_bundle_are_those_that_all_components_run_by() {
        let mut runs = RevisionHistory::default();
        let old = runs.revision_for(3, "aa", "1.20.2", "", 0);
        let renewed = runs.revision_for(4, "aa", "1.20.2", "", 0);
        let new = runs.revision_for(4, "bb", "1.20.3", "", 0);
        let gate = ControllerReadiness { is_ready: true, ..ControllerReadiness::default() };
        let api = api_server::NAME;
        for (api_server, scheduler, bundle, generation) in [
            (status(api, Kind::Healthy, old), status("s", Kind::Healthy, old), "aa", 3),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Healthy, old), "aa", 3),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Starting, renewed), "aa", 0),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Healthy, renewed), "aa", 4),
            (status(api, Kind::Healthy, new), status("s", Kind::Stopping, renewed), "aa", 0),
            (status(api, Kind::Healthy, new), status("s", Kind::Waiting, new), "bb", 0),
            (status(api, Kind::Healthy, new), status("s", Kind::Healthy, new), "bb", 4),
            // A revision that is not stored.
            (status(api, Kind::Healthy, 99), status("s", Kind::Healthy, new), "", 0),
            (status(api, Kind::BackingOff, new), status("s", Kind::Waiting, new), "", 0),
        ] {
            let statuses = [api_server, scheduler];
            let reported =
                kubernetes_status(&on(), &statuses, &runs, &gate, &InstalledBundle::default()).unwrap();
            assert_eq!((reported.bundle.as_str(), reported.generation), (bundle, generation), "{statuses:?}");
            let waits =
                if statuses[0].kind() == Kind::BackingOff { "does not become ready: it ended" } else { "" };
            assert!(
                reported.wait_reason.ends_with(waits) && reported.wait_reason.is_empty() == waits.is_empty(),
                "{}",
                reported.wait_reason
            );
        }
    }
}
