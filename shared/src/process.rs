//! How a process lives and ends: exit codes, two-stage shutdown, and tasks that stand or fall together.
//!
//! The first signal asks everybody to take no more work; what runs may finish until the drain timeout; the second
//! signal, or that timeout, asks to drop what still runs. Nobody dies quietly: a task that ends before it was asked to
//! takes the whole process through the same two stages, and to exit code 1.

use std::{
    error::Error,
    io::{self, Write as _},
    iter,
    process::ExitCode,
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time,
};
use tokio_util::sync::CancellationToken;

use crate::settings::SettingsError;

mod tasks;

pub use tasks::{TaskError, TaskFailure, Tasks};

/// Exit code of a command or a configuration that cannot be used: `EX_USAGE` of sysexits.
const EXIT_USAGE: u8 = 64;

/// A command was used in a way that cannot work; exit code 64, as for a [`SettingsError`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Reads the command line. On the way out: help and version are exit code 0, a wrong usage is 64.
///
/// # Errors
///
/// The exit code, when there is nothing left to do but exit with it; what there is to say has been said.
pub fn arguments<C: clap::Parser>() -> Result<C, ExitCode> {
    C::try_parse().map_err(|error| {
        // Nobody is left to tell when this fails.
        let _ = error.print();
        if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
    })
}

/// Says why the process ends, once: in the log where there is one, else on stderr.
///
/// The exit code is 64 when a [`SettingsError`] or a [`UsageError`] is among the causes, else 1.
#[must_use]
pub fn fail(error: &(dyn Error + 'static)) -> ExitCode {
    let text = explain(error);
    if tracing::dispatcher::has_been_set() {
        tracing::error!(error = text, "the process failed");
    } else {
        // Nobody is left to tell when this fails.
        let _ = writeln!(io::stderr(), "error: {text}");
    }
    let usage = causes(error).any(|cause| cause.is::<SettingsError>() || cause.is::<UsageError>());
    ExitCode::from(if usage { EXIT_USAGE } else { 1 })
}

/// An error and its causes in one text. Whoever wraps a driver's error has said of it what may be said, and some wrap
/// the rest of their cause's text too, so neither is repeated.
fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in causes(error).take_while(|cause| !cause.is::<sqlx::Error>()).map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |error| (*error).source())
}

/// The two stages of stopping. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Cancelled first: take no new work, finish what runs.
    pub stop: CancellationToken,
    /// Cancelled after `stop`: drop what still runs.
    pub cut: CancellationToken,
}

impl Shutdown {
    /// A shutdown driven by SIGTERM and SIGINT: the first one cancels `stop`; a second one, or the end of
    /// `drain_timeout`, cancels `cut`. The timeout also runs when `stop` is cancelled by somebody else.
    ///
    /// # Errors
    ///
    /// When the signals cannot be listened to.
    pub fn on_signals(drain_timeout: Duration) -> io::Result<Self> {
        let shutdown = Self::default();
        let mut signals = Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        };
        tokio::spawn({
            let shutdown = shutdown.clone();
            async move {
                tokio::select! {
                    name = signals.next() => tracing::info!(signal = name, drain_ms = drain_timeout.as_millis(), "stopping"),
                    () = shutdown.stop.cancelled() => {}
                }
                shutdown.stop.cancel();
                tokio::select! {
                    name = signals.next() => tracing::warn!(signal = name, "told twice to stop: dropping what runs"),
                    () = time::sleep(drain_timeout) => tracing::warn!(drain_ms = drain_timeout.as_millis(), "still not done: dropping what runs"),
                }
                shutdown.cut.cancel();
            }
        });
        Ok(shutdown)
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start: {}", .0)]
    struct Quoting(#[source] UsageError);

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read the schema: SQLSTATE 42501")]
    struct Wrapping(#[source] sqlx::Error);

    #[test]
    fn each_cause_is_named_once_and_a_driver_is_never_quoted() {
        assert_eq!(explain(&Quoting(UsageError("no such key".to_owned()))), "cannot start: no such key");
        let driver = sqlx::Error::Configuration("value of a row".into());
        assert_eq!(explain(&Wrapping(driver)), "cannot read the schema: SQLSTATE 42501");
        let task = TaskFailure::Failed { name: "relay", source: Box::new(io::Error::other("gone")) };
        assert_eq!(explain(&task), "task relay failed: gone");
    }

    #[test]
    fn a_wrong_usage_is_told_from_a_failure_through_its_wrappers() {
        let usage = fail(&Quoting(UsageError("no such key".to_owned())));
        assert_eq!(format!("{usage:?}"), format!("{:?}", ExitCode::from(64)));
        let failure = fail(&io::Error::other("gone"));
        assert_eq!(format!("{failure:?}"), format!("{:?}", ExitCode::from(1)));
    }
}
