//! Templates: `{{fact}}` placeholders in role declarations.
//!
//! A declaration is one text for all nodes, but some of a service's configuration differs between nodes: its address,
//! its name. So texts may contain the names of facts, which the node replaces by its own values. There are no
//! conditions, no loops and no defaults. An operator who needs more writes a program for it: a text that two readers
//! understand differently is how a cluster is lost.
//!
//! The curator rejects an unknown name when the role is declared, where a person reads the response, and not on a
//! hundred nodes at night. Two things can be checked on the node only: whether it has the requested label, and whether
//! it knows its machine. If not, the service is not started, rather than started with an empty word in the middle of
//! its command.
//!
//! `{{{{` is replaced by `{{`, for files that have templates of their own.

use std::fmt;

use crate::label::{self, Labels};

/// A fact of a node or of its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateFact {
    /// Fact `node.id`: the node's id.
    NodeId,
    /// Fact `node.address`: the address that the node reports.
    NodeAddress,
    /// Fact `node.url_host`: the same address as a URL has it, with an IPv6 address in brackets.
    NodeUrlHost,
    /// Fact `node.machine`: UUID of the node's machine.
    NodeMachine,
    /// Fact `node.label.KEY`: value of a label of the node.
    NodeLabel(String),
    /// Fact `cluster.id`: UUID of the cluster.
    ClusterId,
    /// Fact `cluster.curators`: `host:port` of every curator, separated by commas.
    ClusterCurators,
    /// Fact `role.name`: name of the role.
    RoleName,
    /// Fact `role.revision`: revision of the role's declaration.
    RoleRevision,
    /// Fact `service.name`: name of the service.
    ServiceName,
}

/// Facts with a fixed name.
const NAMED_FACTS: [(&str, TemplateFact); 9] = [
    ("node.id", TemplateFact::NodeId),
    ("node.address", TemplateFact::NodeAddress),
    ("node.url_host", TemplateFact::NodeUrlHost),
    ("node.machine", TemplateFact::NodeMachine),
    ("cluster.id", TemplateFact::ClusterId),
    ("cluster.curators", TemplateFact::ClusterCurators),
    ("role.name", TemplateFact::RoleName),
    ("role.revision", TemplateFact::RoleRevision),
    ("service.name", TemplateFact::ServiceName),
];
/// Prefix of the names of label facts.
const LABEL_PREFIX: &str = "node.label.";

impl fmt::Display for TemplateFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::NodeLabel(key) = self {
            return write!(f, "{LABEL_PREFIX}{key}");
        }
        let name = NAMED_FACTS.iter().find(|(_, fact)| fact == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// The values of the facts on one node, for one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateFacts {
    /// Id of the node in its cluster.
    pub node_id: String,
    /// The address that the node reports.
    pub node_address: String,
    /// UUID of its machine; empty when that is not known.
    pub node_machine: String,
    /// Labels of the node.
    pub node_labels: Labels,
    /// UUID of the cluster.
    pub cluster_id: String,
    /// `host:port` of every curator.
    pub cluster_curators: Vec<String>,
    /// The role that the service belongs to.
    pub role_name: String,
    /// Revision of the role's declaration.
    pub role_revision: u64,
    /// Name of the service.
    pub service_name: String,
}

/// Why a text is not a valid template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A pair of braces is not closed.
    #[error("{{{{ at character {0} is never closed; write {{{{{{{{ for two braces that are meant as such")]
    Unclosed(usize),
    /// The name of a fact is unknown.
    #[error(
        "there is no fact {name:?}; the facts are {facts}. Write {{{{{{{{ for two braces that are meant as such"
    )]
    Unknown {
        /// The text between the braces.
        name: String,
        /// The names that are valid there.
        facts: String,
    },
    /// The key of a label is not valid.
    #[error("{0}")]
    Label(String),
}

/// Why a template cannot be rendered on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The node does not have the label.
    #[error(
        "{node} has no label {key:?}, which {{{{node.label.{key}}}}} asks for: set it, or take the role from the node"
    )]
    NoLabel {
        /// Id of the node.
        node: String,
        /// Key of the missing label.
        key: String,
    },
    /// The machine of the node is not known.
    #[error("it is not known which machine {node} is on, and {{{{node.machine}}}} needs that")]
    NoMachine {
        /// Id of the node.
        node: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Text(String),
    Fact(TemplateFact),
}

/// A parsed text with facts in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<TemplatePart>,
}

impl Template {
    /// Parses a text with `{{fact}}` in it.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("{{") {
            literal.push_str(&rest[..at]);
            let begun = &rest[at + 2..];
            if let Some(escaped) = begun.strip_prefix("{{") {
                literal.push_str("{{");
                rest = escaped;
                continue;
            }
            let position = text.len() - begun.len() - 2;
            let unclosed = || TemplateError::Unclosed(text[..position].chars().count() + 1);
            let (name, behind) = begun.split_once("}}").ok_or_else(unclosed)?;
            if !literal.is_empty() {
                parts.push(TemplatePart::Text(std::mem::take(&mut literal)));
            }
            parts.push(TemplatePart::Fact(parse_fact(name)?));
            rest = behind;
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(TemplatePart::Text(literal));
        }
        Ok(Self { parts })
    }

    /// The facts in it, repeated as often as they occur.
    pub fn facts(&self) -> impl Iterator<Item = &TemplateFact> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Fact(fact) => Some(fact),
            TemplatePart::Text(_) => None,
        })
    }

    /// The text with the facts of one node filled in.
    ///
    /// The value of a fact is inserted as it is. Braces in it have no meaning.
    pub fn render(&self, facts: &TemplateFacts) -> Result<String, RenderError> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                TemplatePart::Text(literal) => text.push_str(literal),
                TemplatePart::Fact(fact) => text.push_str(&facts.fact_value(fact)?),
            }
        }
        Ok(text)
    }
}

impl TemplateFacts {
    fn fact_value(&self, fact: &TemplateFact) -> Result<String, RenderError> {
        Ok(match fact {
            TemplateFact::NodeId => self.node_id.clone(),
            TemplateFact::NodeUrlHost if self.node_address.contains(':') => {
                format!("[{}]", self.node_address)
            }
            TemplateFact::NodeAddress | TemplateFact::NodeUrlHost => self.node_address.clone(),
            TemplateFact::NodeMachine if self.node_machine.is_empty() => {
                return Err(RenderError::NoMachine { node: self.node_id.clone() });
            }
            TemplateFact::NodeMachine => self.node_machine.clone(),
            TemplateFact::NodeLabel(key) => {
                let missing = || RenderError::NoLabel { node: self.node_id.clone(), key: key.clone() };
                self.node_labels.get(key).cloned().ok_or_else(missing)?
            }
            TemplateFact::ClusterId => self.cluster_id.clone(),
            TemplateFact::ClusterCurators => self.cluster_curators.join(","),
            TemplateFact::RoleName => self.role_name.clone(),
            TemplateFact::RoleRevision => self.role_revision.to_string(),
            TemplateFact::ServiceName => self.service_name.clone(),
        })
    }
}

fn parse_fact(name: &str) -> Result<TemplateFact, TemplateError> {
    if let Some((_, fact)) = NAMED_FACTS.iter().find(|(known, _)| *known == name) {
        return Ok(fact.clone());
    }
    if let Some(key) = name.strip_prefix(LABEL_PREFIX) {
        label::check_label_key(key).map_err(TemplateError::Label)?;
        return Ok(TemplateFact::NodeLabel(key.to_owned()));
    }
    let facts: Vec<&str> = NAMED_FACTS.iter().map(|(name, _)| *name).collect();
    Err(TemplateError::Unknown {
        name: name.chars().take(100).collect(),
        facts: format!("{} and {LABEL_PREFIX}KEY", facts.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> TemplateFacts {
        TemplateFacts {
            node_id: "node-7".to_owned(),
            node_address: "10.0.0.7".to_owned(),
            node_machine: "m-7".to_owned(),
            node_labels: Labels::from([
                ("row".to_owned(), "7".to_owned()),
                ("a/b".to_owned(), "{{node.id}}".to_owned()),
            ]),
            cluster_id: "c".to_owned(),
            cluster_curators: vec!["10.0.0.1:1".to_owned(), "10.0.0.2:1".to_owned()],
            role_name: "web".to_owned(),
            role_revision: 4,
            service_name: "server".to_owned(),
        }
    }

    #[test]
    fn facts_are_replaced_and_everything_else_stays() {
        for (text, expected) in [
            ("", ""),
            ("plain {text} }} with } braces {", "plain {text} }} with } braces {"),
            ("{{node.id}}", "node-7"),
            ("--bind={{node.address}}:80", "--bind=10.0.0.7:80"),
            ("http://{{node.url_host}}:80/", "http://10.0.0.7:80/"),
            ("{{node.machine}}{{cluster.id}}", "m-7c"),
            ("{{cluster.curators}}", "10.0.0.1:1,10.0.0.2:1"),
            ("{{role.name}}/{{service.name}}@{{role.revision}}", "web/server@4"),
            ("row {{node.label.row}}", "row 7"),
            ("{{{{node.id}}", "{{node.id}}"),
            ("{{{{{{node.id}}", "{{node-7"),
            ("ü{{node.id}}ü", "ünode-7ü"),
            // The value of a fact is no template.
            ("{{node.label.a/b}}", "{{node.id}}"),
        ] {
            assert_eq!(Template::parse(text).unwrap().render(&facts()).unwrap(), expected, "{text:?}");
        }
    }

    #[test]
    fn ipv6_address_is_in_brackets_where_a_port_follows() {
        let facts = TemplateFacts { node_address: "2001:db8::7".to_owned(), ..facts() };
        let render = |text| Template::parse(text).unwrap().render(&facts).unwrap();
        assert_eq!(render("http://{{node.url_host}}:80/"), "http://[2001:db8::7]:80/");
        assert_eq!(render("--address {{node.address}}"), "--address 2001:db8::7");
    }

    #[test]
    fn every_named_fact_reads_back_as_it_is_written() {
        for (name, fact) in NAMED_FACTS {
            assert_eq!(fact.to_string(), name);
            let template = Template::parse(&format!("{{{{{name}}}}}")).unwrap();
            assert_eq!(template.parts, [TemplatePart::Fact(fact)]);
        }
        assert_eq!(TemplateFact::NodeLabel("row".to_owned()).to_string(), "node.label.row");
    }

    #[test]
    fn unknown_facts_are_rejected_at_declaration() {
        for text in
            ["{{node.ID}}", "{{ node.id }}", "{{}}", "{{id}}", "{{node.label}}", "a {{x}} b", "{{node.id}"]
        {
            assert!(Template::parse(text).is_err(), "{text:?}");
        }
        let error = Template::parse("{{node.name}}").unwrap_err().to_string();
        assert!(error.contains("\"node.name\"") && error.contains("node.id, node.address"), "{error}");
        assert!(error.contains("Write {{{{ for"), "{error}");
        assert!(matches!(Template::parse("{{node.label.-}}"), Err(TemplateError::Label(_))));
        assert_eq!(Template::parse("ü {{node.id"), Err(TemplateError::Unclosed(3)));
    }

    #[test]
    fn missing_label_stops_the_service_and_says_which() {
        let error = Template::parse("{{node.label.rack}}").unwrap().render(&facts()).unwrap_err();
        let sentence = error.to_string();
        assert!(sentence.contains("node-7 has no label \"rack\""), "{sentence}");
        assert!(sentence.contains("{{node.label.rack}}"), "{sentence}");
        let unsaid = TemplateFacts { node_machine: String::new(), ..facts() };
        assert!(Template::parse("{{node.machine}}").unwrap().render(&unsaid).is_err());
    }

    proptest::proptest! {
        #[test]
        fn escaped_text_comes_out_as_it_was(text in "[a{} é]{0,20}") {
            // Pairs of braces are read from the left, as the parser does.
            let template = Template::parse(&text.replace("{{", "{{{{"));
            proptest::prop_assert_eq!(template.unwrap().render(&facts()).unwrap(), text);
        }
    }
}
