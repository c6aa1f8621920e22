//! `--wait` and `--timeout` of orders with work that continues after their answers.
//!
//! [`crate::wait::after_order`] waits. These flags are below it, because the arguments of such an order contain them.

use clap::Args;

use model::time::Span;

/// Flags of an order that can be waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct WaitFlags {
    /// Wait for the end of the work, and print each step; Ctrl-C ends the waiting and not the order
    #[arg(long)]
    pub wait: bool,
    /// How long to wait with --wait
    #[arg(long, value_name = "SPAN", default_value = "1h", requires = "wait")]
    pub timeout: Span,
}
