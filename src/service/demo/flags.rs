//! Flags of `shepherd demo`.

use std::path::PathBuf;

use clap::Args;

use crate::model::time::Span;
use crate::simulator::faults::FaultProfile;

/// How the demo is run.
#[expect(clippy::doc_markdown, reason = "the documentation of each is its help text, which shows no marks")]
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DemoFlags {
    /// Number of machines, 1 to 2000.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub machines: u32,
    /// Faults that occur by themselves.
    #[arg(long, value_enum, ignore_case = true, value_name = "PROFILE", default_value = "none")]
    pub faults: FaultProfile,
    /// Seed of all random numbers of the simulated machines: the same seed makes the same fleet.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Stop when every machine is Ready, with exit code 0; or after --ready_timeout, with exit code 1 and what the
    /// rest waits for.
    #[arg(long)]
    pub until_ready: bool,
    /// How long --until_ready waits until every machine is Ready, counted from the start of the fleet.
    #[arg(long, value_name = "SPAN", default_value = "15m")]
    pub ready_timeout: Span,
    /// Store machines and database in DIR, and continue with them next time. [default: new ones each time]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Begin with new machines, even if --state_dir contains others.
    #[arg(long)]
    pub fresh: bool,
    /// Program that puts shepherdctl beside this one. It is run when the fleet has started, and awaited before the
    /// commands of shepherdctl are printed.
    #[arg(long, value_name = "PROGRAM", hide = true)]
    pub build_shepherdctl: Option<PathBuf>,
}
