//! What a process logs, and how.

use tracing_subscriber::EnvFilter;

use super::{Checks, parse};

/// Flags and variables of [`LogSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Logging")]
pub struct LogArgs {
    /// Form of the log on stderr [default: text].
    #[arg(id = "log-format", long, env = "LOG_FORMAT", value_name = "text|json")]
    format: Option<String>,
    /// What is logged: a level, or levels by module, as in info,sqlx=warn.
    #[arg(id = "rust-log", long, env = "RUST_LOG", value_name = "FILTER")]
    filter: Option<String>,
}

/// What a process logs, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// The form of a line.
    pub format: LogFormat,
    /// Directives of tracing-subscriber's `EnvFilter`, known to parse.
    pub filter: String,
}

/// The form of a line of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line, for collectors.
    Json,
}

impl LogArgs {
    /// Checks form and filter; without a filter it is `default_filter`.
    pub fn check(&self, checks: &mut Checks, default_filter: &str) -> LogSettings {
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        let filter = |given: &str| match EnvFilter::try_new(given) {
            Ok(_) => Ok(given.to_owned()),
            Err(error) => Err(format!("is no filter of log lines: {error}")),
        };
        LogSettings {
            format: checks.or("LOG_FORMAT", self.format.as_ref(), LogFormat::Text, parse::choice(&formats)),
            filter: checks.or("RUST_LOG", self.filter.as_ref(), default_filter.to_owned(), filter),
        }
    }
}
