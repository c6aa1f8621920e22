//! Replacing a certificate that somebody else renews, without losing an agent.
//!
//! An agent believes the authorities it was told, and hears of others only over a
//! connection that it believes. So where a renewed certificate does not chain to
//! what agents were told (a self-signed pair is its own authority), the new
//! authority is told first, beside the old one, while the old certificate is
//! still shown. The next look, an hour later, shows the new certificate: that is
//! as long as the longest interval between heartbeats. The look after it forgets
//! the old authority.
//!
//! A certificate that would be over before the next look leaves no time for this:
//! the new one is shown at once, and agents that are not connected at that moment
//! are found by the recovery that follows their silence.

/// What was found in the files, what is shown and what is told; certificates are DER.
#[derive(Clone, Debug)]
pub struct Look<'a> {
    /// The certificate in the file.
    pub found: &'a [u8],
    /// What agents should verify it against; empty: their own trust stores.
    pub authorities: &'a [Vec<u8>],
    /// The certificate that is shown.
    pub shown: &'a [u8],
    /// What agents are told now.
    pub told: &'a [Vec<u8>],
    /// Whether the certificate that is shown is over before the next look.
    pub ends_soon: bool,
}

/// What to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Show the certificate in the file.
    pub show: bool,
    /// Tell agents this, if it is another thing than now.
    pub tell: Option<Vec<Vec<u8>>>,
}

/// Decides what a look leads to. `None` when the files can only be used by agents that are told to
/// use their own trust stores, which an agent that has been given authorities cannot be told.
#[must_use]
pub fn step(look: &Look<'_>) -> Option<Step> {
    let Look { found, authorities, shown, told, ends_soon } = look;
    let another = found != shown;
    if another && authorities.is_empty() && !told.is_empty() {
        return None;
    }
    let news = authorities.iter().any(|authority| !told.contains(authority));
    let mut tell = authorities.to_vec();
    if news || another {
        tell.extend(told.iter().filter(|authority| !authorities.contains(authority)).cloned());
    }
    let tell = (tell.as_slice() != *told).then_some(tell);
    Some(Step { show: another && (!news || *ends_soon), tell })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|name| name.as_bytes().to_vec()).collect()
    }

    fn decided(
        found: &str,
        authorities: &[&str],
        shown: &str,
        told: &[&str],
        ends_soon: bool,
    ) -> Option<Step> {
        step(&Look {
            found: found.as_bytes(),
            authorities: &list(authorities),
            shown: shown.as_bytes(),
            told: &list(told),
            ends_soon,
        })
    }

    #[test]
    fn new_authority_is_told_before_its_certificate_is_shown_and_the_old_one_forgotten_after() {
        let nothing = Step { show: false, tell: None };
        let tell = |names: &[&str]| Step { show: false, tell: Some(list(names)) };
        for (name, (found, authorities, shown, told, ends_soon), expected) in [
            ("as it was", ("a", &["a"][..], "a", &["a"][..], false), nothing.clone()),
            ("self-signed, first look", ("b", &["b"], "a", &["a"], false), tell(&["b", "a"])),
            ("second look", ("b", &["b"], "a", &["b", "a"], false), Step { show: true, tell: None }),
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
                Step { show: true, tell: Some(list(&["b", "a"])) },
            ),
            ("of the same authority", ("b", &["r"], "a", &["r"], false), Step { show: true, tell: None }),
            ("authority alone, told ahead", ("a", &["r", "s"], "a", &["r"], false), tell(&["r", "s"])),
            (
                "of the one told ahead",
                ("b", &["r", "s"], "a", &["r", "s"], false),
                Step { show: true, tell: None },
            ),
            ("authority withdrawn", ("b", &["s"], "b", &["r", "s"], false), tell(&["s"])),
            ("machines' own stores", ("b", &[], "a", &[], false), Step { show: true, tell: None }),
            ("from the machines' own stores", ("b", &["b"], "a", &[], false), tell(&["b"])),
        ] {
            assert_eq!(decided(found, authorities, shown, told, ends_soon), Some(expected), "{name}");
        }
    }

    #[test]
    fn agents_that_have_authorities_cannot_be_sent_back_to_their_own_stores() {
        assert_eq!(decided("b", &[], "a", &["a"], false), None);
        assert_eq!(decided("b", &[], "a", &["a"], true), None);
    }
}
