//! Completion of command lines in bash, zsh and fish.
//!
//! `shepherdctl completions SHELL` prints a small script that registers this program with the shell. For each request the
//! shell runs `shepherdctl -- WORD…` with `COMPLETE` set to its name in the environment, and reads candidates from standard
//! output. So commands and flags are always those of the program that is installed.
//!
//! 1. [`words`][] turns what the shell passes into the words of the line. Shells split and quote them differently.
//! 2. [`grammar`][] asks the engine of `clap_complete` which subcommands, flags and values fit. For a value that is the name
//!    of an object, the engine records a [`names::NameQuery`].
//! 3. [`names`][] answers that query: from the contexts file, or by one call of the API with a time limit.
//! 4. [`shell`][] writes the candidates as the shell reads them.
//!
//! # Invariants
//!
//! * A process that completes prints candidates or nothing, writes nothing to standard error, prompts for nothing, and exits
//!   with 0. No server, a silent one, and a credential that is missing or refused all give no names.
//! * Names are those of the fleet that the command would use, or none. No database is opened: that would take longer than the
//!   time limit, at each request.
//! * A variable `COMPLETE` that is left in the environment changes no command: only a line whose first argument is `--` is
//!   completed, and no command is typed so.
//!
//! The engine is an unstable feature of `clap_complete`, so its version is pinned. A change of its scripts needs new ones on
//! each host: [`words`][] reads the variables that the scripts set.

use std::process::ExitCode;
use std::time::Duration;

use crate::completions::grammar::complete_words;
use crate::completions::names::{NAME_TIME_LIMIT, NameEnvironment, find_names};
use crate::completions::shell::Candidate;
use crate::completions::words::CompletionRequest;
use crate::output::print_text;

pub mod grammar;
pub mod names;
pub mod shell;
pub mod words;

/// Answers a request of a shell. The exit code is always 0: shells show errors in the line that is being typed.
#[must_use]
pub fn answer_completion(request: &CompletionRequest) -> ExitCode {
    // Without a runtime there is nothing to offer.
    if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
        let environment = NameEnvironment::of_process();
        let text = runtime.block_on(complete_line(request, &environment, NAME_TIME_LIMIT));
        // Ignored: the shell reads no more.
        let _ = print_text(&text);
        // The resolver of host names may still block a thread, which the time limit does not end.
        runtime.shutdown_background();
    }
    ExitCode::SUCCESS
}

/// The candidates for the last word, as the shell reads them. Names of the API are waited for until `limit` is over.
pub async fn complete_line(
    request: &CompletionRequest,
    environment: &NameEnvironment,
    limit: Duration,
) -> String {
    let (mut candidates, query) = complete_words(request.words());
    if let Some(query) = query {
        let names = find_names(&query, request.words(), environment, limit).await;
        candidates.extend(names.into_iter().map(Candidate::of_word));
    }
    request.format(&candidates)
}
