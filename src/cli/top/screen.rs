//! The terminal: drawn on while somebody looks, and left as it was found however that ends.
//!
//! Keys are read by a thread of their own, because reading them blocks; questions are asked by a task of its own, so
//! that a server that does not answer keeps nobody from leaving.

use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::cli::error::CliError;
use crate::cli::source::Source;
use crate::cli::top::draw::{Status, draw};
use crate::cli::top::reader::{View, look};

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(15);
/// The wait before another try after one that failed, at the least.
const AGAIN: Duration = Duration::from_secs(1);

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// Leave.
    Leave,
    /// Ask now.
    Ask,
    /// Draw anew, as the terminal is now.
    Draw,
}

/// What came of a question.
enum Told {
    /// A page.
    View(Box<View>),
    /// It failed, and is asked again at this server.
    Trouble { why: String, asked: String },
    /// It was refused.
    Refused(CliError),
}

/// What is wished by an event, if anything.
fn wish(event: &Event) -> Option<Wish> {
    match event {
        Event::Resize(..) => Some(Wish::Draw),
        Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) => match code {
            KeyCode::Char('c' | 'd') if modifiers.contains(KeyModifiers::CONTROL) => Some(Wish::Leave),
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => Some(Wish::Leave),
            KeyCode::Char(' ' | 'r') => Some(Wish::Ask),
            _ => None,
        },
        _ => None,
    }
}

/// Shows pages until whoever looks leaves, or the program is told to end.
pub async fn run(source: Source, interval: Duration) -> Result<(), CliError> {
    let mut signals = Signals::new()?;
    let asked = name(&source);
    let (ask, questions) = mpsc::channel(1);
    let (tell, mut told) = mpsc::channel(1);
    let reader = Aborted(tokio::spawn(read(source, interval, questions, tell)));
    let terminal = Restored(ratatui::try_init()?);
    let shown = show(
        terminal,
        Status { asked, colours: colours(), ..Status::default() },
        &ask,
        &mut told,
        &mut signals,
    );
    let ended = shown.await;
    drop(reader);
    ended
}

async fn show(
    mut terminal: Restored,
    mut status: Status,
    ask: &mpsc::Sender<()>,
    told: &mut mpsc::Receiver<Told>,
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut keys = keys();
    let mut view: Option<View> = None;
    loop {
        terminal.0.draw(|frame| draw(frame, view.as_ref(), &status))?;
        tokio::select! {
            wished = keys.recv() => match wished {
                // Without a keyboard nobody is there.
                None | Some(Wish::Leave) => return Ok(()),
                // A question that waits already is this one.
                Some(Wish::Ask) => drop(ask.try_send(())),
                Some(Wish::Draw) => {}
            },
            said = told.recv() => match said {
                Some(Told::View(fresh)) => {
                    view = Some(*fresh);
                    status.trouble = None;
                }
                Some(Told::Trouble { why, asked }) => {
                    let since = view.as_ref().map_or_else(String::new, |view| {
                        format!("this is of {}; ", view.at.format("%H:%M:%S UTC"))
                    });
                    status.trouble = Some(format!("{since}no answer: {why}; asking {asked}"));
                    status.asked = asked;
                }
                Some(Told::Refused(error)) => return Err(error),
                None => return Ok(()),
            },
            () = signals.ended() => return Ok(()),
        }
    }
}

/// Asks at every interval, and at once when somebody wants that.
async fn read(
    mut source: Source,
    interval: Duration,
    mut questions: mpsc::Receiver<()>,
    tell: mpsc::Sender<Told>,
) {
    loop {
        let began = Instant::now();
        let answer = timeout(ANSWER, look(&source)).await;
        let (said, wait) = match answer {
            Ok(Ok(view)) => (Told::View(Box::new(view)), interval.saturating_sub(began.elapsed())),
            Ok(Err(error @ CliError::Wrong(_))) => (Told::Refused(error), interval),
            failed => {
                let why = match failed {
                    Ok(Err(error)) => error.to_string(),
                    _ => format!("it took longer than {} s", ANSWER.as_secs()),
                };
                if let Source::Api(remote) = &mut source {
                    // Where that fails so does the next question, which says so.
                    let _ = remote.go_on().await;
                }
                (Told::Trouble { why, asked: name(&source) }, interval.max(AGAIN))
            }
        };
        if tell.send(said).await.is_err() {
            return;
        }
        tokio::select! {
            () = sleep(wait) => {}
            wanted = questions.recv() => if wanted.is_none() { return },
        }
    }
}

/// Who is asked, for people.
fn name(source: &Source) -> String {
    match source {
        Source::Direct(bmdb) => bmdb.settings().place(),
        Source::Api(remote) => remote.server().to_owned(),
    }
}

/// Colours are for whoever has not asked for none: <https://no-color.org>.
fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// What keys wish, until there is no keyboard any more. The thread ends with the program, or at the key after.
fn keys() -> mpsc::Receiver<Wish> {
    let (send, receive) = mpsc::channel(16);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if let Some(wish) = wish(&event)
                && send.blocking_send(wish).is_err()
            {
                return;
            }
        }
    });
    receive
}

/// A terminal that is left as it was found.
struct Restored(DefaultTerminal);

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// A task that ends with what waits for it.
struct Aborted(JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What tells a program to end.
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

    async fn ended(&mut self) {
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
    fn keys_mean_what_the_page_says() {
        let key = |code, modifiers| Event::Key(KeyEvent::new(code, modifiers));
        let plain = KeyModifiers::NONE;
        for (event, expected) in [
            (key(KeyCode::Char('q'), plain), Some(Wish::Leave)),
            (key(KeyCode::Esc, plain), Some(Wish::Leave)),
            (key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Wish::Leave)),
            (key(KeyCode::Char('c'), plain), None),
            (key(KeyCode::Char(' '), plain), Some(Wish::Ask)),
            (Event::Resize(80, 24), Some(Wish::Draw)),
            (Event::FocusGained, None),
        ] {
            assert_eq!(wish(&event), expected, "{event:?}");
        }
    }
}
