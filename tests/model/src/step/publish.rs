//! The relay's way to the broker and back: `relay::{publish, look_after, queued}`, `shared::{release, recovery}`.
//!
//! Between the claim, the publish and the release there are commits and crashes, so each is a step. Looking after spans
//! three: a queued lane is read and asked for; its time is moved on, guarded; only then is it published again. Recovery
//! spans two: leases are looked at, then each run is settled by itself.

use shared::{
    settle::Cause,
    state::{LaneState, RowStatus},
};

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Relay, RunId, State, Trigger},
};

impl Protocol {
    /// Sent, stored and acknowledged.
    pub(crate) fn publish(&self, state: &mut State, trigger: Trigger) {
        state.relay.publishing.retain(|other| *other != trigger);
        self.store(state, trigger);
    }

    /// Sent, and not acknowledged in time: nobody knows whether it is stored, or will be.
    pub(crate) fn publish_times_out(state: &mut State, trigger: Trigger) {
        state.budget.spend(Chance::Timeout);
        state.relay.publishing.retain(|other| *other != trigger);
        state.relay.unanswered.push(trigger);
        state.broker.late.push(trigger);
    }

    /// A fault of this trigger: its turn fails visibly (`Publisher::fail`).
    pub(crate) fn publish_is_impossible(&self, state: &mut State, trigger: Trigger) {
        state.budget.spend(Chance::Undeliverable);
        state.relay.publishing.retain(|other| *other != trigger);
        self.settle(state, trigger.run, &Cause::Undeliverable { rule: String::new() });
    }

    /// `release_unbegun`: takes the lane alone.
    pub(crate) fn release_unbegun(&self, state: &mut State, trigger: Trigger) {
        state.relay.unanswered.retain(|other| *other != trigger);
        let it = state.of(trigger.run);
        let still_ours = it.lane.is(LaneState::Queued, trigger.run)
            || !self.has(Guard::ReleaseOnlyQueued) && it.lane.runs(trigger.run);
        if !still_ours {
            return;
        }
        let returned = u8::from(self.has(Guard::ReleaseReturnsAttempt));
        let lane = it.lane;
        for row in it.rows_mut().filter(|row| row.is_in_progress_for(&lane)) {
            row.status = RowStatus::Pending;
            row.run = None;
            row.attempts -= returned;
        }
        it.lane = lane.waiting_again();
        it.lane.attempt -= returned;
    }

    /// Read from the tables and asked of JetStream: the last message of the conversation's subject is not this run's.
    pub(crate) fn ask_for_queued(state: &mut State, conversation: u8) {
        let lane = state.conversations[usize::from(conversation)].lane;
        let Some(number) = lane.run else { return };
        let run = RunId { conversation, number };
        let relay = &state.relay;
        if relay.publishing.iter().chain(&relay.unanswered).any(|trigger| trigger.run == run) {
            state.budget.spend(Chance::Haste);
        }
        state.relay.missing = Some(Trigger { run, dispatch: lane.dispatches });
    }

    /// `extend`, then `publish_again`: of several relays that ask, one sends.
    pub(crate) fn extend_and_send_again(state: &mut State) {
        let Some(Trigger { run, dispatch }) = state.relay.missing.take() else { return };
        let lane = &mut state.of(run).lane;
        if lane.is(LaneState::Queued, run) && lane.dispatches == dispatch {
            lane.dispatches += 1;
            state.relay.publishing.push(Trigger { run, dispatch: dispatch + 1 });
        }
    }

    pub(crate) fn relay_crashes(state: &mut State) {
        state.budget.spend(Chance::RelayCrash);
        state.relay = Relay::default();
    }
}

impl Relay {
    pub(crate) fn is_at_rest(&self) -> bool {
        *self == Self::default()
    }
}
