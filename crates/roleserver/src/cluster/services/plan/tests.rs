//! Table tests of the service planner.

use super::*;

use model::role_declaration::privileges::Privileges;
use model::role_declaration::{ProgramSource, RestartPolicy};

use crate::child::spec::ResourceLimits;
use crate::cluster::services::desired::tests::id;
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedProbe, RenderedService};
use crate::cluster::services::service_state::{Health, RunRecord};

const NOW: Moment = Duration::from_secs(1000);

/// A desired service that is distinguished by its argument.
fn service(name: &str, argument: &str, depends_on: &[&str]) -> DesiredService {
    let rendered = RenderedService {
        run: ProgramSource::Path("/bin/server".to_owned()),
        arguments: vec![argument.to_owned()],
        environment: BTreeMap::new(),
        files: Vec::new(),
        user: "root".to_owned(),
        privileges: Privileges::default(),
    };
    let digest = rendered.digest();
    DesiredService {
        id: id(name),
        revision: 1,
        rendered: Ok((rendered, digest)),
        declared: None,
        former: None,
        limits: ResourceLimits::default(),
        depends_on: depends_on.iter().map(|name| id(name)).collect(),
        check: None,
        restart: RestartPolicy::Always,
        is_task: false,
        stop_time: Duration::from_secs(10),
    }
}

fn checked(service: DesiredService) -> DesiredService {
    let (interval, timeout) = (Duration::from_secs(5), Duration::from_secs(2));
    DesiredService {
        check: Some(RenderedHealthCheck {
            probe: RenderedProbe::Tcp(vec![]),
            interval,
            timeout,
            failures: 3,
        }),
        ..service
    }
}

fn all(services: impl IntoIterator<Item = DesiredService>) -> BTreeMap<ServiceId, DesiredService> {
    services.into_iter().map(|service| (service.id.clone(), service)).collect()
}

/// An observed service that was started as `service` describes.
fn observed_as(service: &DesiredService, doing: ServicePhase) -> (ServiceId, ObservedService) {
    let mut note = RunRecord::missing(service.id.clone()).adjusted(service);
    note.digest = service.digest().unwrap_or_default().to_owned();
    (service.id.clone(), ObservedService { record: note, phase: doing, failures: 1 })
}

fn up(health: Health) -> ServicePhase {
    ServicePhase::Running { since: Duration::ZERO, health }
}

fn ended(how: ServiceExit, seconds_ago: u64) -> ServicePhase {
    let at = NOW.saturating_sub(Duration::from_secs(seconds_ago));
    ServicePhase::Ended { exit: how, message: "it ended".to_owned(), at, random: 1.0 }
}

fn stuck(seconds_ago: u64) -> ServicePhase {
    ServicePhase::Stuck {
        message: "it hangs".to_owned(),
        at: NOW.saturating_sub(Duration::from_secs(seconds_ago)),
    }
}

fn planned(
    wanted: Option<&BTreeMap<ServiceId, DesiredService>>,
    present: impl IntoIterator<Item = (ServiceId, ObservedService)>,
    artefacts: &[Sha256],
) -> ActionPlan {
    let present = present.into_iter().collect();
    let artefacts = artefacts.iter().copied().collect();
    plan_services(&PlanInput {
        desired: wanted,
        retained: &RetainedRoles::new(),
        observed: &present,
        artefacts: &artefacts,
        now: NOW,
    })
}

fn actions<const N: usize>(
    wanted: &BTreeMap<ServiceId, DesiredService>,
    present: [(ServiceId, ObservedService); N],
) -> Vec<ServiceAction> {
    planned(Some(wanted), present, &[]).actions
}

fn starts(name: &str) -> ServiceAction {
    ServiceAction::Start(id(name))
}

fn stop(name: &str) -> ServiceAction {
    ServiceAction::Stop(id(name))
}

#[test]
fn nothing_is_done_while_the_desired_state_is_unknown() {
    let web = service("web", "a", &[]);
    for doing in [up(Health::Healthy), ServicePhase::Stopped, ended(ServiceExit::Exited(1), 900), stuck(900)]
    {
        assert_eq!(planned(None, [observed_as(&web, doing)], &[]), ActionPlan::default());
    }
    // An empty set of desired services differs from an unknown one.
    assert_eq!(actions(&all([]), [observed_as(&web, up(Health::Healthy))]), [stop("web")]);
}

#[test]
fn single_service_converges_from_every_phase() {
    let web = service("web", "a", &[]);
    let other = service("web", "b", &[]);
    let nothing: Vec<ServiceAction> = Vec::new();
    for (doing, same, changed, unwanted) in [
        (
            ServicePhase::Stopped,
            vec![starts("web")],
            vec![starts("web")],
            vec![ServiceAction::Remove(id("web"))],
        ),
        (ServicePhase::Starting, vec![], vec![], vec![]),
        (up(Health::Healthy), vec![], vec![stop("web")], vec![stop("web")]),
        (up(Health::Unhealthy("x".to_owned())), vec![], vec![stop("web")], vec![stop("web")]),
        (ServicePhase::Stopping, vec![], vec![], vec![]),
        (ServicePhase::Removing, vec![], vec![], vec![]),
        (stuck(1), vec![], vec![], vec![]),
        (stuck(11), vec![stop("web")], vec![stop("web")], vec![stop("web")]),
        // Its backoff has ended, or it has none because its digest changed.
        (
            ended(ServiceExit::Exited(1), 1),
            vec![starts("web")],
            vec![starts("web")],
            vec![ServiceAction::Remove(id("web"))],
        ),
        (
            ended(ServiceExit::Exited(1), 0),
            vec![],
            vec![starts("web")],
            vec![ServiceAction::Remove(id("web"))],
        ),
    ] {
        let present = || [observed_as(&web, doing.clone())];
        assert_eq!(actions(&all([web.clone()]), present()), same, "{doing:?}, the same");
        assert_eq!(actions(&all([other.clone()]), present()), changed, "{doing:?}, changed");
        assert_eq!(actions(&all([]), present()), unwanted, "{doing:?}, not wanted");
    }
    assert_eq!(actions(&all([web.clone()]), []), [starts("web")]);
    assert_eq!(actions(&all([]), []), nothing);
    // The run record is lost, so what runs may be anything.
    let mut lost = observed_as(&web, up(Health::Healthy));
    lost.1.record = RunRecord::missing(id("web"));
    assert_eq!(actions(&all([web]), [lost]), [stop("web")]);
}

#[test]
fn service_starts_once_its_dependencies_are_healthy() {
    let base = checked(service("base", "a", &[]));
    let once = DesiredService { restart: RestartPolicy::OnFailure, ..service("once", "a", &[]) };
    let web = service("web", "a", &["base", "once"]);
    let wanted = all([base.clone(), once.clone(), web.clone()]);
    let done = || observed_as(&once, ended(ServiceExit::Exited(0), 500));
    for (health, starting) in
        [(Health::Unknown, false), (Health::Unhealthy("x".to_owned()), false), (Health::Healthy, true)]
    {
        let expected = if starting { vec![starts("web")] } else { vec![] };
        assert_eq!(
            actions(&wanted, [observed_as(&base, up(health.clone())), done()]),
            expected,
            "{health:?}"
        );
    }
    let well = || observed_as(&base, up(Health::Healthy));
    for (doing, starting) in [
        (up(Health::Unknown), true),
        (ServicePhase::Starting, false),
        (ServicePhase::Stopping, false),
        (ended(ServiceExit::Exited(0), 0), true),
        (ended(ServiceExit::Exited(1), 0), false),
        (ended(ServiceExit::Killed(9), 0), false),
    ] {
        let expected = if starting { vec![starts("web")] } else { vec![] };
        assert_eq!(actions(&wanted, [well(), observed_as(&once, doing.clone())]), expected, "{doing:?}");
    }
    // A one-shot is healthy when it has exited, and not while it runs.
    let task = DesiredService { is_task: true, ..once.clone() };
    let with_task = all([base.clone(), task.clone(), web.clone()]);
    assert_eq!(actions(&with_task, [well(), observed_as(&task, up(Health::Unknown))]), []);
    assert_eq!(
        actions(&with_task, [well(), observed_as(&task, ended(ServiceExit::Exited(0), 0))]),
        [starts("web")]
    );
    // A service that always runs is not healthy after an exit with 0.
    let always = all([base.clone(), service("once", "a", &[]), web.clone()]);
    assert_eq!(actions(&always, [well(), observed_as(&once, ended(ServiceExit::Exited(0), 0))]), []);
    // A service waits for a dependency that has to be restarted.
    let changed = all([base.clone(), service("once", "b", &[]), web.clone()]);
    assert_eq!(actions(&changed, [well(), observed_as(&once, up(Health::Unknown))]), [stop("once")]);
    // A service that exited is restarted only when its dependencies are healthy too.
    let fallen = [
        observed_as(&base, ended(ServiceExit::Killed(9), 0)),
        done(),
        observed_as(&web, ended(ServiceExit::Exited(1), 500)),
    ];
    assert_eq!(actions(&wanted, fallen), []);
    // All services that can start do so at once, in the order of their names.
    let free = all([service("a", "", &[]), service("b", "", &[]), service("c", "", &["a"])]);
    assert_eq!(actions(&free, []), [starts("a"), starts("b")]);
}

#[test]
fn services_stop_in_reverse_dependency_order() {
    let base = service("base", "a", &[]);
    let middle = service("middle", "a", &["base"]);
    let web = service("web", "a", &["middle"]);
    let nothing = all([]);
    let running = |service: &DesiredService| observed_as(service, up(Health::Healthy));
    assert_eq!(actions(&nothing, [running(&base), running(&middle), running(&web)]), [stop("web")]);
    let stopping = observed_as(&web, ServicePhase::Stopping);
    assert_eq!(actions(&nothing, [running(&base), running(&middle), stopping]), []);
    assert_eq!(actions(&nothing, [running(&base), running(&middle), observed_as(&web, stuck(1))]), []);
    let gone = observed_as(&web, ServicePhase::Stopped);
    let expected = [stop("middle"), ServiceAction::Remove(id("web"))];
    assert_eq!(actions(&nothing, [running(&base), running(&middle), gone]), expected);
    assert_eq!(actions(&nothing, [running(&base)]), [stop("base")]);
    // A service that is starting delays the stop of its dependencies too.
    assert_eq!(actions(&nothing, [running(&base), observed_as(&middle, ServicePhase::Starting)]), []);
    // Services that do not depend on each other stop together.
    let (a, b) = (service("a", "", &["base"]), service("b", "", &["base"]));
    assert_eq!(actions(&nothing, [running(&base), running(&a), running(&b)]), [stop("a"), stop("b")]);
}

#[test]
fn change_disturbs_what_was_changed_and_nothing_else() {
    let (base, web) = (service("base", "a", &[]), service("web", "a", &["base"]));
    let changed = |name: &str, depends_on: &[&str]| service(name, "b", depends_on);
    let running = || [observed_as(&base, up(Health::Healthy)), observed_as(&web, up(Health::Healthy))];
    assert_eq!(actions(&all([base.clone(), web.clone()]), running()), []);
    assert_eq!(actions(&all([base.clone(), changed("web", &["base"])]), running()), [stop("web")]);
    assert_eq!(
        actions(&all([changed("base", &[]), web.clone()]), running()),
        [stop("base")],
        "what depends on it goes on"
    );
    assert_eq!(
        actions(&all([changed("base", &[]), changed("web", &["base"])]), running()),
        [stop("web")],
        "both: in the opposite order"
    );
    // The dependency is new; the running service is not restarted for it.
    let free = service("web", "a", &[]);
    let before = [observed_as(&base, ServicePhase::Stopping), observed_as(&free, up(Health::Healthy))];
    assert_eq!(
        actions(&all([changed("base", &[]), web.clone()]), before),
        [ServiceAction::Adjust(id("web"))]
    );
    // The dependency was reversed while both services were running.
    let (one, two) = (service("one", "a", &["two"]), service("two", "a", &["one"]));
    let turned = [observed_as(&one, up(Health::Healthy)), observed_as(&two, up(Health::Healthy))];
    assert_eq!(actions(&all([]), turned), [stop("two")]);
}

#[test]
fn what_another_release_renders_differently_counts_from_the_next_start() {
    let declared = |argument: &str, declared: &str| DesiredService {
        declared: Some(declared.to_owned()),
        ..service("web", argument, &[])
    };
    let web = declared("a", "1");
    let by_previous_release = DesiredService { declared: None, ..web.clone() };
    // What that release rendered is known, and is the digest of `web`, or another one.
    let with_former = |former: &DesiredService| DesiredService {
        former: former.digest().map(str::to_owned),
        ..declared("b", "1")
    };
    let other = declared("c", "1");
    let (adjusted, stopped) = ([ServiceAction::Adjust(id("web"))], [ServiceAction::Stop(id("web"))]);
    for (running, wanted, expected) in [
        (&web, declared("a", "1"), &[][..]),
        (&web, declared("b", "1"), &[][..]),
        // An operator has changed something, whether or not the release has too.
        (&web, declared("b", "2"), &stopped[..]),
        (&web, declared("a", "2"), &adjusted[..]),
        // A record of the release before learns what it was declared as.
        (&by_previous_release, declared("a", "1"), &adjusted[..]),
        (&by_previous_release, declared("b", "1"), &stopped[..]),
        (&by_previous_release, with_former(&web), &adjusted[..]),
        (&by_previous_release, with_former(&other), &stopped[..]),
        // A release with these digests started it, for another declaration.
        (&declared("a", "2"), with_former(&web), &stopped[..]),
    ] {
        let running = [observed_as(running, up(Health::Healthy))];
        assert_eq!(actions(&all([wanted.clone()]), running), expected, "{wanted:?}");
    }
    // A one-shot that has succeeded does not run again for another release.
    let task = |argument: &str| DesiredService {
        is_task: true,
        restart: RestartPolicy::OnFailure,
        ..declared(argument, "1")
    };
    let done = [observed_as(&task("a"), ended(ServiceExit::Exited(0), 600))];
    assert_eq!(actions(&all([task("b")]), done), []);
}

#[test]
fn changes_that_need_no_restart_are_applied_to_a_running_service() {
    let web = service("web", "a", &[]);
    let running = || [observed_as(&web, up(Health::Healthy))];
    let adjusted = [ServiceAction::Adjust(id("web"))];
    let limits = ResourceLimits { tasks: Some(7), ..ResourceLimits::default() };
    for changed in [
        DesiredService { revision: 2, ..web.clone() },
        DesiredService { limits, ..web.clone() },
        DesiredService { stop_time: Duration::from_secs(1), ..web.clone() },
    ] {
        assert_eq!(actions(&all([changed.clone()]), running()), adjusted, "{changed:?}");
        let [(_, present)] = running();
        let note = present.record.adjusted(&changed);
        let after = ObservedService { record: note, ..present };
        assert_eq!(actions(&all([changed.clone()]), [(id("web"), after)]), [], "{changed:?}, once it is");
    }
    // Health check and restart policy are looked up when they are needed.
    assert_eq!(actions(&all([checked(web.clone())]), running()), []);
    assert_eq!(
        actions(&all([DesiredService { restart: RestartPolicy::Never, ..web.clone() }]), running()),
        []
    );
}

#[test]
fn restart_policy_applies_after_a_backoff() {
    let web = |restart| DesiredService { restart, ..service("web", "a", &[]) };
    for (how, always, on_failure, never) in [
        (ServiceExit::Exited(0), true, false, false),
        (ServiceExit::Exited(1), true, true, false),
        (ServiceExit::Killed(9), true, true, false),
        (ServiceExit::Unknown, true, true, false),
        // It could not be started, so it has not exited.
        (ServiceExit::NotStarted, true, true, true),
    ] {
        for (restart, again) in [
            (RestartPolicy::Always, always),
            (RestartPolicy::OnFailure, on_failure),
            (RestartPolicy::Never, never),
        ] {
            let web = web(restart);
            let expected = if again { vec![starts("web")] } else { vec![] };
            assert_eq!(
                actions(&all([web.clone()]), [observed_as(&web, ended(how, 500))]),
                expected,
                "{how:?} {restart:?}"
            );
        }
    }
    let web = web(RestartPolicy::Always);
    for (deaths, milliseconds) in [(1, 500), (2, 750), (3, 1125), (40, 60_000)] {
        let (id, mut present) = observed_as(&web, ended(ServiceExit::Exited(1), 0));
        present.failures = deaths;
        let planned = planned(Some(&all([web.clone()])), [(id, present)], &[]);
        let due = NOW + Duration::from_millis(milliseconds);
        assert_eq!(planned, ActionPlan { actions: Vec::new(), next_check: Some(due) }, "{deaths}");
    }
}

#[test]
fn next_check_is_due_when_the_first_backoff_ends() {
    let (a, b, c) = (service("a", "", &[]), service("b", "", &[]), service("c", "", &[]));
    let wanted = all([a.clone(), b.clone()]);
    let present = [
        observed_as(&a, ended(ServiceExit::Exited(1), 0)),
        observed_as(
            &b,
            ServicePhase::Ended {
                exit: ServiceExit::Exited(1),
                message: String::new(),
                at: NOW,
                // Half of the delay.
                random: 0.0,
            },
        ),
        observed_as(&c, stuck(2)),
    ];
    let planned = planned(Some(&wanted), present, &[]);
    assert_eq!(
        planned,
        ActionPlan { actions: Vec::new(), next_check: Some(NOW + Duration::from_millis(250)) }
    );
}

#[test]
fn service_that_cannot_be_rendered_is_neither_started_nor_stopped() {
    let web = service("web", "a", &[]);
    let unsaid = DesiredService { rendered: Err("there is no label".to_owned()), ..web.clone() };
    let wanted = all([unsaid.clone()]);
    for doing in [up(Health::Healthy), ServicePhase::Stopped, ended(ServiceExit::Exited(1), 500), stuck(500)]
    {
        assert_eq!(actions(&wanted, [observed_as(&web, doing.clone())]), [], "{doing:?}");
    }
    assert_eq!(actions(&wanted, []), []);
    let circumstances = PlanInput {
        desired: Some(&wanted),
        retained: &RetainedRoles::new(),
        observed: &BTreeMap::new(),
        artefacts: &BTreeSet::new(),
        now: NOW,
    };
    assert_eq!(
        wait_reason(&circumstances, &unsaid),
        Some(WaitReason::Rendering("there is no label".to_owned()))
    );
}

#[test]
fn services_of_a_retained_role_are_neither_stopped_nor_removed() {
    let (server, job, other) = (service("server", "a", &[]), service("job", "a", &["server"]), "disk");
    let planned = |wanted: &BTreeMap<ServiceId, DesiredService>, retained: &str, doing: ServicePhase| {
        let present = BTreeMap::from([observed_as(&server, doing)]);
        let (retained, artefacts) = (RetainedRoles::from([retained.to_owned()]), BTreeSet::new());
        plan_services(&PlanInput {
            desired: Some(wanted),
            retained: &retained,
            observed: &present,
            artefacts: &artefacts,
            now: NOW,
        })
        .actions
    };
    let (none, all_of_job) = (BTreeMap::new(), all([job]));
    for (doing, action) in [
        (up(Health::Healthy), ServiceAction::Stop(id("server"))),
        (ServicePhase::Stopped, ServiceAction::Remove(id("server"))),
        (ended(ServiceExit::Exited(1), 500), ServiceAction::Remove(id("server"))),
        (stuck(500), ServiceAction::Stop(id("server"))),
    ] {
        assert_eq!(planned(&none, "web", doing.clone()), [], "{doing:?}");
        assert_eq!(
            planned(&none, other, doing.clone()),
            std::slice::from_ref(&action),
            "another role: {doing:?}"
        );
        assert_eq!(planned(&all_of_job, "web", doing.clone()), [action], "it is declared again: {doing:?}");
    }
}

#[test]
fn artefact_is_waited_for() {
    let (one, other) = (Sha256([1; 32]), Sha256([2; 32]));
    let mut web = service("web", "a", &[]);
    if let Ok((rendered, digest)) = &mut web.rendered {
        rendered.run = ProgramSource::Artefact { digest: one, url: String::new() };
        *digest = rendered.digest();
    }
    let wanted = all([web]);
    assert_eq!(planned(Some(&wanted), [], &[other]).actions, []);
    assert_eq!(planned(Some(&wanted), [], &[one, other]).actions, [starts("web")]);
}

#[test]
fn quick_exits_in_a_row_are_counted_and_a_stable_run_resets_them() {
    let web = service("web", "a", &[]);
    let since = |seconds| ServicePhase::Running {
        since: NOW.saturating_sub(Duration::from_secs(seconds)),
        health: Health::Healthy,
    };
    for (doing, deaths) in [(since(59), 5), (since(60), 1), (ServicePhase::Starting, 5)] {
        let (_, mut present) = observed_as(&web, doing.clone());
        present.failures = 4;
        present.record_exit(ServiceExit::Exited(1), "it ended".to_owned(), NOW, 0.5);
        assert_eq!(present.failures, deaths, "{doing:?}");
        assert!(matches!(present.phase, ServicePhase::Ended { at: NOW, .. }));
    }
}
