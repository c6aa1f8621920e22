//! Costs of a page of machines, for every filter and position.

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

/// A page of a hundred machines, with any filter and at any position in the list: it reads a bounded number of rows,
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
    let some = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let all = Filter::default();
    let exact = 101 * A_LINE + 500;
    // Nine in ten machines of the first provider are Ready: those between them are walked past.
    let nearly_all = exact + 2 * 101 * 8;
    // One in ten is not, and all of these are read and sorted.
    let sorted = exact + 1001 * 8;
    #[expect(clippy::cast_possible_wrap, reason = "some thousands")]
    let looking = (MAX_EXAMINED + 1000) as i64 * A_LINE;
    for (name, filter, most) in [
        ("no filter", all.clone(), exact),
        ("a phase", Filter { phases: some(&["ready"]), ..all.clone() }, nearly_all),
        ("a phase of few", Filter { phases: some(&["provided"]), ..all.clone() }, sorted),
        ("without retired", Filter { omit_retired: true, ..all.clone() }, exact),
        ("a provider", Filter { providers: some(&["rack-7"]), ..all.clone() }, exact),
        ("a location that none has", Filter { locations: some(&["attic"]), ..all.clone() }, looking),
        ("a manufacturer", Filter { manufacturers: some(&["maker 3"]), ..all.clone() }, looking),
        ("a product that none is", Filter { products: some(&["none"]), ..all.clone() }, looking),
        ("a fact that nearly all have", Filter { tags: some(&["hardware_report"]), ..all.clone() }, looking),
        ("a fact that none has", Filter { tags: some(&["quarantine"]), ..all.clone() }, looking),
    ] {
        for (place, after) in [("the first page", None), ("a page in the middle", Some(&middle))] {
            let cost = page_cost(kit, &looks, &filter, after).await?;
            assert!(cost > 0, "{place} by {name} was counted nowhere");
            assert!(cost <= most, "{place} by {name}: {cost} buffers, {most} at most");
        }
    }
    looks.bmdb().close().await;
    Ok(())
}
