//! `consumer::operations`: an effect is recorded before it happens.
//!
//! The start is one transaction: its insert reads from the lane locked `for share`, so that a settle waits for it and sees
//! it. The tool is called after its commit; the end is recorded in a transaction of its own, whoever holds the lane.

use shared::state::OperationStatus;

use crate::{
    guard::Guard,
    protocol::Protocol,
    state::{Doing, Hand, RunId, State},
    witness::Note,
};

impl Protocol {
    pub(crate) fn start_operation(&self, state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        let lane = state.of(run).lane;
        let allowed = (lane.runs(run) || !self.has(Guard::OperationFence))
            && !(lane.cancel_requested && lane.runs(run) && self.has(Guard::OperationObeysCancel));
        if !allowed {
            // The handler hears that it has lost its lane, and ends; a cancelled run's settle is the heartbeat's to start.
            state.consumers[consumer].doing =
                if lane.runs(run) { Doing::Handling(run, Hand::Ready) } else { Doing::Nothing };
        } else if self.has(Guard::OperationLocksLane) {
            Self::record_start(state, consumer, run);
        } else {
            state.consumers[consumer].doing = Doing::Handling(run, Hand::Checked);
        }
    }

    pub(crate) fn insert_operation(state: &mut State, consumer: usize) {
        let Doing::Handling(run, _) = state.consumers[consumer].doing else { return };
        Self::record_start(state, consumer, run);
    }

    fn record_start(state: &mut State, consumer: usize, run: RunId) {
        let it = state.of(run);
        it.witness.note(Note::Disobedience, it.lane.runs(run) && it.lane.cancel_requested);
        it.runs[usize::from(run.number)].operation = Some(OperationStatus::Started);
        state.consumers[consumer].doing = Doing::Handling(run, Hand::Calling);
    }

    /// The world is changed here, whatever the tables say by now.
    pub(crate) fn call_tool(state: &mut State, consumer: usize, acts: bool) {
        let Doing::Handling(run, hand) = state.consumers[consumer].doing else { return };
        let it = state.of(run);
        it.witness.note(Note::UnrecordedCall, hand != Hand::Calling);
        it.runs[usize::from(run.number)].effects += u8::from(acts);
        let next = if acts { Hand::Acted } else { Hand::Refused };
        state.consumers[consumer].doing = Doing::Handling(run, next);
    }

    /// Guarded by the operation itself: a run that has lost its lane still tells what became of its call.
    pub(crate) fn end_operation(state: &mut State, consumer: usize) {
        let Doing::Handling(run, hand) = state.consumers[consumer].doing else { return };
        let status = if hand == Hand::Acted { OperationStatus::Completed } else { OperationStatus::Failed };
        let operation = &mut state.of(run).runs[usize::from(run.number)].operation;
        if *operation == Some(OperationStatus::Started) {
            *operation = Some(status);
        }
        state.consumers[consumer].doing = Doing::Handling(run, Hand::Ready);
    }
}
