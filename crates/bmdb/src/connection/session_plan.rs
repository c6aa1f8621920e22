//! Session plan: what every connection is set to, and whether that is in force.
//!
//! A setting that was requested is not a setting in force. A pooler that does not know connection options drops them:
//! `PgBouncer` does with `ignore_startup_parameters = options`, which its users write because it refuses them otherwise.
//! Without its limits a statement waits for a lock for ever. So the settings that correctness depends on are read on
//! each new connection, those that differ are set by a statement, and all are read again. A connection on which one still
//! differs is not used.
//!
//! `CockroachDB` writes its settings in another form. There only the isolation level is verified, when a handle connects.

use std::io;
use std::sync::Arc;

use sqlx::PgConnection;

use crate::connection::access::{Access, require_access};
use crate::connection::dialect::Dialect;
use crate::connection::settings::ConnectionSettings;

/// What each connection of a handle must be; cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct SessionPlan {
    /// Names and values, in the form in which the server writes them.
    settings: Arc<[(&'static str, String)]>,
    access: Access,
}

/// A setting that cannot be brought into force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {found:?} on a new connection, and cannot be set to {requested:?}")]
pub(super) struct UnmetSetting {
    pub(super) name: String,
    pub(super) requested: String,
    pub(super) found: String,
}

impl SessionPlan {
    pub(super) fn new(settings: &ConnectionSettings) -> Self {
        let requested = match settings.dialect {
            Dialect::Postgres => settings.session_settings(),
            Dialect::Cockroachdb => Vec::new(),
        };
        Self { settings: requested.into(), access: settings.access }
    }

    /// What the connections are for.
    pub(super) const fn access(&self) -> Access {
        self.access
    }

    /// Prepares a new connection. Fails for one that cannot be used.
    pub(super) async fn prepare(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        require_access(connection, self.access).await?;
        match self.apply(connection).await? {
            None => Ok(()),
            Some(unmet) => Err(io::Error::other(unmet).into()),
        }
    }

    /// Brings the settings into force. Returns one that cannot be.
    pub(super) async fn apply(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Option<UnmetSetting>, sqlx::Error> {
        let unmet = self.read_unmet(connection).await?;
        if unmet.is_empty() {
            return Ok(None);
        }
        let (names, values): (Vec<String>, Vec<String>) =
            unmet.into_iter().map(|setting| (setting.name, setting.requested)).unzip();
        sqlx::query_file!("../../sql/connection/apply_settings.sql", &names, &values)
            .fetch_all(&mut *connection)
            .await?;
        Ok(self.read_unmet(connection).await?.into_iter().next())
    }

    /// The settings that are not as requested.
    async fn read_unmet(&self, connection: &mut PgConnection) -> Result<Vec<UnmetSetting>, sqlx::Error> {
        if self.settings.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = self.settings.iter().map(|(name, _)| (*name).to_owned()).collect();
        let rows =
            sqlx::query_file!("../../sql/connection/read_settings.sql", &names).fetch_all(connection).await?;
        let found: Vec<(String, Option<String>)> =
            rows.into_iter().map(|row| (row.name, row.value)).collect();
        Ok(list_unmet(&self.settings, &found))
    }
}

/// The requested settings that the server reports with another value, or not at all.
fn list_unmet(requested: &[(&'static str, String)], found: &[(String, Option<String>)]) -> Vec<UnmetSetting> {
    let value_of = |name: &str| {
        let row = found.iter().find(|(known, _)| known == name);
        row.and_then(|(_, value)| value.clone()).unwrap_or_default()
    };
    requested
        .iter()
        .map(|(name, requested)| UnmetSetting {
            name: (*name).to_owned(),
            requested: requested.clone(),
            found: value_of(name),
        })
        .filter(|setting| setting.found != setting.requested)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_differs_or_is_missing_is_unmet() {
        let requested = [("lock_timeout", "5s".to_owned()), ("TimeZone", "UTC".to_owned())];
        let row = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        for (found, unmet) in [
            (vec![row("lock_timeout", Some("5s")), row("TimeZone", Some("UTC"))], vec![]),
            (vec![row("TimeZone", Some("UTC")), row("lock_timeout", Some("0"))], vec!["lock_timeout"]),
            (vec![row("lock_timeout", None), row("TimeZone", Some("CET"))], vec!["lock_timeout", "TimeZone"]),
            (vec![], vec!["lock_timeout", "TimeZone"]),
        ] {
            let names: Vec<String> =
                list_unmet(&requested, &found).into_iter().map(|setting| setting.name).collect();
            assert_eq!(names, unmet, "{found:?}");
        }
    }
}
