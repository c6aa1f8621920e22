//! Durability: whether a commit that was answered survives a crash of the server.
//!
//! A session that was renewed, a machine that was claimed, a step that was begun: each counts once its commit is
//! answered. A server without `fsync`, or a role with `synchronous_commit = off`, forgets the last of them in a crash, and
//! `local` forgets them at a fail-over to a synchronous standby. That is a warning and no refusal: an operator may want
//! it for a trial.

use sqlx::Connection as _;

use crate::connection::dialect::Dialect;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};

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
        Ok(warn_about(&row.fsync, &row.commit, &row.standbys))
    }
}

/// The warning for these values of `fsync`, `synchronous_commit` and `synchronous_standby_names`.
fn warn_about(fsync: &str, commit: &str, standbys: &str) -> Option<String> {
    let (setting, loses) = match (fsync, commit) {
        ("off", _) => ("fsync = off", "a crash of its host may lose or damage everything"),
        (_, "off") => ("synchronous_commit = off", "a crash loses the last commits that it answered"),
        (_, "local") if !standbys.is_empty() => {
            ("synchronous_commit = local", "a fail-over loses the last commits that it answered")
        }
        _ => return None,
    };
    Some(format!(
        "the BMDB runs with {setting}: {loses}, and another shepherd may repeat what was done to machines; set it to on for \
         the role, the database and the server"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_loses_answered_commits_is_named() {
        for (fsync, commit, standbys, named) in [
            ("on", "on", "", None),
            ("on", "on", "ANY 1 (b, c)", None),
            ("on", "remote_write", "b", None),
            ("on", "remote_apply", "b", None),
            ("on", "local", "", None),
            ("on", "local", "b", Some("synchronous_commit = local")),
            ("on", "off", "", Some("synchronous_commit = off")),
            ("off", "on", "b", Some("fsync = off")),
            ("off", "off", "", Some("fsync = off")),
        ] {
            let warning = warn_about(fsync, commit, standbys);
            assert_eq!(warning.is_some(), named.is_some(), "{fsync} {commit} {standbys}: {warning:?}");
            assert!(
                warning.unwrap_or_default().contains(named.unwrap_or_default()),
                "{fsync} {commit} {standbys}"
            );
        }
    }
}
