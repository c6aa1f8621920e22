//! The newest verified statement of a cluster's authority.
//!
//! It outlives the shepherds that work on the cluster: the next one follows only the curators that the statement
//! permits, even if the first curator that answers denies it. How a statement is verified is not known here.
//!
//! A statement is written without the cluster's lease. Epoch and number decide, in the statement that writes: a shepherd
//! that was away for too long lowers nothing, and a concurrent writer waits for the row and compares again.

use uuid::Uuid;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;

const READING: &str = "reading a cluster's statement";
const STORING: &str = "storing a cluster's statement";

/// A stored statement. It was verified before it was stored, and has to be verified again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredStatement {
    /// The signed statement, as curators send it.
    pub encoded: Vec<u8>,
    /// Epoch and number that it was stored under.
    pub order: (i64, i64),
}

impl Bmdb {
    /// The newest statement that was stored for a cluster; `None` if there is none, or no such cluster.
    pub async fn cluster_statement(&self, cluster: Uuid) -> Result<Option<StoredStatement>, BmdbError> {
        let row = self
            .statement(READING, move |connection| {
                Box::pin(
                    sqlx::query!(
                        "SELECT statement, statement_epoch, statement_number FROM cluster WHERE cluster_id = $1",
                        cluster
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(row.and_then(|row| {
            // No statement has the number 0.
            let order = (row.statement_epoch.unwrap_or(0), row.statement_number.unwrap_or(0));
            Some(StoredStatement { encoded: row.statement?, order })
        }))
    }

    /// Stores a statement of a cluster, unless one is stored that is not lower. `anchor`: the certificate of the authority
    /// that it was verified by. If the cluster has another one since, after a theft, nothing is stored.
    pub async fn raise_cluster_statement(
        &self,
        cluster: Uuid,
        anchor: Vec<u8>,
        statement: StoredStatement,
    ) -> Result<(), BmdbError> {
        self.statement_with(STORING, (anchor, statement), move |connection, (anchor, statement)| {
            let (epoch, number) = statement.order;
            Box::pin(
                sqlx::query_file!(
                    "../../sql/cluster/raise_statement.sql",
                    cluster,
                    statement.encoded.as_slice(),
                    epoch,
                    number,
                    anchor.as_slice()
                )
                .execute(connection),
            )
        })
        .await
        .map(drop)
    }
}
