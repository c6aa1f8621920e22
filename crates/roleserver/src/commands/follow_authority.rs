//! `roleserver authority` and `roleserver follow-authority`: another authority of the cluster, by a person at the machine.
//!
//! After a theft of the authority's key, the new authority reaches a node by an order of its shepherd. A node without a
//! shepherd gets it from a person, who reads it on a machine that has followed, and compares it: it is all that the
//! node trusts from then on. The role server that runs carries it out within seconds, or else the next one.

use std::path::Path;

use curator_client::pki::TrustAnchor;
use model::cluster::authority_theft::AuthorityStep;

use crate::cluster::files::{ClusterFiles, NextAuthority};
use crate::commands::CommandError;
use crate::endpoint::{Endpoint, EndpointError};
use crate::state_directory::StateDirectory;

/// The certificate of the authority that the node of this machine trusts, in hexadecimal digits.
pub fn render_authority(state_directory: &Path) -> Result<String, CommandError> {
    Ok(format!("{}\n", read_authority(&open_files(state_directory)?)?))
}

/// Lets the node of this machine trust another authority of its cluster, its certificate in hexadecimal digits. The curators
/// are `HOST:PORT`, with an IPv6 address in brackets. Returns what the command prints.
pub fn follow_authority(
    state_directory: &Path,
    certificate: &str,
    curators: &[String],
) -> Result<String, CommandError> {
    let files = open_files(state_directory)?;
    let usage = |reason: &str| {
        CommandError::Usage(format!(
            "{reason}: give the digits that `roleserver authority` prints on a machine of the cluster that has followed"
        ))
    };
    for curator in curators {
        // The role server that runs would only fail to connect, without anybody who reads why.
        let parsed: Result<Endpoint, EndpointError> = curator.parse();
        parsed.map_err(|error| CommandError::Usage(format!("--curator {error}")))?;
    }
    let certificate = certificate.trim().to_lowercase();
    let der = hex::decode(&certificate).map_err(|_| usage("the certificate is no hexadecimal text"))?;
    let next = TrustAnchor::parse(&der).map_err(|error| usage(&error.to_string()))?;
    let present = read_authority(&files)?;
    let trusted = hex::decode(&present).ok().and_then(|der| TrustAnchor::parse(&der).ok());
    if trusted.is_some_and(|trusted| trusted.cluster != next.cluster) {
        return Err(usage("it is the authority of another cluster than that of this machine"));
    }
    if present == certificate {
        return Ok("this node trusts that authority already\n".to_owned());
    }
    if files.read_membership().map_err(CommandError::from_error)?.is_some() {
        return Err(CommandError::Failed(
            "this machine runs a member of etcd, which has to take other steps with the other members: its shepherd orders \
             them with `shepherdctl cluster rotate-authority NAME --compromised`"
                .to_owned(),
        ));
    }
    let next = NextAuthority {
        step: AuthorityStep::Follow,
        ca_certificate: certificate,
        private_key: None,
        owner_keys: Vec::new(),
        epoch: 0,
        curators: curators.to_vec(),
        statement: None,
    };
    files.write_next_authority(&next).map_err(CommandError::from_error)?;
    Ok("this node trusts that authority alone once its role server has read it, within seconds if it runs\n"
        .to_owned())
}

/// The files of the node. A directory that other users can change is refused: they could have put any authority there.
fn open_files(state_directory: &Path) -> Result<ClusterFiles, CommandError> {
    let state = StateDirectory::open_existing(state_directory).map_err(CommandError::from_error)?;
    Ok(ClusterFiles::in_state_directory(state.path()))
}

fn read_authority(files: &ClusterFiles) -> Result<String, CommandError> {
    let credentials = files.read_credentials().map_err(CommandError::from_error)?;
    let credentials = credentials.ok_or_else(|| {
        CommandError::Failed("this machine is no node of a cluster, so it trusts no authority".to_owned())
    })?;
    Ok(credentials.ca_certificate)
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{authority, authority_of};

    use super::*;
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::membership;

    #[test]
    fn curator_that_is_no_endpoint_is_refused_before_anything_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        let digits = |key| hex::encode(&authority_of(1, key).anchor().certificate);
        files
            .write_credentials(&Credentials { certificate: String::new(), ca_certificate: digits(1) })
            .unwrap();
        let follow = |curator: &str| follow_authority(directory.path(), &digits(5), &[curator.to_owned()]);
        for (curator, reason) in [
            ("2001:db8::9:7835", "an IPv6 address needs brackets"),
            ("[2001:db8::9]", "it names no port"),
            ("10.0.0.9", "it names no port"),
            ("https://10.0.0.9:7835", "an IPv6 address needs brackets"),
        ] {
            let error = follow(curator).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("--curator"), "{curator}: {error}");
            assert_eq!(files.read_next_authority().unwrap(), None);
        }
        follow("[2001:db8::9]:7835").unwrap();
        let next = files.read_next_authority().unwrap().unwrap();
        assert_eq!(next.curators, ["[2001:db8::9]:7835"]);
    }

    #[test]
    fn machine_without_a_state_directory_is_no_node_and_gets_none() {
        let directory = tempfile::tempdir().unwrap();
        let absent = directory.path().join("absent");
        for error in [
            render_authority(&absent).unwrap_err(),
            follow_authority(&absent, &hex::encode(&authority_of(1, 5).anchor().certificate), &[])
                .unwrap_err(),
        ] {
            assert!(error.to_string().contains("is no node"), "{error}");
        }
        assert!(!absent.exists());
    }

    #[test]
    fn node_without_a_shepherd_gets_another_authority_of_its_cluster_from_a_person() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        let digits = |key| hex::encode(&authority_of(1, key).anchor().certificate);
        let follow = |text: &str| follow_authority(directory.path(), text, &["10.0.0.9:7835".to_owned()]);
        assert!(follow(&digits(5)).unwrap_err().to_string().contains("is no node"));
        files
            .write_credentials(&Credentials { certificate: String::new(), ca_certificate: digits(1) })
            .unwrap();
        assert_eq!(render_authority(directory.path()).unwrap(), format!("{}\n", digits(1)));
        let elsewhere = hex::encode(&authority(2).anchor().certificate);
        for (text, reason) in [
            ("xyz", "no hexadecimal text"),
            ("abcd", "roleserver authority"),
            (elsewhere.as_str(), "another cluster"),
        ] {
            let error = follow(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        assert!(follow(&digits(1)).unwrap().contains("already"));
        assert_eq!(files.read_next_authority().unwrap(), None);

        let membership = membership();
        files.write_membership(&membership).unwrap();
        assert!(follow(&digits(5)).unwrap_err().to_string().contains("--compromised"));
        assert_eq!(files.read_next_authority().unwrap(), None);
        files.remove_membership(&membership).unwrap();

        follow(&format!(" {}\n", digits(5).to_uppercase())).unwrap();
        let next = files.read_next_authority().unwrap().unwrap();
        assert_eq!(
            (next.step, next.anchor().as_ref()),
            (AuthorityStep::Follow, Some(authority_of(1, 5).anchor()))
        );
        assert_eq!(next.curators, ["10.0.0.9:7835"]);
    }
}
