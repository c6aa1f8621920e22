//! The service `ClusterCredentials`.

use tonic::{Request, Response, Status};

use crate::bmdb::cluster::target;
use crate::bmdb::cluster_credential::{NewCredential, credentials_of};
use crate::model::cluster::credential::{CredentialView, DEFAULT_LIFETIME, check_holder, check_lifetime};
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::cluster_credentials_server::ClusterCredentials;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

const ISSUE: &str = "shepherd.fleet.v1.ClusterCredentials/Issue";
const REVOKE: &str = "shepherd.fleet.v1.ClusterCredentials/Revoke";

/// The service.
pub struct ClusterCredentialsService {
    /// What it stands on.
    pub site: Site,
}

fn new(asked: &v1::IssueClusterCredentialRequest) -> Result<NewCredential, Status> {
    let public_key = hex::decode(&asked.public_key).ok().and_then(|key| key.try_into().ok());
    let public_key = public_key
        .ok_or_else(|| wrong("public_key", "it has not 64 hexadecimal digits: a key of Ed25519"))?;
    check_holder(&asked.holder).map_err(|said| wrong("holder", said))?;
    let lifetime = match asked.lifetime.as_str() {
        "" => DEFAULT_LIFETIME,
        said => said.parse::<Span>().map_err(|_| {
            wrong("lifetime", format!("{said:?} is no length of time; write for example 8h or 30d"))
        })?,
    };
    check_lifetime(lifetime).map_err(|said| wrong("lifetime", said))?;
    Ok(NewCredential { public_key, holder: asked.holder.clone(), lifetime })
}

#[tonic::async_trait]
impl ClusterCredentials for ClusterCredentialsService {
    async fn list(
        &self,
        request: Request<v1::ListClusterCredentialsRequest>,
    ) -> Result<Response<v1::ListClusterCredentialsResponse>, Status> {
        let name = request.into_inner().name;
        let look = self.site.looks.look(move |tx| {
            let name = name.clone();
            Box::pin(async move { credentials_of(tx, &name).await })
        });
        let found = look.await.map_err(of_bmdb)?;
        let (ca_certificate, curators) =
            found.founded.map(|founded| (founded.ca_certificate, founded.curators)).unwrap_or_default();
        Ok(Response::new(v1::ListClusterCredentialsResponse {
            credentials: found.credentials.into_iter().map(credential).collect(),
            ca_certificate,
            curators,
            at: Some(at(found.at)),
        }))
    }

    async fn issue(
        &self,
        request: Request<v1::IssueClusterCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let new = new(asked)?;
        let order = Said { rpc: ISSUE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let issued = self.site.bmdb.ask_for_credential(order, asked.name.clone(), new);
        Ok(Response::new(answer(None, dry_run, &issued.await.map_err(of_bmdb)?)))
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeClusterCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let order = Said { rpc: REVOKE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let revoked =
            self.site.bmdb.revoke_cluster_credential(order, asked.name.clone(), asked.credential.clone());
        Ok(Response::new(answer(None, dry_run, &revoked.await.map_err(of_bmdb)?)))
    }
}

fn credential(view: CredentialView) -> v1::ClusterCredential {
    v1::ClusterCredential {
        id: view.id,
        holder: view.holder,
        public_key: view.public_key,
        state: view.state,
        asked_at: Some(at(view.asked_at)),
        asked_by: view.asked_by,
        serial: view.serial,
        expires_at: view.expires_at.map(at),
        refused: view.refused,
        revoked_by: view.revoked_by,
        certificate: view.certificate,
    }
}
