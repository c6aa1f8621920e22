//! Decide whether to accept an enrolment request: fences, machine id and database id (pure).
//!
//! The machine has the last word. A shepherd whose lease expired, a restored backup, a second bare metal database: each
//! may still have an SSH session open to this machine, and nothing on the way can distinguish it from the rightful one.
//! So the machine stores, per lane, the highest fence that it has ever seen, and rejects a lower one. An equal fence is
//! the same work that tries again, and gets the same response. Machine and database are fixed by the first enrolment.
//!
//! Everything here is a function of (stored enrolment, request): the program on a machine stores the result in its
//! state directory, a simulated machine in its own state, and both reject exactly the same.

use std::collections::BTreeMap;

use model::ids::MachineId;
use model::process::Lane;
use model::signed_artefact::signing_key::collect_signing_keys;
use proto::agent::v1 as wire;
use proto::agent::v1::enroll_error::Kind;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::agent::settings::AgentSettings;

/// The largest encoded request that is read.
pub const REQUEST_LIMIT_BYTES: usize = 1 << 20;
/// The enrolment that a machine stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    /// The id of the machine; it never changes.
    pub machine_id: MachineId,
    /// The bare metal database that the machine belongs to; it never changes.
    pub bmdb_id: Uuid,
    /// Highest fence seen in each lane.
    pub fences: BTreeMap<Lane, i64>,
    /// The session that held each of these fences, if the request named it.
    #[serde(default)]
    pub holders: BTreeMap<Lane, Uuid>,
    /// How to reach the shepherd.
    pub settings: AgentSettings,
    /// Changes with each request that changed anything; an agent that was started for an earlier revision is restarted.
    pub revision: u64,
}

/// Why a machine rejects a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnrollError {
    /// Something on the machine failed; a retry may help.
    #[error("{0}")]
    Failed(String),
    /// A field of the request is malformed.
    #[error("the enrolment request is malformed: {0}")]
    Invalid(String),
    /// The machine has seen a higher fence in that lane.
    #[error(
        "this machine has seen fence {known} in lane {lane} and refuses {offered} from here: \
         somebody else has taken over since; let this work go, or, when the bare metal database was \
         restored from a backup, declare that with `shepherdctl declare restored`"
    )]
    StaleFence {
        /// The lane of the request.
        lane: Lane,
        /// The fence in the request.
        offered: i64,
        /// The highest fence that the machine has seen in that lane.
        known: i64,
    },
    /// The machine is enrolled as another machine.
    #[error(
        "this machine is enrolled as machine {known} and refuses to become {offered}: is the \
         address right? If it is to change hands, retire {known} first, or stop the role server \
         on the machine and remove its state directory"
    )]
    OtherMachine {
        /// The machine id in the request.
        offered: MachineId,
        /// The machine id that the machine has stored.
        known: MachineId,
    },
    /// The machine is enrolled by another bare metal database.
    #[error(
        "this machine belongs to bare metal database {known} and refuses {offered}: if it is to \
         change hands, retire it there first, or stop the role server on the machine and remove \
         its state directory"
    )]
    OtherBmdb {
        /// The database in the request.
        offered: Uuid,
        /// The database that the machine has stored.
        known: Uuid,
    },
}

impl EnrollError {
    /// The error as a message of the response.
    #[must_use]
    pub fn to_wire(&self) -> wire::EnrollError {
        let (kind, known_fence) = match self {
            Self::Failed(_) => (Kind::Failed, 0),
            Self::Invalid(_) => (Kind::Invalid, 0),
            Self::StaleFence { known, .. } => (Kind::StaleFence, *known),
            Self::OtherMachine { .. } => (Kind::OtherMachine, 0),
            Self::OtherBmdb { .. } => (Kind::OtherBmdb, 0),
        };
        wire::EnrollError { kind: kind.into(), message: self.to_string(), current_fence: known_fence }
    }

    /// The code that `roleserver enroll` exits with after it has sent this error.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Invalid(_) => 2,
            Self::StaleFence { .. } | Self::OtherMachine { .. } | Self::OtherBmdb { .. } => 4,
        }
    }

    /// The whole response with this error.
    #[must_use]
    pub fn to_response(&self) -> wire::EnrollResponse {
        wire::EnrollResponse { result: Some(wire::enroll_response::Result::Error(self.to_wire())) }
    }
}

impl Enrolment {
    /// Highest fence of the access lane, as each heartbeat carries it; 0 if none was seen.
    #[must_use]
    pub fn access_fence(&self) -> i64 {
        self.fences.get(&Lane::Access).copied().unwrap_or(0)
    }
}

/// Decides on a request. The returned enrolment must be stored before the response is sent.
///
/// `kept` is `None` on a machine that was never enrolled. A repeated request returns what is stored, unchanged.
pub fn accept_enrolment(
    kept: Option<&Enrolment>,
    request: &wire::EnrollRequest,
) -> Result<Enrolment, EnrollError> {
    let machine_id = MachineId(parse_uuid("machine_id", &request.machine_id)?);
    let bmdb_id = parse_uuid("bmdb_id", &request.bmdb_id)?;
    let lane = parse_lane(&request.lane)?;
    if request.fence < 1 {
        return Err(EnrollError::Invalid(format!("fence is {}; the first one is 1", request.fence)));
    }
    let settings =
        AgentSettings::new(&request.endpoints, &request.ca_certificates, request.heartbeat_interval_seconds)
            .map_err(EnrollError::Invalid)?;

    if request.shepherd_time_ms < 0 {
        return Err(EnrollError::Invalid(format!(
            "shepherd_time_ms is {}; no shepherd runs before 1970",
            request.shepherd_time_ms
        )));
    }

    let holder = match request.session_id.as_str() {
        "" => None,
        text => Some(parse_uuid("session_id", text)?),
    };
    // They are no part of the enrolment: the machine pins them once (`crate::signing_store`).
    if !request.signing_keys.is_empty() {
        collect_signing_keys(request.signing_keys.iter().map(String::as_str))
            .map_err(|error| EnrollError::Invalid(format!("signing_keys: {error}")))?;
    }

    if request.replace_signing_keys && request.signing_keys.is_empty() {
        let text = "replace_signing_keys is set, and signing_keys is empty: give the new keys";
        return Err(EnrollError::Invalid(text.to_owned()));
    }

    let Some(kept) = kept else {
        let fences = BTreeMap::from([(lane, request.fence)]);
        let holders = holder.into_iter().map(|holder| (lane, holder)).collect();
        return Ok(Enrolment { machine_id, bmdb_id, fences, holders, settings, revision: 1 });
    };
    // The database is compared first: fences of two databases cannot be compared.
    if kept.bmdb_id != bmdb_id {
        return Err(EnrollError::OtherBmdb { offered: bmdb_id, known: kept.bmdb_id });
    }
    if kept.machine_id != machine_id {
        return Err(EnrollError::OtherMachine { offered: machine_id, known: kept.machine_id });
    }
    let known = kept.fences.get(&lane).copied().unwrap_or(0);
    // Only a database that was restored from a backup gives a second session a fence that another one had.
    let of_another = request.fence == known
        && holder.is_some_and(|holder| kept.holders.get(&lane).is_some_and(|kept| *kept != holder));
    if request.fence < known || of_another {
        return Err(EnrollError::StaleFence { lane, offered: request.fence, known });
    }
    if request.fence == known && kept.settings == settings {
        return Ok(kept.clone());
    }
    let (mut fences, mut holders) = (kept.fences.clone(), kept.holders.clone());
    fences.insert(lane, request.fence);
    match holder {
        Some(holder) => holders.insert(lane, holder),
        None => holders.remove(&lane),
    };
    let revision = kept.revision.wrapping_add(1);
    Ok(Enrolment { machine_id, bmdb_id, fences, holders, settings, revision })
}

fn parse_lane(text: &str) -> Result<Lane, EnrollError> {
    // The response quotes the rejected text, so not all of a megabyte.
    let shown: String = text.chars().take(100).collect();
    shown.parse().map_err(|error| EnrollError::Invalid(format!("lane: {error}")))
}

fn parse_uuid(field: &str, text: &str) -> Result<Uuid, EnrollError> {
    let invalid = || {
        let shown: String = text.chars().take(100).collect();
        EnrollError::Invalid(format!("{field} is {shown:?}; give a hyphenated lower-case UUID"))
    };
    let id = Uuid::parse_str(text).map_err(|_| invalid())?;
    // Only one spelling is valid, because the response is compared with the request byte by byte.
    if id.is_nil() || id.hyphenated().to_string() != text { Err(invalid()) } else { Ok(id) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::settings::DEFAULT_INTERVAL;

    const MACHINE: &str = "11111111-1111-4111-8111-111111111111";
    const BMDB: &str = "22222222-2222-4222-8222-222222222222";
    const OTHER: &str = "33333333-3333-4333-8333-333333333333";

    fn request(fence: i64) -> wire::EnrollRequest {
        wire::EnrollRequest {
            machine_id: MACHINE.to_owned(),
            endpoints: vec!["shepherd.example:8443".to_owned()],
            ca_certificates: vec![],
            lane: "access".to_owned(),
            fence,
            bmdb_id: BMDB.to_owned(),
            heartbeat_interval_seconds: 0,
            session_id: String::new(),
            shepherd_time_ms: 0,
            signing_keys: Vec::new(),
            key_rotations: Vec::new(),
            replace_signing_keys: false,
            require_signed_declarations: false,
        }
    }

    #[test]
    fn fence_of_one_session_is_rejected_from_another() {
        let of =
            |session: &str, fence| wire::EnrollRequest { session_id: session.to_owned(), ..request(fence) };
        let kept = accept_enrolment(None, &of(MACHINE, 7)).unwrap();
        assert_eq!(accept_enrolment(Some(&kept), &of(MACHINE, 7)).unwrap(), kept, "the same work asks again");
        let error = accept_enrolment(Some(&kept), &of(OTHER, 7)).unwrap_err();
        assert_eq!(error, EnrollError::StaleFence { lane: Lane::Access, offered: 7, known: 7 });
        assert_eq!(
            accept_enrolment(Some(&kept), &request(7)).unwrap(),
            kept,
            "an older shepherd says nothing of it"
        );
        let next = accept_enrolment(Some(&kept), &of(OTHER, 8)).unwrap();
        assert_eq!(next.holders[&Lane::Access].to_string(), OTHER);
        let silent = accept_enrolment(Some(&next), &request(9)).unwrap();
        assert!(accept_enrolment(Some(&silent), &of(MACHINE, 9)).is_ok(), "fence 9 has no recorded session");
        assert!(accept_enrolment(None, &of("7", 7)).unwrap_err().to_string().contains("session_id"));
    }

    #[test]
    fn first_request_is_accepted_as_a_whole() {
        let enrolment = accept_enrolment(None, &request(7)).unwrap();
        assert_eq!(enrolment.machine_id.to_string(), MACHINE);
        assert_eq!(enrolment.access_fence(), 7);
        assert_eq!(enrolment.revision, 1);
        assert_eq!(enrolment.settings.heartbeat_interval(), DEFAULT_INTERVAL);
    }

    #[test]
    fn lower_fence_is_refused_and_an_equal_one_changes_nothing() {
        let kept = accept_enrolment(None, &request(7)).unwrap();
        assert_eq!(accept_enrolment(Some(&kept), &request(7)).unwrap(), kept);
        let error = accept_enrolment(Some(&kept), &request(6)).unwrap_err();
        assert_eq!(error, EnrollError::StaleFence { lane: Lane::Access, offered: 6, known: 7 });
        assert_eq!(error.to_wire().current_fence, 7);
        assert_eq!(error.to_wire().kind(), Kind::StaleFence);
    }

    #[test]
    fn time_of_the_shepherd_is_no_setting() {
        let kept = accept_enrolment(None, &request(7)).unwrap();
        let later = wire::EnrollRequest { shepherd_time_ms: 1_700_000_000_000, ..request(7) };
        assert_eq!(accept_enrolment(Some(&kept), &later).unwrap(), kept, "an agent that runs is left alone");
    }

    #[test]
    fn higher_fence_moves_the_revision_and_lanes_count_apart() {
        let kept = accept_enrolment(None, &request(7)).unwrap();
        let next = accept_enrolment(Some(&kept), &request(8)).unwrap();
        assert_eq!((next.access_fence(), next.revision), (8, 2));
        let observe = wire::EnrollRequest { lane: "observe".to_owned(), ..request(1) };
        let both = accept_enrolment(Some(&next), &observe).unwrap();
        assert_eq!(both.fences, BTreeMap::from([(Lane::Access, 8), (Lane::Observe, 1)]));
    }

    #[test]
    fn equal_fence_with_other_settings_is_accepted() {
        let kept = accept_enrolment(None, &request(7)).unwrap();
        let moved = wire::EnrollRequest { endpoints: vec!["[::1]:1".to_owned()], ..request(7) };
        let next = accept_enrolment(Some(&kept), &moved).unwrap();
        assert_eq!((next.settings.endpoints, next.revision), (vec!["[::1]:1".to_owned()], 2));
    }

    #[test]
    fn machine_and_database_are_fixed_whatever_the_fence() {
        let kept = accept_enrolment(None, &request(7)).unwrap();
        let other_machine = wire::EnrollRequest { machine_id: OTHER.to_owned(), ..request(100) };
        let error = accept_enrolment(Some(&kept), &other_machine).unwrap_err();
        assert_eq!(error.to_wire().kind(), Kind::OtherMachine);
        assert!(error.to_string().contains("remove its state directory"), "{error}");
        let other_bmdb =
            wire::EnrollRequest { bmdb_id: OTHER.to_owned(), machine_id: OTHER.to_owned(), ..request(1) };
        assert_eq!(accept_enrolment(Some(&kept), &other_bmdb).unwrap_err().to_wire().kind(), Kind::OtherBmdb);
    }

    #[test]
    fn signing_keys_are_no_part_of_the_enrolment() {
        let with = |key: &str| wire::EnrollRequest { signing_keys: vec![key.to_owned()], ..request(7) };
        let kept = accept_enrolment(None, &request(7)).unwrap();
        let key = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
        assert_eq!(
            accept_enrolment(Some(&kept), &with(key)).unwrap(),
            kept,
            "an agent that runs is left alone"
        );
        let error = accept_enrolment(None, &with("x")).unwrap_err().to_string();
        assert!(error.contains("signing_keys: \"x\" is no public key of minisign"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn fences_never_decrease(requested in proptest::collection::vec((0..2_usize, 1..20_i64), 1..50)) {
            let mut kept: Option<Enrolment> = None;
            for (lane, fence) in requested {
                let lane = Lane::ALL[lane];
                let request = wire::EnrollRequest { lane: lane.to_string(), ..request(fence) };
                let highest = kept.as_ref().and_then(|kept| kept.fences.get(&lane).copied());
                match accept_enrolment(kept.as_ref(), &request) {
                    Ok(next) => {
                        proptest::prop_assert!(highest.is_none_or(|highest| highest <= fence));
                        proptest::prop_assert_eq!(next.fences.get(&lane), Some(&fence));
                        let moved = kept.as_ref().is_none_or(|kept| *kept != next);
                        let revision = kept.as_ref().map_or(0, |kept| kept.revision);
                        proptest::prop_assert_eq!(next.revision, revision + u64::from(moved));
                        kept = Some(next);
                    }
                    Err(error) => {
                        proptest::prop_assert!(highest > Some(fence));
                        proptest::prop_assert_eq!(error.to_wire().kind(), Kind::StaleFence);
                    }
                }
            }
        }
    }

    #[test]
    fn malformed_field_is_named() {
        let base = || request(1);
        let cases = [
            ("machine_id", wire::EnrollRequest { machine_id: "7".to_owned(), ..base() }),
            ("machine_id", wire::EnrollRequest { machine_id: MACHINE.replace('-', ""), ..base() }),
            ("machine_id", wire::EnrollRequest { machine_id: Uuid::nil().to_string(), ..base() }),
            ("bmdb_id", wire::EnrollRequest { bmdb_id: String::new(), ..base() }),
            ("endpoints", wire::EnrollRequest { endpoints: vec![], ..base() }),
            ("endpoints", wire::EnrollRequest { endpoints: vec!["::1:8443".to_owned()], ..base() }),
            ("endpoints", wire::EnrollRequest { endpoints: vec!["a:1".to_owned(); 65], ..base() }),
            ("ca_certificates", wire::EnrollRequest { ca_certificates: vec![vec![1, 2, 3]], ..base() }),
            ("lane", wire::EnrollRequest { lane: "fast".to_owned(), ..base() }),
            ("fence", wire::EnrollRequest { fence: 0, ..base() }),
            (
                "heartbeat_interval_seconds",
                wire::EnrollRequest { heartbeat_interval_seconds: 3601, ..base() },
            ),
            ("shepherd_time_ms", wire::EnrollRequest { shepherd_time_ms: -1, ..base() }),
        ];
        for (field, request) in cases {
            let error = accept_enrolment(None, &request).unwrap_err();
            assert_eq!(error.to_wire().kind(), Kind::Invalid, "{error}");
            let prefix = format!("the enrolment request is malformed: {field}");
            assert!(error.to_string().starts_with(&prefix), "{error}");
        }
    }

    #[test]
    fn stored_enrolment_survives_writing_and_reading() {
        let certificate = curator_client::identity::Identity::generate().unwrap().certificate_der().to_vec();
        let request = wire::EnrollRequest { ca_certificates: vec![certificate], ..request(7) };
        let kept = accept_enrolment(None, &request).unwrap();
        let text = serde_json::to_string(&kept).unwrap();
        assert_eq!(serde_json::from_str::<Enrolment>(&text).unwrap(), kept);
    }
}
