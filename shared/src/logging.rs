//! The log of a process: one subscriber, on stderr, set up once.
//!
//! A line carries ids and units, never what somebody wrote. Panics are the one place where content could slip through
//! (slicing a text names the text), so the hook set here logs where a panic happened and not what it said.

use std::{
    io::{self, IsTerminal as _},
    panic,
};

use tracing_subscriber::{
    EnvFilter,
    util::{SubscriberInitExt as _, TryInitError},
};

use crate::settings::{LogFormat, LogSettings};

/// The log was set up twice in one process.
#[derive(Debug, thiserror::Error)]
#[error("the log is already set up")]
pub struct LoggingError(#[from] TryInitError);

/// Sends everything that is traced from now on to stderr, and panics with it.
///
/// # Errors
///
/// When a subscriber is already set.
pub fn init(settings: &LogSettings) -> Result<(), LoggingError> {
    let lines =
        tracing_subscriber::fmt().with_env_filter(EnvFilter::new(&settings.filter)).with_writer(io::stderr);
    match settings.format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).finish().try_init()?,
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init()?,
    }
    panic::set_hook(Box::new(|panicked| {
        let at = panicked.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(at, "a task panicked");
    }));
    Ok(())
}
