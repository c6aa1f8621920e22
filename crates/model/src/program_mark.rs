//! Mark of the role server: bytes that its program has, and no other program.
//!
//! A file that is given as the role server may be another program for the right processor, such as `shepherd` itself. It
//! would be uploaded to every machine, and fail there. So the program of the role server contains this mark, and a file
//! without it is refused. The mark proves nothing about who built the program: a signature does.
//!
//! Role servers of releases before the mark are recognized by [`FORMER_MARK`], so that an operator can go back to one.
//!
//! A program that looks for a mark must not contain it. It has the bytes in reverse order, [`reversed`].

/// Length of the mark.
pub const MARK_BYTES: usize = 29;

/// The mark. Its first byte is in no text, so that a search for it finds few candidates.
pub const ROLE_SERVER_MARK: [u8; MARK_BYTES] = *b"\xf5shepherd role server program";

/// The mark of role servers without [`ROLE_SERVER_MARK`]: the name of a file below their state directory, which no other
/// program of these releases contains.
pub const FORMER_MARK: [u8; 15] = *b"supervisor.json";

/// A mark in reverse order, for a program that looks for it.
#[must_use]
pub const fn reversed<const N: usize>(mark: [u8; N]) -> [u8; N] {
    let mut reversed = [0; N];
    let mut index = 0;
    while index < N {
        reversed[index] = mark[N - 1 - index];
        index += 1;
    }
    reversed
}
