//! Generated gRPC contracts, one module per package of `proto/`, and the codec that decodes them.
//!
//! The contracts are the `.proto` files in the folder `proto/` of the repository, with their documentation. `build.rs`
//! compiles them to Rust. Only [`codec`][] is written by hand. This crate imports no other crate of the workspace, so
//! every crate may import it.
//!
//! # How it works
//!
//! * Our own contracts use [`codec::BoundedCodec`][], which limits the number of fields of a message. etcd's contract
//!   uses the default codec: etcd is trusted with all data of a cluster.
//! * A feature per contract selects what a program links: `curator`, `etcd`, `fleet`, and `descriptors` for the
//!   descriptors of `fleet`. The contracts of agents and hardware are always there. There are no default features;
//!   `Cargo.toml` says why.
//!
//! # Invariants
//!
//! * Names of packages, services and methods do not change, nor do the numbers of fields. Programs of two releases talk
//!   to each other during an update, and records that are stored in etcd have the same encoding.
//! * Equal messages have equal encodings where their bytes are compared: maps of such messages are `BTreeMap` (the list
//!   is in `build.rs`).
//!
//! # Notes for the next implementor
//!
//! * A new file goes into `INTERNAL_CONTRACTS` or `PUBLIC_CONTRACTS` of `build.rs`, unless a file that is listed there
//!   imports it. A public one appears in reflection and in the JSON API.
//! * Name requests `…Request` and responses `…Response`: the codec distinguishes them by that.
//! * A message with a map needs an entry in `build.rs` if its bytes are stored, compared or hashed.

pub mod codec;

/// `shepherd.agent.v1`: enrolment and callback.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation is in the .proto files"
)]
pub mod agent {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.agent.v1");
    }
}

/// `shepherd.curator.v1`: calls of a cluster's nodes and owners to its curators.
#[cfg(feature = "curator")]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation is in the .proto files"
)]
pub mod curator {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.curator.v1");
    }
}

/// The part of etcd's v3 API that the crate `etcd` uses.
#[cfg(feature = "etcd")]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation is in the .proto files"
)]
pub mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}

/// `shepherd.fleet.v1`: queries and orders of operators.
#[cfg(feature = "fleet")]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation is in the .proto files"
)]
pub mod fleet {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.fleet.v1");
    }

    /// Descriptors of these services and messages with their comments, as a `FileDescriptorSet`.
    #[cfg(feature = "descriptors")]
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fleet_descriptors.bin"));
}

/// `shepherd.hardware.v1`: hardware of a machine.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation is in the .proto files"
)]
pub mod hardware {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.hardware.v1");
    }
}
