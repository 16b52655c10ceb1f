//! The `consumer` binary: one consumer, from its settings to its last commit.

use std::process::ExitCode;

use consumer::{Resources, handlers::BuiltIn};
use shared::{
    admin::{self, Readiness},
    broker::Broker,
    logging, pool,
    process::{self, Shutdown, Tasks, UsageError},
    schema,
    settings::{self, AdminArgs, ConsumerArgs, DatabaseArgs, LogArgs, NatsArgs, Source},
};

/// Begins, loads, finishes and renews at once; more sessions would only wait for each other.
const CONNECTIONS: u32 = 8;
/// What is logged unless it is said otherwise. The broker's events are logged as what they mean here.
const LOG: &str = "info,async_nats=warn";

/// Runs the turns of an agent and commits what comes of them.
///
/// Settings come from flags or from the environment. Exit codes: 0 fine, 1 failure, 64 wrong usage or configuration.
#[derive(Debug, clap::Parser)]
#[command(name = "consumer", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Run turns until told to stop.
    Run(Box<RunArgs>),
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    #[command(flatten)]
    consumer: ConsumerArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    admin: AdminArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli: Cli = match process::arguments() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let Command::Run(args) = cli.command;
    run(&args).await.map_or_else(|error| process::fail(&*error), |()| ExitCode::SUCCESS)
}

async fn run(args: &RunArgs) -> anyhow::Result<()> {
    let (consumer, nats, database, admin, log) = settings::check(|checks| {
        let consumer = args.consumer.check(checks);
        let nats = (consumer.source == Source::Nats).then(|| args.nats.check(checks));
        let database = args.database.check(checks);
        (consumer, nats, database, args.admin.check(checks, 9465), args.log.check(checks, LOG))
    })?;
    logging::init(&log)?;
    let shutdown = Shutdown::on_signals(consumer.drain_timeout)?;
    let listener = admin::bind(&admin).await?;
    let (handler, routes) = BuiltIn::new(&consumer.handler, listener.local_addr()?)
        .map_err(|error| UsageError(error.to_string()))?;
    let pool = pool::connect(&database, &consumer.name, CONNECTIONS).await?;
    schema::require_current(&pool).await?;
    let broker = match nats {
        Some(nats) => Some(Broker::connect(&nats, &consumer.name).await?),
        None => None,
    };
    let readiness = Readiness::new(shutdown.stop.clone());

    let mut tasks = Tasks::new(shutdown.clone());
    tasks.attend("admin", |end| admin::serve(listener, readiness.clone(), routes, end));
    let resources = Resources { pool, database, broker, readiness };
    tasks.work("consumer", consumer::run(resources, consumer, handler, shutdown));
    Ok(tasks.join().await?)
}
