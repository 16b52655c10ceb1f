//! What users and operators do to turns and messages: each action does what it says, once, whatever it races with.
//!
//! Handlers ask the spec what to do, so a spec holds every turn in its hand; waiters for one lock are let through in the
//! order that the spec wants.

mod cancel;
mod commands;
mod deletion;
mod flight;
mod prune;
mod races;
mod read;
mod requeue;
mod retry;

use anyhow::{Context, Result, bail};
use consumer::{HandlerError, Reply, Turn, TurnHandler, handler_fn};
use shared::{
    actions::{self, ActionError, Cancelled, Deleted, Retried},
    claim::{self, Claim, Claimed},
    ids::{AgentName, ConversationId, MessageId, TurnId},
    settings::Source,
    settle::{self, Cause, Settled},
};
use sqlx::{PgConnection, PgPool};
use tests::{Local, World};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::load::PATIENCE;

/// Leases outlive a busy machine, and a cancellation is heard soon.
const POLICY: &str = "debounce = '0', retry_backoff = '0', lease = '3 s'";

async fn world() -> Result<World> {
    let world = World::new().await?;
    world.policy(POLICY).await?;
    Ok(world)
}

/// A turn whose handler waits for the spec.
struct Call {
    turn: Turn,
    answer: oneshot::Sender<Result<Reply, HandlerError>>,
}

impl Call {
    fn reply(self, content: &str) {
        // Nobody listens where the run was stopped.
        let _ = self.answer.send(Ok(Reply::new(content)));
    }

    fn fail(self, error: HandlerError) {
        let _ = self.answer.send(Err(error));
    }

    /// Contents of the messages that are to be answered.
    fn said(&self) -> Vec<String> {
        crate::load::said(&self.turn)
    }

    /// All that the handler was given.
    fn read(&self) -> Vec<&str> {
        self.turn.messages.iter().map(|message| message.content.as_str()).collect()
    }

    /// Waits until the handler was told to stop.
    async fn cancelled(&self) -> Result<()> {
        timeout(PATIENCE, self.turn.cancelled.cancelled()).await.context("the handler was not stopped")
    }
}

/// The spec's end of the handlers.
struct Calls(mpsc::UnboundedReceiver<Call>);

impl Calls {
    /// The next turn that is begun.
    async fn next(&mut self) -> Result<Call> {
        timeout(PATIENCE, self.0.recv()).await.context("no turn was begun")?.context("no handler")
    }

    /// Fails if a turn was begun that nobody waited for.
    fn none(&mut self) -> Result<()> {
        match self.0.try_recv() {
            Ok(call) => bail!("a turn was begun: {:?}", call.said()),
            Err(_) => Ok(()),
        }
    }
}

/// A handler that asks the spec.
fn directed() -> (impl TurnHandler, Calls) {
    let (calls, called) = mpsc::unbounded_channel();
    let handler = handler_fn(move |turn: Turn| {
        let calls = calls.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            let _ = calls.send(Call { turn, answer });
            answered.await.unwrap_or_else(|_| Err(HandlerError::fatal("the spec has ended")))
        }
    });
    (handler, Calls(called))
}

/// A consumer whose handler asks the spec, and a relay where the source needs one.
async fn staff(world: &World, source: Source) -> Result<(Vec<Local>, Calls)> {
    let (handler, calls) = directed();
    let mut staff = vec![world.local_consumer(world.consumer_settings(source), handler).await?];
    if source == Source::Nats {
        staff.push(world.local_relay().await?);
    }
    Ok((staff, calls))
}

fn conversation(id: &str) -> Result<ConversationId> {
    Ok(ConversationId::new(id)?)
}

/// Makes a conversation with these messages, and returns their ids.
async fn talk(world: &World, conversation: &str, contents: &[&str]) -> Result<Vec<String>> {
    world.create_conversation(conversation).await?;
    let mut ids = Vec::new();
    for content in contents {
        ids.push(world.submit(conversation, content).await?);
    }
    Ok(ids)
}

/// Claims the one lane that is due, for a consumer that is the spec itself (`running`), or for a broker (`queued`).
async fn claim_one(world: &World, worker: Option<&str>) -> Result<Claimed> {
    let agents = [AgentName::default()];
    let claims = claim::claim(&world.pool, Claim { batch: 10, agents: Some(&agents), worker }).await?;
    let mut turns = claims.turns.into_iter();
    match (turns.next(), turns.next()) {
        (Some(turn), None) => Ok(turn),
        (first, second) => bail!("not exactly one turn was due: {first:?} {second:?}"),
    }
}

async fn settle(pool: &PgPool, claimed: &Claimed, retryable: bool) -> Result<Settled> {
    let cause = Cause::Handler { message: "told to".into(), retryable, retry_after: None };
    Ok(settle::settle(pool, &claimed.conversation_id, claimed.run_id, &cause).await?)
}

/// Makes a conversation whose one turn has failed.
async fn failed(world: &World, conversation: &str, contents: &[&str]) -> Result<(Vec<String>, TurnId)> {
    let ids = talk(world, conversation, contents).await?;
    let claimed = claim_one(world, Some("spec")).await?;
    settle(&world.pool, &claimed, false).await?;
    Ok((ids, claimed.turn_id))
}

async fn retry(world: &World, turn: TurnId) -> Result<Retried, ActionError> {
    actions::retry_turn(&mut *world.pool.acquire().await?, turn, false).await
}

async fn cancel(world: &World, turn: TurnId) -> Result<Cancelled, ActionError> {
    actions::cancel_turn(&mut *world.pool.acquire().await?, turn).await
}

async fn delete(connection: &mut PgConnection, message: &str) -> Result<Deleted> {
    Ok(actions::delete_message(connection, &MessageId::new(message)?).await?)
}

async fn delete_now(world: &World, message: &str) -> Result<Deleted> {
    delete(&mut *world.pool.acquire().await?, message).await
}

/// `role kind` of each outcome, in order.
async fn ends(world: &World, conversation: &str) -> Result<Vec<String>> {
    let outcomes = world.outcomes(conversation).await?.into_iter().map(|outcome| {
        let kind = outcome.error.as_ref().and_then(|error| error["kind"].as_str().map(str::to_owned));
        kind.map_or(outcome.role.clone(), |kind| format!("{} {kind}", outcome.role))
    });
    Ok(outcomes.collect())
}

async fn unread(world: &World, conversation: &str) -> Result<i32> {
    let unread = sqlx::query_scalar("select unread_count from conversations where id = $1");
    Ok(unread.bind(conversation).fetch_one(&world.pool).await?)
}

/// `status turn generation attempts` of each row, in order; the turn only as whether there is one.
async fn rows(world: &World, conversation: &str) -> Result<Vec<String>> {
    let rows = sqlx::query_scalar(
        "select concat_ws(' ', status, case when turn_id is null then 'free' end, generation, attempts)
         from agent_outbox where conversation_id = $1 order by id",
    );
    Ok(rows.bind(conversation).fetch_all(&world.pool).await?)
}
