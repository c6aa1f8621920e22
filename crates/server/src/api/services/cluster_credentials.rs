//! gRPC service `ClusterCredentials`: certificates for curators.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::services::order_fields::{parse_expiry_at, parse_lifetime};
use bmdb::cluster::credential::{ClusterCredentialRequest, list_cluster_credentials};
use bmdb::cluster::lock::order_target;
use bmdb::orders::order::Expiry;
use model::cluster::certificate_request::{DEFAULT_LIFETIME, check_holder};
use model::cluster::credential::{ClusterCredential, check_lifetime};
use model::rpc_name::{ISSUE_CERTIFICATE_RPC, REVOKE_CERTIFICATE_RPC};
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::cluster_credentials_server::ClusterCredentials;

/// The gRPC service `ClusterCredentials`.
pub struct ClusterCredentialsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

fn parse_credential_request(
    request: &v1::IssueClusterCredentialRequest,
) -> Result<ClusterCredentialRequest, Status> {
    let public_key = hex::decode(&request.public_key).ok().and_then(|key| key.try_into().ok());
    let public_key = public_key.ok_or_else(|| {
        invalid_argument("public_key", "it has not 64 hexadecimal digits: a key of Ed25519")
    })?;
    check_holder(&request.holder).map_err(|reason| invalid_argument("holder", reason))?;
    let expiry = match &request.expiry {
        None => Expiry::After(DEFAULT_LIFETIME),
        Some(v1::issue_cluster_credential_request::Expiry::Lifetime(text)) => {
            parse_lifetime(text, DEFAULT_LIFETIME, check_lifetime)?
        }
        Some(v1::issue_cluster_credential_request::Expiry::ExpiresAt(time)) => parse_expiry_at(*time)?,
    };
    Ok(ClusterCredentialRequest { public_key, holder: request.holder.clone(), expiry })
}

#[tonic::async_trait]
impl ClusterCredentials for ClusterCredentialsService {
    async fn list(
        &self,
        request: Request<v1::ListClusterCredentialsRequest>,
    ) -> Result<Response<v1::ListClusterCredentialsResponse>, Status> {
        let name = request.into_inner().name;
        let look =
            self.context.read_pool.read_with(name, |tx, name| Box::pin(list_cluster_credentials(tx, name)));
        let found = look.await.map_err(bmdb_status)?;
        let now = found.at;
        let credentials = found.credentials.into_iter().map(|credential| encode_credential(credential, now));
        let (ca_certificate, curators) =
            found.founded.map(|founded| (founded.ca_certificate, founded.curators)).unwrap_or_default();
        Ok(Response::new(v1::ListClusterCredentialsResponse {
            credentials: credentials.collect(),
            ca_certificate,
            curators,
            read_at: Some(encode_timestamp(now)),
        }))
    }

    async fn issue(
        &self,
        request: Request<v1::IssueClusterCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let new = parse_credential_request(body)?;
        IncomingOrder { rpc: ISSUE_CERTIFICATE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.request_cluster_credential(order, body.name.clone(), new)
            })
            .await
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeClusterCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        IncomingOrder { rpc: REVOKE_CERTIFICATE_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.revoke_cluster_credential(
                    order,
                    body.name.clone(),
                    body.credential_id.clone(),
                )
            })
            .await
    }
}

fn encode_credential(credential: ClusterCredential, now: Timestamp) -> v1::ClusterCredential {
    let ClusterCredential { request, serial } = credential;
    let (state, issued) = (request.state(now), request.issued.as_ref());
    v1::ClusterCredential {
        id: request.id.to_string(),
        public_key: hex::encode(&request.public_key),
        state: state.as_str().to_owned(),
        requested_at: Some(encode_timestamp(request.requested_at)),
        serial,
        expires_at: issued.map(|issued| encode_timestamp(issued.expires_at)),
        certificate: issued.map(|issued| hex::encode(&issued.certificate)),
        holder: request.holder,
        requested_by: request.requested_by,
        rejection: request.rejection,
        revoked_by: request.revocation.map(|revocation| revocation.requested_by),
    }
}
