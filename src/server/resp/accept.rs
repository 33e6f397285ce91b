//! The RESP part of the acceptor: reads commands until a client is admitted, on the thread of the acceptor.

use std::sync::Arc;

use tokio_util::either::Either;
use tracing::debug;

use super::{Greeted, Greeting, reply};
use crate::clock::stall_aware_timeout;
use crate::core::{Reason, Refusal};
use crate::metrics::Listener;
use crate::server::acceptor::Acceptor;
use crate::server::access::Peer;
use crate::server::admission::{Admitted, Client, log_refusal};
use crate::server::buffered_stream::BufferedStream;
use crate::server::credentials::certificate_name;
use crate::server::session::{CLOSE_TIMEOUT, Session};
use crate::server::socket::{IoEvent, Socket};
use crate::server::unauthenticated::Place;

impl Acceptor {
    /// Reads the first commands of a RESP connection, and starts its session once the client is admitted.
    pub(in crate::server) async fn greet_resp(self, socket: Socket, peer: Peer, place: Place) {
        let admission = &*self.admission;
        let address = match &socket {
            Either::Left(tcp) => tcp.peer_addr().map(|address| address.to_string()).unwrap_or_default(),
            Either::Right(_) => String::new(),
        };
        let (mut greeting, mut stream) = (Greeting::new(address), None);
        let timeout = admission.options.hello_timeout;
        let mut greeted =
            stall_aware_timeout(timeout, self.receive_token(socket, peer, &mut greeting, &mut stream)).await;
        let Some((mut stream, client)) = stream else {
            if greeted.is_none() {
                debug!("the TLS handshake took too long");
                admission.metrics.refusals.of(Reason::TlsHandshake).inc();
            }
            return;
        };
        if greeted.is_none() && greeting.accepted.is_some() {
            // The client waits for the store: no token is missing.
            greeted = Some(self.read_commands(&mut greeting, &mut stream, &client).await);
        }
        match greeted {
            Some(Some(admitted)) => {
                drop(place);
                let admission = Arc::clone(&self.admission);
                let start = |stream, grant, shared, phase| {
                    Session::resp(stream, greeting, client, grant, shared, phase, admission)
                };
                self.serve(stream, admitted, start);
            }
            Some(None) => {
                let _ = stall_aware_timeout(CLOSE_TIMEOUT, stream.close(self.unanswered.token())).await;
            }
            None => {
                let text = format!("no token came within {timeout:?}: send AUTH token");
                let refusal = Refusal::new(Reason::HelloTimeout, text);
                log_refusal(&refusal, peer);
                admission.metrics.refusals.of(refusal.reason).inc();
                stream.write(|_, out| reply::refusal(out, &refusal));
                let _ = stall_aware_timeout(CLOSE_TIMEOUT, stream.close(self.unanswered.token())).await;
            }
        }
    }

    /// Makes the TLS handshake, and reads commands until the client is admitted. Sets `opened` once the handshake is made.
    /// Returns `None` if the connection is to be closed.
    async fn receive_token(
        &self,
        socket: Socket,
        peer: Peer,
        greeting: &mut Greeting,
        opened: &mut Option<(BufferedStream, Client)>,
    ) -> Option<Admitted> {
        let ready = self.handshake(socket).await?;
        let client = Client { peer, certificate_name: certificate_name(&ready) };
        let (stream, client) = opened.insert((self.buffered(ready, Listener::Resp), client));
        if !self.admission.access.requires_token() {
            greeting.accept(stream, &self.admission, b"");
        }
        self.read_commands(greeting, stream, client).await
    }

    /// Reads commands until the client is admitted. Returns `None` if the connection is to be closed.
    async fn read_commands(
        &self,
        greeting: &mut Greeting,
        stream: &mut BufferedStream,
        client: &Client,
    ) -> Option<Admitted> {
        let admit = |token: &[u8]| {
            let admitted = self.admission.admit_token(token, client, Listener::Resp);
            // A client with the right token may wait until the store is open.
            if let Err(refusal) = &admitted
                && refusal.reason != Reason::Starting
            {
                log_refusal(refusal, client.peer);
                self.admission.metrics.refusals.of(refusal.reason).inc();
            }
            admitted
        };
        loop {
            match greeting.read(stream, &self.admission, admit) {
                Greeted::Waiting => {}
                Greeted::Admitted(admitted) => return Some(admitted),
                Greeted::Closed => return None,
            }
            match stream.read_or_write(true).await {
                Ok(IoEvent::Ended | IoEvent::OverBudget | IoEvent::WriteFailed) => return None,
                Ok(_) => {}
                Err(error) => {
                    debug!(%error, "connection lost");
                    return None;
                }
            }
        }
    }
}
