//! A consumer whose handler can end its process, as running out of memory does, or a stack that overflows: no handler in
//! the consumer's own binary can, and no failpoint is of one turn alone.

use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use consumer::{HandlerError, Reply, Resources, Turn, handler_fn};
use shared::{
    admin::Readiness,
    broker::Broker,
    logging, pool,
    process::Shutdown,
    settings::{self, ConsumerArgs, DatabaseArgs, LogArgs, NatsArgs, Source},
};

/// How long the model thinks: others have begun by then.
const THOUGHT: Duration = Duration::from_millis(300);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    consumer: ConsumerArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[tokio::main]
async fn main() -> Result<()> {
    let cli = Cli::parse();
    let (consumer, nats, database, log) = settings::check(|checks| {
        let consumer = cli.consumer.check(checks);
        let nats = (consumer.source == Source::Nats).then(|| cli.nats.check(checks));
        (consumer, nats, cli.database.check(checks), cli.log.check(checks, "info,async_nats=warn"))
    })?;
    logging::init(&log)?;
    let shutdown = Shutdown::on_signals(consumer.drain_timeout)?;
    let pool = pool::connect(&database, &consumer.name, 8).await?;
    let broker = match nats {
        Some(nats) => Some(Broker::connect(&nats, &consumer.name).await?),
        None => None,
    };
    let readiness = Readiness::new(shutdown.stop.clone());
    let resources = Resources { pool, database, broker, readiness };
    let running = consumer::run(resources, consumer, handler_fn(answer), shutdown);
    Ok(Box::pin(running).await?)
}

async fn answer(turn: Turn) -> Result<Reply, HandlerError> {
    tokio::time::sleep(THOUGHT).await;
    if turn.messages.iter().any(|said| said.in_turn && said.content == "poison") {
        std::process::abort();
    }
    Ok(Reply::new("served"))
}
