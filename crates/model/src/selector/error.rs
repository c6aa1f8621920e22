//! Why a text is no selector.

/// Most characters of a text that an error repeats.
const SHOWN_CHARS: usize = 60;

/// Why a text is no selector, as a sentence that names the way out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SelectorError {
    message: String,
    /// The whole selector in which the wrong key is that of a label; `None` unless that key alone is wrong.
    pub(super) corrected: Option<String>,
}

impl SelectorError {
    pub(super) const fn new(message: String) -> Self {
        Self { message, corrected: None }
    }

    /// The same error, with the selector in which the wrong key is that of a label.
    pub(super) fn with_correction(self, corrected: String) -> Self {
        Self { corrected: Some(corrected), ..self }
    }
}

/// The beginning of a text in quotes, for a sentence. It has no control characters and is of limited length.
pub(super) fn quote_excerpt(text: &str) -> String {
    let mut short: String = text.chars().take(SHOWN_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}
