//! `relay migrate`: the schema, and the stream where NATS is named.

use std::io::Write;

use shared::{
    broker::Broker,
    ids::AgentName,
    policy, pool, schema,
    settings::{self, DatabaseArgs, NatsArgs},
    topology,
};

use super::{CommandError, output};

#[derive(Debug, clap::Args)]
pub(super) struct MigrateArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

pub(super) async fn run(args: &MigrateArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let (database, nats) = settings::check(|checks| (args.database.check(checks), args.nats.check(checks)))?;
    let pool = pool::connect(&database, "relay migrate", 1).await?;
    schema::migrate(&pool).await?;
    if !args.json {
        writeln!(out, "the database is at the newest schema")?;
    }
    let mut differences = Vec::new();
    if args.nats.name_a_server() {
        let broker = Broker::connect(&nats, "relay migrate").await?;
        let agents: Vec<_> = policy::read(&pool).await?.keys().cloned().collect();
        differences = topology::ensure(&broker, &agents).await?;
        if !args.json {
            let names: Vec<&str> = agents.iter().map(AgentName::as_str).collect();
            writeln!(out, "stream {} is there, with a consumer each for: {}", nats.stream, names.join(", "))?;
        }
    } else if !args.json {
        writeln!(out, "no stream was made: NATS_URL is not set")?;
    }
    let differences: Vec<String> = differences.iter().map(ToString::to_string).collect();
    if args.json {
        output::json(
            out,
            &serde_json::json!({ "stream": args.nats.name_a_server().then_some(nats.stream), "differences": differences }),
        )?;
    } else {
        differences.iter().try_for_each(|difference| writeln!(out, "left as it is: {difference}"))?;
    }
    Ok(())
}
