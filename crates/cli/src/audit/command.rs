//! `audit`: prints the newest orders.

use clap::Args;

use crate::audit::list::{AuditListArgs, list_audit};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::command::GetArgs;
use crate::object::get::print_objects;
use crate::output::{Format, print_stderr};

/// Number of orders that a table has without `--limit`.
const DEFAULT_LINES: u32 = 100;

pub(crate) const AUDIT_EXAMPLES: &str = "\
Examples:
  shepherdctl audit --actor kim --since 2h      what kim ordered within the last two hours
  shepherdctl audit --rpc retire --machine sim-0007
  shepherdctl audit --limit 50 -o json | jq -r '.records[] | .actor + \" \" + .rpc'";

/// Arguments of `audit`: which orders, and how many of them.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Filters that select the orders to list.
    #[command(flatten)]
    pub filters: AuditListArgs,
    /// Maximum number of orders to list [default: 100 in a table, otherwise all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: Option<u32>,
    /// Print no line with the names of the columns
    #[arg(long = "no-headers")]
    pub no_headers: bool,
}

impl AuditArgs {
    /// How many orders are listed; `None` for all. Output for programs is complete, unless a limit was given.
    fn line_limit(&self, format: Format) -> Option<u32> {
        self.limit.or((format == Format::Table).then_some(DEFAULT_LINES))
    }

    /// The note about a list that was cut although no limit was given.
    fn cut_note(&self, has_more: bool) -> Option<String> {
        (has_more && self.limit.is_none()).then(|| {
            format!(
                "first {DEFAULT_LINES}, and there are more: give --limit N, or list all with: shepherdctl get audit"
            )
        })
    }
}

/// Runs `audit`: prints the newest orders.
pub(crate) async fn print_audit(context: &CommandContext, args: &AuditArgs) -> Result<String, CliError> {
    let limit = args.line_limit(context.format);
    let mut list = list_audit(&context.client, &args.filters, limit).await?;
    list.truncate(limit);
    if let Some(note) = args.cut_note(list.has_more) {
        print_stderr(&format!("shepherdctl: {}", context.target_flags.qualify(&note)));
    }
    let get = GetArgs { limit: args.limit, no_headers: args.no_headers, ..GetArgs::default() };
    print_objects(list, &get, &context.output, &context.exit_record, &context.target_flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_without_a_limit_has_the_newest_orders_and_says_so() {
        for (limit, format, expected) in [
            (None, Format::Table, Some(100)),
            (None, Format::Json, None),
            (Some(7), Format::Table, Some(7)),
            (Some(7), Format::Json, Some(7)),
        ] {
            let args = AuditArgs { filters: AuditListArgs::default(), limit, no_headers: false };
            assert_eq!(args.line_limit(format), expected, "{limit:?} {format:?}");
            assert_eq!(args.cut_note(true).is_some(), limit.is_none(), "the list says so itself");
            assert_eq!(args.cut_note(false), None);
        }
    }
}
