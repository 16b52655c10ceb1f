//! `consumer::{finish, finisher}`: reply, operations, rows and lane in one transaction.
//!
//! One step, although it takes its locks in two statements and writes in a third: whoever could come between waits for
//! the conversation or the lane, or skips them. A group commits as its members would one after another, since each holds
//! a lane of its own. A commit whose answer is lost is a step, and finding out what became of it another.

use shared::{
    settle::Cause,
    state::{RowStatus, RunOutcome},
};

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Answer, Doing, Hand, RunId, State},
    witness::Note,
};

/// What a finish found.
#[derive(Debug, PartialEq, Eq)]
enum Finished {
    Committed,
    Fenced,
    Gone,
}

impl Protocol {
    /// Only with an old snapshot: what it sees now it decides on later.
    pub(crate) fn finish_looks(state: &mut State, consumer: usize) {
        if let Doing::Handling(run, _) = state.consumers[consumer].doing {
            let free_rows = state.of(run).has_free_rows();
            state.consumers[consumer].doing = Doing::Handling(run, Hand::Looked { free_rows });
        }
    }

    pub(crate) fn finish(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, hand) = state.consumers[consumer].doing else { return };
        state.consumers[consumer].doing = match self.finish_one(state, run, hand) {
            Finished::Fenced => Doing::Fenced(run),
            Finished::Committed | Finished::Gone => Doing::Nothing,
        };
    }

    /// The connection is lost with the commit; it got in, or not.
    pub(crate) fn finish_unanswered(&self, state: &mut State, consumer: usize, committed: bool) {
        let Doing::Handling(run, hand) = state.consumers[consumer].doing else { return };
        state.budget.spend(Chance::Ambiguity);
        if committed {
            self.finish_one(state, run, hand);
        }
        state.consumers[consumer].doing = Doing::Unsure(run);
    }

    /// `finish_alone` tries again: the fence makes that harmless, and the run's record tells what became of the first
    /// try. The model is not run again for it.
    pub(crate) fn finish_again(&self, state: &mut State, consumer: usize) {
        let Doing::Unsure(run) = state.consumers[consumer].doing else { return };
        if !self.has(Guard::FateIsLookedUp) {
            if state.of(run).exists {
                state.of(run).runs[usize::from(run.number)].starts += 1;
            }
            state.consumers[consumer].doing = Doing::Handling(run, Hand::Ready);
            return;
        }
        let finished = self.finish_one(state, run, Hand::Ready);
        let recorded = state.of(run).runs[usize::from(run.number)].ended;
        let was_committed = matches!(recorded, Some(RunOutcome::Done | RunOutcome::Cancelled));
        state.consumers[consumer].doing =
            if finished == Finished::Fenced && !was_committed { Doing::Fenced(run) } else { Doing::Nothing };
    }

    /// `Runner::finish` after a refusal: a cancelled lane is settled, any other refuses again.
    pub(crate) fn settle_fenced(&self, state: &mut State, consumer: usize) {
        let Doing::Fenced(run) = state.consumers[consumer].doing else { return };
        state.consumers[consumer].doing = Doing::Nothing;
        self.settle(state, run, &Cause::Released);
    }

    fn finish_one(&self, state: &mut State, run: RunId, hand: Hand) -> Finished {
        let it = state.of(run);
        if !it.exists {
            return Finished::Gone;
        }
        let cancelled = it.lane.cancel_requested && self.has(Guard::FinishObeysCancel);
        if (!it.lane.runs(run) || cancelled) && self.has(Guard::FinishFence) {
            return Finished::Fenced;
        }
        it.witness.note(Note::Trespass, !it.lane.runs(run));
        let turn = it.runs[usize::from(run.number)].turn;
        let mut closed = 0;
        for row in it.rows_mut() {
            let of_run = row.status == RowStatus::Processing
                && row.turn == Some(turn)
                && (row.run == Some(run.number) || !self.has(Guard::FinishFence));
            if of_run || row.is_open() && !self.has(Guard::FinishRowsOfRun) {
                row.status = RowStatus::Done;
                closed += 1;
            }
        }
        if closed > 0 {
            it.say(turn, Some(run.number), Answer::Reply);
            let all = !self.has(Guard::FinishOperationsOfRun);
            it.show_operations(|number| all || number == usize::from(run.number));
        }
        it.record_end(if closed > 0 { RunOutcome::Done } else { RunOutcome::Cancelled });
        match hand {
            Hand::Looked { free_rows } => it.leave_lane(free_rows),
            _ => it.leave_lane(self.has(Guard::FinishLooksForRows) && it.has_free_rows()),
        }
        Finished::Committed
    }
}
