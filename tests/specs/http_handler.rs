//! Agents behind HTTP: they are asked, obeyed and stopped, and what they do is recorded before they do it.

use std::{future::Future, net::Ipv4Addr, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use axum::{
    Json, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::{Value, json};
use tests::World;
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    time::timeout,
};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(30);
const POLICY: &str = "debounce = '0', retry_backoff = '10 ms', lease = '2 s'";

/// A turn as the agent gets it.
#[derive(Clone)]
struct Asked {
    turn: Value,
    client: reqwest::Client,
}

impl Asked {
    /// Records an operation.
    async fn start(&self, name: &str, effect: &str, input: Value) -> Result<(u16, Value)> {
        let call = json!({ "name": name, "effect": effect, "input": input });
        self.send(self.client.post(self.told("operations_url")?).json(&call)).await
    }

    /// Records how it ended.
    async fn end(&self, operation: &Value, how: Value) -> Result<(u16, Value)> {
        let (url, id) = (self.told("operations_url")?, operation.as_str().context("no id")?);
        self.send(self.client.patch(format!("{url}/{id}")).json(&how)).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<(u16, Value)> {
        let response = request.bearer_auth(self.told("operations_token")?).send().await?;
        Ok((response.status().as_u16(), response.json().await?))
    }

    fn told(&self, field: &str) -> Result<&str> {
        self.turn[field].as_str().with_context(|| format!("the agent is not told its {field}"))
    }
}

fn reply(content: &str) -> Response {
    Json(json!({ "reply": { "content": content } })).into_response()
}

/// An agent on a port of its own; returns its address.
async fn agent<A, F>(answer: A) -> Result<String>
where
    A: Fn(Asked) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Result<Response>> + Send + 'static,
{
    let _already_installed = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).timeout(PATIENCE).build()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = format!("http://{}/turns", listener.local_addr()?);
    let ask = async move |Json(turn)| {
        let answered = answer(Asked { turn, client: client.clone() }).await;
        answered.unwrap_or_else(|error| (StatusCode::IM_A_TEAPOT, format!("{error:#}")).into_response())
    };
    let routes = Router::new().route("/turns", post(ask));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(address)
}

/// A world whose consumer, a process that needs no relay, asks this agent, and a message for it.
async fn asked(agent: &str, policy: &str) -> Result<(World, tests::Process)> {
    let world = World::new().await?;
    world.policy(policy).await?;
    world.create_conversation("c1").await?;
    let consumer =
        world.consumer().env("SOURCE", "postgres").env("HANDLER", "http").env("HANDLER_URL", agent);
    let consumer = consumer.start()?;
    world.submit("c1", "hello").await?;
    Ok((world, consumer))
}

async fn next<T>(seen: &mut mpsc::UnboundedReceiver<T>) -> Result<T> {
    timeout(PATIENCE, seen.recv()).await?.context("the agent is gone")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_records_its_operations_before_it_acts_and_its_reply_is_committed_with_them() -> Result<()> {
    let (saw, mut seen) = mpsc::unbounded_channel();
    let url = agent(move |asked: Asked| {
        let saw = saw.clone();
        async move {
            let started = asked.start("mail", "side_effect", json!({ "to": "a" })).await?;
            let operation = started.1["id"].clone();
            let done = json!({ "status": "completed", "output": { "sent": true } });
            let ended = [
                asked.end(&operation, done.clone()).await?,
                asked.end(&operation, done.clone()).await?,
                asked.end(&json!(Uuid::nil()), done).await?,
            ];
            let _ = saw.send((asked.turn.clone(), started, ended));
            let search = json!({ "name": "search", "effect": "read", "input": "q", "output": ["r"] });
            let answer = json!({ "reply": { "content": "sent" }, "operations": [search] });
            Ok(Json(answer).into_response())
        }
    })
    .await?;
    let (world, _consumer) = asked(&url, POLICY).await?;
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(outcomes[0].content == "sent", "{outcomes:?}");

    let (turn, (status, operation), ended) = next(&mut seen).await?;
    ensure!(turn["protocol"] == 1 && turn["messages"][0]["content"] == "hello", "{turn}");
    ensure!(turn["turn_id"] == json!(outcomes[0].turn_id), "{turn}");
    ensure!(status == 201 && operation["idempotency_key"].is_string(), "{operation}");
    ensure!(ended.each_ref().map(|(status, _)| *status) == [200, 409, 404], "{ended:?}");

    let recorded: Vec<(String, String, Value, Option<String>)> =
        sqlx::query_as("select name, status, output, message_id from operations order by ordinal")
            .fetch_all(&world.pool)
            .await?;
    let outcome = Some(outcomes[0].id.clone());
    ensure!(
        recorded
            == [
                ("mail".into(), "completed".into(), json!({ "sent": true }), outcome.clone()),
                ("search".into(), "completed".into(), json!(["r"]), outcome),
            ],
        "{recorded:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_a_cancelled_run_may_start_nothing_and_is_told_why_also_afterwards() -> Result<()> {
    let (saw, mut seen) = mpsc::unbounded_channel();
    let url = agent(move |asked: Asked| {
        let saw = saw.clone();
        async move {
            let _ = saw.send(asked);
            std::future::pending().await
        }
    })
    .await?;
    let (world, _consumer) = asked(&url, POLICY).await?;
    let asked = next(&mut seen).await?;
    ensure!(asked.start("search", "read", json!(1)).await?.0 == 201, "it runs");

    let turn: Uuid = asked.turn["turn_id"].as_str().context("no turn")?.parse()?;
    sqlx::query("select cancel_turn($1)").bind(turn).execute(&world.pool).await?;
    let (status, refusal) = asked.start("mail", "side_effect", json!(1)).await?;
    ensure!(status == 409, "{status} {refusal}");
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].error.as_ref().is_some_and(|error| error["kind"] == "cancelled"), "{outcomes:?}");
    let (status, refusal) = asked.start("mail", "side_effect", json!(1)).await?;
    ensure!(status == 409 && refusal["error"]["retryable"] == false, "{status} {refusal}");
    world.settled().await?;
    ensure!(world.count("select count(*) from operations where name = 'mail'").await? == 0);
    Ok(())
}

/// Tells when it is dropped, as an agent's work is when the connection to it is closed.
struct Dropped(Arc<Notify>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_too_slow_sees_its_connection_closed_at_the_deadline() -> Result<()> {
    let closed = Arc::new(Notify::new());
    let notify = closed.clone();
    let url = agent(move |asked: Asked| {
        let closed = Dropped(notify.clone());
        async move {
            if asked.turn["attempt"] == 1 {
                std::future::pending::<()>().await;
            }
            drop(closed);
            Ok(reply("in time"))
        }
    })
    .await?;
    let policy = format!("{POLICY}, turn_timeout = '500 ms'");
    let (world, _consumer) = asked(&url, &policy).await?;
    timeout(PATIENCE, closed.notified()).await?;
    let outcomes = world.answered("c1", 1).await?;
    ensure!(outcomes[0].content == "in time", "{outcomes:?}");
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_has_the_same_idempotency_key_in_every_attempt() -> Result<()> {
    let (saw, mut seen) = mpsc::unbounded_channel();
    let url = agent(move |asked: Asked| {
        let saw = saw.clone();
        async move {
            let mut keys = Vec::new();
            for input in [1, 1, 2] {
                let (_, operation) = asked.start("charge", "idempotent", json!(input)).await?;
                keys.push(operation["idempotency_key"].clone());
            }
            let _ = saw.send((asked.turn["run_id"].clone(), keys));
            if asked.turn["attempt"] == 1 {
                return Ok(StatusCode::SERVICE_UNAVAILABLE.into_response());
            }
            Ok(reply("charged"))
        }
    })
    .await?;
    let (world, _consumer) = asked(&url, POLICY).await?;
    ensure!(world.answered("c1", 1).await?[0].content == "charged");
    world.settled().await?;
    let (first, second) = (next(&mut seen).await?, next(&mut seen).await?);
    ensure!(first.0 != second.0, "two runs");
    ensure!(first.1 == second.1, "{first:?} {second:?}");
    ensure!(first.1[0] != first.1[1] && first.1[1] != first.1[2], "{first:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_gives_up_for_good_is_asked_once() -> Result<()> {
    let url = agent(async move |_: Asked| {
        let error = json!({ "error": { "message": "no such tool", "retryable": false } });
        Ok((StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response())
    })
    .await?;
    let (world, consumer) = asked(&url, POLICY).await?;
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    let error = outcomes[0].error.clone().unwrap_or_default();
    ensure!(error["kind"] == "handler" && error["attempts"] == 1, "{error}");
    ensure!(!outcomes[0].content.contains("no such tool"), "an agent's words are for operators");
    let kept: Value = sqlx::query_scalar("select error from agent_runs").fetch_one(&world.pool).await?;
    let message = kept["message"].as_str().unwrap_or_default();
    ensure!(message == "the agent answered 500 Internal Server Error: no such tool", "{kept}");
    ensure!(!consumer.log()?.contains("no such tool"), "and not for the log");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_its_agent_could_not_call_back_is_not_started() -> Result<()> {
    let world = World::new().await?;
    let consumer = world.consumer().env("SOURCE", "postgres").env("HANDLER", "http");
    let consumer = consumer.env("HANDLER_URL", "http://127.0.0.1:1/").env("ADMIN_ADDR", "0.0.0.0:0");
    let ended = consumer.output("").await?;
    ensure!(ended.code == Some(64) && ended.stderr.contains("OPERATIONS_URL"), "{ended:?}");
    Ok(())
}
