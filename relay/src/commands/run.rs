//! `relay run`: one relay, from its settings to its last acknowledgement.

use relay::Resources;
use shared::{
    admin::{self, Readiness, Router},
    broker::Broker,
    logging, pool,
    process::{Shutdown, Tasks},
    schema,
    settings::{self, AdminArgs, DatabaseArgs, LogArgs, NatsArgs, RelayArgs},
};

use super::CommandError;

/// What is logged unless it is said otherwise. The broker's events are logged as what they mean here.
const LOG: &str = "info,async_nats=warn";
/// Claims, publishes and looks after at once; more sessions would only wait for each other.
const CONNECTIONS: u32 = 8;

#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    relay: RelayArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    admin: AdminArgs,
    #[command(flatten)]
    log: LogArgs,
}

pub(super) async fn run(args: &RunArgs) -> Result<(), CommandError> {
    let (relay, database, nats, admin, log) = settings::check(|checks| {
        (
            args.relay.check(checks),
            args.database.check(checks),
            args.nats.check(checks),
            args.admin.check(checks, 9464),
            args.log.check(checks, LOG),
        )
    })?;
    logging::init(&log)?;
    let shutdown = Shutdown::on_signals(relay.drain_timeout).map_err(CommandError::Signals)?;
    let listener = admin::bind(&admin).await?;
    let pool = pool::connect(&database, &relay.name, CONNECTIONS).await?;
    schema::require_current(&pool).await?;
    let broker = Broker::connect(&nats, &relay.name).await?;
    let readiness = Readiness::new(shutdown.stop.clone());

    let mut tasks = Tasks::new(shutdown.clone());
    tasks.attend("admin", |end| admin::serve(listener, readiness.clone(), Router::new(), end));
    tasks.work("relay", relay::run(Resources { pool, broker, readiness }, relay, shutdown));
    Ok(tasks.join().await?)
}
