//! `shared::claim`: rows become a turn, a turn gets a run, and the attempt is counted.
//!
//! The claim's three statements are one step: the first locks the lane and skips one that is locked, and nobody else
//! changes the lane or its free rows until the commit. Deciding about a due lane without rows is a transaction of its own.

use shared::state::{LaneState, RowStatus};

use crate::{
    guard::Guard,
    protocol::Protocol,
    state::{Conversation, Doing, Hand, Messages, Run, RunId, State, Trigger, TurnId},
};

impl Protocol {
    /// `read_free_rows`: for a retry the lane's own turn, else the oldest free rows of one generation.
    pub(crate) fn rows_to_claim(&self, it: &Conversation) -> Messages {
        let oldest = it.rows().find(|(_, row)| row.is_free()).map(|(_, row)| row.generation);
        it.rows()
            .filter(|(_, row)| match it.lane.turn {
                Some(turn) => {
                    row.status == RowStatus::Pending
                        && (row.turn == Some(turn) || !self.has(Guard::ClaimOwnRows) && row.is_free())
                }
                None => {
                    row.is_free() && (Some(row.generation) == oldest || !self.has(Guard::ClaimOneGeneration))
                }
            })
            .map(|(place, _)| place)
            .collect()
    }

    /// `mark`: what both sources write. `None`: no rows.
    fn mark(&self, it: &mut Conversation) -> Option<u8> {
        let took = self.rows_to_claim(it);
        let generation = it.rows().find(|(place, _)| took.has(*place))?.1.generation;
        let turn = it.lane.turn.unwrap_or(TurnId { generation, messages: took });
        let number = u8::try_from(it.runs.len()).unwrap_or(u8::MAX);
        let counted = u8::from(self.has(Guard::AttemptCountedFirst));
        for (place, message) in it.messages.iter_mut().enumerate() {
            if let Some(row) = message.row.as_mut().filter(|_| took.has(place)) {
                row.status = RowStatus::Processing;
                row.turn = Some(turn);
                row.run = Some(number);
                row.attempts += counted;
            }
        }
        it.lane.turn = Some(turn);
        it.lane.run = Some(number);
        it.lane.attempt += counted;
        it.lane.dispatches = 1;
        it.runs.push(Run::claimed(turn, it.lane.attempt, took));
        Some(number)
    }

    /// A relay's claim: the lane is queued, and the trigger is the relay's to publish.
    pub(crate) fn claim(&self, state: &mut State, conversation: u8) {
        let it = &mut state.conversations[usize::from(conversation)];
        if let Some(number) = self.mark(it) {
            it.lane.state = LaneState::Queued;
            let run = RunId { conversation, number };
            state.relay.publishing.push(Trigger { run, dispatch: 1 });
        }
    }

    /// Without the lock the lane is not looked at again.
    pub(crate) fn claim_what_was_due(&self, state: &mut State) {
        let Some(conversation) = state.relay.due.take() else { return };
        let lane = &mut state.conversations[usize::from(conversation)].lane;
        if lane.state != LaneState::Waiting {
            lane.turn = None;
            lane.attempt = 0;
        }
        self.claim(state, conversation);
    }

    /// A direct consumer's claim: the lane runs at once.
    pub(crate) fn claim_and_begin(&self, state: &mut State, consumer: usize, conversation: u8) {
        let it = &mut state.conversations[usize::from(conversation)];
        if let Some(number) = self.mark(it) {
            it.lane.state = LaneState::Running;
            it.runs[usize::from(number)].starts += 1;
            let run = RunId { conversation, number };
            state.consumers[consumer].doing = Doing::Handling(run, Hand::Thinking);
        }
    }

    /// `close_empty_lane`, under the conversation's lock; without it, the claim itself takes the lane for empty.
    pub(crate) fn close_empty_lane(&self, state: &mut State, conversation: u8) {
        let it = &mut state.conversations[usize::from(conversation)];
        it.leave_lane(self.has(Guard::EmptyLaneLocks) && it.has_free_rows());
    }
}
