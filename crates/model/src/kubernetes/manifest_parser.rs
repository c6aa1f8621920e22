//! Parse and validate a bundle manifest.
//!
//! A manifest is most likely written by a tool, so an error usually occurs in several places. Validation continues
//! after the first problem and returns a list.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;

use crate::kubernetes::bundle_manifest::{
    BundleAddOn, BundleComponent, BundleFile, BundleImage, BundleManifest, BundleProgram, MAX_ADD_ON_BYTES,
    MAX_BUNDLE_BYTES, MAX_FILE_BYTES, ManifestProblems,
};
use crate::kubernetes::version::ReleaseVersion;
use crate::role_declaration::Sha256;
use crate::text_file::decode_text;

/// The format that this program reads.
const SUPPORTED_FORMAT: u64 = 1;
/// Most files in a manifest, of all kinds together.
const MAX_FILES: usize = 200;
/// Longest name of a bundle, of anything in it, and of a version.
const MAX_NAME_CHARS: usize = 80;
/// Most problems that are reported at once.
pub(super) const MAX_PROBLEMS: usize = 20;

/// Parses and validates a manifest.
pub(super) fn parse_manifest(text: &[u8]) -> Result<BundleManifest, ManifestProblems> {
    let one = |problem: String| ManifestProblems(vec![problem]);
    let text = decode_text(text).map_err(|error| one(error.to_string()))?.as_bytes();
    // The format comes first: a later format is recognised and rejected without understanding the rest.
    let FormatOnly { format } =
        serde_json::from_slice(text).map_err(|error| one(describe_json_error(&error)))?;
    if format != SUPPORTED_FORMAT {
        return Err(one(format!(
            "it is of format {format}, and this release reads format {SUPPORTED_FORMAT}: a bundle for another release of the role server"
        )));
    }
    let manifest: RawManifest =
        serde_json::from_slice(text).map_err(|error| one(describe_json_error(&error)))?;
    manifest.validate()
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u64,
}

/// A manifest as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawManifest {
    #[serde(rename = "format")]
    _format: u64,
    name: String,
    kubernetes: String,
    needs_roleserver: String,
    files: Vec<RawProgram>,
    #[serde(default)]
    add_ons: Vec<RawAddOn>,
    #[serde(default)]
    images: Vec<RawImage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawProgram {
    component: String,
    path: String,
    version: String,
    sha256: String,
    size: u64,
    mode: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAddOn {
    name: String,
    path: String,
    sha256: String,
    size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawImage {
    name: String,
    reference: String,
    path: String,
    sha256: String,
    size: u64,
}

impl RawManifest {
    fn validate(self) -> Result<BundleManifest, ManifestProblems> {
        let mut wrong = ManifestValidator::default();
        if !is_plain_name(&self.name) {
            wrong.add_problem(format!(
                "its name {:?} is no word of letters, digits, `.`, `-`, `_` and `+`",
                truncate(&self.name)
            ));
        }
        let kubernetes =
            wrong.ok_or_problem(self.kubernetes.parse::<ReleaseVersion>(), "the version of Kubernetes");
        let needs_roleserver = wrong.ok_or_problem(
            self.needs_roleserver.parse::<ReleaseVersion>(),
            "the oldest role server that can run it",
        );
        let count = self.files.len() + self.add_ons.len() + self.images.len();
        if self.files.is_empty() {
            wrong.add_problem("it holds no program".to_owned());
        }
        if count > MAX_FILES {
            wrong.add_problem(format!("it names {count} files, and {MAX_FILES} is the maximum"));
            return Err(wrong.into_problems());
        }

        let mut programs = Vec::new();
        let mut components = BTreeSet::new();
        for program in self.files {
            programs.extend(wrong.check_program(program, kubernetes, &mut components));
        }
        let mut add_ons = Vec::new();
        for add_on in self.add_ons {
            wrong.check_named_path("add-on", &add_on.name, &add_on.path, "add-ons/", ".yaml");
            if let Some(file) =
                wrong.check_file(add_on.path, add_on.size, &add_on.sha256, MAX_ADD_ON_BYTES, false)
            {
                add_ons.push(BundleAddOn { name: add_on.name, file });
            }
        }
        let mut images = Vec::new();
        for image in self.images {
            wrong.check_named_path("image", &image.name, &image.path, "images/", ".tar");
            if !is_reference(&image.reference) {
                wrong.add_problem(format!("{:?} is no reference of an image", truncate(&image.reference)));
            }
            if let Some(file) = wrong.check_file(image.path, image.size, &image.sha256, MAX_FILE_BYTES, false)
            {
                images.push(BundleImage { name: image.name, reference: image.reference, file });
            }
        }
        if wrong.bytes > MAX_BUNDLE_BYTES {
            wrong.add_problem(format!(
                "its files have {} bytes together, and {MAX_BUNDLE_BYTES} is the maximum",
                wrong.bytes
            ));
        }
        match (kubernetes, needs_roleserver) {
            (Some(kubernetes), Some(needs_roleserver)) if wrong.problems.is_empty() => Ok(BundleManifest {
                name: self.name,
                kubernetes,
                needs_roleserver,
                programs,
                add_ons,
                images,
            }),
            _ => Err(wrong.into_problems()),
        }
    }
}

/// The problems so far, and what has to be checked across all files.
#[derive(Default)]
struct ManifestValidator {
    problems: Vec<String>,
    paths: BTreeSet<String>,
    bytes: u64,
}

impl ManifestValidator {
    /// Checks a program of the bundle; `components` are those that have one already.
    fn check_program(
        &mut self,
        program: RawProgram,
        kubernetes: Option<ReleaseVersion>,
        components: &mut BTreeSet<BundleComponent>,
    ) -> Option<BundleProgram> {
        let component = self.ok_or_problem(program.component.parse::<BundleComponent>(), "a file")?;
        let path = component.path();
        let fits = if path.ends_with('/') {
            is_named_path_below(&program.path, path, "")
        } else {
            program.path == path
        };
        if !fits {
            let expected_path = if path.ends_with('/') { format!("{path}NAME") } else { path.to_owned() };
            self.add_problem(format!(
                "a {component} lies at {expected_path}, and not at {:?}",
                truncate(&program.path)
            ));
        }
        if component != BundleComponent::CniPlugin && !components.insert(component) {
            self.add_problem(format!("it names two programs for {component}"));
        }
        if program.mode != "0755" {
            self.add_problem(format!(
                "the mode of {:?} is 0755, and not {:?}",
                truncate(&program.path),
                truncate(&program.mode)
            ));
        }
        if !is_plain_name(&program.version) {
            self.add_problem(format!(
                "the version {:?} of {:?} is no word",
                truncate(&program.version),
                truncate(&program.path)
            ));
        } else if let Some(kubernetes) = kubernetes
            && component.has_kubernetes_version()
            && program.version.parse() != Ok(kubernetes)
        {
            self.add_problem(format!(
                "its {component} is of version {}, and the bundle of {kubernetes}",
                program.version
            ));
        }
        let file = self.check_file(program.path, program.size, &program.sha256, MAX_FILE_BYTES, true)?;
        Some(BundleProgram { component, version: program.version, file })
    }

    fn add_problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    fn into_problems(mut self) -> ManifestProblems {
        let more = self.problems.len().saturating_sub(MAX_PROBLEMS);
        self.problems.truncate(MAX_PROBLEMS);
        if more > 0 {
            self.problems.push(format!("and {more} more"));
        }
        ManifestProblems(self.problems)
    }

    fn ok_or_problem<T>(&mut self, read: Result<T, impl fmt::Display>, what: &str) -> Option<T> {
        read.map_err(|error| self.add_problem(format!("{what}: {error}"))).ok()
    }

    /// Checks that a named file lies at the path that follows from its name.
    fn check_named_path(&mut self, what: &str, name: &str, path: &str, directory: &str, ending: &str) {
        if !is_plain_name(name)
            || path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)) != Some(name)
        {
            self.add_problem(format!(
                "the {what} {:?} lies at {directory}NAME{ending} with its own name, and not at {:?}",
                truncate(name),
                truncate(path)
            ));
        }
    }

    fn check_file(
        &mut self,
        path: String,
        size: u64,
        sha256: &str,
        largest: u64,
        is_program: bool,
    ) -> Option<BundleFile> {
        self.bytes = self.bytes.saturating_add(size);
        if !(1..=largest).contains(&size) {
            self.add_problem(format!(
                "{:?} has {size} bytes, and such a file has 1 to {largest}",
                truncate(&path)
            ));
        }
        if !self.paths.insert(path.clone()) {
            self.add_problem(format!("it names {:?} twice", truncate(&path)));
        }
        let mut digest = [0; 32];
        if hex::decode_to_slice(sha256, &mut digest).is_err() || hex::encode(digest) != sha256 {
            self.add_problem(format!(
                "{:?} is not a SHA-256 of {:?}: it has 64 lower-case hexadecimal digits",
                truncate(sha256),
                truncate(&path)
            ));
            return None;
        }
        Some(BundleFile { path, size, sha256: Sha256(digest), is_program })
    }
}

/// Position and reason of a JSON error. The message contains at most a word of the text.
fn describe_json_error(error: &serde_json::Error) -> String {
    error.to_string().chars().take(300).collect()
}

/// The beginning of a text from outside, for messages.
pub(super) fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Whether this is a plain name: no path, nothing hidden, nothing that is special in a shell or a page.
fn is_plain_name(text: &str) -> bool {
    (1..=MAX_NAME_CHARS).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '~'))
}

fn is_named_path_below(path: &str, directory: &str, ending: &str) -> bool {
    path.strip_prefix(directory).and_then(|rest| rest.strip_suffix(ending)).is_some_and(is_plain_name)
}

/// Whether this looks like `registry/name:tag`: one harmless word is enough.
fn is_reference(text: &str) -> bool {
    (1..=200).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/' | ':' | '@'))
}
