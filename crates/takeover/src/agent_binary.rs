//! The role server binary to upload: ELF check, digest, architecture.
//!
//! The file is read once and shared: a thousand uploads at a time hold one copy. Its ELF header is checked here, so
//! that a program for another processor, a script, or an incomplete download is rejected at start, in one sentence, and
//! not by every machine in turn. The caller reads the file again when it changes.

use std::fmt;
use std::io::{self, BufRead as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use model::program_mark::{FORMER_MARK, MARK_BYTES, ROLE_SERVER_MARK, reversed};

/// Larger than any role server; a larger file, such as a disk image, is a mistake.
const MAX_BINARY_BYTES: u64 = 512 << 20;

/// A processor that the role server is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// 64-bit x86 (also AMD64).
    X86_64,
    /// 64-bit ARM, little endian.
    Aarch64,
    /// 64-bit RISC-V, little endian.
    Riscv64,
    /// 64-bit POWER, little endian.
    Ppc64le,
}

impl Architecture {
    /// The name of the architecture in `uname -m`.
    #[must_use]
    pub const fn uname(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
            Self::Riscv64 => "riscv64",
            Self::Ppc64le => "ppc64le",
        }
    }

    /// The architecture for the `e_machine` field of an ELF header (the System V ABI's registry).
    const fn from_elf(machine: u16) -> Option<Self> {
        match machine {
            62 => Some(Self::X86_64),
            183 => Some(Self::Aarch64),
            243 => Some(Self::Riscv64),
            21 => Some(Self::Ppc64le),
            _ => None,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.uname())
    }
}

/// A checked role server program. Cheap to clone.
#[derive(Clone)]
pub struct AgentBinary {
    content: Bytes,
    sha256: String,
    architecture: Architecture,
    loader: Option<String>,
    /// Digest of another release that a machine may keep.
    accepted_release: Option<String>,
}

/// Why a file is not a role server program.
#[derive(Debug, thiserror::Error)]
pub enum AgentBinaryError {
    /// The file cannot be read.
    #[error("cannot read the agent program {}: {source}; build it with `make roleserver` and name it by --agent_executable_path", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{} is not an agent program: {reason}; build one with `make roleserver` and name it by --agent_executable_path", path.display())]
    NotAnAgent {
        /// The path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
}

impl AgentBinary {
    /// Reads and checks the program at `path`.
    pub async fn load(path: &Path) -> Result<Self, AgentBinaryError> {
        let read_error = |source| AgentBinaryError::Read { path: path.to_owned(), source };
        let refuse = |reason: String| AgentBinaryError::NotAnAgent { path: path.to_owned(), reason };
        let metadata = tokio::fs::metadata(path).await.map_err(read_error)?;
        if !metadata.is_file() {
            return Err(refuse("it is not a regular file".to_owned()));
        }
        if metadata.len() > MAX_BINARY_BYTES {
            return Err(refuse(format!("it has {} MiB", metadata.len() >> 20)));
        }
        let content = tokio::fs::read(path).await.map_err(read_error)?;
        Self::from_content(content.into()).map_err(refuse)
    }

    /// Checks a program that is in memory; the error is what is wrong with it.
    pub fn from_content(content: Bytes) -> Result<Self, String> {
        let architecture = parse_elf(&content)?;
        let sha256 = hex::encode(ring::digest::digest(&ring::digest::SHA256, &content));
        let loader = find_loader(&content);
        Ok(Self { content, sha256, architecture, loader, accepted_release: None })
    }

    /// The same program, with another accepted release: a machine that was updated to that digest keeps it.
    #[must_use]
    pub fn accepting_release(&self, sha256: Option<String>) -> Self {
        Self { accepted_release: sha256, ..self.clone() }
    }

    /// Whether a machine with a program of this digest needs no upload.
    #[must_use]
    pub fn accepts_digest(&self, sha256: &str) -> bool {
        self.sha256 == sha256 || self.accepted_release.as_deref() == Some(sha256)
    }

    /// The content of the program; a clone shares the memory.
    #[must_use]
    pub fn content(&self) -> Bytes {
        self.content.clone()
    }

    /// SHA-256 of the content, lower case hex.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Size of the program in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.content.len() as u64
    }

    /// The dynamic loader that it needs on each machine; `None` for a static program, which runs everywhere.
    #[must_use]
    pub fn loader(&self) -> Option<&str> {
        self.loader.as_deref()
    }

    /// Whether it is a role server, by the mark that the program of each role server has, or by that of earlier releases.
    #[must_use]
    pub fn is_role_server(&self) -> bool {
        has_mark_of_a_role_server(&self.content)
    }

    /// The processor it runs on.
    #[must_use]
    pub const fn architecture(&self) -> Architecture {
        self.architecture
    }
}

impl fmt::Debug for AgentBinary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AgentBinary({} {} bytes, {})", self.architecture, self.content.len(), self.sha256)
    }
}

fn has_mark_of_a_role_server(content: &[u8]) -> bool {
    // In the right order they would be in this program, too.
    const REVERSED: [u8; MARK_BYTES] = reversed(ROLE_SERVER_MARK);
    const REVERSED_FORMER: [u8; FORMER_MARK.len()] = reversed(FORMER_MARK);
    contains_reversed(content, &REVERSED) || contains_reversed(content, &REVERSED_FORMER)
}

/// Whether these bytes contain others, which are given in reverse order.
fn contains_reversed(mut content: &[u8], reversed: &[u8]) -> bool {
    let mark: Vec<u8> = reversed.iter().rev().copied().collect();
    let Some((first, others)) = mark.split_first() else { return false };
    // Reading bytes in memory does not fail. At their end, nothing is skipped.
    while content.skip_until(*first).is_ok_and(|skipped| skipped > 0) {
        if content.starts_with(others) {
            return true;
        }
    }
    false
}

/// Checks an ELF64 header (System V ABI, chapter 4): a whole, executable file for a known processor.
fn parse_elf(content: &[u8]) -> Result<Architecture, String> {
    const EXECUTABLE: u64 = 2;
    const SHARED: u64 = 3;
    if !content.starts_with(b"\x7fELF") {
        return Err("it does not begin like an ELF program".to_owned());
    }
    let truncated = || "it is cut off".to_owned();
    let field = |offset: usize, size: usize| read_le(content, offset, size).ok_or_else(truncated);
    if field(4, 1)? != 2 || field(5, 1)? != 1 {
        return Err("it is not a 64-bit little-endian program".to_owned());
    }
    // A position-independent program is a shared object with an entry point; a library has none.
    let (kind, entry) = (field(16, 2)?, field(24, 8)?);
    if !(kind == EXECUTABLE || (kind == SHARED && entry != 0)) {
        return Err("it is an ELF file, but not a program".to_owned());
    }
    let machine = field(18, 2)?;
    let architecture = u16::try_from(machine)
        .ok()
        .and_then(Architecture::from_elf)
        .ok_or_else(|| format!("it is for a processor that is not supported (ELF machine {machine})"))?;
    let to_usize = |value: u64| usize::try_from(value).map_err(|_| truncated());
    let (table, entry_size, count) =
        (to_usize(field(32, 8)?)?, to_usize(field(54, 2)?)?, to_usize(field(56, 2)?)?);
    for index in 0..count {
        let header =
            index.checked_mul(entry_size).and_then(|at| at.checked_add(table)).ok_or_else(truncated)?;
        let at = |offset: usize| header.checked_add(offset).ok_or_else(truncated);
        let end = field(at(8)?, 8)?.checked_add(field(at(32)?, 8)?).ok_or_else(truncated)?;
        if end > content.len() as u64 {
            return Err(truncated());
        }
    }
    if count == 0 {
        return Err("it is an ELF file, but not a program".to_owned());
    }
    Ok(architecture)
}

/// The path of the dynamic loader in a checked ELF64 file: the content of its segment `PT_INTERP`.
fn find_loader(content: &[u8]) -> Option<String> {
    const INTERPRETER: u64 = 3;
    let number = |offset: usize, size: usize| {
        read_le(content, offset, size).and_then(|value| usize::try_from(value).ok())
    };
    let (table, entry_size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let header = (0..count)
        .filter_map(|index| index.checked_mul(entry_size)?.checked_add(table))
        .find(|header| read_le(content, *header, 4) == Some(INTERPRETER))?;
    let (start, size) = (number(header.checked_add(8)?, 8)?, number(header.checked_add(32)?, 8)?);
    let path = content.get(start..start.checked_add(size)?)?;
    let shown = path.iter().filter(|byte| byte.is_ascii_graphic()).take(200);
    Some(shown.map(|byte| char::from(*byte)).collect())
}

fn read_le(content: &[u8], offset: usize, size: usize) -> Option<u64> {
    let bytes = content.get(offset..offset.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shell() -> Vec<u8> {
        std::fs::read("/bin/sh").unwrap()
    }

    #[test]
    fn release_a_machine_was_updated_to_is_accepted() {
        let binary = AgentBinary::from_content(shell().into()).unwrap();
        let kept = binary.accepting_release(Some("ab".to_owned()));
        for (found, plain, keeping) in
            [(binary.sha256(), true, true), ("ab", false, true), ("cd", false, false)]
        {
            assert_eq!(
                (binary.accepts_digest(found), kept.accepts_digest(found)),
                (plain, keeping),
                "{found}"
            );
        }
    }

    #[test]
    fn role_server_is_recognized_by_its_mark() {
        let mark = ROLE_SERVER_MARK;
        for (content, expected) in [
            (Vec::new(), false),
            (shell(), false),
            ([&[0xf5; 3][..], &mark[..MARK_BYTES - 1]].concat(), false),
            (reversed(mark).to_vec(), false),
            (mark.to_vec(), true),
            ([&[0xf5; 3][..], &mark, &[0xf5, 1]].concat(), true),
            ([shell().as_slice(), &mark].concat(), true),
            ([shell().as_slice(), b"/supervisor.json-"].concat(), true),
            ([shell().as_slice(), b"supervisor_json"].concat(), false),
        ] {
            assert_eq!(has_mark_of_a_role_server(&content), expected, "{} bytes", content.len());
        }
    }

    fn rejection_reason(content: Vec<u8>) -> String {
        AgentBinary::from_content(content.into()).unwrap_err()
    }

    #[test]
    fn a_real_program_is_accepted_and_its_memory_shared() {
        let binary = AgentBinary::from_content(shell().into()).unwrap();
        assert_eq!(binary.architecture().uname(), std::env::consts::ARCH);
        assert_eq!(binary.content().as_ptr(), binary.content().as_ptr());
        assert_eq!(binary.sha256().len(), 64);
        assert!(binary.loader().is_some_and(|loader| loader.starts_with("/lib")), "{:?}", binary.loader());
    }

    #[test]
    fn incomplete_program_is_rejected_with_a_reason() {
        insta::assert_snapshot!(rejection_reason(b"#!/bin/sh\n".to_vec()), @"it does not begin like an ELF program");
        insta::assert_snapshot!(rejection_reason(shell()[..40].to_vec()), @"it is cut off");
        let half = shell()[..shell().len() / 2].to_vec();
        insta::assert_snapshot!(rejection_reason(half), @"it is cut off");
        let with = |offset: usize, value: u8| {
            let mut content = shell();
            content[offset] = value;
            content
        };
        insta::assert_snapshot!(rejection_reason(with(4, 1)), @"it is not a 64-bit little-endian program");
        insta::assert_snapshot!(rejection_reason(with(16, 1)), @"it is an ELF file, but not a program");
        insta::assert_snapshot!(rejection_reason(with(18, 40)), @"it is for a processor that is not supported (ELF machine 40)");
    }

    #[tokio::test]
    async fn path_without_an_agent_is_rejected_with_a_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let text =
            |error: AgentBinaryError| error.to_string().replace(directory.path().to_str().unwrap(), "DIR");
        let absent = AgentBinary::load(&directory.path().join("absent")).await.unwrap_err();
        insta::assert_snapshot!(text(absent), @"cannot read the agent program DIR/absent: No such file or directory (os error 2); build it with `make roleserver` and name it by --agent_executable_path");
        let not_a_file = AgentBinary::load(directory.path()).await.unwrap_err();
        insta::assert_snapshot!(text(not_a_file), @"DIR is not an agent program: it is not a regular file; build one with `make roleserver` and name it by --agent_executable_path");
    }

    proptest! {
        #[test]
        fn a_damaged_header_is_never_a_panic(damage in prop::collection::vec((0_usize..120, any::<u8>()), 1..16), length in 0_usize..4096) {
            let mut content = shell();
            content.truncate(length);
            for (offset, value) in damage {
                if let Some(byte) = content.get_mut(offset) {
                    *byte = value;
                }
            }
            let _outcome = parse_elf(&content);
        }
    }
}
