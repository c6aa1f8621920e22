//! Confirmation of orders that nothing undoes.
//!
//! The API decides which orders these are: the response to their dry run has what a person types
//! ([`RequiredConfirmation`]). On a terminal the dry run is shown with the fleet that it is about, and the text is read.
//! Elsewhere a flag takes its place. Without the flag nothing is ordered, and the error has the line to type.
//!
//! With the flag no dry run is sent before the order, except for words that the order itself must contain.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use clap::Args;
use prost::{Message, Name};
use tonic::{Response, Status};

use crate::client::decode::missing_field;
use crate::client::fleet_client::ApiChannel;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::order::idempotency_key::{command_with_flags, stdin_note};
use crate::order::retry::{preview_order, send_order};
use crate::output::{Format, print_stderr};
use model::order_rules::ConfirmationKind;
use proto::fleet::v1;
use proto::fleet::v1::order_confirmation::Kind;

/// The flag that confirms an order without a terminal.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct ConfirmFlag {
    /// Confirm an order that nothing undoes; required without a terminal, and for one object only
    #[arg(long)]
    pub yes: bool,
}

/// What a person must type before an order is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredConfirmation {
    /// What kind of text it is.
    pub kind: ConfirmationKind,
    /// The text to type.
    pub text: String,
    /// Why nothing undoes the order.
    pub reason: String,
}

impl RequiredConfirmation {
    /// Decodes the confirmation in the response to a dry run; `None` if the order needs none.
    pub(crate) fn decode(message: Option<&v1::OrderConfirmation>) -> Result<Option<Self>, CliError> {
        let Some(message) = message else { return Ok(None) };
        let kind = match Kind::try_from(message.kind).unwrap_or(Kind::Unspecified) {
            Kind::Name => ConfirmationKind::Name,
            Kind::Count => ConfirmationKind::Count,
            Kind::Words => ConfirmationKind::Words,
            Kind::Unspecified => return Err(missing_field("a known kind of confirmation")),
        };
        let (text, reason) = (message.text.clone(), message.reason.clone());
        Ok(Some(Self { kind, text, reason }))
    }

    /// The flags that take the place of the text.
    fn flags(&self) -> Vec<&str> {
        match self.kind {
            ConfirmationKind::Name => vec!["--yes"],
            ConfirmationKind::Count => vec!["--yes-count", &self.text],
            ConfirmationKind::Words => vec!["--confirm", &self.text],
        }
    }

    /// The confirmation as a line below the text of a dry run.
    pub(crate) fn describe(&self) -> String {
        let flags = command_with_flags(&[], &self.flags());
        format!("Nothing undoes this order: {}. Confirm it with: {flags}", self.reason)
    }
}

/// Sends an order that may have to be confirmed. `is_confirmed` is whether a flag confirms it, and `describe` what it does.
pub(crate) async fn send_confirmed_order(
    context: &CommandContext,
    reason: &str,
    is_confirmed: bool,
    describe: impl Fn(&v1::OrderResponse) -> String,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<v1::OrderResponse>, Status>,
) -> Result<v1::OrderResponse, CliError> {
    if !is_confirmed && !context.order_flags.dry_run {
        let dry_run = preview_order(context, reason, &give).await?;
        if let Some(required) = RequiredConfirmation::decode(dry_run.confirmation.as_ref())? {
            require_confirmation(context, &describe(&dry_run), &required)?;
        }
    }
    send_order(context, reason, give).await
}

/// Formats the outcome of an order that may have to be confirmed, and in the text of a dry run also what confirms it.
/// The JSON of the response has that already.
pub(crate) fn format_confirmed_outcome<M: Message + Name>(
    context: &CommandContext,
    response: &M,
    text: &str,
    confirmation: Option<&v1::OrderConfirmation>,
) -> Result<String, CliError> {
    let required = RequiredConfirmation::decode(confirmation)?;
    let outcome = context.format_outcome(response, text)?;
    Ok(match (context.format, required) {
        (Format::Table, Some(required)) => format!("{outcome}{}\n", required.describe()),
        (Format::Json | Format::Table, _) => outcome,
    })
}

/// Shows what an order would do, and lets a person type what confirms it. The error without a terminal has the line to
/// type.
pub(crate) fn require_confirmation(
    context: &CommandContext,
    effect: &str,
    required: &RequiredConfirmation,
) -> Result<(), CliError> {
    let fleet = context.client.describe_fleet();
    if !is_interactive() {
        let message = format!(
            "nothing undoes this order ({}), and nothing was ordered at {fleet}; to give it, run the line below{}",
            required.reason,
            stdin_note(&context.arguments)
        );
        let command = command_with_flags(&context.arguments, &required.flags());
        return Err(CliError::Unconfirmed { message, command });
    }
    let effect = context.target_flags.qualify(effect);
    print_stderr(&format!("nothing was changed yet at {fleet}; the order: {effect}"));
    print_stderr(&format!("Nothing undoes this order: {}.", required.reason));
    let line = read_answer(&format!("Type {} to give it: ", required.text))?;
    check_answer(line.as_deref(), required)
}

/// Whether a person reads standard error and can answer.
pub(crate) fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stderr().is_terminal()
}

/// Shows a prompt on standard error and reads a line; `None` at the end of the input.
pub(crate) fn read_answer(prompt: &str) -> Result<Option<String>, CliError> {
    // Ignored: without the prompt no answer is the right one.
    let _ = write!(std::io::stderr().lock(), "{prompt}");
    let mut line = String::new();
    let length = std::io::stdin().lock().read_line(&mut line).map_err(|error| {
        CliError::Invalid(format!("cannot read from the terminal: {error}; nothing was ordered"))
    })?;
    Ok((length > 0).then_some(line))
}

/// Compares what was typed with what confirms the order. `line` is `None` at the end of the input.
pub(crate) fn check_answer(line: Option<&str>, required: &RequiredConfirmation) -> Result<(), CliError> {
    let Some(typed) = line.map(str::trim) else {
        return Err(CliError::Invalid("the input ended, and nothing was ordered".to_owned()));
    };
    if typed == required.text {
        return Ok(());
    }
    match (required.kind, typed.parse::<u64>()) {
        (ConfirmationKind::Count, Ok(_)) => Err(CliError::Ended {
            exit: ExitCode::Refused,
            message: format!(
                "{typed} was typed, and the order is about {} machines; nothing was ordered",
                required.text
            ),
        }),
        (ConfirmationKind::Count, Err(_)) => {
            Err(CliError::Invalid(format!("{typed:?} is not a number; nothing was ordered")))
        }
        (ConfirmationKind::Name | ConfirmationKind::Words, _) => {
            Err(CliError::Invalid(format!("{typed:?} is not {:?}; nothing was ordered", required.text)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn required(kind: ConfirmationKind, text: &str) -> RequiredConfirmation {
        RequiredConfirmation { kind, text: text.to_owned(), reason: "it is gone then".to_owned() }
    }

    #[test]
    fn only_the_right_text_confirms_an_order() {
        use ConfirmationKind::{Count, Name, Words};
        for (kind, text, typed, expected) in [
            (Name, "sim/sim-0007", Some("sim/sim-0007\n"), 0),
            (Name, "sim/sim-0007", Some("  sim/sim-0007 \r\n"), 0),
            (Name, "sim/sim-0007", Some("sim-0007\n"), 2),
            (Name, "sim/sim-0007", Some("SIM/sim-0007\n"), 2),
            (Name, "sim/sim-0007", Some("y\n"), 2),
            (Name, "sim/sim-0007", Some("\n"), 2),
            (Name, "sim/sim-0007", None, 2),
            (Words, "m is not wiped", Some("m is not wiped\n"), 0),
            (Words, "m is not wiped", Some("m is wiped\n"), 2),
            (Count, "12", Some("12\n"), 0),
            (Count, "12", Some("11\n"), 4),
            (Count, "12", Some("twelve\n"), 2),
            (Count, "12", Some("-12\n"), 2),
            (Count, "12", None, 2),
        ] {
            let checked = check_answer(typed, &required(kind, text));
            let exit = checked.as_ref().err().map_or(0, |error| error.exit_code().number());
            assert_eq!(exit, expected, "{kind:?} {typed:?}");
            let message = checked.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(message.is_empty() || message.ends_with("nothing was ordered"), "{message}");
        }
    }

    #[test]
    fn confirmation_is_decoded_with_the_flags_that_replace_it() {
        let message = |kind: Kind, text: &str| v1::OrderConfirmation {
            kind: kind.into(),
            text: text.to_owned(),
            reason: "it is gone then".to_owned(),
        };
        for (kind, text, flags) in [
            (Kind::Name, "ams", "--yes"),
            (Kind::Count, "12", "--yes-count 12"),
            (Kind::Words, "m is not wiped", "--confirm 'm is not wiped'"),
        ] {
            let found = RequiredConfirmation::decode(Some(&message(kind, text))).unwrap().unwrap();
            let expected = format!("Nothing undoes this order: it is gone then. Confirm it with: {flags}");
            assert_eq!(found.describe(), expected);
        }
        assert_eq!(RequiredConfirmation::decode(None).unwrap(), None);
        let newer = RequiredConfirmation::decode(Some(&message(Kind::Unspecified, "x")));
        assert!(newer.is_err(), "an order is not given without a confirmation that is not understood");
    }
}
