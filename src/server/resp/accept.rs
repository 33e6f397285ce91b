//! The RESP part of the acceptor: reads commands until a client is admitted, on the thread of the acceptor.

use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::{Greeted, Greeting};
use crate::clock::stall_aware_timeout;
use crate::core::{Reason, Refusal};
use crate::server::acceptor::Acceptor;
use crate::server::access::{Client, Peer};
use crate::server::admission::{Admitted, log_refusal};
use crate::server::buffered_stream::BufferedStream;
use crate::server::session::{CLOSE_TIMEOUT, Session};
use crate::server::socket::IoEvent;
use crate::server::unauthenticated::Place;

/// How often a client with the right token is tried again while the store is being opened.
const STORE_CHECK: Duration = Duration::from_millis(100);

impl Acceptor {
    /// Reads the first commands of a RESP connection, and starts its session once the client is admitted.
    pub(in crate::server) async fn greet_resp(
        self,
        mut stream: BufferedStream,
        client: Client,
        left: Duration,
        place: Place,
    ) {
        let admission = &*self.admission;
        let address = match client.peer {
            Peer::Tcp(address) => address.to_string(),
            Peer::Unix => String::new(),
        };
        let mut greeting = Greeting::new(address);
        let mut greeted = stall_aware_timeout(left, self.receive_token(&mut stream, &client, &mut greeting)).await;
        if greeted.is_none() && greeting.accepted.is_some() {
            // The client waits for the store: no token is missing.
            greeted = Some(self.receive_token(&mut stream, &client, &mut greeting).await);
        }
        let text = || format!("no token came within {:?}: send AUTH token", admission.options.hello_timeout);
        match greeted.unwrap_or_else(|| Err(Some(Refusal::new(Reason::HelloTimeout, text())))) {
            Ok(admitted) => {
                drop(place);
                let admission = Arc::clone(&self.admission);
                let start = |stream, grant, shared, phase| {
                    Session::resp(stream, greeting, client, grant, shared, phase, admission)
                };
                self.serve(stream, admitted, start);
            }
            Err(refusal) => {
                if let Some(refusal) = refusal {
                    log_refusal(&refusal, client.peer);
                    admission.metrics.refusals.of(refusal.reason).inc();
                    stream.write(|_, out| drop(greeting.connection.refuse_login(out, &refusal)));
                }
                let _ = stall_aware_timeout(CLOSE_TIMEOUT, stream.close(self.unanswered.token())).await;
            }
        }
    }

    /// Reads commands until the client is admitted. Returns an error if the connection is to be closed, with the refusal
    /// to send.
    async fn receive_token(
        &self,
        stream: &mut BufferedStream,
        client: &Client,
        greeting: &mut Greeting,
    ) -> Result<Admitted, Option<Refusal>> {
        let admit = |token: &[u8]| {
            let admitted = self.admission.admit_token(token, client);
            // A client with the right token may wait until the store is open.
            if let Err(refusal) = &admitted
                && refusal.reason != Reason::Starting
            {
                log_refusal(refusal, client.peer);
                self.admission.metrics.refusals.of(refusal.reason).inc();
            }
            admitted
        };
        if !self.admission.access.requires_token() {
            greeting.accept(stream, &self.admission, b"");
        }
        loop {
            match greeting.read(stream, &self.admission, admit) {
                Greeted::Waiting => {}
                Greeted::Admitted(admitted) => return Ok(admitted),
                Greeted::Closed(refusal) => return Err(refusal),
            }
            // A client that waits for the store is admitted soon after it is open, also if it sends nothing.
            let most = if greeting.accepted.is_some() { STORE_CHECK } else { Duration::MAX };
            let Ok(event) = tokio::time::timeout(most, stream.read_or_write(true)).await else { continue };
            match event {
                Ok(IoEvent::Ended | IoEvent::OverBudget | IoEvent::WriteFailed) => return Err(None),
                Ok(_) => {}
                Err(error) => {
                    debug!(%error, "connection lost");
                    return Err(None);
                }
            }
            // Let the other connections of this thread make progress after each read.
            tokio::task::yield_now().await;
        }
    }
}
