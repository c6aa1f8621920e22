//! Terminal event loop: keys, signals, refresh. The terminal is restored however the loop ends.
//!
//! A thread reads the keys, because reading them blocks. A task fetches the data, so that a server that does not
//! answer cannot keep the operator from quitting.

use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::output::zone::current_zone;
use crate::target_flags::TargetFlags;
use crate::top::draw::{FetchStatus, draw_page};
use crate::top::fleet_summary::{FleetSummary, fetch_summary};

/// Longest wait for a response.
const FETCH_TIMEOUT: Duration = Duration::from_secs(15);
/// Shortest wait after a failed fetch.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Meaning of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UserAction {
    /// Quit; the terminal is restored.
    Quit,
    /// Fetch the data now.
    Refresh,
    /// Redraw the page for the current size of the terminal.
    Redraw,
}

/// Result of a fetch.
enum FetchEvent {
    /// The fetch succeeded, with this data.
    Summary(Box<FleetSummary>),
    /// The fetch failed; the next one goes to this server, or to the database.
    Failed { reason: String, backend_name: String },
    /// The fetch was denied, so another attempt is useless.
    Denied(CliError),
}

/// The action for a terminal event, if any.
fn user_action(event: &Event) -> Option<UserAction> {
    match event {
        Event::Resize(..) => Some(UserAction::Redraw),
        Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) => match code {
            KeyCode::Char('c' | 'd') if modifiers.contains(KeyModifiers::CONTROL) => Some(UserAction::Quit),
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => Some(UserAction::Quit),
            KeyCode::Char(' ' | 'r') => Some(UserAction::Refresh),
            _ => None,
        },
        _ => None,
    }
}

/// Shows pages until the operator quits, or the program receives a signal to end. Commands in messages get these flags.
pub async fn run_screen(
    client: FleetClient,
    interval: Duration,
    target_flags: TargetFlags,
) -> Result<(), CliError> {
    let mut signals = Signals::new()?;
    let query = client.current_server().to_owned();
    let (refresh, requests) = mpsc::channel(1);
    let (events, mut receiver) = mpsc::channel(1);
    let reader = AbortOnDrop(tokio::spawn(fetch_loop(client, interval, target_flags, requests, events)));
    let terminal = TerminalGuard(ratatui::try_init()?);
    let shown = event_loop(
        terminal,
        FetchStatus { backend_name: query, colours: colours_enabled(), ..FetchStatus::default() },
        &refresh,
        &mut receiver,
        &mut signals,
    );
    let ended = shown.await;
    drop(reader);
    ended
}

async fn event_loop(
    mut terminal: TerminalGuard,
    mut status: FetchStatus,
    refresh: &mpsc::Sender<()>,
    receiver: &mut mpsc::Receiver<FetchEvent>,
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut keys = spawn_key_reader();
    let mut view: Option<FleetSummary> = None;
    loop {
        terminal.0.draw(|frame| draw_page(frame, view.as_ref(), &status))?;
        tokio::select! {
            wished = keys.recv() => match wished {
                // The keyboard is closed, so the operator is gone.
                None | Some(UserAction::Quit) => return Ok(()),
                // A request that waits already covers this one.
                Some(UserAction::Refresh) => drop(refresh.try_send(())),
                Some(UserAction::Redraw) => {}
            },
            event = receiver.recv() => match event {
                Some(FetchEvent::Summary(fresh)) => {
                    view = Some(*fresh);
                    status.problem = None;
                }
                Some(FetchEvent::Failed { reason: why, backend_name: query }) => {
                    let since = view.as_ref().map_or_else(String::new, |view| {
                        format!("this is of {}; ", current_zone().format_time(view.at))
                    });
                    status.problem = Some(format!("{since}no response: {why}; next query goes to {query}"));
                    status.backend_name = query;
                }
                Some(FetchEvent::Denied(error)) => return Err(error),
                None => return Ok(()),
            },
            () = signals.wait() => return Ok(()),
        }
    }
}

/// Fetches at every interval, and at once on request.
async fn fetch_loop(
    mut client: FleetClient,
    interval: Duration,
    target_flags: TargetFlags,
    mut requests: mpsc::Receiver<()>,
    events: mpsc::Sender<FetchEvent>,
) {
    loop {
        let began = Instant::now();
        let answer = timeout(FETCH_TIMEOUT, fetch_summary(&client)).await;
        let (event, wait) = match answer {
            Ok(Ok(mut view)) => {
                view.qualify_commands(&target_flags);
                (FetchEvent::Summary(Box::new(view)), interval.saturating_sub(began.elapsed()))
            }
            Ok(Err(error)) if error.is_rejection() => (FetchEvent::Denied(error), interval),
            failed => {
                let why = match failed {
                    Ok(Err(error)) => target_flags.qualify(&error.to_string()),
                    _ => format!("it took longer than {} s", FETCH_TIMEOUT.as_secs()),
                };
                // Ignored: if this fails, the next fetch fails too and reports it.
                let _ = client.connect_to_next().await;
                let backend_name = client.current_server().to_owned();
                (FetchEvent::Failed { reason: why, backend_name }, interval.max(MIN_RETRY_DELAY))
            }
        };
        if events.send(event).await.is_err() {
            return;
        }
        tokio::select! {
            () = sleep(wait) => {}
            wanted = requests.recv() => if wanted.is_none() { return },
        }
    }
}

/// Colours are on unless `NO_COLOR` is set: <https://no-color.org>.
fn colours_enabled() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Starts a thread that sends the actions of keys until the keyboard is closed. The thread ends with the program, or
/// at the next key after the receiver is dropped.
fn spawn_key_reader() -> mpsc::Receiver<UserAction> {
    let (send, receive) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if let Some(wish) = user_action(&event)
                && send.blocking_send(wish).is_err()
            {
                return;
            }
        }
    });
    receive
}

/// Restores the terminal when dropped.
struct TerminalGuard(DefaultTerminal);

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Aborts the task when dropped.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The signals that end the program.
struct Signals {
    terminate: Signal,
    hangup: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_the_help_line() {
        let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        let plain = KeyModifiers::NONE;
        for (event, expected) in [
            (key(KeyCode::Char('q'), plain), Some(UserAction::Quit)),
            (key(KeyCode::Esc, plain), Some(UserAction::Quit)),
            (key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(UserAction::Quit)),
            (key(KeyCode::Char('c'), plain), None),
            (key(KeyCode::Char(' '), plain), Some(UserAction::Refresh)),
            (Event::Resize(80, 24), Some(UserAction::Redraw)),
            (Event::FocusGained, None),
        ] {
            assert_eq!(user_action(&event), expected, "{event:?}");
        }
    }
}
