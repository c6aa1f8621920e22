//! Service status as it is reported to the curator.

use std::collections::BTreeMap;

use model::role_declaration::Sha256;
use proto::curator::v1 as wire;
use proto::curator::v1::service_status::Kind;

use crate::cluster::services::desired::{DesiredService, ServiceId};
use crate::cluster::services::plan::{PlanInput, WaitReason, stays_ended, wait_reason};
use crate::cluster::services::service_state::{Health, ObservedService, ServicePhase};

/// Maximum number of services that are reported to a curator.
const MAX_SERVICES: usize = 256;
/// Longest message that a curator accepts, in bytes.
const MAX_MESSAGE_BYTES: usize = 1000;

/// The reported condition of one service, without its start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCondition {
    /// Waiting, starting, healthy, unhealthy, backing off, ended or stopping.
    pub kind: Kind,
    /// Why it does not run, or is unhealthy; empty if there is nothing to explain.
    pub message: String,
    /// Revision of the declaration that it runs with, or will run with.
    pub revision: u64,
    /// How often it was restarted since that revision was applied.
    pub restarts: u32,
}

/// Conditions of all desired services, and of others that are not removed yet. `fetching` has the state of missing
/// artefacts.
#[must_use]
pub fn service_conditions(
    all: &PlanInput<'_>,
    fetching: &BTreeMap<Sha256, String>,
) -> BTreeMap<ServiceId, ServiceCondition> {
    let nothing = BTreeMap::new();
    let wanted = all.desired.unwrap_or(&nothing);
    let absent = wanted.iter().filter(|(id, _)| !all.observed.contains_key(id)).map(|(id, service)| {
        let message = waiting_message(all, service, fetching);
        let condition =
            ServiceCondition { kind: Kind::Waiting, message, revision: service.revision, restarts: 0 };
        (id.clone(), condition)
    });
    let present = all.observed.iter().map(|(id, present)| {
        let service = wanted.get(id);
        let (kind, message) = match service {
            Some(service) => desired_condition(all, service, present, fetching),
            // The desired services, or those of its role, are not known yet, so it keeps running.
            None if all.desired.is_none() || all.is_retained(id) => unknown_condition(present),
            None => (Kind::Stopping, removal_message(present)),
        };
        let restarts = present.record.restarts;
        let revision = match (&present.phase, service) {
            (ServicePhase::Stopped, Some(service)) => service.revision,
            _ => present.record.revision,
        };
        (id.clone(), ServiceCondition { kind, message: truncate_message(message), revision, restarts })
    });
    absent.chain(present).collect()
}

fn desired_condition(
    all: &PlanInput<'_>,
    service: &DesiredService,
    present: &ObservedService,
    fetching: &BTreeMap<Sha256, String>,
) -> (Kind, String) {
    match &present.phase {
        ServicePhase::Stopped => (Kind::Waiting, waiting_message(all, service, fetching)),
        ServicePhase::Starting => (Kind::Waiting, "it is being started".to_owned()),
        ServicePhase::Running { .. } if service.check.is_none() => (Kind::Healthy, String::new()),
        ServicePhase::Running { health: Health::Healthy, .. } => (Kind::Healthy, String::new()),
        ServicePhase::Running { health: Health::Unknown, .. } => (Kind::Starting, String::new()),
        ServicePhase::Running { health: Health::Unhealthy(why), .. } => (Kind::Unhealthy, why.clone()),
        ServicePhase::Ended { exit: how, message: text, .. } => {
            let changed = !present.record.satisfies(service);
            if changed {
                (Kind::Waiting, waiting_message(all, service, fetching))
            } else if stays_ended(service, *how) {
                (Kind::Ended, text.clone())
            } else {
                (Kind::BackingOff, text.clone())
            }
        }
        ServicePhase::Stopping => {
            (Kind::Stopping, "it is being stopped, to start with other settings".to_owned())
        }
        ServicePhase::Stuck { message: text, .. } => (Kind::Stopping, text.clone()),
        ServicePhase::Removing => (Kind::Waiting, "what it left is being removed first".to_owned()),
    }
}

fn unknown_condition(present: &ObservedService) -> (Kind, String) {
    match &present.phase {
        ServicePhase::Running { .. } => (Kind::Healthy, String::new()),
        ServicePhase::Ended { message: text, .. } => (Kind::Ended, text.clone()),
        doing => (Kind::Waiting, format!("it {doing}; the desired services are not known yet")),
    }
}

fn removal_message(present: &ObservedService) -> String {
    match &present.phase {
        ServicePhase::Stuck { message: text, .. } => text.clone(),
        doing => format!("its role was removed from this node, or the service from its role; it {doing}"),
    }
}

fn waiting_message(
    all: &PlanInput<'_>,
    service: &DesiredService,
    fetching: &BTreeMap<Sha256, String>,
) -> String {
    truncate_message(match wait_reason(all, service) {
        None => "it is about to start".to_owned(),
        Some(WaitReason::Rendering(why)) => why,
        Some(WaitReason::Artefact(artefact)) => {
            let shown = hex::encode(artefact.0);
            let how = fetching.get(&artefact).map_or("it is being fetched", String::as_str);
            format!("it waits for artefact {}…: {how}", &shown[..12])
        }
        Some(WaitReason::Services(ids)) => {
            let names: Vec<&str> = ids.iter().map(|id| id.service.as_str()).collect();
            format!(
                "it waits until {} {} healthy",
                names.join(", "),
                if ids.len() == 1 { "is" } else { "are" }
            )
        }
    })
}

/// Truncates a message to the length that a curator accepts.
#[must_use]
pub fn truncate_message(mut sentence: String) -> String {
    let mut end = MAX_MESSAGE_BYTES.min(sentence.len());
    while !sentence.is_char_boundary(end) {
        end -= 1;
    }
    sentence.truncate(end);
    sentence
}

/// Remembers since when each service has had its condition.
#[derive(Debug, Default)]
pub struct TransitionTimes {
    last: BTreeMap<ServiceId, (Kind, i64)>,
}

impl TransitionTimes {
    /// Statuses in the order of role and name. If there are too many, healthy ones are left out first.
    ///
    /// `began` returns when a service was started. It is used for a healthy service that was not reported before, for
    /// example after a restart of the role server. Otherwise a new condition begins at `now`. Both are in milliseconds
    /// since 1970.
    pub fn wire_statuses(
        &mut self,
        conditions: &BTreeMap<ServiceId, ServiceCondition>,
        began: impl Fn(&ServiceId) -> Option<i64>,
        now: i64,
    ) -> Vec<wire::ServiceStatus> {
        self.last.retain(|id, _| conditions.contains_key(id));
        let mut all: Vec<wire::ServiceStatus> = Vec::new();
        for (id, condition) in conditions {
            let since_ms = match self.last.get(id) {
                Some((kind, since)) if *kind == condition.kind => *since,
                Some(_) => now,
                None => began(id).filter(|_| condition.kind == Kind::Healthy).unwrap_or(now),
            };
            self.last.insert(id.clone(), (condition.kind, since_ms));
            all.push(wire::ServiceStatus {
                role: id.role.clone(),
                service: id.service.clone(),
                kind: condition.kind.into(),
                since_ms,
                restarts: condition.restarts,
                message: condition.message.clone(),
                declaration_revision: condition.revision,
            });
        }
        if all.len() > MAX_SERVICES {
            all.sort_by_key(|status| status.kind() == Kind::Healthy);
            all.truncate(MAX_SERVICES);
            all.sort_by(|one, other| (&one.role, &one.service).cmp(&(&other.role, &other.service)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeSet;
    use std::time::Duration;

    use model::role_declaration::RestartPolicy;

    use crate::child::spec::ResourceLimits;
    use crate::cluster::services::desired::RetainedRoles;
    use crate::cluster::services::desired::tests::id;
    use crate::cluster::services::service_state::{RunRecord, ServiceExit};

    fn desired(name: &str, rendered: &str, depends_on: &[&str]) -> DesiredService {
        use model::role_declaration::ProgramSource;
        use model::role_declaration::privileges::Privileges;

        use crate::cluster::services::desired::RenderedService;
        let made = RenderedService {
            run: ProgramSource::Path("/bin/x".to_owned()),
            arguments: Vec::new(),
            environment: BTreeMap::new(),
            files: Vec::new(),
            user: "root".to_owned(),
            privileges: Privileges::default(),
        };
        DesiredService {
            id: id(name),
            revision: 3,
            rendered: Ok((made, rendered.to_owned())),
            declared: None,
            former: None,
            limits: ResourceLimits::default(),
            depends_on: depends_on.iter().map(|name| id(name)).collect(),
            check: None,
            restart: RestartPolicy::OnFailure,
            is_task: false,
            stop_time: Duration::ZERO,
        }
    }

    fn present(name: &str, doing: ServicePhase) -> ObservedService {
        let note =
            RunRecord { digest: "d".to_owned(), revision: 2, restarts: 4, ..RunRecord::missing(id(name)) };
        ObservedService { record: note, phase: doing, failures: 1 }
    }

    fn ended(how: ServiceExit) -> ServicePhase {
        ServicePhase::Ended { exit: how, message: "it ended".to_owned(), at: Duration::ZERO, random: 0.5 }
    }

    fn up(health: Health) -> ServicePhase {
        ServicePhase::Running { since: Duration::ZERO, health }
    }

    fn condition_of(service: Option<&DesiredService>, doing: ServicePhase) -> (Kind, String) {
        let wanted: BTreeMap<ServiceId, DesiredService> =
            service.iter().map(|&one| (one.id.clone(), one.clone())).collect();
        let present = BTreeMap::from([(id("web"), present("web", doing))]);
        let artefacts = BTreeSet::new();
        let all = PlanInput {
            desired: Some(&wanted),
            retained: &RetainedRoles::new(),
            observed: &present,
            artefacts: &artefacts,
            now: Duration::ZERO,
        };
        let condition = service_conditions(&all, &BTreeMap::new()).remove(&id("web")).unwrap();
        assert_eq!(condition.restarts, 4);
        (condition.kind, condition.message)
    }

    #[test]
    fn each_phase_has_a_kind_and_a_message() {
        let web = desired("web", "d", &[]);
        let mut checked = web.clone();
        checked.check = Some(crate::cluster::services::desired::RenderedHealthCheck {
            probe: crate::cluster::services::desired::RenderedProbe::Tcp(vec![]),
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            failures: 1,
        });
        let ill = Health::Unhealthy("no answer".to_owned());
        for (service, doing, kind, part) in [
            (&web, ServicePhase::Stopped, Kind::Waiting, "about to start"),
            (&web, ServicePhase::Starting, Kind::Waiting, "being started"),
            (&web, up(Health::Unknown), Kind::Healthy, ""),
            (&checked, up(Health::Unknown), Kind::Starting, ""),
            (&checked, up(Health::Healthy), Kind::Healthy, ""),
            (&checked, up(ill), Kind::Unhealthy, "no answer"),
            (&web, ended(ServiceExit::Exited(0)), Kind::Ended, "it ended"),
            (&web, ended(ServiceExit::Exited(1)), Kind::BackingOff, "it ended"),
            (&web, ended(ServiceExit::NotStarted), Kind::BackingOff, "it ended"),
            (&desired("web", "other", &[]), ended(ServiceExit::Exited(0)), Kind::Waiting, "about to start"),
            (
                &desired("web", "d", &["base", "disk"]),
                ServicePhase::Stopped,
                Kind::Waiting,
                "until base, disk are healthy",
            ),
            (&web, ServicePhase::Stopping, Kind::Stopping, "to start with other settings"),
            (
                &web,
                ServicePhase::Stuck { message: "hangs".to_owned(), at: Duration::ZERO },
                Kind::Stopping,
                "hangs",
            ),
        ] {
            let (reported_kind, message) = condition_of(Some(service), doing.clone());
            assert_eq!(reported_kind, kind, "{doing:?}");
            assert!(message.contains(part) && message.is_empty() == part.is_empty(), "{doing:?}: {message}");
        }
        assert_eq!(condition_of(None, up(Health::Healthy)).0, Kind::Stopping);
        let unsaid = DesiredService { rendered: Err("no label".to_owned()), ..web };
        assert_eq!(
            condition_of(Some(&unsaid), ServicePhase::Stopped),
            (Kind::Waiting, "no label".to_owned())
        );
    }

    #[test]
    fn time_of_a_state_is_that_of_its_beginning() {
        let mut since = TransitionTimes::default();
        let condition = |kind| ServiceCondition { kind, message: String::new(), revision: 1, restarts: 0 };
        let mut at = |kind, now| {
            let all = BTreeMap::from([(id("web"), condition(kind))]);
            since.wire_statuses(&all, |_| Some(5), now)[0].since_ms
        };
        assert_eq!(at(Kind::Healthy, 10), 5, "it ran before we did");
        assert_eq!(at(Kind::Healthy, 20), 5);
        assert_eq!(at(Kind::Unhealthy, 30), 30);
        assert_eq!(at(Kind::Unhealthy, 40), 30);
        assert_eq!(at(Kind::Healthy, 50), 50);
    }

    #[test]
    fn reported_services_are_capped_and_unhealthy_ones_come_first() {
        let all: BTreeMap<ServiceId, ServiceCondition> = (0..300)
            .map(|number| {
                let kind = if number % 100 == 99 { Kind::BackingOff } else { Kind::Healthy };
                let condition = ServiceCondition { kind, message: String::new(), revision: 1, restarts: 0 };
                (id(&format!("s{number:03}")), condition)
            })
            .collect();
        let sent = TransitionTimes::default().wire_statuses(&all, |_| None, 1);
        assert_eq!(sent.len(), MAX_SERVICES);
        assert_eq!(sent.iter().filter(|status| status.kind() == Kind::BackingOff).count(), 3);
        assert!(sent.is_sorted_by(|one, other| one.service < other.service));
        assert_eq!(truncate_message("ü".repeat(600)).len(), 1000);
        assert_eq!(truncate_message("ü".repeat(600) + "x").chars().count(), 500);
    }
}
