//! What all records in etcd have in common: a format, and how one that cannot be read is told.
//!
//! Two releases of the role server run beside each other during every update, and either may lead. Protobuf
//! lets an older one read a newer record, without the fields it does not know; it would then write it back
//! without them. So a record says what a program must understand to read it, and one that understands less
//! refuses the record instead of losing a part of it.
//!
//! An unreadable record is an error that names its key. Nothing is skipped: what is skipped when it is read
//! is gone when it is written.

use prost::Message;

use crate::model::time::Timestamp;

/// What this program understands. It grows whenever a field is added that must not be lost.
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

/// A moment in a record, which must have been said; the error is a part of a sentence.
pub fn moment(field: &str, milliseconds: i64) -> Result<Timestamp, String> {
    match Timestamp::from_timestamp_millis(milliseconds) {
        Some(at) if milliseconds > 0 => Ok(at),
        _ => Err(format!("{field} is {milliseconds}, and milliseconds since 1970 are wanted")),
    }
}

/// Why a record is not written: it would break what every reader relies on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the record of {whose} was not written, because {fault}; this is a fault of the program, please report it"
)]
pub struct BrokenRecord {
    /// What the record is about.
    pub whose: String,
    /// What is wrong with it, as a part of a sentence.
    pub fault: String,
}

/// Decodes the protobuf message of a record; `format` tells its format, of which 0 is none.
pub fn decode<M: Message + Default>(
    key: &str,
    bytes: &[u8],
    format: impl FnOnce(&M) -> u32,
) -> Result<M, RecordError> {
    let message = M::decode(bytes).map_err(|error| RecordError::new(key, error.to_string()))?;
    match format(&message) {
        // A zero is what a message of another kind, or an empty value, decodes to.
        0 => Err(RecordError::new(key, "it says no format, so it is no record of ours")),
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
    use super::*;
    use crate::proto::curator::v1::TicketRecord;

    fn read(format: u32) -> Result<TicketRecord, RecordError> {
        let bytes = TicketRecord { format, ..Default::default() }.encode_to_vec();
        decode("/a/b", &bytes, |record: &TicketRecord| record.format)
    }

    #[test]
    fn record_of_a_newer_release_is_refused_and_not_cut_short() {
        assert!(read(FORMAT).is_ok());
        let error = read(FORMAT + 1).unwrap_err().to_string();
        assert!(error.contains("/a/b") && error.contains("update the role server"), "{error}");
    }

    #[test]
    fn what_is_no_record_is_refused_by_its_key() {
        assert!(read(0).unwrap_err().to_string().contains("/a/b"));
        let error = decode("/a/b", &[0xff; 9], |record: &TicketRecord| record.format).unwrap_err();
        assert_eq!(error.key, "/a/b");
    }
}
