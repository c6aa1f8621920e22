//! Refused certificates of curators, among the causes of an error.
//!
//! The reason of a refusal is a sentence for people. It passes through several layers of errors, and rustls shows an error
//! that it does not know by `Debug`. So the connection turns it into a type of its own, which is found again.

use std::error::Error;
use std::io;

use rustls::CertificateError;

/// The handshake with a curator ended because its certificate was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("connecting to the curator {address}: {reason}")]
pub struct CuratorRefused {
    /// `host:port` of the curator.
    pub address: String,
    /// Why its certificate was not accepted.
    pub reason: String,
}

/// Finds a refused certificate among the causes of an error.
#[must_use]
pub fn find_refusal<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e CuratorRefused> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let refused = inner.and_then(|inner| inner.downcast_ref::<CuratorRefused>());
        if refused.is_some() {
            return refused;
        }
        cause = error.source();
    }
    None
}

/// The error of a connection that could not be made.
pub(super) fn connection_error(address: &str, error: &io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if let Some(rustls::Error::InvalidCertificate(CertificateError::Other(reason))) = tls {
        let refused = CuratorRefused { address: address.to_owned(), reason: reason.0.to_string() };
        return io::Error::new(error.kind(), refused);
    }
    io::Error::new(error.kind(), format!("connecting to the curator {address}: {error}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tonic::Status;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the handshake failed")]
    struct HandshakeError(#[source] io::Error);

    #[test]
    fn refused_certificate_is_found_among_the_causes() {
        let other = rustls::OtherError(Arc::new(io::Error::other("it is no curator")));
        let tls = rustls::Error::InvalidCertificate(CertificateError::Other(other));
        let tls = io::Error::new(io::ErrorKind::InvalidData, tls);
        let error = connection_error("10.0.0.1:7835", &tls);
        assert_eq!(error.to_string(), "connecting to the curator 10.0.0.1:7835: it is no curator");
        let status = Status::from_error(Box::new(HandshakeError(error)));
        let refused = find_refusal(&status).map(ToString::to_string);
        assert_eq!(refused.as_deref(), Some("connecting to the curator 10.0.0.1:7835: it is no curator"));
        let lost = connection_error("10.0.0.1:7835", &io::Error::other("connection reset"));
        assert_eq!(lost.to_string(), "connecting to the curator 10.0.0.1:7835: connection reset");
        assert_eq!(find_refusal(&Status::from_error(Box::new(lost))), None);
    }
}
