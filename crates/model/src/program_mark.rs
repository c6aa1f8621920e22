//! Mark of the role server: bytes that its program has, and no other program.
//!
//! A file that is given as the role server may be another program for the right processor, such as `shepherd` itself. It
//! would be uploaded to every machine, and fail there. So the program of the role server contains this mark, and a file
//! without it is refused. The mark proves nothing about who built the program: a signature does.
//!
//! A program that looks for the mark must not contain it. It has the bytes in reverse order, [`reversed_mark`].

/// Length of the mark.
pub const MARK_BYTES: usize = 29;

/// The mark. Its first byte is in no text, so that a search for it finds few candidates.
pub const ROLE_SERVER_MARK: [u8; MARK_BYTES] = *b"\xf5shepherd role server program";

/// The mark in reverse order, for a program that looks for it.
#[must_use]
pub const fn reversed_mark() -> [u8; MARK_BYTES] {
    let mut reversed = [0; MARK_BYTES];
    let mut index = 0;
    while index < MARK_BYTES {
        reversed[index] = ROLE_SERVER_MARK[MARK_BYTES - 1 - index];
        index += 1;
    }
    reversed
}
