//! Summary columns of a hardware report, for lists.
//!
//! The report itself is stored unchanged. The summary is shown to people but comes from the machine, so it is
//! shortened and cleaned: firmware is full of blanks, control characters and placeholders. An agent of an earlier release
//! reports more placeholders than one of this release, so they are left out here too.

use prost::Message as _;

use bmdb::engine::fact_change::NewHardwareReport;
use model::firmware_text::meaningful_text;
use model::plain_text::is_hidden;
use proto::hardware::v1::HardwareReport;

/// Longest copied text, in characters.
const TEXT_LIMIT: usize = 200;

/// Builds the stored form of a report.
#[must_use]
pub fn summarise_report(report: &HardwareReport, incarnation: &str) -> NewHardwareReport {
    let memory = report.memory.as_ref().map_or(0, |memory| memory.installed_bytes);
    let threads: u64 = report.cpus.iter().map(|cpu| u64::from(cpu.threads)).sum();
    NewHardwareReport {
        incarnation: incarnation.to_owned(),
        report: report.encode_to_vec(),
        manufacturer: clean_text(&report.manufacturer),
        product: clean_text(&report.product),
        serial_number: clean_text(&report.serial_number),
        memory_bytes: i64::try_from(memory).unwrap_or(i64::MAX),
        cpu_threads: i64::try_from(threads).unwrap_or(i64::MAX),
    }
}

fn clean_text(text: &str) -> Option<String> {
    let shown: String = text.chars().filter(|c| !is_hidden(*c)).take(TEXT_LIMIT).collect();
    meaningful_text(&shown).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hardware::v1::{Cpu, Memory};

    #[test]
    fn columns_are_truncated_and_cleaned_and_the_report_is_kept() {
        let report = HardwareReport {
            manufacturer: " ACME\u{0} Inc\u{200b}. \u{7f}".to_owned(),
            product: "xy".repeat(500),
            serial_number: "  \n".to_owned(),
            memory: Some(Memory { installed_bytes: u64::MAX, usable_ratio: 0.5 }),
            cpus: vec![Cpu { threads: 64, ..Cpu::default() }, Cpu { threads: 32, ..Cpu::default() }],
            ..HardwareReport::default()
        };
        let stored = summarise_report(&report, "i");
        assert_eq!(stored.manufacturer.as_deref(), Some("ACME Inc."));
        assert_eq!(stored.product.map(|product| product.len()), Some(200));
        assert_eq!(stored.serial_number, None);
        assert_eq!((stored.memory_bytes, stored.cpu_threads), (i64::MAX, 96));
        assert_eq!(HardwareReport::decode(stored.report.as_slice()).unwrap(), report);
    }

    #[test]
    fn placeholders_of_an_earlier_agent_are_not_stored() {
        let report = HardwareReport {
            manufacturer: "Default string".to_owned(),
            product: "Unknown".to_owned(),
            serial_number: "1234567890".to_owned(),
            ..HardwareReport::default()
        };
        let stored = summarise_report(&report, "i");
        assert_eq!((stored.manufacturer, stored.product, stored.serial_number), (None, None, None));
    }
}
