//! The verb `namespace delete`.

use std::io::{Write, stdout};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::Failure;
use crate::core::GroupName;
use crate::redis::{CredentialFiles, NamespaceError, StoreUrl, UnusedNamespace};

/// Delete a namespace from Redis
#[derive(Debug, Subcommand)]
pub(super) enum Namespace {
    Delete(Delete),
}

/// Delete a namespace from Redis: the messages in flight, batches and groups of all its rings
///
/// The command refuses while a sidecar of the namespace runs, and names it. Without --yes, it says how many keys the
/// namespace has, and removes none. Other keys in this Redis stay.
#[derive(Args, Debug)]
pub(super) struct Delete {
    /// The Redis, as in --store of serve
    #[arg(long, env = "ACKWHEEL_STORE", hide_env_values = true, value_name = "STORE")]
    store: StoreUrl,
    /// File with the password of the user in --store
    #[arg(long, env = "ACKWHEEL_REDIS_PASSWORD_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    redis_password_file: Option<PathBuf>,
    /// File with the password of sentinel_user in --store
    #[arg(long, env = "ACKWHEEL_SENTINEL_PASSWORD_FILE", value_name = "FILE", value_hint = ValueHint::FilePath)]
    sentinel_password_file: Option<PathBuf>,
    /// Certificates in PEM of the authorities of Redis
    #[arg(long, env = "ACKWHEEL_REDIS_CA", value_name = "FILE", value_hint = ValueHint::FilePath)]
    redis_ca: Option<PathBuf>,
    /// Certificate in PEM for Redis
    #[arg(long, env = "ACKWHEEL_REDIS_CERT", value_name = "FILE", value_hint = ValueHint::FilePath, requires = "redis_key")]
    redis_cert: Option<PathBuf>,
    /// Private key of --redis-cert in PEM
    #[arg(long, env = "ACKWHEEL_REDIS_KEY", value_name = "FILE", value_hint = ValueHint::FilePath, requires = "redis_cert")]
    redis_key: Option<PathBuf>,
    // A namespace follows the rule for group names.
    /// The namespace, as in --namespace of serve
    #[arg(long, value_name = "NAME")]
    namespace: GroupName,
    /// Remove the keys, which cannot be undone
    #[arg(long)]
    yes: bool,
}

impl Namespace {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Namespace::Delete(Delete { store, namespace, yes, .. }) = &self;
        if store.is_memory() {
            return Err(Failure::usage("--store memory has no namespace: name a Redis"));
        }
        let failed = |error: NamespaceError| {
            let text = format!("--store {store}: {error}");
            if matches!(error, NamespaceError::Address(_)) { Failure::Usage(text) } else { Failure::Run(text) }
        };
        let mut unused = UnusedNamespace::open(store, &self.files(), namespace.as_str()).await.map_err(failed)?;
        let keys = unused.keys().await.map_err(failed)?;
        if keys == 0 {
            return Err(Failure::Run(format!("there is no namespace {namespace} in this Redis")));
        }
        if !yes {
            return Err(Failure::Usage(format!(
                "the namespace {namespace} has {keys} keys, and none was removed: give --yes to remove them for ever"
            )));
        }
        let removed = unused.delete().await.map_err(failed)?;
        Ok(writeln!(stdout(), "namespace {namespace} deleted: {removed} keys removed")?)
    }

    fn files(&self) -> CredentialFiles {
        let Namespace::Delete(delete) = self;
        CredentialFiles {
            password: delete.redis_password_file.clone(),
            sentinel_password: delete.sentinel_password_file.clone(),
            authority: delete.redis_ca.clone(),
            certificate: delete.redis_cert.clone().zip(delete.redis_key.clone()),
        }
    }
}
