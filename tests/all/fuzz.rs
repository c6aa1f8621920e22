//! Fuzzing of every decoder of external input.
//!
//! A decoder takes bytes from an external source and returns a value, or a sentence about what is wrong with them.
//! With any bytes, it does not panic, does not take long, and does not use much more memory than they have.
//!
//! To add one: a line in [`DECODERS`], and at least one good input in `tests/fuzz/corpus/NAME/`. The inputs there are
//! tried first and then changed in ways that decoders often handle wrongly. `make test` does that a few hundred times
//! each, always the same; `make fuzz` for a minute each (`FUZZ_SECONDS`), each time differently (`FUZZ_DECODER` selects
//! one). An input that breaks a decoder is written to `target/fuzz/` and belongs into the corpus once the decoder is
//! fixed.

#![expect(clippy::unwrap_used, reason = "where the test's own files cannot be written, the test ends")]
#![expect(clippy::unnecessary_wraps, reason = "decoders have one shape, those that take anything too")]

mod decoders;
mod provider_answer;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use rustix::time::{ClockId, clock_gettime};

use self::decoders::{DECODERS, Decode};
use crate::harness::aloud::TestResult;
use crate::harness::memory;

/// Longest input that is generated.
const LONGEST: usize = 256 << 10;

/// The memory that a decoder may use at one time, for any input.
const MEMORY: usize = 48 << 20;

/// The processor time that a decoder may use. Time in which it waits for a disk does not count.
const PATIENCE: Duration = Duration::from_secs(10);

const SHORT_FORM_CASES: u32 = 300;

/// One way to change an input.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Cut(Index),
    Drop(Index, Index),
    Insert(Index, Vec<u8>),
    Overwrite(Index, &'static [u8]),
    Repeat(Index, Index, usize),
    Splice(Index, Index),
    Replace(Vec<u8>),
}

fn change() -> impl Strategy<Value = Change> {
    const NUMBERS: [&[u8]; 10] = [
        &[0],
        &[0xff],
        &[0x7f],
        &[0x80],
        &[0xff, 0xff],
        &[0xff, 0xff, 0xff, 0x7f],
        &[0xff; 8],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        b"18446744073709551616",
        b"\0\n\r\x1b[2J\xc3(",
    ];
    let at = any::<Index>;
    prop_oneof![
        4 => (at(), 1..=255_u8).prop_map(|(at, bits)| Change::Flip(at, bits)),
        1 => at().prop_map(Change::Cut),
        2 => (at(), at()).prop_map(|(from, length)| Change::Drop(from, length)),
        2 => (at(), vec(any::<u8>(), 1..16)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        3 => (at(), proptest::sample::select(&NUMBERS[..])).prop_map(|(at, bytes)| Change::Overwrite(at, bytes)),
        2 => (at(), at(), 1..100_000_usize).prop_map(|(from, length, times)| Change::Repeat(from, length, times)),
        2 => (at(), at()).prop_map(|(other, at)| Change::Splice(other, at)),
        1 => vec(any::<u8>(), 0..300).prop_map(Change::Replace),
    ]
}

fn apply(change: &Change, bytes: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let place = |at: &Index, bytes: &[u8]| at.index(bytes.len() + 1);
    match change {
        Change::Flip(at, bits) if !bytes.is_empty() => {
            let at = at.index(bytes.len());
            bytes[at] ^= bits;
        }
        Change::Flip(..) => {}
        Change::Cut(at) => bytes.truncate(place(at, bytes)),
        Change::Drop(from, length) => {
            let from = place(from, bytes);
            let end = from + place(length, &bytes[from..]);
            bytes.drain(from..end);
        }
        Change::Insert(at, more) => {
            let at = place(at, bytes);
            bytes.splice(at..at, more.iter().copied());
        }
        Change::Overwrite(at, more) => {
            let at = place(at, bytes);
            let end = (at + more.len()).min(bytes.len());
            bytes.splice(at..end, more.iter().copied());
        }
        Change::Repeat(from, length, times) => {
            let from = place(from, bytes);
            // Mostly short pieces, because many of them fit.
            let end = from + place(length, &bytes[from..]).min(1 + times % 64);
            let times = (*times).min((LONGEST - bytes.len().min(LONGEST)) / (end - from).max(1));
            let more = bytes[from..end.min(bytes.len())].repeat(times);
            bytes.splice(from..from, more);
        }
        Change::Splice(other, at) => {
            let other = &corpus[other.index(corpus.len())];
            let at = place(at, bytes);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[at.min(other.len())..]);
        }
        Change::Replace(other) => bytes.clone_from(other),
    }
    bytes.truncate(LONGEST);
}

/// The processor time of this thread so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
}

/// The rules for a decoder, for any input.
fn holds(decode: Decode, bytes: &[u8]) -> Result<(), TestCaseError> {
    let began = processor_time();
    let (outcome, peak) = memory::peak_of(|| decode(bytes));
    let took = processor_time().saturating_sub(began);
    prop_assert!(took < PATIENCE, "it took {took:?}");
    prop_assert!(peak < MEMORY, "it held {peak} bytes for {} bytes", bytes.len());
    if let Err(sentence) = outcome {
        let odd = |c: char| c.is_control() && c != '\n';
        prop_assert!(!sentence.trim().is_empty(), "the error says nothing");
        prop_assert!(!sentence.contains(odd), "the error would change a person's terminal: {sentence:?}");
        prop_assert!(sentence.chars().count() < 2000, "nobody reads so much: {sentence}");
    }
    Ok(())
}

fn corpus_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus")
}

fn corpus(name: &str) -> Result<Vec<Vec<u8>>> {
    let directory = corpus_directory().join(name);
    let entries =
        std::fs::read_dir(&directory).with_context(|| format!("{} is missing", directory.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    anyhow::ensure!(!paths.is_empty(), "{} is empty", directory.display());
    paths.iter().map(|path| Ok(std::fs::read(path)?)).collect()
}

/// How long a decoder is tried.
#[derive(Clone, Copy)]
enum Effort {
    Cases(u32),
    Time(Duration),
}

/// An input that breaks a decoder.
#[derive(Debug)]
struct Tripped {
    bytes: Vec<u8>,
    reason: String,
}

impl Tripped {
    /// Writes the input to a file, and returns a sentence with its path.
    fn keep(&self, name: &str) -> String {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/fuzz");
        let digest = ring::digest::digest(&ring::digest::SHA256, &self.bytes);
        let path = directory.join(format!("{name}-{}", &hex::encode(digest)[..12]));
        let written = std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&path, &self.bytes));
        let kept = written.map_or_else(|error| error.to_string(), |()| path.display().to_string());
        format!("{name} trips over {} bytes ({kept}): {}", self.bytes.len(), self.reason)
    }
}

/// Tries one decoder. Returns the number of inputs.
fn fuzz(corpus: &[Vec<u8>], decode: Decode, effort: Effort) -> Result<u64, Tripped> {
    for bytes in corpus {
        let held = std::panic::catch_unwind(|| holds(decode, bytes));
        let held = held.map_err(|_| "it panics".to_owned());
        let held = held.and_then(|held| held.map_err(|error| error.to_string()));
        held.map_err(|reason| Tripped { bytes: bytes.clone(), reason })?;
    }
    let spoilt = |(first, changes): &(Index, Vec<Change>)| {
        let mut bytes = corpus[first.index(corpus.len())].clone();
        for change in changes {
            apply(change, &mut bytes, corpus);
        }
        bytes
    };
    let strategy = (any::<Index>(), vec(change(), 0..6));
    let config =
        |cases| Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let began = Instant::now();
    let mut tried = 0;
    loop {
        let mut runner = match effort {
            Effort::Cases(cases) => {
                TestRunner::new_with_rng(config(cases), TestRng::deterministic_rng(RngAlgorithm::ChaCha))
            }
            Effort::Time(_) => TestRunner::new(config(500)),
        };
        match runner.run(&strategy, |input| holds(decode, &spoilt(&input))) {
            Ok(()) => tried += u64::from(runner.config().cases),
            Err(TestError::Fail(reason, input)) => {
                return Err(Tripped { bytes: spoilt(&input), reason: reason.to_string() });
            }
            Err(TestError::Abort(reason)) => {
                return Err(Tripped { bytes: Vec::new(), reason: reason.to_string() });
            }
        }
        if !matches!(effort, Effort::Time(time) if began.elapsed() < time) {
            return Ok(tried);
        }
    }
}

#[test]
fn every_decoder_answers_odd_bytes_in_words() -> TestResult {
    let effort = match std::env::var("FUZZ_SECONDS") {
        Ok(seconds) => {
            Effort::Time(Duration::from_secs(seconds.parse().context("FUZZ_SECONDS is no number")?))
        }
        Err(_) => Effort::Cases(SHORT_FORM_CASES),
    };
    let only = std::env::var("FUZZ_DECODER").ok();
    let chosen: Vec<_> =
        DECODERS.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)).collect();
    assert!(!chosen.is_empty(), "FUZZ_DECODER names no decoder; there are {:?}", names());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut failures = Vec::new();
        while let Some((name, decode)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            match corpus(name).map(|corpus| fuzz(&corpus, *decode, effort)) {
                Ok(Ok(tried)) => {
                    if matches!(effort, Effort::Time(_)) {
                        let _ = writeln!(std::io::stderr(), "{name:<22} {tried:>9} inputs");
                    }
                }
                Ok(Err(tripped)) => failures.push(tripped.keep(name)),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        failures
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let failures = std::thread::scope(|scope| {
        let working: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        working.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

fn names() -> BTreeSet<String> {
    DECODERS.iter().map(|(name, _)| (*name).to_owned()).collect()
}

#[test]
fn every_decoder_has_a_corpus_and_every_corpus_a_decoder() -> TestResult {
    let entries = std::fs::read_dir(corpus_directory())?;
    let found: BTreeSet<_> =
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<Result<_>>()?;
    assert_eq!(found, names());
    assert_eq!(names().len(), DECODERS.len(), "two have one name");
    for (name, decode) in DECODERS {
        let read = corpus(name)?.iter().filter(|bytes| decode(bytes).is_ok()).count();
        assert!(read > 0, "{name} takes none of its corpus, so nothing behind its first check is tried");
    }
    Ok(())
}

#[test]
fn what_a_decoder_takes_of_a_processor_is_seen() {
    let began = processor_time();
    let end = Instant::now() + crate::harness::program::PATIENCE;
    while processor_time() < began + Duration::from_millis(20) {
        assert!(Instant::now() < end, "it works, and that is not seen");
    }
}

/// The rules are effective only if a violation is noticed.
#[test]
fn decoders_that_panic_hoard_or_say_nonsense_are_found() {
    fn unless_long(bytes: &[u8], odd: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        if bytes.len() > 40 { odd() } else { Ok(()) }
    }
    fn hoards() -> Result<(), String> {
        drop(std::hint::black_box(vec![0_u8; 64 << 20]));
        Ok(())
    }
    let broken: [(Decode, &str); 4] = [
        (|bytes| unless_long(bytes, || unreachable!("too long")), "too long"),
        (|bytes| unless_long(bytes, hoards), "it held"),
        (|bytes| unless_long(bytes, || Err("\u{1b}[2J".to_owned())), "terminal"),
        (|bytes| unless_long(bytes, || Err(" ".to_owned())), "says nothing"),
    ];
    for (decode, expected) in broken {
        let found = fuzz(&[b"shepherd.example:8443".to_vec()], decode, Effort::Cases(500)).unwrap_err();
        assert!(found.reason.contains(expected), "{found:?}");
    }
}
