//! What belongs to one process: read from flags and the environment, checked as a whole, and typed from then on.
//!
//! Somebody who sets up a process wants to hear of every mistake at once, not of one per start. So the `*Args` structs
//! take whatever is given as text and refuse nothing; [`check`] turns them into `*Settings` and returns all that is
//! wrong together. A variable that is set but empty counts as not set, as container tooling leaves them.

use std::fmt;

mod admin;
mod consumer;
mod database;
mod handler;
mod log;
mod nats;
mod parse;
mod relay;
mod secret;

pub use admin::{AdminArgs, AdminSettings};
pub use consumer::{ConsumerArgs, ConsumerSettings, Source};
pub use database::{DatabaseArgs, DatabaseSettings};
pub use handler::{EchoSettings, HandlerArgs, HandlerSettings, HttpSettings};
pub use log::{LogArgs, LogFormat, LogSettings};
pub use nats::{NatsArgs, NatsSettings};
pub use parse::{duration, number};
pub use relay::{RelayArgs, RelaySettings};

/// One setting that cannot be used as it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The environment variable of the setting, also when it was given by its flag.
    pub setting: &'static str,
    /// What is wrong and what would be right; never the value of a secret.
    pub what: String,
}

/// The settings of a process contradict themselves or their ranges; nothing was started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct SettingsError {
    /// All that was found, in the order of the settings; at least one.
    pub problems: Vec<Problem>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings cannot be used:")?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  {}: {}", problem.setting, problem.what))
    }
}

/// Collects the problems of one [`check`].
#[derive(Debug)]
pub struct Checks {
    problems: Vec<Problem>,
}

/// Makes settings out of arguments, or reports every problem among them.
///
/// Within `make`, a setting with a problem yields a stand-in, so that the rest can be looked at too. No stand-in ever
/// leaves this function.
///
/// # Errors
///
/// When at least one problem was found.
pub fn check<T>(make: impl FnOnce(&mut Checks) -> T) -> Result<T, SettingsError> {
    let mut checks = Checks { problems: Vec::new() };
    let settings = make(&mut checks);
    if checks.problems.is_empty() { Ok(settings) } else { Err(SettingsError { problems: checks.problems }) }
}

impl Checks {
    fn problem(&mut self, setting: &'static str, what: impl Into<String>) {
        self.problems.push(Problem { setting, what: what.into() });
    }

    /// A setting that may be absent.
    fn optional<T>(
        &mut self,
        setting: &'static str,
        raw: Option<&String>,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        parse(given(raw)?).map_err(|what| self.problem(setting, what)).ok()
    }

    /// A setting with a default, which also stands in for a value that cannot be used.
    fn or<T>(
        &mut self,
        setting: &'static str,
        raw: Option<&String>,
        default: T,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> T {
        self.optional(setting, raw, parse).unwrap_or(default)
    }
}

fn given(raw: Option<&String>) -> Option<&str> {
    raw.map(|value| value.trim()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests;
