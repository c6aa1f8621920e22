//! The table of how each command of `shepherdctl` can end. `exit_codes` runs it.
//!
//! A cell has the commands that end in its way, or the reason why none does. The other ways follow from the [`Kind`] of a
//! command: who refuses it, who may not answer, and whether an answer can be lost.

use self::Cell::{Elsewhere, Never, Run};

/// One way in which a command can end.
#[derive(Clone, Copy)]
pub(super) enum Cell {
    /// These commands, separated by `; `: the last one ends in this way, and those before it are done.
    Run(&'static str),
    /// The command cannot end in this way, for this reason.
    Never(&'static str),
    /// This command ends in this way in another test: its file and its name.
    Elsewhere(&'static str, &'static str, &'static str),
}

impl Cell {
    /// The commands of the cell, the last of which is the one of the row; empty if there is none.
    pub(super) fn lines(self) -> Vec<&'static str> {
        match self {
            Run(lines) => lines.split("; ").collect(),
            Elsewhere(line, ..) => vec![line],
            Never(_) => Vec::new(),
        }
    }
}

/// What a command needs, which decides in which other ways it can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It gives an order. If its answer is lost, the outcome is unknown.
    Order,
    /// It reads. A lost answer is like none: nothing was ordered.
    Read,
    /// It orders something of the database itself: no token is refused, but a schema of another release. A lost answer to
    /// a commit has the same error as in a shepherd (`bmdb_exit_code`).
    Database,
    /// It calls nothing, so nobody refuses it, and it waits for nobody.
    Local,
}

/// A command. In its lines, words in capitals take the place of what the fleet has (`exit_codes`).
pub(super) struct Row {
    /// The command without its arguments.
    pub(super) path: &'static str,
    pub(super) kind: Kind,
    /// Statements that bring about what the commands need. `$1` is the machine of the row.
    pub(super) prepare: &'static [&'static str],
    /// It did what was requested.
    pub(super) done: Cell,
    /// What was requested holds already.
    pub(super) already: Cell,
    /// What was requested does not hold, and nothing was changed.
    pub(super) no_effect: Cell,
    /// What it names does not exist.
    pub(super) unknown: Cell,
}

impl Row {
    pub(super) const fn cells(&self) -> [Cell; 4] {
        [self.done, self.already, self.no_effect, self.unknown]
    }

    /// Commands that prepare the command of the row, and that command as it would be done.
    pub(super) fn sample(&self) -> (Vec<&'static str>, &'static str) {
        let mut lines = self.done.lines();
        let last = lines.pop().unwrap_or(self.path);
        (lines, last)
    }
}

/// No statement.
const NOTHING: &[&str] = &[];

const fn order(path: &'static str, prepare: &'static [&'static str], cells: [Cell; 4]) -> Row {
    let [done, already, no_effect, unknown] = cells;
    Row { path, kind: Kind::Order, prepare, done, already, no_effect, unknown }
}

const fn read(path: &'static str, done: &'static str, unknown: Cell) -> Row {
    let orders = Never("it orders nothing");
    let done = Run(done);
    Row { path, kind: Kind::Read, prepare: NOTHING, done, already: orders, no_effect: orders, unknown }
}

/// The page of an object whose name differs from run to run: another test reads the name in the list.
const fn page(path: &'static str, unknown: &'static str) -> Row {
    let test = "every_reading_command_prints_the_document_of_the_api";
    let done = Elsewhere(unknown, "tests/all/api/documents.rs", test);
    Row { done, ..read(path, unknown, Run(unknown)) }
}

/// A command that waits: what it waits for happens in another test.
const fn waiting(path: &'static str, unknown: &'static str, test: &'static str) -> Row {
    let done = Elsewhere(unknown, "tests/all/api/waiting.rs", test);
    Row { done, ..read(path, unknown, Run(unknown)) }
}

const fn local(path: &'static str, done: Cell, already: Cell, unknown: Cell) -> Row {
    let no_effect = Never("it changes files of this user, or nothing");
    Row { path, kind: Kind::Local, prepare: NOTHING, done, already, no_effect, unknown }
}

const fn database(path: &'static str, done: Cell, already: Cell) -> Row {
    let no_effect = Never("nothing in the database is in its way");
    let unknown = Never("it is about the database itself");
    Row { path, kind: Kind::Database, prepare: NOTHING, done, already, no_effect, unknown }
}

/// The order is possible in every state of what it names.
const ALWAYS: Cell = Never("it is possible in every state of what it names");
/// What stands in its way is a rejection.
const REFUSED: Cell = Never("where it cannot be done, it is refused");
/// Nothing that exists is like what the order makes.
const ANOTHER: Cell = Never("each time it makes another one, or replaces the one before");

/// A founded cluster without nodes.
const CLUSTER: &str =
    "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
         created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
     SELECT gen_random_uuid(), 'c-' || $1::UUID::TEXT, 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]',
            FALSE, clock_timestamp(), 'ca', '[]'";
/// Its curators have been silent for an hour.
const SILENT: &str = "UPDATE cluster SET polled_at = clock_timestamp(),
         unreachable_since = clock_timestamp() - INTERVAL '1 hour' WHERE name = 'c-' || $1::UUID::TEXT";
const SNAPSHOT: &str = "INSERT INTO cluster_snapshot
     SELECT gen_random_uuid(), cluster_id, clock_timestamp() - INTERVAL '1 hour', 'interval', 7, 0, 12345, 5, 3, '[]',
            decode(repeat('cd', 32), 'hex') FROM cluster WHERE name = 'c-' || $1::UUID::TEXT";
const KUBERNETES: &str = r#"INSERT INTO cluster_kubernetes
     SELECT cluster_id, decode(repeat('1a', 32), 'hex'), '1.30.1', '10.96.0.0/16', '10.128.0.0/12', 24,
            'cluster.local', '{}', '{"driver": "d", "class": "c"}', clock_timestamp(), 'kim', NULL, '[]', NULL
     FROM cluster WHERE name = 'c-' || $1::UUID::TEXT"#;
const SECRETS: &str = r#"
    UPDATE cluster SET secret_keys = '{"stage": "settled", "since": "2026-01-01T00:00:00Z", "current": 1,
        "keys": [{"number": 1, "fingerprint": "ab", "created_at": "2026-01-01T00:00:00Z", "dropped_at": null}],
        "may_be_plain": false, "encrypted_at": null, "restored_for": null, "rotation": null}'
    WHERE name = 'c-' || $1::UUID::TEXT"#;
/// A certificate with the machine's identifier as its own.
const CERTIFICATE: &str = "INSERT INTO cluster_credential
     SELECT $1::UUID, cluster_id, decode(repeat('ef', 32), 'hex'), 'kim', 3600, clock_timestamp(), 'lee', NULL, NULL, NULL, NULL,
            NULL, NULL, NULL FROM cluster WHERE name = 'c-' || $1::UUID::TEXT";
const MEMBER: &str = "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
     SELECT $1::UUID, cluster_id, 'control-plane', clock_timestamp() FROM cluster WHERE name = 'c-' || $1::UUID::TEXT";
const REPORT: &str =
    "INSERT INTO machine_cluster_report (machine_id, generation, node_key, ca_certificate, reported_at)
     SELECT $1::UUID, 0, decode(repeat('07', 32), 'hex'), 'ca', clock_timestamp()";
const HEARTBEAT: &str = "INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
     SELECT $1::UUID, clock_timestamp() + INTERVAL '1 hour', 'b', 'i', 1";
const BACKOFF: &str = "INSERT INTO work_backoff
     SELECT $1::UUID, 'AgentStart', 3, 1000, clock_timestamp() + INTERVAL '1 hour', 'no route to host'";
const ROLL_OUT: &str = "INSERT INTO roll_out
     SELECT 'u-' || $1::UUID::TEXT, decode(repeat('1c', 32), 'hex'), 'release', '', 1, 60, clock_timestamp(), 'kim', 'a try',
            NULL, NULL, NULL";
/// A request for approval with the machine's identifier as its own.
const APPROVAL: &str =
    "INSERT INTO approval (approval_id, actor, idempotency_key, rpc, request, target, reason,
         requested_at, expires_at)
     SELECT $1::UUID, 'lee@a', $1::UUID::TEXT, 'r', decode('00', 'hex'), 't', 'r', clock_timestamp(),
            clock_timestamp() + INTERVAL '1 hour'";

/// Both machines have nodes that vote in the cluster of the first one.
const VOTERS: &str = "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, voter)
     SELECT id, cluster_id, 'control-plane', clock_timestamp(), TRUE FROM (VALUES ($1::UUID), ($2::UUID)) m (id), cluster
     WHERE name = 'c-' || $1::UUID::TEXT";

/// The file and the name of the test that waits for certificates of people.
const SIGNED: (&str, &str) =
    ("tests/all/api/approvals.rs", "repeated_command_uses_the_key_of_the_request_that_was_approved");
/// An identifier of nothing.
const REVOKE_NOTHING: &str = "tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10";

/// Statements that prepare two machines, and commands about them with their exit codes.
type SeveralRow = (&'static [&'static str], &'static [(&'static str, i32)]);

/// Orders about several machines: statements that prepare two machines, `$1` and `$2`, and then commands about them, each
/// with its exit code. `MACHINE` and `OTHER` take their places. A dry run exits as the order would, also one that comes
/// before an order that somebody has to confirm.
pub(super) const SEVERAL: &[SeveralRow] = &[
    (
        NOTHING,
        &[
            ("retire MACHINE OTHER --dry-run", 0),
            ("retire MACHINE OTHER", 2),
            ("retire MACHINE OTHER --yes-count 3 --dry-run", 4),
            ("retire MACHINE OTHER --yes-count 3", 4),
            ("retire MACHINE --yes", 0),
            ("retire MACHINE OTHER", 2),
            ("retire MACHINE OTHER --yes-count 2", 0),
            // Nothing is left to confirm.
            ("retire MACHINE OTHER --dry-run", 0),
            ("retire MACHINE OTHER", 0),
            ("retire OTHER MACHINE --yes-count 2", 0),
            ("retire MACHINE OTHER nobody", 3),
            ("retire cancel MACHINE OTHER", 0),
            ("retire cancel MACHINE OTHER", 0),
        ],
    ),
    (
        &[CLUSTER, VOTERS],
        &[
            ("power off MACHINE OTHER --dry-run", 0),
            ("power off MACHINE OTHER", 2),
            ("power off MACHINE OTHER --yes-count 2", 0),
            ("power off MACHINE OTHER --dry-run", 0),
            ("power off MACHINE OTHER", 0),
            ("power on MACHINE OTHER --dry-run", 4),
            ("power on MACHINE OTHER", 4),
        ],
    ),
    (
        NOTHING,
        &[
            ("quarantine MACHINE OTHER", 0),
            ("quarantine MACHINE OTHER", 0),
            ("release MACHINE OTHER --dry-run", 1),
            ("release MACHINE OTHER", 1),
        ],
    ),
];

/// Every command that runs by itself.
pub(super) const ROWS: &[Row] = &[
    // Orders about machines.
    order("hold", NOTHING, [Run("hold MACHINE --until 2h"), ANOTHER, ALWAYS, Run("hold nobody")]),
    order(
        "release",
        NOTHING,
        [
            Run("hold MACHINE; release MACHINE"),
            Run("release MACHINE"),
            Run("quarantine MACHINE; release MACHINE"),
            Run("release nobody"),
        ],
    ),
    order(
        "retry",
        &[HEARTBEAT, BACKOFF],
        [
            Run("retry MACHINE"),
            Run("retry MACHINE"),
            Run("quarantine MACHINE; retry MACHINE"),
            Run("retry nobody"),
        ],
    ),
    order(
        "quarantine",
        NOTHING,
        [Run("quarantine MACHINE"), Run("quarantine MACHINE"), ALWAYS, Run("quarantine nobody")],
    ),
    order(
        "label",
        NOTHING,
        [Run("label MACHINE row=7"), Run("label MACHINE row=7 old-"), ALWAYS, Run("label nobody row=7")],
    ),
    order(
        "prioritize",
        NOTHING,
        [
            Run("prioritize MACHINE urgent"),
            Run("prioritize MACHINE normal; prioritize MACHINE normal"),
            ALWAYS,
            Run("prioritize nobody urgent"),
        ],
    ),
    order("reboot", NOTHING, [Run("reboot MACHINE"), Run("reboot MACHINE"), REFUSED, Run("reboot nobody")]),
    order(
        "power",
        NOTHING,
        [Run("power off MACHINE"), Run("power off MACHINE"), REFUSED, Run("power off nobody")],
    ),
    order(
        "power cancel",
        NOTHING,
        [
            Run("reboot MACHINE; power cancel MACHINE"),
            Run("power cancel MACHINE"),
            REFUSED,
            Run("power cancel nobody"),
        ],
    ),
    order(
        "allow host-key",
        NOTHING,
        [
            Run("allow host-key MACHINE --fingerprint FINGERPRINT"),
            Run("allow host-key MACHINE --fingerprint FINGERPRINT"),
            REFUSED,
            Run("allow host-key MACHINE --fingerprint SHA256:abc"),
        ],
    ),
    order(
        "allow signing-keys",
        NOTHING,
        [
            Run("allow signing-keys MACHINE"),
            Run("allow signing-keys MACHINE"),
            REFUSED,
            Run("allow signing-keys nobody"),
        ],
    ),
    order(
        "logs",
        NOTHING,
        [
            Elsewhere(
                "logs MACHINE",
                "tests/all/api/logs.rs",
                "log_of_a_machine_reaches_a_client_of_another_shepherd_than_its_agent_calls",
            ),
            ANOTHER,
            REFUSED,
            Run("logs nobody"),
        ],
    ),
    order(
        "retire",
        NOTHING,
        [Run("retire MACHINE --yes"), Run("retire MACHINE --yes"), ALWAYS, Run("retire nobody --yes")],
    ),
    order(
        "retire waive",
        NOTHING,
        [
            Run("retire MACHINE --wipe --yes; retire waive MACHINE wipe --confirm WORDS"),
            Never("a stage that is over is refused"),
            REFUSED,
            Run("retire waive nobody wipe --confirm WORDS"),
        ],
    ),
    order(
        "retire cancel",
        NOTHING,
        [
            Run("retire MACHINE --yes; retire cancel MACHINE"),
            Run("retire cancel MACHINE"),
            REFUSED,
            Run("retire cancel nobody"),
        ],
    ),
    // Orders about the fleet.
    order(
        "loops pause",
        NOTHING,
        [
            Run("loops pause updater --provider rack"),
            ANOTHER,
            ALWAYS,
            Never("the grammar has the loops, and a provider may have no machine yet"),
        ],
    ),
    order(
        "loops resume",
        NOTHING,
        [
            Run("loops pause recoverer --provider rack; loops resume recoverer --provider rack"),
            Run("loops resume recoverer --provider rack"),
            Run("loops pause recoverer; loops resume recoverer --provider rack"),
            Never("the grammar has the loops, and a provider may have no machine yet"),
        ],
    ),
    order(
        "approve",
        &[APPROVAL],
        [Run("approve MACHINE"), ANOTHER, REFUSED, Run("approve 0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90")],
    ),
    order(
        "budget set",
        NOTHING,
        [
            Run("budget set reboot --max-count 50"),
            Run("budget set reboot --max-count 50"),
            ALWAYS,
            Never("the grammar has the budgets"),
        ],
    ),
    order(
        "artefacts add",
        NOTHING,
        [
            Run("artefacts add HOME/server --name NEW"),
            Run("artefacts add HOME/server --name NEW"),
            REFUSED,
            Never("a file that does not exist is a wrong argument"),
        ],
    ),
    order(
        "artefacts delete",
        NOTHING,
        [
            Run("artefacts add HOME/other --name NEW; artefacts delete NEW"),
            Never("an artefact that was deleted is unknown"),
            REFUSED,
            Run("artefacts delete nothing"),
        ],
    ),
    order(
        "update",
        NOTHING,
        [
            Run("label MACHINE roll=out; update --selector label.roll=out --release release"),
            ANOTHER,
            REFUSED,
            Run("update --selector label.roll=out --release nothing"),
        ],
    ),
    order(
        "update pause",
        &[ROLL_OUT],
        [
            Run("update pause UPDATE"),
            ANOTHER,
            Run("update abort UPDATE; update pause UPDATE"),
            Run("update pause nothing"),
        ],
    ),
    order(
        "update resume",
        &[ROLL_OUT],
        [
            Run("update pause UPDATE; update resume UPDATE"),
            Run("update resume UPDATE"),
            Run("update abort UPDATE; update resume UPDATE"),
            Run("update resume nothing"),
        ],
    ),
    order(
        "update abort",
        &[ROLL_OUT],
        [Run("update abort UPDATE"), Run("update abort UPDATE"), ALWAYS, Run("update abort nothing")],
    ),
    order(
        "tokens create",
        NOTHING,
        [
            Run("tokens create lee --role viewer"),
            ANOTHER,
            Run("tokens create ci --role viewer --certificate HOME/ci.pem; \
                 tokens create ci --role viewer --certificate HOME/ci.pem"),
            Never("it names nothing that exists"),
        ],
    ),
    order(
        "tokens revoke",
        NOTHING,
        [Run("tokens revoke KEY"), Run("tokens revoke KEY"), REFUSED, Run(REVOKE_NOTHING)],
    ),
    // Orders about clusters.
    order(
        "cluster create",
        NOTHING,
        [
            Run("cluster create NEW --workers 1"),
            Never("a name that another cluster has is refused"),
            REFUSED,
            Run("cluster create nowhere --kubernetes-bundle nothing"),
        ],
    ),
    order(
        "cluster scale",
        &[CLUSTER],
        [
            Run("cluster scale CLUSTER --workers 3"),
            Run("cluster scale CLUSTER --workers 3"),
            REFUSED,
            Run("cluster scale nowhere --workers 3"),
        ],
    ),
    order(
        "cluster declare",
        &[CLUSTER],
        [
            Run("cluster declare CLUSTER HOME/role.toml"),
            Run("cluster declare CLUSTER HOME/role.toml"),
            REFUSED,
            Run("cluster declare nowhere HOME/role.toml"),
        ],
    ),
    order(
        "cluster roles",
        &[CLUSTER],
        [
            Run("cluster declare CLUSTER HOME/role.toml; cluster roles CLUSTER --add-role front"),
            Run("cluster roles CLUSTER --add-role front"),
            REFUSED,
            Run("cluster roles nowhere --add-role front"),
        ],
    ),
    order(
        "cluster undeclare",
        &[CLUSTER],
        [
            Run("cluster declare CLUSTER HOME/role.toml; cluster undeclare CLUSTER front"),
            Run("cluster undeclare CLUSTER front"),
            REFUSED,
            Run("cluster undeclare nowhere front"),
        ],
    ),
    order(
        "cluster approve",
        &[CLUSTER, MEMBER, REPORT],
        [
            Run("cluster approve CLUSTER MACHINE"),
            Run("cluster approve CLUSTER MACHINE"),
            Run("cluster approve ams MEMBER"),
            Run("cluster approve CLUSTER nobody"),
        ],
    ),
    order(
        "cluster snapshot",
        &[CLUSTER],
        [Run("cluster snapshot CLUSTER"), ANOTHER, REFUSED, Run("cluster snapshot nowhere")],
    ),
    order(
        "cluster rotate-key",
        &[CLUSTER],
        [
            Run("cluster rotate-key CLUSTER"),
            Run("cluster rotate-key CLUSTER"),
            REFUSED,
            Run("cluster rotate-key nowhere"),
        ],
    ),
    order(
        "cluster rotate-secrets-key",
        &[CLUSTER, SECRETS],
        [
            Run("cluster rotate-secrets-key CLUSTER"),
            Run("cluster rotate-secrets-key CLUSTER"),
            REFUSED,
            Run("cluster rotate-secrets-key nowhere"),
        ],
    ),
    order(
        "cluster renew-peers",
        &[CLUSTER, SILENT, SNAPSHOT, MEMBER, REPORT],
        [
            Run("cluster renew-peers CLUSTER"),
            Run("cluster renew-peers CLUSTER"),
            REFUSED,
            Run("cluster renew-peers nowhere"),
        ],
    ),
    order(
        "cluster rotate-authority",
        &[CLUSTER],
        [
            Run("cluster rotate-authority CLUSTER"),
            Never("while one is replaced, another order is refused"),
            REFUSED,
            Run("cluster rotate-authority nowhere"),
        ],
    ),
    order(
        "cluster restore",
        &[CLUSTER, SNAPSHOT],
        [
            Run("cluster restore CLUSTER --bypass-quorum --yes"),
            Run("cluster restore CLUSTER --bypass-quorum --yes"),
            REFUSED,
            Run("cluster restore nowhere --yes"),
        ],
    ),
    order(
        "cluster delete",
        &[CLUSTER],
        [
            Run("cluster delete CLUSTER --yes"),
            Run("cluster delete CLUSTER --yes"),
            ALWAYS,
            Run("cluster delete nowhere --yes"),
        ],
    ),
    order(
        "cluster credentials issue",
        &[CLUSTER],
        [
            Elsewhere("cluster credentials issue CLUSTER --output-dir FRESH", SIGNED.0, SIGNED.1),
            ANOTHER,
            REFUSED,
            Run("cluster credentials issue nowhere --output-dir FRESH"),
        ],
    ),
    order(
        "cluster credentials revoke",
        &[CLUSTER, CERTIFICATE],
        [
            Run("cluster credentials revoke CLUSTER MACHINE"),
            Run("cluster credentials revoke CLUSTER MACHINE"),
            REFUSED,
            Run("cluster credentials revoke CLUSTER 0199d0a2-4f5e-7cc1-9d52-5b1f0a1c2d3e"),
        ],
    ),
    order(
        "cluster kubernetes set",
        &[CLUSTER, KUBERNETES],
        [
            Run("cluster kubernetes set CLUSTER --remove-storage"),
            Run("cluster kubernetes set CLUSTER --remove-storage"),
            REFUSED,
            Run("cluster kubernetes set CLUSTER --add-on dns=nothing"),
        ],
    ),
    order(
        "cluster kubernetes rotate",
        &[CLUSTER, KUBERNETES],
        [
            Run("cluster kubernetes rotate CLUSTER --keys clients"),
            Run("cluster kubernetes rotate CLUSTER --keys clients"),
            REFUSED,
            Run("cluster kubernetes rotate nowhere --keys clients"),
        ],
    ),
    order(
        "cluster kubernetes remove",
        &[CLUSTER, KUBERNETES],
        [
            Run("cluster kubernetes remove CLUSTER --yes"),
            Run("cluster kubernetes remove CLUSTER --yes"),
            REFUSED,
            Run("cluster kubernetes remove nowhere --yes"),
        ],
    ),
    order(
        "cluster kubeconfig",
        &[CLUSTER, KUBERNETES],
        [
            Elsewhere("cluster kubeconfig CLUSTER --output-file FRESH", SIGNED.0, SIGNED.1),
            ANOTHER,
            REFUSED,
            Run("cluster kubeconfig nowhere --output-file FRESH"),
        ],
    ),
    order(
        "cluster upgrade",
        &[CLUSTER, KUBERNETES],
        [
            Run("cluster upgrade CLUSTER --kubernetes-bundle newer"),
            Run("cluster upgrade CLUSTER --resume"),
            Run("cluster upgrade CLUSTER --abort; cluster upgrade CLUSTER --pause"),
            Run("cluster upgrade nowhere --abort"),
        ],
    ),
    // Reads.
    read("get machines", "get machines MACHINE", Run("get machines nobody")),
    read("get clusters", "get clusters ams", Run("get clusters nowhere")),
    read("get shepherds", "get shepherds", Run("get shepherds nobody")),
    read("get sessions", "get sessions", Run("get sessions nobody")),
    read("get work", "get work", Run("get work nobody")),
    read("get providers", "get providers", Run("get providers nobody")),
    read("get loops", "get loops recoverer", Run("get loops nobody")),
    read("get budgets", "get budgets reboot", Run("get budgets nothing")),
    read("get brakes", "get brakes recovery", Run("get brakes nothing")),
    read("get approvals", "get approvals", Run("get approvals nobody")),
    read("get issues", "get issues", Run("get issues nothing")),
    read("get tokens", "get tokens admin's", Run("get tokens nobody")),
    read("get artefacts", "get artefacts one", Run("get artefacts nothing")),
    read("get updates", "get updates u1", Run("get updates nothing")),
    read("get policy", "get policy", Never("the fleet has one policy")),
    read("get audit", "get audit", Run("get audit nobody")),
    read("describe machine", "describe machine MACHINE", Run("describe machine nobody")),
    read("describe cluster", "describe cluster ams", Run("describe cluster nowhere")),
    read("describe loop", "describe loop recoverer", Run("describe loop nobody")),
    read("describe budget", "describe budget reboot", Run("describe budget nothing")),
    read("describe brake", "describe brake recovery", Run("describe brake nothing")),
    read("describe issue", "describe issue work-fails", Run("describe issue nothing")),
    read("describe token", "describe token admin's", Run("describe token nobody")),
    read("describe artefact", "describe artefact one", Run("describe artefact nothing")),
    read("describe update", "describe update u1", Run("describe update nothing")),
    read("describe policy", "describe policy", Run("describe policy nobody")),
    page("describe shepherd", "describe shepherd nobody"),
    page("describe session", "describe session nobody"),
    page("describe work", "describe work nobody"),
    page("describe provider", "describe provider nobody"),
    page("describe approval", "describe approval nobody"),
    page("describe audit", "describe audit nobody"),
    read("why", "why MACHINE", Run("why nobody")),
    read("timeline", "timeline MACHINE", Run("timeline nobody")),
    read("plan", "plan --machine MACHINE", Run("plan --machine nobody")),
    read("issues", "issues", Never("it names nothing")),
    read("audit", "audit", Run("audit --machine nobody")),
    read("top", "top --once", Never("it names nothing")),
    waiting("wait machines", "wait machines nobody --for phase=Ready", "machines_are_waited_for"),
    waiting("wait clusters", "wait clusters nowhere --for ready", "clusters_are_waited_for"),
    waiting("wait updates", "wait updates nothing --for finished", "updates_are_waited_for"),
    read("whoami", "whoami", Never("it names nothing")),
    read("version", "version", Never("it names nothing")),
    read(
        "debug bundle",
        "debug bundle --output-file FRESH",
        Never("what cannot be collected is named in the bundle"),
    ),
    Row {
        done: Never("it ends by a signal, with its reader, or with an error"),
        ..read("watch", "watch", Never("filters may select nothing yet"))
    },
    read("cluster get", "cluster get ams", Run("cluster get nowhere")),
    read("cluster describe", "cluster describe ams", Run("cluster describe nowhere")),
    read("cluster plan", "cluster plan ams", Run("cluster plan nowhere")),
    read("cluster snapshots", "cluster snapshots ams", Run("cluster snapshots nowhere")),
    read("cluster credentials get", "cluster credentials get ams", Run("cluster credentials get nowhere")),
    // Commands about this user's files.
    local("contexts", Run("contexts"), Never("it changes nothing"), Never("it names nothing")),
    local(
        "contexts use",
        Run("contexts use spare; contexts use home"),
        Run("contexts use home"),
        Run("contexts use nowhere"),
    ),
    local(
        "contexts delete",
        Run("contexts delete spare"),
        Never("a context that was deleted is unknown"),
        Run("contexts delete nowhere"),
    ),
    local("get contexts", Run("get contexts home"), Never("it changes nothing"), Run("get contexts nowhere")),
    local(
        "describe context",
        Run("describe context home"),
        Never("it changes nothing"),
        Run("describe context nowhere"),
    ),
    local("explain", Run("explain Ready"), Never("it changes nothing"), Run("explain nothing-of-the-kind")),
    local("options", Run("options"), Never("it changes nothing"), Never("it names nothing")),
    local("completions", Run("completions bash"), Never("it changes nothing"), Never("it names nothing")),
    local("manual", Run("manual FRESH"), Never("it writes its pages again"), Never("it names nothing")),
    // Commands about the database itself.
    database("tokens bootstrap", Run("tokens bootstrap --name NEW"), ANOTHER),
    database(
        "policy disable-two-person-rule",
        Elsewhere(
            "policy disable-two-person-rule",
            "tests/all/api/two_person_rule.rs",
            "rule_ends_at_the_database_alone_and_is_shown_for_a_month",
        ),
        Run("policy disable-two-person-rule"),
    ),
    database(
        "declare restored",
        Elsewhere(
            "declare restored --yes",
            "tests/all/cli/input.rs",
            "restored_database_is_declared_by_its_name",
        ),
        ANOTHER,
    ),
];
