//! Fetch the summary that `top` shows.

use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::loops::{LoopSummary, decode_loop};
use crate::object::document::ObjectDocument;
use crate::providers::{decode_brake, decode_provider};
use crate::target_flags::TargetFlags;
use crate::work::decode_work;
use bmdb::fleet::provider::ProviderSummary;
use bmdb::fleet::sessions::WorkSummary;
use bmdb::fleet::statistics::{
    Backlog, ClassCount, PhaseAge, ProcessThroughput, SampledStatistics, Statistics,
};
use model::machine_view::EngagedBrake;
use model::pause::LoopKind;
use model::process::Process;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::loops_client::LoopsClient;
use proto::fleet::v1::providers_client::ProvidersClient;
use proto::fleet::v1::statistics_client::StatisticsClient;
use proto::fleet::v1::work_client::WorkClient;

/// Most work items to fetch: as many as one response contains.
const MAX_WORK: u32 = 500;

/// The data of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetSummary {
    /// When the data was read.
    pub at: Timestamp,
    /// Phases that contain machines.
    pub phases: Vec<PhaseSummary>,
    /// Every control loop, with its figures.
    pub loops: Vec<LoopStats>,
    /// Work items in progress, longest running first.
    pub work: Vec<WorkSummary>,
    /// Whether there are more work items than are listed.
    pub more_work: bool,
    /// Brakes that are engaged.
    pub brakes: Vec<EngagedBrake>,
    /// Providers whose last call failed, or where a brake stops the creation of machines.
    pub providers: Vec<ProviderSummary>,
    /// When ages and backlogs were sampled, which happens once a minute.
    pub counted_at: Option<Timestamp>,
    /// Why the credential may not see the fleet as a whole, in the words of the API; `None` if it may.
    pub not_permitted: Option<String>,
}

impl FleetSummary {
    /// Adds these flags to the commands in sentences of the API, for a page that people read. Reasons that people gave stay
    /// as they are.
    pub(super) fn qualify_commands(&mut self, target_flags: &TargetFlags) {
        let brakes = self.brakes.iter_mut().map(|brake| &mut brake.reason);
        let providers = self
            .providers
            .iter_mut()
            .flat_map(|provider| [provider.error.as_mut(), provider.brake.as_mut()].into_iter().flatten());
        for sentence in brakes.chain(providers).chain(self.not_permitted.as_mut()) {
            *sentence = target_flags.qualify(sentence);
        }
    }
}

/// Number of machines in one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseSummary {
    /// Name of the phase.
    pub phase: String,
    /// Number of machines in the phase.
    pub machines: i64,
    /// Whether `machines` is a lower bound.
    pub at_least: bool,
    /// Longest time that a machine has been in this phase, in seconds, at the last sample.
    pub oldest_seconds: Option<f64>,
    /// Machines past the deadline of what they wait for, at the last sample.
    pub over_deadline: Option<i64>,
}

/// Figures of one control loop.
#[derive(Clone, Debug, PartialEq)]
pub struct LoopStats {
    /// Name, workers and pauses of the loop.
    pub summary: LoopSummary,
    /// Its work items in progress, among those in the list.
    pub under_way: usize,
    /// Machines whose work is due and waits for a worker, at the last sample.
    pub waiting: Option<i64>,
    /// Longest time that one of them has waited, in seconds.
    pub waiting_seconds: Option<f64>,
    /// Throughput in the last minute; `None` for a loop whose work is not about one machine.
    pub throughput: Option<ProcessThroughput>,
}

/// Data that only a credential for the fleet as a whole may read.
#[derive(Default)]
struct FleetDetails {
    loops: Vec<LoopSummary>,
    work: Vec<WorkSummary>,
    more_work: bool,
    brakes: Vec<EngagedBrake>,
    providers: Vec<ProviderSummary>,
}

/// Fetches the summary once.
pub async fn fetch_summary(client: &FleetClient) -> Result<FleetSummary, CliError> {
    let statistics = decode_statistics(fetch_statistics(client).await?)?;
    let whole = match fetch_details(client).await {
        Ok(answers) => Ok(decode_details(answers)?),
        // A credential for some providers still sees the counts of their machines.
        Err(status) if status.code() == Code::PermissionDenied => Err(status.message().to_owned()),
        Err(status) => return Err(status_to_error(status)),
    };
    Ok(build_summary(statistics, whole))
}

/// Fetches the responses of which the summary is made, each as the API sends it. Without a credential for the fleet as
/// a whole there are only the statistics, and the reason.
pub(super) async fn fetch_document(client: &FleetClient) -> Result<Value, CliError> {
    let statistics = ObjectDocument::of_message(&fetch_statistics(client).await?).to_json()?;
    let (loops, work, providers) = match fetch_details(client).await {
        Ok(responses) => responses,
        Err(status) if status.code() == Code::PermissionDenied => {
            return Ok(json!({ "statistics": statistics, "notPermitted": status.message() }));
        }
        Err(status) => return Err(status_to_error(status)),
    };
    Ok(json!({
        "statistics": statistics,
        "loops": ObjectDocument::of_message(&loops).to_json()?,
        "work": ObjectDocument::of_message(&work).to_json()?,
        "providers": ObjectDocument::of_message(&providers).to_json()?,
    }))
}

async fn fetch_statistics(client: &FleetClient) -> Result<v1::GetStatisticsResponse, CliError> {
    let result = StatisticsClient::new(client.channel()).get(v1::GetStatisticsRequest {}).await;
    Ok(result.map_err(status_to_error)?.into_inner())
}

type FleetResponses = (v1::ListLoopsResponse, v1::ListWorkResponse, v1::ListProvidersResponse);

async fn fetch_details(client: &FleetClient) -> Result<FleetResponses, Status> {
    let loops = LoopsClient::new(client.channel()).list(v1::ListLoopsRequest {}).await?.into_inner();
    let request = v1::ListWorkRequest { page_size: page_size(Some(MAX_WORK), 0), page_token: String::new() };
    let work = WorkClient::new(client.channel()).list(request).await?.into_inner();
    let request = v1::ListProvidersRequest {};
    let providers = ProvidersClient::new(client.channel()).list(request).await?.into_inner();
    Ok((loops, work, providers))
}

fn decode_details((loops, work, providers): FleetResponses) -> Result<FleetDetails, CliError> {
    Ok(FleetDetails {
        loops: loops.loops.into_iter().map(decode_loop).collect::<Result<_, _>>()?,
        work: work.work.into_iter().map(decode_work).collect::<Result<_, _>>()?,
        more_work: work.more,
        brakes: providers.brakes.into_iter().map(decode_brake).collect::<Result<_, _>>()?,
        providers: providers.providers.into_iter().map(decode_provider).collect(),
    })
}

/// Decodes the statistics of the fleet.
fn decode_statistics(response: v1::GetStatisticsResponse) -> Result<Statistics, CliError> {
    let counts = response.counts.into_iter().map(|count| {
        let v1::PhaseCount { phase, provider, machines, is_lower_bound: at_least } = count;
        ClassCount { phase, provider, machines, at_least }
    });
    let paces = response.throughput.into_iter().map(|pace| {
        let v1::ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds } =
            pace;
        ProcessThroughput { process, finished, failed, postponed: put_off, lost, mean_seconds }
    });
    Ok(Statistics {
        counts: counts.collect(),
        throughput: paces.collect(),
        sampled: response.sample.map(decode_sampled_statistics).transpose()?,
        at: require_timestamp(response.read_at, "its read time")?,
    })
}

fn decode_sampled_statistics(count: v1::FleetSample) -> Result<SampledStatistics, CliError> {
    let phases = count.phases.into_iter().map(|of| PhaseAge {
        phase: of.phase,
        oldest_seconds: of.oldest_seconds,
        over_deadline: of.past_deadline,
    });
    let waiting = count.backlogs.into_iter().map(|of| Backlog {
        process: of.process,
        machines: of.machines,
        oldest_seconds: of.oldest_seconds,
    });
    let at = require_timestamp(count.sampled_at, "the time when the fleet was counted")?;
    Ok(SampledStatistics { at, phases: phases.collect(), backlogs: waiting.collect() })
}

/// Combines the responses into a page. The page leaves out what was denied, and names the reason.
fn build_summary(statistics: Statistics, whole: Result<FleetDetails, String>) -> FleetSummary {
    let Statistics { counts, throughput: paces, sampled: counted, at } = statistics;
    let (whole, refused) = match whole {
        Ok(whole) => (whole, None),
        Err(refused) => (FleetDetails::default(), Some(refused)),
    };
    let figures = |line: LoopSummary| loop_stats(line, &whole.work, &paces, counted.as_ref());
    let loops = whole.loops.into_iter().map(figures).collect();
    let troubled = |line: &ProviderSummary| line.error.is_some() || line.brake.is_some();
    FleetSummary {
        at,
        phases: summarize_phases(&counts, counted.as_ref()),
        loops,
        work: whole.work,
        more_work: whole.more_work,
        brakes: whole.brakes,
        providers: whole.providers.into_iter().filter(troubled).collect(),
        counted_at: counted.map(|counted| counted.at),
        not_permitted: refused,
    }
}

/// Phases in the order of the counts, summed over all providers.
fn summarize_phases(counts: &[ClassCount], counted: Option<&SampledStatistics>) -> Vec<PhaseSummary> {
    let mut lines: Vec<PhaseSummary> = Vec::new();
    for count in counts {
        if let Some(line) = lines.iter_mut().find(|line| line.phase == count.phase) {
            line.machines += count.machines;
            line.at_least |= count.at_least;
            continue;
        }
        let age = counted.and_then(|counted| counted.phases.iter().find(|age| age.phase == count.phase));
        lines.push(PhaseSummary {
            phase: count.phase.clone(),
            machines: count.machines,
            at_least: count.at_least,
            oldest_seconds: age.map(|age| age.oldest_seconds),
            over_deadline: age.map(|age| age.over_deadline),
        });
    }
    lines
}

fn loop_stats(
    line: LoopSummary,
    work: &[WorkSummary],
    paces: &[ProcessThroughput],
    counted: Option<&SampledStatistics>,
) -> LoopStats {
    let process =
        Process::ALL.into_iter().find(|process| LoopKind::for_process(*process).as_str() == line.name);
    let Some(process) = process.map(Process::as_str) else {
        return LoopStats {
            summary: line,
            under_way: 0,
            waiting: None,
            waiting_seconds: None,
            throughput: None,
        };
    };
    let backlog = counted.and_then(|counted| counted.backlogs.iter().find(|of| of.process == process));
    let pace = paces.iter().find(|pace| pace.process == process).cloned();
    LoopStats {
        summary: line,
        under_way: work.iter().filter(|item| item.work.process == process).count(),
        waiting: backlog.map(|backlog| backlog.machines),
        waiting_seconds: backlog.map(|backlog| backlog.oldest_seconds),
        throughput: Some(pace.unwrap_or_else(|| ProcessThroughput {
            process: process.to_owned(),
            ..ProcessThroughput::default()
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let pace = ProcessThroughput {
            process: "Recovery".to_owned(),
            finished: 4.0,
            ..ProcessThroughput::default()
        };
        Statistics {
            counts: vec![count("Provided", "a", 1), count("Ready", "a", 10), count("Ready", "b", 2)],
            throughput: vec![pace],
            sampled: Some(SampledStatistics { at, phases: vec![age], backlogs: vec![backlog] }),
            at,
        }
    }

    #[test]
    fn phases_sum_over_providers_with_sampled_ages() {
        let lines = build_summary(statistics(), Ok(FleetDetails::default())).phases;
        let reported: Vec<_> = lines
            .iter()
            .map(|line| (&*line.phase, line.machines, line.at_least, line.over_deadline))
            .collect();
        assert_eq!(reported, [("Provided", 1, false, None), ("Ready", 12, true, Some(1))]);
    }

    #[test]
    fn loop_stats_cover_the_loops_own_process() {
        let line = |of: LoopKind| LoopSummary { name: of.to_string(), workers: 1, pauses: Vec::new() };
        let whole = FleetDetails { loops: LoopKind::ALL.map(line).to_vec(), ..FleetDetails::default() };
        let loops = build_summary(statistics(), Ok(whole)).loops;
        assert_eq!(loops.len(), LoopKind::ALL.len());
        for figures in loops {
            let recoverer = figures.summary.name == "recoverer";
            assert_eq!(figures.waiting, recoverer.then_some(7), "{figures:?}");
            let finished = figures.throughput.as_ref().map(|pace| pace.finished > 0.0);
            // These two loops claim no work items.
            let has_process = !matches!(&*figures.summary.name, "provisioner" | "cluster");
            assert_eq!(finished, has_process.then_some(recoverer), "{figures:?}");
        }
    }

    #[test]
    fn denied_details_are_reported() {
        let view = build_summary(statistics(), Err("is about the fleet as a whole".to_owned()));
        assert_eq!((view.phases.len(), view.loops.len()), (2, 0));
        assert_eq!(view.not_permitted.as_deref(), Some("is about the fleet as a whole"));
    }
}
