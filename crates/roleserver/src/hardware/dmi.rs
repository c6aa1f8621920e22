//! Firmware: the DMI/SMBIOS table with maker, product, serial number and memory modules, and UEFI support.
//!
//! Structures have the layout of the SMBIOS reference specification (DMTF DSP0134): type, length and handle, the
//! formatted part, then its strings, ended by an empty one. Only root can read the raw table; the few fields that the
//! kernel publishes as text are the fallback. A machine without DMI, such as most small ARM boards, has a device tree
//! with its model and its serial number.
//!
//! A module counts as memory by what its array is for (type 16): arrays for flash or for video belong to a board too. It
//! counts once: some tables repeat a module in an array that they do not describe.
//!
//! The board of a computer that its buyer builds has no maker and no product of the system (type 1). The board's own (type 2)
//! are reported then, with a warning. Its serial number is that of a part and never the system's.

use std::collections::BTreeMap;

use model::firmware_text::{is_placeholder, meaningful_text};
use proto::hardware::v1::EfiSupport;

use crate::hardware::{Sources, TABLE_LIMIT_BYTES, Warnings, read_prefix, read_text};

/// Use of a physical memory array (type 16): system memory.
const SYSTEM_MEMORY: u8 = 3;

/// The fields of the table that the report needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dmi {
    /// Maker of the system (type 1); empty if unknown.
    pub manufacturer: String,
    /// Product name of the system (type 1); empty if unknown.
    pub product: String,
    /// Serial number of the system (type 1); empty if unknown.
    pub serial_number: String,
    /// Maker of the board (type 2); empty if unknown.
    pub board_manufacturer: String,
    /// Product name of the board (type 2); empty if unknown.
    pub board_product: String,
    /// Sum of the sizes of the modules for system memory (type 17); `None` if no module states its size.
    pub memory_bytes: Option<u64>,
    /// Whether the firmware supports UEFI (type 0); `None` if it does not state it.
    pub uefi: Option<bool>,
}

/// Reads the table, or the fields that the kernel publishes, or the device tree.
pub fn read_dmi(sources: &Sources, warnings: &mut Warnings) -> Dmi {
    let path = sources.sys.join("firmware/dmi/tables/DMI");
    let device_tree = sources.sys.join("firmware/devicetree/base");
    let mut dmi = match read_prefix(&path, TABLE_LIMIT_BYTES) {
        Ok(table) => parse_table(&table, warnings),
        Err(error) => {
            // Its firmware describes the machine in another way.
            if !(error.kind() == std::io::ErrorKind::NotFound && device_tree.is_dir()) {
                warnings.add_warning(format!("the DMI table {} cannot be read: {error}", path.display()));
            }
            Dmi::default()
        }
    };
    let id = sources.sys.join("class/dmi/id");
    let maker = read_text(&device_tree.join("compatible")).and_then(|text| compatible_maker(&text));
    let board =
        |of_table: &str, name: &str| first_meaningful([Some(of_table.to_owned()), read_text(&id.join(name))]);
    let board_manufacturer = board(&dmi.board_manufacturer, "board_vendor");
    let board_product = board(&dmi.board_product, "board_name");
    for (field, name, other, of_board, what) in [
        (&mut dmi.manufacturer, "sys_vendor", maker, board_manufacturer, "manufacturer"),
        (&mut dmi.product, "product_name", read_text(&device_tree.join("model")), board_product, "product"),
        (
            &mut dmi.serial_number,
            "product_serial",
            read_text(&device_tree.join("serial-number")),
            String::new(),
            "serial number",
        ),
    ] {
        if field.is_empty() {
            *field = first_meaningful([read_text(&id.join(name)), other]);
        }
        if field.is_empty() {
            let instead = if of_board.is_empty() { "" } else { ": that of its board is reported" };
            warnings.add_warning(format!("the firmware does not tell this machine's {what}{instead}"));
            *field = of_board;
        }
    }
    dmi
}

/// The first text that means something; empty if none does.
fn first_meaningful(texts: [Option<String>; 2]) -> String {
    texts.into_iter().flatten().find(|text| !is_placeholder(text)).unwrap_or_default()
}

/// The maker in the property `compatible` of a device tree: what is before the comma of its first text
/// (`raspberrypi,4-model-b`).
fn compatible_maker(compatible: &str) -> Option<String> {
    let first = compatible.split('\0').next()?;
    first.split_once(',').map(|(maker, _)| maker.to_owned())
}

/// Parses a table. A cut table is a warning; what precedes the cut counts.
pub fn parse_table(table: &[u8], warnings: &mut Warnings) -> Dmi {
    let mut dmi = Dmi::default();
    // An array may follow its modules.
    let (mut arrays, mut modules) = (BTreeMap::new(), Vec::new());
    let mut rest = table;
    while !rest.is_empty() {
        let Some((structure, after)) = Structure::split(rest) else {
            warnings.add_warning("the DMI table is truncated or damaged; the part before the damage is used");
            break;
        };
        rest = after;
        match structure.kind() {
            0 => dmi.uefi = structure.byte(0x13).map(|byte| byte & 0x08 != 0),
            1 => {
                dmi.manufacturer = structure.string(0x04);
                dmi.product = structure.string(0x05);
                dmi.serial_number = structure.string(0x07);
            }
            // A blade has several boards; the first one that is named is the main one.
            2 if dmi.board_product.is_empty() => {
                dmi.board_manufacturer = structure.string(0x04);
                dmi.board_product = structure.string(0x05);
            }
            16 => {
                arrays.extend(structure.word(0x02).zip(structure.byte(0x05)));
            }
            17 => modules.extend(module_bytes(&structure).map(|bytes| (structure.word(0x04), bytes))),
            127 => break,
            _ => {}
        }
    }
    dmi.memory_bytes = sum_modules(&modules, &arrays);
    dmi
}

/// The sum of the modules for system memory. A module has the handle of its array. Many tables describe no array: a
/// module of an array that is not in the table counts if no module of a described array does. Otherwise it is another
/// name for one of those.
fn sum_modules(modules: &[(Option<u16>, u64)], arrays: &BTreeMap<u16, u8>) -> Option<u64> {
    let purpose = |array: &Option<u16>| array.and_then(|handle| arrays.get(&handle)).copied();
    let sum = |counted: Option<u8>| {
        let counted = modules.iter().filter(|(array, _)| purpose(array) == counted);
        counted.map(|(_, bytes)| *bytes).reduce(u64::saturating_add)
    };
    sum(Some(SYSTEM_MEMORY)).or_else(|| sum(None))
}

/// Size of a memory device; `None` for an empty slot, an unknown size, and a device that is not RAM.
fn module_bytes(structure: &Structure<'_>) -> Option<u64> {
    // Non-volatile modules: the kernel uses only their volatile part as memory (version 3.2: technology, and sizes by
    // volatility). Their type is "logical non-volatile device", also where all of a module is used as memory.
    if matches!(structure.byte(0x28), Some(0x04..=0x07)) {
        return structure.quad_word(0x3c).filter(|bytes| !matches!(*bytes, 0 | u64::MAX));
    }
    // ROM, flash and EEPROM of all kinds are the firmware's own chips or parts of a module that the kernel does not use
    // as memory.
    if matches!(structure.byte(0x12), Some(0x08..=0x0c | 0x1f)) {
        return None;
    }
    match structure.word(0x0c)? {
        0 | 0xffff => None,
        0x7fff => Some(u64::from(structure.double_word(0x1c)? & 0x7fff_ffff) << 20),
        size if size & 0x8000 != 0 => Some(u64::from(size & 0x7fff) << 10),
        size => Some(u64::from(size) << 20),
    }
}

/// The kernel knows how this boot went, the firmware what it supports.
#[must_use]
pub fn read_efi_support(sources: &Sources, dmi: &Dmi) -> EfiSupport {
    decide_efi_support(sources.sys.join("firmware/efi").is_dir(), dmi.uefi)
}

const fn decide_efi_support(booted: bool, capable: Option<bool>) -> EfiSupport {
    match (booted, capable) {
        (true, _) => EfiSupport::Enabled,
        (false, Some(true)) => EfiSupport::Disabled,
        (false, Some(false)) => EfiSupport::Unsupported,
        (false, None) => EfiSupport::Unknown,
    }
}

struct Structure<'a> {
    formatted: &'a [u8],
    strings: &'a [u8],
}

impl<'a> Structure<'a> {
    fn split(table: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let length = usize::from(*table.get(1)?);
        if length < 4 {
            return None;
        }
        let (formatted, rest) = table.split_at_checked(length)?;
        let end = rest.windows(2).position(|pair| pair == [0, 0])?;
        Some((Self { formatted, strings: &rest[..end] }, &rest[end + 2..]))
    }

    fn kind(&self) -> u8 {
        self.formatted[0]
    }

    fn byte(&self, offset: usize) -> Option<u8> {
        self.formatted.get(offset).copied()
    }

    fn word(&self, offset: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.formatted.get(offset..offset + 2)?.try_into().ok()?))
    }

    fn double_word(&self, offset: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.formatted.get(offset..offset + 4)?.try_into().ok()?))
    }

    fn quad_word(&self, offset: usize) -> Option<u64> {
        Some(u64::from_le_bytes(self.formatted.get(offset..offset + 8)?.try_into().ok()?))
    }

    /// The string with the number at `offset`; empty for none and for a placeholder.
    fn string(&self, offset: usize) -> String {
        let Some(index) = self.byte(offset).and_then(|number| usize::from(number).checked_sub(1)) else {
            return String::new();
        };
        let bytes = self.strings.split(|byte| *byte == 0).nth(index).unwrap_or_default();
        meaningful_text(&String::from_utf8_lossy(bytes)).unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A structure of `kind` with bytes at offsets and strings after it.
    pub(crate) fn structure(kind: u8, length: u8, bytes: &[(usize, &[u8])], strings: &[&str]) -> Vec<u8> {
        let mut formatted = vec![0; length.into()];
        formatted[0] = kind;
        formatted[1] = length;
        for (offset, value) in bytes {
            formatted[*offset..*offset + value.len()].copy_from_slice(value);
        }
        for text in strings {
            formatted.extend_from_slice(text.as_bytes());
            formatted.push(0);
        }
        formatted.extend_from_slice(if strings.is_empty() { &[0, 0] } else { &[0] });
        formatted
    }

    pub(crate) fn table() -> Vec<u8> {
        [
            structure(0, 0x18, &[(0x13, &[0x0d])], &["American Megatrends Inc."]),
            structure(1, 0x1b, &[(4, &[1, 2, 3, 4])], &["Supermicro", "SYS-1029U", "v1 ", " S123456X "]),
            structure(
                17,
                0x28,
                &[(0x0c, &[0xff, 0x7f]), (0x12, &[0x1a]), (0x1c, &[0, 0x80, 0, 0])],
                &["DIMM A1"],
            ),
            structure(17, 0x28, &[(0x0c, &[0x00, 0x40]), (0x12, &[0x1a])], &["DIMM A2"]),
            structure(17, 0x28, &[(0x0c, &[0x00, 0x00])], &["DIMM B1"]),
            structure(17, 0x28, &[(0x0c, &[0x00, 0x84]), (0x12, &[0x09])], &["flash"]),
            structure(127, 4, &[], &[]),
        ]
        .concat()
    }

    #[test]
    fn table_has_maker_serial_modules_and_firmware() {
        let mut warnings = Warnings::default();
        let dmi = parse_table(&table(), &mut warnings);
        assert_eq!(dmi.manufacturer, "Supermicro");
        assert_eq!(dmi.product, "SYS-1029U");
        assert_eq!(dmi.serial_number, "S123456X");
        assert_eq!(dmi.memory_bytes, Some((32 + 16) << 30));
        assert_eq!(dmi.uefi, Some(true));
        assert!(warnings.into_sentences().is_empty());
    }

    #[test]
    fn memory_that_keeps_its_content_is_no_ram() {
        let gigabytes = |count: u64| (count << 30).to_le_bytes();
        let module_of_type = |kind: u8, technology: u8, volatile: u64| {
            let (size, volatile) = (&[0xff, 0x7f][..], gigabytes(volatile));
            let bytes: [(usize, &[u8]); 5] = [
                (0x0c, size),
                (0x12, &[kind]),
                (0x1c, &[0, 0, 2, 0]),
                (0x28, &[technology]),
                (0x3c, &volatile),
            ];
            structure(17, 0x5c, &bytes, &["DIMM"])
        };
        let module = |technology, volatile| module_of_type(0x1a, technology, volatile);
        let memory =
            |tables: &[Vec<u8>]| parse_table(&tables.concat(), &mut Warnings::default()).memory_bytes;
        assert_eq!(memory(&[module(0x03, 0)]), Some(128 << 30), "DRAM counts by its size");
        assert_eq!(memory(&[module(0x03, 128), module(0x07, 0)]), Some(128 << 30));
        assert_eq!(memory(&[module(0x07, 96)]), Some(96 << 30), "what is used as memory counts");
        assert_eq!(memory(&[module_of_type(0x1f, 0x07, 126)]), Some(126 << 30), "all of it in memory mode");
        assert_eq!(memory(&[module_of_type(0x1f, 0x07, 0)]), None);
        let logical = structure(17, 0x28, &[(0x0c, &[0x00, 0x40]), (0x12, &[0x1f])], &["NVDIMM"]);
        assert_eq!(memory(&[logical]), None);
    }

    #[test]
    fn modules_count_by_the_use_of_their_array() {
        let array = |handle: u8, purpose: u8| {
            structure(16, 0x17, &[(0x02, &[handle, 0x10]), (0x05, &[purpose])], &[])
        };
        let module = |array: u8| {
            structure(17, 0x28, &[(0x04, &[array, 0x10]), (0x0c, &[0x00, 0x40]), (0x12, &[0x1a])], &["DIMM"])
        };
        let memory =
            |tables: &[Vec<u8>]| parse_table(&tables.concat(), &mut Warnings::default()).memory_bytes;
        assert_eq!(memory(&[array(1, 3), module(1), array(2, 5), module(2)]), Some(16 << 30));
        assert_eq!(memory(&[module(2), array(2, 4)]), None, "video memory, before its array");
        assert_eq!(memory(&[array(1, 3), module(9)]), Some(16 << 30), "its array is not in the table");
        assert_eq!(memory(&[module(9), array(1, 3), module(1)]), Some(16 << 30), "one module, listed twice");
    }

    #[test]
    fn maker_of_a_device_tree_is_the_first_word() {
        assert_eq!(compatible_maker("raspberrypi,4-model-b\0brcm,bcm2711").as_deref(), Some("raspberrypi"));
        assert_eq!(compatible_maker("board\0x,y"), None);
    }

    #[test]
    fn board_names_a_machine_whose_system_has_no_name() {
        let system = |texts: [&str; 3]| structure(1, 0x1b, &[(4, &[1, 2]), (7, &[3])], &texts);
        let boards = [
            structure(2, 0x0f, &[(4, &[1, 2])], &["TYAN", "S7002"]),
            structure(2, 0x0f, &[(4, &[1, 2])], &["TYAN", "riser"]),
        ]
        .concat();
        for (texts, manufacturer, product, warned) in [
            (["Maker", "Machine", "S1234"], "Maker", "Machine", 0),
            (["empty", "empty", "S1234"], "TYAN", "S7002", 2),
            (["", "Machine", "S1234"], "TYAN", "Machine", 1),
        ] {
            let root = tempfile::tempdir().unwrap();
            let tables = root.path().join("sys/firmware/dmi/tables");
            std::fs::create_dir_all(&tables).unwrap();
            // An absent string has the number 0 in a table; here it is a blank one.
            let texts = texts.map(|text| if text.is_empty() { " " } else { text });
            std::fs::write(tables.join("DMI"), [system(texts), boards.clone()].concat()).unwrap();
            let mut warnings = Warnings::default();
            let dmi = read_dmi(&Sources::in_directory(root.path()), &mut warnings);
            assert_eq!((dmi.manufacturer.as_str(), dmi.product.as_str()), (manufacturer, product));
            let sentences = warnings.into_sentences();
            assert_eq!(sentences.len(), warned, "{sentences:?}");
            assert!(sentences.iter().all(|warning| warning.ends_with(": that of its board is reported")));
        }
    }

    #[test]
    fn placeholders_are_no_names() {
        let text = ["To Be Filled By O.E.M.", "x-product", "Default string", "0000000000"];
        let table = structure(1, 0x1b, &[(4, &[1, 2, 3, 4])], &text);
        let dmi = parse_table(&table, &mut Warnings::default());
        assert_eq!((dmi.manufacturer.as_str(), dmi.serial_number.as_str()), ("", ""));
        assert_eq!(dmi.product, "x-product");
    }

    #[test]
    fn cut_table_gives_what_stands_before_the_cut_and_never_panics() {
        let table = table();
        for end in 0..table.len() {
            let mut warnings = Warnings::default();
            let dmi = parse_table(&table[..end], &mut warnings);
            assert!(dmi.memory_bytes.unwrap_or(0) <= 48 << 30);
        }
        let mut warnings = Warnings::default();
        assert_eq!(parse_table(&table[..200], &mut warnings).manufacturer, "Supermicro");
        assert_eq!(warnings.into_sentences().len(), 1);
        assert_eq!(parse_table(&[1, 0, 0, 0, 0, 0], &mut Warnings::default()), Dmi::default());
    }

    #[test]
    fn support_follows_from_boot_and_firmware() {
        for (booted, capable, expected) in [
            (true, None, EfiSupport::Enabled),
            (true, Some(false), EfiSupport::Enabled),
            (false, Some(true), EfiSupport::Disabled),
            (false, Some(false), EfiSupport::Unsupported),
            (false, None, EfiSupport::Unknown),
        ] {
            assert_eq!(decide_efi_support(booted, capable), expected);
        }
    }
}
