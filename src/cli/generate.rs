//! The verbs `completions` and `man`: print shell completions and manual pages, which are generated from the flags.

use std::fs;
use std::io::{self, Write, stdout};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Command, CommandFactory, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::{Cli, Failure};

/// Print the completions of a shell
///
/// Shells look for them in these places:
///
/// bash: ackwheel completions bash > ~/.local/share/bash-completion/completions/ackwheel
///
/// zsh: ackwheel completions zsh > ~/.zfunc/_ackwheel (with ~/.zfunc in fpath before compinit)
///
/// fish: ackwheel completions fish > ~/.config/fish/completions/ackwheel.fish
#[derive(Args, Debug)]
pub(super) struct Completions {
    /// The shell to print completions for
    // Other shells are not offered, because only the completions of these three have tests.
    #[arg(
        value_name = "SHELL",
        value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|shell| shell.parse::<Shell>())
    )]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Generate into memory first: the generator panics if a write fails, and a write to stdout fails if the reader
        // has closed the pipe.
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "ackwheel", &mut text);
        let mut out = stdout().lock();
        out.write_all(&text)?;
        Ok(out.flush()?)
    }
}

/// Print the manual page of ackwheel, or write the pages of all verbs
///
/// `ackwheel man | man -l -` shows it; `ackwheel man --out /usr/local/share/man/man1` installs all of them:
/// ackwheel.1, ackwheel-serve.1, and so on.
#[derive(Args, Debug)]
pub(super) struct Manual {
    /// Folder for the pages of the program and of each verb; it is created if it does not exist
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    out: Option<PathBuf>,
}

impl Manual {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        let Some(folder) = self.out else {
            let mut out = stdout().lock();
            out.write_all(page(&command)?.as_bytes())?;
            return Ok(out.flush()?);
        };
        let write = || -> io::Result<()> {
            fs::create_dir_all(&folder)?;
            write_pages(&command, &folder)
        };
        write().map_err(|error| Failure::Run(format!("--out {}: {error}", folder.display())))
    }
}

/// Writes the manual page of a command, and the pages of its subcommands, to files in `folder`.
fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    fs::write(folder.join(Man::new(command.clone()).get_filename()), page(command)?)?;
    command.get_subcommands().try_for_each(|below| write_pages(below, folder))
}

/// Returns the manual page of a command as troff source.
fn page(command: &Command) -> io::Result<String> {
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    let name = command.get_display_name().unwrap_or("ackwheel").to_uppercase();
    // Write the title line here: its date is empty, and clap_mangen would drop an empty argument. Without a date, the
    // same source always makes the same page.
    writeln!(text, ".TH \"{name}\" 1 \"\" \"ackwheel {}\" \"ackwheel manual\"", env!("CARGO_PKG_VERSION"))?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    if let Some(words) = command.get_after_help() {
        // `nf` keeps the line breaks: otherwise troff would join the lines into one paragraph.
        let mut roff = Roff::new();
        roff.control("SH", ["FIRST STEPS"]).control("nf", []);
        roff.text([roman(words.to_string())]).control("fi", []);
        roff.to_writer(&mut text)?;
    }
    Ok(in_ascii(&String::from_utf8_lossy(&text)))
}

/// Escapes all characters that are not ASCII, because not every troff reads UTF-8.
fn in_ascii(text: &str) -> String {
    let escaped = |character: char| {
        if character.is_ascii() { character.to_string() } else { format!("\\[u{:04X}]", u32::from(character)) }
    };
    text.chars().map(escaped).collect()
}
