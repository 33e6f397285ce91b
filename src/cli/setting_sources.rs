//! Finds the environment variable or the settings file that set a flag. Also finds environment variables that look like
//! settings but are not.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::path::Path;

use clap::{Arg, CommandFactory};

use super::Cli;
use crate::process::files::read_text;

/// Returns one line per flag that the error text `text` names. The line names the environment variable, or the settings
/// file `file`, that sets the flag. Leaves out flags that are on the command line.
pub(super) fn of_flags_in(text: &str, file: Option<&Path>) -> String {
    let command = Cli::command();
    let mut flags: Vec<&Arg> = command.get_subcommands().flat_map(clap::Command::get_arguments).collect();
    flags.sort_by_key(|flag| flag.get_long());
    flags.dedup_by_key(|flag| flag.get_long());
    let in_file = file.and_then(|path| Some((path, read_text(path).ok()?.parse::<toml::Table>().ok()?)));
    let line = |flag: &Arg| {
        let (name, variable) = (flag.get_long()?, flag.get_env()?);
        if !names(text, name) || is_given(name) {
            return None;
        }
        if env::var_os(variable).is_some() {
            return Some(format!("\n--{name} stands in the environment, as {}", variable.display()));
        }
        let (path, _) = in_file.as_ref().filter(|(_, settings)| settings.contains_key(name))?;
        Some(format!("\n--{name} stands in {}", path.display()))
    };
    flags.into_iter().filter_map(line).collect()
}

/// Returns a warning for each environment variable that begins with `ACKWHEEL_` but is no setting. Ignores the
/// variables of Kubernetes.
pub(super) fn unknown_variables() -> Vec<String> {
    let command = Cli::command();
    let flags = command.get_subcommands().flat_map(clap::Command::get_arguments);
    let known: BTreeSet<&str> = flags.filter_map(Arg::get_env).filter_map(OsStr::to_str).collect();
    let given = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let foreign = given.filter(|(name, value)| {
        name.starts_with("ACKWHEEL_") && !known.contains(name.as_str()) && !is_of_a_service(name, value)
    });
    let mut unknown: Vec<String> = foreign.map(|(name, _)| name).collect();
    unknown.sort();
    let sentence = |name: &String| {
        let meant = known.iter().find(|known| known.replace('_', "") == name.replace('_', ""));
        let meant = meant.map(|known| format!(": is {known} meant?")).unwrap_or_default();
        format!("the environment has {name}, which is no setting and changes nothing{meant}")
    };
    unknown.iter().map(sentence).collect()
}

/// Returns whether the variable has the form of those that Kubernetes sets in every container for a service named
/// `ackwheel…`.
fn is_of_a_service(name: &str, value: &OsStr) -> bool {
    let is_a_port = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.split("_PORT_").skip(1).any(is_a_port)
        || name.ends_with("_PORT") && value.to_string_lossy().contains("://")
}

/// Returns whether `text` names this flag, and not only a longer flag that begins with its name.
fn names(text: &str, flag: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|next: char| next.is_ascii_alphanumeric() || next == '-');
    text.split("--").skip(1).any(|rest| rest.strip_prefix(flag).is_some_and(|rest| !goes_on(rest)))
}

/// Returns whether a flag is on the command line of this process.
fn is_given(flag: &str) -> bool {
    let is_it =
        |argument: &str| argument == flag || argument.split_once('=').is_some_and(|(name, _)| name == flag);
    env::args_os().any(|argument| argument.to_str().and_then(|text| text.strip_prefix("--")).is_some_and(is_it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_named_by_all_of_its_name() {
        assert!(names("--tls-cert and --tls-key belong together", "tls-key"));
        assert!(names("invalid value '' for '--tick <DURATION>'", "tick"));
        assert!(!names("--token-file is empty", "token"));
        assert!(!names("a tick", "tick"));
    }
}
