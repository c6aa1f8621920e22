//! What is said of Kubernetes on this node: by what runs, and never by what should. Pure.

use std::collections::BTreeSet;

use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::service_status::Kind;
use crate::roleserver::cluster::kubernetes::components::api_server;
use crate::roleserver::cluster::kubernetes::controller::Gate;
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::runs::{Run, Runs};
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::kubernetes::wanted::ends_by_itself;
use crate::roleserver::cluster::services::told::shortened;

/// What is said; nothing where the node has no role of Kubernetes and runs nothing of it.
#[must_use]
pub fn told(
    startup: &Startup,
    statuses: &[wire::ServiceStatus],
    runs: &Runs,
    gate: &Gate,
    held: &Held,
) -> Option<wire::KubernetesStatus> {
    // What has done its work is no component that could be ill.
    let done =
        |status: &&wire::ServiceStatus| status.kind() == Kind::Ended && ends_by_itself(&status.service);
    let statuses: Vec<wire::ServiceStatus> =
        statuses.iter().filter(|status| !done(status)).cloned().collect();
    let statuses = statuses.as_slice();
    let parts = [&startup.controller, &startup.worker];
    if statuses.is_empty() && parts.iter().all(|part| **part == Part::Off(None)) {
        return None;
    }
    let oldest = oldest(statuses, runs);
    let mut waits: BTreeSet<String> =
        parts.iter().filter_map(|part| part.waits().map(str::to_owned)).collect();
    waits.extend(held.said.clone());
    if startup.controller == Part::On && !gate.open {
        waits.insert(gate.sentence());
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
        generation: generation(statuses, runs),
        components,
        waits: shortened(waits.into_iter().collect::<Vec<_>>().join("; ")),
        reconciles: gate.reconciles,
        clashes: gate.clashes.clone(),
    })
}

/// What the oldest that runs was started by: until all are of another bundle, the node is not.
fn oldest<'r>(statuses: &[wire::ServiceStatus], runs: &'r Runs) -> Option<&'r Run> {
    let run = |status: &wire::ServiceStatus| {
        matches!(status.kind(), Kind::Healthy | Kind::Unhealthy | Kind::Starting | Kind::Stopping)
    };
    let numbers = statuses.iter().filter(|status| run(status)).map(|status| status.declaration_revision);
    runs.get(numbers.min_by_key(|number| runs.place(*number))?)
}

/// The generation that all of them act on: none of them may be missing, or ill.
fn generation(statuses: &[wire::ServiceStatus], runs: &Runs) -> u64 {
    let of = |status: &wire::ServiceStatus| match status.kind() {
        Kind::Healthy => runs.get(status.declaration_revision).map_or(0, |run| run.generation),
        _ => 0,
    };
    statuses.iter().map(of).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::setup::tests::setup;

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

    fn on() -> Startup {
        Startup { controller: Part::On, worker: Part::Off(None), setup: Some(setup()) }
    }

    #[test]
    fn node_without_a_role_says_nothing_once_nothing_runs_any_more() {
        let off = Startup { controller: Part::Off(None), worker: Part::Off(None), setup: None };
        let say = |startup: &Startup, statuses: &[wire::ServiceStatus]| {
            told(startup, statuses, &Runs::default(), &Gate::default(), &Held::default())
        };
        assert_eq!(say(&off, &[]), None);
        assert!(say(&off, &[status("kube-scheduler", Kind::Stopping, 1)]).is_some());
        let needed = Startup { controller: Part::Off(Some("no etcd".to_owned())), ..off };
        assert_eq!(say(&needed, &[]).unwrap().waits, "no etcd");
    }

    #[test]
    fn image_that_is_there_is_no_component_and_one_that_is_not_is() {
        let mut runs = Runs::default();
        let run = runs.number(3, "aa", "1.20.2", 0);
        let worker = Startup { controller: Part::Off(None), worker: Part::On, setup: Some(setup()) };
        for (image, names, generation) in [
            (Kind::Ended, vec!["kubelet"], 3),
            (Kind::BackingOff, vec!["image-pause", "kubelet"], 0),
            (Kind::Waiting, vec!["image-pause", "kubelet"], 0),
        ] {
            let statuses = [status("kubelet", Kind::Healthy, run), status("image-pause", image, run)];
            let told = told(&worker, &statuses, &runs, &Gate::default(), &Held::default()).unwrap();
            let said: Vec<&str> = told.components.iter().map(|component| component.name.as_str()).collect();
            assert_eq!((said, told.generation), (names, generation), "{image:?}");
            assert_eq!((told.bundle.as_str(), told.waits.as_str()), ("aa", ""));
        }
    }

    #[test]
    fn generation_and_bundle_are_those_that_all_components_run_by() {
        let mut runs = Runs::default();
        let old = runs.number(3, "aa", "1.20.2", 0);
        let renewed = runs.number(4, "aa", "1.20.2", 0);
        let new = runs.number(4, "bb", "1.20.3", 0);
        let gate = Gate { open: true, ..Gate::default() };
        let api = api_server::NAME;
        for (api_server, scheduler, bundle, generation) in [
            (status(api, Kind::Healthy, old), status("s", Kind::Healthy, old), "aa", 3),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Healthy, old), "aa", 3),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Starting, renewed), "aa", 0),
            (status(api, Kind::Healthy, renewed), status("s", Kind::Healthy, renewed), "aa", 4),
            (status(api, Kind::Healthy, new), status("s", Kind::Stopping, renewed), "aa", 0),
            (status(api, Kind::Healthy, new), status("s", Kind::Waiting, new), "bb", 0),
            (status(api, Kind::Healthy, new), status("s", Kind::Healthy, new), "bb", 4),
            // Nobody knows what that was.
            (status(api, Kind::Healthy, 99), status("s", Kind::Healthy, new), "", 0),
            (status(api, Kind::BackingOff, new), status("s", Kind::Waiting, new), "", 0),
        ] {
            let statuses = [api_server, scheduler];
            let told = told(&on(), &statuses, &runs, &gate, &Held::default()).unwrap();
            assert_eq!((told.bundle.as_str(), told.generation), (bundle, generation), "{statuses:?}");
            let waits =
                if statuses[0].kind() == Kind::BackingOff { "does not become ready: it ended" } else { "" };
            assert!(
                told.waits.ends_with(waits) && told.waits.is_empty() == waits.is_empty(),
                "{}",
                told.waits
            );
        }
    }
}
