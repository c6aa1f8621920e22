//! Manual pages, generated from the grammars of the programs. So they cannot differ from the programs.
//!
//! Nothing here contacts a fleet. A package runs it once at build time. The pages of `shepherdctl` are in section 1, with one
//! for each command. `shepherd` is in section 1, too, `roleserver` in section 8, because it runs on machines for the system,
//! and the configuration file of `shepherd` in section 5: [`crate::run::run_program`][] gets the grammars of those programs,
//! which this crate does not depend on.

use std::path::Path;

use clap::{Arg, Command};
use clap_mangen::Man;

use crate::command::{grammar, is_pointer, whole_grammar};
use crate::error::CliError;
use crate::exit_code::{EXIT_CODE_RULES, EXIT_CODES};
use crate::explain::markdown::render_page;
use crate::explain::topic::find_topics;

/// Width of text that a page shows as it is, in columns.
const TEXT_COLUMNS: usize = 76;
/// Pages that every page of another program refers to.
const PROGRAM_PAGES: [&str; 4] = ["roleserver(8)", "shepherd(1)", "shepherd.toml(5)", "shepherdctl(1)"];

/// Another program of the package that has pages.
pub struct ManualProgram {
    /// Its grammar, with its name.
    command: Command,
    /// The section of its pages.
    section: &'static str,
    /// Its exit codes, each with what it means.
    exit_codes: &'static [(&'static str, &'static str)],
    /// Whether its flags are keys of a configuration file, which gets a page, too.
    has_file: bool,
}

impl ManualProgram {
    /// The service `shepherd`, with its configuration file.
    #[must_use]
    pub fn service(command: Command) -> Self {
        let exit_codes = &[
            ("0", "stopped by a signal, or done"),
            ("1", "failed"),
            ("2", "wrong command line, configuration or database"),
        ];
        Self { command, section: "1", exit_codes, has_file: true }
    }

    /// The program on machines, `roleserver`.
    #[must_use]
    pub fn role_server(command: Command) -> Self {
        let exit_codes = &[
            ("0", "done, or stopped by a signal"),
            ("1", "failed"),
            ("2", "wrong command or arguments, or a malformed request"),
            ("3", "roleserver status: the machine is not enrolled"),
            ("4", "roleserver enroll: the request is refused"),
        ];
        Self { command, section: "8", exit_codes, has_file: false }
    }
}

/// What every page of a program has.
struct PageFrame {
    section: &'static str,
    exit_codes: &'static [(&'static str, &'static str)],
    /// A sentence below the exit codes.
    rules: &'static str,
}

/// Writes the manual pages into the directories of their sections below `directory`: `man1`, `man5` and `man8`. Creates
/// those that do not exist. Returns a message that names the directory.
pub fn write_man_pages(directory: &Path, others: &[ManualProgram]) -> Result<String, CliError> {
    let mut own = grammar().disable_help_subcommand(true);
    own.build();
    let frame = PageFrame { section: "1", exit_codes: &EXIT_CODES, rules: EXIT_CODE_RULES };
    write_pages(&own, None, &frame, directory)?;
    // The page of the program has the flags of every command.
    let mut whole = whole_grammar().disable_help_subcommand(true);
    whole.build();
    write_page(&whole, None, &frame, directory)?;
    for other in others {
        let mut command = other.command.clone().disable_help_subcommand(true);
        command.build();
        let frame = PageFrame { section: other.section, exit_codes: other.exit_codes, rules: "" };
        write_pages(&command, None, &frame, directory)?;
        if other.has_file {
            let name = format!("{}.toml", command.get_name());
            write_file(directory, "5", &name, configuration_page(&command).as_bytes())?;
        }
    }
    Ok(format!("the pages of the manual are in {}; read one with: man -l FILE\n", directory.display()))
}

/// Writes the page of a command and those of the commands below it.
fn write_pages(
    command: &Command,
    parent: Option<&Command>,
    frame: &PageFrame,
    directory: &Path,
) -> Result<(), CliError> {
    for below in visible_commands(command) {
        write_pages(below, Some(command), frame, directory)?;
    }
    write_page(command, parent, frame, directory)
}

fn write_page(
    command: &Command,
    parent: Option<&Command>,
    frame: &PageFrame,
    directory: &Path,
) -> Result<(), CliError> {
    let mut page = Vec::new();
    let man = Man::new(command.clone()).section(frame.section).manual("Shepherd");
    // Writing to memory cannot fail.
    let _ = man
        .render_title(&mut page)
        .and_then(|()| man.render_name_section(&mut page))
        .and_then(|()| man.render_synopsis_section(&mut page))
        .and_then(|()| man.render_description_section(&mut page));
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        let _ = man.render_options_section(&mut page);
    }
    if visible_commands(command).next().is_some() {
        let _ = man.render_subcommands_section(&mut page);
    }
    page.extend_from_slice(own_sections(command, parent, frame).as_bytes());
    write_file(directory, frame.section, page_name(command), &page)
}

/// Writes a page into the directory of its section.
fn write_file(directory: &Path, section: &str, name: &str, page: &[u8]) -> Result<(), CliError> {
    let folder = directory.join(format!("man{section}"));
    let failed = |doing: &str, error: &std::io::Error| {
        CliError::Failed(format!("cannot {doing} {}: {error}", folder.display()))
    };
    std::fs::create_dir_all(&folder).map_err(|error| failed("make the directory", &error))?;
    std::fs::write(folder.join(format!("{name}.{section}")), page)
        .map_err(|error| failed("write pages of the manual into", &error))
}

/// The name of the page of a command, such as `shepherdctl-hold`.
fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn visible_commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|below| !below.is_hide_set())
}

/// The sections behind those that the grammar has: exit status, notes, examples, and other pages.
fn own_sections(command: &Command, parent: Option<&Command>, frame: &PageFrame) -> String {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let parts = HelpParts::parse(&help);
    let mut text = exit_status_section(frame, parts.exit_status.as_deref());
    text.push_str(&paragraphs_section("NOTES", &parts.notes));
    let examples = if parts.examples.is_empty() { examples_below(command) } else { parts.examples };
    if !examples.is_empty() {
        text.push_str(".SH EXAMPLES\n");
        for example in &examples {
            text.push_str(&example.to_roff());
        }
    }
    let name = page_name(command);
    let section = frame.section;
    let mut pages: Vec<String> = visible_commands(command)
        .chain(parent)
        .map(|other| format!("{}({section})", page_name(other)))
        .chain(PROGRAM_PAGES.map(str::to_owned))
        .collect();
    pages.retain(|page| *page != format!("{name}({section})"));
    pages.sort();
    pages.dedup();
    text.push_str(&see_also_section(&pages));
    text
}

/// The first example of each command below a group that has none of its own.
fn examples_below(command: &Command) -> Vec<Example> {
    let first = |below: &Command| {
        let help = below.get_after_help()?.to_string();
        let example = HelpParts::parse(&help).examples.into_iter().next()?;
        let lines = example.lines.into_iter().take(1).collect();
        Some(Example { title: example.title, lines })
    };
    visible_commands(command).filter_map(first).collect()
}

/// Lines that are shown as they are.
#[derive(Debug, PartialEq, Eq)]
struct Example {
    /// What they do; empty if the help does not say.
    title: String,
    lines: Vec<String>,
}

impl Example {
    fn to_roff(&self) -> String {
        let title =
            if self.title.is_empty() { String::new() } else { format!(".PP\n{}\n", roff(&self.title)) };
        let lines: Vec<String> = self.lines.iter().map(|line| roff(line)).collect();
        format!("{title}.PP\n.nf\n{}\n.fi\n", lines.join("\n"))
    }
}

/// The parts of the help behind the flags.
#[derive(Debug, Default, PartialEq, Eq)]
struct HelpParts {
    examples: Vec<Example>,
    /// What the help says of exit codes, if that is a sentence.
    exit_status: Option<String>,
    notes: Vec<String>,
}

impl HelpParts {
    /// Reads a help, which consists of blocks with an empty line between them.
    fn parse(help: &str) -> Self {
        let mut parts = Self::default();
        for block in help.split("\n\n").filter(|block| !block.trim().is_empty()) {
            let (first, rest) = block.split_once('\n').unwrap_or((block, ""));
            if let Some(sentence) = first.strip_prefix("Exit status:") {
                // The table of all codes is in every page.
                parts.exit_status = Some(sentence.trim().to_owned()).filter(|sentence| !sentence.is_empty());
            } else if is_pointer(block) {
                parts.notes.push("shepherdctl(1) has the flags that every command accepts.".to_owned());
            } else if first.ends_with(':') && rest.starts_with("  ") {
                let title = if first.starts_with("Example") { "" } else { first };
                let lines = rest.lines().map(|line| line.strip_prefix("  ").unwrap_or(line).to_owned());
                parts.examples.push(Example { title: title.to_owned(), lines: lines.collect() });
            } else {
                parts.notes.push(block.lines().collect::<Vec<_>>().join(" "));
            }
        }
        parts
    }
}

fn exit_status_section(frame: &PageFrame, sentence: Option<&str>) -> String {
    let rows = frame
        .exit_codes
        .iter()
        .map(|(code, meaning)| format!(".TP\n\\fB{}\\fR\n{}\n", roff(code), roff(meaning)));
    let below = [Some(frame.rules).filter(|rules| !rules.is_empty()), sentence];
    let below = below.into_iter().flatten().map(|text| format!(".PP\n{}\n", roff(text)));
    format!(".SH \"EXIT STATUS\"\n{}{}", rows.collect::<String>(), below.collect::<String>())
}

fn paragraphs_section(heading: &str, paragraphs: &[String]) -> String {
    if paragraphs.is_empty() {
        return String::new();
    }
    let texts = paragraphs.iter().map(|paragraph| format!(".PP\n{}\n", roff(paragraph)));
    format!(".SH {heading}\n{}", texts.collect::<String>())
}

fn see_also_section(pages: &[String]) -> String {
    let names = pages.iter().map(|page| {
        let (name, section) = page.split_once('(').unwrap_or((page, ""));
        format!("\\fB{}\\fR({section}", roff(name))
    });
    format!(".SH \"SEE ALSO\"\n{}\n", names.collect::<Vec<_>>().join(",\n"))
}

/// The page of the configuration file of `shepherd`: each of its flags is a key.
fn configuration_page(command: &Command) -> String {
    let name = "shepherd.toml";
    let mut text =
        format!(".TH {name} 5 \"\" \"\" Shepherd\n.SH NAME\n{name} \\- configuration of shepherd\n");
    text.push_str(&paragraphs_section(
        "DESCRIPTION",
        &[
            "The file that `shepherd --config FILE` reads, in TOML. Each flag of shepherd(1) is a key, with underscores or \
             dashes. The command line overrides the environment, and the environment overrides the file."
                .to_owned(),
            "`shepherd --config FILE --check` validates it and changes nothing.".to_owned(),
        ],
    ));
    text.push_str(".SH KEYS\n");
    let keys = command.get_arguments().filter(|argument| !argument.is_hide_set());
    for argument in
        keys.filter(|argument| !["help", "version", "check", "config"].contains(&argument.get_id().as_str()))
    {
        text.push_str(&key_entry(argument));
    }
    // The page of the documentation about files has the tables of providers, and an example.
    text.push_str(".SH FILES\n");
    for topic in find_topics("deploying#files") {
        let shown = render_page(&topic.markdown, Some(TEXT_COLUMNS));
        let lines: Vec<String> = shown.lines().skip(1).map(roff).collect();
        text.extend([".nf\n", &lines.join("\n"), "\n.fi\n"]);
    }
    let pages = PROGRAM_PAGES.iter().filter(|page| !page.starts_with(name)).map(|page| (*page).to_owned());
    text.push_str(&see_also_section(&pages.collect::<Vec<_>>()));
    text
}

fn key_entry(argument: &Arg) -> String {
    let Some(key) = argument.get_long() else { return String::new() };
    let help = argument.get_long_help().or_else(|| argument.get_help()).map(ToString::to_string);
    let help = help.unwrap_or_default();
    let paragraphs = help.split("\n\n").map(|paragraph| {
        let lines: Vec<&str> = paragraph.lines().collect();
        roff(&lines.join(" "))
    });
    format!(".TP\n\\fB{}\\fR\n{}\n", roff(key), paragraphs.collect::<Vec<_>>().join("\n.IP\n"))
}

/// A line of text as a page has it: what would be a request or an escape is shown as it is.
fn roff(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    if escaped.starts_with(['.', '\'']) { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;
    use crate::command::global_flags_help;

    fn pages() -> (tempfile::TempDir, impl Fn(&str) -> String) {
        let directory = tempfile::tempdir().unwrap();
        let flag =
            Arg::new("ssh_user").long("ssh_user").help("User of machines").long_help("User.\n\nOf machines.");
        let service = Command::new("shepherd")
            .about("Runs")
            .arg(flag)
            .after_help("See it work:\n  shepherd demo\n\nA dash\nworks.");
        let status = Command::new("status").about("Print").after_help("Exit status: 3 not enrolled.");
        let role_server = Command::new("roleserver").about("Keeps").subcommand(status);
        let others = [ManualProgram::service(service), ManualProgram::role_server(role_server)];
        write_man_pages(directory.path(), &others).unwrap();
        let root = directory.path().to_owned();
        (directory, move |name| std::fs::read_to_string(root.join(name)).unwrap())
    }

    #[test]
    fn page_has_the_sections_in_their_order() {
        let (_directory, page) = pages();
        let hold = page("man1/shepherdctl-hold.1");
        let mut place = 0;
        for section in
            ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "\"EXIT STATUS\"", "EXAMPLES", "\"SEE ALSO\""]
        {
            let heading = format!("\n.SH {section}\n");
            let found = hold[place..].find(&heading);
            place += found.unwrap_or_else(|| panic!("{section} is missing or too early: {hold}"));
        }
        assert!(!hold.contains(".SH EXTRA") && hold.contains("shepherdctl hold sim\\-0007"), "{hold}");
        assert!(hold.contains("\\fBshepherdctl\\fR(1)"), "{hold}");
        // Flags of every command are in the page of the program alone.
        assert!(!hold.contains("bmdb\\-url") && page("man1/shepherdctl.1").contains("\\-\\-bmdb\\-url"));
        let get = page("man1/shepherdctl-get.1");
        assert!(
            get.contains(".SH EXAMPLES\n") && get.contains("\\fBshepherdctl\\-get\\-machines\\fR(1)"),
            "{get}"
        );
    }

    /// Adds the short and the long help of a command and of those below it.
    fn add_help(command: &mut Command, texts: &mut Vec<String>) {
        texts.push(command.render_help().to_string());
        texts.push(command.render_long_help().to_string());
        for below in command.get_subcommands_mut() {
            add_help(below, texts);
        }
    }

    #[test]
    fn flags_have_dashes_in_help_and_in_pages() {
        let directory = tempfile::tempdir().unwrap();
        write_man_pages(directory.path(), &[]).unwrap();
        let pages = std::fs::read_dir(directory.path().join("man1")).unwrap();
        let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap().replace("\\-", "-");
        let mut texts: Vec<String> = pages.map(|page| read(page.unwrap().path())).collect();
        let mut command = grammar();
        command.build();
        add_help(&mut command, &mut texts);
        texts.push(global_flags_help());
        assert!(texts.len() > 200, "{}", texts.len());
        assert!(texts.iter().filter(|text| text.contains("--dry-run")).count() > 50);
        // A flag of the service follows the name of its program.
        let flag = Regex::new(r"(shepherd\s+)?--[a-z-]+_[a-z]").unwrap();
        for text in texts {
            let found = flag.captures_iter(&text).find(|found| found.get(1).is_none());
            assert!(found.is_none(), "{found:?}: {text}");
        }
    }

    #[test]
    fn other_programs_have_their_pages() {
        let (_directory, page) = pages();
        let service = page("man1/shepherd.1");
        assert!(service.contains("See it work:\n.PP\n.nf\nshepherd demo\n.fi\n"), "{service}");
        assert!(service.contains(".SH NOTES\n.PP\nA dash works.\n"), "{service}");
        let status = page("man8/roleserver-status.8");
        assert!(
            status.contains(".PP\n3 not enrolled.\n") && status.contains("\\fBroleserver\\fR(8)"),
            "{status}"
        );
        let file = page("man5/shepherd.toml.5");
        assert!(file.contains(".TP\n\\fBssh_user\\fR\nUser.\n.IP\nOf machines.\n"), "{file}");
        assert!(file.contains("[[provider]]") && file.contains("\\fBshepherd\\fR(1)"), "{file}");
    }

    #[test]
    fn text_is_no_request_of_the_formatter() {
        for (text, expected) in
            [(".nf", "\\&.nf"), ("'x'", "\\&'x'"), ("a\\n", "a\\en"), ("--flag", "\\-\\-flag")]
        {
            assert_eq!(roff(text), expected);
        }
    }
}
