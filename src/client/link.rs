//! The way of a request from its caller to the background task: its place in the order, and its bound.
//!
//! ```text
//!   caller ── order ── window ── queue ──▶ lane ──▶ connection
//!          (one after   (room for         (waiting) (in flight)
//!           another)     messages)
//! ```
//!
//! The window bounds everything behind it: a request takes room before it is queued, gives most of it back
//! when it is written, and the rest when it is answered or has failed. So neither a server that is away nor
//! one that does not answer lets anything grow.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::error::ClientError;
use crate::protocol::frame::{Body, MAX_MESSAGES, Welcome};

/// How many messages may be in requests that wait to be written: 16 MiB.
const WINDOW_MESSAGES: usize = 32 * MAX_MESSAGES;

/// The least weight of a request, in messages, and its weight once it is written: the memory
/// of who waits for the answer.
pub(super) const LEAST_WEIGHT: usize = 8;

/// The timeout that stands for one beyond the end of time.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3_600);

// The largest frame can always pass.
const _: () = assert!(WINDOW_MESSAGES >= MAX_MESSAGES && MAX_MESSAGES <= u32::MAX as usize);

/// The answer to a request.
pub(super) type Answer = Result<Body, ClientError>;

/// A request on its way.
#[derive(Debug)]
pub(super) struct Request {
    /// Its content.
    pub(super) body: Body,
    /// When its caller gives up.
    pub(super) deadline: Instant,
    /// The caller that waits for the answer.
    pub(super) answer: oneshot::Sender<Answer>,
    /// Its room in the window.
    pub(super) room: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Command {
    Ask(Request),
    Close,
}

/// A time without a connection.
#[derive(Clone, Debug)]
pub struct Outage {
    /// When the connection was lost.
    pub since: std::time::Instant,
    /// Why there is none: how the last one ended, or why the last attempt to make one failed.
    pub cause: Arc<str>,
}

/// The state that callers and the background task share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) address: Address,
    welcome: Mutex<Welcome>,
    outage: Mutex<Option<Outage>>,
}

impl Shared {
    pub(super) fn new(address: Address, welcome: Welcome) -> Shared {
        Shared { address, welcome: Mutex::new(welcome), outage: Mutex::new(None) }
    }

    /// The Welcome of the current connection, or of the last one.
    pub(super) fn welcome(&self) -> Welcome {
        self.welcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// There is a connection again.
    pub(super) fn welcomed(&self, welcome: Welcome) {
        *self.welcome.lock().unwrap_or_else(PoisonError::into_inner) = welcome;
        *self.outage() = None;
    }

    /// There is no connection, or none yet.
    pub(super) fn lost(&self, cause: &Arc<str>) {
        let (mut outage, cause) = (self.outage(), Arc::clone(cause));
        let since = outage.as_ref().map_or_else(std::time::Instant::now, |outage| outage.since);
        *outage = Some(Outage { since, cause });
    }

    /// Since when there is no connection.
    pub(super) fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The callers' end. The background task ends when the last is dropped.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) shared: Arc<Shared>,
    request_timeout: Duration,
    /// Held while a call takes its place: it is given out in the order in which the calls came.
    order: tokio::sync::Mutex<()>,
    window: Arc<Semaphore>,
    queue: UnboundedSender<Command>,
}

/// Both ends of a new link.
pub(super) fn link(shared: Arc<Shared>, request_timeout: Duration) -> (Link, Lane) {
    let (queue, commands) = unbounded_channel();
    let window = Arc::new(Semaphore::new(WINDOW_MESSAGES));
    let link = Link { shared, request_timeout, order: tokio::sync::Mutex::new(()), window, queue };
    (link, Lane { commands, waiting: VecDeque::new(), closed: false })
}

impl Link {
    /// Asks one thing.
    pub(super) async fn ask(&self, body: Body) -> Answer {
        self.ask_all(std::iter::once(body)).await.pop().expect("one body has one answer")
    }

    /// Asks several things, in order and without waiting for the answers in between. Each has an answer,
    /// except those behind one that found no place.
    pub(super) async fn ask_all(&self, bodies: impl Iterator<Item = Body>) -> Vec<Answer> {
        let now = Instant::now();
        let deadline = now.checked_add(self.request_timeout).unwrap_or_else(|| now + LONGEST_WAIT);
        // Unconstrained, so that the first poll takes the place even if the task has used up its share.
        let places = tokio::task::unconstrained(self.take_places(bodies, deadline)).await;
        let mut answers = Vec::with_capacity(places.len());
        for place in places {
            answers.push(match place {
                Ok(answer) => answer.await.unwrap_or_else(|_| Err(self.task_is_gone())),
                Err(error) => Err(error),
            });
        }
        answers
    }

    /// The task finishes what is queued, then says goodbye; nothing more is accepted.
    pub(super) fn close(&self) {
        // Fails only if the task has ended already.
        let _ = self.queue.send(Command::Close);
    }

    async fn take_places(
        &self,
        bodies: impl Iterator<Item = Body>,
        deadline: Instant,
    ) -> Vec<Result<oneshot::Receiver<Answer>, ClientError>> {
        let Ok(_turn) = timeout_at(deadline, self.order.lock()).await else {
            return vec![Err(self.no_room())];
        };
        let mut places = Vec::with_capacity(bodies.size_hint().0);
        for body in bodies {
            let place = self.take_place(body, deadline).await;
            let failed = place.is_err();
            places.push(place);
            if failed {
                break;
            }
        }
        places
    }

    async fn take_place(&self, body: Body, deadline: Instant) -> Result<oneshot::Receiver<Answer>, ClientError> {
        let weight = u32::try_from(weight(&body)).unwrap_or(u32::MAX);
        let room = timeout_at(deadline, Arc::clone(&self.window).acquire_many_owned(weight)).await;
        let room = room.map_err(|_| self.no_room())?.expect("the window is never closed");
        let (answer, answered) = oneshot::channel();
        let request = Request { body, deadline, answer, room };
        let closed = |_| ClientError::Closed { address: self.shared.address.clone() };
        self.queue.send(Command::Ask(request)).map_err(closed)?;
        Ok(answered)
    }

    fn no_room(&self) -> ClientError {
        let address = self.shared.address.clone();
        ClientError::Timeout { address, waited: self.request_timeout, written: false }
    }

    /// The task fails every request before it ends, unless its runtime was shut down under it.
    fn task_is_gone(&self) -> ClientError {
        let cause = Arc::from("the runtime of this client was shut down");
        ClientError::ConnectionLost { address: self.shared.address.clone(), cause }
    }
}

fn weight(body: &Body) -> usize {
    let messages = match body {
        Body::AddNewMsg(add) => add.messages.len(),
        Body::DelMsg(del) => del.messages.len(),
        Body::BatchAck(batches) => batches.len(),
        _ => 0,
    };
    messages.clamp(LEAST_WEIGHT, MAX_MESSAGES)
}

/// The task's end: requests that are not yet written.
#[derive(Debug)]
pub(super) struct Lane {
    commands: UnboundedReceiver<Command>,
    waiting: VecDeque<Request>,
    closed: bool,
}

impl Lane {
    /// Waits for requests and takes all there are. Cancel-safe.
    pub(super) async fn take(&mut self) {
        match self.commands.recv().await {
            Some(command) => self.accept(command),
            None => self.closed = true,
        }
        while let Ok(command) = self.commands.try_recv() {
            self.accept(command);
        }
    }

    /// Whether no more requests will come, because nobody is left to make any.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next request whose caller still waits for it.
    pub(super) fn next(&mut self) -> Option<Request> {
        std::iter::from_fn(|| self.waiting.pop_front()).find(|request| !request.answer.is_closed())
    }

    /// When the first that waits gives up.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.waiting.front().map(|request| request.deadline)
    }

    /// Fails what waited for too long. They wait in the order of their deadlines, since all callers of a
    /// link wait for the same time.
    pub(super) fn fail_expired(&mut self, now: Instant, error: impl Fn() -> ClientError) {
        while self.next_deadline().is_some_and(|deadline| deadline <= now) {
            let request = self.waiting.pop_front().expect("it has a deadline");
            // A caller who is gone needs no answer, here and below.
            let _ = request.answer.send(Err(error()));
        }
    }

    /// Fails all that waits.
    pub(super) fn fail_all(&mut self, error: &ClientError) {
        for request in self.waiting.drain(..) {
            let _ = request.answer.send(Err(error.clone()));
        }
    }

    /// Accepts nothing more and fails all that waits.
    pub(super) fn end(&mut self, error: &ClientError) {
        self.commands.close();
        self.closed = true;
        while let Ok(command) = self.commands.try_recv() {
            self.accept(command);
        }
        self.fail_all(error);
    }

    fn accept(&mut self, command: Command) {
        match command {
            Command::Ask(request) => self.waiting.push_back(request),
            Command::Close => self.commands.close(),
        }
    }
}
