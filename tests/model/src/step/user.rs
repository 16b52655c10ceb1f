//! What users and applications do (`0008_user_actions.sql`, and plain deletes). Each function is one transaction that locks
//! the conversation, then the lane, and decides in later statements.

use shared::state::{LaneState, RowStatus, RunOutcome};

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Answer, Conversation, Lane, Message, Row, Said, State, TurnId},
};

impl Protocol {
    pub(crate) fn cancel_turn(state: &mut State, conversation: u8) {
        state.budget.spend(Chance::Cancel);
        let it = &mut state.conversations[usize::from(conversation)];
        it.witness.cancelled = it.lane.turn;
        if it.lane.state == LaneState::Running {
            // The run's own settle writes the cancellation; a finish of this lane is refused from now on.
            it.lane.cancel_requested = true;
        } else {
            cancel_unbegun(it);
        }
    }

    /// `retry_turn`: the rows form a turn of their own, with an id of its own.
    pub(crate) fn retry_turn(&self, state: &mut State, conversation: u8, turn: TurnId) {
        state.budget.spend(Chance::Retry);
        let it = &mut state.conversations[usize::from(conversation)];
        let generation = self.generation_of_retry(it, turn);
        for message in &mut it.messages {
            let retried = self.is_retried(message, turn);
            if let Some(row) = message.row.as_mut().filter(|_| retried) {
                row.free();
                row.generation = generation;
            }
        }
        if it.lane.state == LaneState::Idle {
            it.free_lane();
        }
    }

    /// One above the turn's own, and above that of every row which it could be taken together with.
    fn generation_of_retry(&self, it: &Conversation, turn: TurnId) -> u8 {
        let near = |row: &Row| row.is_free() || row.turn.is_some() && row.turn == it.lane.turn;
        let counts = |row: &Row| row.turn == Some(turn) || near(row) && self.has(Guard::RetryOwnGeneration);
        let generations = it.rows().filter(|(_, row)| counts(row)).map(|(_, row)| row.generation);
        generations.max().unwrap_or(0) + u8::from(self.has(Guard::RetryNewGeneration))
    }

    /// Its row has failed with this turn. A deleted message stays closed.
    pub(crate) fn is_retried(&self, message: &Message, turn: TurnId) -> bool {
        let failed = message.row.is_some_and(|row| row.turn == Some(turn) && row.status == RowStatus::Error);
        failed && (message.said == Said::Visible || !self.has(Guard::RetryLeavesDeleted))
    }

    /// `mark_read`: recounted, since an outcome may have come since the user looked.
    pub(crate) fn mark_read(&self, state: &mut State, conversation: u8, up_to: u8) {
        state.budget.spend(Chance::Reading);
        let it = &mut state.conversations[usize::from(conversation)];
        it.read = it.read.max(up_to);
        let outcomes = u8::try_from(it.outcomes.len()).unwrap_or(u8::MAX);
        it.unread = if self.has(Guard::ReadRecounts) { outcomes - it.read } else { 0 };
    }

    pub(crate) fn delete_message(&self, state: &mut State, conversation: u8, message: usize) {
        state.budget.spend(Chance::Deletion);
        let it = &mut state.conversations[usize::from(conversation)];
        it.messages[message].said = Said::Tombstone;
        let Some(row) = it.messages[message].row else { return };
        if row.is_free() {
            it.messages[message].row = None;
            if it.lane.waits_for_messages() && !it.has_free_rows() {
                it.free_lane();
            }
        } else if row.is_open() {
            self.drop_message(it, message);
        }
    }

    /// `agent_turn_drop_message`: a turn never changes its rows, so one that loses a message ends, and its other rows are
    /// free again. Not where a side effect may have happened: another turn would do it again.
    fn drop_message(&self, it: &mut Conversation, message: usize) {
        let Some(turn) = it.lane.turn else { return };
        let cancelled = it.lane.cancel_requested && self.has(Guard::DeletionSparesCancelled);
        if cancelled || it.has_side_effect(turn) && self.has(Guard::DeletionSparesEffects) {
            it.witness.cancelled = Some(turn);
            if it.lane.state == LaneState::Running {
                it.lane.cancel_requested = true;
            } else {
                cancel_unbegun(it);
            }
            return;
        }
        it.messages[message].row = None;
        for row in it.rows_mut().filter(|row| row.turn == Some(turn) && row.is_open()) {
            row.free();
        }
        it.record_end(RunOutcome::Cancelled);
        it.free_lane();
    }

    /// `delete from messages`: the cascade takes the row, and no lane is told.
    pub(crate) fn erase_message(state: &mut State, conversation: u8, message: usize) {
        state.budget.spend(Chance::Erasure);
        let message = &mut state.conversations[usize::from(conversation)].messages[message];
        message.said = Said::Erased;
        message.row = None;
    }

    /// `delete from conversations`: its trigger takes the lane before the operations go, and the cascade the rest.
    pub(crate) fn delete_conversation(&self, state: &mut State, conversation: u8) {
        if self.has(Guard::DepartureLocksLane) {
            Self::delete_operations(state, conversation);
        }
        let it = &mut state.conversations[usize::from(conversation)];
        it.exists = false;
        it.departing = false;
        it.lane = Lane::IDLE;
        it.outcomes.clear();
        (it.unread, it.read) = (0, 0);
        for message in &mut it.messages {
            message.row = None;
        }
        for run in &mut it.runs {
            run.ended = None;
        }
    }

    /// The trigger's delete; a step only where it does not lock the lane: an operation may start before the cascade.
    pub(crate) fn delete_operations(state: &mut State, conversation: u8) {
        state.budget.spend(Chance::Departure);
        let it = &mut state.conversations[usize::from(conversation)];
        it.departing = true;
        for run in &mut it.runs {
            run.operation = None;
            run.shown = None;
        }
    }
}

/// `agent_turn_cancel_unbegun`: a visible cancellation of a turn that no consumer runs.
fn cancel_unbegun(it: &mut Conversation) {
    let Lane { turn: Some(turn), run, .. } = it.lane else { return };
    let mut closed = 0;
    for row in it.rows_mut().filter(|row| row.turn == Some(turn) && row.is_open()) {
        row.status = RowStatus::Error;
        row.run = run;
        closed += 1;
    }
    if closed > 0 {
        it.say(turn, run, Answer::Cancelled);
    }
    it.record_end(RunOutcome::Cancelled);
    it.free_lane();
}
