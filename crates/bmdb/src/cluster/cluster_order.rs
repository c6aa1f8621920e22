//! Orders about one cluster: it is locked and read before the order changes it.

use futures::future::BoxFuture;
use sqlx::PgConnection;

use crate::cluster::lock::lock_cluster;
use crate::cluster::reading::require_cluster;
use crate::cluster::record::ClusterRecord;
use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::orders::order::{Order, OrderEffect, OrderResult};

/// The cluster of that name, locked until the transaction ends. One that is being deleted is rejected.
pub(super) async fn lock_and_read_cluster(
    tx: &mut PgConnection,
    name: &str,
) -> Result<ClusterRecord, BmdbError> {
    lock_cluster(tx, name).await?;
    require_cluster(tx, name).await
}

impl Bmdb {
    /// Executes an order that needs nothing but the record of the cluster, which is locked. `change` makes the change in the
    /// order's transaction, as in [`Bmdb::execute_order`].
    pub(super) async fn execute_cluster_order<F>(
        &self,
        what: &'static str,
        order: Order,
        name: String,
        change: F,
    ) -> Result<OrderResult, BmdbError>
    where
        F: for<'c> Fn(
                &'c mut PgConnection,
                &'c Order,
                ClusterRecord,
            ) -> BoxFuture<'c, Result<OrderEffect, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        self.execute_order(what, order, None, (name, change), |tx, order, (name, change)| {
            Box::pin(async move {
                let cluster = lock_and_read_cluster(tx, name).await?;
                change(tx, order, cluster).await
            })
        })
        .await
    }
}
