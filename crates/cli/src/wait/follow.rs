//! The loop of a command that waits: read the objects, decide, print, until the waiting ends.
//!
//! Ctrl-C ends the waiting and nothing else. If the waiting ends without success, standard error has for each object
//! that has not met the goal why that is.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::client::fleet_client::FleetClient;
use crate::client::reconnect::PersistentReader;
use crate::error::CliError;
use crate::machine::selection::MachineArg;
use crate::machine::why::{WhyArgs, show_explanation};
use crate::object::document::ObjectDocument;
use crate::output::color::SeverityColors;
use crate::output::{Format, print_chunk, print_stderr};
use crate::target_flags::TargetFlags;
use crate::wait::condition::WaitGoal;
use crate::wait::fetch::{ReadObject, Subject, read_objects};
use crate::wait::progress::{News, NextStep, WaitProgress};
use crate::wait::snapshot::{FirstReport, Snapshot};
use bmdb::cluster::lock;
use bmdb::fleet::roll_out;
use model::shell_words;
use model::time::{Span, Timestamp};

/// Most names in a message.
const MAX_NAMES: usize = 5;
/// Most names in a command to paste.
const MAX_COMMAND_NAMES: usize = 100;
/// Most objects that are explained at the same time.
const MAX_CALLS: usize = 4;

/// What a command that waits prints while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitReport {
    /// Nothing: the objects are printed at the end.
    Silent,
    /// A line on standard output for each object that has met the goal.
    Met,
    /// A line on standard error for each step of an object.
    Steps,
}

/// Objects to wait for.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// What they are waited for.
    pub(crate) goal: WaitGoal,
    /// The objects, each once.
    pub(crate) subjects: Vec<Subject>,
    /// How long they are waited for; zero to read them once.
    pub(crate) timeout: Duration,
    /// What to print meanwhile.
    pub(crate) report: WaitReport,
    /// The colours of what is printed on standard output.
    pub(crate) colors: SeverityColors,
    /// The flags that name the fleet, for commands in messages.
    pub(crate) target_flags: TargetFlags,
}

/// An object that has met the goal.
#[derive(Debug)]
pub(crate) struct MetObject {
    /// Its name, as other commands accept it.
    pub(crate) name: String,
    /// The object; `None` if it does not exist, or was not read whole.
    pub(crate) document: Option<ObjectDocument>,
}

/// The objects that have met the goal, in the order in which they were selected.
#[derive(Debug)]
pub(crate) struct MetObjects {
    /// The database's time when the last of them was read.
    pub(crate) now: Timestamp,
    /// An entry for each object that was selected.
    pub(crate) objects: Vec<MetObject>,
}

/// Waits until each object has met the goal. An error if one cannot, if the time is over, or after Ctrl-C.
pub(crate) async fn follow_objects(client: &FleetClient, waiting: Waiting) -> Result<MetObjects, CliError> {
    let interrupted = describe_interruption(&waiting);
    tokio::select! {
        met = follow_until_end(client, waiting) => met,
        signal = tokio::signal::ctrl_c() => match signal {
            Ok(()) => Err(interrupted),
            Err(error) => Err(CliError::Failed(format!("cannot receive signals: {error}"))),
        },
    }
}

async fn follow_until_end(client: &FleetClient, mut waiting: Waiting) -> Result<MetObjects, CliError> {
    let (goal, timeout) = (waiting.goal, waiting.timeout);
    let began = Instant::now();
    let deadline = began.checked_add(timeout);
    let mut reader = PersistentReader::new(client.clone());
    let mut progress = WaitProgress::new(goal, timeout, waiting.subjects.len());
    let mut last: Vec<Option<ReadObject>> = waiting.subjects.iter().map(|_| None).collect();
    let mut now = Timestamp::UNIX_EPOCH;
    loop {
        let open = progress.list_open_objects();
        let read_began = Instant::now();
        if !open.is_empty() {
            let subjects: Vec<Subject> =
                open.iter().filter_map(|place| waiting.subjects.get(*place)).cloned().collect();
            let read = async |client: FleetClient| read_objects(&client, goal, &subjects).await;
            let found = reader.read(deadline, read).await?;
            now = found.now;
            for (place, object) in open.into_iter().zip(found.objects) {
                let subject = &mut waiting.subjects[place];
                note_read(subject, &object, now);
                let mut news = progress.record(place, &object.snapshot, now);
                for step in &mut news.steps {
                    *step = waiting.target_flags.qualify(step);
                }
                print_news(waiting.report, waiting.colors, goal, subject, &news)?;
                last[place] = Some(object);
            }
        }
        match progress.decide_next_step(began.elapsed()) {
            // Half of the time of the servers at most: many objects take long to read.
            NextStep::ReadAfter(wait) => sleep(wait.max(read_began.elapsed())).await,
            NextStep::Met => break,
            NextStep::TimedOut | NextStep::Impossible => {
                explain_open_objects(reader.client(), &waiting, &progress, &last).await;
                return Err(CliError::Failed(describe_failure(&waiting, &progress)));
            }
        }
    }
    let objects = waiting.subjects.into_iter().zip(last).map(|(subject, object)| MetObject {
        name: subject.name,
        document: object.and_then(|object| object.document),
    });
    Ok(MetObjects { now, objects: objects.collect() })
}

/// Remembers what the first read of an object has shown, and whether its power order is over.
fn note_read(subject: &mut Subject, object: &ReadObject, now: Timestamp) {
    if subject.id.is_none() {
        subject.id.clone_from(&object.id);
    }
    if let Snapshot::Machine(machine) = &object.snapshot {
        let report = || FirstReport { boot_id: machine.power.boot_id.clone(), at: now };
        subject.first.get_or_insert_with(report);
        // A later order ends on its own.
        subject.is_over = !machine.power.is_pending;
    }
}

fn print_news(
    report: WaitReport,
    colors: SeverityColors,
    goal: WaitGoal,
    subject: &Subject,
    news: &News,
) -> Result<(), CliError> {
    let name = format_name(goal, subject);
    match report {
        WaitReport::Met if news.has_met => {
            print_chunk(&colors.apply(format!("{name} is {goal}\n")))?;
        }
        WaitReport::Silent | WaitReport::Met => {}
        WaitReport::Steps => {
            for step in &news.steps {
                print_stderr(&format!("{name} {step}"));
            }
            if news.has_met {
                print_stderr(&format!("{name} is {goal}"));
            }
        }
    }
    Ok(())
}

/// The object in a sentence.
fn format_name(goal: WaitGoal, subject: &Subject) -> String {
    match goal {
        WaitGoal::Machine(_) => subject.name.clone(),
        WaitGoal::Cluster(_) => lock::order_target(&subject.name),
        WaitGoal::UpdateFinished => roll_out::order_target(&subject.name),
    }
}

/// Prints on standard error why each object that has not met the goal has not: for machines, what `why` prints.
async fn explain_open_objects(
    client: &FleetClient,
    waiting: &Waiting,
    progress: &WaitProgress,
    last: &[Option<ReadObject>],
) {
    // In a box: the future of the waiting would have several of these.
    let explain = async |place: usize| match (waiting.subjects.get(place), last.get(place)) {
        (Some(subject), Some(Some(object))) => {
            Box::pin(explain_object(client, waiting, subject, object)).await
        }
        _ => Vec::new(),
    };
    explain_in_order(&progress.list_open_objects(), explain, print_stderr).await;
}

/// Prints what `explain` returns for each place, in their order, with at most [`MAX_CALLS`] calls at a time.
async fn explain_in_order(
    places: &[usize],
    explain: impl AsyncFn(usize) -> Vec<String>,
    mut print: impl FnMut(&str),
) {
    for places in places.chunks(MAX_CALLS) {
        let explain_nth = async |nth: usize| match places.get(nth) {
            Some(place) => explain(*place).await,
            None => Vec::new(),
        };
        let texts = tokio::join!(explain_nth(0), explain_nth(1), explain_nth(2), explain_nth(3));
        for text in [texts.0, texts.1, texts.2, texts.3].concat() {
            print(&text);
        }
    }
}

/// Why an object has not met the goal. If the reason cannot be read, why that is.
async fn explain_object(
    client: &FleetClient,
    waiting: &Waiting,
    subject: &Subject,
    object: &ReadObject,
) -> Vec<String> {
    let qualify = |text: &str| waiting.target_flags.qualify(text);
    match (&object.snapshot, &subject.id) {
        (Snapshot::Machine(_), Some(machine)) => {
            let of = WhyArgs { machine: MachineArg { machine: machine.clone() }, verbose: false };
            vec![match show_explanation(client, &of, Format::Table).await {
                Ok(text) => qualify(text.trim_end()),
                Err(error) => format!("{}: {}", subject.name, qualify(&error.to_string())),
            }]
        }
        (snapshot, _) => {
            let name = format_name(waiting.goal, subject);
            snapshot.describe_steps().iter().map(|step| format!("{name} {}", qualify(&step.text))).collect()
        }
    }
}

/// Why the waiting ended without success, as a sentence.
fn describe_failure(waiting: &Waiting, progress: &WaitProgress) -> String {
    let open = progress.list_open_objects();
    let named =
        |place: &usize| waiting.subjects.get(*place).map(|subject| format_name(waiting.goal, subject));
    let obstacle = open.iter().find_map(|place| Some((named(place)?, progress.find_obstacle(*place)?)));
    if let Some((name, reason)) = obstacle {
        return format!("{name} {reason}, so it cannot be {} any more", waiting.goal);
    }
    let mut names: Vec<String> = open.iter().filter_map(named).take(MAX_NAMES).collect();
    if open.len() > names.len() {
        names.push(format!("and {} more", open.len() - names.len()));
    }
    let after = match waiting.timeout {
        Duration::ZERO => String::new(),
        timeout => format!(" after {}", Span(timeout)),
    };
    let (open, all) = (open.len(), waiting.subjects.len());
    format!("{open} of {all} are not {}{after}: {}", waiting.goal, names.join(", "))
}

/// The error after Ctrl-C, with the command that waits again. A command that left out a name would wait for less, so there
/// is none for too many.
fn describe_interruption(waiting: &Waiting) -> CliError {
    let ended = match waiting.report {
        WaitReport::Steps => "the waiting was ended, and the order continues",
        WaitReport::Silent | WaitReport::Met => "the waiting was ended, and nothing was changed",
    };
    let row = waiting.goal.kind().row();
    let kind = row.plural;
    let count = waiting.subjects.len();
    if count > MAX_COMMAND_NAMES {
        let message = format!("{ended}; to wait again, name the {count} {kind} to: shepherdctl wait {kind}");
        return CliError::Interrupted { message, command: None };
    }
    let names = waiting.subjects.iter().map(|subject| shell_words::quote_if_needed(&subject.name));
    let names = names.collect::<Vec<_>>().join(" ");
    let (purpose, command) = match waiting.goal.condition() {
        Some(condition) => ("to wait again", format!("shepherdctl wait {kind} {names} --for {condition}")),
        // Its order is about one object.
        None => ("to see how far it is", format!("shepherdctl describe {} {names}", row.singular)),
    };
    let message = format!("{ended}; {purpose}, run the line below");
    CliError::Interrupted { message, command: Some(waiting.target_flags.qualify(&command)) }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ffi::OsString;

    use super::*;
    use crate::command::grammar;
    use crate::wait::condition::{ClusterGoal, MachineGoal};
    use crate::wait::snapshot::MachineState;
    use model::phase::Phase;

    const READY: WaitGoal = WaitGoal::Machine(MachineGoal::Phase(Phase::Ready));

    fn waiting(goal: WaitGoal, names: &[&str], report: WaitReport) -> Waiting {
        let subjects = names.iter().map(|name| Subject::new(*name, *name)).collect();
        let (timeout, target_flags) = (Duration::from_mins(5), TargetFlags::default());
        Waiting { goal, subjects, timeout, report, colors: SeverityColors::Off, target_flags }
    }

    fn machine(phase: Phase) -> Snapshot {
        Snapshot::Machine(MachineState { phase: phase.as_str().to_owned(), ..MachineState::default() })
    }

    #[test]
    fn failure_names_the_objects_that_have_not_met_the_goal() {
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        let text = |timeout: u64, phases: &[Phase]| {
            let waiting = Waiting {
                timeout: Duration::from_secs(timeout),
                ..waiting(READY, &names[..phases.len()], WaitReport::Met)
            };
            let mut progress = WaitProgress::new(READY, waiting.timeout, phases.len());
            for (place, phase) in phases.iter().enumerate() {
                progress.record(place, &machine(*phase), Timestamp::UNIX_EPOCH);
            }
            describe_failure(&waiting, &progress)
        };
        for (timeout, phases, expected) in [
            (300, &[Phase::New, Phase::Ready][..], "1 of 2 are not Ready after 5m: a"),
            (0, &[Phase::New, Phase::New], "2 of 2 are not Ready: a, b"),
            (60, &[Phase::New; 7], "7 of 7 are not Ready after 1m: a, b, c, d, e, and 2 more"),
            (60, &[Phase::New, Phase::Retired], "b is Retired, and stays so, so it cannot be Ready any more"),
        ] {
            assert_eq!(text(timeout, phases), expected);
        }
    }

    #[test]
    fn interruption_has_the_command_that_waits_again() {
        let order =
            waiting(WaitGoal::Machine(MachineGoal::RetirementEnd), &["sim/a", "it's"], WaitReport::Steps);
        let wait = waiting(WaitGoal::Cluster(ClusterGoal::Ready), &["prod"], WaitReport::Silent);
        let replaced = WaitGoal::Cluster(ClusterGoal::AuthorityReplaced);
        for (waiting, message, command) in [
            (
                order,
                "the waiting was ended, and the order continues; to wait again, run the line below",
                "shepherdctl wait machines sim/a \"it's\" --for retired",
            ),
            (
                wait,
                "the waiting was ended, and nothing was changed; to wait again, run the line below",
                "shepherdctl wait clusters prod --for ready",
            ),
            (
                waiting(replaced, &["prod"], WaitReport::Steps),
                "the waiting was ended, and the order continues; to see how far it is, run the line below",
                "shepherdctl describe cluster prod",
            ),
        ] {
            let error = describe_interruption(&waiting);
            assert_eq!((error.to_string().as_str(), error.next_command()), (message, Some(command)));
        }
    }

    #[test]
    fn interruption_repeats_the_fleet_and_every_name() {
        let names: Vec<String> = (0..=MAX_COMMAND_NAMES).map(|number| format!("m{number}")).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        let too_many = describe_interruption(&waiting(READY, &names, WaitReport::Met));
        assert_eq!(too_many.next_command(), None);
        assert!(too_many.to_string().contains("name the 101 machines to"), "{too_many}");
        names.pop();
        let arguments = ["shepherdctl", "--context", "prod", "issues"].map(OsString::from);
        let target_flags = TargetFlags::from_arguments(&arguments, &grammar());
        let all = describe_interruption(&Waiting { target_flags, ..waiting(READY, &names, WaitReport::Met) });
        let command = all.next_command().unwrap();
        assert!(command.starts_with("shepherdctl --context prod wait machines m0 m1 "), "{command}");
        assert!(command.ends_with(" m99 --for phase=Ready"), "{command}");
    }

    #[tokio::test]
    async fn each_open_object_is_explained_in_order_by_few_calls_at_a_time() {
        let (running, most) = (Cell::new(0), Cell::new(0));
        // In a box: the future of the waiting would have several of these.
        let explain = async |place: usize| {
            running.set(running.get() + 1);
            most.set(most.get().max(running.get()));
            // A later one of the same calls ends earlier.
            for _ in 0..MAX_CALLS - place % MAX_CALLS {
                tokio::task::yield_now().await;
            }
            running.set(running.get() - 1);
            vec![place.to_string()]
        };
        for count in [0, 1, MAX_CALLS, 2 * MAX_CALLS + 1] {
            let places: Vec<usize> = (0..count).collect();
            let mut printed = Vec::new();
            most.set(0);
            explain_in_order(&places, &explain, |text| printed.push(text.to_owned())).await;
            let expected: Vec<String> = places.iter().map(ToString::to_string).collect();
            assert_eq!((printed, most.get()), (expected, count.min(MAX_CALLS)));
        }
    }

    #[test]
    fn end_of_a_power_order_is_remembered_until_another_one() {
        let mut subject = Subject::new("1", "sim/a");
        for is_pending in [true, false, false, true] {
            let mut state = MachineState::default();
            state.power.is_pending = is_pending;
            let read = ReadObject { id: None, snapshot: Snapshot::Machine(state), document: None };
            note_read(&mut subject, &read, Timestamp::UNIX_EPOCH);
            assert_eq!(subject.is_over, !is_pending);
        }
    }

    #[test]
    fn first_read_is_remembered() {
        let object = |boot: &str| {
            let mut state = MachineState::default();
            state.power.boot_id = Some(boot.to_owned());
            ReadObject { id: None, snapshot: Snapshot::Machine(state), document: None }
        };
        let mut subject = Subject::new("1", "sim/a");
        for (boot, at) in [("one", 1), ("two", 2)] {
            let now = Timestamp::from_timestamp(at, 0).unwrap();
            note_read(&mut subject, &object(boot), now);
        }
        let at = Timestamp::from_timestamp(1, 0).unwrap();
        assert_eq!(subject.first, Some(FirstReport { boot_id: Some("one".to_owned()), at }));
        let mut cluster = Subject::cluster("prod");
        for id in ["1", "2"] {
            let read = ReadObject { id: Some(id.to_owned()), snapshot: Snapshot::Absent, document: None };
            note_read(&mut cluster, &read, at);
        }
        assert_eq!(cluster.id.as_deref(), Some("1"));
    }
}
