//! The commands of the `relay` binary: arguments in, a few calls of the libraries, lines out.
//!
//! Each writes to the writer that it is given, for people or with `--json` for programs, and returns why it could not;
//! the exit code follows from that in `main`.

use std::io::{self, Write};

use shared::{
    actions::ActionError,
    admin::AdminError,
    broker::BrokerError,
    ids::TurnId,
    logging::LoggingError,
    pool::{self, ConnectError},
    process::{TaskFailure, UsageError},
    schema::{self, SchemaError},
    settings::{self, DatabaseArgs, SettingsError},
    sqlstate,
};
use sqlx::PgPool;

mod agent;
mod failed;
mod migrate;
mod output;
mod prune;
mod requeue;
mod retry;
mod run;
mod status;
mod submit;

/// Claims what users wrote and publishes it to the agents; and the tools around it.
///
/// Settings come from flags or from the environment. Exit codes: 0 fine, 1 failure, 64 wrong usage or configuration.
#[derive(Debug, clap::Parser)]
#[command(name = "relay", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Relay turns from Postgres to NATS until told to stop.
    Run(Box<run::RunArgs>),
    /// Bring the database to this version's schema and, with `NATS_URL`, make the stream.
    Migrate(Box<migrate::MigrateArgs>),
    /// Show or change the policy of agents.
    Agent(agent::AgentArgs),
    /// Submit a user's message, or many from a file.
    Submit(submit::SubmitArgs),
    /// Show the pipeline, or one conversation.
    Status(status::StatusArgs),
    /// Show the turns that failed, or why one of them did.
    Failed(failed::FailedArgs),
    /// Answer a failed turn again.
    Retry(retry::RetryArgs),
    /// Stop a turn: its user sees that it was cancelled.
    Cancel(retry::CancelArgs),
    /// Answer all failed turns again.
    Requeue(requeue::RequeueArgs),
    /// Delete the records of what was settled long ago, but never messages.
    Prune(prune::PruneArgs),
}

impl Cli {
    pub(crate) async fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        match self.command {
            Command::Run(args) => run::run(&args).await,
            Command::Migrate(args) => migrate::run(&args, out).await,
            Command::Agent(args) => agent::run(args, out).await,
            Command::Submit(args) => submit::run(args, out).await,
            Command::Status(args) => status::run(args, out).await,
            Command::Failed(args) => failed::run(args, out).await,
            Command::Retry(args) => retry::retry(args, out).await,
            Command::Cancel(args) => retry::cancel(args, out).await,
            Command::Requeue(args) => requeue::run(args, out).await,
            Command::Prune(args) => prune::run(args, out).await,
        }
    }
}

/// Why a command did not do all that it was asked to. What says enough by itself is quoted as it is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("{0}")]
    Settings(#[from] SettingsError),
    #[error("{0}")]
    Usage(#[from] UsageError),
    #[error("{0}")]
    Logging(#[from] LoggingError),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("{0}")]
    Admin(#[from] AdminError),
    #[error("{0}")]
    Connect(#[from] ConnectError),
    #[error("{0}")]
    Schema(#[from] SchemaError),
    #[error("{0}")]
    Broker(#[from] BrokerError),
    #[error("{0}")]
    Task(#[from] TaskFailure),
    #[error("{0}")]
    Submit(#[from] submit::Refused),
    #[error("{0}")]
    Action(#[from] ActionError),
    #[error("a statement failed: {}", sqlstate::safe_text(.0))]
    Statement(#[from] sqlx::Error),
    #[error("cannot read {0}")]
    Input(String, #[source] io::Error),
    #[error("cannot write")]
    Output(#[from] io::Error),
    /// All was tried; the text says what is left.
    #[error("{0}")]
    Unfinished(String),
}

impl CommandError {
    /// There is no turn of this id, and where to find one.
    fn no_turn(turn: TurnId) -> Self {
        Self::Unfinished(format!(
            "{}: {turn}. `relay failed list` names the failed turns, `relay status CONVERSATION` the present one",
            ActionError::TurnNotFound
        ))
    }
}

/// A connection for one command, to a database that this version knows.
async fn connect(args: &DatabaseArgs, command: &str) -> Result<PgPool, CommandError> {
    let database = settings::check(|checks| args.check(checks))?;
    let pool = pool::connect(&database, command, 1).await?;
    schema::require_current(&pool).await?;
    Ok(pool)
}

/// A turn's id, as an argument.
fn turn_id(text: &str) -> Result<TurnId, &'static str> {
    text.parse()
        .map_err(|_| "TURN is a turn's id (a UUID), as `relay failed list` and `relay status` print it")
}
