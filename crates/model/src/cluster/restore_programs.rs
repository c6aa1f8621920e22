//! Whether the programs of a machine can restore an image of etcd.
//!
//! `etcdutl snapshot restore` makes the data of an etcd from an image. The flags that keep old clients from continuing
//! (`--bump-revision`, `--mark-compacted`) exist from 3.5.10 on. The data has the format of the minor version of etcdutl, so
//! the etcd that runs there has the same one. An image of a later minor version may have what that etcd does not know.

use semver::Version;

/// The oldest etcdutl that can restore an image.
const OLDEST: Version = Version::new(3, 5, 10);

/// The versions of the programs of a machine, as they print them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdPrograms {
    /// Version of etcd; `None` if it is not known.
    pub etcd: Option<String>,
    /// Version of etcdutl; `None` if there is none, or if it is not known.
    pub etcdutl: Option<String>,
}

/// Parses a version. A suffix such as `-rc.1` is ignored.
fn parse_version(text: &str) -> Option<Version> {
    Version::parse(text.trim().split(['-', '+']).next()?).ok()
}

/// Checks that these programs can restore an image that an etcd of this version sent. The error continues a sentence after
/// the name of the machine.
pub fn check_restore_programs(image: &str, programs: &EtcdPrograms) -> Result<(), String> {
    let known = |text: &Option<String>| text.as_deref().and_then(parse_version);
    let Some(sent) = parse_version(image) else {
        return Err(format!("cannot restore the image of etcd: its etcd has the unknown version {image:?}"));
    };
    let Some(etcd) = known(&programs.etcd) else {
        let text = "reports no version of etcd: update its role server, and install etcd and etcdutl";
        return Err(text.to_owned());
    };
    let (same, oldest) = (format!("{}.{}", etcd.major, etcd.minor), OLDEST);
    if etcd < OLDEST {
        return Err(format!(
            "has etcd {etcd}, for which no etcdutl restores an image: install etcd and etcdutl of one minor version, \
             {oldest} or later"
        ));
    }
    if (sent.major, sent.minor) > (etcd.major, etcd.minor) {
        return Err(format!(
            "has etcd {etcd}, and the image is of etcd {sent}: install etcd and etcdutl {}.{}",
            sent.major, sent.minor
        ));
    }
    match known(&programs.etcdutl) {
        None => Err(format!(
            "has etcd {etcd} and no etcdutl: install etcdutl {same}, {oldest} or later, beside it"
        )),
        Some(tool) if tool < OLDEST || (tool.major, tool.minor) != (etcd.major, etcd.minor) => Err(format!(
            "has etcd {etcd} and etcdutl {tool}: install etcdutl {same}, {oldest} or later, in its place"
        )),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_restored_by_the_tool_of_the_etcd_that_runs_there() {
        for (image, etcd, etcdutl, expected) in [
            ("3.6.1", "3.6.1", "3.6.1", None),
            ("3.6.7", "3.6.1", "3.6.4", None),
            ("3.4.30", "3.5.10", "3.5.10", None),
            ("3.5.21", "3.7.3", "3.7.0-rc.1", None),
            ("3.6.1", "3.6.1", "", Some("has etcd 3.6.1 and no etcdutl: install etcdutl 3.6")),
            ("3.6.1", "3.6.1", "3.5.21", Some("has etcd 3.6.1 and etcdutl 3.5.21: install etcdutl 3.6")),
            ("3.6.1", "3.6.1", "3.7.3", Some("has etcd 3.6.1 and etcdutl 3.7.3: install etcdutl 3.6")),
            (
                "3.5.21",
                "3.5.21",
                "3.5.9",
                Some("has etcd 3.5.21 and etcdutl 3.5.9: install etcdutl 3.5, 3.5.10"),
            ),
            ("3.4.30", "3.4.30", "", Some("has etcd 3.4.30, for which no etcdutl restores an image")),
            ("3.4.30", "3.4.30", "3.5.21", Some("has etcd 3.4.30, for which no etcdutl restores an image")),
            ("3.5.9", "3.5.9", "3.5.9", Some("has etcd 3.5.9, for which no etcdutl restores an image")),
            ("3.7.3", "3.6.1", "3.6.1", Some("the image is of etcd 3.7.3: install etcd and etcdutl 3.7")),
            ("3.6.1", "", "3.6.1", Some("reports no version of etcd")),
            ("", "3.6.1", "3.6.1", Some("the unknown version \"\"")),
        ] {
            let reported = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            let programs = EtcdPrograms { etcd: reported(etcd), etcdutl: reported(etcdutl) };
            let found = check_restore_programs(image, &programs).err();
            match (&found, expected) {
                (None, None) => {}
                (Some(text), Some(part)) => assert!(text.contains(part), "{image} {etcd} {etcdutl}: {text}"),
                _ => panic!("{image} {etcd} {etcdutl}: {found:?}"),
            }
        }
    }
}
