//! The bare metal database: the only room that speaks SQL.

pub mod postgres_programs;
pub mod private_postgres;
mod private_postgres_directory;
