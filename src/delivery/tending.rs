//! The outbox is kept within its bounds, and what is dropped from it is counted and told.

use std::time::Duration;

use tracing::{error, info, warn};

use super::Delivery;
use crate::core::group::GroupName;
use crate::core::outbox::Dropped;

/// How often the bounds of the outbox are looked after.
const TEND_EVERY: Duration = Duration::from_secs(1);

impl Delivery {
    /// Keeps the outbox within its bounds, until the task is aborted.
    pub async fn maintain(&self) {
        let mut refused = false;
        loop {
            tokio::time::sleep(TEND_EVERY).await;
            let attended: Vec<GroupName> = self.shared.groups.lock().keys().cloned().collect();
            match self.shared.outbox.maintain(&attended, self.shared.clock.now()).await {
                Ok(dropped) => {
                    self.count_dropped(dropped);
                    if std::mem::take(&mut refused) {
                        info!("the outbox is looked after again");
                    }
                }
                Err(refusal) if !std::mem::replace(&mut refused, true) => {
                    warn!(
                        %refusal,
                        "the outbox could not be looked after and may outgrow its bounds; trying again every \
                         {TEND_EVERY:?}: look at the store"
                    );
                }
                Err(_) => {}
            }
        }
    }

    fn count_dropped(&self, dropped: Dropped) {
        if dropped.ids > 0 {
            self.shared.metrics.outbox_dropped_ids.inc_by(dropped.ids);
            error!(
                messages = dropped.ids,
                batches = dropped.batches,
                "the outbox is full or too old and dropped batches that some group never acknowledged: look for a \
                 group without a subscriber in `ackwheel status`"
            );
        }
        self.shared.metrics.groups_dropped.inc_by(dropped.groups.len() as u64);
        for group in dropped.groups {
            warn!(
                %group,
                "group dropped, with what it had not acknowledged: it had no subscriber for the outbox's retention; if it \
                 is still wanted, have it subscribe, which makes it anew, or raise --outbox-retention"
            );
        }
    }
}
