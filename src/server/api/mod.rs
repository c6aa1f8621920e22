//! The fleet API: what operators ask and order, over gRPC and as JSON.
//!
//! # How a call comes in
//!
//! [`listener`] takes TLS connections, with or without a client certificate. A call by gRPC goes to the
//! service its path names; one as JSON is turned into the same call by [`transcode`], from the contracts'
//! descriptors, and its answer is turned back. Either passes the same [`door`]: whose credential it is, and
//! whether the one table of [`access`] lets them. There is no other way to a service.
//!
//! * [`machines`], [`fleet`], [`credentials`], [`audits`]: the services. They read through
//!   [`Looks`](crate::bmdb::look::Looks), a capped pool of their own, and order through
//!   [`Bmdb::order_machine`](crate::bmdb::connection::Bmdb::order_machine), which writes the audit.
//! * [`outlook`], [`describe`]: what is computed of all machines, told in pieces by [`whole`]; and all of one.
//! * [`watch`]: streams, which end with the credential they were opened with; [`farewell`] and [`watches`]: how
//!   they end, and how many there may be.
//! * [`openapi`]: the same descriptors as an OpenAPI document.
//! * [`texts`], [`pages`]: what a request may say, before anything is done with it.
//! * [`refusal`]: errors as sentences, with the standard details of gRPC.
//!
//! # What a caller can do to us
//!
//! Nothing is decided here that the engine does not decide for itself. A caller costs a connection of a
//! bounded number, calls of a bounded rate, watches of a bounded number, and looks at the database of a
//! bounded length; a list is a page, and a page looks at a bounded number of machines. What looks at all of
//! them is done for a bounded number of callers at once. Whoever has no
//! credential is refused by the headers of his call, and nothing more of it is read.

pub mod access;
pub mod approvals;
pub mod artefacts;
pub mod audits;
pub mod budgets;
pub mod cluster_credentials;
pub mod cluster_kubernetes;
pub mod clusters;
pub mod convert;
pub mod credentials;
pub mod describe;
pub mod door;
pub mod farewell;
pub mod fleet;
pub mod listener;
pub mod logs;
pub mod loops;
pub mod machines;
pub mod many;
pub mod openapi;
pub mod orders;
pub mod outlook;
pub mod pages;
pub mod refusal;
pub mod retiring;
pub mod server;
pub mod site;
pub mod switching;
pub mod texts;
pub mod transcode;
pub mod updates;
pub mod watch;
pub mod watches;
pub mod whole;
