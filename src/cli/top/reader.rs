//! What is asked for a page, and of whom.

use serde::Serialize;
use sqlx::PgConnection;
use tonic::{Code, Status};

use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::{self, ProviderLine, WorkLine};
use crate::bmdb::pause;
use crate::bmdb::statistics::{ClassCount, Counted, Pace, Statistics, statistics};
use crate::cli::error::CliError;
use crate::cli::loops::{self, LoopLine};
use crate::cli::remote::{Remote, refused};
use crate::cli::source::Source;
use crate::cli::{get, remote_read};
use crate::model::access::Scope;
use crate::model::machine_view::BrakeLine;
use crate::model::pause::Loop;
use crate::model::process::Process;
use crate::model::time::Timestamp;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::loops_client::LoopsClient;
use crate::proto::fleet::v1::providers_client::ProvidersClient;
use crate::proto::fleet::v1::statistics_client::StatisticsClient;
use crate::proto::fleet::v1::work_client::WorkClient;

/// Most work items that are read: as many as the API answers at once.
const WORK: u32 = 500;

/// What a page tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct View {
    /// When this was.
    pub at: Timestamp,
    /// Phases that a machine is in.
    pub phases: Vec<PhaseLine>,
    /// Every loop.
    pub loops: Vec<LoopFigures>,
    /// What is under way, longest running first.
    pub work: Vec<WorkLine>,
    /// Whether more is under way than is listed.
    pub more_work: bool,
    /// Brakes that are on.
    pub brakes: Vec<BrakeLine>,
    /// Providers that fail, or of which no machine is taken.
    pub providers: Vec<ProviderLine>,
    /// When ages and backlogs were counted, once a minute.
    pub counted_at: Option<Timestamp>,
    /// What this credential may not see, in the words of the refusal.
    pub refused: Option<String>,
}

/// Machines of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseLine {
    /// Which phase.
    pub phase: String,
    /// How many machines.
    pub machines: i64,
    /// Whether there are more than were counted.
    pub at_least: bool,
    /// For how long the one is in it that has been for longest, in seconds, at the last count.
    pub oldest_seconds: Option<f64>,
    /// Those past the deadline of what they wait for, at the last count.
    pub over_deadline: Option<i64>,
}

/// A loop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoopFigures {
    /// Which, its workers and its pauses.
    #[serde(flatten)]
    pub line: LoopLine,
    /// What it has under way; of what is listed.
    pub under_way: usize,
    /// Machines whose work could be done and waits for a worker, at the last count.
    pub waiting: Option<i64>,
    /// How long the one has waited that has for longest, in seconds.
    pub waiting_seconds: Option<f64>,
    /// How it got on within the last minute; `None` for a loop whose work is not about one machine.
    pub pace: Option<Pace>,
}

/// What is only told to whoever may see the fleet as a whole.
#[derive(Default)]
struct Whole {
    loops: Vec<LoopLine>,
    work: Vec<WorkLine>,
    more_work: bool,
    brakes: Vec<BrakeLine>,
    providers: Vec<ProviderLine>,
}

/// Asks once.
pub async fn look(source: &Source) -> Result<View, CliError> {
    match source {
        Source::Direct(bmdb) => {
            let (statistics, whole) = bmdb.inspect(|tx| Box::pin(read(tx))).await?;
            Ok(view(statistics, Ok(whole)))
        }
        Source::Api(remote) => ask(remote).await,
    }
}

async fn read(tx: &mut PgConnection) -> Result<(Statistics, Whole), BmdbError> {
    let statistics = statistics(tx, &Scope::Everything).await?;
    let mut work = inspect::work(tx, None, i64::from(WORK) + 1).await?;
    let more_work = get::drop_surplus(&mut work, WORK);
    let whole = Whole {
        loops: pause::loops(tx).await?.0.into_iter().map(LoopLine::from).collect(),
        work,
        more_work,
        brakes: inspect::brakes(tx).await?,
        providers: inspect::providers(tx).await?,
    };
    Ok((statistics, whole))
}

async fn ask(remote: &Remote) -> Result<View, CliError> {
    let said = StatisticsClient::new(remote.service()).get(v1::GetStatisticsRequest {}).await;
    let statistics = remote_read::statistics(said.map_err(refused)?.into_inner())?;
    let whole = match ask_whole(remote).await {
        Ok(answers) => Ok(understood(answers)?),
        // A credential for some providers' machines sees those.
        Err(status) if status.code() == Code::PermissionDenied => Err(status.message().to_owned()),
        Err(status) => return Err(refused(status)),
    };
    Ok(view(statistics, whole))
}

type Answers = (v1::ListLoopsResponse, v1::ListWorkResponse, v1::ListProvidersResponse);

async fn ask_whole(remote: &Remote) -> Result<Answers, Status> {
    let loops = LoopsClient::new(remote.service()).list(v1::ListLoopsRequest {}).await?.into_inner();
    let request = v1::ListWorkRequest { page_size: get::page_of(WORK, 0), page_token: String::new() };
    let work = WorkClient::new(remote.service()).list(request).await?.into_inner();
    let request = v1::ListProvidersRequest {};
    let providers = ProvidersClient::new(remote.service()).list(request).await?.into_inner();
    Ok((loops, work, providers))
}

fn understood((loops, work, providers): Answers) -> Result<Whole, CliError> {
    Ok(Whole {
        loops: loops.loops.into_iter().map(loops::line).collect::<Result<_, _>>()?,
        work: work.work.into_iter().map(remote_read::work).collect::<Result<_, _>>()?,
        more_work: work.more,
        brakes: providers.brakes.into_iter().map(remote_read::brake).collect::<Result<_, _>>()?,
        providers: providers.providers.into_iter().map(remote_read::provider).collect(),
    })
}

/// A page from what was answered. What was refused is not on it, and the page says so.
fn view(statistics: Statistics, whole: Result<Whole, String>) -> View {
    let Statistics { counts, paces, counted, at } = statistics;
    let (whole, refused) = match whole {
        Ok(whole) => (whole, None),
        Err(refused) => (Whole::default(), Some(refused)),
    };
    let figures = |line: LoopLine| figures(line, &whole.work, &paces, counted.as_ref());
    let loops = whole.loops.into_iter().map(figures).collect();
    let troubled = |line: &ProviderLine| line.error.is_some() || line.brake.is_some();
    View {
        at,
        phases: phases(&counts, counted.as_ref()),
        loops,
        work: whole.work,
        more_work: whole.more_work,
        brakes: whole.brakes,
        providers: whole.providers.into_iter().filter(troubled).collect(),
        counted_at: counted.map(|counted| counted.at),
        refused,
    }
}

/// Phases in the order in which the counts have them, over all providers.
fn phases(counts: &[ClassCount], counted: Option<&Counted>) -> Vec<PhaseLine> {
    let mut lines: Vec<PhaseLine> = Vec::new();
    for count in counts {
        if let Some(line) = lines.iter_mut().find(|line| line.phase == count.phase) {
            line.machines += count.machines;
            line.at_least |= count.at_least;
            continue;
        }
        let age = counted.and_then(|counted| counted.phases.iter().find(|age| age.phase == count.phase));
        lines.push(PhaseLine {
            phase: count.phase.clone(),
            machines: count.machines,
            at_least: count.at_least,
            oldest_seconds: age.map(|age| age.oldest_seconds),
            over_deadline: age.map(|age| age.over_deadline),
        });
    }
    lines
}

fn figures(line: LoopLine, work: &[WorkLine], paces: &[Pace], counted: Option<&Counted>) -> LoopFigures {
    let process = Process::ALL.into_iter().find(|process| Loop::of(*process).as_str() == line.of);
    let Some(process) = process.map(Process::as_str) else {
        return LoopFigures { line, under_way: 0, waiting: None, waiting_seconds: None, pace: None };
    };
    let backlog = counted.and_then(|counted| counted.waiting.iter().find(|of| of.process == process));
    let pace = paces.iter().find(|pace| pace.process == process).cloned();
    LoopFigures {
        line,
        under_way: work.iter().filter(|item| item.work.process == process).count(),
        waiting: backlog.map(|backlog| backlog.machines),
        waiting_seconds: backlog.map(|backlog| backlog.oldest_seconds),
        pace: Some(pace.unwrap_or_else(|| Pace { process: process.to_owned(), ..Pace::default() })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bmdb::statistics::{Backlog, PhaseAge};

    fn count(phase: &str, provider: &str, machines: i64) -> ClassCount {
        ClassCount {
            phase: phase.to_owned(),
            provider: provider.to_owned(),
            machines,
            at_least: machines > 9,
        }
    }

    fn statistics() -> Statistics {
        let at = Timestamp::UNIX_EPOCH;
        let age = PhaseAge { phase: "Ready".to_owned(), oldest_seconds: 90.0, over_deadline: 1 };
        let backlog = Backlog { process: "Recovery".to_owned(), machines: 7, oldest_seconds: 30.0 };
        let pace = Pace { process: "Recovery".to_owned(), finished: 4.0, ..Pace::default() };
        Statistics {
            counts: vec![count("Provided", "a", 1), count("Ready", "a", 10), count("Ready", "b", 2)],
            paces: vec![pace],
            counted: Some(Counted { at, phases: vec![age], waiting: vec![backlog] }),
            at,
        }
    }

    #[test]
    fn phases_are_of_all_providers_and_as_old_as_they_were_counted() {
        let lines = view(statistics(), Ok(Whole::default())).phases;
        let told: Vec<_> = lines
            .iter()
            .map(|line| (&*line.phase, line.machines, line.at_least, line.over_deadline))
            .collect();
        assert_eq!(told, [("Provided", 1, false, None), ("Ready", 12, true, Some(1))]);
    }

    #[test]
    fn figures_are_those_of_the_loops_own_process() {
        let line = |of: Loop| LoopLine { of: of.to_string(), workers: 1, pauses: Vec::new() };
        let whole = Whole { loops: Loop::ALL.map(line).to_vec(), ..Whole::default() };
        let loops = view(statistics(), Ok(whole)).loops;
        assert_eq!(loops.len(), Loop::ALL.len());
        for figures in loops {
            let recoverer = figures.line.of == "recoverer";
            assert_eq!(figures.waiting, recoverer.then_some(7), "{figures:?}");
            let finished = figures.pace.as_ref().map(|pace| pace.finished > 0.0);
            // These two take no work items.
            let has_process = !matches!(&*figures.line.of, "provisioner" | "cluster");
            assert_eq!(finished, has_process.then_some(recoverer), "{figures:?}");
        }
    }

    #[test]
    fn what_was_refused_is_said() {
        let view = view(statistics(), Err("is about the fleet as a whole".to_owned()));
        assert_eq!((view.phases.len(), view.loops.len()), (2, 0));
        assert_eq!(view.refused.as_deref(), Some("is about the fleet as a whole"));
    }
}
