//! `completions`: prints the script with which a shell completes the command line.

use std::io::{Write, stdout};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, Failure};

/// Print the completions of a shell
///
/// Where a shell looks for them:
///
/// bash: ackwheel completions bash > ~/.local/share/bash-completion/completions/ackwheel
///
/// zsh: ackwheel completions zsh > ~/.zfunc/_ackwheel (with ~/.zfunc in fpath before compinit)
///
/// fish: ackwheel completions fish > ~/.config/fish/completions/ackwheel.fish
#[derive(Args, Debug)]
pub(super) struct Completions {
    /// The shell that is to complete
    // These are the shells whose completions are tested.
    #[arg(
        value_name = "SHELL",
        value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|shell| shell.parse::<Shell>())
    )]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Result<(), Failure> {
        // Into memory first: the generator panics where it cannot write, and a pipe may be closed.
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "ackwheel", &mut text);
        let mut out = stdout().lock();
        out.write_all(&text)?;
        Ok(out.flush()?)
    }
}
