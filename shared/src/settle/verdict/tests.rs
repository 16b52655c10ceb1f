//! The verdict over every combination of what it depends on.

use super::*;

fn causes() -> Vec<Cause> {
    let handler = |retryable| Cause::Handler { message: "x".into(), retryable, retry_after: None };
    vec![
        handler(true),
        handler(false),
        Cause::Timeout,
        Cause::Expired,
        Cause::RejectedContent { rule: "x".into() },
        Cause::Released,
        Cause::Undeliverable { rule: "x".into() },
    ]
}

const EFFECTS: [Effect; 3] = [Effect::Read, Effect::Idempotent, Effect::SideEffect];
const STATUSES: [OperationStatus; 3] =
    [OperationStatus::Started, OperationStatus::Completed, OperationStatus::Failed];

fn call_sets() -> Vec<Vec<Call>> {
    let call = |effect, status| Call { name: "t".into(), effect, status };
    let single = EFFECTS.into_iter().flat_map(|e| STATUSES.map(|s| vec![call(e, s)]));
    let pairs = STATUSES
        .into_iter()
        .flat_map(|a| STATUSES.map(|b| vec![call(Effect::SideEffect, a), call(Effect::SideEffect, b)]));
    std::iter::once(vec![]).chain(single).chain(pairs).collect()
}

fn every_case(mut check: impl FnMut(&Cause, &Standing, Verdict)) {
    for cause in causes() {
        for calls in call_sets() {
            for attempt in 1..=4 {
                for cancel_requested in [false, true] {
                    for rows in [0, 1, 3] {
                        let standing = Standing {
                            attempt,
                            max_attempts: 3,
                            cancel_requested,
                            rows,
                            calls: calls.clone(),
                        };
                        check(&cause, &standing, decide(&cause, &standing));
                    }
                }
            }
        }
    }
}

#[test]
fn a_turn_is_retried_only_while_it_has_rows_attempts_and_no_side_effect_and_nobody_cancelled_it() {
    every_case(|cause, standing, verdict| {
        let side_effect = standing
            .calls
            .iter()
            .any(|c| c.effect == Effect::SideEffect && c.status != OperationStatus::Failed);
        let may = standing.rows > 0
            && !standing.cancel_requested
            && !side_effect
            && !cause.is_final()
            && standing.attempt < 3;
        assert_eq!(matches!(verdict, Verdict::Retry { .. }), may, "{cause:?} {standing:?}");
    });
}

#[test]
fn a_side_effect_that_may_have_happened_names_what_is_known_of_it() {
    every_case(|cause, standing, verdict| {
        let Verdict::Fail { kind, retryable, .. } = verdict else { return };
        let status =
            |status| standing.calls.iter().any(|c| c.effect == Effect::SideEffect && c.status == status);
        let expected = match () {
            () if standing.cancel_requested => Kind::Cancelled,
            () if status(OperationStatus::Started) => Kind::SideEffectUnknown,
            () if status(OperationStatus::Completed) => Kind::Interrupted,
            () => cause.kind(),
        };
        assert_eq!(kind, expected, "{cause:?} {standing:?}");
        let happened = status(OperationStatus::Started) || status(OperationStatus::Completed);
        assert!(!(retryable && happened), "{cause:?} {standing:?}");
    });
}

#[test]
fn only_a_given_back_run_is_retried_at_once() {
    every_case(|cause, _, verdict| {
        if let Verdict::Retry { now, .. } = verdict {
            assert_eq!(now, *cause == Cause::Released);
        }
    });
}

#[test]
fn a_lost_lease_is_recorded_as_expired_whatever_follows() {
    every_case(|cause, _, verdict| {
        let outcome = run_outcome(cause, &verdict);
        assert_eq!(outcome == RunOutcome::Expired, *cause == Cause::Expired);
        assert_ne!(outcome, RunOutcome::Done);
    });
}

#[test]
fn a_handler_may_ask_for_a_longer_wait() {
    let after = Some(Duration::from_secs(7));
    let cause = Cause::Handler { message: String::new(), retryable: true, retry_after: after };
    let standing = Standing { attempt: 1, max_attempts: 2, cancel_requested: false, rows: 1, calls: vec![] };
    assert_eq!(decide(&cause, &standing), Verdict::Retry { now: false, at_least: Duration::from_secs(7) });
}
