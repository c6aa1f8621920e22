//! Whether the firmware is UEFI and whether this boot went through it.

use crate::proto::hardware::v1::EfiSupport;
use crate::roleserver::hardware::Sources;
use crate::roleserver::hardware::dmi::Dmi;

/// The kernel knows what this boot did, the firmware what it could have done.
#[must_use]
pub fn read(sources: &Sources, dmi: &Dmi) -> EfiSupport {
    decide(sources.sys.join("firmware/efi").is_dir(), dmi.uefi)
}

const fn decide(booted: bool, capable: Option<bool>) -> EfiSupport {
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
    fn boot_and_firmware_together_tell() {
        for (booted, capable, expected) in [
            (true, None, EfiSupport::Enabled),
            (true, Some(false), EfiSupport::Enabled),
            (false, Some(true), EfiSupport::Disabled),
            (false, Some(false), EfiSupport::Unsupported),
            (false, None, EfiSupport::Unknown),
        ] {
            assert_eq!(decide(booted, capable), expected);
        }
    }
}
