//! What differs between the nodes that have one role: `{{fact}}` in the texts of a declaration.
//!
//! A declaration is one text for all nodes, and some of what a service is told is different on each: its
//! address, its name. So texts may hold facts by name, which the node replaces by what is true of itself.
//! There is nothing else: no conditions, no loops, no defaults. Whoever needs more has a program for it, and
//! a text that two readers understand differently is how a cluster is lost.
//!
//! A name that is not known is refused when the role is declared, by the curator, where a person reads the
//! answer; not on a hundred nodes at night. One thing can only be known on the node: whether it has the label
//! that is asked for. Where it has not, the service is not started, rather than started with an empty word in
//! the middle of its command.
//!
//! `{{{{` stands for `{{`, for files that have templates of their own.

use std::fmt;

use crate::model::label::{self, Labels};

/// Something that a node knows of itself or of its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// `node.id`
    NodeId,
    /// `node.address`
    NodeAddress,
    /// `node.machine`
    NodeMachine,
    /// `node.label.KEY`
    NodeLabel(String),
    /// `cluster.id`
    ClusterId,
    /// `cluster.curators`
    ClusterCurators,
    /// `role.name`
    RoleName,
    /// `role.revision`
    RoleRevision,
    /// `service.name`
    ServiceName,
}

/// Those that have one name.
const NAMED: [(&str, Fact); 8] = [
    ("node.id", Fact::NodeId),
    ("node.address", Fact::NodeAddress),
    ("node.machine", Fact::NodeMachine),
    ("cluster.id", Fact::ClusterId),
    ("cluster.curators", Fact::ClusterCurators),
    ("role.name", Fact::RoleName),
    ("role.revision", Fact::RoleRevision),
    ("service.name", Fact::ServiceName),
];
/// What the names of labels begin with.
const LABEL: &str = "node.label.";

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::NodeLabel(key) = self {
            return write!(f, "{LABEL}{key}");
        }
        let name = NAMED.iter().find(|(_, fact)| fact == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// What is true on one node, for one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The node's id.
    pub node_id: String,
    /// The address it reports.
    pub node_address: String,
    /// UUID of its machine; empty when nobody said.
    pub node_machine: String,
    /// Its labels.
    pub node_labels: Labels,
    /// UUID of the cluster.
    pub cluster_id: String,
    /// `host:port` of every curator.
    pub cluster_curators: Vec<String>,
    /// The role that the service belongs to.
    pub role_name: String,
    /// Which declaration of it.
    pub role_revision: u64,
    /// The service.
    pub service_name: String,
}

/// Why a text is no template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A pair of braces is not closed.
    #[error("{{{{ at character {0} is never closed; write {{{{{{{{ for two braces that are meant as such")]
    Unclosed(usize),
    /// A name is not known.
    #[error(
        "there is no fact {name:?}; there are {facts}. Write {{{{{{{{ for two braces that are meant as such"
    )]
    Unknown {
        /// What stands between the braces.
        name: String,
        /// What could.
        facts: String,
    },
    /// A label's key is none.
    #[error("{0}")]
    Label(String),
}

/// Why a text cannot be made on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The node has no such label.
    #[error(
        "{node} has no label {key:?}, which {{{{node.label.{key}}}}} asks for: set it, or take the role from the node"
    )]
    NoLabel {
        /// Which node.
        node: String,
        /// Which label.
        key: String,
    },
    /// Nobody said which machine the node is on.
    #[error("nobody has said which machine {node} is on, which {{{{node.machine}}}} asks for")]
    NoMachine {
        /// Which node.
        node: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Fact(Fact),
}

/// A text with facts in it, all of which are known by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

impl Template {
    /// Reads a text.
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
                parts.push(Part::Text(std::mem::take(&mut literal)));
            }
            parts.push(Part::Fact(fact(name)?));
            rest = behind;
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Text(literal));
        }
        Ok(Self { parts })
    }

    /// The facts in it, as often as they stand there.
    pub fn facts(&self) -> impl Iterator<Item = &Fact> {
        self.parts.iter().filter_map(|part| match part {
            Part::Fact(fact) => Some(fact),
            Part::Text(_) => None,
        })
    }

    /// The text as it is on one node.
    ///
    /// What a fact says is taken as it is; braces in it are no facts.
    pub fn render(&self, facts: &Facts) -> Result<String, RenderError> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                Part::Text(literal) => text.push_str(literal),
                Part::Fact(fact) => text.push_str(&facts.value(fact)?),
            }
        }
        Ok(text)
    }
}

impl Facts {
    fn value(&self, fact: &Fact) -> Result<String, RenderError> {
        Ok(match fact {
            Fact::NodeId => self.node_id.clone(),
            Fact::NodeAddress => self.node_address.clone(),
            Fact::NodeMachine if self.node_machine.is_empty() => {
                return Err(RenderError::NoMachine { node: self.node_id.clone() });
            }
            Fact::NodeMachine => self.node_machine.clone(),
            Fact::NodeLabel(key) => {
                let missing = || RenderError::NoLabel { node: self.node_id.clone(), key: key.clone() };
                self.node_labels.get(key).cloned().ok_or_else(missing)?
            }
            Fact::ClusterId => self.cluster_id.clone(),
            Fact::ClusterCurators => self.cluster_curators.join(","),
            Fact::RoleName => self.role_name.clone(),
            Fact::RoleRevision => self.role_revision.to_string(),
            Fact::ServiceName => self.service_name.clone(),
        })
    }
}

fn fact(name: &str) -> Result<Fact, TemplateError> {
    if let Some((_, fact)) = NAMED.iter().find(|(known, _)| *known == name) {
        return Ok(fact.clone());
    }
    if let Some(key) = name.strip_prefix(LABEL) {
        label::check_key(key).map_err(TemplateError::Label)?;
        return Ok(Fact::NodeLabel(key.to_owned()));
    }
    let facts: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
    Err(TemplateError::Unknown {
        name: name.chars().take(100).collect(),
        facts: format!("{} and {LABEL}KEY", facts.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
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
            ("{{node.machine}}{{cluster.id}}", "m-7c"),
            ("{{cluster.curators}}", "10.0.0.1:1,10.0.0.2:1"),
            ("{{role.name}}/{{service.name}}@{{role.revision}}", "web/server@4"),
            ("row {{node.label.row}}", "row 7"),
            ("{{{{node.id}}", "{{node.id}}"),
            ("{{{{{{node.id}}", "{{node-7"),
            ("ü{{node.id}}ü", "ünode-7ü"),
            // What a fact says is no template.
            ("{{node.label.a/b}}", "{{node.id}}"),
        ] {
            assert_eq!(Template::parse(text).unwrap().render(&facts()).unwrap(), expected, "{text:?}");
        }
    }

    #[test]
    fn every_named_fact_reads_back_as_it_is_written() {
        for (name, fact) in NAMED {
            assert_eq!(fact.to_string(), name);
            let template = Template::parse(&format!("{{{{{name}}}}}")).unwrap();
            assert_eq!(template.parts, [Part::Fact(fact)]);
        }
        assert_eq!(Fact::NodeLabel("row".to_owned()).to_string(), "node.label.row");
    }

    #[test]
    fn what_is_not_known_is_refused_when_it_is_declared() {
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
        let unsaid = Facts { node_machine: String::new(), ..facts() };
        assert!(Template::parse("{{node.machine}}").unwrap().render(&unsaid).is_err());
    }

    proptest::proptest! {
        #[test]
        fn escaped_text_comes_out_as_it_was(text in "[a{} é]{0,20}") {
            // Pairs of braces from the left, as the reader finds them.
            let template = Template::parse(&text.replace("{{", "{{{{"));
            proptest::prop_assert_eq!(template.unwrap().render(&facts()).unwrap(), text);
        }
    }
}
