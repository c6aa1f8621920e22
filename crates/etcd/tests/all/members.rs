//! A cluster that grows and shrinks by one member at a time.

use anyhow::Context as _;
use shepherd_etcd::members::{MemberError, MemberId};

use testkit::aloud::TestResult;
use testkit::etcd_servers::{Cluster, peer_url, until};

#[tokio::test]
async fn learner_is_added_catches_up_votes_and_is_removed() -> TestResult {
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"one").await?;
    let listed = client.list_members().await?;
    let [first] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!((first.name.as_str(), first.learner, first.started), ("m0", false, true));
    assert_eq!(first.id, MemberId(client.status().await?.member_id));

    let url = peer_url("new");
    let added = client.add_learner(std::slice::from_ref(&url)).await?;
    assert_eq!((added.name.as_str(), added.learner, added.started), ("", true, false));
    assert_eq!(added.peer_urls, std::slice::from_ref(&url));
    let error = client.add_learner(std::slice::from_ref(&url)).await.unwrap_err();
    assert!(matches!(error, MemberError::AlreadyExists { .. }), "{error:?}");
    let error = client.add_learner(&[peer_url("third")]).await.unwrap_err();
    assert!(matches!(error, MemberError::TooManyLearners { .. }), "{error:?}");
    let error = client.promote_learner(added.id).await.unwrap_err();
    assert!(matches!(error, MemberError::NotCaughtUp { .. }), "{error:?}");

    let new = etcd.join("new", &[("m0".to_owned(), peer_url("m0")), ("new".to_owned(), url)])?;
    let promoted = async || match client.promote_learner(added.id).await {
        Ok(()) => Ok(true),
        Err(MemberError::NotCaughtUp { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    };
    until("the learner is promoted", promoted).await?;
    etcd.wait_until_it_answers(new).await?;
    let listed = client.list_members().await?;
    let voter = listed.iter().find(|member| member.id == added.id).context("it is a member")?;
    assert_eq!((voter.name.as_str(), voter.learner, voter.started), ("new", false, true));
    assert_eq!(etcd.client_of(&[new]).get("/a").await?.context("it has all")?.value, b"one");
    let error = client.promote_learner(added.id).await.unwrap_err();
    assert!(matches!(error, MemberError::NotLearner { .. }), "{error:?}");

    // etcd counts a voter that connected a moment ago as one that is not connected.
    let removed = async || match client.remove_member(added.id).await {
        Ok(()) => Ok(true),
        Err(MemberError::Unhealthy { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    };
    until("the member is removed", removed).await?;
    until("the last one is alone", async || Ok(client.list_members().await.is_ok_and(|all| all.len() == 1)))
        .await?;
    assert_eq!(client.get("/a").await?.context("it is still there")?.value, b"one");
    Ok(())
}

#[tokio::test]
async fn member_keeps_its_number_at_another_address() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = MemberId(client.status().await?.member_id);
    let url = peer_url("elsewhere");
    // The second call changes nothing.
    for _ in 0..2 {
        client.update_member(own, std::slice::from_ref(&url)).await?;
        let listed = client.list_members().await?;
        let [member] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!((member.id, member.peer_urls.as_slice()), (own, std::slice::from_ref(&url)));
        assert!(member.started && !member.learner, "{member:?}");
    }
    let error = client.update_member(MemberId(31), &[peer_url("another")]).await.unwrap_err();
    assert!(matches!(error, MemberError::NotFound { .. }), "{error:?}");
    Ok(())
}

#[tokio::test]
async fn refused_changes_of_members_say_which_refusal_it_is() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = MemberId(client.status().await?.member_id);
    let error = client.remove_member(own).await.unwrap_err();
    assert!(matches!(error, MemberError::WouldLoseQuorum { .. }), "{error:?}");
    let text = format!("removing member {own} was refused by etcd, because too few started members");
    assert!(error.to_string().starts_with(&text), "{error}");
    let error = client.remove_member(MemberId(31)).await.unwrap_err();
    assert!(matches!(error, MemberError::NotFound { .. }), "{error:?}");
    let error = client.promote_learner(MemberId(31)).await.unwrap_err();
    assert!(matches!(error, MemberError::NotFound { .. }), "{error:?}");
    Ok(())
}

#[tokio::test]
async fn healthy_member_is_not_removed_beside_a_dead_one_and_the_dead_one_is() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let client = etcd.client_of(&[0, 1]);
    let id = async |name: &str| {
        let all = client.list_members().await?;
        all.iter().find(|member| member.name == name).map(|member| member.id).context("it is no member")
    };
    let (healthy, dead) = (id("m1").await?, id("m2").await?);
    etcd.kill(2)?;
    for member in [0, 1] {
        let noticed = async || Ok(etcd.metric(member, "etcd_network_active_peers").await? < 1.5);
        until("both know that the third is gone", noticed).await?;
        // It may have been the leader, and etcd loses a change of the membership that arrives while there is no leader.
        etcd.wait_until_it_answers(member).await?;
    }
    let error = client.remove_member(healthy).await.unwrap_err();
    assert!(matches!(error, MemberError::Unhealthy { .. }), "{error:?}");
    client.remove_member(dead).await?;
    assert_eq!(client.list_members().await?.len(), 2);
    Ok(())
}

/// The number that etcd would give it is that of the member before.
#[tokio::test]
async fn member_is_added_again_in_the_second_in_which_it_was_removed() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let url = peer_url("second");
    for _ in 0..3 {
        let added = client.add_learner(std::slice::from_ref(&url)).await?;
        client.remove_member(added.id).await?;
    }
    assert_eq!(client.list_members().await?.len(), 1);
    Ok(())
}
