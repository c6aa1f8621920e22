//! When the status is written: each row of the table, against a real etcd.

use shepherd::etcd::key_space::RECONCILER_STATUS;
use shepherd::etcd::namespace::KeySelector;
use shepherd::reconciler::status::{ReconcilerState, ReconcilerStatus};

use super::kit::{
    A_WHILE, Counting, Running, program, put_node, put_status, status, status_in, until_status,
};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::Cluster;

use ReconcilerState::{Done, Working};

/// The former status; the status while objects change; whether the leader waits for an old controller until then.
type Row = (
    Option<(ReconcilerState, &'static str, &'static str)>,
    Option<(ReconcilerState, &'static str, &'static str)>,
    bool,
);

const ROWS: &[Row] = &[
    (None, None, false),
    (Some((Done, "2.0.0", "2.0.0")), Some((Done, "2.0.0", "2.0.0")), false),
    (Some((Done, "1.0.0", "2.0.0")), Some((Working, "1.0.0", "2.0.0")), false),
    (Some((Done, "1.0.0", "1.0.0")), Some((Working, "1.0.0", "2.0.0")), true),
    (Some((Done, "3.0.0", "2.0.0")), Some((Working, "2.0.0", "2.0.0")), true),
    (Some((Done, "3.0.0", "3.0.0")), Some((Working, "2.0.0", "3.0.0")), true),
    (Some((Done, "1.0.0", "9.0.0")), Some((Working, "1.0.0", "9.0.0")), false),
    (Some((Working, "1.0.0", "2.0.0")), Some((Working, "1.0.0", "2.0.0")), false),
    (Some((Done, "2.0.0+other", "2.0.0")), Some((Working, "2.0.0+other", "2.0.0")), false),
];

fn of(row: Option<(ReconcilerState, &str, &str)>) -> anyhow::Result<Option<ReconcilerStatus>> {
    row.map(|(state, version, lowest)| status(state, version, lowest)).transpose()
}

#[tokio::test]
async fn objects_change_only_while_the_status_holds_before_and_after() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let done = ReconcilerStatus::completed_by(&own);
    put_node(&client, "own", true, Some("2.0.0")).await?;
    for (number, (before, during, waits)) in ROWS.iter().enumerate() {
        let (before, during) = (of(*before)?, of(*during)?);
        let what = format!("row {}: {before:?}", number + 1);
        client.delete_unguarded(&KeySelector::One(RECONCILER_STATUS.to_owned())).await?;
        if let Some(before) = &before {
            put_status(&client, before).await?;
        }
        // Too old for the objects, and no obstacle if the status excludes it already.
        put_node(&client, "old", true, Some("1.5.0")).await?;
        let objects = Counting::new(&client);
        let running = Running::start(&client, "own", own.clone(), objects.clone());
        if *waits {
            tokio::time::sleep(A_WHILE).await;
            assert_eq!(objects.passes(), [], "{what}: an old controller may serve");
            assert_eq!(status_in(&client).await?, before, "{what}: it is not known to be gone");
            put_node(&client, "old", true, Some("2.0.0")).await?;
        }
        until_status(&client, &done).await?;
        objects.until_passes(1).await?;
        assert_eq!(objects.passes(), [during], "{what}");
        running.end().await?;
    }
    Ok(())
}
