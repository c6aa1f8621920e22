//! Certificates by which people, and programs outside, reach the API servers.
//!
//! What its holder may do follows from the group in it, for which the built-in objects have rules. There is no list of
//! what was revoked, so it is short-lived; and it ends with the authority that signed it: whoever had one before the
//! clients' authority was replaced asks for another.

use std::time::Duration;

use crate::curator::kubernetes::authority::Subject;
use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::pki::is_owner_name;
use crate::model::cluster::kubernetes_user::LONGEST_LIFETIME;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::issue_kubernetes_user_request::Access;

/// What is signed for somebody, and for how long.
pub fn decide(asked: &wire::IssueKubernetesUserRequest) -> Result<(Subject, Duration), Refusal> {
    let refused = |why: String| Err(Refusal::User(why));
    if !is_owner_name(&asked.name) {
        let shown: String = asked.name.chars().take(100).collect();
        return refused(format!(
            "{shown:?} names no user: a name has 1 to 63 letters, digits, dots, dashes and underscores, and is no node id"
        ));
    }
    let organisation = match asked.access() {
        Access::Owner => "shepherd:owners",
        Access::Viewer => "shepherd:viewers",
        Access::Unspecified => {
            return refused(format!("it does not say what {} may do: all, or look", asked.name));
        }
    };
    let lifetime = Duration::from_millis(asked.lifetime_ms);
    if lifetime.is_zero() {
        return refused("it would expire at once; say how long it is to be good for".to_owned());
    }
    if lifetime > LONGEST_LIFETIME.0 {
        let days = LONGEST_LIFETIME.0.as_secs() / 86_400;
        return refused(format!(
            "a user's certificate is good for {days} days at the most: API servers know none that are revoked"
        ));
    }
    let subject = Subject {
        organisation: organisation.to_owned(),
        name: asked.name.clone(),
        calls: true,
        ..Subject::default()
    };
    Ok((subject, lifetime))
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::curator::node_id::tests::node_id;

    fn asked(name: &str, access: Access, lifetime_ms: u64) -> wire::IssueKubernetesUserRequest {
        wire::IssueKubernetesUserRequest {
            public_key: Vec::new(),
            name: name.to_owned(),
            access: access.into(),
            lifetime_ms,
        }
    }

    #[test]
    fn group_says_what_its_holder_may_do() {
        for (access, group) in [(Access::Owner, "shepherd:owners"), (Access::Viewer, "shepherd:viewers")] {
            let (subject, lifetime) = decide(&asked("kim", access, 1500)).unwrap();
            assert_eq!((subject.organisation.as_str(), subject.name.as_str()), (group, "kim"));
            assert!(subject.calls && !subject.serves && subject.dns.is_empty());
            assert_eq!(lifetime, Duration::from_millis(1500));
        }
    }

    #[test]
    fn what_can_be_no_user_is_refused() {
        let week = 7 * 24 * 3_600_000;
        assert!(decide(&asked("kim", Access::Owner, week)).is_ok());
        for (wrong, said) in [
            (asked("", Access::Owner, 1), "names no user"),
            (asked("system:admin", Access::Owner, 1), "names no user"),
            (asked("kim@example", Access::Owner, 1), "names no user"),
            (asked(&"k".repeat(64), Access::Owner, 1), "names no user"),
            (asked(&node_id(1).to_string(), Access::Owner, 1), "names no user"),
            (asked("kim", Access::Unspecified, 1), "may do"),
            (asked("kim", Access::Viewer, 0), "expire at once"),
            (asked("kim", Access::Viewer, week + 1), "7 days at the most"),
            (asked("kim", Access::Viewer, u64::MAX), "7 days at the most"),
        ] {
            let refusal = decide(&wrong).unwrap_err();
            assert_eq!(refusal.code(), Code::InvalidArgument);
            assert!(refusal.to_string().contains(said), "{said}: {refusal}");
        }
    }
}
