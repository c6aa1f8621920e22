//! What certificates of people for a cluster share: the holder's name, the request, and the wait for the signature.
//!
//! Where two people are needed, a request is repeated after another admin has approved it. It must be the very same, so
//! its key is in a file until then.

use std::path::Path;
use std::time::Duration;

use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject as _;
use secrecy::SecretSlice;
use tokio::time::{Instant, sleep};

use crate::error::CliError;
use crate::order::operator::current_user;
use crate::output::print_stderr;
use bmdb::cluster::lock::order_target;
use model::cluster::certificate_request::check_holder;
use proto::fleet::v1;

/// Longest wait for the curators' signature. The holder of the cluster's lease polls every fifteen seconds.
pub(super) const SIGNING_TIMEOUT: Duration = Duration::from_mins(2);
/// Interval between two polls for the signature.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A request for a certificate, as the API returns it.
pub(super) trait RequestedCertificate {
    /// The public key, in hexadecimal digits.
    fn public_key(&self) -> &str;
    /// The state, as the API names it.
    fn state(&self) -> &str;
    /// The certificate, in hexadecimal digits; `None` until signed.
    fn certificate(&self) -> Option<&str>;
    /// Why the curators rejected the request, if they did.
    fn rejection(&self) -> Option<&str>;
    /// The certificate as errors name it.
    fn label(&self) -> String;
}

impl RequestedCertificate for v1::ClusterCredential {
    fn public_key(&self) -> &str {
        &self.public_key
    }

    fn state(&self) -> &str {
        &self.state
    }

    fn certificate(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    fn rejection(&self) -> Option<&str> {
        self.rejection.as_deref()
    }

    fn label(&self) -> String {
        format!("the requested certificate {}", self.id)
    }
}

impl RequestedCertificate for v1::ClusterKubernetesUser {
    fn public_key(&self) -> &str {
        &self.public_key
    }

    fn state(&self) -> &str {
        &self.state
    }

    fn certificate(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    fn rejection(&self) -> Option<&str> {
        self.rejection.as_deref()
    }

    fn label(&self) -> String {
        "the requested certificate".to_owned()
    }
}

/// What to do after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitStep {
    /// The certificate is signed.
    Finish,
    /// The curators may still sign it: ask them again after the poll interval.
    Poll,
    /// The curators did not sign it in time. They may still do so.
    GiveUp,
    /// The request ended without a usable certificate.
    Fail,
}

/// Decides what to do after a poll. `signed` is whether the response has the certificate.
fn next_wait_step(state: &str, signed: bool, timed_out: bool) -> WaitStep {
    match state {
        "valid" if signed => WaitStep::Finish,
        "requested" if timed_out => WaitStep::GiveUp,
        "requested" => WaitStep::Poll,
        _ => WaitStep::Fail,
    }
}

/// Waits until the curators have signed the certificate for this public key. Returns the request, and what `list`
/// returned beside the requests. `unsigned` is the error if they do not sign it in time.
pub(super) async fn wait_until_signed<R: RequestedCertificate, X>(
    cluster: &str,
    public_key: &str,
    list: impl AsyncFn() -> Result<(Vec<R>, X), CliError>,
    unsigned: impl FnOnce(&R) -> String,
) -> Result<(R, X), CliError> {
    let end = Instant::now() + SIGNING_TIMEOUT;
    let mut waiting = false;
    loop {
        let (requests, rest) = list().await?;
        let request = requests.into_iter().find(|request| request.public_key() == public_key);
        let Some(request) = request else {
            return Err(CliError::Failed(format!(
                "{} has no record of the requested certificate any more",
                order_target(cluster)
            )));
        };
        match next_wait_step(request.state(), request.certificate().is_some(), Instant::now() >= end) {
            WaitStep::Finish => return Ok((request, rest)),
            WaitStep::Poll => {
                if !waiting {
                    print_stderr(&format!("shepherdctl: waiting for the curators of {cluster} to sign it"));
                    waiting = true;
                }
                sleep(POLL_INTERVAL).await;
            }
            WaitStep::GiveUp => return Err(CliError::Failed(unsigned(&request))),
            WaitStep::Fail => {
                let why = request.rejection().map(|text| format!(": {text}")).unwrap_or_default();
                return Err(CliError::Failed(format!("{} is {}{why}", request.label(), request.state())));
            }
        }
    }
}

/// Decodes a certificate of a response.
pub(super) fn decode_certificate(text: &str) -> Result<Vec<u8>, CliError> {
    hex::decode(text).map_err(|error| CliError::Failed(format!("the certificate cannot be decoded: {error}")))
}

/// Reads the key of a request that is repeated, in PKCS #8.
pub(super) fn read_key_file(path: &Path) -> Result<SecretSlice<u8>, CliError> {
    let key = PrivatePkcs8KeyDer::from_pem_file(path).map_err(|error| invalid_key_file(path, &error))?;
    Ok(SecretSlice::from(key.secret_pkcs8_der().to_vec()))
}

/// The error about a file without a usable key.
pub(super) fn invalid_key_file(path: &Path, error: &dyn std::fmt::Display) -> CliError {
    CliError::Invalid(format!(
        "cannot use the key in {}: {error}. Remove the file, and request a certificate without --idempotency-key",
        path.display()
    ))
}

/// The holder that a flag names or, without one, [`default_holder`].
pub(super) fn resolve_holder(holder: Option<&str>) -> Result<String, CliError> {
    let holder = holder.map_or_else(default_holder, str::to_owned);
    check_holder(&holder).map_err(|reason| CliError::Invalid(format!("--holder: {reason}")))?;
    Ok(holder)
}

/// The default holder name: the user who runs this command, in the form that curators accept.
fn default_holder() -> String {
    let who = current_user();
    let name = who.split('@').next().unwrap_or_default();
    let fits = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_');
    name.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(63).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit_code::ExitCode;

    #[test]
    fn default_holder_is_a_valid_holder() {
        assert_eq!(check_holder(&default_holder()), Ok(()));
    }

    #[test]
    fn wait_ends_with_the_certificate_or_with_the_request() {
        for (state, signed, timed_out, expected) in [
            ("requested", false, false, WaitStep::Poll),
            ("requested", false, true, WaitStep::GiveUp),
            ("valid", true, false, WaitStep::Finish),
            // It came with the last poll.
            ("valid", true, true, WaitStep::Finish),
            ("valid", false, false, WaitStep::Fail),
            ("rejected", false, false, WaitStep::Fail),
            ("timed-out", false, false, WaitStep::Fail),
            ("expired", true, false, WaitStep::Fail),
            ("revoking", true, false, WaitStep::Fail),
            ("revoked", true, false, WaitStep::Fail),
        ] {
            assert_eq!(next_wait_step(state, signed, timed_out), expected, "{state} {signed} {timed_out}");
        }
    }

    #[tokio::test]
    async fn wait_returns_the_certificate_or_why_there_is_none() {
        for (public_key, state, expected) in [
            ("07", "valid", Ok(1)),
            ("07", "rejected", Err("the requested certificate is rejected: no")),
            ("08", "valid", Err("has no record of the requested certificate any more")),
        ] {
            let user = v1::ClusterKubernetesUser {
                public_key: public_key.to_owned(),
                state: state.to_owned(),
                certificate: (state == "valid").then(|| "01".to_owned()),
                rejection: (state == "rejected").then(|| "no".to_owned()),
                ..Default::default()
            };
            let list = async || Ok::<_, CliError>((vec![user.clone()], 1));
            let signed = wait_until_signed("ams", "07", list, |_| String::new()).await;
            match (signed, expected) {
                (Ok((_, rest)), Ok(expected)) => assert_eq!(rest, expected),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}");
                    assert_eq!(error.exit_code(), ExitCode::Failed, "the command was right: {error}");
                }
                (signed, _) => panic!("{state}: {:?}", signed.map(|(user, _)| user.state)),
            }
        }
    }
}
