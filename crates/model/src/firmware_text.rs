//! Placeholders in the text of firmware: what a manufacturer leaves in a field that has no value.
//!
//! Serial numbers, names of products and makers come from tables that many manufacturers never fill in. Such a text
//! looks like a value: two boards with the serial number `1234567890` look like one computer. There is one rule for it,
//! and everything that reads the text of firmware or of a device uses it: the hardware report, the columns that a
//! shepherd stores of it, the issues about pairs of machines, and selectors.
//!
//! A text is compared without case, and by its letters and digits alone: `To be filled by O.E.M`
//! and `TO BE FILLED BY OEM.` are one text. It is a placeholder if it
//!
//! * has no letter and no digit, or is one character repeated, or has only zeros and `x` (`0x0000`);
//! * counts: `123456789`, `0123456789ABCDEF`, also after letters (`SYS-1234567890`);
//! * begins with `(null`, or with the words "to be filled", or contains the words "default string";
//! * has a control character within: bytes of another table, which a broken pointer leads to;
//! * says that there is no value (`Not Available`), or names the field itself (`Chassis Serial Number`).
//!
//! The texts of the list are in the tables of real machines: those of the public collection of DMI tables by Linux
//! Hardware Project (github.com/linuxhw/DMI) were searched for them.
//!
//! Each test takes the text, not the field: a product named `Unknown` is as little known as a serial number. Network
//! addresses ([`meaningful_mac`]) and World Wide Names ([`is_placeholder_name`]) have placeholders of their own beside it.

use crate::plain_text::is_hidden;

/// Bits of a MAC address's first byte that mark it as a group address or as locally administered.
const GROUP_OR_LOCAL_BITS: u8 = 0b11;
/// Texts that say that there is no value, or name the field, in the form that [`fold`] gives.
const PLACEHOLDERS: [&str; 52] = [
    "assettag",
    "baseboardmanufacturer",
    "baseboardproductname",
    "blank",
    "boardmanufacturer",
    "boardproductname",
    "chassismanufacturer",
    "default",
    "empty",
    "invalid",
    "manufacturer",
    "modelname",
    "na",
    "nil",
    "none",
    "noserial",
    "notapplicable",
    "notassigned",
    "notavailable",
    "notdefined",
    "notfound",
    "notknown",
    "notpresent",
    "notprovided",
    "notset",
    "notsettable",
    "notspecified",
    "null",
    "oem",
    "oemstring",
    "product",
    "productname",
    "reserved",
    "serial",
    "sernum",
    "smbiostype1systemmanufacturer",
    "smbiostype1systemproductname",
    "systemmanufact",
    "systemmanufacter",
    "systemmanufacturer",
    "systemname",
    "systemproduct",
    "systemproductname",
    "systemversion",
    "tbd",
    "unassigned",
    "unavailable",
    "undefined",
    "unknow",
    "unknown",
    "unknownproduct",
    "unspecified",
];

/// Digits that must count on after letters: fewer may be a number that a manufacturer assigned.
const COUNTING_AFTER_LETTERS: usize = 9;

/// Whether a text of firmware means nothing: it is empty or a placeholder.
#[must_use]
pub fn is_placeholder(text: &str) -> bool {
    let folded = fold(text);
    let characters = |allowed: &[char]| folded.chars().all(|c| allowed.contains(&c));
    let letters = folded.chars().take_while(char::is_ascii_alphabetic).count();
    folded.chars().next().is_none_or(|first| folded.len() > first.len_utf8() && characters(&[first]))
        || characters(&['0', 'x'])
        || counts_up(&folded)
        || (folded.len() - letters >= COUNTING_AFTER_LETTERS && counts_up(&folded[letters..]))
        || text.trim_start().to_ascii_lowercase().starts_with("(null")
        || folded.starts_with("tobefilled")
        || folded.contains("filledbyoem")
        || folded.contains("defaultstring")
        || folded.contains("serialnumber")
        || has_hidden_character(text)
        || PLACEHOLDERS.contains(&folded.as_str())
}

/// A text of firmware without space around it; `None` for one that means nothing.
#[must_use]
pub fn meaningful_text(text: &str) -> Option<&str> {
    let text = text.trim_matches(|c: char| c.is_whitespace() || is_hidden(c));
    (!is_placeholder(text)).then_some(text)
}

/// Whether the bytes of a World Wide Name mean nothing: after the first byte, which has the kind of name, one value is
/// repeated.
#[must_use]
pub fn is_placeholder_name(bytes: &[u8]) -> bool {
    bytes.get(1..).is_none_or(|rest| rest.iter().all(|byte| Some(byte) == rest.first()))
}

/// Whether a hidden character is within a text, not around it. Zeros and white space also end and pad a text.
fn has_hidden_character(text: &str) -> bool {
    let padding = |c: char| c.is_whitespace() || c == '\0';
    text.trim_matches(padding).chars().any(|c| is_hidden(c) && !c.is_whitespace())
}

/// A MAC address, in hexadecimal bytes with colons, that a manufacturer assigned to one interface. `None` for a group
/// address, a locally administered one, and a placeholder: [`is_placeholder`], one byte repeated, or bytes in equal steps
/// (`00:11:22:33:44:55`), which boards with an empty EEPROM have.
#[must_use]
pub fn meaningful_mac(text: &str) -> Option<&str> {
    let bytes =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<u8>, _>>().ok()?;
    let is_assigned = bytes.len() == 6 && bytes[0] & GROUP_OR_LOCAL_BITS == 0;
    let is_regular =
        || bytes.windows(3).all(|three| three[2].wrapping_sub(three[1]) == three[1].wrapping_sub(three[0]));
    (is_assigned && !is_placeholder(text) && !is_regular()).then_some(text)
}

/// Letters and digits in lower case.
fn fold(text: &str) -> String {
    text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Whether digits count on from 0 or 1: each is the one after the digit before it. After 9 follows 0, or A.
fn counts_up(folded: &str) -> bool {
    let Some(digits) = folded.chars().map(|c| c.to_digit(16)).collect::<Option<Vec<_>>>() else {
        return false;
    };
    digits.first().is_some_and(|first| *first <= 1)
        && digits.windows(2).all(|pair| pair[1] == pair[0] + 1 || (pair[0], pair[1]) == (9, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_address_means_something_if_a_manufacturer_assigned_it() {
        for (mac, expected) in [
            ("00:00:5e:00:53:01", true),
            ("ac:1f:6b:01:02:03", true),
            ("00:00:00:00:00:01", true),
            ("00:00:00:00:00:00", false),
            ("ff:ff:ff:ff:ff:ff", false),
            ("88:88:88:88:88:88", false),
            ("00:11:22:33:44:55", false),
            ("00:01:02:03:04:05", false),
            ("12:34:56:78:9a:bc", false),
            ("02:00:00:00:00:01", false),
            ("01:00:5e:00:00:01", false),
            ("00:00:5e:00:53", false),
            ("", false),
            ("x", false),
        ] {
            assert_eq!(meaningful_mac(mac).is_some(), expected, "{mac}");
        }
    }

    #[test]
    fn placeholders_mean_nothing_however_they_are_written() {
        for text in [
            "",
            " ",
            "\0\0",
            "1234567890",
            "INVALID",
            "Not Available",
            "Unknown",
            "0123456789ABCDEF",
            "SYS-1234567890",
            "To Be Filled By O.E.M. by More String",
            "(null string)",
            "(null)",
            "SerialNumber",
            "To be filled by O.E.M",
            "to be filled by o.e.m. ",
            "Default string",
            "System Serial Number",
            "MB-Serial Number",
            "System manufacturer",
            "System Product Name",
            "Not Specified",
            "Not Applicable",
            "N/A",
            "None",
            "none.",
            "0123456789",
            "123456789",
            "12",
            "123",
            "1234567890123",
            "0x00000000",
            "0000-0000",
            "XXXXXXXX",
            "FFFFFFFF",
            "........",
            "-",
            "Empty",
            "Unknow",
            "Unknown Product",
            "OEM Default string000",
            "System Name",
            "System Manufacter",
            "SmbiosType1_SystemProductName",
            "\u{1}w\u{3}L$ Rev",
        ] {
            assert!(is_placeholder(text), "{text:?}");
            assert_eq!(meaningful_text(text), None, "{text:?}");
        }
    }

    #[test]
    fn values_are_kept_as_they_are() {
        for text in [
            "S123456X",
            "PF123456",
            "CZ12345678",
            "2345678",
            "10",
            "1357924680",
            "X570 AORUS, rev. 1.0",
            "Gigabyte Technology Co., Ltd.",
            "Dell Inc.",
            "M",
            "O.E.M. Systems",
            "x-product",
            "Nullarbor 3",
            "Product 12",
            "\u{30b5}\u{30fc}\u{30d0}1234",
        ] {
            assert_eq!(meaningful_text(text), Some(text));
        }
        assert_eq!(meaningful_text(" S1 \0\n"), Some("S1"));
    }

    #[test]
    fn names_of_one_repeated_value_mean_nothing() {
        for (name, expected) in [
            (&[][..], true),
            (&[0; 8], true),
            (&[0xff; 16], true),
            (&[1, 0, 0, 0, 0, 0, 0, 0], true),
            (&[0x50, 0, 0, 0, 0, 0, 0, 0], true),
            (&[0x50, 0, 0xcc, 0xa0, 0xa1, 0xb2, 0xc3, 0xd4], false),
        ] {
            assert_eq!(is_placeholder_name(name), expected, "{name:?}");
        }
    }

    #[test]
    fn placeholders_are_sorted_and_folded() {
        assert!(PLACEHOLDERS.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(PLACEHOLDERS.iter().all(|text| fold(text) == **text));
    }
}
