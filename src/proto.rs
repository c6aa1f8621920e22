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
