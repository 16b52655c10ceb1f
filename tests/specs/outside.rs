//! The world outside: an agent behind HTTP with its model and its tools. It lives in the test process, so it survives every
//! consumer, goes on when its caller is gone, and remembers what it was asked and what it did to the world.

mod asked;

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Result, ensure};
use axum::{
    Json, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::json;
use sqlx::PgPool;
use tests::{World, world::Launch};
use tokio::net::TcpListener;
use uuid::Uuid;

pub(crate) use self::asked::Asked;

/// What was committed, kept also when its conversation is deleted.
const AUDIT: &str = "
    create table audit_runs (run_id uuid, attempt int);
    create table audit_operations (id uuid, run_id uuid, turn_id uuid, effect text, status text);
    create function audit_run() returns trigger language plpgsql as $$
    begin
        insert into audit_runs values (new.run_id, new.attempt);
        return null;
    end $$;
    create function audit_operation() returns trigger language plpgsql as $$
    begin
        insert into audit_operations values (new.id, new.run_id, new.turn_id, new.effect, new.status);
        return null;
    end $$;
    create trigger audit after update on agent_lanes for each row
        when (new.state = 'running' and old.state <> 'running') execute function audit_run();
    create trigger audit after insert or update of status on operations for each row
        execute function audit_operation();";

/// One agent, its model, its tools, and its memory.
#[derive(Clone)]
pub(crate) struct Outside(Arc<Inner>);

struct Inner {
    pool: PgPool,
    client: reqwest::Client,
    url: String,
    memory: Mutex<Memory>,
}

/// What happened outside.
#[derive(Debug, Default)]
struct Memory {
    at_work: usize,
    calls: Vec<(String, Uuid)>,
    refused: Vec<(Uuid, u16)>,
    hung_up_on: HashSet<Uuid>,
    effects: Vec<ToolEffect>,
    broken: Vec<String>,
}

/// Something that a tool did to the world.
#[derive(Debug, Clone)]
pub(crate) struct ToolEffect {
    pub(crate) turn_id: Uuid,
    pub(crate) run_id: Uuid,
    pub(crate) effect: String,
    /// What is equal for equal calls.
    pub(crate) call: String,
    pub(crate) key: String,
}

pub(crate) fn reply(content: &str) -> Response {
    Json(json!({ "reply": { "content": content } })).into_response()
}

impl Outside {
    /// An agent on a port of its own that answers so.
    pub(crate) async fn open<A, F>(world: &World, answer: A) -> Result<Self>
    where
        A: Fn(Asked) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response>> + Send + 'static,
    {
        sqlx::raw_sql(AUDIT).execute(&world.pool).await?;
        let _already_installed = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]);
        let client = client.timeout(crate::load::PATIENCE).build()?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("http://{}/turns", listener.local_addr()?);
        let (pool, memory) = (world.pool.clone(), Mutex::default());
        let outside = Self(Arc::new(Inner { pool, client, url, memory }));
        let asked = outside.clone();
        let ask = async move |Json(turn)| {
            let (asked, answer) = (Asked { turn, outside: asked.clone() }, answer.clone());
            let mut connection = Connection(Some(asked.clone()));
            // A task of its own: an agent goes on when the connection to it is gone.
            let answered = tokio::spawn(async move {
                let _at_work = AtWork::start(&asked.outside);
                asked.call_model().await?;
                answer(asked).await
            });
            let failed = |error: String| (StatusCode::SERVICE_UNAVAILABLE, error).into_response();
            let answered = answered.await;
            connection.0 = None;
            match answered {
                Ok(answered) => answered.unwrap_or_else(|error| failed(format!("{error:#}"))),
                Err(error) => failed(error.to_string()),
            }
        };
        let routes = Router::new().route("/turns", post(ask));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Ok(outside)
    }

    /// Lets a consumer ask this agent.
    pub(crate) fn asked_by<'a>(&self, consumer: Launch<'a>) -> Launch<'a> {
        consumer.env("HANDLER", "http").env("HANDLER_URL", &self.0.url)
    }

    /// The runs in which the model was called for a conversation, in order.
    pub(crate) fn calls(&self, conversation: &str) -> Vec<Uuid> {
        let memory = self.memory();
        memory.calls.iter().filter(|(of, _)| of == conversation).map(|(_, run)| *run).collect()
    }

    /// With which status a run was refused an operation.
    pub(crate) fn refusals(&self, run: Uuid) -> Vec<u16> {
        self.memory().refused.iter().filter(|(of, _)| *of == run).map(|(_, status)| *status).collect()
    }

    /// The consumer has closed the connection of this run before it was answered.
    pub(crate) fn was_hung_up_on(&self, run: Uuid) -> bool {
        self.memory().hung_up_on.contains(&run)
    }

    /// Waits until the agent has nothing in hand, then fails unless the world outside is as it was promised to be.
    pub(crate) async fn kept(&self, world: &World) -> Result<()> {
        world.eventually("the agent has ended its work", async || Ok(self.memory().at_work == 0)).await?;
        let (conversations, runs): (Vec<String>, Vec<Uuid>) = {
            let memory = self.memory();
            ensure!(memory.broken.is_empty(), "{:?}", memory.broken);
            let runs: HashSet<Uuid> = memory.calls.iter().map(|(_, run)| *run).collect();
            ensure!(runs.len() == memory.calls.len(), "a run called the model twice: {:?}", memory.calls);
            one_run_and_one_key(&memory.effects)?;
            memory.calls.iter().cloned().unzip()
        };
        let unrecorded: i64 = sqlx::query_scalar(
            "select count(*) from unnest($1::text[], $2::uuid[]) as called (conversation, run)
             where exists (select from conversations where id = called.conversation)
               and not exists (select from agent_runs where run_id = called.run)",
        )
        .bind(conversations)
        .bind(runs)
        .fetch_one(&world.pool)
        .await?;
        ensure!(unrecorded == 0, "{unrecorded} runs called the model and are not on record");
        let unanswered = world
            .count(
                "select count(*) from messages asked where role = 'user' and deleted_at is null and 1 <> (
                    select count(*) from agent_outbox o join messages said on said.turn_id = o.turn_id
                    where o.message_id = asked.id and said.role <> 'user')",
            )
            .await?;
        ensure!(unanswered == 0, "{unanswered} messages were not answered exactly once");
        Ok(())
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Side effects of a turn come from one run, once each; a repeated call has the key that it had before.
fn one_run_and_one_key(effects: &[ToolEffect]) -> Result<()> {
    let (mut runs, mut keys) = (HashMap::new(), HashMap::new());
    for (number, done) in effects.iter().enumerate() {
        let key = keys.entry((done.turn_id, &done.call)).or_insert(&done.key);
        ensure!(*key == &done.key, "one call, two keys: {effects:?}");
        if done.effect == "side_effect" {
            ensure!(*runs.entry(done.turn_id).or_insert(done.run_id) == done.run_id, "two runs: {effects:?}");
            ensure!(!effects[..number].iter().any(|before| before.key == done.key), "doubled: {effects:?}");
        }
    }
    Ok(())
}

/// A connection on which a run has not been answered yet.
struct Connection(Option<Asked>);

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(asked) = &self.0 else { return };
        if let Ok(run) = asked.id("run_id") {
            asked.outside.memory().hung_up_on.insert(run);
        }
    }
}

/// A task of the agent.
struct AtWork(Outside);

impl AtWork {
    fn start(outside: &Outside) -> Self {
        outside.memory().at_work += 1;
        Self(outside.clone())
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.memory().at_work -= 1;
    }
}
