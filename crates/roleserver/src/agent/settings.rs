//! Agent settings: endpoints, CA certificates and heartbeat interval, validated wherever they enter.
//!
//! An enrolment sets them, and a response to a heartbeat may change them. Settings that nothing could be reached with
//! are rejected as a whole, and the error names the field.

use std::collections::BTreeSet;
use std::time::Duration;

use proto::agent::v1 as wire;
use serde::{Deserialize, Serialize};

use crate::endpoint::Endpoint;
use crate::trust_store;

/// Heartbeat interval if the settings have none.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(30);

const MAX_INTERVAL_SECONDS: u32 = 3600;
const MAX_ENDPOINTS: usize = 64;
const MAX_CERTIFICATES: usize = 64;

/// How to reach the shepherd: an enrolment sets it, and a response may change it.
///
/// Always usable: values from a file are verified like those from a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredSettings")]
pub struct AgentSettings {
    /// Callback servers, tried in turn; never empty.
    pub endpoints: Vec<String>,
    /// DER certificates to verify the servers against; empty means the machine's own trust store.
    #[serde(serialize_with = "base64_list::serialize")]
    pub ca_certificates: Vec<Vec<u8>>,
    /// Seconds between heartbeats; 0 means [`DEFAULT_INTERVAL`].
    pub heartbeat_interval_seconds: u32,
}

/// Settings as a file has them, not yet verified.
#[derive(Deserialize)]
struct StoredSettings {
    endpoints: Vec<String>,
    #[serde(with = "base64_list")]
    ca_certificates: Vec<Vec<u8>>,
    heartbeat_interval_seconds: u32,
}

impl TryFrom<StoredSettings> for AgentSettings {
    type Error = String;

    fn try_from(kept: StoredSettings) -> Result<Self, String> {
        Self::new(&kept.endpoints, &kept.ca_certificates, kept.heartbeat_interval_seconds)
    }
}

impl AgentSettings {
    /// Builds settings from the fields that an enrolment and a response share, verifying each.
    ///
    /// The error names the field.
    pub fn new(
        endpoints: &[String],
        ca_certificates: &[Vec<u8>],
        heartbeat_interval_seconds: u32,
    ) -> Result<Self, String> {
        if endpoints.is_empty() {
            return Err("endpoints is empty; give at least one host:port".to_owned());
        }
        if endpoints.len() > MAX_ENDPOINTS {
            return Err(format!("endpoints has {} entries; {MAX_ENDPOINTS} are enough", endpoints.len()));
        }
        for endpoint in endpoints {
            endpoint.parse::<Endpoint>().map_err(|error| format!("endpoints: {error}"))?;
        }
        if ca_certificates.len() > MAX_CERTIFICATES {
            return Err(format!(
                "ca_certificates has {} entries; {MAX_CERTIFICATES} are enough",
                ca_certificates.len()
            ));
        }
        if !ca_certificates.is_empty() {
            trust_store::build_trust_store(ca_certificates)
                .map_err(|error| format!("ca_certificates: {error}"))?;
        }
        if heartbeat_interval_seconds > MAX_INTERVAL_SECONDS {
            return Err(format!(
                "heartbeat_interval_seconds is {heartbeat_interval_seconds}; \
                 the longest is {MAX_INTERVAL_SECONDS}"
            ));
        }
        Ok(Self {
            endpoints: endpoints.to_vec(),
            ca_certificates: ca_certificates.to_vec(),
            heartbeat_interval_seconds,
        })
    }

    /// These settings with the fields that a response replaces.
    ///
    /// The error names the field; nothing of a malformed response is taken. The order in which endpoints are tried is
    /// the machine's own choice, so the same endpoints in another order are not a change.
    pub fn with_response(&self, answer: &wire::HeartbeatResponse) -> Result<Self, String> {
        let same = |list: &[String]| list.iter().collect::<BTreeSet<_>>() == self.endpoints.iter().collect();
        let endpoints = if answer.endpoints.is_empty() || same(&answer.endpoints) {
            &self.endpoints
        } else {
            &answer.endpoints
        };
        let ca_certificates =
            if answer.ca_certificates.is_empty() { &self.ca_certificates } else { &answer.ca_certificates };
        let interval = match answer.heartbeat_interval_seconds {
            0 => self.heartbeat_interval_seconds,
            seconds => seconds,
        };
        Self::new(endpoints, ca_certificates, interval)
    }

    /// The time between two heartbeats.
    #[must_use]
    pub fn heartbeat_interval(&self) -> Duration {
        match self.heartbeat_interval_seconds {
            0 => DEFAULT_INTERVAL,
            seconds => Duration::from_secs(seconds.into()),
        }
    }
}

/// Certificates as base64 in the state file, which people read.
mod base64_list {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::Deserialize;
    use serde::ser::SerializeSeq as _;

    pub(super) fn serialize<S: serde::Serializer>(list: &[Vec<u8>], to: S) -> Result<S::Ok, S::Error> {
        let mut seq = to.serialize_seq(Some(list.len()))?;
        for item in list {
            seq.serialize_element(&STANDARD.encode(item))?;
        }
        seq.end()
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Vec<u8>>, D::Error> {
        Vec::<String>::deserialize(from)?
            .iter()
            .map(|text| STANDARD.decode(text).map_err(serde::de::Error::custom))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_replaces_what_it_names_and_an_invalid_one_nothing() {
        let kept = AgentSettings::new(&["shepherd.example:8443".to_owned()], &[], 0).unwrap();
        assert_eq!(kept.with_response(&wire::HeartbeatResponse::default()).unwrap(), kept);
        let moved = wire::HeartbeatResponse {
            endpoints: vec!["b:2".to_owned()],
            heartbeat_interval_seconds: 5,
            ..Default::default()
        };
        let changed = kept.with_response(&moved).unwrap();
        assert_eq!((changed.endpoints, changed.heartbeat_interval_seconds), (vec!["b:2".to_owned()], 5));
        let broken = wire::HeartbeatResponse { endpoints: vec!["b".to_owned()], ..Default::default() };
        assert!(kept.with_response(&broken).is_err());
        let endpoints = |list: [&str; 2]| list.map(str::to_owned).to_vec();
        let two = AgentSettings::new(&endpoints(["b:2", "a:1"]), &[], 0).unwrap();
        let sorted = wire::HeartbeatResponse { endpoints: endpoints(["a:1", "b:2"]), ..Default::default() };
        assert_eq!(two.with_response(&sorted).unwrap(), two, "another order is no change");
    }
}
