//! The authority that this node trusts without a statement, and its change after many replacements.
//!
//! It is in `credentials.json`. Each replacement of the cluster's authority adds a succession to the stored statement, which
//! is verified through all of them. Their number is bounded, so a node that has followed many replacements trusts the
//! authority that signed its stored statement. It does so at its start, before anything else writes the credentials. The
//! statement is stored before, so an interrupted node has a valid pair of both files.

use curator_client::pki::TrustAnchor;

use crate::cluster::files::{ClusterFiles, ClusterFilesError, Credentials};

impl ClusterFiles {
    /// Trusts the authority that signed the stored statement, if many successions lead to it. Returns the credentials to
    /// go on with: these ones, if nothing has to change or if that fails.
    #[must_use]
    pub fn change_root(&self, credentials: Credentials) -> Credentials {
        match self.find_next_root(&credentials) {
            Ok(Some(root)) => {
                let ca_certificate = hex::encode(&root.certificate);
                let changed = Credentials { ca_certificate, ..credentials.clone() };
                match self.write_credentials(&changed) {
                    Ok(()) => {
                        tracing::info!("this node trusts the present authority of its cluster from now on");
                        return changed;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the authority that this node trusts was not changed")
                    }
                }
            }
            Ok(None) => {}
            // A damaged statement is reported where curators are followed.
            Err(error) => tracing::debug!(%error, "it is not known which authority this node could trust"),
        }
        credentials
    }

    fn find_next_root(&self, credentials: &Credentials) -> Result<Option<TrustAnchor>, ClusterFilesError> {
        let anchor = hex::decode(&credentials.ca_certificate).ok();
        let anchor = anchor.and_then(|certificate| TrustAnchor::parse(&certificate).ok());
        let Some(anchor) = anchor else { return Ok(None) };
        Ok(self.read_statement(&anchor)?.and_then(|stored| stored.next_root().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use curator_client::statement::Statement;
    use curator_client::succession::Succession;
    use curator_client::testing::{authority_of, statement};

    use super::*;
    use crate::cluster::files::tests::files;

    /// Stores a statement by the authority to which this many successions lead from the first one.
    fn state(files: &ClusterFiles, number: u64, successions: u8) {
        let signer = authority_of(1, successions + 1);
        let link = |old| Succession::sign(&authority_of(1, old), authority_of(1, old + 1).anchor()).unwrap();
        let signed = Statement { authorities: vec![signer.anchor().clone()], ..statement(0, number) };
        let signed = signed.sign(&signer).unwrap();
        files.write_statement(&signed.with_successors((1..=successions).map(link).collect())).unwrap();
    }

    fn trusting(authority: u8) -> Credentials {
        let ca_certificate = hex::encode(&authority_of(1, authority).anchor().certificate);
        Credentials { certificate: "00".to_owned(), ca_certificate }
    }

    #[test]
    fn node_that_followed_many_replacements_trusts_the_present_authority() {
        let (directory, files) = files();
        files.write_credentials(&trusting(1)).unwrap();
        assert_eq!(files.change_root(trusting(1)), trusting(1), "no statement");
        // Successions of the stored statement, what is trusted before, and after.
        for (successions, before, after) in
            [(31, 1, 1), (32, 1, 33), (33, 33, 33), (40, 33, 33), (66, 33, 67)]
        {
            state(&files, successions.into(), successions);
            assert_eq!(files.change_root(trusting(before)), trusting(after), "{successions}");
            assert_eq!(files.read_credentials().unwrap(), Some(trusting(after)), "{successions}");
            let read = files.read_statement(authority_of(1, after).anchor()).unwrap().unwrap();
            assert_eq!(read.statement.number, u64::from(successions));
        }
        std::fs::write(directory.path().join("cluster/statement.json"), "{").unwrap();
        assert_eq!(files.change_root(trusting(67)), trusting(67), "a damaged statement");
    }
}
