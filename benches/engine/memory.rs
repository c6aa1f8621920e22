//! What a whole shepherd holds in memory, with a fleet of simulated machines.
//!
//! A short form, in which no clock is looked at, is among the tests (`tests/all/small_memory.rs`). What the role
//! server holds on a machine is looked at by `make e2e-ssh`.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::Plan;
use crate::agents::allow_files;
use crate::report::{Report, Target, progress};
use crate::server::Server;
use crate::site::{PROGRAM_KIB, Site, SiteOptions};

/// What a shepherd with a steady fleet holds.
pub(crate) struct Steady {
    /// In MiB, at every second that it was looked at.
    held: Vec<f64>,
    /// Seconds until all machines were Ready.
    ready_after: f64,
}

/// Watches a shepherd with a fleet from its start to the end of the time that it is looked at.
pub(crate) async fn steady(plan: &Plan, server: &Server) -> Result<Steady> {
    let machines = plan.simulated;
    allow_files(u64::from(machines) * 8 + 1024)?;
    let lasts = plan.watched.1.as_secs();
    progress(&format!("a shepherd with {machines} simulated machines, watched for {lasts} s"))?;
    let site = Site::start(server, "memory_steady", &SiteOptions::new(machines, 10)).await?;
    site.until_ready(machines).await?;
    let ready_after = site.began.elapsed().as_secs_f64();
    let mut held = Vec::new();
    while site.began.elapsed() < plan.watched.1 {
        if site.began.elapsed() >= plan.watched.0 {
            held.push(site.shepherd.kibibytes("VmRSS:")? / 1024.0);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    site.end().await?;
    ensure!(!held.is_empty(), "all machines were Ready only after {ready_after} s");
    Ok(Steady { held, ready_after })
}

/// Tells what a steady shepherd held, and watches another one with all its uploads at once.
pub(crate) async fn measure(
    plan: &Plan,
    server: &Server,
    steady: &Steady,
    report: &mut Report,
) -> Result<()> {
    let machines = plan.simulated;
    report.section(
        "Memory of a shepherd",
        "The whole program with a fleet of simulated machines, every one of which is taken over and \
         heartbeats. Resident memory is looked at every second from the third to the fifth minute; meanwhile the fleets \
         of the other measurements are filled, which takes processor time from it and no memory. Then \
         another shepherd takes such a fleet over with a worker for each machine, so that all uploads of a \
         program of 8 MiB run at once; what it held at most is set against as many copies of the program.",
    )?;
    report.add("machines", "", &[f64::from(machines)], Target::None)?;
    report.add("until all are Ready, ten workers", "s", &[steady.ready_after], Target::None)?;
    let what = "resident memory of a shepherd, from the third to the fifth minute";
    report.add(what, "MiB", &steady.held, Target::AtMost(150.0))?;

    progress(&format!("{machines} uploads at once"))?;
    let site = Site::start(server, "memory_uploads", &SiteOptions::new(machines, machines)).await?;
    site.until_ready(machines).await?;
    let (ready_after, most) = (site.began.elapsed(), site.shepherd.kibibytes("VmHWM:")?);
    site.end().await?;
    report.add("until all are Ready, a worker each", "s", &[ready_after.as_secs_f64()], Target::None)?;
    report.add("most ever resident", "MiB", &[most / 1024.0], Target::None)?;
    let copies = most / (f64::from(PROGRAM_KIB) * f64::from(machines));
    let what =
        format!("most ever resident with {machines} uploads at once, against as many copies of the program");
    report.add(what, "×", &[copies], Target::AtMost(0.25))
}
