//! Access lists of files (acl(5)).
//!
//! Where a file has one, the permission bits of the group are the mask of the list: the most that any user or group of
//! the list may do. Then the bits and the group together do not show who can write.

use std::path::Path;

use rustix::io::Errno;

/// The extended attribute with the access list of a file or directory.
const ATTRIBUTE: &str = "system.posix_acl_access";

/// Whether a file or directory has an access list. One that cannot be looked at counts as if it had one.
pub(crate) fn has_access_list(path: &Path) -> bool {
    // The content does not matter. A list that is larger than the buffer is an error, and it is there.
    let found = rustix::fs::lgetxattr(path, ATTRIBUTE, &mut [0_u8; 64]);
    !matches!(found, Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use testkit::skip::report_skip;

    use super::*;

    #[test]
    fn access_list_of_a_file_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("shepherd.toml");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(!has_access_list(&file));
        // Version 2 of the format of Linux, then tag, permissions and id of each entry: the owner, one more user, the
        // group, the mask, and all others.
        let user = rustix::process::geteuid().as_raw();
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in
            [(1_u16, 6_u16, u32::MAX), (2, 6, user), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)]
        {
            list.extend(tag.to_le_bytes());
            list.extend(permissions.to_le_bytes());
            list.extend(id.to_le_bytes());
        }
        match rustix::fs::setxattr(&file, ATTRIBUTE, &list, rustix::fs::XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                report_skip("access lists", "set TMPDIR to a directory of a file system that has them");
                return;
            }
            set => set.unwrap(),
        }
        assert!(has_access_list(&file));
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o660, "the bits of the group are the mask");
    }
}
