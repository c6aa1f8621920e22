//! Context of a command: the client, the output format, and the flags of its orders.
//!
//! [`crate::run`] builds it from the command line. A command that only reads takes its client and its format. A
//! command that gives orders takes the whole context: [`send_order`][] puts the flags into each order, and
//! [`CommandContext::format_outcome`] marks a dry run in its output. [`send_order`][] also records the exit code of each
//! order, and what the order has an effect on.
//!
//! [`send_order`]: crate::order::retry::send_order

use std::ffi::OsString;

use clap::ArgMatches;
use prost::{Message, Name};
use serde_json::Value;

use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::exit_code::ExitRecord;
use crate::object::document::ObjectDocument;
use crate::order::outcome::AffectedObjects;
use crate::order::{dry_run, idempotency_key};
use crate::output::color::SeverityColors;
use crate::output::{Format, Output, format_json};
use crate::target_flags::TargetFlags;

/// The flags that every order has, `--idempotency-key` and `--dry-run`.
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
    pub order_targets: AffectedObjects,
    /// The flags that name the fleet, for commands in messages.
    pub target_flags: TargetFlags,
    /// The colours of what is printed while the command runs; what it returns is coloured later.
    pub colors: SeverityColors,
    /// The arguments of the process, its own name first, for a command to repeat.
    pub arguments: Vec<OsString>,
}

impl CommandContext {
    /// Formats the outcome of an order: the response of the API as JSON, or `text` for people. A dry run is marked in
    /// both.
    pub fn format_outcome<M: Message + Name>(&self, response: &M, text: &str) -> Result<String, CliError> {
        self.format_document(text, || ObjectDocument::of_message(response).to_json())
    }

    /// Formats the outcome of a command that sent no order, as [`Self::format_outcome`] does. `answer` makes the JSON.
    pub fn format_document(
        &self,
        text: &str,
        answer: impl FnOnce() -> Result<Value, CliError>,
    ) -> Result<String, CliError> {
        let fleet = self.order_flags.dry_run.then(|| self.client.describe_fleet());
        match (self.format, fleet) {
            (Format::Json, None) => format_json(&answer()?),
            (Format::Json, Some(fleet)) => format_json(&dry_run::annotate_json(&fleet, answer()?)),
            (Format::Table, None) => Ok(format!("{text}\n")),
            (Format::Table, Some(fleet)) => Ok(format!("{}\n", dry_run::annotate_text(&fleet, text))),
        }
    }
}
