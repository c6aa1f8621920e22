//! Generated gRPC contracts, one module per package of `proto/`.
//!
//! Open to every room. Only [`codec`] is written by hand.

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
    /// First version.
    pub mod v1 {
        tonic::include_proto!("shepherd.agent.v1");
    }
}

/// `shepherd.curator.v1`: how the nodes of a cluster, and its owners, speak to its curator.
#[cfg(any(feature = "roleserver", feature = "shepherdctl"))]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod curator {
    /// First version.
    pub mod v1 {
        tonic::include_proto!("shepherd.curator.v1");
    }
}

/// The part of etcd's v3 API that the curator uses.
#[cfg(feature = "roleserver")]
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

/// `shepherd.fleet.v1`: what operators ask and order.
#[cfg(any(feature = "shepherd", feature = "shepherdctl"))]
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod fleet {
    /// First version.
    pub mod v1 {
        tonic::include_proto!("shepherd.fleet.v1");
    }

    /// The services above with their messages and comments, as a `FileDescriptorSet`.
    #[cfg(feature = "shepherd")]
    pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fleet_descriptors.bin"));
}

/// `shepherd.hardware.v1`: what a machine is made of.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    unreachable_pub,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod hardware {
    /// First version.
    pub mod v1 {
        tonic::include_proto!("shepherd.hardware.v1");
    }
}
