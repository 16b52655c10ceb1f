//! Which actions are possible. One is offered only where it changes something, so a state without any is where the system
//! comes to rest. Nothing can happen for ever: each action brings a run nearer to its end, or is a [`Chance`].

use shared::state::LaneState;

use crate::{
    actions::{Action, Look, Move, Resume, Work},
    guard::Guard,
    protocol::{MOST_DISPATCHES, Protocol},
    scenario::{Chance, Source},
    state::{Conversation, Doing, Lost, RunId, State, Trigger},
};

mod application;
mod consumer;

impl Protocol {
    pub(crate) fn offer(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, conversation) in (0..).zip(&state.conversations) {
            if conversation.exists {
                self.offer_submit(state, number, conversation, actions);
                self.offer_relay(state, number, conversation, actions);
                self.offer_user(state, number, conversation, actions);
            }
        }
        Self::offer_publisher(state, actions);
        Self::offer_broker(state, actions);
        for place in 0..state.consumers.len() {
            self.offer_consumer(state, place, actions);
        }
    }

    fn offer_relay(&self, state: &State, number: u8, it: &Conversation, actions: &mut Vec<Action>) {
        let lane_is_locked = it.submit.is_some_and(|submit| submit.holds_lane);
        if it.lane.state == LaneState::Waiting && !lane_is_locked {
            let empty = self.rows_to_claim(it).is_empty();
            if empty {
                if it.is_free() || !self.has(Guard::EmptyLaneLocks) {
                    actions.push(Action::Lane(number, Look::CloseEmptyLane));
                }
            } else {
                self.offer_claim(state, number, actions);
            }
        }
        if let (LaneState::Queued, Some(run)) = (it.lane.state, it.lane.run) {
            let run = RunId { conversation: number, number: run };
            self.offer_look(state, run, it.lane.dispatches, actions);
        }
        if it.lane.state == LaneState::Running {
            self.offer_lease(state, number, it, actions);
        }
    }

    fn offer_claim(&self, state: &State, number: u8, actions: &mut Vec<Action>) {
        if self.scenario.sources.contains(&Source::Nats) {
            if self.has(Guard::ClaimLocks) {
                actions.push(Action::Lane(number, Look::Claim));
            } else if state.relay.due.is_none() {
                actions.push(Action::Lane(number, Look::FindDue));
            }
        }
        for (consumer, slot) in state.consumers.iter().enumerate() {
            if slot.source == Source::Postgres && slot.doing == Doing::Nothing {
                actions.push(Action::Consumer(consumer, Work::ClaimAndBegin(number)));
            }
        }
    }

    /// A queued lane is overdue: a relay asks the broker, a consumer without one begins it.
    fn offer_look(&self, state: &State, run: RunId, dispatches: u8, actions: &mut Vec<Action>) {
        let of_conversation = |trigger: &&Trigger| trigger.run.conversation == run.conversation;
        let held = state.broker.stored.iter().rfind(of_conversation).is_some_and(|last| last.run == run);
        let on_its_way = state.relay.publishing.iter().chain(&state.relay.unanswered).any(|t| t.run == run);
        if self.has(Guard::Redispatch)
            && self.scenario.sources.contains(&Source::Nats)
            && !held
            && dispatches < MOST_DISPATCHES
            && state.relay.missing.is_none()
            && (!on_its_way || state.budget.allows(Chance::Haste))
        {
            actions.push(Action::Lane(run.conversation, Look::AskForQueued));
        }
        for (consumer, slot) in state.consumers.iter().enumerate() {
            if slot.source == Source::Postgres && slot.doing == Doing::Nothing {
                actions.push(Action::Consumer(consumer, Work::FindQueued(run.conversation)));
            }
        }
    }

    fn offer_lease(&self, state: &State, number: u8, it: &Conversation, actions: &mut Vec<Action>) {
        let Some(run) = it.lane.run else { return };
        let run = RunId { conversation: number, number: run };
        let renewed = state.consumers.iter().any(|consumer| consumer.doing.run() == Some(run));
        if !it.lane.lease_is_over && (!renewed || state.budget.allows(Chance::Stall)) {
            actions.push(Action::Lane(number, Look::LeaseEnds));
        }
        if !self.has(Guard::Recovery) || state.relay.lost.is_some() {
            return;
        }
        if it.lane.lease_is_over {
            actions.push(Action::Lane(number, Look::FindLost(Lost::Expired)));
        }
        if !renewed || !self.has(Guard::TakeBackOnlyOwn) {
            actions.push(Action::Lane(number, Look::FindLost(Lost::LeftBehind)));
        }
    }

    fn offer_publisher(state: &State, actions: &mut Vec<Action>) {
        let (relay, budget) = (&state.relay, &state.budget);
        for trigger in &relay.publishing {
            actions.push(Action::Trigger(*trigger, Move::Publish));
            if budget.allows(Chance::Timeout) {
                actions.push(Action::Trigger(*trigger, Move::PublishTimesOut));
            }
            if budget.allows(Chance::Undeliverable) && state.waits_for_nobody(trigger.run) {
                actions.push(Action::Trigger(*trigger, Move::PublishIsImpossible));
            }
        }
        actions.extend(relay.unanswered.iter().map(|trigger| Action::Trigger(*trigger, Move::GiveBack)));
        if relay.missing.is_some() {
            actions.push(Action::Relay(Resume::SendAgain));
        }
        if let Some((run, _)) = relay.lost {
            // A recovery skips a conversation that somebody holds.
            if state.waits_for_nobody(run) {
                actions.push(Action::Relay(Resume::Recover));
            }
        }
        if relay.due.is_some() {
            actions.push(Action::Relay(Resume::ClaimWhatWasDue));
        }
        if budget.allows(Chance::RelayCrash) && !relay.is_at_rest() {
            actions.push(Action::Relay(Resume::Crash));
        }
    }

    fn offer_broker(state: &State, actions: &mut Vec<Action>) {
        for trigger in &state.broker.late {
            actions.push(Action::Trigger(*trigger, Move::ArrivesLate));
            actions.push(Action::Trigger(*trigger, Move::Vanishes));
        }
        if state.budget.allows(Chance::Loss) {
            actions.extend(
                state.broker.stored.iter().map(|trigger| Action::Trigger(*trigger, Move::IsForgotten)),
            );
        }
    }
}
