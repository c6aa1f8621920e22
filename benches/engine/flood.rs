//! What a flood of connections without a credential costs operators: calls with and without it, in turns.

use std::time::Instant;

use anyhow::Result;
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD};

use crate::Plan;
use crate::fleet::Fleet;
use crate::reads::ApiFixture;
use crate::report::{Report, Target, progress, quantile};

/// Connections of a flood that send nothing, and those that send the beginning of a handshake.
const SILENT: usize = 1300;
const HALF_SPOKEN: usize = 1000;

/// Measures calls over new and over open connections, without a flood and beside one from one and from many sources.
pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "Operators beside a flood",
        "Calls of the API over TLS with a token, without a flood and beside one: 1,300 connections that send nothing and \
         1,000 that send the beginning of a handshake. A connection that is closed is opened again after a second.",
    )?;
    let api = ApiFixture::start(fleet).await?;
    for (name, sources) in [("no flood", 0), ("one source", 1), ("200 sources", 200)] {
        progress(&format!("calling the API beside {name}"))?;
        let target = api.server.local_addr;
        let flood = FloodPlan {
            target,
            sources,
            first_source: 0,
            silent: SILENT,
            half_spoken: HALF_SPOKEN,
            half: HALF_A_RECORD,
        };
        let flood = if sources > 0 { Some(Flood::start(&[flood]).await?) } else { None };
        let (mut over_new, mut over_open) = (Vec::new(), Vec::new());
        for _ in 0..plan.polls {
            let began = Instant::now();
            api.page_over_new_connection().await?;
            over_new.push(began.elapsed().as_secs_f64() * 1000.0);
            let began = Instant::now();
            api.page_over_open_connection().await?;
            over_open.push(began.elapsed().as_secs_f64() * 1000.0);
        }
        drop(flood);
        for (connection, took) in [("a new", over_new), ("an open", over_open)] {
            let call = format!("a call over {connection} connection, {name}");
            report.add(format!("{call}, median"), "ms", &[quantile(&took, 0.5)], Target::None)?;
            report.add(format!("{call}, 99 of 100 within"), "ms", &[quantile(&took, 0.99)], Target::None)?;
        }
    }
    api.stop.cancel();
    api.server.wait_until_stopped().await;
    Ok(())
}
