//! Role declarations of operators, as etcd stores them. What may be declared is in [`model::role_declaration`].

use etcd::key_space::DECLARATIONS;
use etcd::record::{self, RecordError};
use model::role_declaration::RoleDeclaration;
use prost::Message as _;
use proto::curator::v1 as wire;

/// Encodes the record for etcd.
#[must_use]
pub(crate) fn encode_declaration(declaration: &RoleDeclaration) -> Vec<u8> {
    let declaration = Some(declaration.to_wire().clone());
    wire::DeclarationRecord { format: record::FORMAT, declaration }.encode_to_vec()
}

/// Decodes the record that is stored under `key`.
pub(crate) fn decode_declaration(key: &str, bytes: &[u8]) -> Result<RoleDeclaration, RecordError> {
    let id = DECLARATIONS.id_of(key).map_err(|error| RecordError::new(key, error.to_string()))?;
    let record = record::decode(key, bytes, |record: &wire::DeclarationRecord| record.format)?;
    let declared = record.declaration.unwrap_or_default();
    let declaration =
        RoleDeclaration::new(declared).map_err(|error| RecordError::new(key, error.to_string()))?;
    if declaration.role().to_string() != id {
        return Err(RecordError::new(key, format!("it is that of {}", declaration.role())));
    }
    if declaration.revision() == 0 {
        return Err(RecordError::new(key, "it says no revision"));
    }
    Ok(declaration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(services: impl IntoIterator<Item = &'static str>) -> wire::Declaration {
        let source = Some(wire::program::Source::Path("/usr/bin/server".to_owned()));
        let service = |name: &str| wire::Service {
            name: name.to_owned(),
            run: Some(wire::service::Run::Program(wire::Program {
                source: source.clone(),
                url: String::new(),
            })),
            user: "daemon".to_owned(),
            ..Default::default()
        };
        let services = services.into_iter().map(service).collect();
        wire::Declaration { role: "web".to_owned(), services, ..Default::default() }
    }

    #[test]
    fn record_round_trips_under_its_own_key_only() {
        let declaration = RoleDeclaration::new(role(["a", "b"])).unwrap();
        let kept = declaration.clone().into_next_revision(None).unwrap();
        let key = DECLARATIONS.key("web").unwrap();
        let stored = encode_declaration(&kept);
        assert_eq!(decode_declaration(&key, &stored).unwrap(), kept);
        assert!(decode_declaration(&DECLARATIONS.key("other").unwrap(), &stored).is_err());
        let error = decode_declaration(&key, &encode_declaration(&declaration)).unwrap_err().to_string();
        assert!(error.contains("no revision") && error.contains(&key), "{error}");
        assert!(decode_declaration(&key, &role([]).encode_to_vec()).is_err());
    }
}
