//! Applies the commands of subscribers to the task of a group.

use tokio::sync::oneshot;

use super::{GroupTask, LINGER, PendingRequest};
use crate::core::{MAX_CREDIT, MemberId, Reason, Refusal};
use crate::delivery::Command;

impl GroupTask {
    pub(super) async fn apply(&mut self, command: Command) {
        let now = self.delivery.clock.stall_aware_now();
        match command {
            Command::Join { member, credit, batches } => {
                self.dispatch.join(member, credit);
                self.senders.insert(member, batches);
                self.may_take = true;
                (self.lingers_until, self.is_ending) = (None, false);
                self.set_lingers(false);
            }
            Command::Leave { member } => self.leave(member).await,
            Command::End => self.is_ending = true,
            Command::Request { member, batches, answer } => self.request(member, batches, answer),
            Command::Keep { member, batches } => {
                for batch in batches {
                    self.dispatch.keep(member, batch);
                }
            }
            Command::Ack { batches, answer } => {
                let settled = self.delivery.outbox.settle(&self.name, &batches).await.and_then(|settled| {
                    self.delivery.metrics.batches_acked.inc_by(settled.count);
                    settled.batches.into_iter().for_each(|batch| self.dispatch.forget(batch));
                    settled.refusal.map_or(Ok(settled.count), Err)
                });
                let _ = answer.send(settled);
            }
            Command::Nack { member, batch, delay, answer } => {
                let held = self.dispatch.nack(member, batch, delay, now);
                self.delivery.metrics.batches_nacked.inc_by(u64::from(held));
                let _ = answer.send(held);
            }
            Command::NackOfAny { batches, delay, answer } => {
                let held = batches.into_iter().filter(|batch| self.dispatch.nack_of_any(*batch, delay, now));
                let held = held.count() as u64;
                self.delivery.metrics.batches_nacked.inc_by(held);
                // Release before the answer: the requester may take from another sidecar next.
                let idle = self.dispatch.release_idle();
                self.release(&idle).await;
                let _ = answer.send(held);
            }
        }
    }

    /// Sets the number of further batches of a member. The answer follows after the next delivery, unless there is
    /// nothing to deliver.
    fn request(&mut self, member: MemberId, batches: u32, answer: oneshot::Sender<Result<(), Refusal>>) {
        if let Some(replaced) = self.requests.remove(&member) {
            let _ = replaced.answer.send(Ok(()));
        }
        if !self.dispatch.request(member, batches) {
            let text = format!("this connection holds {MAX_CREDIT} messages or more: acknowledge batches first");
            let _ = answer.send(Err(Refusal::new(Reason::MaxUnacked, text)));
        } else if batches == 0 {
            let _ = answer.send(Ok(()));
        } else {
            // Take from the store even if no hint arrived, because a hint from another sidecar may be late.
            self.may_take = true;
            self.requests.insert(member, PendingRequest { batches, answer });
        }
    }

    fn set_lingers(&self, lingers: bool) {
        if let Some(handle) = self.delivery.handles.lock().get_mut(&self.name) {
            handle.lingers = lingers;
        }
    }

    /// Removes a member. Its batches go to the other members. If it was the last member, releases all batches to the
    /// outbox, except kept ones.
    async fn leave(&mut self, member: MemberId) {
        let now = self.delivery.clock.stall_aware_now();
        self.senders.remove(&member);
        self.requests.remove(&member);
        let took_by_request = self.dispatch.takes_by_request(member);
        let released = self.dispatch.leave(member, now);
        self.release(&released).await;
        if self.senders.is_empty() {
            self.lingers_until = took_by_request.then_some(now + LINGER);
            self.set_lingers(took_by_request);
        }
    }
}
