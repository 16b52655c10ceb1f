//! `shared::settle`: how a run ends without a reply. The verdict is not modelled, it is the code's own [`decide`].
//!
//! One step: the conversation is locked, then the lane, and what is decided under both stands in later statements.

use shared::{
    settle::{Call, Cause, Kind, Standing, Verdict, decide, run_outcome},
    state::{Effect, LaneState, OperationStatus, RowStatus},
};

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Answer, Conversation, Doing, Lost, RunId, State},
    witness::Note,
};

impl Protocol {
    /// The handler ended with an error.
    pub(crate) fn handler_fails(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        state.budget.spend(Chance::Failure);
        state.consumers[consumer].doing = Doing::Nothing;
        let cause = Cause::Handler { message: String::new(), retryable: true, retry_after: None };
        self.settle(state, run, &cause);
    }

    /// The run ends; its handler may go on until it is dropped.
    pub(crate) fn deadline_passes(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        state.budget.spend(Chance::Overrun);
        self.settle(state, run, &Cause::Timeout);
    }

    /// The heartbeat found `cancel_requested`; again the handler may go on until it is dropped.
    pub(crate) fn cancel_is_seen(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        self.settle(state, run, &Cause::Released);
    }

    /// The process leaves, and gives its run back.
    pub(crate) fn leave(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        state.budget.spend(Chance::Shutdown);
        state.consumers[consumer].doing = Doing::Nothing;
        self.settle(state, run, &Cause::Released);
    }

    /// `recover_expired` and `take_back`, their first half.
    pub(crate) fn find_lost(state: &mut State, conversation: u8, lost: Lost) {
        let number = state.conversations[usize::from(conversation)].lane.run;
        state.relay.lost = number.map(|number| (RunId { conversation, number }, lost));
    }

    /// `settle::recover`, their second half: `lock_lost_lane` reads the lane again. A run has one worker for ever, so one
    /// that was left behind still is.
    pub(crate) fn recover(&self, state: &mut State) {
        let Some((run, lost)) = state.relay.lost.take() else { return };
        let alive = state.consumers.iter().any(|consumer| consumer.doing.run() == Some(run));
        let lane = &state.of(run).lane;
        let robbed = alive && !lane.lease_is_over;
        let still = lost == Lost::LeftBehind || lane.lease_is_over || !self.has(Guard::RecoverOnlyExpired);
        if lane.runs(run) && still {
            state.of(run).witness.note(Note::Robbery, robbed);
            self.settle(state, run, &Cause::Expired);
        }
    }

    /// `lock_lane` is the fence.
    pub(crate) fn settle(&self, state: &mut State, run: RunId, cause: &Cause) {
        let it = state.of(run);
        let required = match cause {
            Cause::Undeliverable { .. } => LaneState::Queued,
            _ => LaneState::Running,
        };
        let ours = it.lane.run == Some(run.number) || !self.has(Guard::SettleFence);
        if it.lane.state == required && ours {
            it.witness.note(Note::Trespass, it.lane.run != Some(run.number));
            self.settle_locked(it, cause);
        }
    }

    /// `read_standing` is what is known, and `write` what follows from it.
    fn settle_locked(&self, it: &mut Conversation, cause: &Cause) {
        if !self.has(Guard::AttemptCountedFirst) && *cause != Cause::Expired {
            // Counted by the process that ends it: who dies is never counted.
            it.lane.attempt += 1;
        }
        let standing = self.read_standing(it);
        let verdict = decide(cause, &standing);
        it.record_end(run_outcome(cause, &verdict));
        match verdict {
            Verdict::Retry { .. } => retry(it),
            Verdict::Fail { kind, .. } => {
                fail(it, if kind == Kind::Cancelled { Answer::Cancelled } else { Answer::Error });
                it.leave_lane(self.has(Guard::SettleLooksForRows) && it.has_free_rows());
            }
            Verdict::Void => it.leave_lane(self.has(Guard::SettleLooksForRows) && it.has_free_rows()),
        }
    }

    fn read_standing(&self, it: &Conversation) -> Standing {
        let turn = it.lane.turn.into_iter();
        let calls = turn
            .flat_map(|turn| it.operations_of(turn))
            .filter(|status| *status != OperationStatus::Started || self.has(Guard::StartedCounts))
            .map(|status| Call { name: String::new(), effect: Effect::SideEffect, status });
        Standing {
            attempt: i32::from(it.lane.attempt),
            max_attempts: i32::from(self.scenario.max_attempts),
            cancel_requested: it.lane.cancel_requested && self.has(Guard::SettleObeysCancel),
            rows: it.rows().filter(|(_, row)| row.is_in_progress_for(&it.lane)).map(|_| 1).sum(),
            calls: calls.collect(),
        }
    }
}

/// `write::retry`: the same rows again.
fn retry(it: &mut Conversation) {
    let lane = it.lane;
    for row in it.rows_mut().filter(|row| row.is_in_progress_for(&lane)) {
        row.status = RowStatus::Pending;
        row.run = None;
    }
    it.lane = lane.waiting_again();
}

/// `write::fail`: the user sees an error, and the rows are closed.
fn fail(it: &mut Conversation, said: Answer) {
    let lane = it.lane;
    let Some((turn, number)) = lane.turn.zip(lane.run) else { return };
    it.say(turn, Some(number), said);
    it.show_operations(|run| run == usize::from(number));
    for row in it.rows_mut().filter(|row| row.is_in_progress_for(&lane)) {
        row.status = RowStatus::Error;
    }
}
