//! Costs of a page of machines, for every selector and position, and of what lists read besides machines.

use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::read_pool::ReadPool;
use shepherd::bmdb::connection::settings::ConnectionSettings;
use shepherd::bmdb::fleet::listing::{Filter, list_machines};
use shepherd::bmdb::fleet::machine_walk::MachineCursor;
use shepherd::model::access::AccessScope;
use shepherd::server::api::services::machines::MAX_EXAMINED;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection};
use uuid::Uuid;

use crate::bmdb_explain::{check, cost};
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

/// The clusters of a page of machines are looked up by keys, with a thousand clusters that have every second machine.
pub(super) async fn check_clusters_of_machines(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled)
         SELECT gen_random_uuid(), 'c' || n, 1, 49, '', '[]', 'automatic', 1, now(), 'kim', '[]', FALSE
         FROM generate_series(0, 999) n;
         INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
         SELECT m.machine_id, c.cluster_id, 'worker', now()
         FROM (SELECT machine_id, row_number() OVER (ORDER BY machine_id) AS n FROM machine) m
         JOIN cluster c ON c.name = 'c' || m.n / 2 % 1000
         WHERE m.n % 2 = 0;
         ANALYZE cluster, machine_cluster",
    )
    .execute(&mut *connection)
    .await?;
    let page = "SELECT machine_id FROM machine ORDER BY machine_id LIMIT 1000";
    let machines: Vec<Uuid> = sqlx::query_scalar(page).fetch_all(&mut *connection).await?;
    let file = include_str!("../../../sql/inspect/list_clusters_of_machines.sql");
    let found = sqlx::query(file).bind(machines.clone()).fetch_all(&mut *connection).await?;
    assert_eq!(found.len(), 500, "every second machine of the page has a cluster");
    let clusters = cost(connection, file, |query| query.bind(machines.clone())).await?;
    // About 4 for each machine, and 3 for each of the 500 clusters.
    check("listing the clusters of a thousand machines", &clusters, 7_000);
    Ok(())
}

/// The list of providers reads the rows of the providers and nothing else: its cost follows their number, and not that of
/// the machines.
pub(super) async fn check_providers(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "INSERT INTO provider_state (provider, kind, listed_at, machines, error, error_at)
         SELECT 'rack-' || n, 'static', now(), 100, repeat('no route to host ', 20), now()
         FROM generate_series(1, 1000) n;
         ANALYZE provider_state",
    )
    .execute(&mut *connection)
    .await?;
    let file = include_str!("../../../sql/provision/list_providers.sql");
    let providers = cost(connection, file, |query| query).await?;
    let others: Vec<&String> = providers.scanned.iter().filter(|table| *table != "provider_state").collect();
    assert!(others.is_empty(), "listing providers reads {others:?} from end to end: {}", providers.plan);
    // A page for each row at most, if an index leads to them.
    assert!(providers.buffers <= 1_100, "{} buffers: {}", providers.buffers, providers.plan);
    Ok(())
}

/// A page of approvals reads the rows of that page, at any position in the list.
pub(super) async fn check_approvals(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "INSERT INTO approval (approval_id, actor, idempotency_key, rpc, request, target, reason, requested_at, expires_at)
         SELECT gen_random_uuid(), 'kim', n::TEXT, 'shepherd.fleet.v1.Budgets/Set', decode('00', 'hex'), 'the budget', 'r',
                now() - n * INTERVAL '1 minute', now()
         FROM generate_series(1, 100000) n;
         ANALYZE approval",
    )
    .execute(&mut *connection)
    .await?;
    let newest: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT max(requested_at) FROM approval").fetch_one(&mut *connection).await?;
    for (place, minutes) in [("the first page", 0), ("a page in the middle", 50_000)] {
        let before = newest - chrono::Duration::minutes(minutes);
        let list = cost(connection, include_str!("../../../sql/approval/list.sql"), |query| {
            query.bind(before).bind(Uuid::max()).bind(501_i64)
        });
        check(&format!("{place} of approvals"), &list.await?, 700);
    }
    Ok(())
}
