//! The program on the machine.
//!
//! A shepherd enrols a machine once per takeover (over SSH, `roleserver
//! enroll`), and from then on the machine calls: a heartbeat each interval, for
//! as long as it lives. Nothing connects *to* a role server.
//!
//! # How the files fit
//!
//! * [`enrolment`][]: which requests to belong to a shepherd are accepted. Pure,
//!   so that a simulated machine refuses exactly what a real one refuses.
//! * [`conversation`][]: what the next heartbeat says. Pure.
//! * [`endpoint`][], [`trust`][]: what a callback server's address and authority are.
//! * [`clock`][]: the boot and the time since it.
//! * [`known_time`][]: what time it is, as a shepherd said; [`server_verifier`][]: judging a
//!   certificate by it.
//! * [`backoff`][]: how long to wait when nobody answers. Pure.
//! * [`connection`][]: one TLS 1.3 connection to one callback server.
//! * [`agent`][]: the loop that puts these together.
//! * [`hardware`][]: what the machine is made of.
//! * [`state_directory`][]: what survives a restart, and the locks on it.
//! * [`durable`][]: files that are replaced, never rewritten.
//! * [`running`][]: processes recorded by pid *and* start time.
//! * [`child`][]: programs that it runs beside itself, and that outlive it.
//! * [`cluster`][]: its part in a cluster: etcd, the curator, what a curator says and is told.
//! * [`logs`][]: bringing logs to whoever asks a shepherd for them.
//! * [`supervise`][]: the process that starts the agent again.
//! * [`supervision`][]: choosing and driving what keeps the agent alive, or
//!   [`systemd`][].
//! * [`told`][]: the sockets on which a running one says what it does. [`metrics`][]: what it counts.
//! * [`commands`][]: the verbs of the `roleserver` program.
//!
//! # What would break otherwise
//!
//! The loop takes its clock, its hardware and its identity as values, because
//! the simulator runs thousands of them in one process. Everything that touches
//! the host is in the last ten of these; of those the simulator uses [`logs`] alone.

pub mod agent;
pub mod backoff;
pub mod child;
pub mod clock;
pub mod cluster;
pub mod commands;
pub mod connection;
pub mod conversation;
pub mod durable;
pub mod endpoint;
pub mod enrolment;
pub mod hardware;
pub mod known_time;
pub mod logs;
pub mod metrics;
pub mod mountinfo;
pub mod running;
pub mod server_verifier;
pub mod shepherds;
pub mod state_directory;
pub mod supervise;
pub mod supervision;
pub mod systemd;
pub mod told;
pub mod trust;
pub mod update;
