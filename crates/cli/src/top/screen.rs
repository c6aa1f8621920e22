//! Terminal event loop: keys, signals, refresh. The terminal is restored however the loop ends.
//!
//! The loop decides nothing: [`next_state`][] says what a key does, and what has to be read follows from the state. A thread
//! reads the keys, because reading them blocks. The data is fetched meanwhile, so that a server that does not answer
//! cannot keep the operator from quitting. When the page needs something else, the fetch under way is given up.

use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::style::force_color_output;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::output::color::SeverityColors;
use crate::output::zone::current_zone;
use crate::target_flags::TargetFlags;
use crate::top::data::{ReadRequest, TopAnswer, TopData};
use crate::top::draw::{FetchStatus, draw_page};
use crate::top::read::fetch_answer;
use crate::top::state::{Key, ScreenSize, TopEnd, TopState, next_state};

/// Longest wait for a response.
const FETCH_TIMEOUT: Duration = Duration::from_secs(15);
/// Shortest wait after a failed fetch.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);

/// What the page needs now. A change of it is fetched at once.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FetchRequest {
    read: ReadRequest,
    refreshes: u64,
}

impl FetchRequest {
    fn of_state(state: &TopState) -> Self {
        Self { read: state.request(), refreshes: state.refreshes }
    }
}

/// Result of a fetch.
enum FetchEvent {
    /// The fetch succeeded, with this data.
    Answer(Box<TopAnswer>),
    /// The fetch failed; the next one goes to this server, or to the database.
    Failed { reason: String, backend_name: String },
    /// The fetch was denied, so another attempt is useless.
    Denied(CliError),
}

/// The key of a terminal event, if it is one.
fn key_of_event(event: &Event) -> Option<Key> {
    let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press | KeyEventKind::Repeat, .. }) =
        event
    else {
        return match event {
            Event::Resize(columns, rows) => Some(Key::Resize(screen_size(*columns, *rows))),
            _ => None,
        };
    };
    let has_control = modifiers.contains(KeyModifiers::CONTROL);
    Some(match code {
        KeyCode::Char('c') if has_control => Key::Interrupt,
        KeyCode::Char('d') if has_control => Key::EndOfInput,
        KeyCode::Char(typed) if !has_control && !modifiers.contains(KeyModifiers::ALT) => Key::Char(*typed),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab => Key::Tab,
        KeyCode::BackTab => Key::BackTab,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        _ => return None,
    })
}

fn screen_size(columns: u16, rows: u16) -> ScreenSize {
    ScreenSize { columns: columns.into(), rows: rows.into() }
}

/// Shows pages until the operator quits. The error of a signal has the exit code that follows from it.
pub async fn run_screen(
    client: FleetClient,
    interval: Duration,
    colors: SeverityColors,
    target_flags: TargetFlags,
) -> Result<(), CliError> {
    // The library for terminals reads NO_COLOR, too. The flag counts more.
    force_color_output(colors == SeverityColors::On);
    let mut signals = Signals::new()?;
    let status = FetchStatus { backend_name: client.current_server().to_owned(), problem: None, colors };
    let terminal = TerminalGuard(ratatui::try_init()?);
    let size = terminal.0.size()?;
    let state = TopState::new(screen_size(size.width, size.height));
    let (requests, requested) = watch::channel(FetchRequest::of_state(&state));
    let (events, receiver) = mpsc::channel(1);
    let fetching = Box::pin(fetch_loop(client, interval, target_flags.clone(), requested, events));
    let page = Page { state, data: TopData::new(target_flags), status };
    let showing = Box::pin(event_loop(terminal, page, &requests, receiver, &mut signals));
    tokio::select! {
        ended = showing => ended,
        // It ends only after the other one.
        () = fetching => Ok(()),
    }
}

/// What is on the screen.
struct Page {
    state: TopState,
    data: TopData,
    status: FetchStatus,
}

impl Page {
    /// Records the result of a fetch. An error ends the program.
    fn record(&mut self, event: FetchEvent) -> Result<(), CliError> {
        match event {
            FetchEvent::Answer(answer) => {
                self.data.record(*answer);
                self.status.problem = None;
            }
            FetchEvent::Failed { reason, backend_name } => {
                let since = self.data.summary().map_or_else(String::new, |summary| {
                    format!("this is of {}; ", current_zone().format_time(summary.at))
                });
                self.status.problem =
                    Some(format!("{since}no response: {reason}; next query goes to {backend_name}"));
                self.status.backend_name = backend_name;
            }
            FetchEvent::Denied(error) => return Err(error),
        }
        Ok(())
    }
}

async fn event_loop(
    mut terminal: TerminalGuard,
    mut page: Page,
    requests: &watch::Sender<FetchRequest>,
    mut receiver: mpsc::Receiver<FetchEvent>,
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut keys = spawn_key_reader();
    loop {
        terminal.0.draw(|frame| draw_page(frame, &page.state, &page.data, &page.status))?;
        tokio::select! {
            // A terminal that is closed sends a signal, and ends the keys.
            biased;
            signal = signals.wait() => return Err(signal.error()),
            key = keys.recv() => {
                let Some(key) = key else { return Err(EndSignal::HangUp.error()) };
                page.state = next_state(page.state, key, &page.data);
                match page.state.end {
                    Some(TopEnd::Quit) => return Ok(()),
                    Some(TopEnd::Interrupted) => return Err(EndSignal::Interrupt.error()),
                    None => {}
                }
                let wanted = FetchRequest::of_state(&page.state);
                requests.send_if_modified(|current| {
                    let is_other = *current != wanted;
                    if is_other {
                        *current = wanted;
                    }
                    is_other
                });
            }
            event = receiver.recv() => match event {
                Some(event) => page.record(event)?,
                None => return Ok(()),
            },
        }
    }
}

/// Fetches at every interval, and at once when the page needs something else.
async fn fetch_loop(
    mut client: FleetClient,
    interval: Duration,
    target_flags: TargetFlags,
    mut requests: watch::Receiver<FetchRequest>,
    events: mpsc::Sender<FetchEvent>,
) {
    loop {
        let began = Instant::now();
        let read = requests.borrow_and_update().read.clone();
        let answer = tokio::select! {
            answer = timeout(FETCH_TIMEOUT, fetch_answer(&client, &read)) => answer,
            changed = requests.changed() => if changed.is_ok() { continue } else { return },
        };
        let (event, wait) = match answer {
            Ok(Ok(mut answer)) => {
                answer.qualify_commands(&target_flags);
                (FetchEvent::Answer(Box::new(answer)), interval.saturating_sub(began.elapsed()))
            }
            Ok(Err(error)) if error.is_rejection() => (FetchEvent::Denied(error), interval),
            failed => {
                let reason = match failed {
                    Ok(Err(error)) => target_flags.qualify(&error.to_string()),
                    _ => format!("it took longer than {} s", FETCH_TIMEOUT.as_secs()),
                };
                // Ignored: if this fails, the next fetch fails too and reports it.
                let _ = client.connect_to_next().await;
                let backend_name = client.current_server().to_owned();
                (FetchEvent::Failed { reason, backend_name }, interval.max(MIN_RETRY_DELAY))
            }
        };
        if events.send(event).await.is_err() {
            return;
        }
        tokio::select! {
            () = sleep(wait) => {}
            changed = requests.changed() => if changed.is_err() { return },
        }
    }
}

/// Starts a thread that sends the keys until the keyboard is closed. The thread ends with the program, or at the next key
/// after the receiver is dropped.
fn spawn_key_reader() -> mpsc::Receiver<Key> {
    let (send, receive) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if let Some(key) = key_of_event(&event)
                && send.blocking_send(key).is_err()
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

/// A signal that ends the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndSignal {
    /// SIGHUP, or a keyboard that is closed.
    HangUp,
    /// SIGINT, or Ctrl-C on the keyboard.
    Interrupt,
    /// SIGTERM, as a stop of the host sends it.
    Terminate,
}

impl EndSignal {
    /// The error with the exit code that follows from the signal.
    fn error(self) -> CliError {
        let (exit, reason) = match self {
            Self::HangUp => (ExitCode::HungUp, "its terminal is gone"),
            Self::Interrupt => (ExitCode::Interrupted, "it was interrupted"),
            Self::Terminate => (ExitCode::Terminated, "it was terminated"),
        };
        CliError::Ended {
            exit,
            message: format!("the page was closed, because {reason}; nothing was changed"),
        }
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

    async fn wait(&mut self) -> EndSignal {
        tokio::select! {
            _ = self.terminate.recv() => EndSignal::Terminate,
            _ = self.hangup.recv() => EndSignal::HangUp,
            _ = self.interrupt.recv() => EndSignal::Interrupt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_the_terminal_are_keys() {
        let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        let plain = KeyModifiers::NONE;
        for (event, expected) in [
            (key(KeyCode::Char('q'), plain), Some(Key::Char('q'))),
            (key(KeyCode::Char('G'), KeyModifiers::SHIFT), Some(Key::Char('G'))),
            (key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Key::Interrupt)),
            (key(KeyCode::Char('d'), KeyModifiers::CONTROL), Some(Key::EndOfInput)),
            (key(KeyCode::Char('c'), plain), Some(Key::Char('c'))),
            (key(KeyCode::Char('a'), KeyModifiers::CONTROL), None),
            (key(KeyCode::Char('a'), KeyModifiers::ALT), None),
            (key(KeyCode::Esc, plain), Some(Key::Escape)),
            (key(KeyCode::PageDown, plain), Some(Key::PageDown)),
            (key(KeyCode::F(1), plain), None),
            (Event::Resize(80, 24), Some(Key::Resize(ScreenSize { columns: 80, rows: 24 }))),
            (Event::FocusGained, None),
        ] {
            assert_eq!(key_of_event(&event), expected, "{event:?}");
        }
    }

    #[test]
    fn exit_code_follows_from_the_signal() {
        for (signal, expected) in
            [(EndSignal::HangUp, 129), (EndSignal::Interrupt, 130), (EndSignal::Terminate, 143)]
        {
            assert_eq!(signal.error().exit_code().number(), expected, "{signal:?}");
        }
    }
}
