//! Record format versions and decoding errors.
//!
//! Two releases of the role server run beside each other during every update, and either may lead. Protobuf lets an
//! older one read a newer record, without the fields it does not know; it would then write the record back without
//! them. So a record states the format that a program must understand to read it, and an older program rejects the
//! record instead of losing a part of it.
//!
//! An unreadable record is an error that names its key. No record is skipped: a record that is skipped on reading is
//! gone after writing.

use prost::Message;

/// The newest format that this program understands. It grows whenever a field is added that must not be lost.
pub const FORMAT: u32 = 1;

/// A record that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the record {key} of the cluster cannot be read: {fault}. Nothing was changed")]
pub struct RecordError {
    /// Its key in etcd.
    pub key: String,
    /// What is wrong with it, as a part of a sentence.
    pub fault: String,
}

impl RecordError {
    /// A record of this key, and what is wrong with it, as a part of a sentence.
    pub fn new(key: &str, fault: impl Into<String>) -> Self {
        Self { key: key.to_owned(), fault: fault.into() }
    }
}

/// A record that is not written, because it would break what every reader relies on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the record of {subject} was not written, because {fault}; this is a fault of the program, please report it"
)]
pub struct InvalidRecord {
    /// What the record is about.
    pub subject: String,
    /// What is wrong with it, as a part of a sentence.
    pub fault: String,
}

/// Decodes the protobuf message of a record. `format` returns its format; 0 means that it has none.
pub fn decode<M: Message + Default>(
    key: &str,
    bytes: &[u8],
    format: impl FnOnce(&M) -> u32,
) -> Result<M, RecordError> {
    let message = M::decode(bytes).map_err(|error| RecordError::new(key, error.to_string()))?;
    match format(&message) {
        // A message of another kind, or an empty value, decodes to zero.
        0 => Err(RecordError::new(key, "it has no format number, so it is not a record of ours")),
        known if known <= FORMAT => Ok(message),
        newer => Err(RecordError::new(
            key,
            format!(
                "it has format {newer} and this release understands {FORMAT}: update the role server of this node"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use proto::curator::v1::TicketRecord;

    use super::*;

    fn read(format: u32) -> Result<TicketRecord, RecordError> {
        let bytes = TicketRecord { format, ..Default::default() }.encode_to_vec();
        decode("/a/b", &bytes, |record: &TicketRecord| record.format)
    }

    #[test]
    fn record_of_a_newer_format_is_rejected() {
        assert!(read(FORMAT).is_ok());
        let error = read(FORMAT + 1).unwrap_err().to_string();
        assert!(error.contains("/a/b") && error.contains("update the role server"), "{error}");
    }

    #[test]
    fn invalid_record_error_names_its_key() {
        assert!(read(0).unwrap_err().to_string().contains("/a/b"));
        let error = decode("/a/b", &[0xff; 9], |record: &TicketRecord| record.format).unwrap_err();
        assert_eq!(error.key, "/a/b");
    }
}
