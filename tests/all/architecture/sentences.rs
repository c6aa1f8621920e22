//! Sentences in string literals have no gaps. A literal that continues on another line without a backslash has the
//! indentation of that line in the middle of its sentence, and so has one that was joined by hand.

use crate::harness::aloud::TestResult;
use crate::harness::source;

/// Spaces that no sentence has in a row.
const GAP: &str = "    ";

#[test]
fn no_sentence_has_a_gap() -> TestResult {
    let (mut wrong, mut looked_at) = (Vec::new(), 0);
    for path in source::rust_files()? {
        let statements = path.starts_with("crates/bmdb");
        for (line, literal) in source::take_apart(&source::read(&path)?).strings {
            looked_at += 1;
            // The lines of a statement are indented.
            let joined = join_lines(&literal);
            if has_gap(&literal) && !(statements && joined.contains('\n')) {
                wrong.push(format!("{}:{line}: {joined:?}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "end the line with a backslash:\n{}", wrong.join("\n"));
    assert!(looked_at > 10_000, "only {looked_at} literals were found");
    Ok(())
}

#[test]
fn gap_is_found_and_a_table_is_none() {
    for (literal, expected) in [
        ("one sentence on a line", false),
        ("if they \\\n         are lost", false),
        ("if they          are lost", true),
        ("if they\n         are lost", true),
        ("if they,\n         {name} and others, are lost", true),
        // Templates, tables and help texts are aligned.
        ("NAME    why\\na       reason", false),
        ("a: 1\nb:\n    c: 2\nd:\n    e: 3\n", false),
        ("\\\nExamples:\n  shepherdctl get loops           which are paused", false),
        ("t10.ATA     ST1000", false),
    ] {
        assert_eq!(has_gap(literal), expected, "{literal:?}");
    }
}

/// The literal without the line breaks that a backslash hides, and without the indentation after them.
fn join_lines(literal: &str) -> String {
    let parts = literal.split("\\\n").enumerate();
    parts.map(|(number, part)| if number == 0 { part } else { part.trim_start() }).collect()
}

/// Whether a sentence of the literal has a gap before a word that continues it.
fn has_gap(literal: &str) -> bool {
    let joined = join_lines(literal);
    // More lines are no sentence.
    if literal.starts_with("\\\n") || joined.contains("\\n") || joined.matches('\n').count() > 2 {
        return false;
    }
    let mut rest = joined.as_str();
    while let Some((before, after)) = rest.split_once(GAP) {
        rest = after.trim_start_matches(' ');
        let ends = before.trim_end().ends_with(|c: char| c.is_lowercase() || ",;:.)}".contains(c));
        if ends && rest.starts_with(|c: char| c.is_lowercase() || c == '{') {
            return true;
        }
    }
    false
}
