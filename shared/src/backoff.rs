//! Delays between attempts to reach a server: they double up to a ceiling, with jitter, so that the processes which
//! lost a server together do not all come back to it together.
//!
//! This is the only place that names the crate `backoff`, which is unmaintained (RUSTSEC-2025-0012). It is used for its
//! arithmetic alone: without the runtimes it would wait on, and without its limit on the time spent.

use std::time::Duration;

use backoff::{ExponentialBackoff, ExponentialBackoffBuilder, backoff::Backoff as _};

/// An endless series of growing delays.
#[derive(Debug)]
pub struct Delays {
    series: ExponentialBackoff,
    max: Duration,
}

impl Delays {
    /// A series that starts around `initial` and doubles until it stays around `max`.
    #[must_use]
    pub fn new(initial: Duration, max: Duration) -> Self {
        let series = ExponentialBackoffBuilder::new()
            .with_initial_interval(initial)
            .with_max_interval(max)
            .with_multiplier(2.0)
            .with_randomization_factor(0.5)
            .with_max_elapsed_time(None)
            .build();
        Self { series, max }
    }

    /// How long to wait before the next attempt: within 50% of the undisturbed delay, and never above the ceiling.
    #[expect(
        clippy::should_implement_trait,
        reason = "the series has no end, so an Option would only be in the way"
    )]
    pub fn next(&mut self) -> Duration {
        self.series.next_backoff().unwrap_or(self.max).min(self.max)
    }

    /// Starts the series again, after an attempt that succeeded.
    pub fn reset(&mut self) {
        self.series.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INITIAL: Duration = Duration::from_millis(100);
    const MAX: Duration = Duration::from_secs(5);

    #[test]
    fn delays_double_with_jitter_and_stop_at_the_ceiling() {
        let mut delays = Delays::new(INITIAL, MAX);
        for doubling in 0..20 {
            let undisturbed = (INITIAL * 2_u32.pow(doubling.min(10))).min(MAX);
            let delay = delays.next();
            assert!(
                delay >= undisturbed / 2 && delay <= (undisturbed * 3 / 2).min(MAX),
                "{doubling}: {delay:?}"
            );
        }
    }

    #[test]
    fn a_success_starts_the_series_again() {
        let mut delays = Delays::new(INITIAL, MAX);
        (0..10).for_each(|_| _ = delays.next());
        delays.reset();
        assert!(delays.next() <= INITIAL * 3 / 2);
    }
}
