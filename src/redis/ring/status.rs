//! The status of a ring in Redis.

use std::time::{Duration, Instant};

use crate::core::refusal::Refusal;
use crate::core::ring::RingStatus;
use crate::core::tick::Tick;
use crate::redis::context::RingContext;
use crate::redis::keys::MAX_CATCH_UP;
use crate::redis::ring::Inner;
use crate::redis::scripts::{Answer, SCRIPTS};

impl Inner {
    pub(super) async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        let RingContext { ring, options, identity, link, term: current } = &*self.context;
        let keys = link.keys();
        let names = keys.and_lists(&[&keys.meta, &keys.lease]);
        let mut answer = link.read(&SCRIPTS.status, &names, |_| {}).await?;
        let wheel = options.wheel;
        let mut status = RingStatus { ring: *ring, slots: vec![0; wheel.slots().into()], ..RingStatus::default() };
        if answer.is_empty() {
            return Ok(status);
        }
        status.waits = link.confirmed(&*link.session()?).err().map(|fault| fault.text);
        status.pointer = Tick(answer.count()?);
        status.pointer_lag = Duration::from_millis(answer.count()?).saturating_sub(wheel.tick_length());
        status.epoch = answer.count()?;
        let (holder, leader) = (answer.text()?, answer.text()?);
        let age = Duration::from_millis(answer.count()?);
        if !holder.is_empty() {
            (status.leader, status.lease_age) = (Some(leader), Some(age));
        }
        status.leads =
            holder == identity.token && current.lasting(now).is_some_and(|term| term.epoch == status.epoch);
        status.in_flight = answer.count()?;
        let lists = answer.rest(Answer::count)?;
        let list = |tick: u64| {
            let index = usize::try_from(tick % lists.len() as u64).unwrap_or_default();
            lists.get(index).copied().unwrap_or_default()
        };
        status.closing = list(status.pointer.0);
        let farthest = status.pointer.0 + u64::from(wheel.slots() + MAX_CATCH_UP);
        for tick in status.pointer.0 + 1..=farthest {
            status.slots[usize::from(wheel.slot(Tick(tick)).0)] += list(tick);
        }
        Ok(status)
    }
}
