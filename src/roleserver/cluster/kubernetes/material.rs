//! Keys, certificates and authorities as the components of this node read them.
//!
//! One directory for each role, `cluster/kubernetes/controller/` and `…/worker/`, for this role server and its components
//! alone. Keys are made here and stay for as long as the role does; certificates are replaced in place, each by a rename, so
//! that a component that looks again finds a pair that fits.
//!
//! # Who reads what again
//!
//! An API server reads its serving pair, the authorities of clients and of the front proxy, and the front proxy's pair again
//! by itself, and what has a kubeconfig with files in it reads its own pair again. What is read once is part of what a
//! component is started with ([`Material::digest`]), so that another one starts it again. And another *generation* of
//! authorities and keys always does: whoever rotates an authority relies on a node's word that all its components act on
//! a generation, and only one that was started with it is sure to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ring::digest;
use serde::{Deserialize, Serialize};

use crate::curator::pki::Validity;
use crate::model::kubernetes::bundle::Duty;
use crate::model::time::{Timestamp, between};
use crate::proto::curator::v1::KubernetesComponent as Component;
use crate::roleserver::durable::{self, Durability};

/// Authorities by which API servers and kubelets are known.
pub const SERVERS: &str = "servers.crt";
/// Authorities by which clients are known.
pub const CLIENTS: &str = "clients.crt";
/// Authorities by which the front proxy is known.
pub const FRONT_PROXY: &str = "front-proxy-authorities.crt";
/// What tokens of service accounts are verified with.
pub const TOKENS: &str = "service-accounts.pub";
/// What they are signed with.
pub const SIGNING_KEY: &str = "service-accounts.key";
/// What is written down of all of these, last.
const NOTE: &str = "material.json";

/// Longest that is slept before certificates are looked at again: the clock may be put right meanwhile.
const LONGEST_SLEEP: Duration = Duration::from_hours(1);

/// Names of certificates, without their endings, and what each is for.
#[must_use]
pub const fn certificates(duty: Duty) -> &'static [(&'static str, Component)] {
    match duty {
        Duty::Controller => &[
            ("apiserver", Component::ApiServer),
            ("apiserver-kubelet-client", Component::ApiServerKubeletClient),
            ("front-proxy-client", Component::FrontProxyClient),
            ("controller-manager", Component::ControllerManager),
            ("scheduler", Component::Scheduler),
            ("reconciler", Component::Reconciler),
        ],
        Duty::Worker => &[
            ("kubelet", Component::Kubelet),
            ("kubelet-server", Component::KubeletServer),
            ("proxy", Component::Proxy),
        ],
    }
}

/// The name of a role's directory.
#[must_use]
pub const fn name(duty: Duty) -> &'static str {
    match duty {
        Duty::Controller => "controller",
        Duty::Worker => "worker",
    }
}

/// What there is for the components of one role, all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// Of which authorities and keys.
    pub generation: u64,
    /// Where.
    pub directory: PathBuf,
    digests: BTreeMap<String, String>,
}

impl Material {
    /// All that is in this directory; none where it is not whole. Blocks.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        let note = Note::read(directory)?;
        let mut digests = BTreeMap::new();
        for entry in std::fs::read_dir(directory).ok()? {
            let path = entry.ok()?.path();
            let bytes = std::fs::read(&path).ok()?;
            let name = path.file_name()?.to_string_lossy().into_owned();
            digests.insert(name, hex::encode(digest::digest(&digest::SHA256, &bytes)));
        }
        (note.generation > 0).then(|| Self {
            generation: note.generation,
            directory: directory.to_owned(),
            digests,
        })
    }

    /// Where a file of it is.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Where a certificate is, and its key.
    #[must_use]
    pub fn pair(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.directory.join(format!("{name}.crt")), self.directory.join(format!("{name}.key")))
    }

    /// Tells what a component reads once from what another one would: the generation, and these files.
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

/// What is written down of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The generation of which all of it is; 0 before it was whole once.
    pub generation: u64,
    /// The generation in which each certificate was signed.
    pub certificates: BTreeMap<String, u64>,
    /// The generation in which the key for tokens signs.
    pub signing_key: u64,
}

impl Note {
    /// What is written down in this directory; none also of a file that is damaged.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(directory.join(NOTE)).ok()?).ok()
    }

    /// Writes it down.
    pub fn write(&self, directory: &Path) -> std::io::Result<()> {
        durable::replace(&directory.join(NOTE), &serde_json::to_vec(self)?, Durability::Durable)
    }
}

/// What has to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A certificate of this name.
    Certificate(&'static str, Component),
    /// What tokens are signed with.
    SigningKey,
}

/// What has to be asked for, for this role at this generation. `validity` is that of certificates that are there and fit
/// their keys.
#[must_use]
pub fn needs(
    duty: Duty,
    generation: u64,
    note: &Note,
    validity: impl Fn(&str) -> Option<Validity>,
    now: Timestamp,
) -> Vec<Need> {
    let is_good = |name: &str| {
        note.certificates.get(name).is_some_and(|of| *of >= generation)
            && validity(name).is_some_and(|validity| now < half(validity))
    };
    let mut needs: Vec<Need> = certificates(duty)
        .iter()
        .filter(|(name, _)| !is_good(name))
        .map(|(name, component)| Need::Certificate(name, *component))
        .collect();
    if duty == Duty::Controller && note.signing_key < generation {
        needs.push(Need::SigningKey);
    }
    needs
}

/// When half of its time is over.
fn half(validity: Validity) -> Timestamp {
    validity.from + (validity.until - validity.from) / 2
}

/// How long until the first of these is to be renewed.
#[must_use]
pub fn pause(validities: impl IntoIterator<Item = Validity>, now: Timestamp) -> Duration {
    let first = validities.into_iter().map(half).min();
    first.map_or(LONGEST_SLEEP, |first| between(now, first)).clamp(Duration::from_secs(1), LONGEST_SLEEP)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::time::after;

    pub(in crate::roleserver::cluster::kubernetes) fn material() -> Material {
        Material { generation: 3, directory: "/state/cluster/kubernetes/x".into(), digests: BTreeMap::new() }
    }

    fn now() -> Timestamp {
        Timestamp::from_timestamp(1_900_000_000, 0).unwrap()
    }

    fn week() -> Validity {
        Validity { from: now(), until: after(now(), Duration::from_hours(7 * 24)) }
    }

    fn note(generation: u64) -> Note {
        let all = certificates(Duty::Controller).iter().chain(certificates(Duty::Worker));
        let certificates = all.map(|(name, _)| ((*name).to_owned(), generation)).collect();
        Note { generation, certificates, signing_key: generation }
    }

    #[test]
    fn certificates_are_renewed_at_half_of_their_time_and_all_of_them_in_another_generation() {
        let days = |days: u32| after(now(), Duration::from_hours(24) * days);
        for (generation, at, expected) in [
            (3, days(0), 0),
            (3, days(3), 0),
            (3, days(4), 6),
            (3, days(9), 6),
            (2, days(0), 0),
            (4, days(0), 7),
        ] {
            let needs = needs(Duty::Controller, generation, &note(3), |_| Some(week()), at);
            assert_eq!(needs.len(), expected, "{generation} {at}");
        }
        let needs = |note: &Note| needs(Duty::Worker, 3, note, |name| (name != "proxy").then(week), now());
        assert_eq!(needs(&note(3)), [Need::Certificate("proxy", Component::Proxy)], "it is lost");
        assert_eq!(needs(&Note::default()).len(), 3, "a worker signs no tokens");
    }

    #[test]
    fn looked_is_before_the_first_is_due() {
        let soon = Validity { from: now(), until: after(now(), Duration::from_mins(2)) };
        assert_eq!(pause([week(), soon], now()), Duration::from_mins(1));
        assert_eq!(pause([week()], now()), LONGEST_SLEEP);
        assert_eq!(pause([soon], after(now(), Duration::from_hours(1))), Duration::from_secs(1));
    }

    #[test]
    fn only_what_is_read_once_tells_a_component_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        assert_eq!(Material::read(directory.path()), None);
        std::fs::write(path("a.crt"), "1").unwrap();
        std::fs::write(path("b.crt"), "1").unwrap();
        assert_eq!(Material::read(directory.path()), None, "it is not whole");
        note(3).write(directory.path()).unwrap();
        let first = Material::read(directory.path()).unwrap();
        std::fs::write(path("a.crt"), "2").unwrap();
        let second = Material::read(directory.path()).unwrap();
        assert_ne!(first.digest(&["a.crt"]), second.digest(&["a.crt"]));
        assert_eq!(first.digest(&["b.crt"]), second.digest(&["b.crt"]));
        note(4).write(directory.path()).unwrap();
        let third = Material::read(directory.path()).unwrap();
        assert_ne!(third.digest(&["b.crt"]), second.digest(&["b.crt"]), "another generation starts all anew");
    }
}
