//! One cell of the matrix: a place, what happens there, and the effect of the tool that the agent calls.

use std::pin::pin;

use anyhow::{Result, bail, ensure};
use serde_json::json;
use tests::{Process, World};
use tokio::sync::watch;
use uuid::Uuid;

use super::{
    expected::Said,
    place::{self, Harm, Place, Stage},
};
use crate::{
    load::PATIENCE,
    outside::{Asked, Outside, reply},
};

/// One cell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    pub(super) place: Place,
    pub(super) harm: Harm,
    pub(super) effect: &'static str,
}

impl Cell {
    /// Plays it. `target` is harmed; `bystander` is not.
    pub(super) async fn play(&self) -> Result<()> {
        let world = World::new().await?;
        // A lease that ends while its process stands still; the others end when the cell says so.
        let lease = if self.harm == Harm::Stop { "4 s" } else { "1 min" };
        let policy =
            format!("debounce = '0', retry_backoff = '10 ms', dispatch_timeout = '1 s', lease = '{lease}'");
        world.policy(&policy).await?;
        for conversation in ["target", "bystander"] {
            world.create_conversation(conversation).await?;
        }
        // A model call is held only where it is the place.
        let (release, gate) = watch::channel(self.place != Place::ModelCall);
        let outside = self.agent(&world, gate).await?;
        let stage = place::stage(&world, &outside, self.place, self.harm).await?;
        let successors = self.hurt(&world, &outside, &stage, release).await?;
        self.is_as_expected(&world).await?;
        self.life_goes_on(&world).await?;
        stream_is_empty(&world).await?;
        for process in stage.relay.iter().chain(&successors) {
            process.shut_down().await?;
        }
        if self.harm != Harm::Kill {
            stage.victim.shut_down().await?;
        }
        world.settled().await?;
        outside.kept(&world).await?;
        self.on_record(&outside, &world).await
    }

    /// Calls one tool in every run, and answers with the run.
    async fn agent(&self, world: &World, gate: watch::Receiver<bool>) -> Result<Outside> {
        let Self { place, harm, effect } = *self;
        Outside::open(world, move |asked: Asked| {
            let mut gate = gate.clone();
            async move {
                let first = asked.is_first_attempt() && asked.is_told("hello");
                if place == Place::BeforeClaim && harm == Harm::Cancel && first {
                    bail!("the first attempt fails");
                }
                gate.wait_for(|open| *open).await?;
                match asked.act("tool", effect, json!({ "of": "target" })).await? {
                    Some(_) => Ok(reply(asked.told("run_id")?)),
                    None => bail!("refused"),
                }
            }
        })
        .await
    }

    /// Does the harm; returns who has joined in.
    async fn hurt(
        &self,
        world: &World,
        outside: &Outside,
        stage: &Stage,
        release: watch::Sender<bool>,
    ) -> Result<Vec<Process>> {
        let victim = &stage.victim;
        let during_call = self.place == Place::ModelCall;
        let mut joined = Vec::new();
        match self.harm {
            Harm::Kill | Harm::Stop => {
                match self.harm {
                    Harm::Kill if during_call => victim.kill()?,
                    Harm::Stop if during_call => {
                        victim.freeze()?;
                        victim.frozen().await?;
                    }
                    _ => {}
                }
                let over = self.end_of_lease(world).await?;
                joined.push(place::consumer(world, outside).start()?);
                if self.place.is_of_relay() {
                    joined.push(world.relay().start()?);
                }
                if during_call {
                    // The former agent goes on when its successor works: its call is refused, or nobody takes it.
                    let again = async || Ok(outside.calls("target").len() == 2);
                    world.eventually_within(PATIENCE, "the model is called again", again).await?;
                    release.send_replace(true);
                }
                if self.harm == Harm::Stop {
                    self.outlast(world, &over).await?;
                    victim.thaw()?;
                }
            }
            Harm::Delete | Harm::Cancel | Harm::Submit => {
                self.user_acts(world, || if during_call { Ok(()) } else { victim.thaw() }).await?;
                if self.place.is_of_relay() {
                    joined.push(place::consumer(world, outside).start()?);
                }
            }
        }
        release.send_replace(true);
        Ok(joined)
    }

    /// When the victim's lease is over at the latest: of a killed one, which has no clock any more, now. Leases to come
    /// outlast a busy machine.
    async fn end_of_lease(&self, world: &World) -> Result<String> {
        let over = sqlx::query_scalar("select (clock_timestamp() + lease)::text from agents");
        let over = over.fetch_one(&world.pool).await?;
        world.policy("lease = '1 min'").await?;
        if self.harm == Harm::Kill {
            let expire = "update agent_lanes set wake_at = clock_timestamp() where state = 'running'";
            sqlx::query(expire).execute(&world.pool).await?;
        }
        Ok(over)
    }

    /// Waits until the victim's lease is over, and others have done its work where they can.
    async fn outlast(&self, world: &World, end_of_lease: &str) -> Result<()> {
        let over = async || {
            let over = sqlx::query_scalar("select clock_timestamp() > $1::timestamptz").bind(end_of_lease);
            Ok(over.fetch_one(&world.pool).await?)
        };
        world.eventually_within(PATIENCE, "the lease is over", over).await?;
        if self.commits_in_spite_of_all() { Ok(()) } else { self.is_as_expected(world).await }
    }

    /// The user acts while the victim stands still; it goes on when that is done, or waits for a lock of the victim's.
    async fn user_acts(&self, world: &World, thaw: impl FnOnce() -> Result<()>) -> Result<()> {
        const WAITS: &str = "select count(*) from pg_stat_activity where datname = current_database()
            and application_name = 'test' and wait_event_type = 'Lock'";
        let mut action = pin!(self.action(world));
        let waits = async || Ok(world.count(WAITS).await? > 0);
        tokio::select! {
            done = &mut action => {
                done?;
                return thaw();
            }
            waits = world.eventually("the user waits", waits) => waits?,
        }
        thaw()?;
        action.await
    }

    async fn action(&self, world: &World) -> Result<()> {
        match self.harm {
            Harm::Kill | Harm::Stop => Ok(()),
            Harm::Submit => world.submit("target", "another").await.map(drop),
            Harm::Delete => {
                let deletion = sqlx::query("delete from conversations where id = 'target'");
                ensure!(deletion.execute(&world.pool).await?.rows_affected() == 1);
                Ok(())
            }
            Harm::Cancel => {
                let turn: Uuid =
                    sqlx::query_scalar("select turn_id from agent_outbox where turn_id is not null")
                        .fetch_one(&world.pool)
                        .await?;
                let cancelled: String =
                    sqlx::query_scalar("select cancel_turn($1)").bind(turn).fetch_one(&world.pool).await?;
                let over = self.outcomes() == [Said::Reply];
                ensure!((cancelled == "nothing_to_cancel") == over, "{cancelled}");
                Ok(())
            }
        }
    }

    async fn is_as_expected(&self, world: &World) -> Result<()> {
        let expected = self.outcomes();
        let said = async || Ok(world.outcomes("target").await?.len() >= expected.len());
        world.eventually_within(PATIENCE, "target is answered", said).await?;
        let outcomes = world.outcomes("target").await?;
        let said: Vec<&str> = outcomes
            .iter()
            .map(|said| said.error.as_ref().map_or("reply", |error| error["kind"].as_str().unwrap_or("")))
            .collect();
        let expected: Vec<&str> = expected
            .iter()
            .map(|said| match said {
                Said::Reply => "reply",
                Said::Error(kind) => kind,
            })
            .collect();
        ensure!(said == expected, "the user sees {said:?} instead of {expected:?}: {outcomes:?}");
        for said in outcomes.iter().filter(|said| said.role == "assistant") {
            ensure!(said.run_id.map(|run| run.to_string()).as_ref() == Some(&said.content), "{said:?}");
        }
        for error in outcomes.iter().filter_map(|said| said.error.as_ref()) {
            let named = error["operations"].as_array().map_or(0, Vec::len);
            ensure!((named > 0) == self.place.has_operation(), "{error}");
        }
        Ok(())
    }

    /// Both conversations are served by whoever is there now, and what was said stays as it was.
    async fn life_goes_on(&self, world: &World) -> Result<()> {
        let before = world.outcomes("target").await?;
        world.submit("bystander", "aside").await?;
        if self.harm != Harm::Delete {
            world.submit("target", "again").await?;
        }
        let busy = "select count(*) from agent_lanes where state <> 'idle'";
        world.eventually_within(PATIENCE, "all is done", async || Ok(world.count(busy).await? == 0)).await?;
        let bystander = world.outcomes("bystander").await?;
        ensure!(bystander.len() == 1 && bystander[0].role == "assistant", "{bystander:?}");
        let after = world.outcomes("target").await?;
        let again = usize::from(self.harm != Harm::Delete);
        ensure!(after.len() == before.len() + again && after.starts_with(&before), "{before:?} {after:?}");
        ensure!(after[before.len()..].iter().all(|said| said.role == "assistant"), "{after:?}");
        Ok(())
    }

    async fn on_record(&self, outside: &Outside, world: &World) -> Result<()> {
        if self.harm == Harm::Delete {
            let left = "select (select count(*) from messages where conversation_id = 'target')
                + (select count(*) from agent_outbox where conversation_id = 'target')
                + (select count(*) from agent_lanes where conversation_id = 'target')
                + (select count(*) from agent_runs where conversation_id = 'target')
                + (select count(*) from operations where conversation_id = 'target')
                + (select count(*) from conversations where id = 'target')";
            ensure!(world.count(left).await? == 0, "something of the conversation is left");
            return Ok(());
        }
        let runs: i64 = sqlx::query_scalar(
            "select count(*) from agent_runs where conversation_id = 'target' and turn_id = (
                select turn_id from messages where conversation_id = 'target' and role <> 'user'
                order by seq limit 1)",
        )
        .fetch_one(&world.pool)
        .await?;
        ensure!(runs == self.runs(), "{runs} runs instead of {}", self.runs());
        let calls = outside.calls("target");
        let refused = outside.refusals(calls[0]);
        match (self.place, self.harm) {
            // Whoever has lost its lane is told so, and has done nothing.
            (Place::ModelCall | Place::BeforeOpStart, Harm::Stop | Harm::Cancel) => {
                ensure!(refused == [409], "{refused:?}");
            }
            (Place::AfterBegin, Harm::Cancel) => {}
            // It knows by its own clock that its lease is over: the model is not called for nothing.
            (Place::AfterBegin, Harm::Stop) => ensure!(calls.len() == 2, "{calls:?}"),
            _ => ensure!(refused.is_empty(), "{refused:?}"),
        }
        Ok(())
    }
}

async fn stream_is_empty(world: &World) -> Result<()> {
    let empty = async || {
        let mut stream = world.jetstream().get_stream(&world.stream).await?;
        Ok(stream.info().await?.state.messages == 0)
    };
    world.eventually_within(PATIENCE, "the stream is empty", empty).await
}
