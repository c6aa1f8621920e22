//! Why something that listens could not be started: sentences for the person who started it.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::bmdb::error::BmdbError;
use crate::bmdb::secret::SecretError;

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {}; give another address with {flag}", listen_reason(source))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The flag that named it.
        flag: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A certificate or key file cannot be read.
    #[error("cannot read {} (given with {flag}): {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The flag that named it.
        flag: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something else than it should.
    #[error("{} (given with {flag}) holds no {what}: it must be a PEM file with a block {block}", path.display())]
    NotPem {
        /// The file.
        path: PathBuf,
        /// The flag that named it.
        flag: &'static str,
        /// `certificate` or `private key`.
        what: &'static str,
        /// The line that begins such a block.
        block: &'static str,
    },
    /// The certificate and the key cannot be used together.
    #[error("the certificate {} and the key {} cannot be used together: {reason}; give a certificate and its own key with --agent_tls_certificate_path and --agent_tls_key_path", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What TLS said.
        reason: String,
    },
    /// A renewed certificate that agents could not be told how to verify.
    #[error("{} is renewed by an authority of machines' own trust stores, and agents were given another one; give its certificate, and the one before, with --agent_endpoint_ca_certificate_path", certificate.display())]
    NoAuthority {
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// An endpoint that agents should be told is none.
    #[error("{0:?} is no endpoint that agents could reach; write HOST:PORT with --agent_endpoint")]
    Endpoint(String),
    /// The shared CA or a certificate from it cannot be made or read.
    #[error("cannot make the callback server's certificate: {0}")]
    Authority(String),
    /// The TLS library refused our settings.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The contracts that this program was built with are none.
    #[error(
        "cannot read the contracts that this program was built with: {0}; it is damaged, install it anew"
    )]
    Contracts(String),
    /// The sealed CA cannot be had.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The database failed.
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
}

fn listen_reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "another program listens there already".to_owned(),
        std::io::ErrorKind::AddrNotAvailable => "this host has no such address".to_owned(),
        std::io::ErrorKind::PermissionDenied => "this user may not listen there".to_owned(),
        _ => error.to_string(),
    }
}
