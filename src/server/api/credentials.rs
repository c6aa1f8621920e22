//! The service `Credentials`.

use secrecy::ExposeSecret as _;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::bmdb::credential::{self, LONGEST_LIFE, NewCredential, check_name};
use crate::bmdb::inspect;
use crate::model::access::Scope;
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::credentials_server::Credentials;
use crate::server::api::convert;
use crate::server::api::door::{caller, role};
use crate::server::api::fleet::drop_surplus;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::pages;
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;
use crate::server::api::texts::line;

const CREATE: &str = "shepherd.fleet.v1.Credentials/Create";
const REVOKE: &str = "shepherd.fleet.v1.Credentials/Revoke";
/// Most providers that a credential may name, and the longest name of one.
const MOST_PROVIDERS: usize = 100;
const LONGEST_PROVIDER: usize = 100;

/// The service.
pub struct CredentialsService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Credentials for CredentialsService {
    async fn who_am_i(
        &self,
        request: Request<v1::WhoAmIRequest>,
    ) -> Result<Response<v1::WhoAmIResponse>, Status> {
        let credential = convert::credential(caller(&request)?.credential());
        Ok(Response::new(v1::WhoAmIResponse { credential: Some(credential) }))
    }

    async fn list(
        &self,
        request: Request<v1::ListCredentialsRequest>,
    ) -> Result<Response<v1::ListCredentialsResponse>, Status> {
        let asked = request.into_inner();
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let before = match pages::read("credentials", &asked.page_token)? {
            None => Uuid::max(),
            Some(place) => Uuid::try_parse(&place).map_err(|_| pages::no_place("credentials"))?,
        };
        let (mut found, now) = self
            .site
            .looks
            .look(move |tx| {
                Box::pin(async move {
                    Ok((credential::list(tx, before, size + 1).await?, inspect::now(tx).await?))
                })
            })
            .await
            .map_err(of_bmdb)?;
        let more = drop_surplus(&mut found, size);
        let next =
            found.last().filter(|_| more).map(|last| pages::write("credentials", &last.id.to_string()));
        Ok(Response::new(v1::ListCredentialsResponse {
            credentials: found.iter().map(convert::credential).collect(),
            next_page_token: next.unwrap_or_default(),
            at: Some(convert::at(now)),
        }))
    }

    async fn create(
        &self,
        request: Request<v1::CreateCredentialRequest>,
    ) -> Result<Response<v1::CreateCredentialResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let new = new_credential(asked)?;
        let order = Said { rpc: CREATE, request: asked, order: asked.order.as_ref() }
            .read(&caller, format!("credential of {}", new.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let made = self.site.bmdb.create_credential(order, new).await.map_err(of_bmdb)?;
        Ok(Response::new(v1::CreateCredentialResponse {
            credential: made.credential.as_ref().map(convert::credential),
            token: made.token.map_or_else(String::new, |token| token.expose_secret().to_owned()),
            order: Some(answer(None, dry_run, &made.carried)),
        }))
    }

    async fn revoke(
        &self,
        request: Request<v1::RevokeCredentialRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let id = Uuid::try_parse(&asked.credential)
            .map_err(|_| wrong("credential", format!("{:?} is no UUID of a credential", asked.credential)))?;
        let order = Said { rpc: REVOKE, request: asked, order: asked.order.as_ref() }
            .read(&caller, format!("credential {id}"))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.revoke_credential(order, id).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

/// The credential that a request means.
fn new_credential(asked: &v1::CreateCredentialRequest) -> Result<NewCredential, Status> {
    let name = asked.name.trim();
    check_name(name).map_err(|said| wrong("name", said))?;
    if asked.providers.len() > MOST_PROVIDERS {
        return Err(wrong("providers", format!("there are more than {MOST_PROVIDERS} providers")));
    }
    let mut providers = Vec::new();
    for provider in &asked.providers {
        match line("providers", provider, LONGEST_PROVIDER)? {
            // Left out, it could leave none, and none is all.
            "" => return Err(wrong("providers", "one of the providers is empty; name it, or leave it out")),
            provider => providers.push(provider.to_owned()),
        }
    }
    let expires_after = match asked.expires_after.as_str() {
        "" => None,
        said => {
            let span: Span = said.parse().map_err(|_| {
                wrong("expires_after", format!("{said:?} is no length of time; write for example 90d or 12h"))
            })?;
            if span > LONGEST_LIFE {
                return Err(wrong("expires_after", "that is longer than ten years; leave it out for no end"));
            }
            Some(span)
        }
    };
    let certificate = match asked.certificate_sha256.as_str() {
        "" => None,
        said => {
            let digits: String = said.chars().filter(|&c| c != ':').collect();
            let bytes = hex::decode(digits).ok().and_then(|bytes| bytes.try_into().ok());
            Some(bytes.ok_or_else(|| {
                wrong("certificate_sha256", "that is no SHA-256; it has 64 hexadecimal digits, colons aside")
            })?)
        }
    };
    Ok(NewCredential {
        name: name.to_owned(),
        role: role(&asked.role)?,
        scope: Scope::of(providers),
        expires_after,
        certificate,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_must_make_sense() {
        let whole = v1::CreateCredentialRequest {
            name: "kim".into(),
            role: "viewer".into(),
            expires_after: "90d".into(),
            ..Default::default()
        };
        assert!(new_credential(&whole).is_ok());
        for (field, odd) in [
            ("name", v1::CreateCredentialRequest { name: " ".into(), ..whole.clone() }),
            ("name", v1::CreateCredentialRequest { name: "a\nb".into(), ..whole.clone() }),
            ("role", v1::CreateCredentialRequest { role: "root".into(), ..whole.clone() }),
            ("providers", v1::CreateCredentialRequest { providers: vec![String::new()], ..whole.clone() }),
            ("providers", v1::CreateCredentialRequest { providers: vec!["a\0".into()], ..whole.clone() }),
            ("expires_after", v1::CreateCredentialRequest { expires_after: "soon".into(), ..whole.clone() }),
            ("expires_after", v1::CreateCredentialRequest { expires_after: "9999d".into(), ..whole.clone() }),
            ("certificate_sha256", v1::CreateCredentialRequest { certificate_sha256: "ab".into(), ..whole }),
        ] {
            let status = new_credential(&odd).unwrap_err();
            let details = tonic_types::StatusExt::get_error_details(&status);
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
    }
}
