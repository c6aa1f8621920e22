//! Owner keys: a key is added beside another one, and a removed key stays rejected for ever.

use anyhow::Result;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::tickets_client::TicketsClient;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use testkit::aloud::TestResult;
use testkit::curators::{AN_HOUR_MS, Cluster, ClusterOptions, refusal};
use testkit::etcd_servers::in_time;
use testkit::key_holder::Holder;

const CLAIM: wire::ClaimOwnerRequest = wire::ClaimOwnerRequest { lifetime_ms: AN_HOUR_MS };

async fn claim(
    cluster: &Cluster,
    number: usize,
    owner: &Holder,
) -> Result<Result<Response<wire::IssueOwnerResponse>, Status>> {
    let channel = cluster.channel(number, Some(owner.itself()?))?;
    Ok(CredentialsClient::new(channel).claim_owner(CLAIM).await)
}

async fn claimed(cluster: &Cluster, number: usize, owner: &Holder) -> Result<Channel> {
    let certificate = claim(cluster, number, owner).await??.into_inner().certificate;
    cluster.channel(number, Some(owner.with(&certificate)?))
}

fn add(owner: &Holder) -> wire::AddOwnerKeyRequest {
    wire::AddOwnerKeyRequest { public_key: owner.key.0.to_vec() }
}

fn remove(owner: &Holder) -> wire::RemoveOwnerKeyRequest {
    wire::RemoveOwnerKeyRequest { public_key: owner.key.0.to_vec() }
}

#[tokio::test]
async fn key_that_was_replaced_claims_nothing_and_its_certificates_open_nothing() -> TestResult {
    let cluster = Cluster::start().await?;
    let (old, new) = (&cluster.owner, Holder::new()?);
    let by_old = claimed(&cluster, 0, old).await?;
    let (code, text) = refusal(claim(&cluster, 0, &new).await?)?;
    assert_eq!((code, text.contains("not that of an owner")), (Code::PermissionDenied, true), "{text}");

    // The new key is added beside the old one, in the leadership that began with the old one alone.
    let mut credentials = CredentialsClient::new(by_old.clone());
    for _ in 0..2 {
        credentials.add_owner_key(add(&new)).await?;
    }
    let by_new = claimed(&cluster, 0, &new).await?;
    claimed(&cluster, 0, old).await?;

    // No key is removed before another one is known to work, and the last one never.
    let (code, text) = refusal(credentials.remove_owner_key(remove(old)).await)?;
    assert_eq!(
        (code, text.contains("the one that this call was made with")),
        (Code::FailedPrecondition, true),
        "{text}"
    );
    claimed(&cluster, 0, old).await?;

    // A stream that depends on the old key is cut, and no call with that key succeeds.
    let mut open = proto::curator::v1::nodes_client::NodesClient::new(by_old.clone())
        .watch_all(wire::WatchAllRequest {})
        .await?
        .into_inner();
    open.message().await?;
    let mut credentials = CredentialsClient::new(by_new.clone());
    for _ in 0..2 {
        credentials.remove_owner_key(remove(old)).await?;
    }
    let cut = in_time("the end of what was open", async {
        loop {
            match open.message().await {
                Ok(Some(_)) => {}
                ended => break ended,
            }
        }
    });
    assert_eq!(cut.await?.map_err(|status| status.code()), Err(Code::Unauthenticated));
    let (code, text) = refusal(claim(&cluster, 0, old).await?)?;
    assert_eq!((code, text.contains("not that of an owner")), (Code::PermissionDenied, true), "{text}");
    let mut tickets = TicketsClient::new(by_old.clone());
    let (code, text) = refusal(tickets.list(wire::ListTicketsRequest {}).await)?;
    assert_eq!((code, text.contains("was removed")), (Code::Unauthenticated, true), "{text}");

    // It cannot come back, as a key or by a certificate that another owner passes on.
    let (code, text) = refusal(credentials.add_owner_key(add(old)).await)?;
    assert_eq!((code, text.contains("cannot be added again")), (Code::FailedPrecondition, true), "{text}");
    let handed_on = wire::IssueOwnerRequest {
        public_key: old.key.0.to_vec(),
        name: "kim".to_owned(),
        lifetime_ms: AN_HOUR_MS,
    };
    assert_eq!(refusal(credentials.issue_owner(handed_on).await)?.0, Code::FailedPrecondition);
    let listed = credentials.list(wire::ListCredentialsRequest {}).await?.into_inner().credentials;
    let of =
        |owner: &Holder| listed.iter().filter(move |kept| kept.public_key == owner.key.0).collect::<Vec<_>>();
    assert!(of(old).len() == 3 && of(old).iter().all(|kept| kept.revoked), "{:?}", of(old));
    assert!(of(&new).len() == 1 && !of(&new)[0].revoked, "{:?}", of(&new));

    // A person has a certificate and no key: a cluster without a key could get no more orders.
    let kim = Holder::new()?;
    let issued = wire::IssueOwnerRequest {
        public_key: kim.key.0.to_vec(),
        name: "kim".to_owned(),
        lifetime_ms: AN_HOUR_MS,
    };
    let issued = credentials.issue_owner(issued).await?.into_inner();
    let mut by_kim = CredentialsClient::new(cluster.channel(0, Some(kim.with(&issued.certificate)?))?);
    let (code, text) = refusal(by_kim.remove_owner_key(remove(&new)).await)?;
    assert_eq!((code, text.contains("the last owner key")), (Code::FailedPrecondition, true), "{text}");
    for odd in [vec![], vec![7; 31]] {
        let request = wire::AddOwnerKeyRequest { public_key: odd };
        assert_eq!(refusal(credentials.add_owner_key(request).await)?.0, Code::InvalidArgument);
    }
    Ok(())
}

/// The next leader knows which keys were removed, and which were added.
#[tokio::test]
async fn next_leader_knows_whose_keys_they_are() -> TestResult {
    let mut cluster = Cluster::start_with(ClusterOptions { size: 2, ..ClusterOptions::default() }).await?;
    let leads = cluster.until_one_leads(None).await?;
    let new = Holder::new()?;
    let by_old = claimed(&cluster, leads, &cluster.owner).await?;
    let certificate = claim(&cluster, leads, &cluster.owner).await??.into_inner().certificate;
    CredentialsClient::new(by_old).add_owner_key(add(&new)).await?;
    let by_new = claimed(&cluster, leads, &new).await?;
    CredentialsClient::new(by_new).remove_owner_key(remove(&cluster.owner)).await?;
    cluster.stop(leads).await?;
    let next = cluster.until_one_leads(Some(leads)).await?;
    let by_old = cluster.channel(next, Some(cluster.owner.with(&certificate)?))?;
    let result = ManagementClient::new(by_old).get_cluster(wire::GetClusterRequest {}).await;
    assert_eq!(refusal(result)?.0, Code::Unauthenticated);
    assert_eq!(refusal(claim(&cluster, next, &cluster.owner).await?)?.0, Code::PermissionDenied);
    claimed(&cluster, next, &new).await?;
    Ok(())
}
