//! `top`: live overview of the fleet, one page that is redrawn every few seconds.
//!
//! Besides the overview there are lists of machines and of clusters, and `why` of the machine that is selected. The page
//! gives no orders.
//!
//! The queries are small and bounded, however large the fleet is: counts by phase, throughput of the loops, the
//! longest running work, what needs attention, and a page of machines. [`fleet_summary`] and [`read`] fetch them, and
//! [`data`] is what was fetched. [`state`] is what the operator has selected and opened, and decides what a key does.
//! [`page`] turns the summary into sections. [`draw`] lays out what a state shows: sections, a list ([`list_page`]), or a
//! text ([`text_page`]). [`screen`] is the terminal. Without a terminal, or with `--once`, the sections are printed as text, in
//! full.
//!
//! If a fetch fails, the last page stays with a message, and the next fetch goes to the next server of the context. A
//! denied fetch ends the program: an operator whose token was revoked must not see an old page for ever.

use std::io::IsTerminal as _;

use clap::Args;

use crate::client::fleet_client::FleetClient;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::output::table::terminal_width;
use crate::output::{Format, Output, format_json};
use crate::top::fleet_summary::{fetch_document, fetch_summary};
use model::time::Span;

pub mod data;
pub mod draw;
pub mod fleet_summary;
pub mod list_page;
pub mod page;
pub mod read;
pub mod screen;
pub mod state;
pub mod text_page;

pub(crate) const TOP_EXAMPLES: &str = "\
Examples:
  shepherdctl top
  shepherdctl top --interval 10s
  shepherdctl top -o json | jq '.statistics.sample.phases[] | select(.pastDeadline != \"0\")'";

/// Arguments of `top`, which shows the fleet on one page.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Interval between two refreshes of the page, from 1s to 1h
    #[arg(long, value_name = "SPAN", default_value = "2s", value_parser = parse_interval)]
    pub interval: Span,
    /// Print the whole page once; the default if standard output is not a terminal
    #[arg(long)]
    pub once: bool,
}

fn parse_interval(text: &str) -> Result<Span, String> {
    let span: Span = text.parse().map_err(|error| format!("{error}"))?;
    if span < Span::seconds(1) || span > Span::hours(1) {
        return Err("the interval must be from 1s to 1h".to_owned());
    }
    Ok(span)
}

/// Whether to draw on a terminal instead of printing once.
#[must_use]
pub fn is_interactive(args: &TopArgs, output: &Output) -> bool {
    output.format() == Format::Table && !args.once && std::io::stdout().is_terminal()
}

/// Redraws the page until the operator quits. Commands in messages get the flags of the context.
pub(crate) async fn run_interactive(context: &CommandContext, args: &TopArgs) -> Result<(), CliError> {
    let (client, target_flags) = (context.client.clone(), context.target_flags.clone());
    screen::run_screen(client, args.interval.0, context.colors, target_flags).await
}

/// Prints the page once, as text, or the responses of the API that it is made of, as JSON.
pub async fn render_once(client: &FleetClient, format: Format) -> Result<String, CliError> {
    match format {
        Format::Table => Ok(page::render_text(&fetch_summary(client).await?, terminal_width())),
        Format::Json => format_json(&fetch_document(client).await?),
    }
}
