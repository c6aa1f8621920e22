//! All keys that sign something in Kubernetes, and what is trusted beside them.
//!
//! They stand in one record, so that a step of a replacement is one write, and its *generation* says which step it was: a
//! node that says the generation that its components act on has said all there is to know of them. It never begins anew.
//! When Kubernetes is forgotten, the record stays with nothing but it: a node that was away meanwhile, and whose last word
//! is of the Kubernetes before, must not be taken for one that knows this one's keys. For the same reason a cluster that is
//! restored begins far above whatever it may have come to after the snapshot
//! ([`restored`](Keys::restored)).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use prost::Message as _;

use crate::curator::kubernetes::authority::{PublicPoint, Signer};
use crate::curator::kubernetes::editions::{self, Edition};
use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::kubernetes::rotation::{Replacement, Stage};
use crate::etcd::key_space::{KUBERNETES, KeyError};
use crate::etcd::record::{self, RecordError, moment};
use crate::proto::curator::v1 as wire;

/// How many steps of replacements nobody makes between a snapshot and the loss of what followed it.
const LOST_STEPS: u64 = 1 << 20;

/// What something is signed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Which {
    /// By it clients know API servers and kubelets.
    Servers,
    /// By it API servers and kubelets know clients.
    Clients,
    /// By it aggregated API servers know that an API server asks them.
    FrontProxy,
    /// By it a node's etcd and its API server know each other.
    Etcd,
    /// By it API servers know service accounts.
    ServiceAccounts,
}

impl Which {
    /// All of them, in order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Servers, Self::Clients, Self::FrontProxy, Self::Etcd, Self::ServiceAccounts];

    /// Its name, for sentences and for certificates.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::Clients => "clients",
            Self::FrontProxy => "front-proxy",
            Self::Etcd => "etcd",
            Self::ServiceAccounts => "service-accounts",
        }
    }

    /// Whether it signs certificates.
    #[must_use]
    pub const fn is_authority(self) -> bool {
        !matches!(self, Self::ServiceAccounts)
    }

    /// As it is sent.
    #[must_use]
    pub const fn to_wire(self) -> wire::KubernetesKeys {
        match self {
            Self::Servers => wire::KubernetesKeys::Servers,
            Self::Clients => wire::KubernetesKeys::Clients,
            Self::FrontProxy => wire::KubernetesKeys::FrontProxy,
            Self::Etcd => wire::KubernetesKeys::Etcd,
            Self::ServiceAccounts => wire::KubernetesKeys::ServiceAccounts,
        }
    }

    /// Reads what was sent.
    pub fn from_wire(number: i32) -> Result<Self, Refusal> {
        Self::ALL.into_iter().find(|which| i32::from(which.to_wire()) == number).ok_or(Refusal::Which(number))
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What signs for one purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// What signs now.
    pub signs: Signer,
    /// What is being done to replace it, or what it replaced.
    pub replacement: Option<Replacement>,
}

impl Ring {
    /// Of a key that nothing is trusted beside.
    #[must_use]
    pub const fn of(signs: Signer) -> Self {
        Self { signs, replacement: None }
    }

    /// All that is trusted; the first one signs.
    fn trusted(&self) -> impl Iterator<Item = &Signer> {
        let beside = self.replacement.as_ref().map(|replacement| &replacement.trusted);
        std::iter::once(&self.signs).chain(beside)
    }
}

/// All keys; none where Kubernetes was forgotten.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Keys {
    /// Grows with each change of what signs or is trusted.
    pub generation: u64,
    /// What signs for each purpose: for all of them, or for none.
    pub rings: BTreeMap<Which, Ring>,
    /// What was told in generations before, the oldest first, as far as a node was told nothing newer.
    pub former: Vec<Edition>,
}

/// Where they stand in etcd.
pub fn keys_key() -> Result<String, KeyError> {
    KUBERNETES.key("keys")
}

impl Keys {
    /// The first ones of a Kubernetes, after whatever there was before.
    #[must_use]
    pub fn first(before: Option<&Self>, signers: BTreeMap<Which, Signer>) -> Self {
        let rings = signers.into_iter().map(|(which, signer)| (which, Ring::of(signer))).collect();
        Self { generation: before.map_or(0, |keys| keys.generation) + 1, rings, former: Vec::new() }
    }

    /// What stays when Kubernetes is forgotten.
    #[must_use]
    pub fn forgotten(&self) -> Self {
        Self { generation: self.generation, ..Self::default() }
    }

    /// The same keys in a cluster that is restored from a snapshot of them. Nothing that a node has said counts for them,
    /// nor what one was told.
    #[must_use]
    pub fn restored(mut self) -> Self {
        self.generation = self.generation.saturating_add(LOST_STEPS);
        self.former.clear();
        for ring in self.rings.values_mut() {
            if let Some(replacement) = &mut ring.replacement {
                replacement.generation = self.generation;
                replacement.settled_at = None;
            }
        }
        self
    }

    /// What signs for this purpose.
    pub fn ring(&self, which: Which) -> Result<&Ring, Refusal> {
        self.rings.get(&which).ok_or(Refusal::None)
    }

    /// The authorities as nodes see them, in order of their numbers.
    #[must_use]
    pub fn authorities(&self) -> Vec<wire::KubernetesAuthority> {
        let authorities = self.rings.iter().filter(|(which, _)| which.is_authority());
        let told = authorities.map(|(which, ring)| wire::KubernetesAuthority {
            which: which.to_wire().into(),
            trusted: ring.trusted().map(|signer| signer.certificate().to_vec()).collect(),
        });
        told.collect()
    }

    /// By what tokens of service accounts are verified, the one that signs first.
    #[must_use]
    pub fn service_account_keys(&self) -> Vec<PublicPoint> {
        let ring = self.rings.get(&Which::ServiceAccounts);
        ring.into_iter().flat_map(Ring::trusted).map(Signer::point).collect()
    }

    /// What is told in this generation.
    #[must_use]
    pub fn edition(&self) -> Edition {
        Edition {
            generation: self.generation,
            authorities: self.authorities(),
            service_account_keys: self.service_account_keys(),
        }
    }

    /// What a node is told that may be told this generation: the next one that is known, if that one is not.
    #[must_use]
    pub fn edition_of(&self, generation: u64) -> Edition {
        let former = self.former.iter().find(|edition| edition.generation >= generation);
        former.cloned().unwrap_or_else(|| self.edition())
    }

    /// The same without generations that no node is told: these are all that some node is.
    #[must_use]
    pub fn keeping(mut self, told: impl IntoIterator<Item = u64>) -> Self {
        let told: BTreeSet<u64> = told.into_iter().collect();
        self.former.retain(|edition| told.contains(&edition.generation));
        let surplus = self.former.len().saturating_sub(editions::MOST);
        self.former.drain(..surplus);
        self
    }

    /// As they are stored. Secrets.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let key = |signer: &Signer| wire::KubernetesKey {
            certificate: signer.certificate().to_vec(),
            private_key: signer.pkcs8().to_vec(),
        };
        let rings = self.rings.iter().map(|(which, ring)| wire::KubernetesKeyRing {
            which: which.to_wire().into(),
            signs: Some(key(&ring.signs)),
            replacement: ring.replacement.as_ref().map(|replacement| wire::KubernetesReplacement {
                trusted: Some(key(&replacement.trusted)),
                stage: replacement.stage.to_wire().into(),
                since_ms: replacement.since.timestamp_millis(),
                generation: replacement.generation,
                settled_at_ms: replacement.settled_at.map_or(0, |at| at.timestamp_millis()),
            }),
        });
        wire::KubernetesKeysRecord {
            format: record::FORMAT,
            generation: self.generation,
            rings: rings.collect(),
            former: self.former.iter().map(Edition::to_wire).collect(),
        }
        .encode_to_vec()
    }

    /// Reads what is stored under `key`. The error shows nothing of it.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::KubernetesKeysRecord| record.format)?;
        let mut rings = BTreeMap::new();
        for ring in record.rings {
            let which =
                Which::from_wire(ring.which).map_err(|_| fault(format!("it has keys for {}", ring.which)))?;
            let signer = |kept: Option<wire::KubernetesKey>| {
                let kept = kept.unwrap_or_default();
                let signer = Signer::load(&kept.certificate, &kept.private_key);
                let signer = signer.map_err(|error| fault(format!("{which}: {error}")))?;
                if signer.certificate().is_empty() == which.is_authority() {
                    return Err(fault(format!(
                        "{which}: a certificate is there or not, and should not or should be"
                    )));
                }
                Ok(signer)
            };
            let replacement = match ring.replacement {
                None => None,
                Some(kept) => Some(Replacement {
                    trusted: signer(kept.trusted)?,
                    stage: Stage::from_wire(kept.stage)
                        .ok_or_else(|| fault(format!("{which}: its stage is {}", kept.stage)))?,
                    since: moment("since", kept.since_ms).map_err(fault)?,
                    generation: kept.generation,
                    settled_at: match kept.settled_at_ms {
                        0 => None,
                        at => Some(moment("settled_at", at).map_err(fault)?),
                    },
                }),
            };
            rings.insert(which, Ring { signs: signer(ring.signs)?, replacement });
        }
        if !rings.is_empty() && rings.len() < Which::ALL.len() {
            return Err(fault("keys of some purposes are missing".to_owned()));
        }
        if record.generation == 0 {
            return Err(fault("it says no generation".to_owned()));
        }
        let former = record.former.into_iter().map(Edition::from_wire).collect::<Result<Vec<_>, _>>();
        let former = former.map_err(|error| fault(format!("a generation before: {error}")))?;
        let ascend = former.iter().map(|edition| edition.generation).is_sorted_by(|one, other| one < other);
        if !ascend || former.last().is_some_and(|last| last.generation >= record.generation) {
            return Err(fault("generations before are not in their order".to_owned()));
        }
        Ok(Self { generation: record.generation, rings, former })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::curator::kubernetes::authority::new_key;
    use crate::curator::kubernetes::authority::tests::signer;
    use crate::curator::node::tests::at;

    pub(crate) fn new_signer(which: Which, number: u8) -> Signer {
        if which.is_authority() {
            signer(which.as_str(), number)
        } else {
            Signer::bare(&new_key().unwrap()).unwrap()
        }
    }

    /// Keys of generation 1.
    pub(crate) fn keys() -> Keys {
        let signers = Which::ALL.into_iter().map(|which| (which, new_signer(which, 1)));
        Keys::first(None, signers.collect())
    }

    pub(crate) fn replacing(which: Which) -> Keys {
        let mut keys = keys();
        let ring = keys.rings.get_mut(&which).unwrap();
        ring.replacement = Some(Replacement {
            trusted: new_signer(which, 2),
            stage: Stage::Signs,
            since: at(3),
            generation: 1,
            settled_at: Some(at(4)),
        });
        keys
    }

    #[test]
    fn record_reads_back_as_it_was_written() {
        let key = keys_key().unwrap();
        let mut all = vec![keys(), keys().forgotten(), later()];
        all.extend(Which::ALL.map(replacing));
        for kept in all {
            assert_eq!(Keys::decode(&key, &kept.encode()).unwrap(), kept);
        }
    }

    #[test]
    fn record_that_cannot_be_used_is_told_by_its_fault_and_without_its_keys() {
        type Change = fn(&mut wire::KubernetesKeysRecord);
        let cases: [(Change, &str); 11] = [
            (|record| record.format = 2, "format 2"),
            (|record| record.generation = 0, "no generation"),
            (|record| drop(record.rings.pop()), "are missing"),
            (|record| record.rings[0].which = 9, "keys for 9"),
            (|record| record.rings[0].signs = None, "servers: a key of Kubernetes cannot be used"),
            (
                |record| record.rings[4].signs = record.rings[0].signs.clone(),
                "service-accounts: a certificate",
            ),
            (|record| record.rings[0].replacement.as_mut().unwrap().stage = 0, "its stage is 0"),
            (|record| record.rings[0].replacement.as_mut().unwrap().since_ms = 0, "since is 0"),
            (|record| record.former[0].service_account_keys[0] = vec![1], "a generation before"),
            (|record| record.former.push(record.former[0].clone()), "not in their order"),
            (|record| record.former[0].generation = record.generation, "not in their order"),
        ];
        for (change, said) in cases {
            let kept = Keys { generation: 2, former: vec![keys().edition()], ..replacing(Which::Servers) };
            let mut record = wire::KubernetesKeysRecord::decode(kept.encode().as_slice()).unwrap();
            change(&mut record);
            let error = Keys::decode(&keys_key().unwrap(), &record.encode_to_vec()).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
            assert!(
                !error.contains(&hex::encode(&kept.rings[&Which::Servers].signs.pkcs8()[36..68])),
                "{error}"
            );
        }
    }

    /// Keys of generation 3, with what was told before.
    fn later() -> Keys {
        let begun = keys().begin(Which::Clients, new_signer(Which::Clients, 2), at(0)).unwrap().unwrap();
        begun.after(Which::Clients, crate::curator::kubernetes::rotation::Step::Sign, at(1)).unwrap()
    }

    #[test]
    fn node_is_told_what_it_was_told_before_as_long_as_that_is_kept() {
        let later = later();
        let generations =
            |keys: &Keys| keys.former.iter().map(|edition| edition.generation).collect::<Vec<_>>();
        assert_eq!((later.generation, generations(&later)), (3, vec![1, 2]));
        for (told, of) in [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3)] {
            assert_eq!(later.edition_of(told).generation, of, "{told}");
        }
        let trusted = |told| later.edition_of(told).authorities[1].trusted.clone();
        let (first, both, turned) = (trusted(1), trusted(2), trusted(3));
        assert_eq!((first.len(), &both[0], both.len()), (1, &first[0], 2));
        assert_eq!(turned, [both[1].clone(), both[0].clone()]);
        for (told, kept) in
            [(&[1, 3][..], &[1][..]), (&[2], &[2]), (&[3], &[]), (&[], &[]), (&[1, 2, 9], &[1, 2])]
        {
            assert_eq!(generations(&later.clone().keeping(told.iter().copied())), kept, "{told:?}");
        }
        // Whose own is not kept is told the next one, and never one before.
        assert_eq!(later.clone().keeping([2]).edition_of(1).generation, 2);
        assert!(later.clone().forgotten().former.is_empty() && later.restored().former.is_empty());
    }

    #[test]
    fn generation_never_begins_anew() {
        let kept = Keys { generation: 7, ..keys() };
        let gone = kept.forgotten();
        assert_eq!((gone.generation, gone.rings.len()), (7, 0));
        assert_eq!(
            Keys::first(Some(&gone), kept.rings.iter().map(|(w, r)| (*w, r.signs.clone())).collect())
                .generation,
            8
        );
        let restored = Keys { generation: 7, ..replacing(Which::Clients) }.restored();
        let replacement = restored.rings[&Which::Clients].replacement.clone().unwrap();
        assert!(restored.generation > 1_000_000);
        assert_eq!((replacement.generation, replacement.settled_at), (restored.generation, None));
    }

    #[test]
    fn what_signs_is_told_first() {
        let kept = replacing(Which::Clients);
        let ring = &kept.rings[&Which::Clients];
        let told = kept.authorities();
        assert_eq!(told.len(), 4);
        let both = [&ring.signs, &ring.replacement.as_ref().unwrap().trusted];
        assert_eq!(told[1].trusted, both.map(|signer| signer.certificate().to_vec()));
        assert_eq!(told[0].trusted.len(), 1);
        let kept = replacing(Which::ServiceAccounts);
        let ring = &kept.rings[&Which::ServiceAccounts];
        let both = [ring.signs.point(), ring.replacement.as_ref().unwrap().trusted.point()];
        assert_eq!(kept.service_account_keys(), both);
    }
}
