//! Requests of all connections travel together: what arrives while scripts are in flight goes out in the next.
//!
//! One task a ring owns the [`Queue`] and keeps at most [`DEPTH`] scripts in flight, so that Redis works on one
//! while the next is written. Idle, a request is on its way at once; while one script is in flight, a second one
//! goes only when it is worth one ([`worth`]). How much a script carries follows what Redis answers in
//! ([`congestion`](crate::redis::batching::congestion)).

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::error;

use crate::core::completions::Completions;
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::{Request, RequestBatch};
use crate::core::ring::ConnectionId;
use crate::core::tick::Tick;
use crate::metrics::Metrics;
use crate::redis::batching::applied::Applied;
use crate::redis::batching::chunk::Chunk;
use crate::redis::batching::congestion::{DEPTH, Window};
use crate::redis::batching::in_flight::InFlight;
use crate::redis::batching::inbox::{Inbox, Letters};
use crate::redis::batching::out_of_memory_notice::OutOfMemoryNotice;
use crate::redis::batching::queue::Queue;
use crate::redis::batching::request::{away, complete_refused};
use crate::redis::batching::send_threshold;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, Links, Session, State};
use crate::redis::connection::recovery::{self, Held};
use crate::redis::scripts::{Answer, SCRIPTS};

/// The bounds that requests are held against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_in_flight: u64,
    pub(crate) max_held_acks: u64,
    /// The most answered Acks that are kept, in case that Redis loses them.
    pub(crate) kept_acks: usize,
}

/// Carries adds and dels to a ring.
pub(crate) struct Coalescer {
    inbox: Arc<Inbox>,
    link: Arc<Link>,
    /// Those of all rings: while one of them is away, connections are read however many of their Acks are not answered.
    links: Arc<Links>,
    bounds: Bounds,
    draining: AtomicBool,
    driver: JoinHandle<()>,
}

impl Drop for Coalescer {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Coalescer {
    pub(crate) fn new(link: Arc<Link>, links: Arc<Links>, bounds: Bounds, metrics: Arc<Metrics>) -> Coalescer {
        let inbox = Arc::new(Inbox::default());
        let driver = Driver {
            states: link.states(),
            link: Arc::clone(&link),
            inbox: Arc::clone(&inbox),
            letters: Letters::default(),
            queue: Queue::new(Arc::clone(link.progress()), bounds.kept_acks),
            bounds,
            held: Held::new(metrics),
            fullness: OutOfMemoryNotice::default(),
        };
        let driver = tokio::spawn(driver.run());
        Coalescer { inbox, link, links, bounds, draining: AtomicBool::new(false), driver }
    }

    /// Takes the requests of a batch: each is completed later.
    pub(crate) fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
    ) {
        if self.draining.load(Ordering::Relaxed) {
            batch.refuse_adds(&Refusal::new(
                Reason::Draining,
                "this sidecar is draining and takes no new messages: add them through another one",
            ));
        } else if !self.link.is_up() {
            batch.refuse_adds(&away());
        }
        for request in &mut batch.requests {
            if !request.adds() && request.refusal.is_none() {
                self.count_ack(request);
            }
        }
        complete_refused(batch, completions);
        self.inbox.leave(batch, connection, completions);
    }

    /// Takes no adds from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Counts the messages of a del until they are answered, or refuses to hold them.
    fn count_ack(&self, request: &mut Request) {
        let count = request.range().len() as u64;
        let unanswered = &self.link.progress().unanswered_acks;
        let before = unanswered.fetch_add(count, Ordering::Relaxed);
        if before + count > self.bounds.max_held_acks && !self.links.are_up() {
            unanswered.fetch_sub(count, Ordering::Relaxed);
            request.refusal = Some(Arc::new(Refusal::new(
                Reason::MaxHeldAcks,
                format!(
                    "Redis is away, and {before} acknowledgements are held already, with a limit of {}: send these \
                     again when it is back, or raise --max-held-acks",
                    self.bounds.max_held_acks
                ),
            )));
        }
    }

    /// Messages of DelMsg that are not answered.
    pub(crate) fn unanswered_acks(&self) -> u64 {
        self.link.progress().unanswered_acks.load(Ordering::Relaxed)
    }

    /// Waits until everything asked for before is answered or refused; for so long at most.
    pub(crate) async fn flush(&self, patience: Duration) {
        let (told, passed) = oneshot::channel();
        self.inbox.bar(told);
        // It is dropped where Redis goes away: then there is nothing to wait for.
        let _ = timeout(patience, passed).await;
    }
}

/// The chunks whose answers are awaited, and when they were sent.
type Chunks = InFlight<Chunk, (Result<Answer, Fault>, Instant)>;

struct Driver {
    link: Arc<Link>,
    states: watch::Receiver<State>,
    inbox: Arc<Inbox>,
    /// What is taken out of the inbox; empty again once it is read.
    letters: Letters,
    queue: Queue,
    bounds: Bounds,
    held: Held,
    fullness: OutOfMemoryNotice,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl Driver {
    async fn run(mut self) {
        while let Some(session) = self.wait_for_session().await {
            self.held.show(0);
            self.queue.recall(&session.answers, self.bounds.max_in_flight, self.link.clock().now());
            if let Some(lost) = self.queue.take_lost(session.chunk) {
                recovery::reapply(&self.link, &session, lost).await;
            }
            self.serve(&session).await;
            self.queue.refuse_adds();
        }
    }

    /// Waits until Redis is there. What comes meanwhile is refused or held; `None` when the link is gone.
    async fn wait_for_session(&mut self) -> Option<Session> {
        loop {
            if let State::Up(session) = &*self.states.borrow_and_update() {
                return Some(session.clone());
            }
            self.held.show(self.link.progress().unanswered_acks.load(Ordering::Relaxed));
            tokio::select! {
                changed = self.states.changed() => changed.ok()?,
                () = poll_fn(|context| self.inbox.poll(context, 1)) => {
                    self.inbox.take(&mut self.letters);
                    self.letters.take_each(|item, messages| self.queue.push_while_away(item, messages));
                    self.queue.wake();
                }
            }
        }
    }

    /// Sends and receives until the session ends.
    async fn serve(&mut self, session: &Session) {
        let mut next = session.chunk + 1;
        let mut flying = Chunks::with_capacity(DEPTH);
        let mut enough_for_two = send_threshold::LEAST;
        let mut window = Window::new(self.link.clock().now());
        self.take_in();
        let mut held_before = session.is_awaited.then(|| self.queue.next_frame());
        loop {
            self.take_in();
            if held_before.is_some_and(|frame| self.queue.has_answered_all_before(frame)) {
                held_before = None;
                recovery::end_wait(&self.link, session).await;
            }
            self.send_what_is_worth_it(session, &mut flying, &mut next, enough_for_two, &mut window).await;
            let enough = if flying.is_empty() { 1 } else { enough_for_two.saturating_sub(self.queue.waiting()) };
            tokio::select! {
                biased;
                (answered, sent) = flying.first(), if !flying.is_empty() => {
                    let (now, messages) = (self.link.clock().now(), flying.front().map_or(0, Chunk::messages));
                    let took = now.saturating_duration_since(sent);
                    let waited = took.saturating_sub(session.peer.silence.least_round_trip());
                    window.answered(messages, sent, waited, now);
                    self.take_in();
                    let unanswered = self.queue.waiting() + flying.carried().map(Chunk::messages).sum::<usize>();
                    enough_for_two = send_threshold::messages(unanswered, took);
                    if let Err(fault) = self.receive(session, answered, &mut flying, &mut next).await {
                        self.link.give_up(session, &fault);
                        break;
                    }
                }
                () = poll_fn(|context| self.inbox.poll(context, enough)), if flying.len() < window.scripts() => {}
                _ = self.states.changed() => break,
            }
        }
        for chunk in flying.take_all() {
            self.queue.unanswered(session.generation, chunk);
        }
    }

    fn take_in(&mut self) {
        self.inbox.take(&mut self.letters);
        self.letters.take_each(|item, messages| self.queue.push(item, messages));
        self.queue.wake();
    }

    async fn send_what_is_worth_it(
        &mut self,
        session: &Session,
        flying: &mut Chunks,
        next: &mut u64,
        enough_for_two: usize,
        window: &mut Window,
    ) {
        while flying.is_empty() || flying.len() < window.scripts() && self.queue.is_worth_a_script(enough_for_two)
        {
            let most = window.messages(self.link.clock().now());
            let Some(chunk) = self.queue.next_chunk(*next, most) else { return };
            *next += 1;
            let exchange = self.exchange(session, &chunk);
            flying.push(chunk, exchange).await;
        }
    }

    /// What sends a chunk, and has its answer, and when it was sent.
    fn exchange(
        &mut self,
        session: &Session,
        chunk: &Chunk,
    ) -> impl Future<Output = (Result<Answer, Fault>, Instant)> + Send + use<> {
        let keys = self.link.keys();
        let names: Vec<&str> =
            [&keys.messages, &keys.ticks].into_iter().chain(keys.lists()).map(String::as_str).collect();
        let mut call = self.link.guarded(session, &SCRIPTS.apply, &names, self.queue.room());
        call.arg(chunk.number).arg(self.bounds.max_in_flight).arg(u8::from(chunk.has_adds));
        self.queue.encode(chunk, &mut call);
        let (link, session) = (Arc::clone(&self.link), session.clone());
        async move {
            let begun = link.clock().now();
            (link.send(&session, &SCRIPTS.apply, &call).await, begun)
        }
    }

    /// Deals with the answer to the first chunk in flight.
    async fn receive(
        &mut self,
        session: &Session,
        answered: Result<Answer, Fault>,
        flying: &mut Chunks,
        next: &mut u64,
    ) -> Result<(), Fault> {
        let number = flying.front().map_or(*next, |chunk| chunk.number);
        let refusal = match answered {
            Ok(mut answer) => match answer.text()?.as_str() {
                "ok" => {
                    let (tick_due, letters, times) = (answer.count()?, answer.text()?, answer.text()?);
                    let in_flight = Some(answer.count()?);
                    let applied =
                        Applied { tick_due: Tick(tick_due), letters: &letters, times: &times, in_flight };
                    let chunk = flying.pop().expect("its answer has just come");
                    self.fullness.ends_if(chunk.has_adds);
                    self.queue.applied(chunk, &applied, self.bounds.max_in_flight, self.link.clock().now());
                    return Ok(());
                }
                word => return Err(answer.strange(word)),
            },
            Err(Fault { kind: FaultKind::NoScript, .. }) => {
                self.link.load(session, &SCRIPTS.apply).await?;
                None
            }
            Err(fault)
                if fault.kind == FaultKind::OutOfMemory && flying.front().is_some_and(|chunk| chunk.has_adds) =>
            {
                self.fullness.begins(&fault.text);
                Some(Refusal::from(fault))
            }
            Err(fault) if matches!(fault.kind, FaultKind::OutOfMemory | FaultKind::Denied | FaultKind::Other) => {
                error!(
                    cause = fault.text,
                    "Redis will not carry out some adds or acknowledgements, and they are refused: mend what the cause names; \
                     if its memory is full, raise maxmemory or lower --max-in-flight"
                );
                let chunk = flying.pop().expect("its answer has just come");
                self.queue.refuse(chunk, &Refusal::from(Fault { kind: FaultKind::Other, ..fault }));
                None
            }
            Err(fault) => return Err(fault),
        };
        // Nothing behind it was applied either, since its number is missing: all goes out again, in order.
        let chunks = flying.take_all().collect();
        self.queue.send_again(chunks, refusal.as_ref());
        if let Some(refusal) = refusal {
            self.queue.refuse_adds_with(&refusal);
        }
        *next = number;
        Ok(())
    }
}
