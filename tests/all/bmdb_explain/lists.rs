//! Costs of a page of machines, for every selector and position.

use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::read_pool::ReadPool;
use shepherd::bmdb::connection::settings::ConnectionSettings;
use shepherd::bmdb::fleet::listing::{Filter, list_machines};
use shepherd::bmdb::fleet::machine_walk::MachineCursor;
use shepherd::model::access::AccessScope;
use shepherd::server::api::services::machines::MAX_EXAMINED;
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;
use uuid::Uuid;

use crate::bmdb_kit::Kit;

/// The cost of one page of a list, in buffers of all its statements.
async fn page_cost(
    kit: &Kit,
    looks: &ReadPool,
    filter: &Filter,
    after: Option<&MachineCursor>,
) -> anyhow::Result<i64> {
    let touched = async || -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "SELECT sum(shared_blks_hit + shared_blks_read)::INT8 FROM pg_stat_statements s
             JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = $1",
        )
        .bind(kit.database.url().parse::<PgConnectOptions>()?.get_database())
        .fetch_one(&mut kit.database.server_url().parse::<PgConnectOptions>()?.connect().await?)
        .await?)
    };
    let mut cost = 0;
    // The second run counts: the first one fills the connection's caches.
    for _ in 0..2 {
        let before = touched().await?;
        let (filter, after) = (filter.clone(), after.cloned());
        looks
            .read_with((filter, after), move |tx, (filter, after)| {
                Box::pin(async move {
                    list_machines(tx, filter, &AccessScope::Fleet, after.as_ref(), 100, MAX_EXAMINED).await
                })
            })
            .await?;
        cost = touched().await? - before;
    }
    Ok(cost)
}

/// A page of a hundred machines, with any selector and at any position in the list: it reads a bounded number of rows,
/// each by a few index lookups.
pub(super) async fn check_lists(kit: &Kit) -> anyhow::Result<()> {
    // About 4 for its place in the list, and 26 for what lists show.
    const A_LINE: i64 = 32;
    // Costs are judged here, and not times: so the reads have no short limits, which a busy host reaches.
    let settings = ConnectionSettings { max_connections: 2, ..kit.bmdb.settings().clone() };
    let looks = ReadPool::from_handle(Bmdb::connect(settings).await?);
    let middle = MachineCursor {
        provider: "rack-5".to_owned(),
        provider_id: "50005".to_owned(),
        machine: Uuid::from_u128(u128::MAX / 10 * 9),
    };
    let exact = 101 * A_LINE + 500;
    // Nine in ten machines of the first provider are Ready: those between them are walked past.
    let nearly_all = exact + 2 * 101 * 8;
    // One in ten is not, and all of these are read and sorted.
    let sorted = exact + 1001 * 8;
    #[expect(clippy::cast_possible_wrap, reason = "some thousands")]
    let looking = (MAX_EXAMINED + 1000) as i64 * A_LINE;
    for (selector, most) in [
        ("", exact),
        ("phase=ready", nearly_all),
        ("phase=provided", sorted),
        ("phase!=Retired", exact),
        ("phase in (Ready,Silent),provider!=rack-7", nearly_all),
        ("provider=rack-7", exact),
        // A location that none has, a manufacturer, a product and a size that none has.
        ("location=attic*", looking),
        ("manufacturer=maker 3", looking),
        ("product=none", looking),
        ("memory>=1024TiB", looking),
        ("name=none", looking),
        // Facts that nearly all have, or none.
        ("fact=hardware_report", looking),
        ("fact!=hardware_report", looking),
        ("fact=quarantine", looking),
        ("cluster=none", looking),
        ("cluster!=none,label.none", looking),
    ] {
        let filter = Filter { selector: selector.parse()?, omit_retired: false };
        for (place, after) in [("the first page", None), ("a page in the middle", Some(&middle))] {
            let cost = page_cost(kit, &looks, &filter, after).await?;
            assert!(cost > 0, "{place} of {selector:?} was counted nowhere");
            assert!(cost <= most, "{place} of {selector:?}: {cost} buffers, {most} at most");
        }
    }
    looks.bmdb().close().await;
    Ok(())
}
