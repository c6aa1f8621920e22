//! Context of a command: the client, the output format, and the flags of its orders.
//!
//! [`crate::run`] builds it from the command line. A command that only reads takes its client and its format. A
//! command that gives orders takes the whole context: [`send_order`][] puts the flags into each order, and
//! [`CommandContext::format_outcome`] marks a dry run in its output. [`send_order`][] also records the exit code of each
//! order, and what the order has an effect on.
//!
//! [`send_order`]: crate::order::retry::send_order

use clap::ArgMatches;
use serde_json::Value;

use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::exit_code::ExitRecord;
use crate::order::outcome::OrderTargets;
use crate::order::{dry_run, idempotency_key};
use crate::output::{Format, Output, format_json};

/// The flags that every order has, `--idempotency_key` and `--dry_run`.
#[derive(Clone, Debug, Default)]
pub struct OrderFlags {
    /// The explicit idempotency key; `None` for a random one per order.
    pub idempotency_key: Option<String>,
    /// Whether orders are decided without changing anything.
    pub dry_run: bool,
}

impl OrderFlags {
    /// The flags of a command line.
    #[must_use]
    pub fn from_matches(matches: &ArgMatches) -> Self {
        Self { idempotency_key: idempotency_key::find_key(matches), dry_run: dry_run::is_given(matches) }
    }
}

/// What a command gets besides its arguments.
pub struct CommandContext {
    /// The client of the fleet API.
    pub client: FleetClient,
    /// The output that the command line requests.
    pub output: Output,
    /// The format in which the command renders it.
    pub format: Format,
    /// The flags of the orders that the command gives.
    pub order_flags: OrderFlags,
    /// The exit code of what the command has done.
    pub exit_record: ExitRecord,
    /// What the orders of the command have an effect on.
    pub order_targets: OrderTargets,
}

impl CommandContext {
    /// Formats the outcome of an order: `answer` as JSON, or `text` for people. A dry run is marked in both.
    pub fn format_outcome(&self, answer: Value, text: &str) -> Result<String, CliError> {
        let dry_run = self.order_flags.dry_run;
        match self.format {
            Format::Json => format_json(&dry_run::annotate_json(dry_run, answer)),
            Format::Table => Ok(format!("{}\n", dry_run::annotate_text(dry_run, text))),
        }
    }
}
