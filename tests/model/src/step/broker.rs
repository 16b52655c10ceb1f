//! The broker, which nothing is trusted of: it stores in order, delivers any number of times, swallows what its dedupe
//! window knows, forgets what it acknowledged, and gets what nobody waits for any more.

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{State, Trigger},
};

impl Protocol {
    /// A message whose id is in the dedupe window is acknowledged, and not stored.
    pub(crate) fn store(&self, state: &mut State, trigger: Trigger) {
        let dispatch = if self.has(Guard::DispatchInMessageId) { trigger.dispatch } else { 0 };
        let id = Trigger { dispatch, ..trigger };
        if !state.broker.seen.contains(&id) {
            state.broker.seen.push(id);
            state.broker.seen.sort_unstable();
            state.broker.stored.push(trigger);
        }
    }

    pub(crate) fn arrives_late(&self, state: &mut State, trigger: Trigger) {
        Self::vanishes(state, trigger);
        self.store(state, trigger);
    }

    pub(crate) fn vanishes(state: &mut State, trigger: Trigger) {
        state.broker.late.retain(|other| *other != trigger);
    }

    pub(crate) fn is_forgotten(state: &mut State, trigger: Trigger) {
        state.budget.spend(Chance::Loss);
        Self::acknowledge(state, trigger);
    }

    pub(crate) fn acknowledge(state: &mut State, trigger: Trigger) {
        state.broker.stored.retain(|other| *other != trigger);
    }
}
