//! A role as clients declare it and curators send it.

use proto::curator::v1 as wire;

/// The role `web` as a client declares it: one service that runs a program in the root file system of an archive, as this
/// user. The digest of the archive is lower-case hexadecimal.
#[must_use]
pub fn web_role(archive: &str, user: &str) -> wire::Declaration {
    let run = wire::RootFilesystem { archive: archive.to_owned(), program: "/bin/server".to_owned() };
    let service = wire::Service {
        name: "server".to_owned(),
        run: Some(wire::service::Run::RootFilesystem(run)),
        user: user.to_owned(),
        ..wire::Service::default()
    };
    wire::Declaration { role: "web".to_owned(), services: vec![service], ..wire::Declaration::default() }
}
