//! What the protocol promises. Each promise holds in every state that can be reached; the last one says that the system
//! comes to rest with everything answered, whatever went wrong before.

use shared::state::{LaneState, OperationStatus, RowStatus};
use stateright::Property;

use crate::{
    protocol::Protocol,
    scenario::Chance,
    state::{Answer, Conversation, Doing, Lane, RunId, Said, State},
    witness::Note,
};

pub(crate) const ONE_RUN_IN_FLIGHT: &str = "a row in progress belongs to the run that holds its lane";
pub(crate) const RETRY_HAS_ITS_LANE: &str =
    "a row that waits for another attempt has a lane that waits for its turn";
pub(crate) const COLUMNS_FIT: &str = "a lane's columns fit its state";
pub(crate) const NO_ROW_IS_STRANDED: &str = "an idle lane has no open rows";
pub(crate) const SETS_NEVER_CHANGE: &str = "every attempt at a turn has the turn's rows, of one generation";
pub(crate) const ONLY_THE_HOLDER_COMMITS: &str = "a run commits only while it holds its lane";
pub(crate) const NO_LEASE_IS_ROBBED: &str = "a run is recovered only once its lease is over";
pub(crate) const ONE_OUTCOME: &str = "a turn has one outcome at most, and its rows that status";
pub(crate) const ONE_END: &str = "a run ends once, and each attempt at a turn is one run";
pub(crate) const IN_ORDER: &str = "outcomes stand in the order of their claims";
pub(crate) const UNREAD: &str = "unread counts each outcome once";
pub(crate) const CANCELLED_IS_OVER: &str = "a cancelled turn is neither answered nor tried again";
pub(crate) const STARTS_ARE_COUNTED: &str = "every start of a handler belongs to an attempt that was counted";
pub(crate) const CAP: &str = "a turn has no more attempts than it may";
pub(crate) const ATTEMPTS_ARE_RUNS: &str = "the attempts of a row are the runs of its turn";
pub(crate) const OWN_OPERATIONS: &str = "an operation is shown by its own run's outcome";
pub(crate) const RECORDED_FIRST: &str = "no tool is called without a record that came first";
pub(crate) const ONE_EFFECT: &str = "a message causes its side effect once, unless the user confirmed";
pub(crate) const NO_EFFECT_AFTER_CANCEL: &str =
    "no operation starts once the user was told that the run is stopped";
pub(crate) const GONE_IS_GONE: &str = "nothing of a deleted conversation comes back";
pub(crate) const DELETED_IS_LEFT: &str = "no handler runs for messages that are all deleted";
pub(crate) const RETRIED_ALONE: &str = "what a user tries again is a turn of its own";
pub(crate) const TRIGGERS_ARE_KEPT: &str = "a consumer loses no trigger";
pub(crate) const REST: &str = "the system rests only when everything is answered";

/// Every promise.
pub(crate) fn all() -> Vec<Property<Protocol>> {
    vec![
        Property::always(ONE_RUN_IN_FLIGHT, |_, state: &State| state.each(rows_belong_to_the_lane)),
        Property::always(RETRY_HAS_ITS_LANE, |_, state: &State| state.each(retries_have_their_lane)),
        Property::always(COLUMNS_FIT, |_, state: &State| state.each(|it| it.lane.columns_fit())),
        Property::always(NO_ROW_IS_STRANDED, |_, state: &State| state.each(idle_is_empty)),
        Property::always(SETS_NEVER_CHANGE, |_, state: &State| state.each(sets_never_change)),
        Property::always(ONLY_THE_HOLDER_COMMITS, |_, state: &State| {
            state.each(|it| it.witness.never(Note::Trespass))
        }),
        Property::always(NO_LEASE_IS_ROBBED, |_, state: &State| {
            state.each(|it| it.witness.never(Note::Robbery))
        }),
        Property::always(ONE_OUTCOME, |_, state: &State| state.each(rows_have_their_outcome)),
        Property::always(ONE_END, |_, state: &State| state.each(ends_are_unique)),
        Property::always(IN_ORDER, |_, state: &State| state.each(outcomes_are_in_order)),
        Property::always(UNREAD, |_, state: &State| {
            state.each(|it| usize::from(it.unread) == it.outcomes.len() - usize::from(it.read))
        }),
        Property::always(CANCELLED_IS_OVER, |_, state: &State| state.each(cancelled_is_over)),
        Property::always(STARTS_ARE_COUNTED, |_, state: &State| {
            state.each(|it| it.runs.iter().all(|run| run.starts <= 1))
        }),
        Property::always(CAP, starts_are_capped),
        Property::always(ATTEMPTS_ARE_RUNS, |_, state: &State| state.each(attempts_are_runs)),
        Property::always(OWN_OPERATIONS, |_, state: &State| state.each(operations_are_shown_by_their_run)),
        Property::always(RECORDED_FIRST, |_, state: &State| {
            state.each(|it| it.witness.never(Note::UnrecordedCall))
        }),
        Property::always(ONE_EFFECT, |_, state: &State| state.each(effects_happen_once)),
        Property::always(NO_EFFECT_AFTER_CANCEL, |_, state: &State| {
            state.each(|it| it.witness.never(Note::Disobedience))
        }),
        Property::always(GONE_IS_GONE, |_, state: &State| state.each(gone_is_gone)),
        Property::always(DELETED_IS_LEFT, |_, state: &State| state.each(deleted_is_left)),
        Property::always(RETRIED_ALONE, |_, state: &State| state.each(retried_turns_stand_alone)),
        Property::always(TRIGGERS_ARE_KEPT, triggers_are_kept),
        Property::always(REST, |model: &Protocol, state: &State| state.is_quiet() || !model.rests(state)),
    ]
}

fn rows_belong_to_the_lane(it: &Conversation) -> bool {
    let in_flight = matches!(it.lane.state, LaneState::Queued | LaneState::Running);
    it.rows()
        .filter(|(_, row)| row.status == RowStatus::Processing)
        .all(|(_, row)| in_flight && row.is_in_progress_for(&it.lane))
}

fn retries_have_their_lane(it: &Conversation) -> bool {
    it.rows()
        .filter(|(_, row)| row.status == RowStatus::Pending && row.turn.is_some())
        .all(|(_, row)| it.lane.state == LaneState::Waiting && it.lane.turn == row.turn)
}

fn idle_is_empty(it: &Conversation) -> bool {
    it.lane.state != LaneState::Idle || it.rows().all(|(_, row)| !row.is_open())
}

/// A row that was erased past every function is missing from later attempts; nothing else is, and nothing is added.
fn sets_never_change(it: &Conversation) -> bool {
    let erased = |place: usize| it.messages[place].said == Said::Erased;
    let same = it.runs.iter().all(|run| {
        (0..it.messages.len()).all(|place| {
            let (took, made_of) = (run.took.has(place), run.turn.messages.has(place));
            took == made_of || !took && erased(place)
        })
    });
    same && it.rows().all(|(_, row)| row.turn.is_none_or(|turn| turn.generation == row.generation))
}

/// Together with its outcome each row of a turn has its status; both are written by one transaction.
fn rows_have_their_outcome(it: &Conversation) -> bool {
    let once = |(place, outcome): (usize, &crate::state::Outcome)| {
        it.outcomes[..place].iter().all(|earlier| earlier.turn != outcome.turn)
    };
    let fits = |row: &crate::state::Row| {
        let outcome = it.outcomes.iter().find(|outcome| Some(outcome.turn) == row.turn);
        match (row.status, outcome) {
            (RowStatus::Done, Some(outcome)) => outcome.said == Answer::Reply && outcome.run == row.run,
            (RowStatus::Error, Some(outcome)) => outcome.said != Answer::Reply && outcome.run == row.run,
            (RowStatus::Done | RowStatus::Error, None) | (_, Some(_)) => false,
            (RowStatus::Pending | RowStatus::Processing, None) => true,
        }
    };
    it.outcomes.iter().enumerate().all(once) && it.rows().all(|(_, row)| fits(row))
}

fn ends_are_unique(it: &Conversation) -> bool {
    let ended: Vec<_> = it.runs.iter().filter(|run| run.ended.is_some()).collect();
    let unique = |place: usize| {
        let same = |earlier: &&crate::state::Run| {
            earlier.turn == ended[place].turn && earlier.attempt == ended[place].attempt
        };
        !ended[..place].iter().any(same)
    };
    it.witness.never(Note::SecondEnd) && (0..ended.len()).all(unique)
}

/// A cancellation between two attempts has no run, and so no place in the order of claims.
fn outcomes_are_in_order(it: &Conversation) -> bool {
    it.outcomes.iter().filter_map(|outcome| outcome.run).is_sorted()
}

/// Once the user was told, the turn stops, or has its cancellation; nothing else becomes of it or its messages.
fn cancelled_is_over(it: &Conversation) -> bool {
    it.witness.cancelled.is_none_or(|turn| {
        let mut messages = it.messages.iter().enumerate().filter(|(place, _)| turn.messages.has(*place));
        let stops = it.lane.state == LaneState::Running && it.lane.turn == Some(turn);
        let answer = it.outcomes.iter().find(|outcome| outcome.turn == turn).map(|outcome| outcome.said);
        match answer {
            Some(answer) => answer == Answer::Cancelled && it.lane.turn != Some(turn),
            None => stops || !it.exists || messages.all(|(_, message)| message.said == Said::Erased),
        }
    })
}

fn starts_are_capped(model: &Protocol, state: &State) -> bool {
    state.each(|it| {
        it.runs.iter().all(|run| {
            let of_turn = it.runs.iter().filter(|other| other.turn == run.turn);
            of_turn.map(|other| other.starts).sum::<u8>() <= model.scenario.max_attempts
        })
    })
}

/// A claim that was given back before it began is no attempt, and stands nowhere.
fn attempts_are_runs(it: &Conversation) -> bool {
    it.rows().all(|(_, row)| {
        row.turn.is_none_or(|turn| {
            let ended = it.runs.iter().filter(|run| run.turn == turn && run.ended.is_some()).count();
            usize::from(row.attempts) == ended + usize::from(row.status == RowStatus::Processing)
        })
    })
}

fn operations_are_shown_by_their_run(it: &Conversation) -> bool {
    (0..).zip(&it.runs).all(|(number, run)| {
        run.shown.is_none_or(|place| it.outcomes[usize::from(place)].run == Some(number))
    })
}

/// Whatever turns a message was part of: no retry without the user's confirmation is modelled with one.
fn effects_happen_once(it: &Conversation) -> bool {
    let of_message = |place: usize| it.runs.iter().filter(move |run| run.took.has(place));
    (0..it.messages.len()).all(|place| {
        let may_have_happened = of_message(place).filter(|run| {
            run.effects > 0 || run.operation.is_some_and(|status| status != OperationStatus::Failed)
        });
        may_have_happened.count() <= 1 && of_message(place).all(|run| run.effects <= 1)
    })
}

fn gone_is_gone(it: &Conversation) -> bool {
    let nothing = it.lane == Lane::IDLE
        && it.outcomes.is_empty()
        && it.rows().next().is_none()
        && it.runs.iter().all(|run| run.operation.is_none() && run.ended.is_none());
    it.exists || nothing
}

/// Its messages are those of one earlier turn, or of what was left of it.
fn retried_turns_stand_alone(it: &Conversation) -> bool {
    it.runs.iter().filter(|run| run.turn.generation > 1).all(|run| {
        it.runs.iter().any(|earlier| {
            earlier.turn.generation < run.turn.generation
                && (0..it.messages.len())
                    .all(|message| earlier.turn.messages.has(message) || !run.turn.messages.has(message))
        })
    })
}

/// A turn that is being stopped for the deletion's sake is on its way out.
fn deleted_is_left(it: &Conversation) -> bool {
    let in_flight = matches!(it.lane.state, LaneState::Queued | LaneState::Running);
    let mut rows = it.rows().filter(|(_, row)| row.is_in_progress_for(&it.lane)).peekable();
    !in_flight
        || it.lane.cancel_requested
        || rows.peek().is_none()
        || rows.any(|(place, _)| it.messages[place].said == Said::Visible)
}

/// While the broker has lost nothing and no relay has died, the trigger of a queued run is somewhere.
fn triggers_are_kept(model: &Protocol, state: &State) -> bool {
    let (left, budget) = (&state.budget, &model.scenario.budget);
    let causes = [Chance::Loss, Chance::Timeout, Chance::RelayCrash];
    let forgiven = causes.into_iter().any(|chance| left.left(chance) != budget.left(chance));
    forgiven
        || (0..).zip(&state.conversations).all(|(conversation, it)| match (it.lane.state, it.lane.run) {
            (LaneState::Queued, Some(number)) => state.has_trigger_of(RunId { conversation, number }),
            _ => true,
        })
}

impl State {
    fn each(&self, holds: impl Fn(&Conversation) -> bool) -> bool {
        self.conversations.iter().all(holds)
    }

    fn has_trigger_of(&self, run: RunId) -> bool {
        let triggers = self.relay.publishing.iter().chain(&self.relay.unanswered).chain(&self.broker.stored);
        triggers.map(|trigger| trigger.run).any(|other| other == run)
            || self
                .consumers
                .iter()
                .any(|consumer| matches!(consumer.doing, Doing::Received(trigger) if trigger.run == run))
    }

    /// Every message is said and answered, or deleted; nothing is in flight anywhere.
    fn is_quiet(&self) -> bool {
        self.relay.is_at_rest()
            && self.broker.stored.is_empty()
            && self.consumers.iter().all(|consumer| consumer.doing == Doing::Nothing)
            && self
                .each(|it| !it.exists || it.is_free() && it.lane == Lane::IDLE && it.everything_is_answered())
    }
}

impl Conversation {
    fn everything_is_answered(&self) -> bool {
        self.messages.iter().all(|message| match (message.said, message.row) {
            (Said::NotYet, _) => false,
            (Said::Visible, row) => row.is_some_and(|row| !row.is_open()),
            (Said::Tombstone | Said::Erased, row) => row.is_none_or(|row| !row.is_open()),
        })
    }
}

impl Lane {
    /// The CHECK of `agent_lanes`.
    fn columns_fit(&self) -> bool {
        match self.state {
            LaneState::Idle => *self == Self::IDLE,
            LaneState::Waiting => {
                self.run.is_none()
                    && (self.attempt == 0 || self.turn.is_some())
                    && self.dispatches == 0
                    && !self.cancel_requested
            }
            LaneState::Queued => {
                self.turn.is_some()
                    && self.run.is_some()
                    && self.attempt >= 1
                    && self.dispatches >= 1
                    && !self.cancel_requested
            }
            LaneState::Running => self.turn.is_some() && self.run.is_some() && self.attempt >= 1,
        }
    }
}
