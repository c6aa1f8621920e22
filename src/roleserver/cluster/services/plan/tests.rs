//! Every branch of what is decided, as tables.

use super::*;

use crate::model::declaration::{Restart, Run};
use crate::roleserver::child::spec::Limits;
use crate::roleserver::cluster::services::state::{Health, Note};
use crate::roleserver::cluster::services::wanted::tests::id;
use crate::roleserver::cluster::services::wanted::{Check, Probe, Rendered};

const NOW: Moment = Duration::from_secs(1000);

/// A service that is to run, by what it is started with.
fn service(name: &str, argument: &str, depends_on: &[&str]) -> Wanted {
    let rendered = Rendered {
        run: Run::Path("/bin/server".to_owned()),
        arguments: vec![argument.to_owned()],
        environment: BTreeMap::new(),
        files: Vec::new(),
        user: "root".to_owned(),
    };
    let digest = rendered.digest();
    Wanted {
        id: id(name),
        revision: 1,
        rendered: Ok((rendered, digest)),
        limits: Limits::default(),
        depends_on: depends_on.iter().map(|name| id(name)).collect(),
        check: None,
        restart: Restart::Always,
        is_task: false,
        stop_time: Duration::from_secs(10),
    }
}

fn checked(service: Wanted) -> Wanted {
    let (interval, timeout) = (Duration::from_secs(5), Duration::from_secs(2));
    Wanted { check: Some(Check { probe: Probe::Tcp(80), interval, timeout, failures: 3 }), ..service }
}

fn all(services: impl IntoIterator<Item = Wanted>) -> BTreeMap<Id, Wanted> {
    services.into_iter().map(|service| (service.id.clone(), service)).collect()
}

/// One that was started as `service` says.
fn being(service: &Wanted, doing: Doing) -> (Id, Present) {
    let mut note = Note::lost(service.id.clone()).adjusted(service);
    note.digest = service.digest().unwrap_or_default().to_owned();
    (service.id.clone(), Present { note, doing, deaths: 1 })
}

fn up(health: Health) -> Doing {
    Doing::Up { since: Duration::ZERO, health }
}

fn ended(how: How, seconds_ago: u64) -> Doing {
    let at = NOW.saturating_sub(Duration::from_secs(seconds_ago));
    Doing::Ended { how, said: "it ended".to_owned(), at, random: 0.5 }
}

fn stuck(seconds_ago: u64) -> Doing {
    Doing::Stuck { said: "it hangs".to_owned(), at: NOW.saturating_sub(Duration::from_secs(seconds_ago)) }
}

fn planned(
    wanted: Option<&BTreeMap<Id, Wanted>>,
    present: impl IntoIterator<Item = (Id, Present)>,
    artefacts: &[Sha256],
) -> Plan {
    let present = present.into_iter().collect();
    let artefacts = artefacts.iter().copied().collect();
    plan(&Circumstances { wanted, present: &present, artefacts: &artefacts, now: NOW })
}

fn actions<const N: usize>(wanted: &BTreeMap<Id, Wanted>, present: [(Id, Present); N]) -> Vec<Action> {
    planned(Some(wanted), present, &[]).actions
}

fn starts(name: &str) -> Action {
    Action::Start(id(name))
}

fn stop(name: &str) -> Action {
    Action::Stop(id(name))
}

#[test]
fn nothing_is_done_while_nobody_knows_what_is_to_run() {
    let web = service("web", "a", &[]);
    for doing in [up(Health::Well), Doing::Down, ended(How::Exited(1), 900), stuck(900)] {
        assert_eq!(planned(None, [being(&web, doing)], &[]), Plan::default());
    }
    // That nothing is to run is something else.
    assert_eq!(actions(&all([]), [being(&web, up(Health::Well))]), [stop("web")]);
}

#[test]
fn single_service_is_brought_to_what_is_wanted_from_wherever_it_is() {
    let web = service("web", "a", &[]);
    let other = service("web", "b", &[]);
    let nothing: Vec<Action> = Vec::new();
    for (doing, same, changed, unwanted) in [
        (Doing::Down, vec![starts("web")], vec![starts("web")], vec![Action::Forget(id("web"))]),
        (Doing::Starting, vec![], vec![], vec![]),
        (up(Health::Well), vec![], vec![stop("web")], vec![stop("web")]),
        (up(Health::Ill("x".to_owned())), vec![], vec![stop("web")], vec![stop("web")]),
        (Doing::Stopping, vec![], vec![], vec![]),
        (Doing::Forgetting, vec![], vec![], vec![]),
        (stuck(1), vec![], vec![], vec![]),
        (stuck(11), vec![stop("web")], vec![stop("web")], vec![stop("web")]),
        // Its pause is over, or it has none because it is another one now.
        (ended(How::Exited(1), 1), vec![starts("web")], vec![starts("web")], vec![Action::Forget(id("web"))]),
        (ended(How::Exited(1), 0), vec![], vec![starts("web")], vec![Action::Forget(id("web"))]),
    ] {
        let present = || [being(&web, doing.clone())];
        assert_eq!(actions(&all([web.clone()]), present()), same, "{doing:?}, the same");
        assert_eq!(actions(&all([other.clone()]), present()), changed, "{doing:?}, changed");
        assert_eq!(actions(&all([]), present()), unwanted, "{doing:?}, not wanted");
    }
    assert_eq!(actions(&all([web.clone()]), []), [starts("web")]);
    assert_eq!(actions(&all([]), []), nothing);
    // Its note is lost: what runs may be anything.
    let mut lost = being(&web, up(Health::Well));
    lost.1.note = Note::lost(id("web"));
    assert_eq!(actions(&all([web]), [lost]), [stop("web")]);
}

#[test]
fn service_starts_when_all_that_it_depends_on_is_well() {
    let base = checked(service("base", "a", &[]));
    let once = Wanted { restart: Restart::OnFailure, ..service("once", "a", &[]) };
    let web = service("web", "a", &["base", "once"]);
    let wanted = all([base.clone(), once.clone(), web.clone()]);
    let done = || being(&once, ended(How::Exited(0), 500));
    for (health, starting) in
        [(Health::Unknown, false), (Health::Ill("x".to_owned()), false), (Health::Well, true)]
    {
        let expected = if starting { vec![starts("web")] } else { vec![] };
        assert_eq!(actions(&wanted, [being(&base, up(health.clone())), done()]), expected, "{health:?}");
    }
    let well = || being(&base, up(Health::Well));
    for (doing, starting) in [
        (up(Health::Unknown), true),
        (Doing::Starting, false),
        (Doing::Stopping, false),
        (ended(How::Exited(0), 0), true),
        (ended(How::Exited(1), 0), false),
        (ended(How::Killed(9), 0), false),
    ] {
        let expected = if starting { vec![starts("web")] } else { vec![] };
        assert_eq!(actions(&wanted, [well(), being(&once, doing.clone())]), expected, "{doing:?}");
    }
    // One that has something to do is well when that is done, and not while it is at it.
    let task = Wanted { is_task: true, ..once.clone() };
    let with_task = all([base.clone(), task.clone(), web.clone()]);
    assert_eq!(actions(&with_task, [well(), being(&task, up(Health::Unknown))]), []);
    assert_eq!(actions(&with_task, [well(), being(&task, ended(How::Exited(0), 0))]), [starts("web")]);
    // One that always runs is not done by ending well.
    let always = all([base.clone(), service("once", "a", &[]), web.clone()]);
    assert_eq!(actions(&always, [well(), being(&once, ended(How::Exited(0), 0))]), []);
    // One that is to be another one is waited for.
    let changed = all([base.clone(), service("once", "b", &[]), web.clone()]);
    assert_eq!(actions(&changed, [well(), being(&once, up(Health::Unknown))]), [stop("once")]);
    // What ended is started again only when what it depends on is well, too.
    let fallen = [being(&base, ended(How::Killed(9), 0)), done(), being(&web, ended(How::Exited(1), 500))];
    assert_eq!(actions(&wanted, fallen), []);
    // All that may start do so at once, in order of their names.
    let free = all([service("a", "", &[]), service("b", "", &[]), service("c", "", &["a"])]);
    assert_eq!(actions(&free, []), [starts("a"), starts("b")]);
}

#[test]
fn what_is_to_go_stops_in_the_opposite_order() {
    let base = service("base", "a", &[]);
    let middle = service("middle", "a", &["base"]);
    let web = service("web", "a", &["middle"]);
    let nothing = all([]);
    let running = |service: &Wanted| being(service, up(Health::Well));
    assert_eq!(actions(&nothing, [running(&base), running(&middle), running(&web)]), [stop("web")]);
    let stopping = being(&web, Doing::Stopping);
    assert_eq!(actions(&nothing, [running(&base), running(&middle), stopping]), []);
    assert_eq!(actions(&nothing, [running(&base), running(&middle), being(&web, stuck(1))]), []);
    let gone = being(&web, Doing::Down);
    let expected = [stop("middle"), Action::Forget(id("web"))];
    assert_eq!(actions(&nothing, [running(&base), running(&middle), gone]), expected);
    assert_eq!(actions(&nothing, [running(&base)]), [stop("base")]);
    // One that is being started is waited for, too.
    assert_eq!(actions(&nothing, [running(&base), being(&middle, Doing::Starting)]), []);
    // Those that do not depend on each other stop together.
    let (a, b) = (service("a", "", &["base"]), service("b", "", &["base"]));
    assert_eq!(actions(&nothing, [running(&base), running(&a), running(&b)]), [stop("a"), stop("b")]);
}

#[test]
fn change_disturbs_what_was_changed_and_nothing_else() {
    let (base, web) = (service("base", "a", &[]), service("web", "a", &["base"]));
    let changed = |name: &str, depends_on: &[&str]| service(name, "b", depends_on);
    let running = || [being(&base, up(Health::Well)), being(&web, up(Health::Well))];
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
    // What depends on it does so only since now; that it runs is enough.
    let free = service("web", "a", &[]);
    let before = [being(&base, Doing::Stopping), being(&free, up(Health::Well))];
    assert_eq!(actions(&all([changed("base", &[]), web.clone()]), before), [Action::Adjust(id("web"))]);
    // Who depends on whom was turned while neither could be started again.
    let (one, two) = (service("one", "a", &["two"]), service("two", "a", &["one"]));
    let turned = [being(&one, up(Health::Well)), being(&two, up(Health::Well))];
    assert_eq!(actions(&all([]), turned), [stop("two")]);
}

#[test]
fn what_can_be_changed_while_it_runs_is() {
    let web = service("web", "a", &[]);
    let running = || [being(&web, up(Health::Well))];
    let adjusted = [Action::Adjust(id("web"))];
    let limits = Limits { tasks: Some(7), ..Limits::default() };
    for changed in [
        Wanted { revision: 2, ..web.clone() },
        Wanted { limits, ..web.clone() },
        Wanted { stop_time: Duration::from_secs(1), ..web.clone() },
    ] {
        assert_eq!(actions(&all([changed.clone()]), running()), adjusted, "{changed:?}");
        let [(_, present)] = running();
        let note = present.note.adjusted(&changed);
        let after = Present { note, ..present };
        assert_eq!(actions(&all([changed.clone()]), [(id("web"), after)]), [], "{changed:?}, once it is");
    }
    // How it is watched and what its end means are looked up when they are needed.
    assert_eq!(actions(&all([checked(web.clone())]), running()), []);
    assert_eq!(actions(&all([Wanted { restart: Restart::Never, ..web.clone() }]), running()), []);
}

#[test]
fn end_is_followed_by_what_the_policy_says_after_a_pause() {
    let web = |restart| Wanted { restart, ..service("web", "a", &[]) };
    for (how, always, on_failure, never) in [
        (How::Exited(0), true, false, false),
        (How::Exited(1), true, true, false),
        (How::Killed(9), true, true, false),
        (How::Unknown, true, true, false),
        // It has not ended.
        (How::NotStarted, true, true, true),
    ] {
        for (restart, again) in
            [(Restart::Always, always), (Restart::OnFailure, on_failure), (Restart::Never, never)]
        {
            let web = web(restart);
            let expected = if again { vec![starts("web")] } else { vec![] };
            assert_eq!(
                actions(&all([web.clone()]), [being(&web, ended(how, 500))]),
                expected,
                "{how:?} {restart:?}"
            );
        }
    }
    let web = web(Restart::Always);
    for (deaths, milliseconds) in [(1, 500), (2, 750), (3, 1125), (40, 60_000)] {
        let (id, mut present) = being(&web, ended(How::Exited(1), 0));
        present.deaths = deaths;
        let planned = planned(Some(&all([web.clone()])), [(id, present)], &[]);
        let due = NOW + Duration::from_millis(milliseconds);
        assert_eq!(planned, Plan { actions: Vec::new(), look_again: Some(due) }, "{deaths}");
    }
}

#[test]
fn look_is_due_when_the_first_of_all_pauses_ends() {
    let (a, b, c) = (service("a", "", &[]), service("b", "", &[]), service("c", "", &[]));
    let wanted = all([a.clone(), b.clone()]);
    let present = [
        being(&a, ended(How::Exited(1), 0)),
        being(&b, Doing::Ended { how: How::Exited(1), said: String::new(), at: NOW, random: 0.0 }),
        being(&c, stuck(2)),
    ];
    let planned = planned(Some(&wanted), present, &[]);
    assert_eq!(planned, Plan { actions: Vec::new(), look_again: Some(NOW + Duration::from_millis(250)) });
}

#[test]
fn what_cannot_be_said_is_neither_started_nor_a_reason_to_stop() {
    let web = service("web", "a", &[]);
    let unsaid = Wanted { rendered: Err("there is no label".to_owned()), ..web.clone() };
    let wanted = all([unsaid.clone()]);
    for doing in [up(Health::Well), Doing::Down, ended(How::Exited(1), 500), stuck(500)] {
        assert_eq!(actions(&wanted, [being(&web, doing.clone())]), [], "{doing:?}");
    }
    assert_eq!(actions(&wanted, []), []);
    let circumstances = Circumstances {
        wanted: Some(&wanted),
        present: &BTreeMap::new(),
        artefacts: &BTreeSet::new(),
        now: NOW,
    };
    assert_eq!(waits(&circumstances, &unsaid), Some(Waits::Rendering("there is no label".to_owned())));
}

#[test]
fn artefact_is_waited_for() {
    let (one, other) = (Sha256([1; 32]), Sha256([2; 32]));
    let mut web = service("web", "a", &[]);
    if let Ok((rendered, digest)) = &mut web.rendered {
        rendered.run = Run::Artefact { digest: one, url: String::new() };
        *digest = rendered.digest();
    }
    let wanted = all([web]);
    assert_eq!(planned(Some(&wanted), [], &[other]).actions, []);
    assert_eq!(planned(Some(&wanted), [], &[one, other]).actions, [starts("web")]);
}

#[test]
fn quick_ends_in_a_row_are_counted_and_a_steady_run_forgets_them() {
    let web = service("web", "a", &[]);
    let since =
        |seconds| Doing::Up { since: NOW.saturating_sub(Duration::from_secs(seconds)), health: Health::Well };
    for (doing, deaths) in [(since(59), 5), (since(60), 1), (Doing::Starting, 5)] {
        let (_, mut present) = being(&web, doing.clone());
        present.deaths = 4;
        present.end(How::Exited(1), "it ended".to_owned(), NOW, 0.5);
        assert_eq!(present.deaths, deaths, "{doing:?}");
        assert!(matches!(present.doing, Doing::Ended { at: NOW, .. }));
    }
}
