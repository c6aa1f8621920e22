//! Costs of statements about Kubernetes on thousands of clusters, in buffers, like those of the frequent statements.
//!
//! Each concerns one cluster, one upgrade or one machine, and must cost that much, however many others exist.

use serde_json::{Value, json};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgConnection, Postgres};
use uuid::Uuid;

use crate::bmdb_explain::{Cost, cheap, check, cost};
use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;

/// Two thousand clusters of ten machines. Each has Kubernetes, five certificates of people, and six upgrades, one of
/// which is under way in every second.
const FILL: &str = "
    INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at, created_by,
                         wait_reasons, settled)
    SELECT gen_random_uuid(), 'c-' || n, 3, 7, '', '{}', 'person', 1, now(), 'kim', '[]', TRUE FROM generate_series(1, 2000) n;
    CREATE TEMPORARY TABLE numbered AS SELECT cluster_id, row_number() OVER () AS n FROM cluster;
    INSERT INTO cluster_kubernetes (cluster_id, bundle, version, service_range, pod_range, node_prefix, domain, add_ons,
                                    requested_at, requested_by, rotate)
    SELECT cluster_id, decode(repeat('ab', 32), 'hex'), '1.31.0', '10.96.0.0/16', '10.128.0.0/12', 24, 'cluster.local', '{}',
           now(), 'kim', '[\"clients\"]' FROM numbered;
    INSERT INTO cluster_kubernetes_user (user_id, cluster_id, public_key, holder, access, lifetime_seconds, requested_at,
                                         requested_by)
    SELECT gen_random_uuid(), cluster_id, decode(md5(n || '-' || m), 'hex'), 'kim', 'viewer', 3600,
           now() - m * INTERVAL '1 hour', 'kim'
    FROM numbered, generate_series(1, 5) m;
    INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at, created_by, reason)
    SELECT 'r-' || n, decode(repeat('ab', 32), 'hex'), 'r', '', 1, 60, now(), 'kim', 'r' FROM numbered;
    INSERT INTO cluster_upgrade (upgrade_id, cluster_id, roll_out_id, release, released, back, parallelism, deadline_seconds,
                                 created_at, created_by, reason, ended_at, ended, requested_nodes)
    SELECT 'u-' || n || '-' || m, cluster_id, 'r-' || n, 'r', FALSE, FALSE, 1, 900, now() - m * INTERVAL '1 day', 'kim', 'r',
           CASE WHEN m > 1 OR n % 2 = 0 THEN now() END, CASE WHEN m > 1 OR n % 2 = 0 THEN 'done' END, '{}'
    FROM numbered, generate_series(1, 6) m;
    INSERT INTO machine SELECT gen_random_uuid(), now() FROM generate_series(1, 20000);
    CREATE TEMPORARY TABLE numbered_machine AS SELECT machine_id, row_number() OVER () AS n FROM machine;
    INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
    SELECT m.machine_id, c.cluster_id, 'worker', now() FROM numbered_machine m JOIN numbered c ON c.n = m.n % 2000 + 1;
    INSERT INTO roll_out_machine (roll_out_id, machine_id, state, changed_at, active)
    SELECT 'r-' || m.n % 2000 + 1, m.machine_id, 'ordered', now(), TRUE FROM numbered_machine m;
    ANALYZE cluster, cluster_kubernetes, cluster_kubernetes_user, roll_out, cluster_upgrade, machine, machine_cluster,
            roll_out_machine";

/// Most pages that a statement about one row (`ONE`), or about some rows of a cluster (`SOME`), may touch.
const ONE: i64 = 40;
const SOME: i64 = 120;

/// The rows that the statements concern.
#[derive(Clone)]
struct About {
    cluster: Uuid,
    /// A cluster without an upgrade under way.
    still: Uuid,
    upgrade: String,
    user: Uuid,
    machines: Vec<Uuid>,
}

impl About {
    async fn read(connection: &mut PgConnection) -> anyhow::Result<Self> {
        let (cluster, upgrade): (Uuid, String) =
            sqlx::query_as("SELECT cluster_id, upgrade_id FROM cluster_upgrade WHERE upgrade_id = 'u-777-1'")
                .fetch_one(&mut *connection)
                .await?;
        let still = sqlx::query_scalar("SELECT cluster_id FROM cluster_upgrade WHERE upgrade_id = 'u-778-1'");
        let still = still.fetch_one(&mut *connection).await?;
        let user =
            sqlx::query_scalar("SELECT user_id FROM cluster_kubernetes_user WHERE cluster_id = $1 LIMIT 1");
        let user = user.bind(cluster).fetch_one(&mut *connection).await?;
        let machines = sqlx::query_scalar("SELECT machine_id FROM machine_cluster WHERE cluster_id = $1");
        let machines = machines.bind(cluster).fetch_all(&mut *connection).await?;
        Ok(Self { cluster, still, upgrade, user, machines })
    }
}

type Bound<'q> = Query<'q, Postgres, PgArguments>;
/// A statement: its name, its text, its arguments, and its largest permitted cost.
type Statement = (&'static str, &'static str, for<'q> fn(Bound<'q>, &About) -> Bound<'q>, i64);

macro_rules! sql {
    ($path:literal) => {
        include_str!(concat!("../../sql/", $path, ".sql"))
    };
}

fn empty() -> Value {
    json!([])
}

const STATEMENTS: &[Statement] = &[
    ("its Kubernetes", sql!("kubernetes/read_of_cluster"), |q, a| q.bind(a.cluster), 10),
    ("what it is to be", sql!("kubernetes/upsert"), |q, a| set(q, a), ONE),
    (
        "what it became",
        sql!("kubernetes/set_current_bundle"),
        |q, a| q.bind(a.cluster).bind(vec![1_u8; 32]).bind("1.32.0"),
        ONE,
    ),
    (
        "what is known",
        sql!("kubernetes/update_observed_state"),
        |q, a| q.bind(a.cluster).bind(json!({})),
        ONE,
    ),
    (
        "what is known still",
        sql!("kubernetes/update_observed_state"),
        |q, a| q.bind(a.cluster).bind(None::<Value>),
        10,
    ),
    ("what is to go", sql!("kubernetes/mark_removing"), |q, a| q.bind(a.cluster).bind("kim"), ONE),
    ("what is gone", sql!("kubernetes/delete_removed"), |q, a| q.bind(a.cluster), 10),
    ("its end", sql!("kubernetes/delete"), |q, a| q.bind(a.cluster), ONE),
    ("a replacement", sql!("kubernetes/set_rotation_requests"), |q, a| q.bind(a.cluster).bind(empty()), ONE),
    (
        "a replacement that its cluster received",
        sql!("kubernetes/remove_rotation_request"),
        |q, a| q.bind(a.cluster).bind("clients"),
        ONE,
    ),
    ("its people", sql!("kubernetes/list_users"), |q, a| q.bind(a.cluster), 20),
    ("a person that asks", sql!("kubernetes/insert_user"), |q, a| ask(q, a), ONE),
    ("a certificate", sql!("kubernetes/record_user_issued"), |q, a| issued(q, a), ONE),
    ("no certificate", sql!("kubernetes/record_user_rejected"), |q, a| q.bind(a.user).bind("no"), ONE),
    ("old certificates", sql!("kubernetes/delete_users_by_id"), |q, a| q.bind(vec![a.user]), ONE),
    ("all certificates", sql!("kubernetes/delete_users"), |q, a| q.bind(a.cluster), SOME),
    ("its upgrade", sql!("upgrade/read_newest"), |q, a| q.bind(a.cluster), SOME),
    ("the newest upgrade", sql!("upgrade/read_newest"), |q, a| q.bind(a.still), SOME),
    ("an upgrade, locked", sql!("upgrade/lock"), |q, a| q.bind(a.upgrade.clone()), ONE),
    (
        "the requested nodes",
        sql!("upgrade/set_requested_nodes"),
        |q, a| q.bind(a.upgrade.clone()).bind(json!({})),
        ONE,
    ),
    ("an upgrade that goes back", sql!("upgrade/start_rollback"), |q, a| q.bind(a.upgrade.clone()), ONE),
    ("an upgrade that pauses", sql!("upgrade/set_paused"), |q, a| q.bind(a.upgrade.clone()).bind("p"), ONE),
    (
        "an upgrade whose role servers are there",
        sql!("upgrade/mark_roll_out_done"),
        |q, a| q.bind(a.upgrade.clone()),
        ONE,
    ),
    ("an upgrade that ends", sql!("upgrade/end"), |q, a| q.bind(a.upgrade.clone()).bind("done"), ONE),
    ("an upgrade that begins", sql!("upgrade/insert"), |q, a| begun(q, a), ONE),
    (
        "machines that are being upgraded",
        sql!("upgrade/list_machines_in_upgrades"),
        |q, a| q.bind(a.machines.clone()),
        SOME,
    ),
    ("upgrades that are long over", sql!("upgrade/delete_old"), |q, a| q.bind(a.cluster).bind(3_i64), SOME),
    ("all upgrades", sql!("upgrade/delete_of_cluster"), |q, a| q.bind(a.cluster), SOME),
];

fn set<'q>(query: Bound<'q>, about: &About) -> Bound<'q> {
    let query = query.bind(about.cluster).bind(vec![1_u8; 32]).bind("1.32.0");
    let query = query.bind("10.96.0.0/16").bind("10.128.0.0/12").bind(24_i64).bind("cluster.local");
    query.bind(json!({})).bind(None::<Value>).bind("kim")
}

fn ask<'q>(query: Bound<'q>, about: &About) -> Bound<'q> {
    let query = query.bind(Uuid::from_u128(7)).bind(about.cluster).bind(vec![1_u8; 91]);
    query.bind("lee").bind("owner").bind(3600_i64).bind("lee")
}

fn issued<'q>(query: Bound<'q>, about: &About) -> Bound<'q> {
    let query = query.bind(about.user).bind(vec![1_u8; 500]).bind(empty()).bind(empty());
    query.bind(chrono::DateTime::UNIX_EPOCH)
}

fn begun<'q>(query: Bound<'q>, about: &About) -> Bound<'q> {
    let query = query.bind("u-new").bind(about.still).bind(None::<Vec<u8>>).bind(None::<String>);
    let query = query.bind(None::<Vec<u8>>).bind(None::<String>).bind(None::<String>).bind(None::<String>);
    query.bind(false).bind(1_i64).bind(900_i64).bind("kim").bind("r")
}

async fn costs(
    connection: &mut PgConnection,
    about: &About,
    (_, file, bind, _): &Statement,
) -> anyhow::Result<Cost> {
    cost(connection, file, |query| bind(query, about)).await
}

/// Every file of both directories is checked.
fn all_are_there() -> anyhow::Result<()> {
    for directory in ["kubernetes", "upgrade"] {
        for entry in std::fs::read_dir(crate::harness::source::root().join("sql").join(directory))? {
            let path = entry?.path();
            let text = std::fs::read_to_string(&path)?;
            let known = STATEMENTS.iter().any(|(_, file, _, _)| *file == text);
            assert!(known, "{} is looked at by nobody here", path.display());
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_about_one_cluster_cost_no_more_for_all_the_others() -> TestResult {
    all_are_there()?;
    let kit = Kit::new("explain_kubernetes").await?;
    let mut connection = kit.connection().await?;
    sqlx::raw_sql("SET default_transaction_isolation = 'read committed'").execute(&mut connection).await?;
    sqlx::raw_sql(FILL).execute(&mut connection).await?;
    let vacuum = "VACUUM cluster, cluster_kubernetes, cluster_kubernetes_user, cluster_upgrade, machine_cluster, \
                  roll_out, roll_out_machine";
    sqlx::raw_sql(vacuum).execute(&mut connection).await?;
    let about = About::read(&mut connection).await?;
    for statement in STATEMENTS {
        let cost = costs(&mut connection, &about, statement).await?;
        check(statement.0, &cost, statement.3);
    }
    // The bounds are effective: without its index, each statement exceeds its own.
    for (index, of) in [
        ("cluster_kubernetes_user_by_key", ["its people", "all certificates"]),
        ("cluster_upgrade_by_cluster", ["its upgrade", "all upgrades"]),
    ] {
        if of.contains(&"its upgrade") {
            // Either of the two would suffice.
            sqlx::raw_sql("DROP INDEX cluster_upgrade_active").execute(&mut connection).await?;
        }
        sqlx::query(AssertSqlSafe(format!("DROP INDEX {index}"))).execute(&mut connection).await?;
        for statement in STATEMENTS.iter().filter(|(name, _, _, _)| of.contains(name)) {
            let cost = costs(&mut connection, &about, statement).await?;
            assert!(!cheap(&cost, statement.3), "{} without {index} passes: {:#}", statement.0, cost.plan);
        }
    }
    Ok(())
}
