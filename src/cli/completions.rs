//! `completions`: what a shell needs to complete the command line.

use std::io::{Write, stdout};

use clap::{Args, CommandFactory, ValueEnum};
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
    #[arg(value_name = "SHELL")]
    shell: ShellName,
}

/// The shells whose completions are tested.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShellName {
    Bash,
    Zsh,
    Fish,
}

impl Completions {
    pub(super) fn run(self) -> Result<(), Failure> {
        let shell = match self.shell {
            ShellName::Bash => Shell::Bash,
            ShellName::Zsh => Shell::Zsh,
            ShellName::Fish => Shell::Fish,
        };
        // Into memory first: the generator panics where it cannot write, and a pipe may be closed.
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "ackwheel", &mut text);
        let mut out = stdout().lock();
        out.write_all(&text)?;
        Ok(out.flush()?)
    }
}
