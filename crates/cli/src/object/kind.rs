//! The table of kinds: what `get` lists and `describe` shows.
//!
//! A row has the words for a kind, its help, and the place of its objects in a response of the API. The parser
//! ([`crate::object::command`]), the suggestions ([`crate::suggestions`]) and the messages read it. So a kind is added in
//! one place, and in [`crate::object::fetch`], which knows how its objects are fetched.

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// Machines that providers list, and those that were retired.
    Machine,
    /// Clusters that operators have created of machines.
    Cluster,
    /// Processes of `shepherd` that work on the BMDB.
    Shepherd,
    /// Open sessions of the components of shepherds.
    Session,
    /// Work items that a session is carrying out.
    Work,
    /// Providers that the fleet gets machines from.
    Provider,
    /// Control loops, each with its pauses.
    Loop,
    /// Budgets of disruptive steps and of releases.
    Budget,
    /// Brakes of recovery and of provisioning.
    Brake,
    /// Orders that need another admin.
    Approval,
    /// Problems of the fleet.
    Issue,
    /// Credentials for the API.
    Token,
    /// Files that machines fetch from a shepherd.
    Artefact,
    /// Roll-outs of the role server.
    Update,
    /// The policy of the fleet, one object.
    Policy,
    /// Records of orders that were given.
    Audit,
    /// Contexts of this user.
    Context,
}

/// A row of the table.
#[derive(Debug)]
pub struct KindRow {
    /// The kind that the row is about.
    pub kind: ObjectKind,
    /// The word for several, which is the subcommand of `get`.
    pub plural: &'static str,
    /// The word for one, which is the subcommand of `describe`.
    pub singular: &'static str,
    /// One object in a sentence, without an article.
    pub noun: &'static str,
    /// Words of other tools for such an object.
    pub foreign: &'static [&'static str],
    /// Key of the objects in the response of the API; empty for the policy, which is the response.
    pub key: &'static str,
    /// What `get` lists, for its help.
    pub list_about: &'static str,
    /// Examples in the help of `get`.
    pub list_examples: &'static str,
    /// What `describe` shows, for its help.
    pub page_about: &'static str,
    /// Examples in the help of `describe`.
    pub page_examples: &'static str,
    /// What to print if there is no such object.
    pub empty: &'static str,
}

/// All kinds, in the order of [`ObjectKind`].
pub static KINDS: [KindRow; 17] = [
    KindRow {
        kind: ObjectKind::Machine,
        plural: "machines",
        singular: "machine",
        noun: "machine",
        foreign: &["node", "nodes", "no", "pod", "pods", "po", "host", "hosts", "server", "servers"],
        key: "machines",
        list_about: "Machines by provider and name",
        list_examples: "\
Examples:
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl get machines -l 'phase=Ready,location=ams*,label.row=7,memory>=64GiB'
  shepherdctl get machines sim-0007 sim-0008
  shepherdctl get machines --sort-by since
  shepherdctl get machines --provider rack-a --limit 1000 -o json",
        page_about: "Facts, schedule, work, waits and last events of a machine",
        page_examples: "\
Example:
  shepherdctl describe machine sim-0007 -o yaml",
        empty: "no machines",
    },
    KindRow {
        kind: ObjectKind::Cluster,
        plural: "clusters",
        singular: "cluster",
        noun: "cluster",
        foreign: &[],
        key: "clusters",
        list_about: "Clusters with their stage, size, health and votes",
        list_examples: "\
Examples:
  shepherdctl get clusters
  shepherdctl get clusters -o json | jq -r '.clusters[] | select(.stage != \"converged\") | .name'",
        page_about: "A cluster, its machines, and what each waits for",
        page_examples: "\
Example:
  shepherdctl describe cluster ams",
        empty: "no clusters; create one with: shepherdctl cluster create NAME",
    },
    KindRow {
        kind: ObjectKind::Shepherd,
        plural: "shepherds",
        singular: "shepherd",
        noun: "shepherd",
        foreign: &[],
        key: "shepherds",
        list_about: "Shepherds: a line per process, with its release, workers and components",
        list_examples: "\
Example:
  shepherdctl get shepherds",
        page_about: "A shepherd: HOST/PID, or its host if it is the only one there",
        page_examples: "\
Example:
  shepherdctl describe shepherd rack1/4711",
        empty: "no shepherd works on this BMDB",
    },
    KindRow {
        kind: ObjectKind::Session,
        plural: "sessions",
        singular: "session",
        noun: "session",
        foreign: &["lease", "leases"],
        key: "sessions",
        list_about: "Open sessions of shepherds",
        list_examples: "\
Example:
  shepherdctl get sessions --context prod",
        page_about: "A session of a shepherd",
        page_examples: "\
Example:
  shepherdctl describe session 0199f3a2",
        empty: "no open sessions: no shepherd works on this BMDB",
    },
    KindRow {
        kind: ObjectKind::Work,
        plural: "work",
        singular: "work",
        noun: "work item",
        foreign: &["job", "jobs"],
        key: "work",
        list_about: "Work in progress, longest running first",
        list_examples: "\
Example:
  shepherdctl get work --limit 20",
        page_about: "A work item: MACHINE/LANE, or the machine if it has one item",
        page_examples: "\
Example:
  shepherdctl describe work sim-0007/observe",
        empty: "no live work",
    },
    KindRow {
        kind: ObjectKind::Provider,
        plural: "providers",
        singular: "provider",
        noun: "provider",
        foreign: &[],
        key: "providers",
        list_about: "Providers with the result of their last call, and engaged brakes",
        list_examples: "\
Example:
  shepherdctl get providers -o yaml",
        page_about: "A provider and the result of its last call",
        page_examples: "\
Example:
  shepherdctl describe provider rack-a",
        empty: "no provider was queried yet",
    },
    KindRow {
        kind: ObjectKind::Loop,
        plural: "loops",
        singular: "loop",
        noun: "loop",
        foreign: &["controller", "controllers"],
        key: "loops",
        list_about: "Control loops, and their pauses",
        list_examples: "\
Example:
  shepherdctl get loops                         which are paused, by whom and why",
        page_about: "A control loop and its pauses",
        page_examples: "\
Example:
  shepherdctl describe loop recoverer",
        empty: "no loops",
    },
    KindRow {
        kind: ObjectKind::Budget,
        plural: "budgets",
        singular: "budget",
        noun: "budget",
        foreign: &["pdb", "poddisruptionbudget", "poddisruptionbudgets"],
        key: "budgets",
        list_about: "Budgets: limits, use, and when the next machine may be disrupted",
        list_examples: "\
Example:
  shepherdctl get budgets -o json | jq -r '.budgets[] | select(.available | not) | .kind'",
        page_about: "A budget: its limits and its use",
        page_examples: "\
Example:
  shepherdctl describe budget reboot",
        empty: "no budgets",
    },
    KindRow {
        kind: ObjectKind::Brake,
        plural: "brakes",
        singular: "brake",
        noun: "brake",
        foreign: &[],
        key: "brakes",
        list_about: "Brakes: which are engaged, since when, why, and what engages each",
        list_examples: "\
Example:
  shepherdctl get brakes                        which are engaged, and what engages each",
        page_about: "A brake: KIND/SCOPE, or its kind if there is one such brake",
        page_examples: "\
Example:
  shepherdctl describe brake provisioner/rack-a",
        empty: "no brakes",
    },
    KindRow {
        kind: ObjectKind::Approval,
        plural: "approvals",
        singular: "approval",
        noun: "approval",
        foreign: &["csr", "certificatesigningrequests"],
        key: "approvals",
        list_about: "Orders that need the approval of another admin, and their state",
        list_examples: "\
Example:
  shepherdctl get approvals -o json | jq -r '.approvals[] | select(.state == \"waiting\").approvalId'",
        page_about: "An order that needs the approval of another admin",
        page_examples: "\
Example:
  shepherdctl describe approval 0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90",
        empty: "no approvals were requested",
    },
    KindRow {
        kind: ObjectKind::Issue,
        plural: "issues",
        singular: "issue",
        noun: "issue",
        foreign: &["componentstatuses", "cs"],
        key: "issues",
        list_about: "Problems of the fleet, most urgent first, and what to do",
        list_examples: "\
Example:
  shepherdctl get issues -o json | jq -r '.issues[] | select(.severity == \"critical\") | .subject'",
        page_about: "A problem of the fleet: ISSUE/SUBJECT, or the issue if there is one",
        page_examples: "\
Example:
  shepherdctl describe issue brake",
        empty: "no issues",
    },
    KindRow {
        kind: ObjectKind::Token,
        plural: "tokens",
        singular: "token",
        noun: "credential",
        foreign: &["credential", "credentials", "serviceaccount", "serviceaccounts", "sa"],
        key: "credentials",
        list_about: "Credentials for the API, newest first",
        list_examples: "\
Example:
  shepherdctl get tokens -o json | jq -r '.credentials[] | select(.active) | .name'",
        page_about: "A credential for the API: its UUID, or its name if it has that alone",
        page_examples: "\
Example:
  shepherdctl describe token lee",
        empty: "no credential exists yet; `shepherdctl tokens bootstrap` creates the first one",
    },
    KindRow {
        kind: ObjectKind::Artefact,
        plural: "artefacts",
        singular: "artefact",
        noun: "artefact",
        foreign: &["artifact", "artifacts", "image", "images"],
        key: "artefacts",
        list_about: "Files that machines fetch, newest first",
        list_examples: "\
Example:
  shepherdctl get artefacts -o json | jq -r '.artefacts[] | .sha256 + \" \" + .name'",
        page_about: "A file that machines fetch: its name or its digest",
        page_examples: "\
Example:
  shepherdctl describe artefact 'roleserver 1.4'",
        empty: "no artefacts; shepherdctl artefacts add FILE adds one",
    },
    KindRow {
        kind: ObjectKind::Update,
        plural: "updates",
        singular: "update",
        noun: "update",
        foreign: &["rollout", "rollouts"],
        key: "updates",
        list_about: "Updates of the role server, those under way first",
        list_examples: "\
Example:
  shepherdctl get updates -o json | jq -r '.updates[] | select(.pauseReason != null) | .id'

The last 50 updates that ended are kept. The audit has the orders of all: shepherdctl get audit --rpc Updates/Create",
        page_about: "An update, its machines, and what each waits for",
        page_examples: "\
Example:
  shepherdctl describe update 3f9a12bc",
        empty: "no updates; shepherdctl update --release RELEASE orders one",
    },
    KindRow {
        kind: ObjectKind::Policy,
        plural: "policy",
        singular: "policy",
        noun: "policy",
        foreign: &["policies"],
        key: "",
        list_about: "The policy of the fleet and its version",
        list_examples: "\
Example:
  shepherdctl get policy -o json | jq .policy.ladder",
        page_about: "The policy of the fleet and its version",
        page_examples: "\
Example:
  shepherdctl describe policy",
        empty: "",
    },
    KindRow {
        kind: ObjectKind::Audit,
        plural: "audit",
        singular: "audit",
        noun: "audit record",
        foreign: &["audits"],
        key: "records",
        list_about: "Orders that were given: by whom, when and why, newest first",
        list_examples: "\
Examples:
  shepherdctl get audit --limit 50
  shepherdctl get audit --machine sim-0007
  shepherdctl get audit --actor kim --rpc retire --since 2h",
        page_about: "An order that was given, with the state of its target before and after",
        page_examples: "\
Example:
  shepherdctl describe audit 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10",
        empty: "no orders were given",
    },
    KindRow {
        kind: ObjectKind::Context,
        plural: "contexts",
        singular: "context",
        noun: "context",
        foreign: &[],
        key: "contexts",
        list_about: "Contexts of this user: the servers of each fleet, and which one is the current one",
        list_examples: "\
Example:
  shepherdctl get contexts",
        page_about: "A context of this user",
        page_examples: "\
Example:
  shepherdctl describe context prod",
        empty: "no contexts; `shepherdctl tokens bootstrap --save-context NAME` creates one",
    },
];

impl ObjectKind {
    /// The row of the kind.
    #[must_use]
    pub fn row(self) -> &'static KindRow {
        &KINDS[self as usize]
    }

    /// The kind that `word` names, in the singular or the plural.
    #[must_use]
    pub fn find(word: &str) -> Option<Self> {
        KINDS.iter().find(|row| row.plural == word || row.singular == word).map(|row| row.kind)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn help_of_updates_has_the_number_of_ended_ones_that_are_kept() {
        let help = ObjectKind::Update.row().list_examples;
        let number = bmdb::fleet::roll_out::MAX_ENDED_ROLL_OUTS;
        assert!(help.contains(&format!("The last {number} updates that ended are kept.")), "{help}");
    }

    #[test]
    fn each_kind_has_its_row_and_its_own_words() {
        let mut words = BTreeSet::new();
        for row in &KINDS {
            assert_eq!(row.kind.row().plural, row.plural);
            assert_eq!(ObjectKind::find(row.plural), Some(row.kind));
            assert_eq!(ObjectKind::find(row.singular), Some(row.kind));
            let own: BTreeSet<&str> = [row.plural, row.singular].into_iter().collect();
            for word in own.iter().chain(row.foreign) {
                assert!(words.insert(*word), "{word} is the word of two kinds");
            }
        }
        assert_eq!(ObjectKind::find("nodes"), None);
    }
}
