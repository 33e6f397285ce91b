//! `group`: what is done with groups.

use std::io::{Write, stdout};

use clap::{Args, Subcommand};

use super::Failure;
use super::connect::Connect;
use crate::core::group::GroupName;

/// Manage groups of subscribers
#[derive(Args, Debug)]
pub(super) struct Group {
    #[command(subcommand)]
    verb: GroupVerb,
}

#[derive(Debug, Subcommand)]
enum GroupVerb {
    /// Delete a group without subscribers, and what it has not acknowledged
    Delete {
        /// Its name
        name: GroupName,
        #[command(flatten)]
        connect: Connect,
    },
}

impl Group {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let GroupVerb::Delete { name, connect } = self.verb;
        connect.client().await?.group_delete(name.as_str()).await?;
        Ok(writeln!(stdout(), "{name} deleted")?)
    }
}
