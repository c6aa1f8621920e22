//! The service.

fn main() {}
