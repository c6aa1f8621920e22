//! Certificate rotation: announce a new CA before its certificate is served.
//!
//! So no agent is lost when another party renews the certificate.
//!
//! An agent trusts the CA certificates that it has received, and receives others only over a connection that it
//! trusts. A renewed certificate may not chain to any of them (a self-signed pair is its own CA). Then the new CA is
//! announced first, beside the old one, while the old certificate is still served. The next check, an hour later,
//! serves the new certificate: an hour is the longest interval between heartbeats. The check after that removes the
//! old CA.
//!
//! A certificate that expires before the next check leaves no time for this. The new one is served at once, and agents
//! that are not connected then are found by the recovery that follows their silence.

/// The certificate in the files, the served one, and the announced CAs; certificates are DER.
#[derive(Clone, Debug)]
pub struct CertificateRotationInput<'a> {
    /// The certificate in the file.
    pub candidate: &'a [u8],
    /// The CA certificates that agents should verify it with; empty: their own trust stores.
    pub ca_certificates: &'a [Vec<u8>],
    /// The certificate that is served.
    pub served: &'a [u8],
    /// The CA certificates that are announced to agents.
    pub announced: &'a [Vec<u8>],
    /// Whether the served certificate expires before the next check.
    pub expires_soon: bool,
}

/// The next step of a rotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateRotationStep {
    /// Whether to serve the certificate in the file.
    pub serve_candidate: bool,
    /// CA certificates to announce; `None` if they do not change.
    pub announce: Option<Vec<Vec<u8>>>,
}

/// Plans the step after a check. `None` if the files require agents to use their own trust stores while CAs are
/// announced, because an agent with CAs cannot be switched back.
#[must_use]
pub fn plan_rotation(input: &CertificateRotationInput<'_>) -> Option<CertificateRotationStep> {
    let CertificateRotationInput { candidate, ca_certificates, served, announced, expires_soon } = input;
    let renewed = candidate != served;
    if renewed && ca_certificates.is_empty() && !announced.is_empty() {
        return None;
    }
    let new_ca = ca_certificates.iter().any(|ca| !announced.contains(ca));
    let mut announce = ca_certificates.to_vec();
    if new_ca || renewed {
        announce.extend(announced.iter().filter(|ca| !ca_certificates.contains(ca)).cloned());
    }
    let announce = (announce.as_slice() != *announced).then_some(announce);
    Some(CertificateRotationStep { serve_candidate: renewed && (!new_ca || *expires_soon), announce })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|name| name.as_bytes().to_vec()).collect()
    }

    fn decide(
        found: &str,
        authorities: &[&str],
        shown: &str,
        messages: &[&str],
        ends_soon: bool,
    ) -> Option<CertificateRotationStep> {
        plan_rotation(&CertificateRotationInput {
            candidate: found.as_bytes(),
            ca_certificates: &list(authorities),
            served: shown.as_bytes(),
            announced: &list(messages),
            expires_soon: ends_soon,
        })
    }

    #[test]
    fn new_ca_is_announced_before_its_certificate_is_served() {
        let nothing = CertificateRotationStep { serve_candidate: false, announce: None };
        let tell =
            |names: &[&str]| CertificateRotationStep { serve_candidate: false, announce: Some(list(names)) };
        for (name, (found, authorities, shown, messages, ends_soon), expected) in [
            ("as it was", ("a", &["a"][..], "a", &["a"][..], false), nothing.clone()),
            ("self-signed, first look", ("b", &["b"], "a", &["a"], false), tell(&["b", "a"])),
            (
                "second look",
                ("b", &["b"], "a", &["b", "a"], false),
                CertificateRotationStep { serve_candidate: true, announce: None },
            ),
            ("third look", ("b", &["b"], "b", &["b", "a"], false), tell(&["b"])),
            ("fourth look", ("b", &["b"], "b", &["b"], false), nothing.clone()),
            (
                "replaced again before it was shown",
                ("c", &["c"], "a", &["b", "a"], false),
                tell(&["c", "b", "a"]),
            ),
            ("taken back before it was shown", ("a", &["a"], "a", &["b", "a"], false), tell(&["a"])),
            (
                "almost over",
                ("b", &["b"], "a", &["a"], true),
                CertificateRotationStep { serve_candidate: true, announce: Some(list(&["b", "a"])) },
            ),
            (
                "of the same authority",
                ("b", &["r"], "a", &["r"], false),
                CertificateRotationStep { serve_candidate: true, announce: None },
            ),
            ("authority alone, announced ahead", ("a", &["r", "s"], "a", &["r"], false), tell(&["r", "s"])),
            (
                "of the one announced ahead",
                ("b", &["r", "s"], "a", &["r", "s"], false),
                CertificateRotationStep { serve_candidate: true, announce: None },
            ),
            ("authority withdrawn", ("b", &["s"], "b", &["r", "s"], false), tell(&["s"])),
            (
                "machines' own stores",
                ("b", &[], "a", &[], false),
                CertificateRotationStep { serve_candidate: true, announce: None },
            ),
            ("from the machines' own stores", ("b", &["b"], "a", &[], false), tell(&["b"])),
        ] {
            assert_eq!(decide(found, authorities, shown, messages, ends_soon), Some(expected), "{name}");
        }
    }

    #[test]
    fn agents_with_announced_cas_keep_them() {
        assert_eq!(decide("b", &[], "a", &["a"], false), None);
        assert_eq!(decide("b", &[], "a", &["a"], true), None);
    }
}
