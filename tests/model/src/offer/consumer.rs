//! What a slot of a consumer can do next, wherever its run stands by now.

use crate::{
    actions::{
        Action::{self, Consumer},
        Work,
    },
    guard::Guard,
    protocol::Protocol,
    scenario::{Chance, Source},
    state::{Doing, Hand, RunId, State},
};

impl Protocol {
    pub(super) fn offer_consumer(&self, state: &State, place: usize, actions: &mut Vec<Action>) {
        let consumer = state.consumers[place];
        if state.consumers[..place].contains(&consumer) {
            // The same consumer under another name.
            return;
        }
        match consumer.doing {
            Doing::Nothing if consumer.source == Source::Nats => {
                let triggers = state.broker.stored.iter();
                actions.extend(triggers.map(|trigger| Consumer(place, Work::Receive(*trigger))));
            }
            Doing::Nothing => {}
            Doing::Received(_) => {
                actions.push(Consumer(place, Work::Begin { acked: true }));
                if state.budget.allows(Chance::Loss) {
                    actions.push(Consumer(place, Work::Begin { acked: false }));
                }
            }
            Doing::Found(_) => actions.push(Consumer(place, Work::Begin { acked: true })),
            Doing::Handling(run, hand) => self.offer_handler(state, place, run, hand, actions),
            Doing::Unsure(run) => {
                if state.waits_for_nobody(run) {
                    actions.push(Consumer(place, Work::FinishAgain));
                }
            }
            Doing::Fenced(run) => {
                if state.waits_for_nobody(run) {
                    actions.push(Consumer(place, Work::SettleFenced));
                }
            }
        }
        if consumer.doing != Doing::Nothing && state.budget.allows(Chance::ConsumerCrash) {
            actions.push(Consumer(place, Work::Crash));
        }
        if let Some(run) = consumer.doing.run() {
            let lane = &state.conversations[usize::from(run.conversation)].lane;
            if lane.runs(run) && lane.lease_is_over {
                actions.push(Consumer(place, Work::Heartbeat));
            }
        }
    }

    fn offer_handler(&self, state: &State, place: usize, run: RunId, hand: Hand, actions: &mut Vec<Action>) {
        let budget = &state.budget;
        match hand {
            Hand::Thinking if self.scenario.tools && self.has(Guard::RecordBeforeCall) => {
                actions.push(Consumer(place, Work::StartOperation));
            }
            Hand::Checked => actions.push(Consumer(place, Work::InsertOperation)),
            Hand::Calling => {
                actions.push(Consumer(place, Work::CallTool { acts: true }));
                actions.push(Consumer(place, Work::CallTool { acts: false }));
            }
            Hand::Thinking if self.scenario.tools => {
                actions.push(Consumer(place, Work::CallTool { acts: true }));
            }
            Hand::Acted | Hand::Refused => actions.push(Consumer(place, Work::EndOperation)),
            Hand::Thinking | Hand::Ready | Hand::Looked { .. } => {}
        }
        if !state.holds(run) {
            actions.push(Consumer(place, Work::HandlerIsDropped));
        }
        if !state.waits_for_nobody(run) {
            return;
        }
        match hand {
            Hand::Looked { .. } => actions.push(Consumer(place, Work::Finish)),
            Hand::Thinking | Hand::Ready if !self.has(Guard::FinishLooksAfterLocking) => {
                actions.push(Consumer(place, Work::FinishLooks));
            }
            Hand::Thinking | Hand::Ready => {
                actions.push(Consumer(place, Work::Finish));
                if budget.allows(Chance::Ambiguity) {
                    actions.push(Consumer(place, Work::FinishUnanswered { committed: true }));
                    actions.push(Consumer(place, Work::FinishUnanswered { committed: false }));
                }
            }
            _ => {}
        }
        if budget.allows(Chance::Failure) {
            actions.push(Consumer(place, Work::HandlerFails));
        }
        if state.holds(run) {
            Self::offer_stops(state, place, run, actions);
        }
    }

    /// What ends a run that still holds its lane, whatever its handler is doing.
    fn offer_stops(state: &State, place: usize, run: RunId, actions: &mut Vec<Action>) {
        if state.budget.allows(Chance::Overrun) {
            actions.push(Consumer(place, Work::DeadlinePasses));
        }
        if state.conversations[usize::from(run.conversation)].lane.cancel_requested {
            actions.push(Consumer(place, Work::CancelIsSeen));
        }
        if state.budget.allows(Chance::Shutdown) {
            actions.push(Consumer(place, Work::Leave));
        }
    }
}
