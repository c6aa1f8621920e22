//! Durability: the warning for a server that loses commits that it answered.
//!
//! [`model::database_durability`] decides which settings lose them. That is a warning and an issue, and no refusal: an
//! operator may want it for a trial.

use sqlx::Connection as _;

use crate::connection::dialect::Dialect;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use model::database_durability::DurabilityFault;

impl Bmdb {
    /// The warning for a server that may lose commits that it answered; `None` for one that loses none by itself.
    pub async fn durability_warning(&self) -> Result<Option<String>, BmdbError> {
        // CockroachDB has no such settings.
        if self.dialect() != Dialect::Postgres {
            return Ok(None);
        }
        let operation = "reading whether commits last";
        let mut connection = self.open_connection().await.context(operation)?;
        let row = sqlx::query!(
            r#"SELECT current_setting('fsync') AS "fsync!", current_setting('synchronous_commit') AS "commit!",
                      coalesce(current_setting('synchronous_standby_names', TRUE), '') AS "standbys!""#
        )
        .fetch_one(&mut connection)
        .await
        .context(operation)?;
        drop(connection.close().await);
        let fault = DurabilityFault::find(&row.fsync, &row.commit, &row.standbys);
        Ok(fault
            .map(|fault| format!("the BMDB {fault}; set it to on for the role, the database and the server")))
    }
}
