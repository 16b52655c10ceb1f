//! The protocol without one of its guards breaks a promise. Each test names the guard, the promise, and as little as
//! suffices for it to go wrong; with the guard nothing goes wrong there.

use stateright::{Checker, HasDiscoveries, Model};

use crate::{
    guard::Guard,
    promises,
    protocol::Protocol,
    scenario::{
        Chance::{
            Ambiguity, Cancel, ConsumerCrash, Deletion, Departure, Erasure, Failure, Loss, Reading, Retry,
            Stall, Timeout,
        },
        Scenario,
    },
};

/// Fails unless the promise is broken without the guard, and kept with it.
fn refuted(guard: Guard, promise: &'static str, scenario: Scenario) {
    let broken = HasDiscoveries::AnyOf([promise].into());
    let mutant = Protocol::without(guard, scenario).checker().finish_when(broken).spawn_bfs().join();
    assert!(mutant.discovery(promise).is_some(), "without {guard:?} it still holds that {promise}");
    let real = Protocol::real(scenario).checker().spawn_bfs().join();
    assert!(real.discoveries().is_empty(), "with {guard:?} it does not hold that {promise}");
}

/// One test a guard, and the list of what they leave out.
macro_rules! mutants {
    ($($test:ident: $guard:ident => $promise:ident, $scenario:expr;)*) => {
        $(
            #[test]
            fn $test() {
                refuted(Guard::$guard, promises::$promise, $scenario);
            }
        )*
        const REFUTED: &[Guard] = &[$(Guard::$guard),*];
    };
}

const ONE: Scenario = Scenario::ONE;
const TWO: Scenario = Scenario::TWO;

mutants! {
    a_submit_that_overwrites_a_lane_in_flight_lets_a_second_run_in:
        SubmitSparesFlight => ONE_RUN_IN_FLIGHT, TWO;
    a_submit_that_overwrites_a_lane_waiting_to_try_again_strands_the_turn:
        SubmitSparesRetry => RETRY_HAS_ITS_LANE, TWO.where_may_happen(&[Failure]);

    without_the_claims_lock_two_turns_of_a_conversation_are_in_flight:
        ClaimLocks => ONE_RUN_IN_FLIGHT, TWO;
    an_attempt_that_takes_newer_rows_along_changes_the_turn:
        ClaimOwnRows => SETS_NEVER_CHANGE, TWO.where_may_happen(&[Failure]);
    a_claim_across_generations_mixes_a_retried_turn_with_others:
        ClaimOneGeneration => SETS_NEVER_CHANGE, TWO.of_attempts(1).where_may_happen(&[Failure, Retry]);
    an_attempt_that_is_counted_late_is_not_counted_when_its_process_dies:
        AttemptCountedFirst => CAP, ONE.of_attempts(1).where_may_happen(&[ConsumerCrash]);
    an_empty_lane_that_is_closed_without_the_conversations_lock_strands_a_submit:
        EmptyLaneLocks => NO_ROW_IS_STRANDED, TWO.where_may_happen(&[Failure, Erasure]);

    a_message_id_that_is_used_again_is_swallowed_by_the_dedupe_window:
        DispatchInMessageId => REST, ONE.where_may_happen(&[Loss]);
    without_another_dispatch_a_lost_trigger_is_lost_for_ever:
        Redispatch => REST, ONE.where_may_happen(&[Loss]);
    a_release_of_a_run_that_has_begun_starts_more_than_the_cap:
        ReleaseOnlyQueued => CAP, ONE.of_attempts(1).where_may_happen(&[Timeout]);
    a_release_that_costs_an_attempt_counts_one_that_never_was:
        ReleaseReturnsAttempt => ATTEMPTS_ARE_RUNS, ONE.where_may_happen(&[Timeout]);

    without_the_begin_guard_a_second_delivery_starts_a_second_handler:
        BeginOnlyQueued => STARTS_ARE_COUNTED, ONE;
    an_ack_before_the_begin_loses_the_trigger_with_its_consumer:
        AckAfterBegin => TRIGGERS_ARE_KEPT, ONE.where_may_happen(&[ConsumerCrash]);

    a_tool_that_is_called_before_its_record_acts_unseen:
        RecordBeforeCall => RECORDED_FIRST, ONE.with_a_tool();
    without_the_operations_fence_a_zombie_acts_beside_its_successor:
        OperationFence => ONE_EFFECT, ONE.with_a_tool().where_may_happen(&[Stall]);
    without_the_operations_lock_a_recovery_does_not_see_it_start:
        OperationLocksLane => ONE_EFFECT, ONE.with_a_tool().where_may_happen(&[Stall]);
    an_operation_that_ignores_a_cancellation_starts_after_it:
        OperationObeysCancel => NO_EFFECT_AFTER_CANCEL, ONE.with_a_tool().where_may_happen(&[Cancel]);

    without_the_finish_fence_a_zombie_answers:
        FinishFence => ONLY_THE_HOLDER_COMMITS, ONE.where_may_happen(&[Stall]);
    a_finish_that_ignores_a_cancellation_answers_a_cancelled_turn:
        FinishObeysCancel => CANCELLED_IS_OVER, ONE.where_may_happen(&[Cancel]);
    a_finish_by_conversation_closes_rows_that_it_did_not_answer:
        FinishRowsOfRun => ONE_OUTCOME, TWO;
    a_finish_that_shows_whatever_is_not_shown_yet_shows_another_runs_operation:
        FinishOperationsOfRun => OWN_OPERATIONS, ONE.with_a_tool().where_may_happen(&[ConsumerCrash]);
    a_finish_that_does_not_look_for_rows_strands_what_came_meanwhile:
        FinishLooksForRows => NO_ROW_IS_STRANDED, TWO;
    a_finish_that_decides_on_an_old_snapshot_strands_what_came_meanwhile:
        FinishLooksAfterLocking => NO_ROW_IS_STRANDED, TWO;
    a_lost_answer_that_is_not_looked_up_runs_the_model_again:
        FateIsLookedUp => STARTS_ARE_COUNTED, ONE.where_may_happen(&[Ambiguity]);

    without_recovery_a_dead_consumers_turn_is_lost:
        Recovery => REST, ONE.where_may_happen(&[ConsumerCrash]);
    without_the_settle_fence_a_zombies_error_ends_its_successor:
        SettleFence => ONLY_THE_HOLDER_COMMITS, ONE.where_may_happen(&[Stall, Failure]);
    a_recovery_that_does_not_look_again_takes_a_lease_that_was_renewed:
        RecoverOnlyExpired => NO_LEASE_IS_ROBBED, ONE.where_may_happen(&[Stall]);
    a_consumer_that_takes_back_what_is_not_its_own_robs_another:
        TakeBackOnlyOwn => NO_LEASE_IS_ROBBED, ONE;
    a_settle_that_counts_only_completed_operations_doubles_an_unknown_one:
        StartedCounts => ONE_EFFECT, ONE.with_a_tool().where_may_happen(&[ConsumerCrash]);
    a_settle_that_forgets_a_cancellation_tries_again:
        SettleObeysCancel => CANCELLED_IS_OVER, ONE.where_may_happen(&[Cancel]);
    a_settle_that_does_not_look_for_rows_strands_what_came_meanwhile:
        SettleLooksForRows => NO_ROW_IS_STRANDED, TWO.of_attempts(1).where_may_happen(&[Failure]);

    a_retry_that_keeps_its_turn_gives_it_a_second_outcome:
        RetryNewGeneration => ONE_OUTCOME, ONE.of_attempts(1).where_may_happen(&[Failure, Retry]);
    retries_of_one_generation_become_one_turn:
        RetryOwnGeneration => RETRIED_ALONE, TWO.of_attempts(1).where_may_happen(&[Failure, Failure, Retry, Retry]);
    a_retry_that_does_not_ask_doubles_a_side_effect:
        RetryAsksAboutEffects => ONE_EFFECT, ONE.with_a_tool().where_may_happen(&[Failure, Retry]);
    a_retry_of_deleted_messages_starts_a_handler_for_nothing:
        RetryLeavesDeleted => DELETED_IS_LEFT, ONE.of_attempts(1).where_may_happen(&[Failure, Deletion, Retry]);
    a_deletion_within_a_cancelled_turn_answers_the_rest_of_it:
        DeletionSparesCancelled => CANCELLED_IS_OVER, TWO.where_may_happen(&[Cancel, Deletion]);
    a_deletion_within_a_turn_that_has_acted_lets_the_rest_act_again:
        DeletionSparesEffects => ONE_EFFECT, TWO.with_a_tool().where_may_happen(&[Deletion]);
    without_the_lanes_lock_an_operation_outlives_its_conversation:
        DepartureLocksLane => GONE_IS_GONE, ONE.with_a_tool().where_may_happen(&[Departure]);
    a_reading_that_sets_unread_to_zero_loses_an_outcome:
        ReadRecounts => UNREAD, TWO.where_may_happen(&[Reading]);
}

#[test]
fn every_guard_is_needed() {
    let in_order = REFUTED.iter().enumerate().all(|(place, guard)| *guard as usize == place);
    assert!(
        in_order && REFUTED.len() == Guard::COUNT,
        "a guard without a test, or out of order: {REFUTED:?}"
    );
}
