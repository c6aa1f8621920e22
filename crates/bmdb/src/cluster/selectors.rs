//! The selectors of all clusters, for decisions about the labels of machines.

use sqlx::PgConnection;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use model::cluster::label_rights::ClusterSelector;
use model::selector::Selector;

/// The selectors of the clusters that are not being deleted.
pub(crate) async fn list_cluster_selectors(tx: &mut PgConnection) -> Result<Vec<ClusterSelector>, BmdbError> {
    let rows = sqlx::query!("SELECT name, selector FROM cluster WHERE deleting_by IS NULL ORDER BY name")
        .fetch_all(tx)
        .await
        .context("reading the selectors of clusters")?;
    let parsed = rows.into_iter().map(|row| match row.selector.parse::<Selector>() {
        Ok(selector) => Ok(ClusterSelector { cluster: row.name, selector }),
        Err(error) => Err(BmdbError::Corrupt(format!("the selector of cluster {:?}: {error}", row.name))),
    });
    parsed.collect()
}
