//! A manifest as it is written, and everything that is wrong with one.
//!
//! Whoever wrote it made it with a tool, most likely, and what is wrong with it is wrong in more than one place. So reading goes on
//! behind the first problem, and what comes of it is a list.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;

use crate::model::declaration::Sha256;
use crate::model::kubernetes::bundle::{
    AddOn, Component, File, Image, LARGEST, LARGEST_ADD_ON, LARGEST_FILE, Manifest, Problems, Program,
};
use crate::model::kubernetes::version::Version;

/// The format that this program reads.
const FORMAT: u64 = 1;
/// Most files.
const MOST_FILES: usize = 200;
/// Longest name of a bundle, of anything in it, and of a version.
const LONGEST_NAME: usize = 80;
/// Most problems that are told at once.
pub(super) const MOST_PROBLEMS: usize = 20;

/// Reads a manifest.
pub(super) fn read(text: &[u8]) -> Result<Manifest, Problems> {
    let one = |problem: String| Problems(vec![problem]);
    // First of all the format: what a later one writes, this program need not understand to say so.
    let Format { format } = serde_json::from_slice(text).map_err(|error| one(no_manifest(&error)))?;
    if format != FORMAT {
        return Err(one(format!(
            "it is of format {format}, and this release reads format {FORMAT}: a bundle for another release of the role server"
        )));
    }
    let said: Said = serde_json::from_slice(text).map_err(|error| one(no_manifest(&error)))?;
    said.checked()
}

#[derive(Deserialize)]
struct Format {
    format: u64,
}

/// A manifest as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    #[serde(rename = "format")]
    _format: u64,
    name: String,
    kubernetes: String,
    needs_roleserver: String,
    files: Vec<SaidProgram>,
    #[serde(default)]
    add_ons: Vec<SaidAddOn>,
    #[serde(default)]
    images: Vec<SaidImage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidProgram {
    component: String,
    path: String,
    version: String,
    sha256: String,
    size: u64,
    mode: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidAddOn {
    name: String,
    path: String,
    sha256: String,
    size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SaidImage {
    name: String,
    reference: String,
    path: String,
    sha256: String,
    size: u64,
}

impl Said {
    fn checked(self) -> Result<Manifest, Problems> {
        let mut wrong = Wrong::default();
        if !is_word(&self.name) {
            wrong.say(format!(
                "its name {:?} is no word of letters, digits, `.`, `-`, `_` and `+`",
                shown(&self.name)
            ));
        }
        let kubernetes = wrong.unless(self.kubernetes.parse::<Version>(), "the version of Kubernetes");
        let needs_roleserver =
            wrong.unless(self.needs_roleserver.parse::<Version>(), "the oldest role server that can run it");
        let count = self.files.len() + self.add_ons.len() + self.images.len();
        if self.files.is_empty() {
            wrong.say("it holds no program".to_owned());
        }
        if count > MOST_FILES {
            wrong.say(format!("it names {count} files, and {MOST_FILES} are the most"));
            return Err(wrong.problems());
        }

        let mut programs = Vec::new();
        let mut components = BTreeSet::new();
        for said in self.files {
            let Some(component) = wrong.unless(said.component.parse::<Component>(), "a file") else {
                continue;
            };
            let path = component.path();
            let fits = if path.ends_with('/') { is_below(&said.path, path, "") } else { said.path == path };
            if !fits {
                let whither = if path.ends_with('/') { format!("{path}NAME") } else { path.to_owned() };
                wrong.say(format!("a {component} lies at {whither}, and not at {:?}", shown(&said.path)));
            }
            if component != Component::CniPlugin && !components.insert(component) {
                wrong.say(format!("it names two programs for {component}"));
            }
            if said.mode != "0755" {
                wrong.say(format!(
                    "the mode of {:?} is 0755, and not {:?}",
                    shown(&said.path),
                    shown(&said.mode)
                ));
            }
            if !is_word(&said.version) {
                wrong.say(format!(
                    "the version {:?} of {:?} is no word",
                    shown(&said.version),
                    shown(&said.path)
                ));
            } else if let Some(kubernetes) = kubernetes
                && component.is_of_kubernetes()
                && said.version.parse() != Ok(kubernetes)
            {
                wrong.say(format!(
                    "its {component} is of version {}, and the bundle of {kubernetes}",
                    said.version
                ));
            }
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_FILE, true) {
                programs.push(Program { component, version: said.version, file });
            }
        }
        let mut add_ons = Vec::new();
        for said in self.add_ons {
            wrong.named("add-on", &said.name, &said.path, "add-ons/", ".yaml");
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_ADD_ON, false) {
                add_ons.push(AddOn { name: said.name, file });
            }
        }
        let mut images = Vec::new();
        for said in self.images {
            wrong.named("image", &said.name, &said.path, "images/", ".tar");
            if !is_reference(&said.reference) {
                wrong.say(format!("{:?} is no reference of an image", shown(&said.reference)));
            }
            if let Some(file) = wrong.file(said.path, said.size, &said.sha256, LARGEST_FILE, false) {
                images.push(Image { name: said.name, reference: said.reference, file });
            }
        }
        if wrong.bytes > LARGEST {
            wrong.say(format!("its files have {} bytes together, and {LARGEST} are the most", wrong.bytes));
        }
        match (kubernetes, needs_roleserver) {
            (Some(kubernetes), Some(needs_roleserver)) if wrong.problems.is_empty() => {
                Ok(Manifest { name: self.name, kubernetes, needs_roleserver, programs, add_ons, images })
            }
            _ => Err(wrong.problems()),
        }
    }
}

/// What was found wrong so far, and what has to be known of all files together.
#[derive(Default)]
struct Wrong {
    problems: Vec<String>,
    paths: BTreeSet<String>,
    bytes: u64,
}

impl Wrong {
    fn say(&mut self, problem: String) {
        self.problems.push(problem);
    }

    fn problems(mut self) -> Problems {
        let more = self.problems.len().saturating_sub(MOST_PROBLEMS);
        self.problems.truncate(MOST_PROBLEMS);
        if more > 0 {
            self.problems.push(format!("and {more} more"));
        }
        Problems(self.problems)
    }

    fn unless<T>(&mut self, read: Result<T, impl fmt::Display>, what: &str) -> Option<T> {
        read.map_err(|error| self.say(format!("{what}: {error}"))).ok()
    }

    /// What is called by a name lies at a path that follows from it.
    fn named(&mut self, what: &str, name: &str, path: &str, directory: &str, ending: &str) {
        if !is_word(name)
            || path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)) != Some(name)
        {
            self.say(format!(
                "the {what} {:?} lies at {directory}NAME{ending} with its own name, and not at {:?}",
                shown(name),
                shown(path)
            ));
        }
    }

    fn file(
        &mut self,
        path: String,
        size: u64,
        sha256: &str,
        largest: u64,
        is_program: bool,
    ) -> Option<File> {
        self.bytes = self.bytes.saturating_add(size);
        if !(1..=largest).contains(&size) {
            self.say(format!("{:?} has {size} bytes, and such a file has 1 to {largest}", shown(&path)));
        }
        if !self.paths.insert(path.clone()) {
            self.say(format!("it names {:?} twice", shown(&path)));
        }
        let mut digest = [0; 32];
        if hex::decode_to_slice(sha256, &mut digest).is_err() || hex::encode(digest) != sha256 {
            self.say(format!(
                "{:?} is no SHA-256 of {:?}: it has 64 lower-case hexadecimal digits",
                shown(sha256),
                shown(&path)
            ));
            return None;
        }
        Some(File { path, size, sha256: Sha256(digest), is_program })
    }
}

/// Where it is wrong, and what serde makes of it, which shows no more than a word of the text.
fn no_manifest(error: &serde_json::Error) -> String {
    error.to_string().chars().take(300).collect()
}

/// The beginning of what somebody wrote.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(100).collect()
}

/// A name: no path, nothing hidden, nothing that a shell or a page would take for more than it is.
fn is_word(text: &str) -> bool {
    (1..=LONGEST_NAME).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '~'))
}

fn is_below(path: &str, directory: &str, ending: &str) -> bool {
    path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)).is_some_and(is_word)
}

/// `registry/name:tag`, as far as it matters that it is one harmless word.
fn is_reference(text: &str) -> bool {
    (1..=200).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/' | ':' | '@'))
}
