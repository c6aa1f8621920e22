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
    let interrupted = interruption(&waiting);
    tokio::select! {
        met = follow_until_end(client, waiting) => met,
        signal = tokio::signal::ctrl_c() => match signal {
            Ok(()) => Err(CliError::Interrupted(interrupted)),
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
        let open = progress.open_objects();
        let read_began = Instant::now();
        if !open.is_empty() {
            let subjects: Vec<Subject> =
                open.iter().filter_map(|place| waiting.subjects.get(*place)).cloned().collect();
            let read = async |client: FleetClient| read_objects(&client, goal, &subjects).await;
            let found = reader.read(deadline, read).await?;
            now = found.now;
            for (place, object) in open.into_iter().zip(found.objects) {
                let subject = &mut waiting.subjects[place];
                note_first_read(subject, &object, now);
                let news = progress.record(place, &object.snapshot, now);
                print_news(waiting.report, waiting.colors, goal, subject, &news)?;
                last[place] = Some(object);
            }
        }
        match progress.next_step(began.elapsed()) {
            // Half of the time of the servers at most: many objects take long to read.
            NextStep::ReadAfter(wait) => sleep(wait.max(read_began.elapsed())).await,
            NextStep::Met => break,
            NextStep::TimedOut | NextStep::Impossible => {
                explain_open_objects(reader.client(), &waiting, &progress, &last).await;
                return Err(CliError::Failed(failure(&waiting, &progress)));
            }
        }
    }
    let objects = waiting.subjects.into_iter().zip(last).map(|(subject, object)| MetObject {
        name: subject.name,
        document: object.and_then(|object| object.document),
    });
    Ok(MetObjects { now, objects: objects.collect() })
}

/// Remembers what the first read of an object has shown.
fn note_first_read(subject: &mut Subject, object: &ReadObject, now: Timestamp) {
    if subject.id.is_none() {
        subject.id.clone_from(&object.id);
    }
    if let (None, Snapshot::Machine(machine)) = (&subject.first, &object.snapshot) {
        subject.first = Some(FirstReport { boot_id: machine.power.boot_id.clone(), at: now });
    }
}

fn print_news(
    report: WaitReport,
    colors: SeverityColors,
    goal: WaitGoal,
    subject: &Subject,
    news: &News,
) -> Result<(), CliError> {
    let name = shown_name(goal, subject);
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
fn shown_name(goal: WaitGoal, subject: &Subject) -> String {
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
    for place in progress.open_objects() {
        let (Some(subject), Some(Some(object))) = (waiting.subjects.get(place), last.get(place)) else {
            continue;
        };
        match (&object.snapshot, &subject.id) {
            (Snapshot::Machine(_), Some(machine)) => {
                let of = WhyArgs { machine: MachineArg { machine: machine.clone() }, verbose: false };
                match show_explanation(client, &of, Format::Table).await {
                    Ok(text) => print_stderr(&waiting.target_flags.qualify(text.trim_end())),
                    Err(error) => print_stderr(&format!("{}: {error}", subject.name)),
                }
            }
            (snapshot, _) => {
                for step in snapshot.steps() {
                    print_stderr(&format!("{} {}", shown_name(waiting.goal, subject), step.text));
                }
            }
        }
    }
}

/// Why the waiting ended without success, as a sentence.
fn failure(waiting: &Waiting, progress: &WaitProgress) -> String {
    let open = progress.open_objects();
    let named = |place: &usize| waiting.subjects.get(*place).map(|subject| shown_name(waiting.goal, subject));
    let obstacle = open.iter().find_map(|place| Some((named(place)?, progress.obstacle(*place)?)));
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

/// What to say after Ctrl-C.
fn interruption(waiting: &Waiting) -> String {
    let names = waiting.subjects.iter().take(MAX_NAMES).map(|subject| subject.name.as_str());
    let mut names: Vec<String> = names.map(shell_words::quote_if_needed).collect();
    if waiting.subjects.len() > names.len() {
        names.push("…".to_owned());
    }
    let again = format!(
        "shepherdctl wait {} {} --for {}",
        waiting.goal.kind().row().plural,
        names.join(" "),
        waiting.goal.condition()
    );
    match waiting.report {
        WaitReport::Steps => {
            format!("the waiting was ended, and the order continues; to wait again: {again}")
        }
        WaitReport::Silent | WaitReport::Met => {
            format!("the waiting was ended, and nothing was changed; to wait again: {again}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            failure(&waiting, &progress)
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
        let expected = "the waiting was ended, and the order continues; to wait again: shepherdctl wait machines \
                        sim/a \"it's\" --for retired";
        assert_eq!(interruption(&order), expected);
        let wait = waiting(WaitGoal::Cluster(ClusterGoal::Ready), &["prod"], WaitReport::Silent);
        let expected = "the waiting was ended, and nothing was changed; to wait again: shepherdctl wait clusters \
                        prod --for ready";
        assert_eq!(interruption(&wait), expected);
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
            note_first_read(&mut subject, &object(boot), now);
        }
        let at = Timestamp::from_timestamp(1, 0).unwrap();
        assert_eq!(subject.first, Some(FirstReport { boot_id: Some("one".to_owned()), at }));
        let mut cluster = Subject::cluster("prod");
        for id in ["1", "2"] {
            let read = ReadObject { id: Some(id.to_owned()), snapshot: Snapshot::Absent, document: None };
            note_first_read(&mut cluster, &read, at);
        }
        assert_eq!(cluster.id.as_deref(), Some("1"));
    }
}
