//! The context of one ring, which its lease, its wheel and its outbox share.

use std::sync::Arc;

use redis::ToRedisArgs;

use crate::core::Refusal;
use crate::redis::connection::link::{Link, Session};
use crate::redis::leader::term::{CurrentTerm, Identity};
use crate::redis::options::RedisOptions;
use crate::redis::scripts::{Answer, Script};

/// One ring, as this sidecar uses it.
pub(super) struct RingContext {
    pub(super) ring: u16,
    /// The options of the store, with the bounds of one ring.
    pub(super) options: RedisOptions,
    pub(super) identity: Identity,
    pub(super) link: Arc<Link>,
    pub(super) term: Arc<CurrentTerm>,
}

impl RingContext {
    /// Runs a script that writes, in this session and no other. Returns the first word of its answer, and the rest.
    pub(super) async fn run(
        &self,
        session: &Session,
        script: &'static Script,
        keys: &[impl AsRef<str>],
        arguments: impl ToRedisArgs,
    ) -> Result<(String, Answer), Refusal> {
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        let mut answer = self.link.write_in(session, script, &keys, arguments).await?;
        Ok((answer.text()?, answer))
    }
}
