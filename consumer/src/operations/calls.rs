//! Numbers a run's calls, so that the nth equal call has the nth idempotency key in every attempt of the turn. Only
//! recorded calls count: one that was refused, failed or given up leaves its place, and gets the same key when repeated.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use shared::ids::IdempotencyKey;

/// The calls of one run.
#[derive(Default)]
pub(super) struct Calls(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    ordinal: i32,
    /// By what equal calls have in common.
    places: HashMap<IdempotencyKey, Places>,
}

#[derive(Default)]
struct Places {
    given: u32,
    /// Given, and left again.
    free: BTreeSet<u32>,
}

/// The place of a call that is being recorded. Dropped, it is left for the next equal call.
pub(super) struct Place<'a> {
    calls: &'a Calls,
    call: IdempotencyKey,
    /// The order among all calls of the run; never used twice, since nobody knows whether a failed insert was one.
    pub(super) ordinal: i32,
    /// The place among the equal ones, from 1.
    pub(super) nth: u32,
    kept: bool,
}

impl Calls {
    /// A place for one more call that is equal in `call`.
    pub(super) fn reserve(&self, call: IdempotencyKey) -> Place<'_> {
        let mut counts = self.counts();
        counts.ordinal += 1;
        let ordinal = counts.ordinal;
        let places = counts.places.entry(call).or_default();
        let nth = places.free.pop_first().unwrap_or_else(|| {
            places.given += 1;
            places.given
        });
        Place { calls: self, call, ordinal, nth, kept: false }
    }

    /// A thread that panicked while it held the lock left whole counts behind.
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// The call has been recorded.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.calls.counts().places.entry(self.call).or_default().free.insert(self.nth);
        }
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::TurnId;

    use super::*;

    #[test]
    fn a_call_that_was_not_recorded_leaves_its_place_to_its_repetition() {
        let key = |tool| IdempotencyKey::derive(TurnId(uuid::Uuid::nil()), tool, "{}", 0);
        let (calls, mail, post) = (Calls::default(), key("mail"), key("post"));
        let (first, second) = (calls.reserve(mail), calls.reserve(mail));
        assert_eq!((first.nth, second.nth, calls.reserve(post).nth), (1, 2, 1));
        second.keep();
        drop(first);
        let repeated = calls.reserve(mail);
        assert_eq!((repeated.nth, repeated.ordinal), (1, 4));
        repeated.keep();
        assert_eq!(calls.reserve(mail).nth, 3);
    }
}
