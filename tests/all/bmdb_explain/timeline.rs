//! Cost of the statement that reads a timeline, on a machine with a long history that ended long ago.

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::bmdb_explain::cost;
use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;

/// What a call of the API sends up to ten times.
const EVENTS: &str = include_str!("../../../sql/inspect/list_history.sql");

/// 100,000 routine events of each of two machines, in sessions of one updater. All events of the first one are older than
/// those of the other.
const FILL: &str = "
    INSERT INTO session SELECT gen_random_uuid(), gen_random_uuid(), 'updater', '{}', 5000, now(), now() + INTERVAL '1 hour'
    FROM generate_series(1, 1000);
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id, detail)
    SELECT machine_id,
           now() - n * INTERVAL '1 minute' + (edge = 'end')::INT * INTERVAL '1 second'
               - (machine_id = (SELECT machine_id FROM machine ORDER BY machine_id LIMIT 1))::INT * INTERVAL '60 days',
           CASE edge WHEN 'end' THEN 'Finished' ELSE 'Started' END, edge, 'observe', 50001 - n, 'Update',
           (SELECT session_id FROM session ORDER BY session_id LIMIT 1),
           CASE edge WHEN 'end' THEN 'nothing changed' END
    FROM machine, generate_series(1, 50000) n, (VALUES ('start'), ('end')) e (edge)";

/// Rows of history that the plan has read, also those that it then left out.
fn rows_of_history(node: &Value) -> f64 {
    let mut rows: f64 = node["Plans"].as_array().into_iter().flatten().map(rows_of_history).sum();
    if node["Relation Name"] == "history" {
        for number in ["Actual Rows", "Rows Removed by Filter"] {
            rows += node[number].as_f64().unwrap_or_default();
        }
    }
    rows
}

#[tokio::test]
async fn page_of_a_long_timeline_reads_only_its_events() -> TestResult {
    let kit = Kit::new("explain_timeline").await?;
    let machines = kit.provided(2, "rack").await?;
    let mut connection = kit.connection().await?;
    sqlx::raw_sql("SET default_transaction_isolation = 'read committed'").execute(&mut connection).await?;
    sqlx::raw_sql(FILL).execute(&mut connection).await?;
    sqlx::raw_sql("VACUUM (ANALYZE) history, session").execute(&mut connection).await?;
    let middle: DateTime<Utc> =
        sqlx::query_scalar("SELECT now() - INTERVAL '60 days' - INTERVAL '25000 minutes'")
            .fetch_one(&mut connection)
            .await?;
    for after in [None, Some(middle)] {
        let page = cost(&mut connection, EVENTS, |query| {
            query.bind(machines[0].0).bind(after).bind(500_i64).bind(1_i64)
        })
        .await?;
        let rows = rows_of_history(&page.plan);
        // The rows of one moment are sorted together, some dozens at a time.
        assert!((500.0..=600.0).contains(&rows), "{rows} rows of history, after {after:?}: {:#}", page.plan);
        assert!(!page.scanned.iter().any(|table| table == "history"), "{:#}", page.plan);
        assert!(page.buffers <= 3_000, "{} buffers: {:#}", page.buffers, page.plan);
    }
    Ok(())
}
