//! A consumer takes a run and loses it: `consumer::{nats_source, postgres_source, begin, heartbeat, leases}`.
//!
//! The begin is one transaction; the ack follows it, and may be lost. A handler starts with its begin: a process that dies
//! between the two has started nothing, and could not be told from one that dies right after.

use shared::state::LaneState;

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Doing, Hand, RunId, State, Trigger},
};

impl Protocol {
    /// Delivered, and still in the stream.
    pub(crate) fn receive(&self, state: &mut State, consumer: usize, trigger: Trigger) {
        state.consumers[consumer].doing = Doing::Received(trigger);
        if !self.has(Guard::AckAfterBegin) {
            Self::acknowledge(state, trigger);
        }
    }

    /// `postgres_source::overdue`: the same run as a relay would ask for.
    pub(crate) fn find_queued(state: &mut State, consumer: usize, conversation: u8) {
        let number = state.conversations[usize::from(conversation)].lane.run;
        if let Some(number) = number {
            state.consumers[consumer].doing = Doing::Found(RunId { conversation, number });
        }
    }

    /// `begin_queued`, then the ack: begun and over are both acknowledged.
    pub(crate) fn begin(&self, state: &mut State, consumer: usize, acked: bool) {
        let (run, trigger) = match state.consumers[consumer].doing {
            Doing::Received(trigger) => (trigger.run, Some(trigger)),
            Doing::Found(run) => (run, None),
            _ => return,
        };
        let it = state.of(run);
        let begins =
            it.lane.is(LaneState::Queued, run) || !self.has(Guard::BeginOnlyQueued) && it.lane.runs(run);
        let next = if begins {
            it.lane.state = LaneState::Running;
            it.lane.lease_is_over = false;
            it.runs[usize::from(run.number)].starts += 1;
            Doing::Handling(run, Hand::Thinking)
        } else {
            Doing::Nothing
        };
        state.consumers[consumer].doing = next;
        if !acked {
            state.budget.spend(Chance::Loss);
        } else if let Some(trigger) = trigger {
            Self::acknowledge(state, trigger);
        }
    }

    /// Of a living consumer this is a stall: it knows of nothing, and goes on.
    pub(crate) fn lease_ends(state: &mut State, conversation: u8) {
        let lane = &mut state.conversations[usize::from(conversation)].lane;
        let Some(number) = lane.run else { return };
        lane.lease_is_over = true;
        let run = RunId { conversation, number };
        if state.consumers.iter().any(|consumer| consumer.doing.run() == Some(run)) {
            state.budget.spend(Chance::Stall);
        }
    }

    /// Renews a lease that nobody has taken yet. One that somebody took is not found, and the handler is dropped.
    pub(crate) fn heartbeat(state: &mut State, consumer: usize) {
        if let Some(run) = state.consumers[consumer].doing.run() {
            state.of(run).lane.lease_is_over = false;
        }
    }

    /// Its lease is lost, and it is stopped at its next await.
    pub(crate) fn handler_is_dropped(state: &mut State, consumer: usize) {
        state.consumers[consumer].doing = Doing::Nothing;
    }

    /// What was received and not acknowledged is still in the stream; what had begun is found by its lease.
    pub(crate) fn consumer_crashes(state: &mut State, consumer: usize) {
        state.budget.spend(Chance::ConsumerCrash);
        state.consumers[consumer].doing = Doing::Nothing;
    }
}
