//! Client certificates for users of the Kubernetes API.
//!
//! Users are people, and programs outside the cluster. What a user may do follows from the group in the certificate,
//! for which the built-in objects have rules. Kubernetes has no revocation list, so the certificate is short-lived. It
//! ends with the authority that signed it: a user who had one before the clients' authority was rotated requests
//! another one.

use std::time::Duration;

use curator_client::pki::is_owner_name;
use model::cluster::kubernetes_user::LONGEST_LIFETIME;
use proto::curator::v1 as wire;
use proto::curator::v1::issue_kubernetes_user_request::Access;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::signer::CertificateSubject;

/// The subject and the lifetime of the certificate for this request.
pub fn plan_user_certificate(
    request: &wire::IssueKubernetesUserRequest,
) -> Result<(CertificateSubject, Duration), KubernetesError> {
    let refused = |why: String| Err(KubernetesError::InvalidUser(why));
    if !is_owner_name(&request.name) {
        let shown: String = request.name.chars().take(100).collect();
        return refused(format!(
            "{shown:?} names no user: a name has 1 to 63 letters, digits, dots, dashes and underscores, and is no node id"
        ));
    }
    let organisation = match request.access() {
        Access::Owner => "shepherd:owners",
        Access::Viewer => "shepherd:viewers",
        Access::Unspecified => {
            return refused(format!("it does not say which access {} gets: owner or viewer", request.name));
        }
    };
    let lifetime = Duration::from_millis(request.lifetime_ms);
    if lifetime.is_zero() {
        return refused("it would expire at once; give the time for which it is valid".to_owned());
    }
    if lifetime > LONGEST_LIFETIME.0 {
        let days = LONGEST_LIFETIME.0.as_secs() / 86_400;
        return refused(format!(
            "a user's certificate is good for {days} days at the most: API servers know none that are revoked"
        ));
    }
    let subject = CertificateSubject {
        organisation: organisation.to_owned(),
        name: request.name.clone(),
        client_auth: true,
        ..CertificateSubject::default()
    };
    Ok((subject, lifetime))
}

#[cfg(test)]
mod tests {
    use curator_client::testing::node_id;
    use tonic::Code;

    use super::*;

    fn user_request(name: &str, access: Access, lifetime_ms: u64) -> wire::IssueKubernetesUserRequest {
        wire::IssueKubernetesUserRequest {
            public_key: Vec::new(),
            name: name.to_owned(),
            access: access.into(),
            lifetime_ms,
        }
    }

    #[test]
    fn group_determines_access() {
        for (access, group) in [(Access::Owner, "shepherd:owners"), (Access::Viewer, "shepherd:viewers")] {
            let (subject, lifetime) = plan_user_certificate(&user_request("kim", access, 1500)).unwrap();
            assert_eq!((subject.organisation.as_str(), subject.name.as_str()), (group, "kim"));
            assert!(subject.client_auth && !subject.server_auth && subject.dns.is_empty());
            assert_eq!(lifetime, Duration::from_millis(1500));
        }
    }

    #[test]
    fn invalid_user_is_rejected() {
        let week = 7 * 24 * 3_600_000;
        assert!(plan_user_certificate(&user_request("kim", Access::Owner, week)).is_ok());
        for (wrong, text) in [
            (user_request("", Access::Owner, 1), "names no user"),
            (user_request("system:admin", Access::Owner, 1), "names no user"),
            (user_request("kim@example", Access::Owner, 1), "names no user"),
            (user_request(&"k".repeat(64), Access::Owner, 1), "names no user"),
            (user_request(&node_id(1).to_string(), Access::Owner, 1), "names no user"),
            (user_request("kim", Access::Unspecified, 1), "does not say which access kim gets"),
            (user_request("kim", Access::Viewer, 0), "expire at once"),
            (user_request("kim", Access::Viewer, week + 1), "7 days at the most"),
            (user_request("kim", Access::Viewer, u64::MAX), "7 days at the most"),
        ] {
            let refusal = plan_user_certificate(&wrong).unwrap_err();
            assert_eq!(refusal.code(), Code::InvalidArgument);
            assert!(refusal.to_string().contains(text), "{text}: {refusal}");
        }
    }
}
