//! Sends the requests of all client connections to one ring in Redis. Requests that arrive while a script is in flight
//! are sent together, in the next script.
//!
//! Connections put their requests into the [`Inbox`]. One task per ring moves them to its [`Queue`], and sends *chunks*
//! of the queue, each in one script. A *session* is one registered connection to Redis. The task keeps at most
//! [`DEPTH`] scripts in flight, so that Redis runs one script while the task writes the next. If no script is in
//! flight, a request is sent at once. A second script is sent when [enough messages](second_script_threshold) wait. The
//! [`Window`] limits the number of messages in a script.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::future::{BoxFuture, MaybeDone, maybe_done};
use futures_util::poll;
use tokio::sync::watch;
use tracing::{error, info};

use crate::core::Refusal;
use crate::redis::batching::chunk::{Applied, Chunk};
use crate::redis::batching::congestion::{DEPTH, LEAST_FOR_SECOND, Window, second_script_threshold};
use crate::redis::batching::incoming_requests::{Inbox, Item};
use crate::redis::batching::queue::Queue;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, LinkState, Session};
use crate::redis::connection::lost_writes;
use crate::redis::scripts::{Answer, SCRIPTS};

/// Maximum number of answered Acks that the sidecar keeps for all rings together, to apply them again if Redis loses
/// them. An Ack needs 32 bytes.
const KEPT_ACKS: usize = 1_000_000;

/// Sends the requests in `inbox` to the ring of `link`. Never ends.
pub(crate) async fn send_requests(link: Arc<Link>, inbox: Arc<Inbox>) {
    let kept_acks = KEPT_ACKS.div_ceil(link.options.rings.into());
    let mut driver = Driver {
        sessions: link.state.subscribe(),
        queue: Queue::new(Arc::clone(&link.progress), link.options.max_in_flight, kept_acks),
        link,
        inbox,
        items: Vec::new(),
        shown_held_acks: 0,
        is_out_of_memory: false,
    };
    loop {
        let session = driver.wait_for_session().await;
        driver.show_held_acks(0);
        driver.queue.begin_session(&session.answers, driver.link.clock.now());
        if let Some(lost) = driver.queue.take_lost(session.chunk) {
            lost_writes::reapply(&driver.link, &session, lost).await;
        }
        driver.serve(session).await;
    }
}

/// The state of the task that sends requests.
struct Driver {
    link: Arc<Link>,
    sessions: watch::Receiver<LinkState>,
    inbox: Arc<Inbox>,
    /// A buffer for the items that move from the inbox to the queue. It is a field only to reuse its memory.
    items: Vec<Item>,
    queue: Queue,
    /// This ring's share of the metric `held_acks`: the number of Acks without an answer while Redis is unreachable,
    /// else 0.
    shown_held_acks: i64,
    /// Whether Redis was out of memory for the last chunk with adds. The log reports only changes of this state.
    is_out_of_memory: bool,
}

/// The scripts of one session, and the limits for sending them.
struct Scripts {
    session: Arc<Session>,
    in_flight: InFlight<Chunk, (Result<Answer, Fault>, Instant)>,
    /// The number of the next chunk. Redis applies a chunk only if its number follows that of the last applied chunk.
    next_number: u64,
    /// Minimum number of waiting messages for which a second script is sent while one is in flight.
    second_threshold: usize,
    window: Window,
}

impl Driver {
    /// Waits until there is a session. During the wait, refuses new adds and holds new dels.
    async fn wait_for_session(&mut self) -> Arc<Session> {
        loop {
            if let Ok(session) = &*self.sessions.borrow_and_update() {
                return Arc::clone(session);
            }
            self.show_held_acks(self.link.progress.unanswered_acks.load(Ordering::Relaxed));
            tokio::select! {
                _ = self.sessions.changed() => {}
                () = poll_fn(|context| self.inbox.poll(context, 1)) => {
                    self.take_inbox(Queue::push_while_unreachable);
                }
            }
        }
    }

    fn show_held_acks(&mut self, held: u64) {
        let held = i64::try_from(held).unwrap_or(i64::MAX);
        self.link.metrics.held_acks.add(held - self.shown_held_acks);
        self.shown_held_acks = held;
    }

    /// Sends scripts and receives answers until the session ends.
    async fn serve(&mut self, session: Arc<Session>) {
        self.take_inbox(Queue::push);
        let mut held_before = session.is_awaited.then(|| self.queue.frames.next());
        let mut scripts = Scripts {
            next_number: session.chunk + 1,
            session,
            in_flight: InFlight::with_capacity(DEPTH),
            second_threshold: LEAST_FOR_SECOND,
            window: Window::new(self.link.clock.now()),
        };
        loop {
            self.take_inbox(Queue::push);
            if held_before.take_if(|frame| self.queue.frames.first >= *frame).is_some() {
                lost_writes::end_wait(&self.link, &scripts.session).await;
            }
            self.send(&mut scripts).await;
            let is_idle = scripts.in_flight.is_empty();
            let has_place = scripts.in_flight.len() < scripts.window.scripts();
            let enough = if is_idle { 1 } else { scripts.second_threshold.saturating_sub(self.queue.waiting) };
            tokio::select! {
                biased;
                (answer, sent_at) = first_answer(&mut scripts.in_flight), if !is_idle => {
                    self.adapt(&mut scripts, sent_at);
                    if let Err(fault) = self.receive(&mut scripts, answer).await {
                        self.link.give_up(&scripts.session, &fault);
                        break;
                    }
                }
                () = poll_fn(|context| self.inbox.poll(context, enough)), if has_place => {}
                _ = self.sessions.changed() => break,
            }
        }
        let unanswered = scripts.in_flight.into_iter().map(|(chunk, _)| chunk);
        self.queue.end_session(scripts.session.generation, unanswered);
    }

    fn take_inbox(&mut self, push: impl Fn(&mut Queue, Item)) {
        self.inbox.take(&mut self.items);
        self.items.drain(..).for_each(|item| push(&mut self.queue, item));
        self.queue.wake();
    }

    /// Sends a script if none is in flight. Sends a second one if enough messages wait, or if there is a barrier, which
    /// waits until all earlier requests are answered.
    async fn send(&mut self, scripts: &mut Scripts) {
        while scripts.in_flight.is_empty()
            || scripts.in_flight.len() < scripts.window.scripts()
                && (self.queue.waiting >= scripts.second_threshold || !self.queue.barriers.is_empty())
        {
            let most = scripts.window.messages(self.link.clock.now());
            let Some(chunk) = self.queue.next_chunk(scripts.next_number, most) else { return };
            scripts.next_number += 1;
            let keys = &self.link.keys;
            let names = keys.and_lists(&[&keys.messages, &keys.ticks]);
            let mut call = self.link.guarded(&scripts.session, &SCRIPTS.apply, &names);
            self.queue.write(&chunk, &mut call);
            let (link, session) = (Arc::clone(&self.link), Arc::clone(&scripts.session));
            let exchange = async move {
                let sent_at = link.clock.now();
                (link.send(&session, &SCRIPTS.apply, &call).await, sent_at)
            };
            send(&mut scripts.in_flight, chunk, exchange).await;
        }
    }

    /// Adapts the window and the threshold after the answer to the first script in flight. `sent_at` is the time at
    /// which that script was sent.
    fn adapt(&mut self, scripts: &mut Scripts, sent_at: Instant) {
        let now = self.link.clock.now();
        let round_trip = now.saturating_duration_since(sent_at);
        let waited = round_trip.saturating_sub(scripts.session.server.stall_detector.least_round_trip());
        let messages = scripts.in_flight.front().map_or(0, |(chunk, _)| chunk.messages());
        scripts.window.answered(messages, sent_at, waited, now);
        self.take_inbox(Queue::push);
        let in_flight: usize = scripts.in_flight.iter().map(|(chunk, _)| chunk.messages()).sum();
        scripts.second_threshold = second_script_threshold(self.queue.waiting + in_flight, round_trip);
    }

    /// Processes the answer to the first chunk in flight. Returns a fault if the session must end.
    async fn receive(&mut self, scripts: &mut Scripts, answer: Result<Answer, Fault>) -> Result<(), Fault> {
        let (chunk, _) = scripts.in_flight.front().expect("its answer has just come");
        let (number, has_adds) = (chunk.number, chunk.has_adds);
        let mut refusal = None;
        match answer {
            Ok(mut answer) => {
                let applied = Applied::read(&mut answer)?;
                if has_adds && mem::take(&mut self.is_out_of_memory) {
                    info!("Redis has memory again, and new messages are taken");
                    *self.link.progress.out_of_memory_at.lock() = None;
                }
                let (chunk, _) = scripts.in_flight.pop_front().expect("its answer has just come");
                self.queue.apply(chunk, &applied, self.link.clock.now());
                return Ok(());
            }
            Err(Fault { kind: FaultKind::NoScript, .. }) => {
                self.link.load(&scripts.session, &SCRIPTS.apply).await?;
            }
            Err(fault) if fault.kind == FaultKind::OutOfMemory && has_adds => {
                if !mem::replace(&mut self.is_out_of_memory, true) {
                    error!(
                        cause = fault.text,
                        "Redis has no memory left: new messages are refused and not tracked; raise its \
                         maxmemory, or lower --max-in-flight"
                    );
                }
                refusal = Some(Refusal::from(fault));
            }
            Err(fault) if matches!(fault.kind, FaultKind::OutOfMemory | FaultKind::Denied | FaultKind::Other) => {
                error!(
                    cause = fault.text,
                    "Redis cannot apply some adds or acknowledgements, and they are refused: remove the cause; if its memory \
                     is full, raise maxmemory or lower --max-in-flight"
                );
                let (chunk, _) = scripts.in_flight.pop_front().expect("its answer has just come");
                self.queue.refuse(chunk, &Refusal::from(Fault { kind: FaultKind::Other, ..fault }));
            }
            Err(fault) => return Err(fault),
        }
        // Redis has not applied this chunk. So it does not apply the later chunks in flight either, because their
        // numbers do not follow. All these chunks are queued again, in order. If there is a `refusal`, their adds are
        // refused instead.
        let chunks = scripts.in_flight.drain(..).map(|(chunk, _)| chunk).collect();
        self.queue.send_again(chunks, refusal.as_ref());
        if let Some(refusal) = refusal {
            self.queue.refuse_adds(&refusal);
        }
        scripts.next_number = number;
        Ok(())
    }
}

/// The *exchanges* (requests with their answers) in flight, in the order of sending. Each element has the value that
/// was sent, and the future of the answer.
type InFlight<T, A> = VecDeque<(T, MaybeDone<BoxFuture<'static, A>>)>;

/// Starts `exchange`, and appends it to `in_flight` with the value `sent`. When this function returns, the request is
/// on the connection, or queued for it after all earlier requests.
async fn send<T, A>(in_flight: &mut InFlight<T, A>, sent: T, exchange: impl Future<Output = A> + Send + 'static) {
    // The connection accepts a limited number of requests at a time. An earlier exchange may have a permit for the
    // connection that it has not used yet. This poll lets the earlier exchange send its request first.
    for (_, earlier) in &mut *in_flight {
        let _ = poll!(earlier);
    }
    // The poll below sends the request, or queues it for a permit. `unconstrained` is necessary: if the task had used
    // up its Tokio budget, the poll would do neither, and a later exchange could overtake this one.
    let mut exchange: MaybeDone<BoxFuture<'static, A>> =
        maybe_done(Box::pin(tokio::task::unconstrained(exchange)));
    let _ = poll!(&mut exchange);
    in_flight.push_back((sent, exchange));
}

/// Awaits the answer to the first exchange, or waits forever if there is none. The exchange stays in `in_flight`. The
/// caller must remove it before the next call.
async fn first_answer<T, A>(in_flight: &mut InFlight<T, A>) -> A {
    let Some((_, answer)) = in_flight.front_mut() else { return std::future::pending().await };
    (&mut *answer).await;
    Pin::new(answer).take_output().expect("the answer has come, and was not taken before")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn an_exchange_does_not_overtake_an_earlier_one_that_waits() {
        let (places, taken) = (Arc::new(Semaphore::new(0)), Arc::new(Mutex::new(Vec::new())));
        let exchange = |number: u32| {
            let (places, taken) = (Arc::clone(&places), Arc::clone(&taken));
            async move {
                places.acquire().await.unwrap().forget();
                taken.lock().push(number);
                number
            }
        };
        let mut in_flight = InFlight::new();
        send(&mut in_flight, 'a', exchange(1)).await;
        assert!(taken.lock().is_empty());
        // The first permit goes to the first exchange, which the runtime has not polled yet. The second permit is free,
        // so the second exchange could take it at once.
        places.add_permits(2);
        send(&mut in_flight, 'b', exchange(2)).await;
        assert_eq!(*taken.lock(), [1, 2]);
        assert_eq!((first_answer(&mut in_flight).await, in_flight.pop_front().unwrap().0), (1, 'a'));
        assert_eq!((first_answer(&mut in_flight).await, in_flight.front().unwrap().0), (2, 'b'));
        assert_eq!(in_flight.len(), 1);
    }
}
