//! The id behind a name, for orders of which the API requires an id.
//!
//! An order is never given to an object that a person may not mean: a name that fits none or several is refused before
//! anything is sent. A whole id is sent as it is, so that the order needs no list.

use uuid::Uuid;

use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::object::list::{MAX_CANDIDATES, MIN_ID_PREFIX};

/// An object that an order can name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedId {
    /// The id, of which the beginning is a name, too.
    pub(crate) id: String,
    /// Another name, which several objects may have; `None` if the kind has none.
    pub(crate) name: Option<String>,
    /// Whether an order can change the object. Of several with one name, those come first.
    pub(crate) is_current: bool,
}

/// A kind of objects in messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameSpace<'a> {
    /// One object of the kind, such as `token`.
    pub(crate) noun: &'a str,
    /// The command that lists the objects.
    pub(crate) list_command: &'a str,
}

/// Checks that a name on the command line has a visible character.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("a name cannot be empty".to_owned());
    }
    Ok(text.to_owned())
}

/// The id that `text` is, if it is a whole one.
pub(crate) fn whole_id(text: &str) -> Option<String> {
    Uuid::try_parse(text).ok().map(|id| id.to_string())
}

/// The id of the object that `text` names: by its id, the beginning of that, or its name. A text that fits none or
/// several is an error, one sentence.
pub(crate) fn resolve_id(space: NameSpace<'_>, text: &str, objects: &[NamedId]) -> Result<String, CliError> {
    let NameSpace { noun, list_command } = space;
    let start = text.to_ascii_lowercase();
    let fits = |object: &&NamedId| {
        object.name.as_deref() == Some(text)
            || (start.len() >= MIN_ID_PREFIX && object.id.starts_with(&start))
    };
    let mut found: Vec<&NamedId> = objects.iter().filter(fits).collect();
    if found.iter().any(|object| object.is_current) {
        found.retain(|object| object.is_current);
    }
    let message = match found.as_slice() {
        [one] => return Ok(one.id.clone()),
        [] => format!("there is no {noun} {text:?}; run: {list_command}"),
        several => {
            let mut ids: Vec<&str> =
                several.iter().take(MAX_CANDIDATES).map(|object| object.id.as_str()).collect();
            if several.len() > ids.len() {
                ids.push("…");
            }
            format!("{text:?} fits more than one {noun}; give one of: {}", ids.join(", "))
        }
    };
    Err(CliError::Ended { exit: ExitCode::NotFound, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: NameSpace<'_> = NameSpace { noun: "token", list_command: "shepherdctl get tokens" };

    fn object(id: &str, name: &str, is_current: bool) -> NamedId {
        NamedId { id: id.to_owned(), name: Some(name.to_owned()), is_current }
    }

    #[test]
    fn name_fits_one_object_or_is_refused() {
        let objects = [
            object("0199f3a2-5c1d-7e60-8000-000000000001", "lee", true),
            object("0199f3a2-5c1d-7e60-8000-000000000002", "lee", false),
            object("0199f3a2-ffff-7e60-8000-000000000003", "kim", true),
            object("0199f3a2-ffff-7e60-8000-000000000004", "kim", true),
            object("0199f3a2-eeee-7e60-8000-000000000005", "max", false),
        ];
        for (text, expected) in [
            // The other token of lee is revoked already.
            ("lee", Ok(0)),
            ("max", Ok(4)),
            ("0199f3a2-5c1d-7e60-8000-000000000002", Ok(1)),
            ("0199F3A2-EEEE", Ok(4)),
            ("kim", Err("\"kim\" fits more than one token; give one of: 0199f3a2-ffff-")),
            ("0199f3a2-ffff", Err("fits more than one token")),
            // Too short for the beginning of an id.
            ("0199f3a", Err("there is no token \"0199f3a\"; run: shepherdctl get tokens")),
            ("LEE", Err("there is no token \"LEE\"")),
        ] {
            match (resolve_id(SPACE, text, &objects), expected) {
                (Ok(id), Ok(index)) => assert_eq!(id, objects[index].id, "{text}"),
                (Err(error), Err(part)) => {
                    let sentence = error.to_string();
                    assert!(sentence.contains(part) && !sentence.contains('\n'), "{text}: {sentence}");
                    assert_eq!(error.exit_code(), ExitCode::NotFound, "{text}");
                }
                (found, expected) => panic!("{text}: {found:?} is not {expected:?}"),
            }
        }
    }

    #[test]
    fn whole_id_needs_no_list() {
        let id = "0199f3a2-5c1d-7e60-8000-000000000001";
        assert_eq!(whole_id(&id.to_ascii_uppercase()).as_deref(), Some(id));
        assert_eq!(whole_id("lee"), None);
        assert_eq!(whole_id(&id[..35]), None);
        assert!(parse_name(" ").is_err());
    }
}
