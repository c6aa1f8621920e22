//! The record of the newest statement of the cluster's authority.
//!
//! There is one record, and the leader writes it. It contains the statement exactly as it was signed, so its bytes are
//! never made again. Every curator serves it from its own etcd. A snapshot has it like any other record: a restored
//! cluster begins with the statement of its former epoch, and its first leader signs the next one.

use etcd::key_space::{GLOBAL, KeyError};
use etcd::record::{self, RecordError};
use prost::Message as _;
use proto::curator::v1 as wire;

/// The etcd key of the statement's record.
pub fn statement_record_key() -> Result<String, KeyError> {
    GLOBAL.key("statement")
}

/// Encodes the record of a statement for etcd.
#[must_use]
pub fn encode_statement(statement: &wire::SignedStatement) -> Vec<u8> {
    wire::StatementRecord { format: record::FORMAT, statement: Some(statement.clone()) }.encode_to_vec()
}

/// Decodes the statement that is stored under `key`. Its signature is not verified.
pub fn decode_statement(key: &str, bytes: &[u8]) -> Result<wire::SignedStatement, RecordError> {
    let record = record::decode(key, bytes, |record: &wire::StatementRecord| record.format)?;
    record.statement.ok_or_else(|| RecordError::new(key, "it has no statement"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_reads_back_byte_for_byte() {
        let signed = wire::SignedStatement {
            statement: vec![1, 2, 3],
            signature: vec![4; 64],
            successors: vec![vec![5], vec![6]],
        };
        let key = statement_record_key().unwrap();
        assert_eq!(key, "/shepherd/curator/global/statement");
        assert_eq!(decode_statement(&key, &encode_statement(&signed)).unwrap(), signed);
        let empty = wire::StatementRecord { format: record::FORMAT, statement: None }.encode_to_vec();
        let error = decode_statement(&key, &empty).unwrap_err().to_string();
        assert!(error.contains("global/statement") && error.contains("has no statement"), "{error}");
        assert!(decode_statement(&key, &[]).is_err(), "an empty value is no record");
    }
}
