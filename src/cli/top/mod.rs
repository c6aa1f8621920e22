//! `top`: the fleet on one page that is drawn anew every few seconds.
//!
//! What is asked is little and bounded, however large the fleet is: counts by phase, how fast the loops get on, what
//! is under way for longest, and what somebody should look at. [`reader`] asks for it, through the API or straight in
//! the BMDB; [`page`] turns an answer into the parts of a page, [`draw`] lays those out on a terminal, and [`screen`]
//! is the terminal. Where there is none, or with `--once`, the same parts are printed as text, whole.
//!
//! An answer that fails while the page stands leaves the last one there and says so; the next server of the context is
//! asked then. A refusal ends it: whose token was revoked is not to look at an old page for ever.

use std::io::IsTerminal as _;

use clap::Args;

use crate::cli::error::CliError;
use crate::cli::get;
use crate::cli::output::{Format, Output, width};
use crate::cli::source::Source;
use crate::cli::top::reader::look;
use crate::model::time::Span;

pub mod draw;
pub mod page;
pub mod reader;
pub mod screen;

/// A page.
#[derive(Debug, Args)]
pub struct Top {
    /// How often the page is drawn anew, from 1s to 1h
    #[arg(long, value_name = "SPAN", default_value = "2s", value_parser = interval)]
    pub interval: Span,
    /// Print the page once, whole; so it is wherever standard output is no terminal
    #[arg(long)]
    pub once: bool,
}

fn interval(text: &str) -> Result<Span, String> {
    let span: Span = text.parse().map_err(|error| format!("{error}"))?;
    if span < Span::seconds(1) || span > Span::hours(1) {
        return Err("it is from 1s to 1h".to_owned());
    }
    Ok(span)
}

/// Whether it is drawn on a terminal, and not printed once.
#[must_use]
pub fn is_drawn(asked: &Top, output: Output) -> bool {
    output == Output::Table && !asked.once && std::io::stdout().is_terminal()
}

/// Draws it until whoever looks leaves.
pub async fn show(source: &Source, asked: &Top) -> Result<(), CliError> {
    screen::run(source.clone(), asked.interval.0).await
}

/// The page once.
pub async fn once(source: &Source, format: Format) -> Result<String, CliError> {
    let view = look(source).await?;
    match format {
        Format::Table => Ok(page::plain(&view, width())),
        Format::Json => get::json(&view),
    }
}
