//! The certificate that the curator on a consensus member shows.
//!
//! It certifies the node's key and has the node's names. Like the node's own certificate ([`pki`](crate::pki)), it is
//! valid at both ends of a connection. Its organisation is what makes it a curator's. A client that does not compare
//! the organisation takes it for the node's, so a curator may show it before every client demands it. A client that
//! demands a curator accepts no other certificate of a node ([`curator_role`](crate::curator_role)).
//!
//! It is valid for a day ([`CURATOR_LIFETIME`](crate::pki::CURATOR_LIFETIME)). So a list of revoked curators needs to
//! contain a certificate for no longer than that, and stays short.

use crate::certificate::{IssuedCertificate, Serial, Validity};
use crate::node_id::PublicKey;
use crate::pki::{Authority, CURATOR_ORGANIZATION, PkiError};

impl Authority {
    /// Signs a certificate for the curator on the node with this key.
    pub fn issue_curator_certificate(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<IssuedCertificate, PkiError> {
        self.issue_for_node(key, serial, validity, Some(CURATOR_ORGANIZATION))
    }
}
