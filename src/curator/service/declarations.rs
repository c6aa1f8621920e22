//! Operators' own roles.

use std::sync::Arc;

use futures::Stream;
use tonic::{Code, Request, Response, Status};

use crate::curator::node_id::NodeId;
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Answers, Caller, Leading};
use crate::curator::service::store::put;
use crate::etcd::guard::{Change, Expected};
use crate::etcd::key_space::DECLARATIONS;
use crate::model::declaration::Declaration;
use crate::model::role::{DeclaredRole, RoleNameError, told};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::declarations_server;

/// The service.
#[derive(Clone, Debug)]
pub struct DeclarationsService(pub Arc<Leading>);

#[tonic::async_trait]
impl declarations_server::Declarations for DeclarationsService {
    type WatchOwnStream = Answers<wire::WatchOwnDeclarationsResponse>;

    async fn put(
        &self,
        request: Request<wire::PutDeclarationRequest>,
    ) -> Result<Response<wire::PutDeclarationResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let declared = Declaration::new(asked.declaration.unwrap_or_default())
            .map_err(|error| Failure::invalid(error.to_string()))?;
        let store = &self.0.store;
        let written = store.decide(|| async {
            let known = store.declaration(declared.role()).await?;
            let in_force = known.as_ref().map_or(0, |known| known.value.revision());
            if asked.expected_revision.is_some_and(|expected| expected != in_force) {
                let role = declared.role();
                let sentence = format!(
                    "role {role} was not declared: revision {in_force} is in force, and {} was expected; look at it \
                     and declare it again",
                    asked.expected_revision.unwrap_or_default()
                );
                return Err(Failure::refused(Code::FailedPrecondition, sentence));
            }
            let Some(new) = declared.clone().replacing(known.as_ref().map(|known| &known.value)) else {
                return Ok((known.map(|known| known.value), false));
            };
            let change = put(DECLARATIONS.key(new.role())?, new.encode(), known.as_ref());
            store.write(&[change]).await?;
            tracing::info!(role = %new.role(), revision = new.revision(), by = %caller.peer, "a role was declared");
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
        let caller = Caller::of(&request)?;
        let role: DeclaredRole = request
            .into_inner()
            .role
            .parse()
            .map_err(|error: RoleNameError| Failure::refused(Code::NotFound, error.to_string()))?;
        let leading = &self.0;
        // Nobody is given the role between the look at the nodes and the deletion.
        let _alone = leading.membership().await;
        let deleted = leading.store.decide(|| async {
            let none = || Failure::refused(Code::NotFound, format!("role {role} is not declared"));
            let known = leading.store.declaration(&role).await?.ok_or_else(none)?;
            let nodes = leading.store.nodes().await?.nodes;
            let with: Vec<&NodeId> = nodes
                .values()
                .filter(|node| node.roles.declared.contains(&role))
                .map(|node| &node.id)
                .collect();
            if !with.is_empty() {
                let sentence =
                    format!("role {role} was not forgotten: {} have it; take it from them first", told(with));
                return Err(Failure::refused(Code::FailedPrecondition, sentence));
            }
            let expected = Expected::At(known.revision);
            leading.store.write(&[Change::Delete { key: DECLARATIONS.key(&role)?, expected }]).await
        });
        deleted.await?;
        tracing::info!(%role, by = %caller.peer, "a role was forgotten");
        Ok(Response::new(wire::DeleteDeclarationResponse {}))
    }

    async fn watch_own(
        &self,
        request: Request<wire::WatchOwnDeclarationsRequest>,
    ) -> Result<Response<Self::WatchOwnStream>, Status> {
        let caller = Caller::of(&request)?;
        let own = own(self.0.clone(), caller.node()?);
        Ok(Response::new(self.0.stream(&caller, own)))
    }
}

/// What a node is to run: now, and whenever it changes.
fn own(
    leading: Arc<Leading>,
    node: NodeId,
) -> impl Stream<Item = Result<wire::WatchOwnDeclarationsResponse, Status>> {
    let changes = leading.view.changes();
    futures::stream::unfold((leading, changes, None), move |(leading, mut changes, told)| async move {
        loop {
            let now: Vec<(DeclaredRole, Option<Arc<Declaration>>)> = {
                let seen = leading.view.seen();
                let roles = seen.nodes.get(&node).map(|node| node.roles.declared.clone()).unwrap_or_default();
                let seen = |role: &DeclaredRole| seen.declarations.get(role).cloned();
                roles.into_iter().map(|role| (role.clone(), seen(&role))).collect()
            };
            let same = |told: &Vec<(DeclaredRole, Option<Arc<Declaration>>)>| {
                told.len() == now.len()
                    && told.iter().zip(&now).all(|((one, first), (other, second))| {
                        one == other
                            && match (first, second) {
                                (Some(first), Some(second)) => Arc::ptr_eq(first, second),
                                (first, second) => first.is_none() && second.is_none(),
                            }
                    })
            };
            if !told.as_ref().is_some_and(same) {
                return Some((Ok(answer(&now)), (leading, changes, Some(now))));
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// What a node with these roles is told. A declaration is not forgotten while a node has the role, so one that is not
/// seen is one that cannot be read.
fn answer(roles: &[(DeclaredRole, Option<Arc<Declaration>>)]) -> wire::WatchOwnDeclarationsResponse {
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
    fn role_whose_declaration_is_not_seen_is_told_as_such() {
        let source = Some(wire::program::Source::Path("/bin/server".to_owned()));
        let service = wire::Service {
            name: "server".to_owned(),
            run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
            user: "root".to_owned(),
            ..Default::default()
        };
        let declared = wire::Declaration { role: "web".to_owned(), services: vec![service], revision: 1 };
        let declaration = Arc::new(Declaration::new(declared.clone()).unwrap());
        let told = answer(&[("disk".parse().unwrap(), None), ("web".parse().unwrap(), Some(declaration))]);
        assert_eq!(told.declarations, [declared]);
        assert_eq!(told.unreadable, ["disk"]);
    }
}
