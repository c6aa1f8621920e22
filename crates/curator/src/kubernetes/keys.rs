//! The Kubernetes signing keys and their generation, in one record.
//!
//! All keys are in one record, so a step of a rotation is one write, and the record's *generation* counts these steps.
//! A node that reports the generation of its running components has thereby reported everything about their keys.
//!
//! The generation never starts over. When Kubernetes is deleted, a record with the generation alone stays. Otherwise a
//! node that was away meanwhile, with a last report about the former Kubernetes, would seem to run with the keys
//! of the new one. For the same reason a restored cluster begins far above any generation that it may have reached
//! after the snapshot ([`after_restore`](KubernetesKeys::after_restore)).
//!
//! Keys from a release without an authority of kubelets have no ring for it. The ring of API servers counts for both
//! until the leader begins to separate them ([`shares_authority`](KubernetesKeys::shares_authority)).

use std::collections::{BTreeMap, BTreeSet};

use etcd::key_space::{KUBERNETES, KeyError};
use etcd::record::{self, RecordError};
use model::cluster::kubernetes::KeyPurpose;
use model::time::parse_timestamp;
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::key_rotation::{KeyReplacement, RotationStage};
use crate::kubernetes::signer::{P256PublicKey, Signer};
use crate::kubernetes::trust_bundle::{self, TrustBundle};

/// Added to the generation on restore: more rotation steps than happen between a snapshot and the loss of the cluster.
const RESTORE_GENERATION_GAP: u64 = 1 << 20;

/// The purpose with this number of the API.
pub fn parse_key_purpose(number: i32) -> Result<KeyPurpose, KubernetesError> {
    let purpose = wire::KubernetesKeys::try_from(number).ok().and_then(KeyPurpose::from_wire);
    purpose.ok_or(KubernetesError::UnknownKeyPurpose(number))
}

/// The keys of one purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRing {
    /// The key that signs now.
    pub signer: Signer,
    /// The rotation under way, with the second trusted key; `None` if there is no rotation.
    pub replacement: Option<KeyReplacement>,
}

impl KeyRing {
    /// A key without a rotation.
    #[must_use]
    pub const fn new(signs: Signer) -> Self {
        Self { signer: signs, replacement: None }
    }

    /// All trusted keys; the first one signs.
    fn trusted_signers(&self) -> impl Iterator<Item = &Signer> {
        let beside = self.replacement.as_ref().map(|replacement| &replacement.trusted);
        std::iter::once(&self.signer).chain(beside)
    }
}

/// All Kubernetes signing keys; without rings once Kubernetes was deleted.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KubernetesKeys {
    /// Grows with each change of what signs or is trusted.
    pub generation: u64,
    /// The keys by purpose: all purposes, or none. Kubelets may be missing.
    pub rings: BTreeMap<KeyPurpose, KeyRing>,
    /// Trust bundles of earlier generations, the oldest first, for nodes that are not assigned a newer one.
    pub former: Vec<TrustBundle>,
    /// Purposes with keys that somebody else has ([`exposed_keys`](crate::kubernetes::exposed_keys)).
    pub exposed: BTreeSet<KeyPurpose>,
}

/// The etcd key of the record.
pub fn keys_record_key() -> Result<String, KeyError> {
    KUBERNETES.key("keys")
}

impl KubernetesKeys {
    /// The first keys of a new Kubernetes; their generation continues that of the keys `before`.
    #[must_use]
    pub fn initial(before: Option<&Self>, signers: BTreeMap<KeyPurpose, Signer>) -> Self {
        let rings = signers.into_iter().map(|(which, signer)| (which, KeyRing::new(signer))).collect();
        Self { generation: before.map_or(0, |keys| keys.generation) + 1, rings, ..Self::default() }
    }

    /// What stays when Kubernetes is deleted: the generation.
    #[must_use]
    pub fn without_keys(&self) -> Self {
        Self { generation: self.generation, ..Self::default() }
    }

    /// The same keys in a cluster that is restored from a snapshot of them. Nothing that a node has reported counts for
    /// the new generation, and no former bundle is kept.
    #[must_use]
    pub fn after_restore(mut self) -> Self {
        self.generation = self.generation.saturating_add(RESTORE_GENERATION_GAP);
        self.former.clear();
        for ring in self.rings.values_mut() {
            if let Some(replacement) = &mut ring.replacement {
                replacement.generation = self.generation;
                replacement.settled_at = None;
            }
        }
        self
    }

    /// The keys for this purpose.
    pub fn key_ring(&self, which: KeyPurpose) -> Result<&KeyRing, KubernetesError> {
        let of_servers = || self.rings.get(&KeyPurpose::Servers).filter(|_| which == KeyPurpose::Kubelets);
        self.rings.get(&which).or_else(of_servers).ok_or(KubernetesError::NotConfigured)
    }

    /// The authorities as nodes get them, in order of their numbers.
    #[must_use]
    pub fn authorities(&self) -> Vec<wire::KubernetesAuthority> {
        let authorities = self.rings.iter().filter(|(which, _)| which.is_authority());
        let reports = authorities.map(|(which, ring)| wire::KubernetesAuthority {
            keys: which.to_wire().into(),
            trusted: ring.trusted_signers().map(|signer| signer.certificate().to_vec()).collect(),
        });
        reports.collect()
    }

    /// The public keys that verify service-account tokens; the signing one is first.
    #[must_use]
    pub fn service_account_keys(&self) -> Vec<P256PublicKey> {
        let ring = self.rings.get(&KeyPurpose::ServiceAccounts);
        ring.into_iter().flat_map(KeyRing::trusted_signers).map(Signer::public_key).collect()
    }

    /// The trust bundle of the current generation.
    #[must_use]
    pub fn trust_bundle(&self) -> TrustBundle {
        TrustBundle {
            generation: self.generation,
            authorities: self.authorities(),
            service_account_keys: self.service_account_keys(),
        }
    }

    /// The bundle for a node assigned this generation. If that bundle is not stored, the next newer one.
    #[must_use]
    pub fn trust_bundle_for(&self, generation: u64) -> TrustBundle {
        let former = self.former.iter().find(|edition| edition.generation >= generation);
        former.cloned().unwrap_or_else(|| self.trust_bundle())
    }

    /// Drops the former bundles that no node is assigned; the argument has the generations of all assignments.
    #[must_use]
    pub fn retain_bundles(mut self, reported: impl IntoIterator<Item = u64>) -> Self {
        let numbers: BTreeSet<u64> = reported.into_iter().collect();
        self.former.retain(|edition| numbers.contains(&edition.generation));
        let surplus = self.former.len().saturating_sub(trust_bundle::MAX_FORMER_BUNDLES);
        self.former.drain(..surplus);
        self
    }

    /// Encodes the record for etcd. The bytes are secret.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let key = |signer: &Signer| wire::KubernetesKey {
            certificate: signer.certificate().to_vec(),
            private_key: signer.pkcs8().to_vec(),
        };
        let rings = self.rings.iter().map(|(which, ring)| wire::KubernetesKeyRing {
            keys: which.to_wire().into(),
            signing_key: Some(key(&ring.signer)),
            replacement: ring.replacement.as_ref().map(|replacement| wire::KubernetesReplacement {
                other_trusted_key: Some(key(&replacement.trusted)),
                stage: replacement.stage.to_wire().into(),
                since_ms: replacement.since.timestamp_millis(),
                generation: replacement.generation,
                settled_at_ms: replacement.settled_at.map_or(0, |at| at.timestamp_millis()),
            }),
        });
        let (kubelets, rings): (Vec<_>, Vec<_>) =
            rings.partition(|ring| ring.keys() == wire::KubernetesKeys::Kubelets);
        wire::KubernetesKeysRecord {
            format: record::FORMAT,
            generation: self.generation,
            rings,
            kubelets: kubelets.into_iter().next(),
            former_trust_bundles: self.former.iter().map(TrustBundle::to_wire).collect(),
            exposed: self.exposed.iter().map(|which| which.to_wire().into()).collect(),
        }
        .encode_to_vec()
    }

    /// Decodes the record that is stored under `key`. The error reveals none of the keys.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::KubernetesKeysRecord| record.format)?;
        let mut rings = BTreeMap::new();
        for ring in record.rings.into_iter().chain(record.kubelets) {
            let which =
                parse_key_purpose(ring.keys).map_err(|_| fault(format!("it has keys for {}", ring.keys)))?;
            let signer = |kept: Option<wire::KubernetesKey>| {
                let kept = kept.unwrap_or_default();
                let signer = Signer::load(&kept.certificate, &kept.private_key);
                let signer = signer.map_err(|error| fault(format!("{which}: {error}")))?;
                if signer.certificate().is_empty() == which.is_authority() {
                    return Err(fault(format!(
                        "{which}: a certificate is missing, or is present where none belongs"
                    )));
                }
                Ok(signer)
            };
            let replacement = match ring.replacement {
                None => None,
                Some(kept) => Some(KeyReplacement {
                    trusted: signer(kept.other_trusted_key)?,
                    stage: RotationStage::from_wire(kept.stage)
                        .ok_or_else(|| fault(format!("{which}: its stage is {}", kept.stage)))?,
                    since: parse_timestamp("since", kept.since_ms).map_err(fault)?,
                    generation: kept.generation,
                    settled_at: match kept.settled_at_ms {
                        0 => None,
                        at => Some(parse_timestamp("settled_at", at).map_err(fault)?),
                    },
                }),
            };
            rings.insert(which, KeyRing { signer: signer(ring.signing_key)?, replacement });
        }
        let is_missing = |which: KeyPurpose| which != KeyPurpose::Kubelets && !rings.contains_key(&which);
        if !rings.is_empty() && KeyPurpose::ALL.into_iter().any(is_missing) {
            return Err(fault("keys of some purposes are missing".to_owned()));
        }
        if record.generation == 0 {
            return Err(fault("it has no generation".to_owned()));
        }
        let former = record
            .former_trust_bundles
            .into_iter()
            .map(TrustBundle::from_wire)
            .collect::<Result<Vec<_>, _>>();
        let former = former.map_err(|error| fault(format!("a generation before: {error}")))?;
        let ascend = former.iter().map(|edition| edition.generation).is_sorted_by(|one, other| one < other);
        if !ascend || former.last().is_some_and(|last| last.generation >= record.generation) {
            return Err(fault("generations before are not in their order".to_owned()));
        }
        let exposed = record.exposed.into_iter().map(|number| {
            parse_key_purpose(number).map_err(|_| fault(format!("it names exposed keys for {number}")))
        });
        Ok(Self { generation: record.generation, rings, former, exposed: exposed.collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use curator_client::testing::at;

    use super::*;
    use crate::kubernetes::signer::generate_key;
    use crate::kubernetes::signer::tests::signer;

    pub(crate) fn new_signer(which: KeyPurpose, number: u8) -> Signer {
        if which.is_authority() {
            signer(which.as_str(), number)
        } else {
            Signer::without_certificate(&generate_key().unwrap()).unwrap()
        }
    }

    /// Keys of generation 1.
    pub(crate) fn keys() -> KubernetesKeys {
        let signers = KeyPurpose::ALL.into_iter().map(|which| (which, new_signer(which, 1)));
        KubernetesKeys::initial(None, signers.collect())
    }

    pub(crate) fn replacing(which: KeyPurpose) -> KubernetesKeys {
        let mut keys = keys();
        let ring = keys.rings.get_mut(&which).unwrap();
        ring.replacement = Some(KeyReplacement {
            trusted: new_signer(which, 2),
            stage: RotationStage::Signing,
            since: at(3),
            generation: 1,
            settled_at: Some(at(4)),
        });
        keys
    }

    #[test]
    fn record_round_trips() {
        let key = keys_record_key().unwrap();
        let mut all = vec![keys(), keys().without_keys(), later(), later().mark_exposed().unwrap()];
        all.extend(KeyPurpose::ALL.map(replacing));
        for kept in all {
            assert_eq!(KubernetesKeys::decode(&key, &kept.encode()).unwrap(), kept);
        }
    }

    #[test]
    fn release_without_an_authority_of_kubelets_reads_the_record_and_is_read() {
        let key = keys_record_key().unwrap();
        let kept = replacing(KeyPurpose::Kubelets);
        let mut record = wire::KubernetesKeysRecord::decode(kept.encode().as_slice()).unwrap();
        let numbers: Vec<i32> = record.rings.iter().map(|ring| ring.keys).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5], "that release rejects any other number");
        // It drops what it does not know when it writes.
        record.kubelets = None;
        let shared = KubernetesKeys::decode(&key, &record.encode_to_vec()).unwrap();
        assert!(shared.shares_authority() && !kept.shares_authority());
        assert_eq!(
            shared.key_ring(KeyPurpose::Kubelets).unwrap(),
            kept.key_ring(KeyPurpose::Servers).unwrap(),
            "the authority of API servers signs for kubelets"
        );
        assert_eq!(shared.authorities().len(), 4);
        assert!(!kept.without_keys().shares_authority());
    }

    #[test]
    fn invalid_record_error_names_the_fault_and_leaks_no_key() {
        type Change = fn(&mut wire::KubernetesKeysRecord);
        let cases: [(Change, &str); 12] = [
            (|record| record.format = 2, "format 2"),
            (|record| record.generation = 0, "no generation"),
            (|record| drop(record.rings.pop()), "are missing"),
            (|record| record.rings[0].keys = 9, "keys for 9"),
            (|record| record.rings[0].signing_key = None, "servers: a key of Kubernetes cannot be used"),
            (
                |record| record.rings[4].signing_key = record.rings[0].signing_key.clone(),
                "service-accounts: a certificate",
            ),
            (|record| record.rings[0].replacement.as_mut().unwrap().stage = 0, "its stage is 0"),
            (|record| record.rings[0].replacement.as_mut().unwrap().since_ms = 0, "since is 0"),
            (
                |record| record.former_trust_bundles[0].service_account_keys[0] = vec![1],
                "a generation before",
            ),
            (
                |record| record.former_trust_bundles.push(record.former_trust_bundles[0].clone()),
                "not in their order",
            ),
            (|record| record.former_trust_bundles[0].generation = record.generation, "not in their order"),
            (|record| record.exposed.push(9), "exposed keys for 9"),
        ];
        for (change, text) in cases {
            let kept = KubernetesKeys {
                generation: 2,
                former: vec![keys().trust_bundle()],
                ..replacing(KeyPurpose::Servers)
            };
            let mut record = wire::KubernetesKeysRecord::decode(kept.encode().as_slice()).unwrap();
            change(&mut record);
            let error = KubernetesKeys::decode(&keys_record_key().unwrap(), &record.encode_to_vec())
                .unwrap_err()
                .to_string();
            assert!(error.contains(text), "{text}: {error}");
            assert!(
                !error.contains(&hex::encode(&kept.rings[&KeyPurpose::Servers].signer.pkcs8()[36..68])),
                "{error}"
            );
        }
    }

    /// Keys of generation 3, with the bundles before.
    fn later() -> KubernetesKeys {
        let begun = keys()
            .begin_rotation(KeyPurpose::Clients, new_signer(KeyPurpose::Clients, 2), at(0))
            .unwrap()
            .unwrap();
        begun
            .apply_step(KeyPurpose::Clients, crate::kubernetes::key_rotation::RotationStep::Sign, at(1))
            .unwrap()
    }

    #[test]
    fn node_keeps_its_trust_bundle_while_it_is_retained() {
        let later = later();
        let generations =
            |keys: &KubernetesKeys| keys.former.iter().map(|edition| edition.generation).collect::<Vec<_>>();
        assert_eq!((later.generation, generations(&later)), (3, vec![1, 2]));
        for (number, of) in [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3)] {
            assert_eq!(later.trust_bundle_for(number).generation, of, "{number}");
        }
        let trusted = |number| later.trust_bundle_for(number).authorities[1].trusted.clone();
        let (first, both, turned) = (trusted(1), trusted(2), trusted(3));
        assert_eq!((first.len(), &both[0], both.len()), (1, &first[0], 2));
        assert_eq!(turned, [both[1].clone(), both[0].clone()]);
        for (numbers, kept) in
            [(&[1, 3][..], &[1][..]), (&[2], &[2]), (&[3], &[]), (&[], &[]), (&[1, 2, 9], &[1, 2])]
        {
            assert_eq!(
                generations(&later.clone().retain_bundles(numbers.iter().copied())),
                kept,
                "{numbers:?}"
            );
        }
        // A node whose own bundle is not stored gets the next newer one, never an older one.
        assert_eq!(later.clone().retain_bundles([2]).trust_bundle_for(1).generation, 2);
        assert!(later.clone().without_keys().former.is_empty() && later.after_restore().former.is_empty());
    }

    #[test]
    fn generation_never_restarts() {
        let kept = KubernetesKeys { generation: 7, ..keys() };
        let gone = kept.without_keys();
        assert_eq!((gone.generation, gone.rings.len()), (7, 0));
        assert_eq!(
            KubernetesKeys::initial(
                Some(&gone),
                kept.rings.iter().map(|(w, r)| (*w, r.signer.clone())).collect()
            )
            .generation,
            8
        );
        let restored = KubernetesKeys { generation: 7, ..replacing(KeyPurpose::Clients) }.after_restore();
        let replacement = restored.rings[&KeyPurpose::Clients].replacement.clone().unwrap();
        assert!(restored.generation > 1_000_000);
        assert_eq!((replacement.generation, replacement.settled_at), (restored.generation, None));
    }

    #[test]
    fn current_signer_is_listed_first() {
        let kept = replacing(KeyPurpose::Clients);
        let ring = &kept.rings[&KeyPurpose::Clients];
        let authorities = kept.authorities();
        assert_eq!(authorities.len(), 5);
        let both = [&ring.signer, &ring.replacement.as_ref().unwrap().trusted];
        assert_eq!(authorities[1].trusted, both.map(|signer| signer.certificate().to_vec()));
        assert_eq!(authorities[0].trusted.len(), 1);
        let kept = replacing(KeyPurpose::ServiceAccounts);
        let ring = &kept.rings[&KeyPurpose::ServiceAccounts];
        let both = [ring.signer.public_key(), ring.replacement.as_ref().unwrap().trusted.public_key()];
        assert_eq!(kept.service_account_keys(), both);
    }
}
