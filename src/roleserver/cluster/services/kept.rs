//! What is kept on the disk of what this node is to run.
//!
//! | file | what |
//! | --- | --- |
//! | `declarations.json` | declarations of the roles that the node has, as a curator last told them |
//! | `about.json` | what was last known of the node: its machine, labels, address, and where curators are |
//!
//! Both are read when the node starts, before any curator can be asked. What is damaged counts as absent and never as
//! "nothing to run": a file that was cut short would otherwise stop every service whose declaration was behind the cut.
//! So declarations carry a digest of all of them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::model::declaration::Declaration;
use crate::proto::curator::v1 as wire;
use crate::roleserver::cluster::files::{Files, FilesError};
use crate::roleserver::cluster::services::wanted::{About, Declared, Known};

const DECLARATIONS: &str = "declarations.json";
const ABOUT: &str = "about.json";
/// The largest file that is read. A declaration has a megabyte at most, and a node has some of them.
const LIMIT: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct Kept {
    sha256: String,
    declarations: String,
}

/// What was last known of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAbout {
    /// What people say of it.
    pub about: Option<About>,
    /// Where other nodes reach it.
    pub address: Option<IpAddr>,
    /// `host:port` of every curator.
    pub curators: Option<BTreeSet<String>>,
}

impl From<&Known> for KeptAbout {
    fn from(known: &Known) -> Self {
        Self { about: known.about.clone(), address: known.address, curators: known.curators.clone() }
    }
}

/// Declarations as they were last told; none also where what is kept is damaged.
#[must_use]
pub fn declarations(files: &Files) -> Option<Declared> {
    let read = files.read_up_to::<Kept>(DECLARATIONS, LIMIT).and_then(|kept| {
        let Some(kept) = kept else { return Ok(None) };
        decode(&kept).map(Some).map_err(|reason| files.damaged(DECLARATIONS, reason))
    });
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, "which services are to run is not known until a curator says it");
        None
    })
}

fn decode(kept: &Kept) -> Result<Declared, String> {
    let bytes = STANDARD.decode(&kept.declarations).map_err(|_| "it is no base64 text".to_owned())?;
    if sha256(&bytes) != kept.sha256 {
        return Err("its digest is another one".to_owned());
    }
    let told =
        wire::WatchOwnDeclarationsResponse::decode(bytes.as_slice()).map_err(|error| error.to_string())?;
    let checked = told.declarations.into_iter().map(|declared| {
        let declaration = Declaration::new(declared).map_err(|error| error.to_string())?;
        Ok((declaration.role().clone(), Arc::new(declaration)))
    });
    checked.collect()
}

/// Keeps declarations.
pub fn write_declarations(files: &Files, declared: &Declared) -> Result<(), FilesError> {
    let declarations = declared.values().map(|declaration| declaration.to_wire().clone()).collect();
    let told = wire::WatchOwnDeclarationsResponse { declarations, unreadable: Vec::new() };
    let bytes = told.encode_to_vec();
    files.write(DECLARATIONS, &Kept { sha256: sha256(&bytes), declarations: STANDARD.encode(&bytes) })
}

/// What was last known of the node; nothing also where what is kept is damaged.
#[must_use]
pub fn about(files: &Files) -> KeptAbout {
    let read = files.read_up_to(ABOUT, LIMIT).unwrap_or_else(|error| {
        tracing::warn!(%error, "what is known of this node is not known until a curator says it");
        None
    });
    read.unwrap_or_default()
}

/// Keeps what is known of the node.
pub fn write_about(files: &Files, about: &KeptAbout) -> Result<(), FilesError> {
    files.write(ABOUT, about)
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared() -> Declared {
        let service = |name: &str| wire::Service {
            name: name.to_owned(),
            run: Some(wire::service::Run::Program(wire::Program {
                source: Some(wire::program::Source::Path("/bin/server".to_owned())),
                url: String::new(),
            })),
            user: "root".to_owned(),
            ..Default::default()
        };
        let roles = ["web", "disk"].map(|role| {
            let services = vec![service("one"), service("two")];
            let declared = wire::Declaration { role: role.to_owned(), services, revision: 7 };
            let declaration = Declaration::new(declared).unwrap();
            (declaration.role().clone(), Arc::new(declaration))
        });
        roles.into()
    }

    fn files() -> (tempfile::TempDir, Files) {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        (directory, files)
    }

    #[test]
    fn declarations_read_back_as_they_were_kept() {
        let (_directory, files) = files();
        assert_eq!(declarations(&files), None, "nothing was ever told");
        for declared in [declared(), Declared::new()] {
            write_declarations(&files, &declared).unwrap();
            assert_eq!(declarations(&files), Some(declared));
        }
    }

    #[test]
    fn damaged_declarations_are_absent_and_never_none() {
        let (directory, files) = files();
        write_declarations(&files, &declared()).unwrap();
        let path = directory.path().join("cluster").join(DECLARATIONS);
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(declarations(&files), None, "{length} bytes");
        }
        // Cut at the end of a declaration, which reads as fewer of them.
        let kept: Kept = serde_json::from_slice(&whole).unwrap();
        let one: Declared = declared().into_iter().take(1).collect();
        write_declarations(&files, &one).unwrap();
        let short: Kept = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let cut = Kept { sha256: kept.sha256, declarations: short.declarations };
        std::fs::write(&path, serde_json::to_vec(&cut).unwrap()).unwrap();
        assert_eq!(declarations(&files), None);
    }

    #[test]
    fn what_is_known_of_the_node_reads_back_and_damaged_it_is_not_known() {
        let (directory, files) = files();
        assert_eq!(about(&files), KeptAbout::default());
        let kept = KeptAbout {
            about: Some(About {
                machine: "m".to_owned(),
                labels: [("row".to_owned(), "7".to_owned())].into(),
            }),
            address: Some("10.0.0.7".parse().unwrap()),
            curators: Some(BTreeSet::from(["10.0.0.1:1".to_owned()])),
        };
        write_about(&files, &kept).unwrap();
        assert_eq!(about(&files), kept);
        std::fs::write(directory.path().join("cluster").join(ABOUT), "{\"about\":").unwrap();
        assert_eq!(about(&files), KeptAbout::default());
    }
}
