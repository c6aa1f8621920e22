//! The Kubernetes setup of this node: validation and storage.
//!
//! A setup is stored durably before it takes effect, so that after a reboot everything starts from the disk, with or
//! without a curator. A damaged file counts as absent and never as "nothing to run".
//!
//! When the curator removes the setup, the last one stays stored: a worker that drains and leaves still needs the
//! addresses of the API servers.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::role_declaration::Sha256;
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const NAME: &str = "kubernetes.json";
/// Largest file that is read, in bytes: a setup is a few certificates and texts.
const LIMIT: u64 = 16 << 20;

/// A validated setup of this node; cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSetup(Arc<SetupInner>);

#[derive(Debug, PartialEq)]
struct SetupInner {
    wire: wire::KubernetesSetup,
    settings: wire::KubernetesSettings,
    bundle: Sha256,
}

/// Content of the file `kubernetes.json`.
#[derive(Serialize, Deserialize)]
struct StoredSetup {
    sha256: String,
    setup: String,
    /// Whether the curator has removed the setup.
    over: bool,
}

impl NodeSetup {
    /// Validates a setup as far as components depend on it; the error is a sentence.
    pub fn new(kubernetes_setup: wire::KubernetesSetup) -> Result<Self, String> {
        let settings = kubernetes_setup.settings.clone().ok_or("it has no settings")?;
        let bundle =
            hex::decode(&kubernetes_setup.bundle).ok().and_then(|digest| digest.try_into().ok()).map(Sha256);
        let bundle =
            bundle.ok_or_else(|| format!("its bundle {:?} is no digest", kubernetes_setup.bundle))?;
        if kubernetes_setup.generation == 0 {
            return Err("it has no generation of authorities and keys".to_owned());
        }
        if settings.service_range.is_empty() || settings.pod_range.is_empty() || settings.domain.is_empty() {
            return Err("it lacks a range or the domain".to_owned());
        }
        let setup = Self(Arc::new(SetupInner { wire: kubernetes_setup, settings, bundle }));
        for which in
            [wire::KubernetesKeys::Servers, wire::KubernetesKeys::Clients, wire::KubernetesKeys::FrontProxy]
        {
            if setup.trusted_certificates(which).is_empty() {
                return Err(format!("it lacks the authority {}", which.as_str_name()));
            }
        }
        if setup.service_account_keys().is_empty() {
            return Err("it lacks the keys of service accounts".to_owned());
        }
        Ok(setup)
    }

    /// Generation of the authorities and keys, at least 1.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.wire.generation
    }

    /// Digest of the bundle that the node should run with.
    #[must_use]
    pub fn bundle(&self) -> Sha256 {
        self.0.bundle
    }

    /// Settings of the cluster's Kubernetes.
    #[must_use]
    pub fn settings(&self) -> &wire::KubernetesSettings {
        &self.0.settings
    }

    /// This node's part of the pod range; empty if it is no worker.
    #[must_use]
    pub fn pod_range(&self) -> &str {
        &self.0.wire.pod_range
    }

    /// Trusted certificates of an authority, DER.
    #[must_use]
    pub fn trusted_certificates(&self, which: wire::KubernetesKeys) -> &[Vec<u8>] {
        let authorities = &self.0.wire.authorities;
        let found = authorities.iter().find(|authority| authority.keys() == which);
        found.map_or(&[], |authority| &authority.trusted)
    }

    /// Public keys that tokens of service accounts are verified with, DER.
    #[must_use]
    pub fn service_account_keys(&self) -> &[Vec<u8>] {
        &self.0.wire.service_account_keys
    }

    /// Addresses of API servers, `host:port` each.
    #[must_use]
    pub fn api_servers(&self) -> &[String] {
        &self.0.wire.api_servers
    }

    /// Labels of this node's Node object.
    pub fn labels(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.wire.labels.iter()
    }
}

/// Reads the current setup: `None` if it is unknown or the file is damaged, `Some(None)` if the curator has removed it.
#[must_use]
pub fn read_current(files: &ClusterFiles) -> Option<Option<NodeSetup>> {
    read_stored(files).map(|(setup, over)| Some(setup).filter(|_| !over))
}

/// Reads the last setup, even if the curator has removed it since.
#[must_use]
pub fn read_last(files: &ClusterFiles) -> Option<NodeSetup> {
    read_stored(files).map(|(setup, _)| setup)
}

fn read_stored(files: &ClusterFiles) -> Option<(NodeSetup, bool)> {
    let read = files.read_json_limited::<StoredSetup>(NAME, LIMIT).and_then(|kept| {
        let Some(kept) = kept else { return Ok(None) };
        let over = kept.over;
        decode_setup(&kept)
            .map(|setup| Some((setup, over)))
            .map_err(|reason| files.damaged_error(NAME, reason))
    });
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored Kubernetes setup cannot be read; waiting for a curator to send it");
        None
    })
}

fn decode_setup(kept: &StoredSetup) -> Result<NodeSetup, String> {
    let bytes = STANDARD.decode(&kept.setup).map_err(|_| "it is no base64 text".to_owned())?;
    if sha256(&bytes, kept.over) != kept.sha256 {
        return Err("its digest does not match".to_owned());
    }
    NodeSetup::new(wire::KubernetesSetup::decode(bytes.as_slice()).map_err(|error| error.to_string())?)
}

fn sha256(bytes: &[u8], over: bool) -> String {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(&[u8::from(over)]);
    context.update(bytes);
    hex::encode(context.finish())
}

/// Stores a setup, or with `None` that the curator has removed it.
pub fn write_setup(files: &ClusterFiles, node_setup: Option<&NodeSetup>) -> Result<(), ClusterFilesError> {
    let (setup, over) = match node_setup {
        Some(setup) => (setup.clone(), false),
        None => match read_last(files) {
            Some(setup) => (setup, true),
            // No setup was ever stored.
            None => return Ok(()),
        },
    };
    let bytes = setup.0.wire.encode_to_vec();
    files
        .write_hint(NAME, &StoredSetup { sha256: sha256(&bytes, over), setup: STANDARD.encode(&bytes), over })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::cluster::kubernetes) fn wire_setup() -> wire::KubernetesSetup {
        let authority = |which: wire::KubernetesKeys| wire::KubernetesAuthority {
            keys: which.into(),
            trusted: vec![vec![7]],
        };
        wire::KubernetesSetup {
            generation: 3,
            bundle: "ab".repeat(32),
            bundle_url: String::new(),
            settings: Some(wire::KubernetesSettings {
                bundle: "ab".repeat(32),
                service_range: "10.96.0.0/16".to_owned(),
                pod_range: "10.128.0.0/12".to_owned(),
                node_prefix: 24,
                domain: "cluster.local".to_owned(),
                ..Default::default()
            }),
            pod_range: "10.128.3.0/24".to_owned(),
            authorities: vec![
                authority(wire::KubernetesKeys::Servers),
                authority(wire::KubernetesKeys::Clients),
                authority(wire::KubernetesKeys::FrontProxy),
            ],
            service_account_keys: vec![vec![8]],
            api_servers: vec!["10.0.0.1:6443".to_owned()],
            labels: [("label.shepherd/row".to_owned(), "7".to_owned())].into(),
        }
    }

    pub(in crate::cluster::kubernetes) fn setup() -> NodeSetup {
        NodeSetup::new(wire_setup()).unwrap()
    }

    #[test]
    fn incomplete_setup_is_rejected_with_a_reason() {
        type Change = fn(&mut wire::KubernetesSetup);
        let changes: [(Change, &str); 6] = [
            (|setup| setup.settings = None, "no settings"),
            (|setup| setup.bundle = "ab".to_owned(), "is no digest"),
            (|setup| setup.generation = 0, "no generation"),
            (|setup| drop(setup.authorities.pop()), "FRONT_PROXY"),
            (|setup| setup.service_account_keys.clear(), "keys of service accounts"),
            (|setup| setup.settings.as_mut().unwrap().domain.clear(), "the domain"),
        ];
        for (change, part) in changes {
            let mut setup = wire_setup();
            change(&mut setup);
            let error = NodeSetup::new(setup).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn setup_is_stored_and_its_removal_does_not_erase_it() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        write_setup(&files, None).unwrap();
        assert_eq!((read_current(&files), read_last(&files)), (None, None));
        write_setup(&files, Some(&setup())).unwrap();
        assert_eq!(read_current(&files), Some(Some(setup())));
        write_setup(&files, None).unwrap();
        assert_eq!((read_current(&files), read_last(&files)), (Some(None), Some(setup())));
    }

    #[test]
    fn setup_that_is_cut_short_or_changed_is_absent_and_never_none() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        write_setup(&files, Some(&setup())).unwrap();
        let path = directory.path().join("cluster").join(NAME);
        let whole = std::fs::read_to_string(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(read_current(&files), None, "{length} bytes");
        }
        std::fs::write(&path, whole.replace("\"over\": false", "\"over\": true")).unwrap();
        assert_eq!(read_current(&files), None, "nothing would run any more");
    }
}
