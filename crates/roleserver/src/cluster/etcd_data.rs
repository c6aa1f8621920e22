//! The data directory of etcd: which member it is, from etcd's own files.

use std::io::Read as _;

use prost::Message as _;

use crate::cluster::files::{ClusterFiles, EtcdMembership};

/// Bytes read from the head of etcd's log, enough to contain the member ID.
const WAL_HEAD_BYTES: u64 = 4096;

/// Whether etcd has data in a data directory, and as which member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdDataState {
    /// etcd has never started there: the directory holds nothing of value.
    Empty,
    /// etcd has data there, as the member of this ID.
    Member(u64),
    /// etcd has data there that could not be parsed.
    Unknown,
}

/// Reads from etcd's own files in the data directory of a membership which member it is.
#[must_use]
pub fn inspect_data(files: &ClusterFiles, membership: &EtcdMembership) -> EtcdDataState {
    let log = files.etcd_directory().join(&membership.data).join("member/wal");
    let listed = match std::fs::read_dir(&log) {
        Ok(listed) => listed,
        // etcd creates its log elsewhere and moves it here once it is complete.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return EtcdDataState::Empty,
        Err(_) => return EtcdDataState::Unknown,
    };
    let logs = listed.filter_map(|entry| Some(entry.ok()?.path()));
    let first = logs.filter(|path| path.extension().is_some_and(|extension| extension == "wal")).min();
    let read = first.and_then(|path| {
        let mut bytes = Vec::new();
        std::fs::File::open(path).ok()?.take(WAL_HEAD_BYTES).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    });
    read.and_then(|bytes| member_from_wal(&bytes)).map_or(EtcdDataState::Unknown, EtcdDataState::Member)
}

/// A record of etcd's log (`wal/walpb/record.proto`).
#[derive(Clone, PartialEq, prost::Message)]
struct WalRecord {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(bytes = "vec", tag = "3")]
    data: Vec<u8>,
}

/// The first record that is not a checksum (`etcdserver/etcdserverpb/etcdserver.proto`).
#[derive(Clone, PartialEq, prost::Message)]
struct WalMetadata {
    #[prost(uint64, tag = "1")]
    member: u64,
}

/// Finds the member ID in the head of a log file. Each file begins with a checksum record and then the metadata record.
/// A record follows its length; if the highest bit of the length is set, its highest byte holds the number of padding
/// bytes.
fn member_from_wal(mut bytes: &[u8]) -> Option<u64> {
    const METADATA: i64 = 1;
    for _ in 0..2 {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = u64::from_le_bytes(*length);
        let filled = if length >> 63 == 1 { usize::try_from((length >> 56) & 0x7).ok()? } else { 0 };
        let length = usize::try_from(length & 0x00ff_ffff_ffff_ffff).ok()?;
        let record = WalRecord::decode(rest.get(..length)?).ok()?;
        if record.kind == METADATA {
            return WalMetadata::decode(&*record.data)
                .ok()
                .map(|says| says.member)
                .filter(|member| *member != 0);
        }
        bytes = rest.get(length + filled..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_is_read_from_the_wal_and_never_guessed() {
        let record = |kind, data: Vec<u8>| {
            let mut record = WalRecord { kind, data }.encode_to_vec();
            let (length, filled) = (record.len() as u64, (8 - record.len() % 8) % 8);
            let mark = if filled == 0 { 0 } else { (0x80 | filled as u64) << 56 };
            record.extend(vec![0; filled]);
            [(length | mark).to_le_bytes().to_vec(), record].concat()
        };
        let metadata = record(1, WalMetadata { member: u64::MAX - 3 }.encode_to_vec());
        let log = [record(4, Vec::new()), metadata.clone(), record(2, vec![7; 30])].concat();
        assert_eq!(member_from_wal(&log), Some(u64::MAX - 3));
        assert_eq!(member_from_wal(&log[..30]), None);
        assert_eq!(member_from_wal(&[]), None);
        assert_eq!(member_from_wal(&[0xff; 64]), None);
        assert_eq!(member_from_wal(&[record(4, Vec::new()), record(4, Vec::new()), metadata].concat()), None);
        assert_eq!(member_from_wal(&record(1, Vec::new())), None);
    }
}
