//! Key material on disk: layout, digests, and what has to be issued or renewed.
//!
//! Each role has a directory, `cluster/kubernetes/controller/` or `cluster/kubernetes/worker/`, which only this role
//! server and its components use. Keys are generated here and stay for as long as the role does. Certificates are
//! replaced in place, each by a rename, so that a component that reads again finds a certificate that matches its key.
//!
//! # What components reload
//!
//! An API server reloads its serving certificate, the client CAs, the front proxy CAs and the front proxy's client
//! certificate by itself. A client whose kubeconfig names files reloads its own certificate. Files that are read only
//! once are part of what a component is started with ([`KeyMaterial::digest`]), so a change restarts it. A new
//! *generation* of authorities and keys always restarts a component that reads any of them: the rotation of an
//! authority relies on the node's report that all its components use a generation, and only a component that was
//! started with it certainly does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use curator_client::certificate::{MAX_PAUSE, Renewal, RenewalPoint, Validity, decide_renewal};
use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::time::Timestamp;
use proto::curator::v1::KubernetesComponent as Component;
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::atomic_file::{self, Durability};
use crate::cluster::kubernetes::secrets_config::{SECRETS_CONFIG, parse_provider_list};

/// CAs of API servers; also of kubelets, as long as there is no [`KUBELET_CAS`].
pub const SERVER_CAS: &str = "servers.crt";
/// CAs of kubelets as servers. Only controllers have it.
pub const KUBELET_CAS: &str = "kubelets.crt";
/// CAs of clients of the API servers and kubelets.
pub const CLIENT_CAS: &str = "clients.crt";
/// CAs of the front proxy's client certificate.
pub const FRONT_PROXY_CAS: &str = "front-proxy-authorities.crt";
/// Public keys that tokens of service accounts are verified with.
pub const TOKEN_KEYS: &str = "service-accounts.pub";
/// Private key that tokens of service accounts are signed with.
pub const SIGNING_KEY: &str = "service-accounts.key";
/// The record of all these files, written last.
const RECORD_FILE: &str = "material.json";

/// Names of a role's certificate files, without extension, and the component of each.
#[must_use]
pub const fn certificate_names(duty: KubernetesDuty) -> &'static [(&'static str, Component)] {
    match duty {
        KubernetesDuty::Controller => &[
            ("apiserver", Component::ApiServer),
            ("apiserver-kubelet-client", Component::ApiServerKubeletClient),
            ("front-proxy-client", Component::FrontProxyClient),
            ("controller-manager", Component::ControllerManager),
            ("scheduler", Component::Scheduler),
            ("reconciler", Component::Reconciler),
        ],
        KubernetesDuty::Worker => &[
            ("kubelet", Component::Kubelet),
            ("kubelet-server", Component::KubeletServer),
            ("proxy", Component::Proxy),
        ],
    }
}

/// Name of a role's directory.
#[must_use]
pub const fn role_directory(duty: KubernetesDuty) -> &'static str {
    match duty {
        KubernetesDuty::Controller => "controller",
        KubernetesDuty::Worker => "worker",
    }
}

/// The complete key material of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyMaterial {
    /// Generation of authorities and keys, at least 1.
    pub generation: u64,
    /// Directory that holds the files.
    pub directory: PathBuf,
    /// Names of the providers in [`SECRETS_CONFIG`], separated by spaces; empty without that file.
    pub secrets: String,
    digests: BTreeMap<String, String>,
}

impl KeyMaterial {
    /// Reads a directory of key material; `None` if it has never been complete. Blocks.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        let note = MaterialRecord::read(directory)?;
        let (mut digests, mut secrets) = (BTreeMap::new(), String::new());
        for entry in std::fs::read_dir(directory).ok()? {
            let path = entry.ok()?.path();
            let bytes = std::fs::read(&path).ok()?;
            let name = path.file_name()?.to_string_lossy().into_owned();
            if name == SECRETS_CONFIG {
                secrets = parse_provider_list(&bytes);
            }
            digests.insert(name, hex::encode(digest::digest(&digest::SHA256, &bytes)));
        }
        (note.generation > 0).then(|| Self {
            generation: note.generation,
            directory: directory.to_owned(),
            secrets,
            digests,
        })
    }

    /// Path of one of its files.
    #[must_use]
    pub fn file_path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Name of the file with the CAs by which an API server verifies kubelets. Material that was stored when the
    /// cluster had one authority for both has no file of its own for them. It is used as before until the next
    /// generation, so that an update of the role server restarts no API server.
    #[must_use]
    pub fn kubelet_authorities(&self) -> &'static str {
        if self.digests.contains_key(KUBELET_CAS) { KUBELET_CAS } else { SERVER_CAS }
    }

    /// Whether API servers encrypt Secrets. Material of a release before has no file for that, and its API server is not
    /// restarted for it.
    #[must_use]
    pub fn has_secrets_config(&self) -> bool {
        self.digests.contains_key(SECRETS_CONFIG)
    }

    /// Paths of a certificate and its key.
    #[must_use]
    pub fn certificate_and_key(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.directory.join(format!("{name}.crt")), self.directory.join(format!("{name}.key")))
    }

    /// Digest of the generation and of the files that a component reads only once; another digest restarts the
    /// component.
    #[must_use]
    pub fn digest(&self, read_once: &[&str]) -> String {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(&self.generation.to_le_bytes());
        for name in read_once {
            context.update(self.digests.get(*name).map_or(&[], String::as_bytes));
            context.update(b"\n");
        }
        hex::encode(context.finish())
    }
}

/// The record of issued key material.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaterialRecord {
    /// Generation of all the material; 0 until it has been complete once.
    pub generation: u64,
    /// Generation in which each certificate was signed, by name.
    pub certificates: BTreeMap<String, u64>,
    /// Generation of the key that signs tokens.
    pub signing_key: u64,
}

impl MaterialRecord {
    /// Reads the record in this directory; `None` also for a damaged file.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(directory.join(RECORD_FILE)).ok()?).ok()
    }

    /// Stores the record durably in this directory.
    pub fn write(&self, directory: &Path) -> std::io::Result<()> {
        atomic_file::replace_file(
            &directory.join(RECORD_FILE),
            &serde_json::to_vec(self)?,
            Durability::Durable,
        )
    }
}

/// One item to request from the curator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaterialRequest {
    /// The certificate of this name for this component.
    Certificate(&'static str, Component),
    /// The private key that tokens are signed with.
    SigningKey,
}

/// The items that a role lacks at this generation. `validity` returns the validity of a stored certificate that matches
/// its key.
#[must_use]
pub fn missing_material(
    duty: KubernetesDuty,
    generation: u64,
    note: &MaterialRecord,
    validity: impl Fn(&str) -> Option<Validity>,
    now: Timestamp,
) -> Vec<MaterialRequest> {
    let is_good = |name: &str| {
        note.certificates.get(name).is_some_and(|of| *of >= generation)
            && validity(name).is_some_and(|validity| !renewal(validity, now).is_due())
    };
    let mut needs: Vec<MaterialRequest> = certificate_names(duty)
        .iter()
        .filter(|(name, _)| !is_good(name))
        .map(|(name, component)| MaterialRequest::Certificate(name, *component))
        .collect();
    if duty == KubernetesDuty::Controller && note.signing_key < generation {
        needs.push(MaterialRequest::SigningKey);
    }
    needs
}

/// A certificate is renewed at half of its validity. One that has expired is requested like one that is due, because
/// the node and not the component makes the request.
fn renewal(validity: Validity, now: Timestamp) -> Renewal {
    decide_renewal(validity, RenewalPoint::HalfLeft, now)
}

/// Time until the first renewal is due, between one second and one hour.
#[must_use]
pub fn time_until_renewal(validities: impl IntoIterator<Item = Validity>, now: Timestamp) -> Duration {
    let pauses = validities.into_iter().map(|validity| renewal(validity, now).pause(now));
    pauses.min().unwrap_or(MAX_PAUSE)
}

#[cfg(test)]
pub(super) mod tests {
    use model::time::after;

    use super::*;

    pub(in crate::cluster::kubernetes) fn material() -> KeyMaterial {
        KeyMaterial {
            generation: 3,
            directory: "/state/cluster/kubernetes/x".into(),
            secrets: String::new(),
            digests: BTreeMap::new(),
        }
    }

    /// The same with a file of this name.
    pub(in crate::cluster::kubernetes) fn material_with_file(name: &str) -> KeyMaterial {
        KeyMaterial { digests: BTreeMap::from([(name.to_owned(), "ab".repeat(32))]), ..material() }
    }

    fn now() -> Timestamp {
        Timestamp::from_timestamp(1_900_000_000, 0).unwrap()
    }

    fn week() -> Validity {
        Validity { not_before: now(), not_after: after(now(), Duration::from_hours(7 * 24)) }
    }

    fn record(generation: u64) -> MaterialRecord {
        let all = certificate_names(KubernetesDuty::Controller)
            .iter()
            .chain(certificate_names(KubernetesDuty::Worker));
        let certificates = all.map(|(name, _)| ((*name).to_owned(), generation)).collect();
        MaterialRecord { generation, certificates, signing_key: generation }
    }

    #[test]
    fn certificates_are_renewed_at_half_life_and_in_a_new_generation() {
        let days = |days: u32| after(now(), Duration::from_hours(24) * days);
        for (generation, at, expected) in [
            (3, days(0), 0),
            (3, days(3), 0),
            (3, days(4), 6),
            (3, days(9), 6),
            (2, days(0), 0),
            (4, days(0), 7),
        ] {
            let needs =
                missing_material(KubernetesDuty::Controller, generation, &record(3), |_| Some(week()), at);
            assert_eq!(needs.len(), expected, "{generation} {at}");
        }
        let needs = |note: &MaterialRecord| {
            missing_material(KubernetesDuty::Worker, 3, note, |name| (name != "proxy").then(week), now())
        };
        assert_eq!(
            needs(&record(3)),
            [MaterialRequest::Certificate("proxy", Component::Proxy)],
            "it is lost"
        );
        assert_eq!(needs(&MaterialRecord::default()).len(), 3, "a worker signs no tokens");
    }

    #[test]
    fn sleep_ends_before_the_first_renewal_is_due() {
        let soon = Validity { not_before: now(), not_after: after(now(), Duration::from_mins(2)) };
        assert_eq!(time_until_renewal([week(), soon], now()), Duration::from_mins(1));
        assert_eq!(time_until_renewal([week()], now()), MAX_PAUSE);
        assert_eq!(time_until_renewal([soon], after(now(), Duration::from_hours(1))), Duration::from_secs(1));
    }

    #[test]
    fn digest_changes_only_with_files_that_are_read_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        assert_eq!(KeyMaterial::read(directory.path()), None);
        std::fs::write(path("a.crt"), "1").unwrap();
        std::fs::write(path("b.crt"), "1").unwrap();
        assert_eq!(KeyMaterial::read(directory.path()), None, "it is not whole");
        record(3).write(directory.path()).unwrap();
        let first = KeyMaterial::read(directory.path()).unwrap();
        std::fs::write(path("a.crt"), "2").unwrap();
        let second = KeyMaterial::read(directory.path()).unwrap();
        assert_ne!(first.digest(&["a.crt"]), second.digest(&["a.crt"]));
        assert_eq!(first.digest(&["b.crt"]), second.digest(&["b.crt"]));
        record(4).write(directory.path()).unwrap();
        let third = KeyMaterial::read(directory.path()).unwrap();
        assert_ne!(third.digest(&["b.crt"]), second.digest(&["b.crt"]), "a generation changes every digest");
    }
}
