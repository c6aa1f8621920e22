//! Stored declarations and node info, read at start before a curator is reachable.
//!
//! | file | content |
//! | --- | --- |
//! | `declarations.json` | the last declarations of the node's roles from a curator, and the roles that are retained without one |
//! | `about.json` | the last known facts of the node: machine, labels, address, and curators |
//!
//! A damaged file counts as absent and never as "nothing to run": a truncated file would otherwise stop every service
//! whose declaration was cut off. So the stored declarations carry a digest of all of them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::role_declaration::RoleDeclaration;
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::services::desired::{DeclarationMap, NodeInfo, RenderInputs, RetainedRoles};

const DECLARATIONS_FILE: &str = "declarations.json";
const NODE_INFO_FILE: &str = "about.json";
/// Largest file that is read, in bytes. A declaration has a megabyte at most, and a node has a few of them.
const MAX_FILE_BYTES: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct PersistedDeclarations {
    sha256: String,
    declarations: String,
}

/// The last known facts of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersistedNodeInfo {
    /// Machine and labels in the node's record.
    pub about: Option<NodeInfo>,
    /// Address at which other nodes connect to it.
    pub address: Option<IpAddr>,
    /// Addresses of all curators, `host:port` each.
    pub curators: Option<BTreeSet<String>>,
}

impl From<&RenderInputs> for PersistedNodeInfo {
    fn from(known: &RenderInputs) -> Self {
        Self { about: known.node_info.clone(), address: known.address, curators: known.curators.clone() }
    }
}

/// Reads the last declarations and the retained roles; `None` also for a damaged file.
#[must_use]
pub fn read_declarations(files: &ClusterFiles) -> Option<(DeclarationMap, RetainedRoles)> {
    let read = files.read_json_limited::<PersistedDeclarations>(DECLARATIONS_FILE, MAX_FILE_BYTES).and_then(
        |kept| {
            let Some(kept) = kept else { return Ok(None) };
            decode_declarations(&kept)
                .map(Some)
                .map_err(|reason| files.damaged_error(DECLARATIONS_FILE, reason))
        },
    );
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored declarations cannot be read; waiting for a curator to send them");
        None
    })
}

fn decode_declarations(kept: &PersistedDeclarations) -> Result<(DeclarationMap, RetainedRoles), String> {
    let bytes = STANDARD.decode(&kept.declarations).map_err(|_| "it is no base64 text".to_owned())?;
    if sha256(&bytes) != kept.sha256 {
        return Err("its digest does not match".to_owned());
    }
    let response =
        wire::WatchOwnDeclarationsResponse::decode(bytes.as_slice()).map_err(|error| error.to_string())?;
    let checked = response.declarations.into_iter().map(|declared| {
        let declaration = RoleDeclaration::new(declared).map_err(|error| error.to_string())?;
        Ok((declaration.role().clone(), Arc::new(declaration)))
    });
    Ok((checked.collect::<Result<_, String>>()?, response.unreadable.into_iter().collect()))
}

/// Stores declarations and retained roles with their digest. A release before retained roles ignores these.
pub fn write_declarations(
    files: &ClusterFiles,
    declared: &DeclarationMap,
    retained: &RetainedRoles,
) -> Result<(), ClusterFilesError> {
    let declarations = declared.values().map(|declaration| declaration.to_wire().clone()).collect();
    let unreadable = retained.iter().cloned().collect();
    let response = wire::WatchOwnDeclarationsResponse { declarations, unreadable };
    let bytes = response.encode_to_vec();
    files.write_hint(
        DECLARATIONS_FILE,
        &PersistedDeclarations { sha256: sha256(&bytes), declarations: STANDARD.encode(&bytes) },
    )
}

/// Reads the last known facts of the node; empty also for a damaged file.
#[must_use]
pub fn read_node_info(files: &ClusterFiles) -> PersistedNodeInfo {
    let read = files.read_json_limited(NODE_INFO_FILE, MAX_FILE_BYTES).unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored facts of this node cannot be read; waiting for a curator to send them");
        None
    });
    read.unwrap_or_default()
}

/// Stores the facts of the node.
pub fn write_node_info(files: &ClusterFiles, about: &PersistedNodeInfo) -> Result<(), ClusterFilesError> {
    files.write_hint(NODE_INFO_FILE, about)
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::files::tests::files;

    fn declared() -> DeclarationMap {
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
            let declared =
                wire::Declaration { role: role.to_owned(), services, revision: 7, ..Default::default() };
            let declaration = RoleDeclaration::new(declared).unwrap();
            (declaration.role().clone(), Arc::new(declaration))
        });
        roles.into()
    }

    #[test]
    fn declarations_read_back_as_they_were_written() {
        let (_directory, files) = files();
        assert_eq!(read_declarations(&files), None, "nothing was ever declared");
        for declared in [declared(), DeclarationMap::new()] {
            for retained in [RetainedRoles::from(["api".to_owned()]), RetainedRoles::new()] {
                write_declarations(&files, &declared, &retained).unwrap();
                assert_eq!(read_declarations(&files), Some((declared.clone(), retained)));
            }
        }
    }

    #[test]
    fn damaged_declarations_are_absent_and_never_none() {
        let (directory, files) = files();
        let none = RetainedRoles::new();
        write_declarations(&files, &declared(), &none).unwrap();
        let path = directory.path().join("cluster").join(DECLARATIONS_FILE);
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(read_declarations(&files), None, "{length} bytes");
        }
        // Truncated at the end of a declaration, which decodes as fewer declarations.
        let kept: PersistedDeclarations = serde_json::from_slice(&whole).unwrap();
        let one: DeclarationMap = declared().into_iter().take(1).collect();
        write_declarations(&files, &one, &none).unwrap();
        let short: PersistedDeclarations = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let cut = PersistedDeclarations { sha256: kept.sha256, declarations: short.declarations };
        std::fs::write(&path, serde_json::to_vec(&cut).unwrap()).unwrap();
        assert_eq!(read_declarations(&files), None);
    }

    #[test]
    fn node_info_reads_back_and_counts_as_absent_when_damaged() {
        let (directory, files) = files();
        assert_eq!(read_node_info(&files), PersistedNodeInfo::default());
        let kept = PersistedNodeInfo {
            about: Some(NodeInfo {
                machine: "m".to_owned(),
                labels: [("row".to_owned(), "7".to_owned())].into(),
            }),
            address: Some("10.0.0.7".parse().unwrap()),
            curators: Some(BTreeSet::from(["10.0.0.1:1".to_owned()])),
        };
        write_node_info(&files, &kept).unwrap();
        assert_eq!(read_node_info(&files), kept);
        std::fs::write(directory.path().join("cluster").join(NODE_INFO_FILE), "{\"about\":").unwrap();
        assert_eq!(read_node_info(&files), PersistedNodeInfo::default());
    }
}
