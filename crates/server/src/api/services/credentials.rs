//! gRPC service Credentials: tokens and pinned client certificates.

use std::fmt::Write as _;

use secrecy::ExposeSecret as _;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::{caller_of, parse_role};
use crate::api::context::ApiContext;
use crate::api::convert;
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use crate::api::pagination;
use crate::api::services::order_fields::parse_expiry_at;
use crate::api::validate::single_line;
use bmdb::connection;
use bmdb::orders::credential::{
    self, LIFETIME_TOO_LONG, MAX_LIFETIME, NewAccessCredential, canonical_credential_name,
};
use bmdb::orders::order::Expiry;
use model::access::AccessScope;
use model::rpc_name::{CREATE_CREDENTIAL_RPC, REVOKE_CREDENTIAL_RPC};
use model::time::Span;
use proto::fleet::v1;
use proto::fleet::v1::credentials_server::Credentials;

/// Most providers of a credential, and the longest name of one in characters.
const MAX_PROVIDERS: usize = 100;
const MAX_PROVIDER_CHARS: usize = 100;

/// The gRPC service `Credentials`.
pub struct CredentialsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Credentials for CredentialsService {
    async fn who_am_i(
        &self,
        request: Request<v1::WhoAmIRequest>,
    ) -> Result<Response<v1::WhoAmIResponse>, Status> {
        let credential = convert::encode_caller(&caller_of(&request)?);
        Ok(Response::new(v1::WhoAmIResponse { credential: Some(credential) }))
    }

    async fn list(
        &self,
        request: Request<v1::ListCredentialsRequest>,
    ) -> Result<Response<v1::ListCredentialsResponse>, Status> {
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let before = match pagination::decode_page_token("credentials", &body.page_token)? {
            None => Uuid::max(),
            Some(place) => {
                Uuid::try_parse(&place).map_err(|_| pagination::invalid_page_token("credentials"))?
            }
        };
        let (mut found, now) = self
            .context
            .read_pool
            .read(move |tx| {
                Box::pin(async move {
                    Ok((
                        credential::list_credentials(tx, before, size + 1).await?,
                        connection::database_now(tx).await?,
                    ))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut found, size);
        let next = found
            .last()
            .filter(|_| more)
            .map(|last| pagination::encode_page_token("credentials", &last.id.to_string()));
        Ok(Response::new(v1::ListCredentialsResponse {
            credentials: found.iter().map(convert::encode_credential).collect(),
            next_page_token: next.unwrap_or_default(),
            read_at: Some(convert::encode_timestamp(now)),
        }))
    }

    async fn create(
        &self,
        request: Request<v1::CreateCredentialRequest>,
    ) -> Result<Response<v1::CreateCredentialResponse>, Status> {
        let body = request.get_ref();
        let new = parse_credential_request(body)?;
        let order =
            IncomingOrder { rpc: CREATE_CREDENTIAL_RPC, request: &request, order: body.order.as_ref() }
                .parse_unversioned(order_target(&new))?;
        let dry_run = order.dry_run;
        let made = self.context.bmdb.create_credential(order, new).await.map_err(bmdb_status)?;
        Ok(Response::new(v1::CreateCredentialResponse {
            credential: made.credential.as_ref().map(convert::encode_credential),
            token: made.token.map_or_else(String::new, |token| token.expose_secret().to_owned()),
            order: Some(encode_order_response(None, dry_run, &made.result)),
        }))
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let id = Uuid::try_parse(&body.credential_id).map_err(|_| {
            invalid_argument("credential_id", format!("{:?} is no UUID of a credential", body.credential_id))
        })?;
        IncomingOrder { rpc: REVOKE_CREDENTIAL_RPC, request: &request, order: body.order.as_ref() }
            .execute(format!("credential {id}"), |order| self.context.bmdb.revoke_credential(order, id))
            .await
    }
}

/// The new credential, for those who approve the order and for the audit. What is granted comes before what somebody
/// may have chosen to look like it.
fn order_target(new: &NewAccessCredential) -> String {
    let mut text = format!("credential with the role {}", new.role);
    if let Some(fingerprint) = new.certificate {
        let _ = write!(text, ", with the certificate {}", hex::encode(fingerprint));
    }
    match new.expiry {
        None => text.push_str(", without an end"),
        Some(expiry) => _ = write!(text, ", valid {}", expiry.describe()),
    }
    match &new.scope {
        AccessScope::Fleet => text.push_str(", for all machines"),
        AccessScope::Providers(providers) => {
            let providers: Vec<&str> = providers.iter().map(String::as_str).collect();
            let _ = write!(text, ", for the machines of {}", providers.join(", "));
        }
    }
    text + ", of " + &new.name
}

/// Validates the credential of a request.
fn parse_credential_request(request: &v1::CreateCredentialRequest) -> Result<NewAccessCredential, Status> {
    let name = canonical_credential_name(&request.name).map_err(|reason| invalid_argument("name", reason))?;
    if request.providers.len() > MAX_PROVIDERS {
        return Err(invalid_argument("providers", format!("there are more than {MAX_PROVIDERS} providers")));
    }
    let mut providers = Vec::new();
    for provider in &request.providers {
        match single_line("providers", provider, MAX_PROVIDER_CHARS)? {
            // Rejected: ignoring it could leave an empty list, which means all providers.
            "" => {
                return Err(invalid_argument(
                    "providers",
                    "one of the providers is empty; name it, or leave it out",
                ));
            }
            provider => providers.push(provider.to_owned()),
        }
    }
    let expiry = match &request.expiry {
        None => None,
        Some(v1::create_credential_request::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
        // An empty text is that of a client that sends each field.
        Some(v1::create_credential_request::Expiry::ExpiresAfter(text)) if text.is_empty() => None,
        Some(v1::create_credential_request::Expiry::ExpiresAfter(text)) => {
            let span: Span = text.parse().map_err(|_| {
                invalid_argument(
                    "expires_after",
                    format!("{text:?} is not a duration; write for example 90d or 12h"),
                )
            })?;
            if span > MAX_LIFETIME {
                return Err(invalid_argument("expires_after", LIFETIME_TOO_LONG));
            }
            Some(Expiry::After(span))
        }
    };
    let certificate = match request.certificate_sha256.as_str() {
        "" => None,
        text => {
            let digits: String = text.chars().filter(|&c| c != ':').collect();
            let bytes = hex::decode(digits).ok().and_then(|bytes| bytes.try_into().ok());
            Some(bytes.ok_or_else(|| {
                invalid_argument(
                    "certificate_sha256",
                    "that is not a SHA-256; it has 64 hexadecimal digits, colons aside",
                )
            })?)
        }
    };
    Ok(NewAccessCredential {
        name,
        role: parse_role(&request.role)?,
        scope: AccessScope::from_providers(providers),
        expiry,
        certificate,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(span: &str) -> v1::create_credential_request::Expiry {
        v1::create_credential_request::Expiry::ExpiresAfter(span.into())
    }

    #[test]
    fn target_of_an_order_has_all_that_the_credential_grants() {
        let viewer = v1::CreateCredentialRequest {
            name: "ci, for the pipeline".into(),
            role: "viewer".into(),
            ..Default::default()
        };
        let all = "for all machines, of ci, for the pipeline";
        for (request, expected) in [
            (viewer.clone(), format!("credential with the role viewer, without an end, {all}")),
            (
                v1::CreateCredentialRequest { role: "admin".into(), ..viewer.clone() },
                format!("credential with the role admin, without an end, {all}"),
            ),
            (
                v1::CreateCredentialRequest { expiry: Some(after("12h")), ..viewer.clone() },
                format!("credential with the role viewer, valid for 12h, {all}"),
            ),
            (
                v1::CreateCredentialRequest {
                    expiry: Some(v1::create_credential_request::Expiry::ExpiresAt(prost_types::Timestamp {
                        seconds: 1_800_000_000,
                        nanos: 0,
                    })),
                    ..viewer.clone()
                },
                format!("credential with the role viewer, valid until 2027-01-15T08:00:00+00:00, {all}"),
            ),
            (
                v1::CreateCredentialRequest {
                    name: "kim".into(),
                    providers: vec!["rack-b".into(), "rack-a".into()],
                    certificate_sha256: "ab".repeat(32),
                    ..viewer
                },
                format!(
                    "credential with the role viewer, with the certificate {}, without an end, for the machines of \
                     rack-a, rack-b, of kim",
                    "ab".repeat(32)
                ),
            ),
        ] {
            assert_eq!(order_target(&parse_credential_request(&request).unwrap()), expected);
        }
    }

    #[test]
    fn invalid_requests_are_rejected() {
        let whole = v1::CreateCredentialRequest {
            name: "kim".into(),
            role: "viewer".into(),
            expiry: Some(after("90d")),
            ..Default::default()
        };
        assert!(parse_credential_request(&whole).is_ok());
        for (field, odd) in [
            ("name", v1::CreateCredentialRequest { name: " ".into(), ..whole.clone() }),
            ("name", v1::CreateCredentialRequest { name: "a\nb".into(), ..whole.clone() }),
            ("name", v1::CreateCredentialRequest { name: "ki\u{200b}m".into(), ..whole.clone() }),
            ("role", v1::CreateCredentialRequest { role: "root".into(), ..whole.clone() }),
            ("providers", v1::CreateCredentialRequest { providers: vec![String::new()], ..whole.clone() }),
            ("providers", v1::CreateCredentialRequest { providers: vec!["a\0".into()], ..whole.clone() }),
            ("expires_after", v1::CreateCredentialRequest { expiry: Some(after("soon")), ..whole.clone() }),
            ("expires_after", v1::CreateCredentialRequest { expiry: Some(after("9999d")), ..whole.clone() }),
            ("certificate_sha256", v1::CreateCredentialRequest { certificate_sha256: "ab".into(), ..whole }),
        ] {
            let status = parse_credential_request(&odd).unwrap_err();
            let details = tonic_types::StatusExt::get_error_details(&status);
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
    }
}
