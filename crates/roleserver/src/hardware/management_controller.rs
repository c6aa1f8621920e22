//! Devices that a management controller (BMC) shows to its machine by USB. *Pure.*
//!
//! They look like disks and network ports of the machine, and are none: media are images that somebody attached, or
//! nothing, and the network interface leads to the controller only. Some makers give each of their controllers the same
//! address for it: all machines of such a model would look like one.

/// Whether vendor and model are those of a virtual medium. The disks of hypervisors and of RAID controllers, which are
/// called virtual too, are disks.
#[must_use]
pub fn is_virtual_medium(vendor: &str, model: &str) -> bool {
    const VENDORS: [&str; 3] = ["idrac", "ilo", "openbmc"];
    const MODELS: [&str; 11] = [
        "ilo ",
        "lcdrive",
        "oemdrv",
        "secupd",
        "virtual cd",
        "virtual dvd",
        "virtual fdd",
        "virtual floppy",
        "virtual hdisk",
        "virtual media",
        "virtual usb",
    ];
    let model = model.to_ascii_lowercase();
    VENDORS.contains(&vendor.to_ascii_lowercase().as_str())
        || MODELS.iter().any(|start| model.starts_with(start))
}

/// Whether the USB ids of a network interface are those of a management controller. They are in hexadecimal, as sysfs has
/// them.
#[must_use]
pub fn is_controller_interface(vendor_id: &str, product_id: &str) -> bool {
    const INTERFACES: [(&str, &str); 4] = [
        // American Megatrends (boards of many makers): "Virtual Ethernet".
        ("046b", "ffb0"),
        // IBM's IMM and Lenovo's XClarity Controller.
        ("04b3", "4010"),
        // Insyde (Supermicro since X12 and H12), always with the address b0:3a:f2:b6:05:9f.
        ("0b1f", "03ee"),
        // Dell's iDRAC: "iDRAC Virtual NIC USB Device".
        ("413c", "a102"),
    ];
    INTERFACES.contains(&(vendor_id, product_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_media_of_management_controllers_are_no_disks() {
        for (vendor, model, expected) in [
            ("iDRAC", "LCDRIVE", true),
            ("iDRAC", "Virtual Floppy", true),
            ("AMI", "Virtual Floppy0", true),
            ("AMI", "Virtual HDisk0", true),
            ("ATEN", "Virtual CDROM", true),
            ("HPE", "iLO LUN 00 Media 0", true),
            ("OpenBMC", "Virtual Media Device", true),
            ("Lenovo", "Virtual Media", true),
            ("Msft", "Virtual Disk", false),
            ("VMware", "Virtual disk", false),
            ("DELL", "VIRTUAL DISK", false),
            ("DELL", "IDSDM", false),
            ("HGST", "HUC101812CSS204", false),
            ("", "", false),
        ] {
            assert_eq!(is_virtual_medium(vendor, model), expected, "{vendor} {model}");
        }
    }

    #[test]
    fn interfaces_of_management_controllers_are_known_by_their_ids() {
        for (vendor_id, product_id, expected) in [
            ("046b", "ffb0", true),
            ("04b3", "4010", true),
            ("0b1f", "03ee", true),
            ("413c", "a102", true),
            // A keyboard of the same controller, and an adapter that somebody plugged in.
            ("046b", "ff10", false),
            ("0bda", "8153", false),
            ("", "", false),
        ] {
            assert_eq!(is_controller_interface(vendor_id, product_id), expected, "{vendor_id}:{product_id}");
        }
    }
}
