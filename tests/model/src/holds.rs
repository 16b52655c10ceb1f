//! The protocol as the code has it keeps every promise: in every state that it can reach, whatever goes wrong, in any order.

use std::collections::HashMap;

use stateright::{Checker, HasDiscoveries, Model};

use crate::{
    protocol::Protocol,
    scenario::{Chance, Scenario, Source},
    state::State,
};

/// Checks every reachable state, and shows the steps to the first that breaks a promise. Returns how many there are.
fn holds(scenario: Scenario) -> usize {
    let checked =
        Protocol::real(scenario).checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    if let Some((promise, path)) = checked.discoveries().into_iter().next() {
        panic!("broken: {promise}\nby: {:#?}\nof: {scenario:?}", path.into_actions());
    }
    checked.unique_state_count()
}

/// Any two things, and anything twice.
fn holds_for_any_two(scenario: Scenario) -> usize {
    let pairs = Chance::ALL.iter().enumerate().flat_map(|(place, one)| {
        Chance::ALL[place..].iter().map(move |other| scenario.where_may_happen(&[*one, *other]))
    });
    pairs.map(holds).sum()
}

fn report(states: usize) {
    println!("{states} states");
}

/// Goes every way from here, and fails if one leads back to where it has been.
fn ends(model: &Protocol, state: State, over: &mut HashMap<State, bool>) {
    match over.get(&state) {
        Some(true) => return,
        Some(false) => panic!("for ever: {state:#?}"),
        None => over.insert(state.clone(), false),
    };
    for next in model.next_states(&state) {
        ends(model, next, over);
    }
    over.insert(state, true);
}

/// So whatever rests only when everything is answered does answer everything.
#[test]
fn the_protocol_always_comes_to_rest() {
    for scenario in [Scenario::ONE.with_a_tool(), Scenario::TWO] {
        for chance in Chance::ALL {
            let model = Protocol::real(scenario.where_may_happen(&[chance, Chance::Stall]));
            ends(&model, State::initial(&model.scenario), &mut HashMap::new());
        }
    }
}

#[test]
fn the_protocol_keeps_every_promise() {
    report(holds_for_any_two(Scenario::ONE.with_a_tool()));
}

#[test]
fn the_protocol_keeps_every_promise_to_messages_that_come_meanwhile() {
    report(holds_for_any_two(Scenario::TWO));
}

#[test]
fn the_protocol_keeps_every_promise_when_processes_die_and_stand_still() {
    let chances = [Chance::ConsumerCrash, Chance::RelayCrash, Chance::Stall];
    report(holds(Scenario::TWO.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_when_the_broker_lies() {
    let chances = [Chance::Loss, Chance::Timeout, Chance::Haste, Chance::Rollback];
    report(holds(Scenario::ONE.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_whatever_users_want() {
    let chances = [Chance::Cancel, Chance::Deletion, Chance::Retry];
    report(holds(Scenario::TWO.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_whatever_is_deleted() {
    let chances = [Chance::Erasure, Chance::Departure, Chance::Reading, Chance::Failure, Chance::Stall];
    report(holds(Scenario::TWO.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_however_a_run_ends() {
    let chances =
        [Chance::Failure, Chance::Overrun, Chance::Shutdown, Chance::Ambiguity, Chance::Undeliverable];
    report(holds(Scenario::TWO.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_with_and_without_a_broker_at_once() {
    let both = Scenario { sources: &[Source::Nats, Source::Postgres], ..Scenario::TWO };
    report(holds(both.where_may_happen(&[Chance::ConsumerCrash, Chance::Loss, Chance::Cancel])));
}

#[test]
fn the_protocol_keeps_every_promise_without_a_broker() {
    let direct = Scenario { sources: &[Source::Postgres, Source::Postgres], ..Scenario::TWO };
    let chances = [Chance::ConsumerCrash, Chance::Stall, Chance::Cancel, Chance::Rollback];
    report(holds(direct.with_a_tool().where_may_happen(&chances)));
}

#[test]
fn the_protocol_keeps_every_promise_in_several_conversations() {
    let two = Scenario { conversations: 2, ..Scenario::ONE };
    report(holds(two.with_a_tool().where_may_happen(&[Chance::Stall, Chance::Loss, Chance::Departure])));
}
