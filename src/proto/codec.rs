//! Protobuf for gRPC, refusing a message that would grow out of proportion.
//!
//! Two bytes name an empty message inside another one, and in memory that is a
//! structure of a hundred bytes or two: what fits into the limit on a message's
//! size could be made into two hundred megabytes, by anyone who reaches the port.
//! So the fields of a message, and of the messages directly in it, are counted
//! where they stand before anything is made of them.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::{Buf as _, Bytes};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

/// Most fields of a message with those of the messages directly in it. A report of a server with a
/// thousand disks has some two thousand.
pub const MOST_FIELDS: usize = 10_000;

/// Encodes as [`tonic_prost::ProstCodec`] does, and decodes what [`decode`] does.
#[derive(Clone, Debug)]
pub struct BoundedCodec<T, U> {
    messages: PhantomData<(T, U)>,
}

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self { messages: PhantomData }
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder { message: PhantomData }
    }
}

/// Decodes messages of one type.
#[derive(Debug)]
pub struct BoundedDecoder<U> {
    message: PhantomData<U>,
}

impl<U: Message + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        decode(bytes).map(Some).map_err(Status::invalid_argument)
    }
}

/// Decodes one message; the error is a sentence.
pub fn decode<U: Message + Default>(bytes: Bytes) -> Result<U, String> {
    if fields(&bytes, true) > MOST_FIELDS {
        return Err(format!("the message has more than {MOST_FIELDS} fields"));
    }
    U::decode(bytes).map_err(|error| format!("the message cannot be decoded: {error}"))
}

/// How many fields there are up to the end or to the first that is none, counted no further than to
/// too many.
fn fields(mut bytes: &[u8], look_inside: bool) -> usize {
    let mut count = 0;
    while count <= MOST_FIELDS {
        let Some(inside) = next_field(&mut bytes) else { break };
        count += 1;
        if look_inside {
            count += fields(inside, false);
        }
    }
    count
}

/// Takes one field off the front; what is inside of one with a length, nothing for others.
fn next_field<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let key = varint(bytes)?;
    let length = match key & 7 {
        0 => varint(bytes).map(|_| 0)?,
        1 => 8,
        2 => usize::try_from(varint(bytes)?).ok()?,
        5 => 4,
        // Groups, which no message here has, and what is no kind of field.
        _ => return None,
    };
    let (inside, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(if key & 7 == 2 { inside } else { &[] })
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let length = bytes.iter().take(10).position(|byte| byte & 0x80 == 0)? + 1;
    let (number, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(number.iter().rev().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::agent::v1::HeartbeatRequest;
    use crate::proto::hardware::v1::{BlockDevice, HardwareReport};

    fn heartbeat(disks: usize, warning: &str) -> Bytes {
        let report = HardwareReport {
            block_devices: vec![BlockDevice::default(); disks],
            warnings: vec![warning.to_owned()],
            ..HardwareReport::default()
        };
        let request = HeartbeatRequest { hardware_report: Some(report), seq: 300, ..Default::default() };
        Bytes::from(request.encode_to_vec())
    }

    #[test]
    fn fields_are_counted_one_message_deep() {
        // seq, the report, its disks, its warning; what the warning says does not matter.
        assert_eq!(fields(&heartbeat(5, &"\n\0".repeat(100)), true), 8);
        assert_eq!(fields(b"", true), 0);
        assert_eq!(fields(b"\x08", true), 0, "cut");
        assert_eq!(fields(b"\x0a\x05ab", true), 0, "longer than there is");
    }

    #[test]
    fn message_of_very_many_empty_things_is_refused_before_they_are_made() {
        let whole: HeartbeatRequest = decode(heartbeat(9000, "w")).unwrap();
        assert_eq!(whole.hardware_report.unwrap().block_devices.len(), 9000);
        let refused = decode::<HeartbeatRequest>(heartbeat(500_000, "w")).unwrap_err();
        assert_eq!(refused, "the message has more than 10000 fields");
    }

    #[test]
    fn what_is_no_message_is_said_so() {
        let refused = decode::<HeartbeatRequest>(Bytes::from_static(b"GET / HTTP/1.1")).unwrap_err();
        assert!(refused.starts_with("the message cannot be decoded: "), "{refused}");
    }
}
