//! Topics that `explain` knows: issues, phases, terms of the glossary, and pages with their sections.
//!
//! Names are compared without case, spaces and marks, so that `host key pinning`, `host-key-pinning` and
//! `HostKeyPinning` are one. A name may fit an issue and a term: then both are topics of it. A term without the words in
//! parentheses that follow it is a name, too: `snapshot` is that of a cluster and that of a machine.

use std::borrow::Cow;

use model::phase::Phase;

use crate::explain::pages::{GLOSSARY, ISSUE_PAGES, MANUAL_PAGES, find_manual_page};

/// Most names that are suggested for an unknown one.
const MAX_SUGGESTIONS: usize = 3;
/// Least similarity of a name that is suggested, from 0 to 1.
const MIN_SIMILARITY: f64 = 0.8;
/// Shortest part of a name that suggests the whole, in letters.
const MIN_PART: usize = 3;

/// What a topic is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TopicKind {
    /// A kind of issues.
    Issue,
    /// A phase of a machine.
    Phase,
    /// Another term of the glossary.
    Term,
    /// A page of the documentation, or a section of one.
    Page,
}

impl TopicKind {
    /// Its name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Issue => "issue",
            Self::Phase => "phase",
            Self::Term => "term",
            Self::Page => "page",
        }
    }
}

/// Something that can be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// What it is about.
    pub kind: TopicKind,
    /// The name by which it is found.
    pub name: String,
    /// The explanation, as Markdown.
    pub markdown: Cow<'static, str>,
}

/// A row of the glossary.
struct Term {
    name: &'static str,
    /// The page, or the section of a page, that explains more.
    link: Option<&'static str>,
    definition: &'static str,
}

impl Term {
    fn kind(&self) -> TopicKind {
        if self.name.parse::<Phase>().is_ok() { TopicKind::Phase } else { TopicKind::Term }
    }

    /// The definition, and the part of the documentation that it refers to.
    fn topic(&self) -> Topic {
        let mut markdown = format!("# {}\n\n{}\n", self.name, self.definition);
        if let Some(part) = self.link.and_then(find_part) {
            markdown.push('\n');
            markdown.push_str(&part);
        }
        Topic { kind: self.kind(), name: self.name.to_owned(), markdown: markdown.into() }
    }

    fn has_name(&self, key: &str) -> bool {
        let short = self.name.split_once(" (").map(|(name, _)| name);
        key_of(self.name) == key || short.is_some_and(|name| key_of(name) == key)
    }
}

/// Every topic of this name; empty if there is none.
#[must_use]
pub fn find_topics(name: &str) -> Vec<Topic> {
    if name.contains('#') {
        let link = name.to_lowercase().replacen('#', ".md#", 1);
        let section = find_part(&link).map(|markdown| Topic {
            kind: TopicKind::Page,
            name: name.to_lowercase(),
            markdown,
        });
        return section.into_iter().collect();
    }
    let key = key_of(name);
    let issues = ISSUE_PAGES.iter().filter(|(id, _)| key_of(id) == key);
    let mut topics: Vec<Topic> = issues
        .map(|(id, markdown)| Topic {
            kind: TopicKind::Issue,
            name: (*id).to_owned(),
            markdown: (*markdown).into(),
        })
        .collect();
    let terms: Vec<Term> = glossary().filter(|term| term.has_name(&key)).collect();
    topics.extend(terms.iter().map(Term::topic));
    for (page, _) in MANUAL_PAGES.iter().filter(|(page, _)| key_of(page) == key) {
        let link = format!("{page}.md");
        if terms.iter().any(|term| term.link == Some(link.as_str())) {
            continue;
        }
        let markdown = find_part(&link).unwrap_or_default();
        topics.push(Topic { kind: TopicKind::Page, name: (*page).to_owned(), markdown });
    }
    topics
}

/// The name and the kind of every topic: issues, then phases, terms and pages.
#[must_use]
pub fn list_topics() -> Vec<(TopicKind, &'static str)> {
    let issues = ISSUE_PAGES.iter().map(|(id, _)| (TopicKind::Issue, *id));
    let pages = MANUAL_PAGES.iter().map(|(page, _)| (TopicKind::Page, *page));
    let mut topics: Vec<_> =
        issues.chain(glossary().map(|term| (term.kind(), term.name))).chain(pages).collect();
    topics.sort_by_key(|(kind, _)| *kind);
    topics
}

/// The names that are most similar to an unknown one, best first.
#[must_use]
pub fn find_similar(name: &str) -> Vec<&'static str> {
    let key = key_of(name);
    let score = |known: &str| {
        let known = key_of(known);
        let is_part = key.len() >= MIN_PART && known.contains(&key);
        if is_part { 1.0 } else { strsim::jaro_winkler(&known, &key) }
    };
    let mut scored: Vec<(f64, &str)> =
        list_topics().into_iter().map(|(_, known)| (score(known), known)).collect();
    scored.retain(|(score, _)| *score >= MIN_SIMILARITY);
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut names: Vec<&str> = Vec::new();
    for (_, name) in scored {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.truncate(MAX_SUGGESTIONS);
    names
}

/// A name without what is not compared.
fn key_of(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// The rows of the glossary, in its order.
fn glossary() -> impl Iterator<Item = Term> {
    let rows = GLOSSARY.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    // Below the header and the line that separates it.
    rows.skip(2).filter_map(|row| {
        let (term, definition) = row.split_once(" | ")?;
        let linked = term.strip_prefix('[').and_then(|term| term.strip_suffix(')')?.split_once("]("));
        let (name, link) = linked.map_or((term, None), |(name, link)| (name, Some(link)));
        Some(Term { name, link, definition })
    })
}

/// The part of the documentation at a link such as `api.md#orders`. Of a page without a section it is everything before
/// the first section, and the names of all of them.
fn find_part(link: &str) -> Option<Cow<'static, str>> {
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let name = file.strip_suffix(".md")?;
    let page = find_manual_page(name)?;
    match anchor {
        Some(anchor) => find_section(page, anchor).map(Cow::Borrowed),
        None => Some(introduction(name, page)),
    }
}

/// The headings of a page: the place of each, its level, and its text.
fn headings(page: &str) -> Vec<(usize, usize, &str)> {
    let (mut found, mut place, mut in_code) = (Vec::new(), 0, false);
    for line in page.split_inclusive('\n') {
        in_code ^= line.starts_with("```");
        let text = line.trim_start_matches('#');
        let level = line.len() - text.len();
        if !in_code && (1..=6).contains(&level) && text.starts_with(' ') {
            found.push((place, level, text.trim()));
        }
        place += line.len();
    }
    found
}

/// The section with this anchor, with all sections in it.
fn find_section<'a>(page: &'a str, anchor: &str) -> Option<&'a str> {
    let headings = headings(page);
    let number = headings.iter().position(|(_, _, text)| anchor_of(text) == anchor)?;
    let (start, level, _) = *headings.get(number)?;
    let next = headings.iter().skip(number + 1).find(|(_, found, _)| *found <= level);
    page.get(start..next.map_or(page.len(), |(end, _, _)| *end))
}

fn introduction(name: &str, page: &'static str) -> Cow<'static, str> {
    let sections: Vec<_> = headings(page).into_iter().filter(|(_, level, _)| *level == 2).collect();
    let Some((end, _, _)) = sections.first() else { return page.into() };
    let names = sections.iter().map(|(_, _, text)| format!("* {name}#{}\n", anchor_of(text)));
    let names = names.collect::<Vec<_>>().concat();
    format!("{}Sections, for `shepherdctl explain`:\n\n{names}", page.get(..*end).unwrap_or_default()).into()
}

/// The anchor of a heading, as links name it.
fn anchor_of(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use model::issues::IssueKind;

    use super::*;

    fn kinds(name: &str) -> Vec<(TopicKind, String)> {
        find_topics(name).into_iter().map(|topic| (topic.kind, topic.name)).collect()
    }

    #[test]
    fn every_issue_and_every_phase_has_an_entry() {
        for id in IssueKind::ALL.map(IssueKind::id) {
            let topics = find_topics(id);
            let page = topics.iter().find(|topic| topic.kind == TopicKind::Issue && topic.name == id);
            assert!(page.is_some_and(|page| page.markdown.contains("**What to do.**")), "{id}");
        }
        for phase in Phase::ALL {
            let name = phase.as_str();
            let topics = find_topics(name);
            let entry = topics.iter().find(|topic| topic.kind == TopicKind::Phase && topic.name == name);
            assert!(entry.is_some_and(|entry| entry.markdown.contains("phase")), "{name}");
        }
    }

    #[test]
    fn name_is_found_in_every_spelling() {
        let term = |name: &str| (TopicKind::Term, name.to_owned());
        for (name, expected) in [
            ("READY", vec![(TopicKind::Phase, "Ready".to_owned())]),
            ("host key pinning", vec![term("host key pinning")]),
            ("Host-Key-Pinning", vec![term("host key pinning")]),
            ("snapshot", vec![term("snapshot (of a cluster)"), term("snapshot (of a machine)")]),
            ("brake", vec![(TopicKind::Issue, "brake".to_owned()), term("brake")]),
            (
                "needs-human",
                vec![
                    (TopicKind::Issue, "needs-human".to_owned()),
                    (TopicKind::Phase, "NeedsHuman".to_owned()),
                ],
            ),
            // The page is part of the term.
            ("plan", vec![term("plan")]),
            ("backup", vec![(TopicKind::Page, "backup".to_owned())]),
            ("api#orders", vec![(TopicKind::Page, "api#orders".to_owned())]),
            ("api#nothing", vec![]),
            ("frobnicate", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(kinds(name), expected, "{name}");
        }
    }

    #[test]
    fn every_name_that_is_listed_is_found() {
        for (kind, name) in list_topics() {
            assert!(kinds(name).contains(&(kind, name.to_owned())) || kind == TopicKind::Page, "{name}");
        }
    }

    #[test]
    fn every_link_of_the_glossary_leads_to_a_part_of_a_page() {
        let mut links = 0;
        for term in glossary() {
            // The issues are a folder.
            if let Some(link) = term.link.filter(|link| *link != "issues") {
                assert!(find_part(link).is_some(), "{}: {link}", term.name);
                links += 1;
            }
        }
        assert!(links > 50, "{links}");
    }

    #[test]
    fn similar_names_are_suggested_and_others_are_not() {
        assert_eq!(find_similar("brak"), ["brake"]);
        assert!(find_similar("Redy").contains(&"Ready"));
        assert!(find_similar("qarantine").contains(&"quarantine"));
        assert_eq!(find_similar("xyzzy"), [""; 0]);
        assert!(find_similar("e").len() <= MAX_SUGGESTIONS);
    }

    #[test]
    fn section_ends_at_the_next_one_of_its_level() {
        let page = "# p\n\ni\n\n## A b: `c`\n\n1\n\n### In it\n\n2\n\n```\n## code\n```\n\n## D\n\n3\n";
        let section = find_section(page, "a-b-c").unwrap();
        assert!(section.starts_with("## A b") && section.contains("## code") && !section.contains("## D"));
        assert_eq!(find_section(page, "in-it"), Some("### In it\n\n2\n\n```\n## code\n```\n\n"));
        assert_eq!(find_section(page, "e"), None);
    }
}
