//! `relay status`: what the pipeline does now, or what one conversation is waiting for.

use std::io::Write;

use shared::{
    ids::ConversationId,
    settings::{self, DatabaseArgs},
};

use super::{CommandError, connect, output};

mod conversation;
mod pipeline;
mod sql;
mod waits;

/// Characters of a message that are shown.
const SHOWN: usize = 200;

#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// Show this conversation, with the beginnings of its messages; without one, the pipeline.
    conversation: Option<ConversationId>,
    /// Newest messages and runs of the conversation that are shown, at most: 1 to 1000.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10,
        requires = "conversation",
        value_parser = settings::number(1..=1000_u16)
    )]
    last: u16,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

pub(super) async fn run(args: StatusArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay status").await?;
    let mut connection = pool.acquire().await?;
    let Some(id) = args.conversation else {
        let pipeline = pipeline::read(&mut connection).await?;
        return if args.json { Ok(output::json(out, &pipeline)?) } else { pipeline.print(out) };
    };
    let Some(page) = conversation::read(&mut connection, &id, args.last.into()).await? else {
        return Err(CommandError::Unfinished(format!(
            "there is no conversation {}",
            output::shown(id.as_str(), SHOWN)
        )));
    };
    if args.json { Ok(output::json(out, &page)?) } else { page.print(out) }
}
