//! PEM encoding of certificates and keys that people get.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Encodes DER as PEM with this label.
#[must_use]
pub(crate) fn encode_pem(label: &str, der: &[u8]) -> String {
    let encoded = STANDARD.encode(der);
    let lines: Vec<&str> =
        encoded.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    #[test]
    fn encoded_pem_is_parsed_by_a_library() {
        for der in [vec![], vec![7; 48], vec![7; 49], (0..=255).collect::<Vec<u8>>()] {
            let written = encode_pem("CERTIFICATE", &der);
            assert!(written.lines().all(|line| line.len() <= 64), "{written}");
            let read = CertificateDer::from_pem_slice(written.as_bytes()).unwrap();
            assert_eq!(read.as_ref(), der);
        }
    }
}
