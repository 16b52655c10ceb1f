//! The protocol as a machine for the checker: a scenario, and at most one guard that is left out.

use stateright::{Model, Property};

use crate::{actions::Action, guard::Guard, promises, scenario::Scenario, state::State};

/// More runs than any scenario needs: a mutant that never stops trying is stopped here.
const MOST_RUNS: usize = 8;
/// A run that was sent this often in vain is not sent again: it stays queued, where a relay would try for ever.
pub(crate) const MOST_DISPATCHES: u8 = 4;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Protocol {
    pub(crate) scenario: Scenario,
    without: Option<Guard>,
}

impl Protocol {
    /// As the code has it.
    pub(crate) const fn real(scenario: Scenario) -> Self {
        Self { scenario, without: None }
    }

    /// As the code would be without one guard.
    pub(crate) const fn without(guard: Guard, scenario: Scenario) -> Self {
        Self { scenario, without: Some(guard) }
    }

    /// Does the guard stand?
    pub(crate) fn has(&self, guard: Guard) -> bool {
        self.without != Some(guard)
    }

    /// Can nothing happen any more?
    pub(crate) fn rests(&self, state: &State) -> bool {
        let mut actions = Vec::new();
        self.offer(state, &mut actions);
        actions.is_empty()
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::initial(&self.scenario)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.offer(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action);
        next.forget_names();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        promises::all()
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.conversations.iter().all(|conversation| conversation.runs.len() <= MOST_RUNS)
    }
}
