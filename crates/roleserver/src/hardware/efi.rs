//! UEFI support of the firmware and of this boot.

use proto::hardware::v1::EfiSupport;

use crate::hardware::Sources;
use crate::hardware::dmi::Dmi;

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

#[cfg(test)]
mod tests {
    use super::*;

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
