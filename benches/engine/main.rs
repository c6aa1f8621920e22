//! Measures what the engine costs, relative to what the same server can do at most.
//!
//! `make bench` prints the numbers that the design promises to hold, on a private PostgreSQL of this
//! host, and writes them into `BENCHMARKS.md` with the host, the versions and plots of how they grow
//! with the fleet. A millisecond of one host says nothing about another one, so what is promised are
//! ratios of things measured in turns in one run: our claim and finish against pgbench's plain
//! two-insert commits, a claim on a large fleet against one on a small fleet, and both against the
//! query that reads the facts themselves.
//!
//! Everything is measured through the library as a shepherd uses it. A number that is not reached is
//! printed like any other, and says so, with what was tried.
//!
//! `--compare` measures the same work done by two queues of the same kind instead (`compare`).

mod agents;
mod compare;
mod cycles;
mod fleet;
mod flood;
mod heartbeats;
mod images;
mod lists;
mod long_snapshot;
mod memory;
mod pickup;
mod plot;
mod polls;
mod reads;
mod report;
mod server;
mod site;
mod watchers;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;

use crate::fleet::Fleet;
use crate::report::{Page, Report};
use crate::server::Server;

/// How much is measured.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
#[derive(Clone, Debug, Parser)]
#[command(name = "engine", about = "Measure the engine on a private PostgreSQL of this host")]
struct BenchFlags {
    /// Small fleets and short runs: shows that it works, and measures nothing.
    #[arg(long)]
    quick: bool,
    /// Heartbeats for five minutes, and everything else more often.
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// How often each number is measured, in turns with the others.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: Option<u32>,
    /// The memory of a whole shepherd, and nothing else.
    #[arg(long)]
    memory: bool,
    /// One part, and nothing else. Flood, lists and watchers have pages of their own; no other part takes the place of one.
    #[arg(long, value_enum, conflicts_with_all = ["memory", "compare"])]
    part: Option<Part>,
    /// Two queues of Node.js (graphile-worker, pg-boss) beside the engine, and nothing else; installs them below
    /// target/.
    #[arg(long, conflicts_with = "memory")]
    compare: bool,
    /// Where BENCHMARKS.md and docs/benchmarks/ are written. [default: here; with --quick, --memory or most parts
    /// nowhere]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Be the agents that are measured, as this file says.
    #[arg(long, hide = true, value_name = "FILE")]
    agents: Option<PathBuf>,
    /// Be the flood beside which is measured, as this JSON says.
    #[arg(long, hide = true, value_name = "JSON")]
    flooder: Option<String>,
    /// Given by `cargo bench` to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Sizes and times of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// How often each number is measured.
    pub(crate) repetitions: u32,
    /// Machines of each fleet, smallest first.
    pub(crate) fleets: Vec<u32>,
    /// The fleet that cycles, the anti-join and heartbeats are measured on.
    pub(crate) main_fleet: u32,
    /// How long one run of pgbench takes.
    pub(crate) floor: Duration,
    /// Polls of one measurement of a poll.
    pub(crate) polls: u32,
    /// Machines of one measurement of cycles where each client holds one; more where it holds more.
    pub(crate) cycles: u32,
    /// Machines released one after the other to see how soon they are picked up.
    pub(crate) releases: u32,
    /// Jobs of one measurement of another queue, and machines of ours beside it.
    pub(crate) jobs: u32,
    /// How long heartbeats come.
    pub(crate) heartbeats: Duration,
    /// Number of real agent processes.
    pub(crate) agents: u32,
    /// How long they are watched.
    pub(crate) agents_for: Duration,
    /// Simulated machines of a whole shepherd.
    pub(crate) simulated: u32,
    /// From when until when its memory is looked at.
    pub(crate) watched: (Duration, Duration),
    /// Nodes that watch a curator, fewest first.
    pub(crate) watchers: Vec<usize>,
    /// Changes that the watchers receive, for each number of watchers.
    pub(crate) changes: u32,
    /// How long the idle cost of the curator is measured before the changes, which it is subtracted from.
    pub(crate) watchers_rest: Duration,
    /// Objects in the etcd of which an image is taken, of a quarter of a MiB each.
    pub(crate) image_objects: u32,
}

/// What can be measured by itself, while it is worked on.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    /// Cycles of work against plain commits, with and without waiting for a disk.
    Cycles,
    /// A snapshot held for a minute at full rate.
    Held,
    /// Heartbeats, calls of operators and claims beside a flood of connections.
    Flood,
    /// An image of the etcd of a cluster, taken and restored.
    Images,
    /// Lists of a large fleet that `shepherdctl` prints.
    Lists,
    /// What operators ask.
    Reads,
    /// Nodes of a cluster that watch their curator.
    Watchers,
}

impl Plan {
    fn of(flags: &BenchFlags) -> Self {
        let mut plan = Self {
            repetitions: 5,
            fleets: vec![1_000, 10_000, 100_000, 1_000_000],
            main_fleet: 100_000,
            floor: Duration::from_secs(5),
            polls: 300,
            cycles: 2_000,
            releases: 100,
            jobs: 5_000,
            heartbeats: Duration::from_mins(1),
            agents: 2_000,
            agents_for: Duration::from_secs(40),
            simulated: 1_000,
            watched: (Duration::from_mins(2), Duration::from_mins(5)),
            watchers: vec![10, 100, 1_000],
            changes: 200,
            watchers_rest: Duration::from_secs(20),
            image_objects: 4_096,
        };
        if flags.full {
            plan.repetitions = 9;
            plan.heartbeats = Duration::from_mins(5);
        }
        if flags.quick {
            plan = Self {
                repetitions: 2,
                fleets: vec![500, 2_000],
                main_fleet: 2_000,
                floor: Duration::from_secs(1),
                polls: 20,
                cycles: 100,
                releases: 5,
                jobs: 100,
                heartbeats: Duration::from_secs(3),
                agents: 50,
                agents_for: Duration::from_secs(3),
                simulated: 30,
                watched: (Duration::from_secs(3), Duration::from_secs(30)),
                watchers: vec![2, 10],
                changes: 5,
                watchers_rest: Duration::from_secs(1),
                image_objects: 64,
            };
        }
        plan.repetitions = flags.repetitions.unwrap_or(plan.repetitions);
        plan
    }
}

fn main() -> ExitCode {
    // An error means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let flags = BenchFlags::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ran =
        runtime.context("starting the runtime").and_then(|runtime| match (&flags.agents, &flags.flooder) {
            (Some(crew), _) => runtime.block_on(agents::run(crew)),
            (None, Some(order)) => runtime.block_on(flood::run(order)),
            (None, None) => runtime.block_on(run(&flags)),
        });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell if this fails.
            let _ = writeln!(std::io::stderr(), "bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

const NUMBERS: Page = Page {
    path: "BENCHMARKS.md",
    title: "What the engine costs",
    introduction: "Shepherd keeps bare-metal servers useful: its processes share one PostgreSQL, in which each machine's next \
                   work is a row that says when it is due. A process *claims* due rows under a lease with a fence, does the \
                   work, and *finishes* it by writing what it learnt and when the machine is due next. This page says what \
                   that costs, against what the same server can do at all.\n\n\
                   A millisecond of one host says nothing about another one. So what is promised are mostly ratios of things \
                   that were measured in turns, in one run, on one host: our cycles against `pgbench`'s plain commits, a claim \
                   in a large fleet against one in a small fleet, and both against the query that would look for work \
                   without a schedule. Each number is a median with the least and the most that was measured; \
                   where a target is not reached it says so.\n\n\
                   Written by `make bench`; `benches/engine/` says how each number is made. `make bench ARGS=--full` takes longer, \
                   `make bench-compare` measures two other queues on the same server, and `make bench ARGS='--part watchers'` what \
                   nodes of a cluster cost [that watch their curator](docs/benchmarks/watchers.md). \
                   `make bench ARGS='--part flood'` measures [operators beside a flood](docs/benchmarks/flood.md) of connections.",
};

const WATCHERS: Page = Page {
    path: "docs/benchmarks/watchers.md",
    title: "Nodes that watch their curator",
    introduction: "Every node of a cluster watches what becomes of it, through the curator that leads, and sends heartbeats. \
                   This page shows what one change of a node costs that curator, the etcd beside it and each watcher, \
                   with ten, a hundred and a thousand light clients: processes are real, only the nodes are not. \
                   Written by `make bench ARGS='--part watchers'`; `benches/engine/watchers.rs` says how.",
};

const FLOOD: Page = Page {
    path: "docs/benchmarks/flood.md",
    title: "Operators beside a flood",
    introduction: "Anyone who reaches a port can open connections without a credential. This page shows what such a flood costs \
                   agents that send heartbeats, operators that call the API, health checks, and loops that claim machines: \
                   how long each waits without a flood and beside one, from one source and from 200. \
                   Written by `make bench ARGS='--part flood'`; `benches/engine/flood.rs` says how.",
};

const LISTS: Page = Page {
    path: "docs/benchmarks/lists.md",
    title: "Lists of a large fleet",
    introduction: "`shepherdctl` prints whole lists, in pages of 500. This page shows how long the commands take that list or sort \
                   a hundred thousand machines, and how much memory they need. \
                   Written by `make bench ARGS='--part lists'`; `benches/engine/lists.rs` says how.",
};

const COMPARED: Page = Page {
    path: "docs/benchmarks/compared.md",
    title: "Beside two other queues",
    introduction: "Written by `make bench-compare`. What is compared is not the same thing, and the table must not be read \
                   as if it were: see the text above it.",
};

async fn run(flags: &BenchFlags) -> Result<()> {
    let plan = Plan::of(flags);
    if flags.compare {
        // Before a server is started for it.
        compare::install().await?;
    }
    let began = Instant::now();
    let server = Server::start().await?;
    let mut report = Report::new(server.versions().await?, !flags.quick);
    let measured = match flags {
        BenchFlags { compare: true, .. } => compare::measure(&plan, &server, &mut report).await,
        BenchFlags { memory: true, .. } => match memory::steady(&plan, &server).await {
            Ok(steady) => memory::measure(&plan, &server, &steady, &mut report).await,
            Err(error) => Err(error),
        },
        BenchFlags { part: Some(part), .. } => measure_part(*part, &plan, &server, &mut report).await,
        _ => Box::pin(measure(&plan, &server, &mut report)).await,
    };
    server.stop().await?;
    measured?;
    report.say("took", format!("{} minutes", began.elapsed().as_secs().div_ceil(60)));
    let page = match flags {
        BenchFlags { compare: true, .. } => COMPARED,
        BenchFlags { part: Some(Part::Flood), .. } => FLOOD,
        BenchFlags { part: Some(Part::Lists), .. } => LISTS,
        BenchFlags { part: Some(Part::Watchers), .. } => WATCHERS,
        _ => NUMBERS,
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match (&flags.output, flags.quick) {
        (Some(directory), _) => report.write(directory, &page)?,
        // A part would take the place of the whole.
        (None, false) if !flags.memory && has_page(flags.part) => {
            report.write(root, &page)?;
        }
        (None, _) => {}
    }
    Ok(())
}

/// Whether what is measured has a page of its own: everything, and some of the parts.
const fn has_page(part: Option<Part>) -> bool {
    matches!(part, None | Some(Part::Flood | Part::Lists | Part::Watchers))
}

async fn fill(plan: &Plan, server: &Server) -> Result<Vec<Fleet>> {
    let mut fleets = Vec::new();
    for machines in plan.fleets.iter().copied() {
        report::progress(&format!("filling a fleet of {machines} machines"))?;
        fleets.push(Fleet::fill(server, machines).await?);
    }
    Ok(fleets)
}

async fn measure_part(part: Part, plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    match part {
        Part::Held => long_snapshot::measure(plan, server, report).await,
        Part::Cycles => {
            let fleet = Fleet::fill(server, plan.main_fleet).await?;
            let measured = cycles::measure(plan, server, &fleet, report).await;
            fleet.close().await?;
            measured?;
            cycles::measure_durable(plan, report).await
        }
        Part::Flood => {
            let fleet = Fleet::fill(server, plan.fleets.first().copied().unwrap_or(plan.main_fleet)).await?;
            let measured = Box::pin(flood::measure(plan, &fleet, report)).await;
            fleet.close().await?;
            measured
        }
        Part::Lists => {
            let fleet = Fleet::fill(server, plan.main_fleet).await?;
            let measured = lists::measure(plan, &fleet, report).await;
            fleet.close().await?;
            measured
        }
        Part::Reads => {
            let fleet = Fleet::fill(server, plan.main_fleet).await?;
            let measured = reads::measure(plan, &fleet, report).await;
            fleet.close().await?;
            measured
        }
        Part::Images => images::measure(plan, server, report).await,
        Part::Watchers => watchers::measure(plan, report).await,
    }
}

async fn measure(plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    // What is watched for five minutes is memory, which filling tables does not change.
    let (steady, fleets) = tokio::try_join!(memory::steady(plan, server), fill(plan, server))?;
    polls::measure(plan, &fleets, report).await?;
    let main_fleet = fleets.iter().find(|fleet| fleet.machines == plan.main_fleet);
    let fleet = main_fleet.context("the main fleet is one of the fleets")?;
    // Before what uses much memory in passing: what is given back is not seen to grow.
    agents::measure(plan, fleet, report).await?;
    cycles::measure(plan, server, fleet, report).await?;
    cycles::measure_durable(plan, report).await?;
    pickup::measure(plan, fleet, report).await?;
    heartbeats::measure(plan, server, fleet, report).await?;
    reads::measure(plan, fleet, report).await?;
    for fleet in fleets {
        fleet.close().await?;
    }
    long_snapshot::measure(plan, server, report).await?;
    memory::measure(plan, server, &steady, report).await?;
    images::measure(plan, server, report).await
}
