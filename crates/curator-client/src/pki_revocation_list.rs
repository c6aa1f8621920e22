//! The list of revoked peers of etcd: signing, parsing, and its record.
//!
//! A member of etcd rejects a peer with a certificate on this list. So the pair of a removed member, copied from its
//! disk, opens no port of the remaining members.
//!
//! # What etcd does with the list
//!
//! It reads the file again for each connection that it accepts, and compares serial numbers alone, and not the
//! signature or the times of the list. If the file is missing or cannot be parsed, it rejects every peer. So a list is
//! parsed before it replaces a file ([`PeerRevocations::decode`]), and a list without certificates is a list, too.
//!
//! etcd 3.4 reads PEM and DER, later versions read DER alone. They require version 2 and, if nothing is revoked, no
//! sequence of revoked certificates. Tried with 3.4.23 and 3.7.3.

use std::collections::BTreeSet;

use etcd::key_space::{GLOBAL, KeyError};
use etcd::record::{self, RecordError};
use model::time::{Timestamp, before};
use prost::Message as _;
use proto::curator::v1 as wire;
use rcgen::{CertificateRevocationListParams, Issuer, RevokedCertParams, SerialNumber};
use x509_parser::prelude::FromDer as _;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::x509::X509Version;

use crate::certificate::{CLOCK_SKEW, Serial, Validity};
use crate::pki::{Authority, PkiError, authority_name, certificate_params};

impl Authority {
    /// Signs the list of the peer certificates that etcd's members reject, DER. It is valid as long as the authority.
    pub fn sign_peer_revocation_list(
        &self,
        revoked: &BTreeSet<Serial>,
        number: u64,
        now: Timestamp,
    ) -> Result<Vec<u8>, PkiError> {
        let not_after = self.anchor().validity.not_after;
        let validity = Validity { not_before: before(now, CLOCK_SKEW), not_after };
        // The parameters of the issuer. Only its name and the method for its key identifier are used, and the times in
        // the form that the list needs.
        let mut issuer = certificate_params(Serial::new([0; 16]), validity)?;
        issuer.distinguished_name = authority_name(self.anchor().cluster);
        let revoked = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial.as_bytes()),
            revocation_time: issuer.not_before,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: issuer.not_before,
            next_update: issuer.not_after,
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: issuer.key_identifier_method.clone(),
        };
        let signed = list.signed_by(&Issuer::from_params(&issuer, self.signing_key()))?;
        Ok(signed.der().to_vec())
    }
}

/// The serial numbers on a list in DER; `None` if etcd could not parse it, or if a number is none of ours.
#[must_use]
pub fn parse_peer_revocation_list(list: &[u8]) -> Option<BTreeSet<Serial>> {
    let (rest, list) = CertificateRevocationList::from_der(list).ok()?;
    if !rest.is_empty() || list.version() != Some(X509Version::V2) {
        return None;
    }
    list.iter_revoked_certificates().map(|revoked| Serial::from_certificate(revoked.raw_serial())).collect()
}

/// The newest list of a cluster, as etcd stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRevocations {
    /// Number of the list; it grows by 1 with each one.
    pub number: u64,
    /// Serial numbers on the list.
    pub serials: BTreeSet<Serial>,
    /// The signed list, DER.
    pub list: Vec<u8>,
}

impl PeerRevocations {
    /// The etcd key of the record.
    pub fn etcd_key() -> Result<String, KeyError> {
        GLOBAL.key("peer-revocations")
    }

    /// Signs the list with this number.
    pub fn sign(
        authority: &Authority,
        serials: BTreeSet<Serial>,
        number: u64,
        now: Timestamp,
    ) -> Result<Self, PkiError> {
        let list = authority.sign_peer_revocation_list(&serials, number, now)?;
        Ok(Self { number, serials, list })
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let record = wire::PeerRevocationRecord {
            format: record::FORMAT,
            number: self.number,
            list: self.list.clone(),
            serials: self.serials.iter().map(|serial| serial.as_bytes().to_vec()).collect(),
        };
        record.encode_to_vec()
    }

    /// Decodes the record that is stored under `key`. A list that etcd could not parse is an error.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let record = record::decode(key, bytes, |record: &wire::PeerRevocationRecord| record.format)?;
        let serials = record.serials.iter().map(|raw| Serial::from_certificate(raw));
        let serials: Option<BTreeSet<Serial>> = serials.collect();
        let serials = serials.ok_or_else(|| RecordError::new(key, "one of its serial numbers is invalid"))?;
        if parse_peer_revocation_list(&record.list).as_ref() != Some(&serials) {
            return Err(RecordError::new(key, "its list is not one of these serial numbers that etcd reads"));
        }
        Ok(Self { number: record.number, serials, list: record.list })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, authority, serial};

    #[test]
    fn list_is_der_of_version_2_with_the_serials_and_none_if_empty() {
        let authority = authority(1);
        let mut lengths = Vec::new();
        for revoked in [vec![], vec![serial(3)], vec![serial(3), serial(0x7f), serial(0xff)]] {
            let revoked: BTreeSet<Serial> = revoked.into_iter().collect();
            let der = authority.sign_peer_revocation_list(&revoked, 300, at(0)).unwrap();
            assert_eq!(parse_peer_revocation_list(&der), Some(revoked));

            let (_, list) = CertificateRevocationList::from_der(&der).unwrap();
            assert_eq!(list.version(), Some(X509Version::V2));
            assert_eq!(list.crl_number().map(ToString::to_string).as_deref(), Some("300"));
            assert_eq!(list.last_update().timestamp(), before(at(0), CLOCK_SKEW).timestamp());
            let end = list.next_update().map(|end| end.timestamp());
            assert_eq!(end, Some(at(1_000_000).timestamp()), "it is valid as long as the authority");
            let anchor = authority.anchor();
            let name = crate::certificate::common_name(list.issuer());
            assert_eq!(name, Some(format!("cluster {}", anchor.cluster).as_str()));
            let key = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, anchor.key.0);
            key.verify(list.tbs_cert_list.as_ref(), &list.signature_value.data).unwrap();
            lengths.push(der.len());
        }
        // A serial number takes 18 bytes, the date of its revocation 15, and each of two sequences has a head of 2. Nothing
        // is revoked in the first list, so it has none of them.
        assert!(lengths[0] + 37 <= lengths[1], "{lengths:?}");
    }

    #[test]
    fn list_that_etcd_could_not_parse_is_no_list() {
        let revoked = BTreeSet::from([serial(3)]);
        let list = authority(1).sign_peer_revocation_list(&revoked, 1, at(0)).unwrap();
        let longer = [&list[..], &[0]].concat();
        for (what, bytes) in [
            ("empty", &[][..]),
            ("torn", &list[..list.len() - 1]),
            ("longer", &longer[..]),
            ("a certificate", &authority(1).anchor().certificate[..]),
        ] {
            assert_eq!(parse_peer_revocation_list(bytes), None, "{what}");
        }
        let after_its_end = authority(1).sign_peer_revocation_list(&revoked, 1, at(2_000_000));
        assert!(matches!(after_its_end, Err(PkiError::InvalidRequest(_))), "{after_its_end:?}");
    }

    #[test]
    fn record_reads_back_and_a_list_of_other_serials_is_an_error() {
        let key = PeerRevocations::etcd_key().unwrap();
        for serials in [vec![], vec![serial(3), serial(4)]] {
            let made = PeerRevocations::sign(&authority(1), serials.into_iter().collect(), 7, at(0)).unwrap();
            assert_eq!(PeerRevocations::decode(&key, &made.encode()), Ok(made.clone()));
            let torn = PeerRevocations { list: made.list[..made.list.len() - 1].to_vec(), ..made.clone() };
            let others = PeerRevocations { serials: BTreeSet::from([serial(5)]), ..made };
            for wrong in [torn, others] {
                let error = PeerRevocations::decode(&key, &wrong.encode()).unwrap_err().to_string();
                assert!(error.contains("peer-revocations") && error.contains("that etcd reads"), "{error}");
            }
        }
        let wrong = wire::PeerRevocationRecord {
            format: record::FORMAT,
            serials: vec![vec![1; 3]],
            ..Default::default()
        };
        let error = PeerRevocations::decode(&key, &wrong.encode_to_vec()).unwrap_err().to_string();
        assert!(error.contains("serial numbers is invalid"), "{error}");
    }
}
