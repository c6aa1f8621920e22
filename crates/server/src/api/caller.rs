//! Callers: who makes a call, and what may be done in that name.
//!
//! A call comes from a client with a credential, over the network, or from a process that is logged in to the database
//! ([`in_process`](crate::api::in_process)). The second kind is not weaker than an admin: a user who may write
//! to the database can change everything in it. It is named as such in the audit, where it has no credential.

use std::sync::Arc;

use prost::bytes::Bytes;
use tonic::{Code, Request, Status};
use uuid::Uuid;

use crate::api::api_error::{cause_of, error_status, invalid_argument};
use bmdb::orders::credential::AccessCredential;
use bmdb::orders::order::Actor;
use model::access::{AccessRole, AccessScope};
use model::process::UnknownName;

/// The caller of an authenticated request.
#[derive(Clone, Debug)]
pub enum Caller {
    /// A client that presented an active credential.
    Credential(Arc<AccessCredential>),
    /// A process with a login to the database, in the name of this user: `kim@workstation`.
    DatabaseLogin(Arc<str>),
}

impl Caller {
    /// The caller for people: the name of the credential, or the user at the database.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Credential(credential) => &credential.name,
            Self::DatabaseLogin(user) => user,
        }
    }

    /// The role, which the table of calls is compared with.
    #[must_use]
    pub fn role(&self) -> AccessRole {
        match self {
            Self::Credential(credential) => credential.role,
            Self::DatabaseLogin(_) => AccessRole::Admin,
        }
    }

    /// The machines that the caller may see and change.
    #[must_use]
    pub fn scope(&self) -> &AccessScope {
        match self {
            Self::Credential(credential) => &credential.scope,
            Self::DatabaseLogin(_) => &AccessScope::Fleet,
        }
    }

    /// The credential's id; `None` for a login to the database.
    #[must_use]
    pub fn credential_id(&self) -> Option<Uuid> {
        match self {
            Self::Credential(credential) => Some(credential.id),
            Self::DatabaseLogin(_) => None,
        }
    }

    /// The caller in the audit. It contains the credential's id, because names are not unique.
    #[must_use]
    pub fn actor(&self) -> Actor {
        match self {
            Self::Credential(credential) => {
                let AccessCredential { id, kind, name, .. } = &**credential;
                Actor { name: format!("{name} ({kind} {id})"), credential: Some(*id) }
            }
            Self::DatabaseLogin(user) => Actor { name: user.to_string(), credential: None },
        }
    }

    /// The status as this caller gets it. A login to the database gets the error behind it: it may know what the
    /// database answered, and no shepherd has a log of this call.
    #[must_use]
    pub fn reveal_cause(&self, status: Status) -> Status {
        match (self, cause_of(&status)) {
            (Self::DatabaseLogin(_), Some(cause)) => {
                Status::with_details(status.code(), cause, Bytes::copy_from_slice(status.details()))
            }
            _ => status,
        }
    }
}

/// The caller of an authenticated request.
pub fn caller_of<T>(request: &Request<T>) -> Result<Caller, Status> {
    request.extensions().get::<Caller>().cloned().ok_or_else(|| {
        tracing::error!("a call came to a service without passing the authentication");
        error_status(Code::Internal, "INTERNAL", "this shepherd failed to answer")
    })
}

/// Parses the name of a role in a request.
pub fn parse_role(text: &str) -> Result<AccessRole, Status> {
    text.parse().map_err(|error: UnknownName| invalid_argument("role", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    use model::time::Timestamp;

    use crate::api::api_error::internal_status;

    #[test]
    fn only_a_database_login_learns_the_cause_of_an_internal_failure() {
        let status = || internal_status("the policy is no JSON", &"a key is no text");
        let login = Caller::DatabaseLogin("kim@workstation".into());
        let revealed = login.reveal_cause(status());
        assert_eq!(
            (revealed.code(), revealed.message()),
            (Code::Internal, "the policy is no JSON: a key is no text")
        );
        assert_eq!(revealed.details(), status().details());

        let client = Caller::Credential(Arc::new(AccessCredential {
            id: Uuid::nil(),
            kind: "token".to_owned(),
            name: "kim".to_owned(),
            role: AccessRole::Admin,
            scope: AccessScope::Fleet,
            created_at: Timestamp::UNIX_EPOCH,
            created_by: "kim".to_owned(),
            expires_at: None,
            revoked_at: None,
            revoked_by: None,
            active: true,
        }));
        let refused = client.reveal_cause(status());
        assert_eq!(refused.message(), "this shepherd failed to answer; its log says why");
    }

    #[test]
    fn status_without_a_cause_is_the_same_for_a_database_login() {
        let login = Caller::DatabaseLogin("kim@workstation".into());
        let status = login.reveal_cause(invalid_argument("role", "there is no such role"));
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "there is no such role"));
    }
}
