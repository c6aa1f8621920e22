//! gRPC codec that limits the number of fields of a message.
//!
//! An empty message inside another one takes two bytes on the wire, and one or two hundred bytes in memory. So a
//! message within the size limit could become two hundred megabytes, and anyone who reaches the port could send it.
//! Therefore the fields of a message, and of the messages directly in it, are counted before anything is decoded.

use std::marker::PhantomData;

use prost::bytes::{Buf as _, Bytes};
use prost::{Message, Name};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

/// Most fields of a message, with those of the messages directly in it. A hardware report of a server with a thousand
/// disks has about two thousand.
const MAX_FIELDS: usize = 10_000;
/// Most fields of a response. An order for 10,000 machines is answered with six fields for each of them. The limit is
/// higher than that of a request, because a client has authenticated the server whose response it decodes.
const MAX_RESPONSE_FIELDS: usize = 200_000;

/// Encodes as [`tonic_prost::ProstCodec`] does, and decodes with [`decode`].
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
    U: Message + Name + Default + Send + 'static,
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

/// Decodes messages of one type, with the limit on fields.
#[derive(Debug)]
pub struct BoundedDecoder<U> {
    message: PhantomData<U>,
}

impl<U: Message + Name + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        decode(bytes).map(Some).map_err(Status::invalid_argument)
    }
}

/// Decodes one message within the limit on fields. The error is a sentence.
pub fn decode<U: Message + Name + Default>(bytes: Bytes) -> Result<U, String> {
    let limit = if U::NAME.ends_with("Response") { MAX_RESPONSE_FIELDS } else { MAX_FIELDS };
    if count_fields(&bytes, true, limit) > limit {
        return Err(format!("the message has more than {limit} fields"));
    }
    U::decode(bytes).map_err(|error| format!("the message cannot be decoded: {error}"))
}

/// Counts the fields up to the end or the first malformed one, and stops once there are too many.
fn count_fields(mut bytes: &[u8], look_inside: bool, limit: usize) -> usize {
    let mut count = 0;
    while count <= limit {
        let Some(inside) = take_field(&mut bytes) else { break };
        count += 1;
        if look_inside {
            count += count_fields(inside, false, limit);
        }
    }
    count
}

/// Takes one field off the front. Returns the content of a length-delimited field, and an empty slice for any other.
fn take_field<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let key = take_varint(bytes)?;
    let length = match key & 7 {
        0 => take_varint(bytes).map(|_| 0)?,
        1 => 8,
        2 => usize::try_from(take_varint(bytes)?).ok()?,
        5 => 4,
        // Groups, which no message here has, and invalid wire types.
        _ => return None,
    };
    let (inside, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(if key & 7 == 2 { inside } else { &[] })
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let length = bytes.iter().take(10).position(|byte| byte & 0x80 == 0)? + 1;
    let (number, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(number.iter().rev().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f)))
}

#[cfg(feature = "fleet")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::v1::HeartbeatRequest;
    use crate::fleet::v1::{MachineName, MachineOrderOutcome, SubmitBulkOrderResponse};
    use crate::hardware::v1::{BlockDevice, HardwareReport};

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
        // The fields are seq, the report, its disks and its warning. The content of the warning is not counted.
        assert_eq!(count_fields(&heartbeat(5, &"\n\0".repeat(100)), true, MAX_FIELDS), 8);
        assert_eq!(count_fields(b"", true, MAX_FIELDS), 0);
        assert_eq!(count_fields(b"\x08", true, MAX_FIELDS), 0, "cut");
        assert_eq!(count_fields(b"\x0a\x05ab", true, MAX_FIELDS), 0, "longer than there is");
    }

    #[test]
    fn message_with_too_many_fields_is_rejected_before_decoding() {
        let whole: HeartbeatRequest = decode(heartbeat(9000, "w")).unwrap();
        assert_eq!(whole.hardware_report.unwrap().block_devices.len(), 9000);
        let refused = decode::<HeartbeatRequest>(heartbeat(500_000, "w")).unwrap_err();
        assert_eq!(refused, "the message has more than 10000 fields");
    }

    #[test]
    fn response_about_ten_thousand_machines_is_decoded_and_a_larger_one_is_not() {
        let response = |machines| {
            let outcome = MachineOrderOutcome {
                name: Some(MachineName { machine: "m".to_owned(), ..MachineName::default() }),
                changed: true,
                message: "is held".to_owned(),
                ..MachineOrderOutcome::default()
            };
            let response = SubmitBulkOrderResponse {
                outcomes: vec![outcome; machines],
                ..SubmitBulkOrderResponse::default()
            };
            decode::<SubmitBulkOrderResponse>(Bytes::from(response.encode_to_vec()))
        };
        assert_eq!(response(10_000).unwrap().outcomes.len(), 10_000);
        assert_eq!(response(60_000).unwrap_err(), "the message has more than 200000 fields");
    }

    #[test]
    fn malformed_message_is_an_error() {
        let refused = decode::<HeartbeatRequest>(Bytes::from_static(b"GET / HTTP/1.1")).unwrap_err();
        assert!(refused.starts_with("the message cannot be decoded: "), "{refused}");
    }
}
