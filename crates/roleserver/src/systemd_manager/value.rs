//! D-Bus values and their encoding in little-endian order (pure).
//!
//! A value begins at a multiple of its alignment, counted from the start of the message. Only the types exist that the
//! calls of this client use; a message with another type is malformed.

use std::fmt::Write as _;

/// Greatest depth of containers in a received value (D-Bus Specification, "Valid Signatures").
const MAX_DEPTH: usize = 32;
/// Longest array in bytes; the specification permits more than any reply of systemd to this client has.
const MAX_ARRAY_BYTES: u32 = 1 << 20;

/// A D-Bus value; each variant has the letter of its type in a signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// `y`, an unsigned byte.
    Byte(u8),
    /// `b`, sent as an unsigned number of 32 bits.
    Bool(bool),
    /// `i`
    I32(i32),
    /// `u`
    U32(u32),
    /// `x`
    I64(i64),
    /// `t`
    U64(u64),
    /// `s`, UTF-8 without a NUL.
    Text(String),
    /// `o`, the path of an object.
    ObjectPath(String),
    /// `g`, the signature of other values.
    Signature(String),
    /// `a`, with the signature of an element, which an empty array has too.
    Array(String, Vec<Value>),
    /// `(…)`, with the signatures of the members.
    Structure(Vec<Value>),
    /// `v`, a value with its own signature.
    Variant(Box<Value>),
}

/// Bytes that are no D-Bus value or message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DecodeError(pub String);

fn malformed<T>(why: impl Into<String>) -> Result<T, DecodeError> {
    Err(DecodeError(why.into()))
}

impl Value {
    /// A string.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    /// An array of unsigned numbers (`au`).
    #[must_use]
    pub fn numbers(numbers: &[u32]) -> Self {
        Self::Array("u".to_owned(), numbers.iter().map(|number| Self::U32(*number)).collect())
    }

    /// A variant that contains this value.
    #[must_use]
    pub fn in_variant(self) -> Self {
        Self::Variant(Box::new(self))
    }

    /// The string or path in this value or in its variant; `None` for another type.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::ObjectPath(text) | Self::Signature(text) => Some(text),
            Self::Variant(inner) => inner.as_text(),
            _ => None,
        }
    }

    /// Appends the signature of this value.
    pub fn write_signature(&self, signature: &mut String) {
        let letter = match self {
            Self::Byte(_) => 'y',
            Self::Bool(_) => 'b',
            Self::I32(_) => 'i',
            Self::U32(_) => 'u',
            Self::I64(_) => 'x',
            Self::U64(_) => 't',
            Self::Text(_) => 's',
            Self::ObjectPath(_) => 'o',
            Self::Signature(_) => 'g',
            Self::Variant(_) => 'v',
            Self::Array(element, _) => {
                // Writing to a string cannot fail.
                let _ = write!(signature, "a{element}");
                return;
            }
            Self::Structure(fields) => {
                signature.push('(');
                for field in fields {
                    field.write_signature(signature);
                }
                ')'
            }
        };
        signature.push(letter);
    }
}

/// The signature of several values in a row.
#[must_use]
pub fn signature_of(values: &[Value]) -> String {
    let mut signature = String::new();
    for value in values {
        value.write_signature(&mut signature);
    }
    signature
}

/// The alignment of the type at the beginning of a signature.
const fn alignment(first: u8) -> usize {
    match first {
        b'y' | b'g' | b'v' => 1,
        b'x' | b't' | b'(' | b'{' => 8,
        _ => 4,
    }
}

/// Appends values to a message, aligned from its start.
#[derive(Debug, Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    /// Appends zeroes up to a multiple of `alignment`.
    pub fn align(&mut self, alignment: usize) {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
    }

    /// Appends a number of four bytes.
    pub fn push_u32(&mut self, number: u32) {
        self.align(4);
        self.0.extend(number.to_le_bytes());
    }

    fn push_text(&mut self, text: &str) {
        self.push_u32(length(text.len()));
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    /// Appends a signature: one byte of length, the letters, a zero.
    pub fn push_signature(&mut self, signature: &str) {
        self.0.push(u8::try_from(signature.len()).unwrap_or(u8::MAX));
        self.0.extend(signature.as_bytes());
        self.0.push(0);
    }

    /// Appends a value.
    pub fn push(&mut self, value: &Value) {
        match value {
            Value::Byte(byte) => self.0.push(*byte),
            Value::Bool(truth) => self.push_u32(u32::from(*truth)),
            Value::U32(number) => self.push_u32(*number),
            Value::I32(number) => {
                self.align(4);
                self.0.extend(number.to_le_bytes());
            }
            Value::U64(number) => {
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            Value::I64(number) => {
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            Value::Text(text) | Value::ObjectPath(text) => self.push_text(text),
            Value::Signature(signature) => self.push_signature(signature),
            Value::Array(element, items) => {
                self.push_u32(0);
                let length_at = self.0.len() - 4;
                // The length does not count the padding before the first element.
                self.align(alignment(element.bytes().next().unwrap_or_default()));
                let start = self.0.len();
                for item in items {
                    self.push(item);
                }
                let written = length(self.0.len() - start).to_le_bytes();
                if let Some(place) = self.0.get_mut(length_at..length_at + 4) {
                    place.copy_from_slice(&written);
                }
            }
            Value::Structure(fields) => {
                self.align(8);
                for field in fields {
                    self.push(field);
                }
            }
            Value::Variant(inner) => {
                self.push_signature(&signature_of(std::slice::from_ref(inner)));
                self.push(inner);
            }
        }
    }
}

/// A length on the wire. Nothing that this client sends comes near the limit.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Reads values from a message, aligned from its start.
#[derive(Debug)]
pub struct Decoder<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Decoder<'b> {
    /// A decoder that begins at the start of these bytes.
    #[must_use]
    pub const fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Skips padding up to a multiple of `alignment`.
    pub fn align(&mut self, alignment: usize) -> Result<(), DecodeError> {
        let padding = self.at.next_multiple_of(alignment) - self.at;
        self.take(padding).map(drop)
    }

    fn take(&mut self, count: usize) -> Result<&'b [u8], DecodeError> {
        let end = self.at.checked_add(count);
        let Some((end, taken)) = end.and_then(|end| Some((end, self.bytes.get(self.at..end)?))) else {
            return malformed(format!("it ends within a value, after {} bytes", self.bytes.len()));
        };
        self.at = end;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        self.align(N)?;
        let taken = self.take(N)?;
        <[u8; N]>::try_from(taken).or_else(|_| malformed("it ends within a number"))
    }

    fn take_length(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.take_array()?))
    }

    fn take_text(&mut self, bytes: usize) -> Result<String, DecodeError> {
        let text = self.take(bytes)?;
        if self.take(1)? != [0] {
            return malformed("a string does not end with a zero");
        }
        std::str::from_utf8(text).map(str::to_owned).or_else(|_| malformed("a string is not UTF-8"))
    }

    /// Reads values of these types.
    pub fn read_all(&mut self, signature: &str) -> Result<Vec<Value>, DecodeError> {
        self.read_types(signature, 0)
    }

    fn read_types(&mut self, mut signature: &str, depth: usize) -> Result<Vec<Value>, DecodeError> {
        let mut values = Vec::new();
        while !signature.is_empty() {
            let (first, rest) = split_type(signature)?;
            values.push(self.read(first, depth)?);
            signature = rest;
        }
        Ok(values)
    }

    fn read(&mut self, kind: &str, depth: usize) -> Result<Value, DecodeError> {
        if depth > MAX_DEPTH {
            return malformed(format!("its values are nested more than {MAX_DEPTH} deep"));
        }
        Ok(match kind.bytes().next().unwrap_or_default() {
            b'y' => Value::Byte(self.take_array::<1>()?[0]),
            b'b' => Value::Bool(self.take_length()? != 0),
            b'u' => Value::U32(self.take_length()?),
            b'i' => Value::I32(i32::from_le_bytes(self.take_array()?)),
            b't' => Value::U64(u64::from_le_bytes(self.take_array()?)),
            b'x' => Value::I64(i64::from_le_bytes(self.take_array()?)),
            letter @ (b's' | b'o') => {
                let bytes = self.take_length()?;
                let text = self.take_text(usize::try_from(bytes).unwrap_or(usize::MAX))?;
                if letter == b's' { Value::Text(text) } else { Value::ObjectPath(text) }
            }
            b'g' => {
                let bytes = self.take_array::<1>()?[0];
                Value::Signature(self.take_text(usize::from(bytes))?)
            }
            b'v' => {
                let bytes = self.take_array::<1>()?[0];
                let inner = self.take_text(usize::from(bytes))?;
                let (first, rest) = split_type(&inner)?;
                if !rest.is_empty() {
                    return malformed(format!(
                        "a variant has the signature {inner:?}, which is several types"
                    ));
                }
                self.read(first, depth + 1)?.in_variant()
            }
            b'a' => self.read_array(&kind[1..], depth)?,
            b'(' | b'{' => {
                self.align(8)?;
                Value::Structure(self.read_types(&kind[1..kind.len() - 1], depth + 1)?)
            }
            _ => return malformed(format!("it has the type {kind:?}, which no answer to this program has")),
        })
    }

    fn read_array(&mut self, element: &str, depth: usize) -> Result<Value, DecodeError> {
        let bytes = self.take_length()?;
        if bytes > MAX_ARRAY_BYTES {
            return malformed(format!("an array has {bytes} bytes; {MAX_ARRAY_BYTES} is the maximum"));
        }
        self.align(alignment(element.bytes().next().unwrap_or_default()))?;
        let end = self.at.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX));
        let mut items = Vec::new();
        while self.at < end {
            let before = self.at;
            items.push(self.read(element, depth + 1)?);
            if self.at == before {
                return malformed("an element of an array has no bytes");
            }
        }
        if self.at > end {
            return malformed("an element of an array goes beyond its end");
        }
        Ok(Value::Array(element.to_owned(), items))
    }
}

/// Splits the first complete type off a signature.
fn split_type(signature: &str) -> Result<(&str, &str), DecodeError> {
    let mut open = 0_usize;
    for (index, letter) in signature.bytes().enumerate() {
        match letter {
            b'(' | b'{' => open += 1,
            b')' | b'}' if open > 0 => open -= 1,
            b'a' => continue,
            letter if letter.is_ascii_alphabetic() => {}
            _ => break,
        }
        if open == 0 {
            return Ok(signature.split_at(index + 1));
        }
    }
    malformed(format!("the signature {signature:?} is incomplete"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(values: &[Value]) -> Vec<u8> {
        let mut encoder = Encoder::default();
        for value in values {
            encoder.push(value);
        }
        encoder.0
    }

    fn property(name: &str, value: Value) -> Value {
        Value::Structure(vec![Value::text(name), value.in_variant()])
    }

    /// The bytes are those of the examples and rules of the specification.
    #[test]
    fn values_have_these_bytes_and_come_back() {
        let table: [(Vec<Value>, &str, &str); 8] = [
            (vec![Value::Byte(7), Value::U32(1)], "yu", "07000000 01000000"),
            (vec![Value::Byte(7), Value::U64(258)], "yt", "07000000 00000000 02010000 00000000"),
            (vec![Value::text("foo"), Value::Bool(true)], "sb", "03000000 666f6f00 01000000"),
            (vec![Value::Signature("a(sv)".to_owned())], "g", "05612873 762900"),
            (vec![Value::numbers(&[5, 6])], "au", "08000000 05000000 06000000"),
            // The padding before the first structure is not counted in the length.
            (
                vec![Value::Array("(sv)".to_owned(), vec![property("D", Value::Bool(true))])],
                "a(sv)",
                "10000000 00000000 01000000 44000162 00000000 01000000",
            ),
            (vec![Value::Array("(sv)".to_owned(), Vec::new())], "a(sv)", "00000000 00000000"),
            (vec![Value::I32(-1), Value::I64(-2)], "ix", "ffffffff 00000000 feffffff ffffffff"),
        ];
        for (values, signature, bytes) in table {
            let encoded = encode(&values);
            assert_eq!(hex::encode(&encoded), bytes.replace(' ', ""), "{signature}");
            assert_eq!(signature_of(&values), signature);
            assert_eq!(Decoder::new(&encoded).read_all(signature).unwrap(), values, "{signature}");
        }
    }

    #[test]
    fn dictionary_is_read_as_an_array_of_structures() {
        let entries = Value::Array("(sv)".to_owned(), vec![property("Id", Value::text("a.scope"))]);
        let read = Decoder::new(&encode(std::slice::from_ref(&entries))).read_all("a{sv}").unwrap();
        let Some(Value::Array(element, items)) = read.first() else { panic!("{read:?}") };
        let Value::Array(_, expected) = entries else { unreachable!() };
        assert_eq!((element.as_str(), items), ("{sv}", &expected));
    }

    #[test]
    fn malformed_bytes_are_refused_with_a_reason() {
        let why =
            |bytes: &[u8], signature: &str| Decoder::new(bytes).read_all(signature).unwrap_err().to_string();
        assert!(why(&[1, 0], "u").contains("ends within a value"));
        assert!(why(&[255, 255, 255, 255], "s").contains("ends within a value"));
        assert!(why(&[1, 0, 0, 0, b'a', b'b'], "s").contains("does not end with a zero"));
        assert!(why(&[1, 0, 0, 0, 0xff, 0], "s").contains("not UTF-8"));
        assert!(why(&[255, 255, 255, 255], "au").contains("an array has 4294967295 bytes"));
        assert!(why(&[3, 0, 0, 0, 1, 0, 0, 0], "au").contains("beyond its end"));
        assert!(why(&[], "h").contains("the type \"h\""));
        assert!(why(&[], "(u").contains("incomplete"));
        assert!(why(&[], ")").contains("incomplete"));
        assert!(why(&[2, b'u', b'u', 0], "v").contains("several types"));
        let deep: Vec<u8> = [1, b'v', 0].repeat(40);
        assert!(why(&deep, "v").contains("more than 32 deep"));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes: Vec<u8>, signature in "[ybuixtsogva(){}h]{0,12}") {
            let _ = Decoder::new(&bytes).read_all(&signature);
        }
    }
}
