//! What concurrent specs share: a load that goes on whatever happens to the servers, and a witness of what handlers saw.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use consumer::{Reply, Turn, TurnHandler, handler_fn};
use sqlx::PgPool;
use tests::World;
use tokio::{
    task::yield_now,
    time::{sleep, timeout},
};

/// For everything that waits on servers which come back, on a machine that builds at the same time.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// Contents of the messages that are to be answered.
pub(crate) fn said(turn: &Turn) -> Vec<String> {
    turn.messages.iter().filter(|m| m.in_turn).map(|m| m.content.clone()).collect()
}

/// Messages numbered from 0 in each of some conversations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) conversations: usize,
    pub(crate) messages: usize,
}

impl Load {
    pub(crate) fn conversation(number: usize) -> String {
        format!("c{number}")
    }

    /// Makes the conversations.
    pub(crate) async fn prepare(self, world: &World) -> Result<()> {
        for number in 0..self.conversations {
            world.create_conversation(&Self::conversation(number)).await?;
        }
        Ok(())
    }

    /// Submits the messages of these numbers to every conversation, a round at a time, each until it is taken.
    pub(crate) async fn submit(self, world: &World, numbers: std::ops::Range<usize>) -> Result<()> {
        for number in numbers {
            for conversation in 0..self.conversations {
                let conversation = Self::conversation(conversation);
                submit_until_taken(&world.pool, &conversation, number).await?;
            }
        }
        Ok(())
    }

    /// Submits a third, then a third while `harm` is done, then the rest, and waits until all is answered.
    pub(crate) async fn around(self, world: &World, harm: impl Future<Output = Result<()>>) -> Result<()> {
        let third = self.messages / 3;
        self.submit(world, 0..third).await?;
        tokio::try_join!(self.submit(world, third..2 * third), harm)?;
        self.submit(world, 2 * third..self.messages).await?;
        self.answered(world).await
    }

    /// Waits until nothing is left to do, and fails unless every message has its reply and every promise was kept.
    pub(crate) async fn answered(self, world: &World) -> Result<()> {
        let open = "select count(*) from agent_outbox where status in ('pending', 'processing')";
        world
            .eventually_within(PATIENCE, "all is answered", async || Ok(world.count(open).await? == 0))
            .await?;
        world.settled().await?;
        let done = world.count("select count(*) from agent_outbox where status = 'done'").await?;
        ensure!(done == i64::try_from(self.conversations * self.messages)?, "{done} messages have a reply");
        Ok(())
    }
}

/// The message's id makes a second try harmless.
async fn submit_until_taken(pool: &PgPool, conversation: &str, number: usize) -> Result<()> {
    let submitted = async {
        loop {
            let submit = sqlx::query("select submit_message($1, $2, $3)")
                .bind(format!("{conversation}-{number}"))
                .bind(conversation)
                .bind(number.to_string());
            match submit.execute(pool).await {
                Ok(_) => return Ok(()),
                Err(sqlx::Error::Database(error))
                    if error.code().is_some_and(|code| code.starts_with("OB")) =>
                {
                    bail!(error)
                }
                // The server is away, and comes back.
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    timeout(PATIENCE, submitted).await?
}

/// Fails if any message took more than one attempt, or any run ended otherwise than with its reply.
pub(crate) async fn no_attempt_was_lost(world: &World) -> Result<()> {
    let repeated = world.count("select count(*) from agent_outbox where attempts <> 1").await?;
    let unlucky = world.count("select count(*) from agent_runs where outcome <> 'done'").await?;
    ensure!(
        repeated == 0 && unlucky == 0,
        "{repeated} rows took other than one attempt, {unlucky} runs failed"
    );
    Ok(())
}

/// Sees every run that a handler is called for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Witness(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    present: HashSet<String>,
    overlaps: Vec<String>,
    calls: usize,
    said: BTreeMap<String, Vec<String>>,
}

/// A handler at work in a conversation; dropped handlers leave as well.
struct Present {
    witness: Witness,
    conversation: String,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.witness.seen().present.remove(&self.conversation);
    }
}

impl Witness {
    /// A handler that answers with what the turn says, and gives others the chance to do so at the same time.
    pub(crate) fn handler(&self) -> impl TurnHandler + use<> {
        let witness = self.clone();
        handler_fn(move |turn: Turn| {
            let witness = witness.clone();
            async move {
                let _present = witness.enter(&turn);
                for _ in 0..50 {
                    yield_now().await;
                }
                Ok(Reply::new(said(&turn).join("+")))
            }
        })
    }

    fn enter(&self, turn: &Turn) -> Present {
        let conversation = turn.conversation_id.as_str().to_owned();
        let mut seen = self.seen();
        seen.calls += 1;
        if !seen.present.insert(conversation.clone()) {
            seen.overlaps.push(conversation.clone());
        }
        seen.said.entry(conversation.clone()).or_default().extend(said(turn));
        drop(seen);
        Present { witness: self.clone(), conversation }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often a handler was called.
    pub(crate) fn calls(&self) -> usize {
        self.seen().calls
    }

    /// Fails unless each conversation was seen by one handler at a time, each message once, in order.
    pub(crate) fn saw_all_in_order(&self, load: Load) -> Result<()> {
        let seen = self.seen();
        ensure!(seen.overlaps.is_empty(), "two handlers at once in {:?}", seen.overlaps);
        let expected: Vec<String> = (0..load.messages).map(|number| number.to_string()).collect();
        for conversation in (0..load.conversations).map(Load::conversation) {
            let said = seen.said.get(&conversation);
            ensure!(said == Some(&expected), "the handlers of {conversation} saw {said:?}");
        }
        Ok(())
    }
}
