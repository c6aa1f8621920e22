//! What a curator says that this node is to run of Kubernetes, and how it is kept.
//!
//! It is durable before anybody acts on it, so that after a reboot everything starts by what is on the disk, whether or
//! not there is a curator to ask. What is damaged counts as absent and never as "nothing to run".
//!
//! That there is nothing to run any more does not forget what was: a worker leaves its cluster in order, and needs to know
//! for that where the API servers are.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::model::declaration::Sha256;
use crate::proto::curator::v1 as wire;
use crate::roleserver::cluster::files::{Files, FilesError};

const NAME: &str = "kubernetes.json";
/// The largest file that is read: a few certificates and texts.
const LIMIT: u64 = 16 << 20;

/// What this node is to run, checked; cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup(Arc<Checked>);

#[derive(Debug, PartialEq)]
struct Checked {
    said: wire::KubernetesSetup,
    settings: wire::KubernetesSettings,
    bundle: Sha256,
}

/// What stands on the disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    sha256: String,
    setup: String,
    /// Whether there is nothing to run any more.
    over: bool,
}

impl Setup {
    /// Checks what was said, as far as components would be started with it; the error is a sentence.
    pub fn new(said: wire::KubernetesSetup) -> Result<Self, String> {
        let settings = said.settings.clone().ok_or("it says no settings")?;
        let bundle = hex::decode(&said.bundle).ok().and_then(|digest| digest.try_into().ok()).map(Sha256);
        let bundle = bundle.ok_or_else(|| format!("its bundle {:?} is no digest", said.bundle))?;
        if said.generation == 0 {
            return Err("it is of no generation of authorities and keys".to_owned());
        }
        if settings.service_range.is_empty() || settings.pod_range.is_empty() || settings.domain.is_empty() {
            return Err("it lacks a range or the domain".to_owned());
        }
        let setup = Self(Arc::new(Checked { said, settings, bundle }));
        for which in
            [wire::KubernetesKeys::Servers, wire::KubernetesKeys::Clients, wire::KubernetesKeys::FrontProxy]
        {
            if setup.trusted(which).is_empty() {
                return Err(format!("it lacks the authority {}", which.as_str_name()));
            }
        }
        if setup.service_account_keys().is_empty() {
            return Err("it lacks the keys of service accounts".to_owned());
        }
        Ok(setup)
    }

    /// Which authorities and keys these are.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.said.generation
    }

    /// The bundle that the node is to run by.
    #[must_use]
    pub fn bundle(&self) -> Sha256 {
        self.0.bundle
    }

    /// What Kubernetes of the cluster is to be.
    #[must_use]
    pub fn settings(&self) -> &wire::KubernetesSettings {
        &self.0.settings
    }

    /// The node's own part of the range for pods; empty where it is no worker.
    #[must_use]
    pub fn pod_range(&self) -> &str {
        &self.0.said.pod_range
    }

    /// Certificates of an authority that are trusted, DER.
    #[must_use]
    pub fn trusted(&self, which: wire::KubernetesKeys) -> &[Vec<u8>] {
        let authorities = &self.0.said.authorities;
        let found = authorities.iter().find(|authority| authority.which() == which);
        found.map_or(&[], |authority| &authority.trusted)
    }

    /// Public keys by which tokens of service accounts are verified, DER.
    #[must_use]
    pub fn service_account_keys(&self) -> &[Vec<u8>] {
        &self.0.said.service_account_keys
    }

    /// `host:port` of API servers.
    #[must_use]
    pub fn api_servers(&self) -> &[String] {
        &self.0.said.api_servers
    }

    /// Labels that the node's own object is to have.
    pub fn labels(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.said.labels.iter()
    }
}

/// What was last told: none where nothing is known, also of a file that is damaged; and none in it where there was
/// nothing to run.
#[must_use]
pub fn kept(files: &Files) -> Option<Option<Setup>> {
    read(files).map(|(setup, over)| Some(setup).filter(|_| !over))
}

/// What was last to be run, even if it is to be run no more.
#[must_use]
pub fn last(files: &Files) -> Option<Setup> {
    read(files).map(|(setup, _)| setup)
}

fn read(files: &Files) -> Option<(Setup, bool)> {
    let read = files.read_up_to::<Kept>(NAME, LIMIT).and_then(|kept| {
        let Some(kept) = kept else { return Ok(None) };
        let over = kept.over;
        decode(&kept).map(|setup| Some((setup, over))).map_err(|reason| files.damaged(NAME, reason))
    });
    read.unwrap_or_else(|error| {
        tracing::warn!(%error, "what is to run of Kubernetes is not known until a curator says it");
        None
    })
}

fn decode(kept: &Kept) -> Result<Setup, String> {
    let bytes = STANDARD.decode(&kept.setup).map_err(|_| "it is no base64 text".to_owned())?;
    if sha256(&bytes, kept.over) != kept.sha256 {
        return Err("its digest is another one".to_owned());
    }
    Setup::new(wire::KubernetesSetup::decode(bytes.as_slice()).map_err(|error| error.to_string())?)
}

fn sha256(bytes: &[u8], over: bool) -> String {
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(&[u8::from(over)]);
    context.update(bytes);
    hex::encode(context.finish())
}

/// Keeps what was told.
pub fn keep(files: &Files, told: Option<&Setup>) -> Result<(), FilesError> {
    let (setup, over) = match told {
        Some(setup) => (setup.clone(), false),
        None => match last(files) {
            Some(setup) => (setup, true),
            // There was never anything.
            None => return Ok(()),
        },
    };
    let bytes = setup.0.said.encode_to_vec();
    files.write(NAME, &Kept { sha256: sha256(&bytes, over), setup: STANDARD.encode(&bytes), over })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::roleserver::cluster::kubernetes) fn said() -> wire::KubernetesSetup {
        let authority = |which: wire::KubernetesKeys| wire::KubernetesAuthority {
            which: which.into(),
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

    pub(in crate::roleserver::cluster::kubernetes) fn setup() -> Setup {
        Setup::new(said()).unwrap()
    }

    #[test]
    fn what_components_could_not_be_started_with_is_refused_with_a_reason() {
        type Change = fn(&mut wire::KubernetesSetup);
        let changes: [(Change, &str); 6] = [
            (|said| said.settings = None, "no settings"),
            (|said| said.bundle = "ab".to_owned(), "is no digest"),
            (|said| said.generation = 0, "no generation"),
            (|said| drop(said.authorities.pop()), "FRONT_PROXY"),
            (|said| said.service_account_keys.clear(), "keys of service accounts"),
            (|said| said.settings.as_mut().unwrap().domain.clear(), "the domain"),
        ];
        for (change, part) in changes {
            let mut said = said();
            change(&mut said);
            let error = Setup::new(said).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn what_was_told_is_kept_and_its_end_does_not_forget_it() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        keep(&files, None).unwrap();
        assert_eq!((kept(&files), last(&files)), (None, None));
        keep(&files, Some(&setup())).unwrap();
        assert_eq!(kept(&files), Some(Some(setup())));
        keep(&files, None).unwrap();
        assert_eq!((kept(&files), last(&files)), (Some(None), Some(setup())));
    }

    #[test]
    fn setup_that_is_cut_short_or_changed_is_absent_and_never_none() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        keep(&files, Some(&setup())).unwrap();
        let path = directory.path().join("cluster").join(NAME);
        let whole = std::fs::read_to_string(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(kept(&files), None, "{length} bytes");
        }
        std::fs::write(&path, whole.replace("\"over\": false", "\"over\": true")).unwrap();
        assert_eq!(kept(&files), None, "nothing would run any more");
    }
}
