//! `man`: the manual pages, made from the same words as `--help`.

use std::fmt::Write as _;
use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory, ValueHint};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::{Cli, Failure};

/// Print the manual page of ackwheel, or write those of all verbs
///
/// `ackwheel man | man -l -` shows it; `ackwheel man --out /usr/local/share/man/man1` installs all of them:
/// ackwheel.1, ackwheel-serve.1, and so on.
#[derive(Args, Debug)]
pub(super) struct Manual {
    /// Folder for the pages of the program and of each verb; it is made if it is not there
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: Option<PathBuf>,
}

/// A manual page: the name of its file, and its source for troff.
struct Page {
    file: String,
    text: String,
}

impl Manual {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        let Some(folder) = self.out else {
            let mut out = stdout().lock();
            out.write_all(page(&command)?.text.as_bytes())?;
            return Ok(out.flush()?);
        };
        let failed = |error| Failure::Run(format!("--out {}: {error}", folder.display()));
        fs::create_dir_all(&folder).map_err(failed)?;
        let mut pages = Vec::new();
        pages_of(&command, &mut pages)?;
        for page in pages {
            fs::write(folder.join(page.file), page.text).map_err(failed)?;
        }
        Ok(())
    }
}

/// The page of a command, and those of the commands below it.
fn pages_of(command: &Command, pages: &mut Vec<Page>) -> Result<(), Failure> {
    pages.push(page(command)?);
    command.get_subcommands().try_for_each(|below| pages_of(below, pages))
}

fn page(command: &Command) -> Result<Page, Failure> {
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    let name = command.get_display_name().unwrap_or("ackwheel").to_uppercase();
    // By hand: the date is left empty, so that the same source makes the same page every day, and an empty argument
    // would be lost.
    writeln!(text, ".TH \"{name}\" 1 \"\" \"ackwheel {}\" \"ackwheel manual\"", env!("CARGO_PKG_VERSION"))?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    if let Some(words) = command.get_after_help() {
        // Its lines stay lines: troff would fill them into one paragraph.
        let mut roff = Roff::new();
        roff.control("SH", ["FIRST STEPS"]).control("nf", []);
        roff.text([roman(words.to_string())]).control("fi", []);
        roff.to_writer(&mut text)?;
    }
    Ok(Page { file: man.get_filename(), text: in_ascii(&String::from_utf8_lossy(&text)) })
}

/// A troff that was not told of UTF-8 reads bytes; escapes are the same everywhere.
fn in_ascii(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut text, character| {
        if character.is_ascii() {
            text.push(character);
        } else {
            let _ = write!(text, "\\[u{:04X}]", u32::from(character));
        }
        text
    })
}
