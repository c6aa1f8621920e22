//! Command-line client `shepherdctl` of the fleet API.
//!
//! Operators read the fleet with it and give orders. It decides nothing about machines: it calls the services of
//! `crates/server`, and prints what they return. It needs a server of a context, or only the database (`--direct`, or
//! `--bmdb-url` without a context). Then the same services run in its own process, also while no shepherd does.
//!
//! # How a command runs
//!
//! 1. [`run`][] parses the command line with the grammar in [`command`][].
//! 2. [`client::backend`][] chooses the API of a context, or the services in this process.
//! 3. [`dispatch`][] calls the function of the verb with the [`context`][]: the client, the output format, and the flags
//!    of orders. The verb does not know which of the two APIs the client calls.
//! 4. A verb that reads fetches messages. Their JSON is that of the API ([`object::document`][]). For people it decodes
//!    them into plain types, and pure functions turn those into text ([`output`][]). A verb that changes something sends
//!    an order ([`order`][]).
//! 5. [`run`][] prints the result. An error goes to standard error. The exit code follows from the outcomes of the
//!    orders, or from the error ([`exit_code`][]).
//!
//! # Modules
//!
//! There is a module per noun and a file per verb, or per few verbs that belong together. A noun with few verbs is one
//! file. A file has the arguments of its verbs, the examples of their help, and the code that runs them.
//!
//! * Every kind of objects, by one table: [`object`][].
//! * Machines: [`machine`][]. Clusters: [`cluster`][].
//! * What shepherds do: [`loops`][], [`plan`][], [`work`][], [`shepherds`][], [`sessions`][], [`providers`][], [`budgets`][] (with
//!   brakes), [`policy`][]. What needs attention: [`issues`][], [`top`][].
//! * Until an object meets a condition: [`wait`][].
//! * Files for machines: [`artefacts`][]. Releases of the role server: [`update`][].
//! * Operators: [`tokens`][], [`approvals`][] (two-person rule), [`audit`][], [`contexts`][],
//!   [`whoami`][], [`version`][].
//! * What an issue, a phase or a term means: [`explain`][].
//! * Emergencies: [`debug`][], [`declare_restored`][].
//! * Below the nouns: [`routine`][] (folded lines), [`one_of`][] (values of arguments), [`order`][], [`context`][],
//!   [`target_flags`][] (of commands in messages), [`client`][], [`output`][], [`error`][], [`exit_code`][].
//!   Above them: [`run`][], [`dispatch`][], [`command`][], [`completions`][], [`manual`][], [`suggestions`][].
//!
//! # Invariants
//!
//! * Every command about a fleet but three goes through the API. `declare restored`, `tokens bootstrap` and `policy
//!   disable-two-person-rule` write to the database, because they exist for the time when no API can be used or no call
//!   may do it ([`client::fleet_client::FleetClient::require_bmdb`][]).
//! * An order is sent with one idempotency key, however often it is repeated ([`order::retry`][]). When the outcome
//!   stays unknown, the error contains the key.
//! * What `get`, `timeline` and `plan` print as JSON is the JSON of the API ([`object::document`][]). In the JSON of other
//!   commands, fields are added and never renamed. Tables are for people.
//! * A token is printed once, or written into a file that only its owner can read. Private keys for clusters are made
//!   on this host, and only their public halves are sent.
//! * Imports go one way: from [`run`][] over the verbs to [`exit_code`][]. One pair of files imports each other:
//!   [`debug::bundle`][] runs other commands by [`dispatch`][].
//!
//! # Notes for the next implementor
//!
//! * A new kind of objects is a row of a table: see [`object`][].
//! * A new verb is a variant in the enum of its noun or in [`command`][], a function in the file of the verb, and an
//!   arm in [`dispatch`][] or in the noun's own dispatch (such as [`cluster::command`][]).
//!   `tests/all/api/same_answers.rs` lists every command, and fails until the new one is there.
//! * The doc comments of types and fields that clap parses are the help. Golden files in `tests/all/golden` have it.
//! * The name of a type that derives `Args` is the name of its group of flags:
//!   [`machine::order_targets::SELECTORS`][] has such a name.
//! * For the grammar, a command with a `--reason` is an order: it gets `--idempotency-key` and `--dry-run`, unless
//!   [`order::idempotency_key`][] or [`order::dry_run`][] excludes it.

pub mod approvals;
pub mod artefacts;
pub mod audit;
pub mod budgets;
pub mod client;
pub mod cluster;
pub mod command;
pub mod completions;
pub mod context;
pub mod contexts;
pub mod debug;
pub mod declare_restored;
pub mod dispatch;
pub mod error;
pub mod exit_code;
pub mod explain;
pub mod issues;
pub mod loops;
pub mod machine;
pub mod manual;
pub mod object;
pub mod one_of;
pub mod order;
pub mod output;
pub mod plan;
pub mod policy;
pub mod providers;
pub mod routine;
pub mod run;
pub mod selector_hint;
pub mod sessions;
pub mod shepherds;
pub mod suggestions;
pub mod target_flags;
pub mod tokens;
pub mod top;
pub mod update;
pub mod version;
pub mod wait;
pub mod whoami;
pub mod work;
