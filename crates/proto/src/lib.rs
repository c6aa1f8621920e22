//! Generated gRPC contracts, one module per package of `proto/`.
//!
//! Every other crate may import this one. Only [`codec`] is written by hand. A feature per contract selects what a
//! program links: `curator`, `etcd`, `fleet`, and `descriptors` for the descriptors of `fleet`. The agent's contract is
//! always there.

pub mod codec;

/// `shepherd.agent.v1`: enrolment and callback.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation stands in the .proto files"
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
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod curator {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.curator.v1");
    }
}

/// The part of etcd's v3 API that the curator uses.
#[cfg(feature = "etcd")]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation stands in the .proto files"
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
    reason = "generated; the documentation stands in the .proto files"
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
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod hardware {
    /// First version of the package.
    pub mod v1 {
        tonic::include_proto!("shepherd.hardware.v1");
    }
}
