//! Fetch the objects of a kind.

use crate::approvals::list_approvals;
use crate::artefacts::get::list_artefacts;
use crate::audit::list::list_audit;
use crate::budgets::{list_brakes, list_budgets};
use crate::client::fleet_client::FleetClient;
use crate::cluster::get::list_clusters;
use crate::contexts::list_contexts;
use crate::error::CliError;
use crate::issues::{IssuesArgs, list_issues};
use crate::loops::list_loops;
use crate::machine::get::{list_machines, list_named_machines};
use crate::object::command::{GetArgs, KindSelection};
use crate::object::kind::ObjectKind;
use crate::object::list::ObjectList;
use crate::policy::list_policy;
use crate::providers::list_providers;
use crate::sessions::list_sessions;
use crate::shepherds::list_shepherds;
use crate::tokens::get::list_tokens;
use crate::update::list_updates;
use crate::work::list_work;

/// The objects of a kind, at most as many as the limit allows. A list that is sorted by a column is read to its end before.
/// Names are not selected yet, except those of machines and updates: the API finds these.
pub(super) async fn fetch_objects(
    client: &FleetClient,
    kind: ObjectKind,
    args: &GetArgs,
    selection: &KindSelection,
) -> Result<ObjectList, CliError> {
    let limit = args.limit.filter(|_| args.sort_by.is_none());
    let mut list = match kind {
        ObjectKind::Machine if args.names.is_empty() => {
            list_machines(client, &selection.machines, limit).await?
        }
        ObjectKind::Machine => list_named_machines(client, &args.names).await?,
        ObjectKind::Cluster => list_clusters(client).await?,
        ObjectKind::Shepherd => list_shepherds(client).await?,
        ObjectKind::Session => list_sessions(client, limit).await?,
        ObjectKind::Work => list_work(client, limit).await?,
        ObjectKind::Provider => list_providers(client).await?,
        ObjectKind::Loop => list_loops(client).await?,
        ObjectKind::Budget => list_budgets(client).await?,
        ObjectKind::Brake => list_brakes(client).await?,
        ObjectKind::Approval => list_approvals(client, limit).await?,
        ObjectKind::Issue => list_issues(client, &IssuesArgs::default()).await?.0,
        ObjectKind::Token => list_tokens(client, limit).await?,
        ObjectKind::Artefact => list_artefacts(client).await?,
        ObjectKind::Update => list_updates(client, &args.names).await?,
        ObjectKind::Policy => list_policy(client).await?,
        ObjectKind::Audit => list_audit(client, &selection.audit, limit).await?,
        ObjectKind::Context => list_contexts()?,
    };
    arrange_list(&mut list, args)?;
    Ok(list)
}

/// Sorts a list as the user wants it, and then cuts it at the limit.
pub(crate) fn arrange_list(list: &mut ObjectList, args: &GetArgs) -> Result<(), CliError> {
    if let Some(column) = &args.sort_by {
        list.sort_by_column(column)?;
    }
    list.truncate(args.limit);
    Ok(())
}
