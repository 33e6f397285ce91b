//! The members of a group: who has room, and whose turn it is.

/// A subscriber, as the member of its group; never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

#[derive(Debug)]
pub(super) struct Member {
    id: MemberId,
    credit: u64,
    /// Messages in the batches that it holds.
    pub(super) out: u64,
    /// Of what it was handed, what it has not read.
    pub(super) unread: u64,
    /// What it is to be handed of the batches that are being chosen.
    promised: u64,
}

impl Member {
    /// How many messages it would take now. What it has not read counts, though it may hold it no more: else what was
    /// overdue and is handed to it again would pile up.
    fn window(&self) -> u64 {
        self.credit.saturating_sub(self.out.max(self.unread) + self.promised)
    }
}

/// Where a member stands among the others, until one joins or leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(usize);

#[derive(Debug, Default)]
pub(super) struct Members {
    list: Vec<Member>,
    turn: usize,
}

impl Members {
    pub(super) fn count(&self) -> usize {
        self.list.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = MemberId> {
        self.list.iter().map(|member| member.id)
    }

    pub(super) fn note_all_unread(&mut self, unread: impl Fn(MemberId) -> Option<u64>) {
        for member in &mut self.list {
            member.unread = unread(member.id).unwrap_or(member.unread);
        }
    }

    pub(super) fn join(&mut self, id: MemberId, credit: u64) {
        self.list.push(Member { id, credit, out: 0, unread: 0, promised: 0 });
    }

    pub(super) fn leave(&mut self, id: MemberId) {
        self.list.retain(|member| member.id != id);
    }

    pub(super) fn find(&mut self, id: MemberId) -> Option<&mut Member> {
        self.list.iter_mut().find(|member| member.id == id)
    }

    /// How many messages all of them would take now.
    pub(super) fn window(&self) -> u64 {
        self.list.iter().map(Member::window).sum()
    }

    /// The next one that has room, of those that may have it.
    pub(super) fn next(&self, may_have: impl Fn(MemberId) -> bool) -> Option<Place> {
        let count = self.list.len();
        let place = (0..count).map(|step| (self.turn + step) % count).find(|place| {
            let member = &self.list[*place];
            member.window() > 0 && may_have(member.id)
        });
        place.map(Place)
    }

    /// It has had its turn.
    pub(super) fn take_turn(&mut self, Place(place): Place) -> MemberId {
        self.turn = (place + 1) % self.list.len();
        self.list[place].id
    }

    /// It has room for so many messages less, until promises are forgotten.
    pub(super) fn promise(&mut self, Place(place): Place, messages: u64) {
        self.list[place].promised += messages;
    }

    pub(super) fn forget_promises(&mut self) {
        self.list.iter_mut().for_each(|member| member.promised = 0);
    }
}
