//! The program on the machine.

fn main() {}
