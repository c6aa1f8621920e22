//! gRPC service Declarations: put, list, delete and watch the roles that operators declare.

use std::sync::Arc;

use curator_client::node_id::NodeId;
use etcd::guard::{ExpectedRevision, KeyChange};
use etcd::key_space::DECLARATIONS;
use futures::Stream;
use model::node_role::{DeclaredRole, RoleNameError, join_names};
use model::role_declaration::RoleDeclaration;
use proto::curator::v1 as wire;
use proto::curator::v1::declarations_server;
use tonic::{Code, Request, Response, Status};

use crate::role_declaration::encode_declaration;
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext, ResponseStream};
use crate::service::store::record_change;

#[derive(Clone, Debug)]
pub(super) struct DeclarationsService(pub(super) Arc<LeaderContext>);

#[tonic::async_trait]
impl declarations_server::Declarations for DeclarationsService {
    type WatchOwnStream = ResponseStream<wire::WatchOwnDeclarationsResponse>;

    async fn put(
        &self,
        request: Request<wire::PutDeclarationRequest>,
    ) -> Result<Response<wire::PutDeclarationResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let declared = RoleDeclaration::new(body.declaration.unwrap_or_default())
            .map_err(|error| ServiceError::invalid_argument(error.to_string()))?;
        let store = &self.0.store;
        let written = store.retry_on_conflict(|| async {
            let known = store.declaration(declared.role()).await?;
            let in_force = known.as_ref().map_or(0, |known| known.value.revision());
            if body.expected_revision.is_some_and(|expected| expected != in_force) {
                let role = declared.role();
                let sentence = format!(
                    "role {role} was not declared: revision {in_force} is in force, and {} was expected; look at it \
                     and declare it again",
                    body.expected_revision.unwrap_or_default()
                );
                return Err(ServiceError::rejected(Code::FailedPrecondition, sentence));
            }
            let Some(new) = declared.clone().into_next_revision(known.as_ref().map(|known| &known.value)) else {
                return Ok((known.map(|known| known.value), false));
            };
            let record = encode_declaration(&new);
            let change = record_change(DECLARATIONS.key(new.role())?, record, known.as_ref());
            store.write(&[change]).await?;
            tracing::info!(role = %new.role(), revision = new.revision(), actor = %caller.peer, "a role was declared");
            Ok((Some(new), true))
        });
        let (declaration, changed) = written.await?;
        let declaration = declaration.map(|declaration| declaration.to_wire().clone());
        Ok(Response::new(wire::PutDeclarationResponse { declaration, changed }))
    }

    async fn list(
        &self,
        _: Request<wire::ListDeclarationsRequest>,
    ) -> Result<Response<wire::ListDeclarationsResponse>, Status> {
        let kept = self.0.store.declarations().await?;
        let declarations = kept.iter().map(|kept| kept.value.to_wire().clone()).collect();
        Ok(Response::new(wire::ListDeclarationsResponse { declarations }))
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteDeclarationRequest>,
    ) -> Result<Response<wire::DeleteDeclarationResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let role: DeclaredRole = request
            .into_inner()
            .role
            .parse()
            .map_err(|error: RoleNameError| ServiceError::rejected(Code::NotFound, error.to_string()))?;
        let leading = &self.0;
        // With the lock, nobody adds the role to a node between the check of the nodes and the deletion.
        let _alone = leading.lock_membership().await;
        let deleted = leading.store.retry_on_conflict(|| async {
            let none = || ServiceError::rejected(Code::NotFound, format!("role {role} is not declared"));
            let known = leading.store.declaration(&role).await?.ok_or_else(none)?;
            let nodes = leading.store.nodes().await?.nodes;
            let with: Vec<&NodeId> = nodes
                .values()
                .filter(|node| node.roles.declared.contains(&role))
                .map(|node| &node.id)
                .collect();
            if !with.is_empty() {
                let sentence = format!(
                    "role {role} was not deleted: {} have it; remove it from them first",
                    join_names(with)
                );
                return Err(ServiceError::rejected(Code::FailedPrecondition, sentence));
            }
            let expected = ExpectedRevision::At(known.revision);
            leading.store.write(&[KeyChange::Delete { key: DECLARATIONS.key(&role)?, expected }]).await
        });
        deleted.await?;
        tracing::info!(%role, actor = %caller.peer, "a role declaration was deleted");
        Ok(Response::new(wire::DeleteDeclarationResponse {}))
    }

    async fn watch_own(
        &self,
        request: Request<wire::WatchOwnDeclarationsRequest>,
    ) -> Result<Response<Self::WatchOwnStream>, Status> {
        let caller = Caller::from_request(&request)?;
        let own = watch_declarations_of(self.0.clone(), caller.require_node()?);
        Ok(Response::new(self.0.guard_stream(&caller, own)))
    }
}

/// The declared roles of a node: now, and whenever they change.
fn watch_declarations_of(
    leading: Arc<LeaderContext>,
    node: NodeId,
) -> impl Stream<Item = Result<wire::WatchOwnDeclarationsResponse, Status>> {
    let changes = leading.cache.subscribe_changes();
    futures::stream::unfold((leading, changes, None), move |(leading, mut changes, reported)| async move {
        loop {
            let now: Vec<(DeclaredRole, Option<Arc<RoleDeclaration>>)> = {
                let seen = leading.cache.records();
                let roles = seen.nodes.get(&node).map(|node| node.roles.declared.clone()).unwrap_or_default();
                let seen = |role: &DeclaredRole| seen.declarations.get(role).cloned();
                roles.into_iter().map(|role| (role.clone(), seen(&role))).collect()
            };
            let same = |reported: &Vec<(DeclaredRole, Option<Arc<RoleDeclaration>>)>| {
                reported.len() == now.len()
                    && reported.iter().zip(&now).all(|((one, first), (other, second))| {
                        one == other
                            && match (first, second) {
                                (Some(first), Some(second)) => Arc::ptr_eq(first, second),
                                (first, second) => first.is_none() && second.is_none(),
                            }
                    })
            };
            if !reported.as_ref().is_some_and(same) {
                return Some((Ok(declarations_response(&now)), (leading, changes, Some(now))));
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// The response for a node with these roles. A declaration cannot be deleted while a node has the role, so one that is
/// missing from the cache cannot be decoded.
fn declarations_response(
    roles: &[(DeclaredRole, Option<Arc<RoleDeclaration>>)],
) -> wire::WatchOwnDeclarationsResponse {
    let declarations = roles.iter().filter_map(|(_, seen)| Some(seen.as_ref()?.to_wire().clone()));
    let unreadable = roles.iter().filter(|(_, seen)| seen.is_none()).map(|(role, _)| role.to_string());
    wire::WatchOwnDeclarationsResponse {
        declarations: declarations.collect(),
        unreadable: unreadable.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_without_a_readable_declaration_is_reported() {
        let source = Some(wire::program::Source::Path("/bin/server".to_owned()));
        let service = wire::Service {
            name: "server".to_owned(),
            run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
            user: "root".to_owned(),
            ..Default::default()
        };
        let (role, services) = ("web".to_owned(), vec![service]);
        let declared = wire::Declaration { role, services, revision: 1, ..Default::default() };
        let declaration = Arc::new(RoleDeclaration::new(declared.clone()).unwrap());
        let response = declarations_response(&[
            ("disk".parse().unwrap(), None),
            ("web".parse().unwrap(), Some(declaration)),
        ]);
        assert_eq!(response.declarations, [declared]);
        assert_eq!(response.unreadable, ["disk"]);
    }
}
