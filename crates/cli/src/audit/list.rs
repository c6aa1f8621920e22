//! Lists of orders that were given.

use std::time::{Duration, SystemTime};

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::order::expiry::{encode_timestamp, parse_moment};
use bmdb::orders::order::Expiry;
use model::humanize::{absolute_time, humanize_duration};
use model::time::{Timestamp, before, between};
use proto::fleet::v1;
use proto::fleet::v1::audit_client::AuditClient;

/// Page size of the list: a record may have the state of its target twice.
const PAGE_SIZE: i32 = 100;
/// How far a list of newer orders reaches back behind the list before it. A record has the time at which it is written, and
/// appears when its transaction ends: an order that takes longer than this is not in a watch.
const OVERLAP: Duration = Duration::from_mins(1);

const COLUMNS: [Column; 8] = [
    Column::always("AGE"),
    Column::always("AT"),
    Column::always("BY"),
    Column::always("ORDER"),
    Column::always("ABOUT"),
    Column::always("OUTCOME"),
    Column::always("REASON"),
    Column::always("AUDIT"),
];

/// Which orders `audit` and `get audit` list.
#[derive(Debug, Default, Args)]
pub struct AuditListArgs {
    /// Only orders about this machine
    #[arg(long, value_name = "M", value_parser = NonEmptyStringValueParser::new())]
    pub machine: Option<String>,
    /// Only orders of this actor: the whole name, or the part before @ (kim)
    #[arg(long, value_name = "ACTOR", value_parser = NonEmptyStringValueParser::new())]
    pub actor: Option<String>,
    /// Only orders by this call of the API, such as Machines/Hold, Hold or Machines
    #[arg(long, value_name = "RPC", value_parser = NonEmptyStringValueParser::new())]
    pub rpc: Option<String>,
    /// Only orders since then: a time, or a duration before now (2h)
    #[arg(long, value_name = "WHEN")]
    pub since: Option<String>,
    /// Only orders before then: a time, or a duration before now (2h)
    #[arg(long, value_name = "WHEN")]
    pub before: Option<String>,
}

/// Flags of [`AuditListArgs`] that select records, which excludes names of records.
pub(crate) const FILTER_FLAGS: [&str; 5] = ["machine", "actor", "rpc", "since", "before"];

/// The moment of a flag of a request: a time, or a duration before `now`.
fn resolve_flag(flag: &str, text: Option<&str>, now: Timestamp) -> Result<Option<Timestamp>, CliError> {
    let moment = text.map(|text| parse_moment(flag, text)).transpose()?;
    Ok(moment.map(|moment| resolve_moment(moment, now)))
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
    Ok(list_records(client, args, None, limit).await?.0)
}

/// Lists the orders that `args` selects and that are not older than `since`, newest first. The moment is the `since` of the
/// next such list, which begins a little before the end of this one.
pub(crate) async fn list_newer_audit(
    client: &FleetClient,
    args: &AuditListArgs,
    since: Option<Timestamp>,
) -> Result<(ObjectList, Timestamp), CliError> {
    let (list, read_at) = list_records(client, args, since, None).await?;
    Ok((list, before(read_at, OVERLAP)))
}

/// Lists orders that are not older than `since`, newest first. The moment is the database time of the first page.
async fn list_records(
    client: &FleetClient,
    args: &AuditListArgs,
    since: Option<Timestamp>,
    limit: Option<u32>,
) -> Result<(ObjectList, Timestamp), CliError> {
    let mut service = AuditClient::new(client.channel());
    let now = Timestamp::from(SystemTime::now());
    let since = resolve_flag("since", args.since.as_deref(), now)?.max(since).map(encode_timestamp);
    let before = resolve_flag("before", args.before.as_deref(), now)?.map(encode_timestamp);
    let mut first_read_at = None;
    let pages = fetch_pages(limit, String::new(), async |page| {
        let request = v1::ListAuditRequest {
            page_size: page.size.min(PAGE_SIZE),
            page_token: page.token,
            machine: args.machine.clone().unwrap_or_default(),
            actor: args.actor.clone().unwrap_or_default(),
            rpc: args.rpc.clone().unwrap_or_default(),
            since,
            before,
        };
        let mut response = service.list(request).await.map_err(status_to_error)?.into_inner();
        let now = require_timestamp(response.read_at, "its read time")?;
        first_read_at = first_read_at.or(Some(now));
        let records = std::mem::take(&mut response.records);
        let lines = records.iter().map(|record| record_object(record, now)).collect();
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok((ObjectList::of_pages(ObjectKind::Audit, &COLUMNS, pages), first_read_at.unwrap_or(now)))
}

fn record_object(record: &v1::AuditRecord, now: Timestamp) -> ListedObject {
    let at = record.ordered_at.and_then(decode_timestamp);
    let row = vec![
        at.map_or_else(|| "-".to_owned(), |at| humanize_duration(between(at, now))),
        at.map_or_else(|| "-".to_owned(), absolute_time),
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
    use crate::exit_code::ExitCode;
    use model::time::Span;

    #[test]
    fn moment_is_a_time_or_so_long_before_now() {
        let at = |seconds: i64| Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let flag = |text| resolve_flag("since", Some(text), at(7200));
        assert_eq!(flag("2h").unwrap(), Some(at(0)));
        assert_eq!(resolve_flag("since", None, at(0)).unwrap(), None);
        assert_eq!(flag("yesterday").unwrap_err().exit_code(), ExitCode::WrongCommand);
        assert_eq!(resolve_moment(Expiry::After(Span::hours(2)), at(7200)), at(0));
        assert_eq!(resolve_moment(Expiry::At(at(5)), at(7200)), at(5));
    }
}
