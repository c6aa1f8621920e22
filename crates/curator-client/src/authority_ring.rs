//! The record of the cluster's authority: the one that signs, and another one while it is replaced.
//!
//! A replacement has three stages, and each of them is one write of this record:
//!
//! 1. *Trusted*. Certificates of the next authority count, and it signs nothing yet.
//! 2. *Signing*. The next authority signs, and certificates of the former one count. Its key is not stored any more.
//! 3. *Dropping*. Certificates of the former authority do not count. Members of etcd that run with its certificate restart
//!    without it.
//!
//! Since everything is in one record, no stage is half-done. A curator of a release that replaces no authority reads the
//! one that signs, and never writes the record.
//!
//! A member that is removed meanwhile has the keys of both authorities. So the end of a replacement begins the next one if
//! the record demands it.
//!
//! The record also has the successions, which statements are sent with ([`succession`](crate::succession)). It is the
//! secret of the cluster. `Debug` shows no key.

use std::sync::Arc;

use etcd::record::{self, RecordError};
use model::time::{Timestamp, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::pki::{Authority, TrustAnchor};
use crate::succession::{MAX_SUCCESSIONS, Succession, SuccessionError};

/// The authorities of a cluster.
#[derive(Clone, Debug)]
pub struct AuthorityRing {
    /// The authority that signs.
    pub signer: Arc<Authority>,
    /// The replacement that is under way.
    pub replacement: Option<AuthorityReplacement>,
    /// Encoded successions, oldest first.
    pub successors: Vec<Vec<u8>>,
}

/// A replacement that is under way.
#[derive(Clone, Debug)]
pub struct AuthorityReplacement {
    /// The stage, with the authority that does not sign.
    pub stage: ReplacementStage,
    /// When the stage began.
    pub since: Timestamp,
    /// Whether its end begins the next one.
    pub again: bool,
}

/// The stage of a replacement.
#[derive(Clone, Debug)]
pub enum ReplacementStage {
    /// Certificates of the next authority count.
    Trusted {
        /// The authority that will sign.
        next: Arc<Authority>,
    },
    /// The next authority signs, and certificates of the former one count.
    Signing {
        /// The authority that signed before.
        former: TrustAnchor,
    },
    /// Certificates of the former authority do not count, and members of etcd restart without it.
    Dropping {
        /// The authority that signed before.
        former: TrustAnchor,
    },
}

/// The end of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplacementStep {
    /// Let the next authority sign.
    Sign,
    /// Let certificates of the former authority count no longer.
    Drop,
    /// Forget the former authority.
    End,
}

impl ReplacementStage {
    /// The stage as the API shows it.
    #[must_use]
    pub const fn to_wire(&self) -> wire::AuthorityStage {
        match self {
            Self::Trusted { .. } => wire::AuthorityStage::Trusted,
            Self::Signing { .. } => wire::AuthorityStage::Signing,
            Self::Dropping { .. } => wire::AuthorityStage::Dropping,
        }
    }
}

impl AuthorityRing {
    /// An authority that is not being replaced.
    #[must_use]
    pub fn new(signer: Authority) -> Self {
        Self { signer: Arc::new(signer), replacement: None, successors: Vec::new() }
    }

    /// The authorities with valid certificates. The first one signs.
    #[must_use]
    pub fn trusted(&self) -> Vec<TrustAnchor> {
        let other = match self.replacement.as_ref().map(|replacement| &replacement.stage) {
            Some(ReplacementStage::Trusted { next }) => Some(next.anchor()),
            Some(ReplacementStage::Signing { former }) => Some(former),
            Some(ReplacementStage::Dropping { .. }) | None => None,
        };
        [self.signer.anchor()].into_iter().chain(other).cloned().collect()
    }

    /// The authorities that may have signed the newest statement. A leader that was lost between two writes leaves one of
    /// the stage before.
    #[must_use]
    pub fn signers(&self) -> Vec<TrustAnchor> {
        let former = match self.replacement.as_ref().map(|replacement| &replacement.stage) {
            Some(ReplacementStage::Signing { former } | ReplacementStage::Dropping { former }) => {
                Some(former)
            }
            Some(ReplacementStage::Trusted { .. }) | None => None,
        };
        [self.signer.anchor()].into_iter().chain(former).cloned().collect()
    }

    /// The ring with a replacement begun, which the present authority signs; `None` if one is under way.
    pub fn begin(&self, next: Authority, now: Timestamp) -> Result<Option<Self>, SuccessionError> {
        if self.replacement.is_some() {
            return Ok(None);
        }
        let mut successors = self.successors.clone();
        successors.push(Succession::sign(&self.signer, next.anchor())?);
        let too_many = successors.len().saturating_sub(MAX_SUCCESSIONS);
        successors.drain(..too_many);
        let stage = ReplacementStage::Trusted { next: Arc::new(next) };
        let replacement = Some(AuthorityReplacement { stage, since: now, again: false });
        Ok(Some(Self { signer: self.signer.clone(), replacement, successors }))
    }

    /// The ring in which the end of the replacement begins the next one; `None` if there is no replacement.
    #[must_use]
    pub fn repeat(&self) -> Option<Self> {
        let replacement = AuthorityReplacement { again: true, ..self.replacement.clone()? };
        Some(Self { replacement: Some(replacement), ..self.clone() })
    }

    /// The ring after this step; `None` if the step does not end the present stage.
    #[must_use]
    pub fn apply_step(&self, step: ReplacementStep, now: Timestamp) -> Option<Self> {
        let replacement = self.replacement.as_ref()?;
        let (signer, stage) = match (&replacement.stage, step) {
            (ReplacementStage::Trusted { next }, ReplacementStep::Sign) => {
                let former = self.signer.anchor().clone();
                (next.clone(), Some(ReplacementStage::Signing { former }))
            }
            (ReplacementStage::Signing { former }, ReplacementStep::Drop) => {
                (self.signer.clone(), Some(ReplacementStage::Dropping { former: former.clone() }))
            }
            (ReplacementStage::Dropping { .. }, ReplacementStep::End) => (self.signer.clone(), None),
            _ => return None,
        };
        let again = replacement.again;
        let replacement = stage.map(|stage| AuthorityReplacement { stage, since: now, again });
        Some(Self { signer, replacement, successors: self.successors.clone() })
    }

    /// Encodes the record for etcd. The bytes are secret.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut message = wire::AuthorityRecord {
            format: record::FORMAT,
            certificate: self.signer.anchor().certificate.clone(),
            private_key: self.signer.pkcs8().to_vec(),
            successors: self.successors.clone(),
            ..Default::default()
        };
        if let Some(replacement) = &self.replacement {
            message.stage = replacement.stage.to_wire().into();
            message.since_ms = replacement.since.timestamp_millis();
            message.again = replacement.again;
            match &replacement.stage {
                ReplacementStage::Trusted { next } => {
                    message.other_certificate.clone_from(&next.anchor().certificate);
                    message.other_private_key = next.pkcs8().to_vec();
                }
                ReplacementStage::Signing { former } | ReplacementStage::Dropping { former } => {
                    message.other_certificate.clone_from(&former.certificate);
                }
            }
        }
        message.encode_to_vec()
    }

    /// Decodes the record that is stored under `key`. The error reveals nothing of the keys.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let message = record::decode(key, bytes, |record: &wire::AuthorityRecord| record.format)?;
        let load = |certificate: &[u8], private_key: &[u8]| {
            Authority::load(certificate, private_key).map(Arc::new).map_err(|error| fault(error.to_string()))
        };
        let signer = load(&message.certificate, &message.private_key)?;
        let former =
            || TrustAnchor::parse(&message.other_certificate).map_err(|error| fault(error.to_string()));
        let stage = wire::AuthorityStage::try_from(message.stage)
            .map_err(|_| fault("this release does not know its stage: update the role server".to_owned()))?;
        let stage = match stage {
            wire::AuthorityStage::Unspecified => None,
            wire::AuthorityStage::Trusted => {
                let next = load(&message.other_certificate, &message.other_private_key)?;
                Some(ReplacementStage::Trusted { next })
            }
            wire::AuthorityStage::Signing => Some(ReplacementStage::Signing { former: former()? }),
            wire::AuthorityStage::Dropping => Some(ReplacementStage::Dropping { former: former()? }),
        };
        let other = match &stage {
            Some(ReplacementStage::Trusted { next }) => Some(next.anchor()),
            Some(ReplacementStage::Signing { former } | ReplacementStage::Dropping { former }) => {
                Some(former)
            }
            None => None,
        };
        if other.is_some_and(|other| other.cluster != signer.anchor().cluster) {
            return Err(fault("its two authorities are of different clusters".to_owned()));
        }
        let replacement = match stage {
            Some(stage) => {
                let since = parse_timestamp("since", message.since_ms).map_err(fault)?;
                Some(AuthorityReplacement { stage, since, again: message.again })
            }
            None => None,
        };
        Ok(Self { signer, replacement, successors: message.successors })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{authority_record_key, decode_authority, encode_authority};
    use crate::succession::find_path;
    use crate::testing::{at, authority, authority_of};

    const STEPS: [ReplacementStep; 3] = [ReplacementStep::Sign, ReplacementStep::Drop, ReplacementStep::End];

    fn anchor(number: u8) -> TrustAnchor {
        authority_of(1, number).anchor().clone()
    }

    fn begun() -> AuthorityRing {
        AuthorityRing::new(authority(1)).begin(authority_of(1, 5), at(1)).unwrap().unwrap()
    }

    /// Authorities that are trusted, and those that may have signed the newest statement.
    fn authorities(ring: &AuthorityRing) -> (Vec<TrustAnchor>, Vec<TrustAnchor>) {
        (ring.trusted(), ring.signers())
    }

    #[test]
    fn each_stage_has_its_authorities_and_reads_back() {
        let key = authority_record_key().unwrap();
        let anchors = |numbers: &[u8]| -> Vec<TrustAnchor> { numbers.iter().copied().map(anchor).collect() };
        let mut ring = AuthorityRing::new(authority(1));
        assert_eq!(ring.encode(), encode_authority(&authority(1)), "as a release before writes it");
        let mut next = Some(begun());
        let mut steps = STEPS.into_iter();
        for (trusted, signers) in [
            (anchors(&[1]), anchors(&[1])),
            (anchors(&[1, 5]), anchors(&[1])),
            (anchors(&[5, 1]), anchors(&[5, 1])),
            (anchors(&[5]), anchors(&[5, 1])),
            (anchors(&[5]), anchors(&[5])),
        ] {
            assert_eq!(authorities(&ring), (trusted, signers));
            let read = AuthorityRing::decode(&key, &ring.encode()).unwrap();
            assert_eq!(read.encode(), ring.encode());
            assert_eq!(authorities(&read), authorities(&ring));
            // A curator of the release before signs with the authority that signs.
            assert_eq!(decode_authority(&key, &ring.encode()).unwrap().anchor(), ring.signer.anchor());
            let Some(following) = next.take() else { continue };
            ring = following;
            next = steps.next().and_then(|step| ring.apply_step(step, at(2)));
        }
        assert!(ring.replacement.is_none());
    }

    #[test]
    fn former_key_is_forgotten_and_its_succession_is_not() {
        let secret = authority(1).pkcs8().to_vec();
        let signing = begun().apply_step(ReplacementStep::Sign, at(2)).unwrap();
        let has_secret = |ring: &AuthorityRing| ring.encode().windows(secret.len()).any(|at| at == secret);
        assert!(has_secret(&begun()) && !has_secret(&signing));
        let ended = signing.apply_step(ReplacementStep::Drop, at(3)).unwrap();
        let ended = ended.apply_step(ReplacementStep::End, at(4)).unwrap();
        let again = ended.begin(authority_of(1, 6), at(5)).unwrap().unwrap();
        let path = find_path(&[anchor(1)], &again.successors, |found| *found == anchor(6)).unwrap();
        assert_eq!(path.successions, again.successors);
        assert_eq!(again.successors.len(), 2);
    }

    #[test]
    fn only_the_next_step_is_made_and_one_replacement_at_a_time() {
        let mut ring = begun();
        for next in STEPS {
            assert!(ring.begin(authority_of(1, 6), at(2)).unwrap().is_none());
            for step in STEPS {
                assert_eq!(ring.apply_step(step, at(2)).is_some(), step == next, "{next:?} {step:?}");
            }
            ring = ring.apply_step(next, at(2)).unwrap();
        }
        assert!(STEPS.iter().all(|step| ring.apply_step(*step, at(2)).is_none()));
        assert!(ring.begin(authority(2), at(2)).is_err(), "that of another cluster");
    }

    #[test]
    fn order_for_the_next_replacement_lasts_until_the_end() {
        let key = authority_record_key().unwrap();
        let is_repeated = |ring: &AuthorityRing| ring.replacement.as_ref().is_some_and(|one| one.again);
        assert!(AuthorityRing::new(authority(1)).repeat().is_none());
        let stages = STEPS.into_iter().scan(begun(), |ring, step| {
            let before = ring.clone();
            *ring = ring.apply_step(step, at(2)).unwrap();
            Some(before)
        });
        for stage in stages {
            assert!(!is_repeated(&AuthorityRing::decode(&key, &stage.encode()).unwrap()));
            let repeated = stage.repeat().unwrap();
            assert_eq!(authorities(&repeated), authorities(&stage));
            assert_eq!(repeated.repeat().unwrap().encode(), repeated.encode());
            let read = AuthorityRing::decode(&key, &repeated.encode()).unwrap();
            assert!(is_repeated(&read));
            for step in STEPS {
                let Some(next) = read.apply_step(step, at(3)) else { continue };
                assert_eq!(is_repeated(&next), step != ReplacementStep::End, "{step:?}");
                let after = next.begin(authority_of(1, 6), at(4)).unwrap();
                assert!(after.is_none_or(|after| !is_repeated(&after)), "one more, and no more than that");
            }
        }
    }

    #[test]
    fn oldest_successions_are_dropped_beyond_64() {
        let mut ring = AuthorityRing::new(authority(1));
        for number in 0..=MAX_SUCCESSIONS {
            let next = authority_of(1, 100 + u8::try_from(number % 2).unwrap());
            ring = ring.begin(next, at(1)).unwrap().unwrap();
            for step in STEPS {
                ring = ring.apply_step(step, at(1)).unwrap();
            }
        }
        assert_eq!(ring.successors.len(), MAX_SUCCESSIONS);
        assert_eq!(Succession::verify(&ring.successors[0]).unwrap().old, anchor(100));
    }

    #[test]
    fn damaged_record_is_an_error_that_shows_no_key() {
        let key = authority_record_key().unwrap();
        let good = wire::AuthorityRecord::decode(begun().encode().as_slice()).unwrap();
        let elsewhere = authority(2).anchor().certificate.clone();
        let signing = i32::from(wire::AuthorityStage::Signing);
        for (what, record) in [
            ("does not know its stage", wire::AuthorityRecord { stage: 9, ..good.clone() }),
            ("no usable key", wire::AuthorityRecord { other_private_key: vec![1], ..good.clone() }),
            (
                "of different clusters",
                wire::AuthorityRecord { stage: signing, other_certificate: elsewhere, ..good.clone() },
            ),
            ("since", wire::AuthorityRecord { since_ms: 0, ..good.clone() }),
            ("update the role server", wire::AuthorityRecord { format: 99, ..good.clone() }),
        ] {
            let error = AuthorityRing::decode(&key, &record.encode_to_vec()).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("global/authority"), "{what}: {error}");
            assert!(!error.contains(&hex::encode(authority(1).pkcs8())[40..]), "{error}");
        }
    }
}
