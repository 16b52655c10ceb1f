//! Content that cannot be stored: it is cleaned, or its turn fails visibly, at once, and nobody else's does.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use axum::{
    body::Body,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use consumer::{HandlerError, Reply, Turn, handler_fn};
use futures_util::StreamExt;
use serde_json::{Value, json};
use shared::settings::Source;
use tests::World;
use tokio::sync::Barrier;

use crate::outside::{Asked, Outside, reply};

const POLICY: &str = "debounce = '0', retry_backoff = '10 ms', max_attempts = 3";
const MEGABYTE: usize = 1024 * 1024;

async fn world(conversations: impl IntoIterator<Item = impl AsRef<str>>) -> Result<World> {
    let world = World::new().await?;
    world.policy(POLICY).await?;
    for conversation in conversations {
        world.create_conversation(conversation.as_ref()).await?;
    }
    Ok(world)
}

/// A turn was settled by its first run, and not by a second one.
async fn at_once(world: &World) -> Result<()> {
    world.settled().await?;
    let repeated: Vec<String> =
        sqlx::query_scalar("select conversation_id from agent_runs where attempt > 1")
            .fetch_all(&world.pool)
            .await?;
    ensure!(repeated.is_empty(), "tried again: {repeated:?}");
    Ok(())
}

/// Bodies that an agent answers 200 with, and what the user then sees: a reply, or (`None`) an error.
fn answers() -> Vec<(&'static str, Vec<u8>, Option<&'static str>)> {
    let said = |content: &str| json!({ "reply": { "content": content } }).to_string().into_bytes();
    let with = |name: &str, input: Value| {
        let operation = json!({ "name": name, "effect": "read", "input": input, "output": input });
        json!({ "reply": { "content": "yes" }, "operations": [operation] }).to_string().into_bytes()
    };
    vec![
        ("nul", said("a\0b"), Some("a\u{fffd}b")),
        ("large", said(&"x".repeat(2 * MEGABYTE)), None),
        ("huge", said(&"x".repeat(10 * MEGABYTE)), None),
        ("not-json", b"{\"reply\": {".to_vec(), None),
        ("not-utf-8", b"{\"reply\": {\"content\": \"\xff\xfe\"}}".to_vec(), None),
        ("lone-surrogate", br#"{"reply": {"content": "\ud800"}}"#.to_vec(), None),
        ("endless-number", b"{\"reply\": {\"content\": \"yes\"}, \"operations\": [1e400000]}".to_vec(), None),
        ("deep", [vec![b'['; 200_000], vec![b']'; 200_000]].concat(), None),
        ("nul-in-operation", with("to\u{20}ol", json!({ "k\0": ["a\0b"] })), Some("yes")),
        ("nul-in-name", with("to\0ol", json!(1)), None),
        ("nameless", with("", json!(1)), None),
        ("huge-operation", with("tool", json!("x".repeat(300 * 1024))), None),
        (
            "surrogate-in-operation",
            br#"{"reply": {"content": "yes"}, "operations": [{"name": "t", "effect": "read", "input": "\udc00"}]}"#
                .to_vec(),
            None,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_answers_is_cleaned_or_rejected_visibly_and_at_once() -> Result<()> {
    let cases = answers();
    let innocents = ["innocent-1", "innocent-2", "innocent-3"];
    let world = world(cases.iter().map(|case| case.0).chain(innocents)).await?;
    // All of them answer at the same time, so that their finishes share commits.
    let together = Arc::new(Barrier::new(cases.len() + innocents.len()));
    let bodies: Arc<Vec<_>> = Arc::new(cases.iter().map(|case| (case.0, case.1.clone())).collect());
    let outside = Outside::open(&world, move |asked: Asked| {
        let (together, bodies) = (together.clone(), bodies.clone());
        async move {
            together.wait().await;
            let of = asked.told("conversation_id")?;
            match bodies.iter().find(|(case, _)| *case == of) {
                Some((_, body)) => Ok(Response::new(Body::from(body.clone()))),
                None => Ok(reply("innocent")),
            }
        }
    })
    .await?;
    let _consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    for conversation in cases.iter().map(|case| case.0).chain(innocents) {
        world.submit(conversation, "hello").await?;
    }
    at_once(&world).await?;
    for (case, _, expected) in &cases {
        let said = world.outcomes(case).await?.pop().context("no outcome")?;
        let kind = said.error.as_ref().map(|error| error["kind"].clone());
        match expected {
            Some(content) => ensure!(said.content == *content, "{case}: {said:?}"),
            None => ensure!(kind == Some(json!("rejected_content")), "{case}: {kind:?}"),
        }
    }
    for innocent in innocents {
        ensure!(world.outcomes(innocent).await?[0].content == "innocent", "{innocent}");
    }
    let cleaned: Value = sqlx::query_scalar("select input from operations").fetch_one(&world.pool).await?;
    ensure!(cleaned == json!({ "k\u{fffd}": ["a\u{fffd}b"] }), "{cleaned}");
    outside.kept(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_postgres_refuses_fails_alone_and_the_rest_of_its_group_is_committed() -> Result<()> {
    const INNOCENTS: usize = 12;
    let innocents: Vec<String> = (0..INNOCENTS).map(|number| format!("innocent-{number}")).collect();
    let world = world(innocents.iter().map(String::as_str).chain(["refused"])).await?;
    // What every check before it has overlooked.
    sqlx::raw_sql("alter table messages add constraint lab check (content <> 'refused')")
        .execute(&world.pool)
        .await?;
    let together = Arc::new(Barrier::new(INNOCENTS + 1));
    let handler = handler_fn(move |turn: Turn| {
        let together = together.clone();
        async move {
            together.wait().await;
            let is_refused = turn.conversation_id.as_str() == "refused";
            Ok(Reply::new(if is_refused { "refused" } else { "innocent" }))
        }
    });
    let _consumer = world.local_consumer(world.consumer_settings(Source::Postgres), handler).await?;
    for conversation in innocents.iter().map(String::as_str).chain(["refused"]) {
        world.submit(conversation, "hello").await?;
    }
    at_once(&world).await?;
    let outcomes = world.outcomes("refused").await?;
    ensure!(
        outcomes[0].error.as_ref().is_some_and(|error| error["kind"] == "rejected_content"),
        "{outcomes:?}"
    );
    for innocent in &innocents {
        ensure!(world.outcomes(innocent).await?[0].content == "innocent", "{innocent}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_text_of_any_size_and_content_fails_its_turn_visibly_and_at_once() -> Result<()> {
    let world = world(["library", "http", "http-nul"]).await?;
    let text = format!("\0{}", "\u{1f600}\0".repeat(2 * MEGABYTE));
    let said = json!({ "error": { "message": &text[..20], "retryable": false } }).to_string();
    let outside = Outside::open(&world, move |asked: Asked| {
        let said = said.clone();
        async move {
            let body =
                if asked.told("conversation_id")? == "http-nul" { said } else { "\0x".repeat(5 * MEGABYTE) };
            Ok((StatusCode::BAD_REQUEST, body).into_response())
        }
    })
    .await?;
    let consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    for conversation in ["http", "http-nul"] {
        world.submit(conversation, "hello").await?;
        world.answered(conversation, 1).await?;
    }
    consumer.shut_down().await?;
    let handler = handler_fn(move |_: Turn| std::future::ready(Err(HandlerError::fatal(text.clone()))));
    let _local = world.local_consumer(world.consumer_settings(Source::Postgres), handler).await?;
    world.submit("library", "hello").await?;
    at_once(&world).await?;
    for conversation in ["library", "http", "http-nul"] {
        let outcomes = world.outcomes(conversation).await?;
        ensure!(outcomes[0].error.as_ref().is_some_and(|error| error["kind"] == "handler"), "{outcomes:?}");
    }
    let kept = world.count("select max(octet_length(error::text))::bigint from agent_runs").await?;
    ensure!((4000..20_000).contains(&kept), "{kept} bytes are kept of an error");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_cannot_be_stored_is_cleaned_or_refused_by_name_and_its_run_goes_on() -> Result<()>
{
    let world = world(["c1"]).await?;
    let call = |input: &str| format!(r#"{{"name": "t", "effect": "read", "input": {input}}}"#);
    let long = "x".repeat(300 * 1024);
    let bodies = vec![
        (call(r#"{"k\u0000": "a\u0000b"}"#), 201),
        (call("\"\\ud800\""), 422),
        (call("1e400000"), 422),
        (call("nonsense"), 422),
        (call(&format!("\"{long}\"")), 422),
        (call(&format!("\"{}\"", long.repeat(40))), 413),
        (call(&"[".repeat(100_000)), 422),
        (r#"{"name": "t\u0000", "effect": "read", "input": 1}"#.to_owned(), 422),
        (r#"{"name": "t", "effect": "harmless", "input": 1}"#.to_owned(), 422),
    ];
    let outside = Outside::open(&world, move |asked: Asked| {
        let (bodies, long) = (bodies.clone(), long.clone());
        async move {
            for (body, expected) in bodies {
                let (status, answer) = match asked.start_raw(body.clone()).await {
                    // A server that has refused a body reads no more of it.
                    Err(_broken) if expected == 413 => continue,
                    answered => answered?,
                };
                ensure!(status == expected, "{status} instead of {expected} for {body:.60}: {answer}");
            }
            let (_, operation) = asked.start("t", "read", json!(1)).await?;
            let outputs = [(json!({ "a\0": long }), 422), (json!({ "a\0": "b\0" }), 200)];
            for (output, expected) in outputs {
                let ended = json!({ "status": "completed", "output": output });
                let (status, answer) = asked.end(&operation["id"], ended).await?;
                ensure!(status == expected, "{status} instead of {expected}: {answer}");
            }
            Ok(reply("it goes on"))
        }
    })
    .await?;
    let _consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    world.submit("c1", "hello").await?;
    let outcomes = world.answered("c1", 1).await?;
    let why: Option<String> =
        sqlx::query_scalar("select error->>'message' from agent_runs order by attempt limit 1")
            .fetch_one(&world.pool)
            .await?;
    ensure!(outcomes[0].content == "it goes on", "{outcomes:?} {why:?}");
    at_once(&world).await?;
    let outputs: Vec<Option<Value>> =
        sqlx::query_scalar("select output from operations order by ordinal").fetch_all(&world.pool).await?;
    ensure!(outputs == [None, Some(json!({ "a\u{fffd}": "b\u{fffd}" }))], "{outputs:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_said_is_in_no_log_and_in_no_trigger() -> Result<()> {
    const SECRET: &str = "canary-5a1f0c";
    let cases = ["replied", "failed", "rejected", "misfit"];
    let world = world(cases).await?;
    let mut triggers = world.nats.subscribe(format!("{}.>", world.prefix)).await?;
    world.nats.flush().await?;
    let outside = Outside::open(&world, move |asked: Asked| async move {
        asked.act(SECRET, "idempotent", json!({ SECRET: SECRET })).await?;
        let _refused = asked.start_raw(format!(r#"{{"name": "{SECRET}", "effect": "{SECRET}"}}"#)).await?;
        let _refused = asked.start_raw(format!("{SECRET}{{")).await?;
        Ok(match asked.told("conversation_id")? {
            "replied" => reply(SECRET),
            "failed" => {
                let error = json!({ "error": { "message": SECRET, "retryable": true } });
                (StatusCode::BAD_REQUEST, error.to_string()).into_response()
            }
            "rejected" => reply(&SECRET.repeat(MEGABYTE / 8)),
            _ => format!(r#"{{"reply": {{"content": "{SECRET}" {SECRET}"#).into_response(),
        })
    })
    .await?;
    let relay = world.relay().env("RUST_LOG", "debug").start()?;
    let consumer = outside.asked_by(world.consumer()).env("RUST_LOG", "debug").start()?;
    for case in cases {
        world.submit(case, SECRET).await?;
    }
    world.quiet().await?;
    world.settled().await?;
    for process in [&relay, &consumer] {
        process.shut_down().await?;
        let log = process.log()?;
        ensure!(log.contains("DEBUG"), "{} logs too little for this to show anything", process.name());
        let found: Vec<&str> = log.lines().filter(|line| line.contains("canary")).collect();
        ensure!(found.is_empty(), "{}: {found:?}", process.name());
    }
    let runs = world.count("select count(*) from agent_runs").await?;
    ensure!(runs == 6, "{runs} runs");
    for _ in 0..runs {
        let trigger = triggers.next().await.context("no trigger")?;
        let text = format!("{} {:?} {:?}", trigger.subject, trigger.headers, trigger.payload);
        ensure!(text.contains("run_id") && !text.contains("canary"), "{text}");
    }
    let kept = world.count("select count(*) from messages where content like '%canary%'").await?;
    ensure!(kept == 5, "{kept} messages have the secret");
    Ok(())
}
