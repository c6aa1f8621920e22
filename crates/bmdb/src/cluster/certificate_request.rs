//! Admit a request for a person's certificate beside those that are stored.
//!
//! Both kinds of certificates follow the same rules: a key has one certificate, and a cluster has a limited number of
//! each kind. [`model::cluster::certificate_request`] decides the outcome of a request.

use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use model::cluster::certificate_request::{CertificateRequest, MAX_REQUESTS, requests_to_delete};
use model::time::Timestamp;

/// Checks that the cluster `name` can have another request for this key. Returns the ids of the `stored` requests that
/// are over and must be deleted. `kind` names all certificates of this kind.
pub(super) fn admit_request<R: AsRef<CertificateRequest>>(
    stored: &[R],
    public_key: &[u8],
    (name, kind): (&str, &str),
    now: Timestamp,
) -> Result<Vec<Uuid>, BmdbError> {
    if let Some(earlier) = stored.iter().map(R::as_ref).find(|earlier| earlier.public_key == public_key) {
        let text = format!(
            "certificate {} was requested with the same key; create a key of its own for each certificate",
            earlier.id
        );
        return Err(order_rejected("KEY_IN_USE", text));
    }
    let old = requests_to_delete(stored, now);
    if stored.len() - old.len() >= MAX_REQUESTS {
        let text = format!(
            "the cluster {name} has {MAX_REQUESTS} {kind}, which is the maximum; each is deleted a day after it \
             has ended"
        );
        return Err(order_rejected("TOO_MANY_CREDENTIALS", text));
    }
    Ok(old)
}
