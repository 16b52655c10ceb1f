//! The leases that this process holds: one entry a run, with the token that stops it. The heartbeat renews them; the run
//! itself watches its token.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use shared::ids::{ConversationId, RunId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Why a run was stopped from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// Its lane is somebody else's, or could not be kept.
    LeaseLost,
    /// The user asked for it.
    Cancelled,
    /// The process is leaving.
    Leaving,
}

/// The runs of this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases(Arc<Mutex<HashMap<RunId, Entry>>>);

#[derive(Debug)]
struct Entry {
    conversation_id: ConversationId,
    renewed_at: Instant,
    stop: Stop,
    in_doubt: Option<CancellationToken>,
}

/// From when a lease lasts, and how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Term {
    /// Before it was taken, on this process's monotonic clock.
    pub(crate) since: Instant,
    pub(crate) lease: Duration,
}

/// Stops one run, once, for one reason.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    token: CancellationToken,
    reason: Arc<OnceLock<Stopped>>,
}

impl Stop {
    /// Fires when the run must stop.
    pub(crate) const fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Why it must, once it must.
    pub(crate) fn reason(&self) -> Option<Stopped> {
        self.reason.get().copied()
    }

    fn fire(&self, reason: Stopped) {
        let _ = self.reason.set(reason);
        self.token.cancel();
    }
}

/// One run's entry; gone when dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    leases: Leases,
    run_id: RunId,
    pub(crate) stop: Stop,
    /// Its first term was over before it was held: the begin had to wait, or the process stood still after it. Fires when
    /// a renewal shows which.
    in_doubt: Option<CancellationToken>,
}

impl Lease {
    /// Waits until the lease is known to stand, or is stopped.
    pub(crate) async fn stands(&self) {
        if let Some(renewed) = &self.in_doubt {
            tokio::select! {
                () = renewed.cancelled() => {}
                () = self.stop.token().cancelled() => {}
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.leases.lock().remove(&self.run_id);
    }
}

/// What a heartbeat found of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beat {
    pub(crate) run_id: RunId,
    /// False: somebody held the lane for a moment; the run still owns it.
    pub(crate) renewed: bool,
    pub(crate) cancel_requested: bool,
}

impl Leases {
    /// Holds a lease that was taken within `term`.
    pub(crate) fn hold(&self, conversation_id: ConversationId, run_id: RunId, term: Term) -> Lease {
        let stop = Stop::default();
        let in_doubt = (term.since.elapsed() >= term.lease).then(CancellationToken::new);
        let entry =
            Entry { conversation_id, renewed_at: term.since, stop: stop.clone(), in_doubt: in_doubt.clone() };
        self.lock().insert(run_id, entry);
        Lease { leases: self.clone(), run_id, stop, in_doubt }
    }

    /// What to renew.
    pub(crate) fn held(&self) -> (Vec<String>, Vec<RunId>) {
        self.lock().iter().map(|(run, entry)| (entry.conversation_id.as_str().to_owned(), *run)).unzip()
    }

    /// Takes in the answer of a heartbeat that asked for `asked` at `since`: who is missing in it has lost its lane.
    pub(crate) fn beat(&self, asked: &[RunId], since: Instant, beats: &[Beat]) -> usize {
        let found: HashMap<RunId, &Beat> = beats.iter().map(|beat| (beat.run_id, beat)).collect();
        let mut lost = 0;
        let mut leases = self.lock();
        for run in asked {
            let Some(entry) = leases.get_mut(run) else { continue };
            match found.get(run) {
                None => {
                    entry.stop.fire(Stopped::LeaseLost);
                    lost += 1;
                }
                Some(beat) => {
                    if beat.renewed {
                        entry.renewed_at = since;
                        if let Some(renewed) = &entry.in_doubt {
                            renewed.cancel();
                        }
                    }
                    if beat.cancel_requested {
                        entry.stop.fire(Stopped::Cancelled);
                    }
                }
            }
        }
        lost
    }

    /// Stops every run that could not be renewed within its lease: by now its lane may be anybody's.
    pub(crate) fn expire(&self, lease: Duration) -> usize {
        let now = Instant::now();
        let leases = self.lock();
        let stale = leases.values().filter(|entry| now.duration_since(entry.renewed_at) >= lease);
        stale.map(|entry| entry.stop.fire(Stopped::LeaseLost)).count()
    }

    /// Stops every run: the process is leaving.
    pub(crate) fn leave(&self) {
        for entry in self.lock().values() {
            entry.stop.fire(Stopped::Leaving);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn term() -> Term {
        Term { since: Instant::now(), lease: Duration::from_secs(15) }
    }

    fn conversation() -> ConversationId {
        ConversationId::new("c").unwrap()
    }

    #[tokio::test]
    async fn a_run_that_a_renewal_does_not_find_is_stopped_and_a_skipped_one_is_not() {
        let leases = Leases::default();
        let now = Instant::now();
        let (a, b) = (RunId::fresh(), RunId::fresh());
        let (lost, skipped) =
            (leases.hold(conversation(), a, term()), leases.hold(conversation(), b, term()));
        let beats = [Beat { run_id: b, renewed: false, cancel_requested: false }];
        assert_eq!(leases.beat(&[a, b], now, &beats), 1);
        assert_eq!(lost.stop.reason(), Some(Stopped::LeaseLost));
        assert_eq!(skipped.stop.reason(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_could_not_be_renewed_within_its_lease_is_stopped() {
        let leases = Leases::default();
        let lease = leases.hold(conversation(), RunId::fresh(), term());
        tokio::time::advance(Duration::from_secs(14)).await;
        assert_eq!(leases.expire(Duration::from_secs(15)), 0);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(leases.expire(Duration::from_secs(15)), 1);
        assert_eq!(lease.stop.reason(), Some(Stopped::LeaseLost));
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_whose_first_term_is_over_starts_when_its_lease_is_renewed_or_is_stopped() {
        let (leases, term) = (Leases::default(), term());
        tokio::time::advance(term.lease).await;
        let runs = [RunId::fresh(), RunId::fresh()];
        let [kept, lost] = runs.map(|run| leases.hold(conversation(), run, term));
        assert!(kept.stands().now_or_never().is_none() && lost.stands().now_or_never().is_none());
        let beats = [Beat { run_id: runs[0], renewed: true, cancel_requested: false }];
        leases.beat(&runs, Instant::now(), &beats);
        kept.stands().await;
        lost.stands().await;
        assert_eq!((kept.stop.reason(), lost.stop.reason()), (None, Some(Stopped::LeaseLost)));
        leases.hold(conversation(), RunId::fresh(), Term { since: Instant::now(), ..term }).stands().await;
    }

    #[tokio::test]
    async fn an_ended_run_is_not_renewed_any_more() {
        let leases = Leases::default();
        drop(leases.hold(conversation(), RunId::fresh(), term()));
        assert!(leases.held().1.is_empty());
    }

    #[tokio::test]
    async fn the_first_reason_stands() {
        let leases = Leases::default();
        let run = RunId::fresh();
        let lease = leases.hold(conversation(), run, term());
        leases.beat(&[run], Instant::now(), &[Beat { run_id: run, renewed: true, cancel_requested: true }]);
        leases.leave();
        assert_eq!(lease.stop.reason(), Some(Stopped::Cancelled));
    }
}
