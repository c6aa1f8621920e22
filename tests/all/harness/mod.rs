//! What the tests stand on.

pub(crate) mod callback;
pub(crate) mod fleet;
pub(crate) mod mode;
pub(crate) mod postgres;
pub(crate) mod program;
pub(crate) mod source;
