//! `why`: explain the state of one machine.
//!
//! [`model::why`] derives the explanation. This module fetches and prints it.

use clap::Args;

use crate::client::decode::{
    decode_machine_name, decode_timestamp, phase_name, process_name, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::selection::MachineArg;
use crate::object::document::format_message;
use crate::output::Format;
use crate::output::table::terminal_width;
use model::why::recent::{PowerSwitch, RecentRecovery};
use model::why::render::{ExplanationDetail, render_explanation};
use model::why::{Advice, Deadline, Explanation, NextWork, ProcessFailure};
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::{self, WhyRequest};

pub(crate) const WHY_EXAMPLES: &str = "\
Examples:
  shepherdctl why sim-0007
  shepherdctl why rack-a/sim-0007 --context prod
  shepherdctl why sim-0007 --verbose            where in the code it was decided, too";

/// Arguments of `why`: the machine, and how much to show.
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// The machine to explain.
    #[command(flatten)]
    pub machine: MachineArg,
    /// Show where in the code the decision was made, too
    #[arg(short, long)]
    pub verbose: bool,
}

/// Runs `why M`: explains the state of a machine.
pub async fn show_explanation(
    client: &FleetClient,
    args: &WhyArgs,
    format: Format,
) -> Result<String, CliError> {
    let response = request_explanation(client, &args.machine.machine).await?;
    match format {
        Format::Json => format_message(&response),
        Format::Table => {
            let why = decode_explanation(response)?;
            let detail = if args.verbose { ExplanationDetail::Full } else { ExplanationDetail::Short };
            Ok(render_explanation(&why, terminal_width(), detail))
        }
    }
}

/// Fetches the explanation of a machine's state. `machine` is any name that the API resolves.
pub(crate) async fn fetch_explanation(client: &FleetClient, machine: &str) -> Result<Explanation, CliError> {
    decode_explanation(request_explanation(client, machine).await?)
}

async fn request_explanation(client: &FleetClient, machine: &str) -> Result<v1::WhyResponse, CliError> {
    let request = WhyRequest { machine: machine.to_owned() };
    let response = MachinesClient::new(client.channel()).why(request).await.map_err(status_to_error)?;
    Ok(response.into_inner())
}

/// Decodes the explanation of a machine's state.
fn decode_explanation(response: v1::WhyResponse) -> Result<Explanation, CliError> {
    Ok(Explanation {
        name: decode_machine_name(response.name)?,
        phase: phase_name(&response.phase),
        since: response.since.and_then(decode_timestamp),
        at: require_timestamp(response.read_at, "its read time")?,
        waits_for: response.waits_for,
        obstacle: response.obstacle,
        decided_at: response.decided_at,
        next: match response.next {
            None => None,
            Some(next) => Some(NextWork {
                process: process_name(&next.process),
                at: require_timestamp(next.at, "the time of the next work")?,
                timer: next.timer,
            }),
        },
        deadline: match response.deadline {
            None => None,
            Some(deadline) => Some(Deadline {
                at: require_timestamp(deadline.at, "a deadline")?,
                consequence: deadline.consequence,
            }),
        },
        failures: response
            .failures
            .into_iter()
            .map(|failure| {
                Ok(ProcessFailure {
                    process: process_name(&failure.process),
                    count: failure.count,
                    cause: failure.cause,
                    until: require_timestamp(failure.until, "the end of a wait")?,
                    next_wait_seconds: failure.next_wait_seconds,
                })
            })
            .collect::<Result<_, CliError>>()?,
        work: response.work,
        notes: response.notes,
        advice: response
            .advice
            .into_iter()
            .map(|advice| Advice { command: advice.command, when: advice.when })
            .collect(),
        recovery: match response.recovery {
            None => None,
            Some(recovery) => Some(RecentRecovery {
                ended_at: require_timestamp(recovery.ended_at, "the end of a recovery")?,
                step: recovery.step,
            }),
        },
        power: match response.power {
            None => None,
            Some(switch) => Some(PowerSwitch {
                kind: switch.kind,
                ordered_by: switch.ordered_by,
                carried_out_at: require_timestamp(
                    switch.carried_out_at,
                    "the time when an order was carried out",
                )?,
                reported: switch.reported,
            }),
        },
    })
}
