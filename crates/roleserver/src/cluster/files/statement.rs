//! The file `statement.json`: the newest statement of the cluster's authority that this node has verified.
//!
//! It is truth: without it, this node would follow any node of its cluster again, a revoked curator included. With a damaged
//! file it follows nobody, and what runs on it continues: etcd starts, because the other members may need it.
//!
//! The file `statement_stored.json` beside it shows that there was a statement, and of which cluster. With it, a missing
//! statement is as bad as a damaged one: a disk that loses a file, or a copy without it, must not end what counts for
//! good. The mark is written after the first statement and removed before the last one, so no crash leaves it alone. A
//! release before the mark left none, so it is written with the next statement.
//!
//! A person who has found out why may remove both files: the node then begins as a new one does, without a restart.

use std::sync::{Mutex, PoisonError};

use curator_client::known_epoch::EpochChange;
use curator_client::pki::TrustAnchor;
use curator_client::statement::SignedStatement;
use proto::curator::v1 as wire;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::disk;

const FILE_NAME: &str = "statement.json";
/// The mark that a statement was stored.
const MARK_NAME: &str = "statement_stored.json";
/// Why a statement is damaged that is not there.
const MISSING: &str = "it is missing, and statement_stored.json beside it shows that this node had one";

/// A cluster with a statement that this node has stored.
#[derive(Serialize, Deserialize)]
struct StatementMark {
    /// UUID of the cluster.
    cluster: Uuid,
}

/// A statement as it is stored. Cluster, epoch and number are those of the statement.
#[derive(Serialize, Deserialize)]
struct StoredStatement {
    /// UUID of the cluster.
    cluster: Uuid,
    epoch: u64,
    number: u64,
    /// The signed bytes, in hexadecimal digits.
    statement: String,
    /// The signature, in hexadecimal digits.
    signature: String,
    /// The successions from the authority that this node trusts to the one that signed, in hexadecimal digits, oldest
    /// first. Releases that could not replace an authority stored none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    successors: Vec<String>,
}

impl ClusterFiles {
    /// Reads the newest statement of the cluster with this authority, and verifies it; `None` if there is none.
    pub fn read_statement(&self, anchor: &TrustAnchor) -> Result<Option<SignedStatement>, ClusterFilesError> {
        let Some(stored) = self.read_stored_statement(anchor.cluster)? else { return Ok(None) };
        let decode = |field: &str, text: &str| {
            hex::decode(text)
                .map_err(|_| self.damaged_statement(format!("its {field} is no hexadecimal text")))
        };
        let wire = wire::SignedStatement {
            statement: decode("statement", &stored.statement)?,
            signature: decode("signature", &stored.signature)?,
            successors: stored
                .successors
                .iter()
                .map(|succession| decode("successors", succession))
                .collect::<Result<_, _>>()?,
        };
        let signed = SignedStatement::verify(&wire, std::slice::from_ref(anchor))
            .map_err(|error| self.damaged_statement(error.to_string()))?;
        if signed.statement.order() != (stored.epoch, stored.number) {
            return Err(self.damaged_statement("its number is not the signed one".to_owned()));
        }
        Ok(Some(signed))
    }

    /// Stores a statement, unless a statement of the same cluster is stored that is not lower.
    pub fn write_statement(&self, signed: &SignedStatement) -> Result<(), ClusterFilesError> {
        // Several tasks receive statements, and other tasks go on during a write: a lower one must not replace a higher
        // one.
        static CHANGE: Mutex<()> = Mutex::new(());
        let statement = &signed.statement;
        let wire = signed.to_wire();
        let next = StoredStatement {
            cluster: statement.cluster,
            epoch: statement.epoch,
            number: statement.number,
            statement: hex::encode(wire.statement),
            signature: hex::encode(wire.signature),
            successors: wire.successors.iter().map(hex::encode).collect(),
        };
        disk::run_beside(&self.path, || {
            let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
            let stored = self.read_stored_statement(statement.cluster)?;
            let is_first = stored.is_none();
            if stored.is_some_and(|stored| (stored.epoch, stored.number) >= statement.order()) {
                return Ok(());
            }
            // The authority may have been replaced after a theft while this statement was on its way.
            if !self.is_own_statement(signed)? {
                return Ok(());
            }
            // Before it is stored: a file of an earlier release does not say what of the epoch is proved.
            if is_first {
                self.change_epoch(statement.cluster, EpochChange::Stated(statement.epoch))?;
            }
            self.write_json(FILE_NAME, &next)?;
            if self.has_mark(statement.cluster).unwrap_or(false) {
                return Ok(());
            }
            self.write_hint(MARK_NAME, &StatementMark { cluster: statement.cluster })
        })
    }

    /// Removes the stored statement: it is that of a former authority.
    pub(super) fn remove_statement(&self) -> Result<(), ClusterFilesError> {
        self.remove_file(MARK_NAME)?;
        self.remove_file(FILE_NAME)
    }

    /// Whether a statement of this cluster is stored. A damaged one counts, and so does one that was lost.
    pub(super) fn has_statement(&self, cluster: Uuid) -> bool {
        !matches!(self.read_stored_statement(cluster), Ok(None))
    }

    fn read_stored_statement(&self, cluster: Uuid) -> Result<Option<StoredStatement>, ClusterFilesError> {
        // Before the statement: the first one may be stored meanwhile, and its mark after it.
        let is_marked = self.has_mark(cluster);
        let stored = self.read_json::<StoredStatement>(FILE_NAME).map_err(|error| match error {
            ClusterFilesError::Damaged { reason, .. } => self.damaged_statement(reason),
            error => error,
        })?;
        let stored = stored.filter(|stored| stored.cluster == cluster);
        if stored.is_none() && is_marked? {
            return Err(self.damaged_statement(MISSING.to_owned()));
        }
        Ok(stored)
    }

    /// Whether this node has stored a statement of this cluster, as far as the mark shows it.
    fn has_mark(&self, cluster: Uuid) -> Result<bool, ClusterFilesError> {
        match self.read_json::<StatementMark>(MARK_NAME) {
            Ok(mark) => Ok(mark.is_some_and(|mark| mark.cluster == cluster)),
            Err(ClusterFilesError::Damaged { reason, .. }) => Err(self
                .damaged_statement(format!("it is missing, and {MARK_NAME} beside it is damaged: {reason}"))),
            Err(error) => Err(error),
        }
    }

    fn damaged_statement(&self, reason: String) -> ClusterFilesError {
        ClusterFilesError::DamagedStatement { path: self.path.join(FILE_NAME), reason }
    }
}

#[cfg(test)]
mod tests {
    use curator_client::statement::Statement;
    use curator_client::succession::Succession;
    use curator_client::testing::{authority, authority_of, statement};

    use super::*;
    use crate::cluster::files::tests::files;

    fn order(files: &ClusterFiles) -> Option<(u64, u64)> {
        let read = files.read_statement(authority(1).anchor()).unwrap();
        read.map(|signed| signed.statement.order())
    }

    #[test]
    fn statement_of_a_successor_is_read_by_the_former_authority() {
        let (_directory, files) = files();
        let (old, new) = (authority(1), authority_of(1, 5));
        let authorities = vec![new.anchor().clone(), old.anchor().clone()];
        let signed = Statement { authorities, ..statement(0, 2) }.sign(&new).unwrap();
        let chain = vec![Succession::sign(&old, new.anchor()).unwrap()];
        files.write_statement(&signed.clone().with_successors(chain.clone())).unwrap();
        let read = files.read_statement(old.anchor()).unwrap().unwrap();
        assert_eq!((&read.statement, read.to_wire().successors), (&signed.statement, chain));
        assert_eq!(files.read_statement(new.anchor()).unwrap(), Some(signed.clone()), "it signed");
        // Without the succession, nothing shows that it replaces the old authority.
        files.write_statement(&Statement { number: 3, ..signed.statement }.sign(&new).unwrap()).unwrap();
        let error = files.read_statement(old.anchor()).unwrap_err().to_string();
        assert!(error.contains("is not trusted"), "{error}");
    }

    #[test]
    fn higher_statement_is_stored_and_a_lower_one_is_not() {
        let (_directory, files) = files();
        assert_eq!(order(&files), None);
        for ((epoch, number), stored) in
            [((0, 2), (0, 2)), ((0, 1), (0, 2)), ((0, 3), (0, 3)), ((1, 1), (1, 1)), ((0, 9), (1, 1))]
        {
            files.write_statement(&statement(epoch, number).sign(&authority(1)).unwrap()).unwrap();
            assert_eq!(order(&files), Some(stored), "{epoch} {number}");
        }
        let read = files.read_statement(authority(1).anchor()).unwrap().unwrap();
        assert_eq!(read, statement(1, 1).sign(&authority(1)).unwrap());
        assert_eq!(files.read_statement(authority(2).anchor()).unwrap(), None, "it is another cluster's");
    }

    #[test]
    fn missing_statement_is_no_node_without_one() {
        let (directory, files) = files();
        let anchor = authority(1).anchor().clone();
        let (former, next) = (statement(0, 2), statement(0, 3));
        let write = |statement: &Statement| files.write_statement(&statement.sign(&authority(1)).unwrap());
        write(&former).unwrap();
        let [path, mark] = ["statement.json", "statement_stored.json"]
            .map(|name| directory.path().join("cluster").join(name));
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for marked in [std::fs::read(&mark).unwrap(), b"{".to_vec()] {
            std::fs::write(&mark, marked).unwrap();
            for error in [files.read_statement(&anchor).unwrap_err(), write(&next).unwrap_err()] {
                assert!(matches!(error, ClusterFilesError::DamagedStatement { .. }), "{error}");
                let error = error.to_string();
                assert!(error.contains("statement.json is damaged (it is missing"), "{error}");
                assert!(error.contains("remove it and statement_stored.json"), "{error}");
            }
            assert!(!path.exists() && files.has_statement(anchor.cluster), "nothing is made up");
        }
        // Of another cluster it says nothing, as long as it can be read.
        std::fs::write(&path, &whole).unwrap();
        write(&next).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(files.read_statement(authority(2).anchor()).unwrap(), None);

        // The ways back: a copy of the file, both files removed, and another authority by an order.
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(order(&files), Some((0, 2)));
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_file(&mark).unwrap();
        assert_eq!(order(&files), None);
        write(&former).unwrap();
        std::fs::remove_file(&path).unwrap();
        files.replace_statement(&anchor, Some(&next.sign(&authority(1)).unwrap())).unwrap();
        assert_eq!(order(&files), Some((0, 3)));
        files.remove_statement().unwrap();
        assert_eq!(order(&files), None, "that of a former authority leaves no mark");
    }

    #[test]
    fn statement_of_a_release_without_the_mark_gets_it_with_the_next_one() {
        let (directory, files) = files();
        let mark = directory.path().join("cluster/statement_stored.json");
        for number in [2, 3] {
            files.write_statement(&statement(0, number).sign(&authority(1)).unwrap()).unwrap();
            assert!(mark.exists(), "{number}");
            std::fs::remove_file(&mark).unwrap();
            assert_eq!(order(&files), Some((0, number)));
        }
    }

    #[test]
    fn damaged_statement_is_an_error_that_names_the_file() {
        let (directory, files) = files();
        files.write_statement(&statement(0, 2).sign(&authority(1)).unwrap()).unwrap();
        let path = directory.path().join("cluster/statement.json");
        let whole = std::fs::read_to_string(&path).unwrap();
        let forged = hex::encode(statement(0, 3).sign(&authority(1)).unwrap().to_wire().statement);
        let signed = hex::encode(statement(0, 2).sign(&authority(1)).unwrap().to_wire().statement);
        for damaged in [
            "{".to_owned(),
            whole.replace("\"number\": 2", "\"number\": 3"),
            whole.replace(&signed, &forged),
            whole.replace(&signed, "none"),
        ] {
            assert_ne!(damaged, whole);
            std::fs::write(&path, damaged).unwrap();
            let error = files.read_statement(authority(1).anchor()).unwrap_err().to_string();
            assert!(error.contains("statement.json is damaged"), "{error}");
            assert!(error.contains("or remove it") && error.contains("trusts any node"), "{error}");
        }
    }
}
