//! `audit`, `get audit`: orders that were given.

use std::time::SystemTime;

use clap::Args;

use crate::client::decode::decode_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::order::expiry::encode_timestamp;
use bmdb::orders::order::{Expiry, parse_expiry};
use model::time::{Timestamp, before};
use proto::fleet::v1;
use proto::fleet::v1::audit_client::AuditClient;

/// Page size of the list: a record may have the state of its target twice.
const PAGE_SIZE: i32 = 100;

const COLUMNS: [Column; 7] = [
    Column::always("AT (UTC)"),
    Column::always("BY"),
    Column::always("ORDER"),
    Column::always("ABOUT"),
    Column::always("OUTCOME"),
    Column::always("REASON"),
    Column::always("AUDIT"),
];

pub(crate) const AUDIT_EXAMPLES: &str = "\
Examples:
  shepherdctl audit --actor kim --since 2h      what kim ordered within the last two hours
  shepherdctl audit --rpc retire --machine sim-0007
  shepherdctl audit --limit 50 -o json | jq -r '.records[] | .actor + \" \" + .rpc'";

/// Which orders `audit` and `get audit` list.
#[derive(Debug, Default, Args)]
pub struct AuditListArgs {
    /// Only orders about this machine
    #[arg(long, value_name = "M")]
    pub machine: Option<String>,
    /// Only orders of this actor: the whole name, or the part before @ (kim)
    #[arg(long, value_name = "ACTOR")]
    pub actor: Option<String>,
    /// Only orders by this call of the API, such as Machines/Hold, Hold or Machines
    #[arg(long, value_name = "RPC")]
    pub rpc: Option<String>,
    /// Only orders since then: a time, or a duration before now (2h)
    #[arg(long, value_name = "WHEN", value_parser = parse_moment)]
    pub since: Option<Expiry>,
    /// Only orders before then: a time, or a duration before now (2h)
    #[arg(long, value_name = "WHEN", value_parser = parse_moment)]
    pub before: Option<Expiry>,
}

/// Flags of [`AuditListArgs`] that select records, which excludes names of records.
pub(crate) const FILTER_FLAGS: [&str; 5] = ["machine", "actor", "rpc", "since", "before"];

/// Arguments of `audit`: which orders, and how many of them.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Filters that select the orders to list.
    #[command(flatten)]
    pub filters: AuditListArgs,
    /// Maximum number of orders to list [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: Option<u32>,
    /// Print no line with the names of the columns
    #[arg(long = "no_headers")]
    pub no_headers: bool,
}

/// Parses a time, or a duration.
fn parse_moment(text: &str) -> Result<Expiry, String> {
    parse_expiry(text)
        .ok_or_else(|| "it is neither a duration (2h, 30m, 1d) nor a time (2026-11-20T18:00:00Z)".to_owned())
}

/// The moment that a flag names: a duration counts back from `now`.
fn resolve_moment(moment: Expiry, now: Timestamp) -> Timestamp {
    match moment {
        Expiry::After(span) => before(now, span.0),
        Expiry::At(moment) => moment,
    }
}

/// Lists orders, newest first.
pub(crate) async fn list_audit(
    client: &FleetClient,
    args: &AuditListArgs,
    limit: Option<u32>,
) -> Result<ObjectList, CliError> {
    let mut service = AuditClient::new(client.channel());
    let now = Timestamp::from(SystemTime::now());
    let moment = |of: Option<Expiry>| of.map(|of| encode_timestamp(resolve_moment(of, now)));
    let (mut objects, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListAuditRequest {
            page_size: page_size(limit, objects.len()).min(PAGE_SIZE),
            page_token: page_token.clone(),
            machine: args.machine.clone().unwrap_or_default(),
            actor: args.actor.clone().unwrap_or_default(),
            rpc: args.rpc.clone().unwrap_or_default(),
            since: moment(args.since),
            before: moment(args.before),
        };
        let mut page = service.list(request).await.map_err(status_to_error)?.into_inner();
        objects.extend(std::mem::take(&mut page.records).iter().map(record_object));
        page_token.clone_from(&page.next_page_token);
        if page_size(limit, objects.len()) == 0 || page_token.is_empty() {
            let list = ObjectList::of_response(ObjectKind::Audit, &page, &COLUMNS, objects);
            return Ok(ObjectList { has_more: !page_token.is_empty(), ..list });
        }
    }
}

fn record_object(record: &v1::AuditRecord) -> ListedObject {
    let at = record.ordered_at.and_then(decode_timestamp);
    let row = vec![
        at.map_or_else(|| "-".to_owned(), |at| at.format("%Y-%m-%d %H:%M:%S").to_string()),
        record.actor.clone(),
        record.rpc.rsplit('.').next().unwrap_or(&record.rpc).to_owned(),
        record.target.clone(),
        if record.dry_run { format!("{} (dry run)", record.outcome) } else { record.outcome.clone() },
        record.reason.clone(),
        record.audit_id.clone(),
    ];
    ListedObject {
        names: ObjectNames::of_id(record.audit_id.clone()),
        rows: vec![row],
        document: ObjectDocument::of_message(record),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::time::Span;

    #[test]
    fn moment_is_a_time_or_so_long_before_now() {
        let at = |seconds| Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        assert_eq!(parse_moment("2h"), Ok(Expiry::After(Span::hours(2))));
        assert!(parse_moment("yesterday").is_err());
        assert_eq!(resolve_moment(Expiry::After(Span::hours(2)), at(7200)), at(0));
        assert_eq!(resolve_moment(Expiry::At(at(5)), at(7200)), at(5));
    }
}
