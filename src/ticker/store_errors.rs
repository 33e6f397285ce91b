//! StoreErrors with the store, as people are told of it: when it begins, and when it is over.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::{RETRY, Role};
use crate::core::refusal::Refusal;

/// Without a refusal for so long, and for two ticks, trouble is over: what is refused may be asked again no sooner, and
/// all else be carried out meanwhile.
const CALM: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct StoreErrors {
    calm: Duration,
    /// When the store refused last, if people were told of trouble and not of its end.
    refused_at: Option<Instant>,
}

impl StoreErrors {
    pub(super) fn new(tick_length: Duration) -> StoreErrors {
        StoreErrors { calm: CALM.max(tick_length * 2), refused_at: None }
    }

    /// The store refused a step.
    pub(super) fn met(&mut self, refusal: &Refusal, now: Instant) {
        if self.refused_at.replace(now).is_none() {
            warn!(
                %refusal,
                "the store refused to turn the ring, and nothing times out meanwhile, unless another sidecar reaches it and \
                 turns the ring; trying again every {RETRY:?}: look at the store, and at the way to it"
            );
        }
    }

    /// A step was done.
    pub(super) fn none(&mut self, now: Instant, role: Role) {
        let is_over = |refused_at: &mut Instant| role != Role::Unknown && now >= *refused_at + self.calm;
        if self.refused_at.take_if(is_over).is_none() {
            return;
        }
        match role {
            Role::Alone | Role::Leads => info!("the ring turns again"),
            Role::Follows => info!("the store answers again; another sidecar may lead the ring"),
            Role::Unknown | Role::Resigned => {}
        }
    }
}
