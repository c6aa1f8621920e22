//! Errors of starting a listener, as sentences for the operator who started it.

use std::net::SocketAddr;
use std::path::PathBuf;

use bmdb::connection::error::BmdbError;
use bmdb::fleet::secret::SecretError;
use model::pem_blocks::PemError;
use trusted_file::private_file::PrivateFileError;
use trusted_file::unchangeable_path::ChangeableError;

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {}; give another address with {flag}", listen_reason(source))]
    Listen {
        /// The address to listen on.
        address: SocketAddr,
        /// The flag that names the address.
        flag: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A certificate file cannot be read.
    #[error("cannot read {} (given with {flag}): {source}", path.display())]
    ReadFile {
        /// The file that cannot be read.
        path: PathBuf,
        /// The flag that names the file.
        flag: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// Other users can change a file by which machines verify this server.
    #[error("{flag} {} cannot be trusted: {error}", path.display())]
    Changeable {
        /// The file that can be changed.
        path: PathBuf,
        /// The flag that names the file.
        flag: &'static str,
        /// Which part of its path can be changed, and what to do.
        error: ChangeableError,
    },
    /// A key file cannot be read, or other users can read or write it.
    #[error(transparent)]
    KeyFile(#[from] PrivateFileError),
    /// A file does not contain the expected PEM block.
    #[error("{} (given with {flag}) holds no {what}: it must be a PEM file with a block {block}", path.display())]
    NotPem {
        /// The file with unexpected content.
        path: PathBuf,
        /// The flag that names the file.
        flag: &'static str,
        /// `certificate` or `private key`.
        what: &'static str,
        /// The first line of the expected block.
        block: &'static str,
    },
    /// A file with a PEM block that cannot be used.
    #[error("{} (given with {flag}) cannot be used: {error}", path.display())]
    UnusablePem {
        /// The file with the block.
        path: PathBuf,
        /// The flag that names the file.
        flag: &'static str,
        /// Which block, and what to do.
        error: PemError,
    },
    /// The certificate and the key do not belong together.
    #[error("the certificate {} and the key {} cannot be used together: {reason}; give a certificate and its own key with --agent_tls_certificate_path and --agent_tls_key_path", certificate.display(), key.display())]
    CertificateKeyMismatch {
        /// Path of the certificate file.
        certificate: PathBuf,
        /// Path of the key file.
        key: PathBuf,
        /// The reason as a sentence.
        reason: String,
    },
    /// A certificate that agents or operators would reject.
    #[error(
        "{} (given with {flag}) would be rejected by the clients of this server for {name}: {reason}",
        certificate.display()
    )]
    RejectedCertificate {
        /// Path of the certificate file.
        certificate: PathBuf,
        /// The flag that names the file.
        flag: &'static str,
        /// The name of the endpoint.
        name: String,
        /// The reason as a part of a sentence.
        reason: String,
    },
    /// A renewed certificate whose CA could not be announced to agents.
    #[error(
        "{} was renewed by an authority that only the machines' own trust stores contain, but agents were given \
         another authority; give the certificates of both with --agent_endpoint_ca_certificate_path",
        certificate.display()
    )]
    UnannouncedCa {
        /// Path of the certificate file.
        certificate: PathBuf,
    },
    /// An invalid endpoint in the settings.
    #[error("{0:?} is no endpoint that agents could reach; write HOST:PORT with --agent_endpoint")]
    Endpoint(String),
    /// The shared CA, or a certificate from it, cannot be created or read.
    #[error("cannot make the callback server's certificate: {0}")]
    CallbackCa(String),
    /// The TLS library rejected the configuration.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The built-in API descriptors are invalid.
    #[error(
        "cannot read the contracts that this program was built with: {0}; it is damaged, install it again"
    )]
    ApiDescriptors(String),
    /// The sealed CA cannot be read or stored.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The BMDB returned an error.
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
