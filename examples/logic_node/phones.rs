//! Simulated phones: what a logic node has at the other end of its long connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ackwheel::core::Message;
use ackwheel::protocol::frame::Welcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep;

/// How long a push waits for its Ack.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// In ticks, as AddNewMsg wants it.
    pub ticks: u16,
    tick: Duration,
}

impl Patience {
    /// About a second, as near as this sidecar's ring comes to it: then two pushes fit a short show.
    pub fn of(welcome: &Welcome) -> Patience {
        let ticks = (1_000 / welcome.tick_ms.max(1)).clamp(1, u32::from(welcome.slots));
        let tick = Duration::from_millis(u64::from(welcome.tick_ms));
        Patience { ticks: u16::try_from(ticks).unwrap_or(1), tick }
    }

    /// The time that an Ack has at least.
    pub fn ack_timeout(self) -> Duration {
        self.tick * u32::from(self.ticks)
    }

    /// A moment after two pushes have timed out, when an Ack is `late`. Each takes up to a tick longer than
    /// its ack timeout.
    fn after_giving_up(self) -> Duration {
        self.tick * (2 * (u32::from(self.ticks) + 1) + 2)
    }
}

/// The push did not leave this host: there is nobody at the other end.
#[derive(Debug)]
pub struct PushFailed;

#[derive(Clone, Copy, Debug)]
enum Temper {
    /// Answers at once.
    Prompt,
    /// Loses the first push in a tunnel, and answers the second.
    InTunnels,
    /// Answers each push, but far too late.
    Slow,
    /// Looks connected, and never answers.
    Silent,
    /// Has closed its connection.
    Gone,
}

/// All phones, and the line on which their Acks come in.
pub struct Phones {
    tempers: Vec<Temper>,
    patience: Patience,
    random: Mutex<StdRng>,
    acks: UnboundedSender<Message>,
    answering: Arc<AtomicUsize>,
}

impl Phones {
    /// Phones with the sessions 1 to `sessions`, and their Acks.
    pub fn new(sessions: u64, patience: Patience, seed: u64) -> (Phones, UnboundedReceiver<Message>) {
        let mut random = StdRng::seed_from_u64(seed);
        let tempers = (0..sessions)
            .map(|_| match random.random_range(0..100) {
                0..72 => Temper::Prompt,
                72..80 => Temper::InTunnels,
                80..88 => Temper::Slow,
                88..95 => Temper::Silent,
                _ => Temper::Gone,
            })
            .collect();
        let (acks, received) = unbounded_channel();
        let answering = Arc::default();
        (Phones { tempers, patience, random: Mutex::new(random), acks, answering }, received)
    }

    /// Pushes a message to its phone.
    ///
    /// # Errors
    ///
    /// When the phone's connection is closed.
    pub fn push(&self, message: Message, attempt: u8) -> Result<(), PushFailed> {
        let round_trip = match self.temper(message.client.0) {
            Temper::Gone => return Err(PushFailed),
            Temper::Silent => return Ok(()),
            Temper::InTunnels if attempt == 1 => return Ok(()),
            Temper::Prompt | Temper::InTunnels => {
                let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
                self.patience.ack_timeout().mul_f64(random.random_range(0.02..0.5))
            }
            Temper::Slow => self.patience.after_giving_up(),
        };
        let (acks, answering) = (self.acks.clone(), Arc::clone(&self.answering));
        answering.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            sleep(round_trip).await;
            // Once the node has gone nobody wants the Ack.
            let _ = acks.send(message);
            answering.fetch_sub(1, Ordering::Relaxed);
        });
        Ok(())
    }

    /// Whether no Ack is on its way.
    pub fn are_quiet(&self) -> bool {
        self.answering.load(Ordering::Relaxed) == 0
    }

    fn temper(&self, session: u64) -> Temper {
        let index = usize::try_from(session).ok().and_then(|session| session.checked_sub(1));
        index.and_then(|index| self.tempers.get(index)).copied().unwrap_or(Temper::Gone)
    }
}
