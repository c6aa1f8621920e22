//! D-Bus messages: the header, and the values of the body (pure).
//!
//! All messages of this client are little-endian, as is the host; systemd answers in the byte order of the host, and a
//! message in the other one is refused.

use crate::systemd_manager::value::{DecodeError, Decoder, Encoder, Value, signature_of};

/// Bytes of a header before its fields.
pub const FIXED_BYTES: usize = 16;
/// Longest message that is accepted.
pub const MAX_BYTES: usize = 1 << 20;

const LITTLE_ENDIAN: u8 = b'l';
const PROTOCOL_VERSION: u8 = 1;
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// A call of a method, which expects a reply.
    Call,
    /// The reply to a call that succeeded.
    Reply,
    /// The reply to a call that failed.
    Error,
    /// A signal, to everybody who subscribed to it.
    Signal,
}

impl MessageKind {
    const fn code(self) -> u8 {
        match self {
            Self::Call => 1,
            Self::Reply => 2,
            Self::Error => 3,
            Self::Signal => 4,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Call),
            2 => Some(Self::Reply),
            3 => Some(Self::Error),
            4 => Some(Self::Signal),
            _ => None,
        }
    }
}

/// A message. Fields that its kind does not have are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its kind.
    pub kind: MessageKind,
    /// Number of the message on its connection, never 0.
    pub serial: u32,
    /// Number of the call that it answers; 0 if it answers none.
    pub reply_to: u32,
    /// Object that a call is for, or that a signal comes from.
    pub path: String,
    /// Interface of the method or signal.
    pub interface: String,
    /// Name of the method or signal.
    pub member: String,
    /// Name of the service that a call is for.
    pub destination: String,
    /// Name of an error.
    pub error: String,
    /// Values of the body.
    pub body: Vec<Value>,
}

impl Message {
    /// A message of this kind without fields.
    #[must_use]
    pub const fn new(kind: MessageKind, serial: u32, body: Vec<Value>) -> Self {
        Self {
            kind,
            serial,
            reply_to: 0,
            path: String::new(),
            interface: String::new(),
            member: String::new(),
            destination: String::new(),
            error: String::new(),
            body,
        }
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Encoder::default();
        for value in &self.body {
            body.push(value);
        }
        let mut fields = Vec::new();
        let mut add = |code: u8, value: Value| {
            fields.push(Value::Structure(vec![Value::Byte(code), value.in_variant()]));
        };
        if !self.path.is_empty() {
            add(PATH, Value::ObjectPath(self.path.clone()));
        }
        for (code, text) in [
            (INTERFACE, &self.interface),
            (MEMBER, &self.member),
            (ERROR_NAME, &self.error),
            (DESTINATION, &self.destination),
        ] {
            if !text.is_empty() {
                add(code, Value::Text(text.clone()));
            }
        }
        if self.reply_to != 0 {
            add(REPLY_SERIAL, Value::U32(self.reply_to));
        }
        if !self.body.is_empty() {
            add(SIGNATURE, Value::Signature(signature_of(&self.body)));
        }
        let mut message = Encoder(vec![LITTLE_ENDIAN, self.kind.code(), 0, PROTOCOL_VERSION]);
        message.push_u32(u32::try_from(body.0.len()).unwrap_or(u32::MAX));
        message.push_u32(self.serial);
        message.push(&Value::Array("(yv)".to_owned(), fields));
        message.align(8);
        message.0.extend(body.0);
        message.0
    }

    /// Decodes a complete message. Its length is that of [`message_length`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let kind = MessageKind::from_code(bytes.get(1).copied().unwrap_or_default())
            .ok_or_else(|| DecodeError("it is of no kind that D-Bus has".to_owned()))?;
        let header_end = message_length(bytes)? - number_at(bytes, 4)?;
        let (header, body) = bytes
            .split_at_checked(header_end)
            .ok_or_else(|| DecodeError("it ends within its header".to_owned()))?;
        let mut message =
            Self::new(kind, u32::try_from(number_at(bytes, 8)?).unwrap_or_default(), Vec::new());
        // Fields are aligned from the start of the message, so the fixed part is read with them.
        let read = Decoder::new(header).read_all("yyyyuua(yv)")?;
        let mut signature = String::new();
        let Some(Value::Array(_, fields)) = read.last() else { return Ok(message) };
        for field in fields {
            let Value::Structure(field) = field else { continue };
            let [Value::Byte(code), Value::Variant(value)] = field.as_slice() else { continue };
            let place = match *code {
                PATH => &mut message.path,
                INTERFACE => &mut message.interface,
                MEMBER => &mut message.member,
                ERROR_NAME => &mut message.error,
                DESTINATION => &mut message.destination,
                SIGNATURE => &mut signature,
                REPLY_SERIAL => {
                    if let Value::U32(serial) = **value {
                        message.reply_to = serial;
                    }
                    continue;
                }
                // The sender, and fields of later versions.
                _ => continue,
            };
            value.as_text().unwrap_or_default().clone_into(place);
        }
        // Signals that nobody waits for may have types that this client does not know.
        message.body = match Decoder::new(body).read_all(&signature) {
            Ok(values) => values,
            Err(_) if kind == MessageKind::Signal => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(message)
    }
}

fn number_at(bytes: &[u8], at: usize) -> Result<usize, DecodeError> {
    let number = bytes.get(at..at + 4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
    let number = number.ok_or_else(|| DecodeError("it ends within its header".to_owned()))?;
    Ok(usize::try_from(u32::from_le_bytes(number)).unwrap_or(usize::MAX))
}

/// The length of the message that begins with these bytes, of which [`FIXED_BYTES`] are needed.
pub fn message_length(start: &[u8]) -> Result<usize, DecodeError> {
    if start.first() != Some(&LITTLE_ENDIAN) {
        return Err(DecodeError("it is not in little-endian order".to_owned()));
    }
    let (body, fields) = (number_at(start, 4)?, number_at(start, 12)?);
    let length = fields
        .checked_add(FIXED_BYTES)
        .and_then(|header| header.checked_next_multiple_of(8).and_then(|header| header.checked_add(body)));
    match length {
        Some(length) if length <= MAX_BYTES => Ok(length),
        _ => Err(DecodeError(format!("it is longer than {MAX_BYTES} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get_unit() -> Message {
        Message {
            path: "/org/freedesktop/systemd1".to_owned(),
            interface: "org.freedesktop.systemd1.Manager".to_owned(),
            member: "GetUnit".to_owned(),
            destination: "org.freedesktop.systemd1".to_owned(),
            ..Message::new(MessageKind::Call, 1, vec![Value::text("a.scope")])
        }
    }

    /// The bytes that `busctl` sends for the same call, but for the order of the fields.
    #[test]
    fn call_has_these_bytes() {
        let expected = "\
            6c010001 0c000000 01000000 97000000 \
            01016f00 19000000 2f6f7267 2f667265 65646573 6b746f70 2f737973 74656d64 31000000 00000000 \
            02017300 20000000 6f72672e 66726565 6465736b 746f702e 73797374 656d6431 2e4d616e 61676572 \
            00000000 00000000 \
            03017300 07000000 47657455 6e697400 \
            06017300 18000000 6f72672e 66726565 6465736b 746f702e 73797374 656d6431 00000000 00000000 \
            08016700 01730000 \
            07000000 612e7363 6f706500";
        assert_eq!(hex::encode(get_unit().encode()), expected.replace(' ', ""));
    }

    #[test]
    fn messages_of_each_kind_come_back() {
        let reply = Message { reply_to: 9, ..Message::new(MessageKind::Reply, 2, Vec::new()) };
        let error = Message {
            reply_to: 1,
            error: "org.freedesktop.systemd1.UnitExists".to_owned(),
            ..Message::new(MessageKind::Error, 3, vec![Value::text("Unit a.scope exists.")])
        };
        let signal = Message {
            path: "/org/freedesktop/systemd1".to_owned(),
            interface: "org.freedesktop.systemd1.Manager".to_owned(),
            member: "JobRemoved".to_owned(),
            ..Message::new(
                MessageKind::Signal,
                4,
                vec![
                    Value::U32(7),
                    Value::ObjectPath("/job/7".to_owned()),
                    Value::text("a.scope"),
                    Value::text("done"),
                ],
            )
        };
        for message in [get_unit(), reply, error, signal] {
            let bytes = message.encode();
            assert_eq!(message_length(&bytes[..FIXED_BYTES]).unwrap(), bytes.len());
            assert_eq!(Message::decode(&bytes).unwrap(), message);
        }
    }

    #[test]
    fn malformed_message_is_refused_with_a_reason() {
        let good = get_unit().encode();
        let why = |change: fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            Message::decode(&bytes).unwrap_err().to_string()
        };
        assert!(why(|bytes| bytes[0] = b'B').contains("little-endian"));
        assert!(why(|bytes| bytes[1] = 9).contains("of no kind"));
        assert!(why(|bytes| bytes.truncate(20)).contains("within its header"));
        assert!(why(|bytes| bytes[7] = 0xff).contains("longer than 1048576 bytes"));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes: Vec<u8>) {
            let _ = Message::decode(&[&[b'l', 2, 0, 1][..], &bytes].concat());
        }
    }
}
