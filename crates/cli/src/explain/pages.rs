//! Pages of the documentation that the program contains: `explain` needs no copy of the source.

/// The pages of a folder, each with its name.
macro_rules! embedded_pages {
    ($folder:literal: $($name:literal,)+) => {
        [$(($name, include_str!(concat!("../../../../docs/", $folder, $name, ".md")))),+]
    };
}

/// The glossary: a table of terms and definitions.
pub(super) const GLOSSARY: &str = include_str!("../../../../docs/glossary.md");

/// The page of each kind of issues, by [`model::issues::IssueKind::id`].
pub(super) static ISSUE_PAGES: [(&str, &str); 62] = embedded_pages!("issues/":
    "address-conflict",
    "agent-unit",
    "artefact-storage",
    "authority-replacements",
    "authority-rotation-held",
    "brake",
    "budget-exhausted",
    "certificate-ends",
    "certificate-rejected",
    "clock-skew",
    "cluster-etcd-full",
    "cluster-etcd-large",
    "cluster-image-old",
    "cluster-key-refused",
    "cluster-not-founded",
    "cluster-snapshot-old",
    "connections-turned-away",
    "crash-loop",
    "database-durability",
    "database-limits-unreadable",
    "dead-rows",
    "declaration-refused",
    "drift",
    "duplicate-key",
    "duplicate-mac",
    "duplicate-serial",
    "few-admins",
    "file-refused",
    "host-key-changed",
    "kubernetes-component-unwell",
    "kubernetes-object-clash",
    "kubernetes-rotation-held",
    "long-snapshot",
    "loop-paused",
    "lost-workers",
    "machines-not-adopted",
    "needs-human",
    "newer-fence",
    "nobody-listens",
    "node-problem",
    "no-shepherd",
    "open-files",
    "outdated-agent",
    "provider-discrepancy",
    "provider-fails",
    "release-refused",
    "replication-slot",
    "retired-listed",
    "retirement-stuck",
    "secrets-key-held",
    "session-flapping",
    "short-waiting-time",
    "silent-agent",
    "storage-low",
    "transaction-ids",
    "two-person-rule-off",
    "unpinned-keys",
    "unsigned-releases",
    "version-fault",
    "wal-retained",
    "work-fails",
    "workloads-end-with-agent",
);

/// The other pages, which have sections.
pub(super) static MANUAL_PAGES: [(&str, &str); 20] = embedded_pages!("":
    "api",
    "architecture",
    "backup",
    "clusters",
    "database-care",
    "deploying",
    "high-availability",
    "keys",
    "kubernetes",
    "machines",
    "metrics",
    "nodes",
    "plan",
    "power",
    "retiring",
    "security",
    "selectors",
    "traces",
    "updates",
    "versions",
);

/// The text of one of the other pages.
pub(super) fn find_manual_page(name: &str) -> Option<&'static str> {
    MANUAL_PAGES.iter().find(|(known, _)| *known == name).map(|(_, markdown)| *markdown)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use model::issues::IssueKind;

    use super::*;

    #[test]
    fn every_page_of_the_documentation_is_there() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let names = std::fs::read_dir(folder).unwrap().filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(".md").map(str::to_owned)
        });
        let mut expected: BTreeSet<String> = names.collect();
        assert!(expected.remove("glossary"));
        let pages: BTreeSet<String> = MANUAL_PAGES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(pages, expected);
    }

    #[test]
    fn every_kind_of_issues_has_its_page() {
        let pages: Vec<&str> = ISSUE_PAGES.iter().map(|(name, _)| *name).collect();
        assert_eq!(pages, IssueKind::ALL.map(IssueKind::id));
    }
}
