//! Session state: what a new connection is, apart from its settings, and which faults make it unusable.
//!
//! A server may replace what was requested, and a role, a database or a pooler may have settings that nobody requested. So
//! the state is read by a statement on each new connection, in both dialects. What is read then stays: no transaction
//! reads it again.
//!
//! * The isolation level must be that of the dialect. At another one, transactions lose against others where they expect
//!   to wait, or see what they must not.
//! * The schema that new tables are created in must be the one that has our tables. A search path that begins with another
//!   schema would divide the tables between two, and the next release would find half of them.
//! * The encoding of the database must be UTF8. Another one refuses names, or stores them without checking them.

use sqlx::{Executor as _, PgConnection, Row as _};

use crate::connection::access::Access;
use crate::connection::dialect::Dialect;

const READ_STATE: &str = include_str!("../../../../sql/connection/read_state.sql");

/// What a connection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SessionState {
    /// Whether its transactions are read-only.
    pub(super) is_reader: bool,
    /// The level as it is, which a server may replace by another one than was set.
    pub(super) isolation: String,
    /// The encoding of the database.
    pub(super) encoding: String,
    /// The schema that new tables would be created in; `None` if no schema of the search path can be used.
    pub(super) schema: Option<String>,
    /// The schema of the table `machine` that is found; `None` without one.
    pub(super) tables_in: Option<String>,
}

/// What a connection must be.
#[derive(Clone, Debug)]
pub(super) struct SessionDemand {
    pub(super) access: Access,
    pub(super) dialect: Dialect,
    /// The schema of the first connection of the handle; `None` for that one.
    pub(super) schema: Option<String>,
}

/// Why a connection cannot be used, to follow the name of its server in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionFault {
    /// The server takes no writes.
    #[error("is read-only")]
    ReadOnly,
    /// It runs transactions at another isolation level than the dialect needs.
    #[error(
        "runs transactions at {}, and the dialect {} needs {}: a pooler in between drops connection options (connect to the \
         server itself), or the server is of another kind (see SHEPHERD_BMDB_DIALECT)",
        found.to_uppercase(), dialect.as_str(), dialect.isolation().to_uppercase()
    )]
    Isolation {
        /// The level that the server reports.
        found: String,
        /// The dialect that was configured.
        dialect: Dialect,
    },
    /// The database has another encoding than UTF8.
    #[error(
        "stores text as {found}, and Shepherd needs UTF8; create its database with ENCODING 'UTF8' TEMPLATE template0"
    )]
    Encoding {
        /// The encoding that the server reports.
        found: String,
    },
    /// New tables cannot be created in any schema.
    #[error(
        "has no schema for tables: its search_path names none that exists and that the user of the URL may use; run `ALTER \
         ROLE USER SET search_path = public` and `GRANT USAGE, CREATE ON SCHEMA public TO USER` in it"
    )]
    NoSchema,
    /// New tables would be created in another schema than the one that has the others.
    #[error(
        "creates tables in the schema {found:?}, and those of Shepherd are in {tables_in:?}: its search_path begins with \
         another schema than before, or a pooler in between drops it; run `ALTER ROLE USER SET search_path = \
         \"{tables_in}\"`"
    )]
    OtherSchema {
        /// The schema that new tables would be created in.
        found: String,
        /// The schema that has our tables, or the one of the first connection.
        tables_in: String,
    },
}

impl SessionState {
    /// Reads it, without a prepared statement.
    pub(super) async fn read(connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let row = connection.fetch_one(sqlx::raw_sql(READ_STATE)).await?;
        Ok(Self {
            is_reader: row.try_get(0)?,
            isolation: row.try_get(1)?,
            encoding: row.try_get(2)?,
            schema: row.try_get(3)?,
            tables_in: row.try_get(4)?,
        })
    }

    /// The first fault of a connection that must be as `demand` states; `None` for one that can be used.
    pub(super) fn find_fault(&self, demand: &SessionDemand) -> Option<SessionFault> {
        if demand.access == Access::ReadWrite && self.is_reader {
            return Some(SessionFault::ReadOnly);
        }
        if self.isolation != demand.dialect.isolation() {
            return Some(SessionFault::Isolation { found: self.isolation.clone(), dialect: demand.dialect });
        }
        if self.encoding != "UTF8" {
            return Some(SessionFault::Encoding { found: self.encoding.clone() });
        }
        let Some(found) = self.schema.clone() else { return Some(SessionFault::NoSchema) };
        [&self.tables_in, &demand.schema]
            .into_iter()
            .flatten()
            .find(|schema| **schema != found)
            .map(|schema| SessionFault::OtherSchema { found, tables_in: schema.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_is_what_differs_from_the_demand() {
        let usual = SessionState {
            is_reader: false,
            isolation: "read committed".to_owned(),
            encoding: "UTF8".to_owned(),
            schema: Some("public".to_owned()),
            tables_in: Some("public".to_owned()),
        };
        let reader = SessionState { is_reader: true, ..usual.clone() };
        let serializable = SessionState { isolation: "serializable".to_owned(), ..usual.clone() };
        let latin = SessionState { encoding: "LATIN1".to_owned(), ..usual.clone() };
        let ascii = SessionState { encoding: "SQL_ASCII".to_owned(), ..usual.clone() };
        let nowhere = SessionState { schema: None, tables_in: None, ..usual.clone() };
        let empty = SessionState { tables_in: None, ..usual.clone() };
        let elsewhere = SessionState { schema: Some("app".to_owned()), ..usual.clone() };
        let writes = SessionDemand { access: Access::ReadWrite, dialect: Dialect::Postgres, schema: None };
        let reads = SessionDemand { access: Access::Any, ..writes.clone() };
        let cockroach = SessionDemand { dialect: Dialect::Cockroachdb, ..writes.clone() };
        let second = SessionDemand { schema: Some("app".to_owned()), ..writes.clone() };
        for (state, demand, part) in [
            (&usual, &writes, None),
            (&empty, &writes, None),
            (&reader, &reads, None),
            (&serializable, &cockroach, None),
            (&reader, &writes, Some("is read-only")),
            (&usual, &cockroach, Some("at READ COMMITTED, and the dialect cockroachdb needs SERIALIZABLE")),
            (&serializable, &writes, Some("at SERIALIZABLE, and the dialect postgres needs READ COMMITTED")),
            (&latin, &reads, Some("stores text as LATIN1, and Shepherd needs UTF8")),
            (&ascii, &writes, Some("stores text as SQL_ASCII")),
            (&nowhere, &reads, Some("has no schema for tables")),
            (&elsewhere, &reads, Some("in the schema \"app\", and those of Shepherd are in \"public\"")),
            (&empty, &second, Some("in the schema \"public\", and those of Shepherd are in \"app\"")),
        ] {
            let fault = state.find_fault(demand).map(|fault| fault.to_string());
            assert_eq!(fault.is_some(), part.is_some(), "{state:?} {demand:?}: {fault:?}");
            assert!(fault.as_deref().unwrap_or_default().contains(part.unwrap_or_default()), "{fault:?}");
        }
    }
}
