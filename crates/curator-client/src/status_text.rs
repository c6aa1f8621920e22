//! The text of a gRPC status: what the curator answered, and why a connection failed.
//!
//! The message of a status that the client itself made is only "transport error". The cause, such as a refused connection
//! or a certificate that ended, is in the errors below it.

use model::excerpt::Excerpt;
use tonic::Status;

/// Most characters of a text. Refusals of curators name what to do, so they are longer than other excerpts.
const MAX_CHARS: usize = 1000;

/// The message of a status and those of its causes, each once, as one line.
#[must_use]
pub fn describe_status(status: &Status) -> String {
    let mut messages = vec![status.message().to_owned()];
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let text = error.to_string();
        if !messages.iter().any(|earlier| earlier.contains(&text)) {
            messages.push(text);
        }
        cause = error.source();
    }
    messages.retain(|text| !text.is_empty());
    let words = Excerpt::within(&messages.join(": "), MAX_CHARS);
    words.map_or_else(|| status.code().description().to_owned(), |words| words.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn text_has_the_message_and_its_causes() {
        let refused = std::io::Error::other("connection refused\u{1b}[0m");
        let mut status = Status::unavailable("transport error");
        status.set_source(Arc::new(refused));
        assert_eq!(describe_status(&status), "transport error: connection refused [0m");
        let mut repeated = Status::unavailable("no route to host");
        repeated.set_source(Arc::new(std::io::Error::other("no route")));
        assert_eq!(describe_status(&repeated), "no route to host");
        assert_eq!(describe_status(&Status::failed_precondition("a\nb")), "a b");
        assert_eq!(describe_status(&Status::unavailable("")), tonic::Code::Unavailable.description());
        assert_eq!(describe_status(&Status::internal("x".repeat(5000))).chars().count(), MAX_CHARS + 1);
    }
}
