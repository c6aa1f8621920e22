//! Alerts with which clients reject the certificate of a listener.
//!
//! A client that rejects the certificate sends an alert of TLS and closes the connection. An agent cannot report then, so
//! it becomes silent, although its machine is well; an operator gets no answer. The last such alert is published in the
//! session of the listener, where `shepherdctl issues` finds it. Nobody has proven a key at that moment: a stranger can
//! send such an alert, too. So it is shown, and nothing decides by it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use rustls::AlertDescription;
use transport::accept::HandshakeError;

/// The label for an alert that rejects a certificate; `None` for one about something else. The labels are fixed, so
/// that a peer cannot create any.
#[must_use]
pub const fn rejection_label(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::UnknownCA => "alert_unknown_ca",
        AlertDescription::CertificateExpired => "alert_certificate_expired",
        AlertDescription::BadCertificate => "alert_bad_certificate",
        AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => "alert_certificate_unknown",
        _ => return None,
    })
}

/// The label of the alert by which a handshake failed; `None` if it failed for another reason.
pub(crate) fn find_rejection(error: &HandshakeError) -> Option<&'static str> {
    let HandshakeError::Failed(error) = error else { return None };
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::AlertReceived(alert)) => rejection_label(*alert),
        _ => None,
    }
}

/// Rejections within this time after another one are not logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The last rejection by a client; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct CertificateRejections(Arc<Mutex<Option<(SystemTime, &'static str)>>>);

impl CertificateRejections {
    /// Records a rejection at this moment. Returns whether it should be logged: strangers must not fill the log.
    pub(crate) fn record(&self, label: &'static str) -> bool {
        let now = SystemTime::now();
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace((now, label));
        before.is_none_or(|(at, _)| now.duration_since(at).is_ok_and(|since| since >= LOG_INTERVAL))
    }

    /// The time of the last one as RFC 3339; `None` if there was none.
    pub(crate) fn time_text(&self) -> Option<String> {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(|(at, _)| DateTime::<Utc>::from(at).to_rfc3339())
    }

    /// The label of the last one; `None` if there was none.
    pub(crate) fn label(&self) -> Option<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|(_, label)| label)
    }
}

#[cfg(test)]
mod tests {
    use rustls::CertificateError;

    use super::*;

    #[test]
    fn alert_of_each_rejection_has_a_label() {
        for (problem, expected) in [
            (CertificateError::UnknownIssuer, "alert_unknown_ca"),
            (CertificateError::Expired, "alert_certificate_expired"),
            (CertificateError::NotValidYet, "alert_certificate_expired"),
            (CertificateError::NotValidForName, "alert_bad_certificate"),
            (CertificateError::InvalidPurpose, "alert_certificate_unknown"),
            (CertificateError::BadSignature, "alert_certificate_unknown"),
        ] {
            let text = format!("{problem:?}");
            assert_eq!(rejection_label(AlertDescription::from(problem)), Some(expected), "{text}");
        }
        assert_eq!(rejection_label(AlertDescription::InternalError), None);
        assert_eq!(rejection_label(AlertDescription::CloseNotify), None);
    }

    #[test]
    fn last_rejection_is_published() {
        let rejections = CertificateRejections::default();
        assert_eq!((rejections.time_text(), rejections.label()), (None, None));
        assert!(rejections.record("alert_unknown_ca"));
        assert!(!rejections.record("alert_bad_certificate"), "it follows too soon to be logged");
        assert!(rejections.time_text().is_some());
        assert_eq!(rejections.label(), Some("alert_bad_certificate"));
    }
}
