//! What certificates of people for a cluster share: the holder's name, and how long a command waits for a signature.

use std::time::Duration;

use crate::order::operator::current_user;

/// Longest wait for the curators' signature. The holder of the cluster's lease polls every fifteen seconds.
pub(super) const SIGNING_TIMEOUT: Duration = Duration::from_mins(2);
/// Interval between two polls for the signature.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The default holder name: the user who runs this command, in the form that curators accept.
pub(super) fn default_holder() -> String {
    let who = current_user();
    let name = who.split('@').next().unwrap_or_default();
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    name.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(63).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::cluster::credential::check_holder;

    #[test]
    fn default_holder_is_a_valid_holder() {
        assert_eq!(check_holder(&default_holder()), Ok(()));
    }
}
